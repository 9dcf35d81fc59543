"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from mkb_env.problems.moe.common import split_tf32_product, tf32
from mkb_env.problems.moe.expert_parallel_execution_backward_mimo_fp32.problem import reference

INDEPENDENT = (
    "autograd through the forward pass and through transformers' MiMo-V2-Flash experts, float64, with gradcheck"
)


def _forward(
    x: torch.Tensor, r: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    linear = torch.nn.functional.linear
    return r.unsqueeze(1) * linear(torch.nn.functional.silu(linear(x, gate)) * linear(x, up), down)


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """All outputs of every expert; zeros where an expert has no rows."""
    x, offsets, row_weight, w_gate, w_up, w_down, grad_out = inputs
    for e, (begin, end) in enumerate(pairwise(offsets.tolist())):
        if begin == end:
            assert not any(bool(grad[e].any()) for grad in truth[2:]), f"expert {e} has no rows, but gradients"
            continue
        part = slice(begin, end)
        given = [x[part], row_weight[part], w_gate[e], w_up[e], w_down[e]]
        with torch.enable_grad():
            leaves = [tensor.double().requires_grad_() for tensor in given]
            grads = torch.autograd.grad(_forward(*leaves), leaves, grad_out[part].double())
        for got, want in zip((truth[0][part], truth[1][part], *(t[e] for t in truth[2:])), grads, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    if w_gate.numel() < 1 << 16:
        _small(inputs, truth)


def _small(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The forward pass is the model's own, and its derivatives are those of small differences."""
    from transformers.models.mimo_v2_flash.configuration_mimo_v2_flash import MiMoV2FlashConfig
    from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashExperts

    x, offsets, row_weight, w_gate, w_up, w_down, grad_out = inputs
    config = MiMoV2FlashConfig(hidden_size=x.shape[1], moe_intermediate_size=w_gate.shape[1])
    config.num_local_experts = len(w_gate)
    experts = MiMoV2FlashExperts(config).double().to(x.device)
    experts.load_state_dict({"gate_up_proj": torch.cat((w_gate, w_up), 1), "down_proj": w_down})
    expert = torch.searchsorted(offsets[1:].contiguous(), torch.arange(len(x), device=x.device), right=True)
    with torch.enable_grad():
        rows, r = (tensor.double().requires_grad_() for tensor in (x, row_weight))
        out = experts(rows, expert.unsqueeze(1), r.unsqueeze(1))
        both, down = experts.parameters()
        grads = torch.autograd.grad(out, (rows, r, both, down), grad_out.double())
    for got, want in zip((*truth[:2], torch.cat(tuple(truth[2:4]), 1), truth[4]), grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    with torch.enable_grad():
        given = (x[:2, :3], row_weight[:2], w_gate[0, :4, :3], w_up[0, :4, :3], w_down[0, :3, :4])
        assert torch.autograd.gradcheck(_forward, [tensor.double().requires_grad_() for tensor in given])


def _variant(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
    slope: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda g, s: s * (1 + g * (1 - s)),
    weighted: bool = True,
    first: int = 0,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The reference with another product, or one thing changed."""

    def run(x: torch.Tensor, offsets: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        row_weight, w_gate, w_up, w_down, grad_out = rest
        grad_x, grad_r = torch.empty_like(x), torch.empty_like(row_weight)
        grads = [torch.zeros_like(w) for w in (w_gate, w_up, w_down)]
        for e, (begin, end) in enumerate(pairwise(offsets.tolist())):
            rows, r, given = x[begin:end], row_weight[begin:end, None], grad_out[begin:end]
            g, u = product(rows, w_gate[e].T), product(rows, w_up[e].T)
            t = product(given * r, w_down[e])
            s = torch.sigmoid(g)
            h = g * s * u
            d_gate, d_up = t * u * slope(g, s), t * g * s
            grad_x[begin:end] = product(d_gate, w_gate[e]) + product(d_up, w_up[e])
            grad_r[begin:end] = (h * t).sum(-1) / r[:, 0] if weighted else (h * t).sum(-1)
            kept = slice(first, None)
            for grad, left, right in zip(grads, (d_gate, d_up, r * given), (rows, rows, h), strict=True):
                grad[e] = product(left[kept].T, right[kept])
        return grad_x, grad_r, *grads

    return run


def _six_bfloat16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Each operand as a sum of three bfloat16 numbers, without the three smallest products."""
    parts: list[list[torch.Tensor]] = [[], []]
    for rest, pieces in zip((a, b), parts, strict=True):
        for _ in range(3):
            pieces.append(rest.bfloat16().float())
            rest = rest - pieces[-1]
    pairs = [(i, j) for i in range(3) for j in range(3) if i + j < 3]
    products = [parts[0][i] @ parts[1][j] for i, j in sorted(pairs, key=sum, reverse=True)]
    return torch.stack(products).cumsum(0)[-1]


def _in_order(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Terms in plain order, 64 at a time."""
    total = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    for begin in range(0, a.shape[1], 64):
        total += a[:, begin : begin + 64] @ b[begin : begin + 64]
    return total


def _stale_gradients(x: torch.Tensor, offsets: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Weight gradients of experts without rows are those of the expert before."""
    *rows, grad_gate, grad_up, grad_down = reference(x, offsets, *rest)
    for e in (offsets.diff() == 0).nonzero().flatten().tolist():
        for grad in (grad_gate, grad_up, grad_down):
            grad[e] = grad[e - 1]
    return *rows, grad_gate, grad_up, grad_down


WRONG = {
    "products of TF32 operands": _variant(lambda a, b: tf32(a) @ tf32(b)),
    "the derivative of silu without its second term": _variant(slope=lambda g, s: s),
    "the gradient of the row weight still weighted": _variant(weighted=False),
    "weight gradients without an expert's first row": _variant(first=1),
    "gradients left over where an expert has no rows": _stale_gradients,
}
SECOND = {
    "three products of split TF32 operands": _variant(split_tf32_product),
    "six products of split bfloat16 operands": _variant(_six_bfloat16),
    "sums in plain order": _variant(_in_order),
}
