"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkb_env.problems.moe.common import best, choose_by_sorting, routed_swiglu, sum_of_experts, swiglu
from mkb_env.problems.moe.top10_shared_gate_qwen3next_bf16.problem import route

INDEPENDENT = "token by token in float64 with routing in plain Python; transformers' Qwen3-Next MoE block"
COUNTED = (0.15, 1.0)  # the reference pads each batch of experts to the longest of them


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """The anchor for all tokens, of large shapes for eight."""
    x, gate_w, w_gate_up, w_down, shared_gate_up, shared_down, shared_gate, k = inputs
    large = w_down.numel() > 1 << 20
    for t in torch.randperm(len(x))[:8].tolist() if large else range(len(x)):
        row = x[t].double()
        logits = (gate_w.double() * row).sum(1).tolist()
        chosen = choose_by_sorting(logits, k)
        p = [math.exp(logits[e] - max(logits)) for e in chosen]
        gate = 1 / (1 + math.exp(-float(shared_gate[0].double().dot(row))))
        weighted = [(gate, shared_gate_up, shared_down)]
        weighted += [(q / math.fsum(p), w_gate_up[e], w_down[e]) for e, q in zip(chosen, p, strict=True)]
        want = torch.zeros_like(row)
        for weight, both, down in weighted:
            g, u = both.double().mv(row).tensor_split(2)
            want += weight * down.double().mv(g * torch.sigmoid(g) * u)
        torch.testing.assert_close(truth[0][t], want, rtol=1e-9, atol=1e-11)
    if not large:
        _transformers(inputs, truth[0])


def _transformers(inputs: Sequence[Any], truth: torch.Tensor) -> None:
    """The model's own block in float64, but for the softmax of its router, which works in float32."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

    x, gate_w, w_gate_up, w_down, shared_gate_up, shared_down, shared_gate, k = inputs
    config = Qwen3NextConfig(
        hidden_size=x.shape[1],
        moe_intermediate_size=w_down.shape[2],
        shared_expert_intermediate_size=shared_down.shape[1],
        num_experts=len(gate_w),
        num_experts_per_tok=k,
        norm_topk_prob=True,
    )
    block = Qwen3NextSparseMoeBlock(config).double().to(x.device)
    gate, up = shared_gate_up.chunk(2)
    state = {
        "gate.weight": gate_w,
        "experts.gate_up_proj": w_gate_up,
        "experts.down_proj": w_down,
        "shared_expert.gate_proj.weight": gate,
        "shared_expert.up_proj.weight": up,
        "shared_expert.down_proj.weight": shared_down,
        "shared_expert_gate.weight": shared_gate,
    }
    block.load_state_dict(state)
    with torch.no_grad():
        size = truth.abs().amax(dim=1, keepdim=True)
        got = block(x.double().unsqueeze(0))[0]
    torch.testing.assert_close(got / size, truth / size, rtol=1e-5, atol=1e-5)


def _variant(
    routing: Callable[..., tuple[torch.Tensor, torch.Tensor]] = route,
    shared_factor: Callable[[torch.Tensor], torch.Tensor] = torch.sigmoid,
    swap: bool = False,
) -> Callable[..., torch.Tensor]:
    """The reference with one thing changed."""

    def run(x: torch.Tensor, gate_w: torch.Tensor, w_gate_up: torch.Tensor, *rest: Any) -> torch.Tensor:
        w_down, shared_gate_up, shared_down, shared_gate, k = rest
        if swap:
            w_gate_up = torch.cat(w_gate_up.chunk(2, dim=1)[::-1], dim=1)
        chosen, weights = routing(x, gate_w, k)
        y = routed_swiglu(x, chosen, w_gate_up, w_down).float()
        c = shared_factor(x.float() @ shared_gate.float().T)
        return (torch.einsum("tk,tkh->th", weights, y) + c * swiglu(x, shared_gate_up, shared_down).float()).bfloat16()

    return run


def _over_all(x: torch.Tensor, gate_w: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = x.float() @ gate_w.float().T
    chosen = best(logits, k)
    return chosen, logits.softmax(-1).gather(-1, chosen)


def _plain_exp(x: torch.Tensor, gate_w: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = x.float() @ gate_w.float().T
    chosen = best(logits, k)
    e = logits.gather(-1, chosen).exp()
    return chosen, e / e.sum(-1, keepdim=True)


def _one_fewer(x: torch.Tensor, gate_w: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return route(x, gate_w, k - 1)


def _shuffled(x: torch.Tensor, gate_w: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights in the order of the experts, choices in the order of the logits."""
    chosen, weights = route(x, gate_w, k)
    return chosen, weights.gather(-1, chosen.argsort(-1))


def _float32_inside(x: torch.Tensor, gate_w: torch.Tensor, w_gate_up: torch.Tensor, *rest: Any) -> torch.Tensor:
    """No rounding before the result; one expert after the other."""
    w_down, shared_gate_up, shared_down, shared_gate, k = rest
    chosen, weights = route(x, gate_w, k)
    rows = x.float()
    total = sum_of_experts(rows, chosen, weights, len(w_down), lambda e, r: swiglu(r, w_gate_up[e], w_down[e]))
    c = torch.sigmoid((rows * shared_gate.float()).sum(-1, keepdim=True))
    return (total + c * swiglu(rows, shared_gate_up, shared_down)).bfloat16()


WRONG = {
    "weights normalised over all experts": _variant(_over_all),
    "softmax without the maximum subtracted": _variant(_plain_exp),
    "the last choice left out": _variant(_one_fewer),
    "weights in another order than the choices": _variant(_shuffled),
    "gate and up rows swapped": _variant(swap=True),
    "the shared expert without its gate": _variant(shared_factor=torch.ones_like),
}
SECOND = {
    "no rounding inside": _float32_inside,
    "the shared gate rounded to bfloat16": _variant(shared_factor=lambda z: z.sigmoid().bfloat16().float()),
}
