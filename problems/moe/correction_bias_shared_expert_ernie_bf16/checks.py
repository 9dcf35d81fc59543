"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkb_env.problems.moe.common import best, choose_by_sorting, routed_swiglu, sum_of_experts, swiglu
from mkb_env.problems.moe.correction_bias_shared_expert_ernie_bf16.problem import route

INDEPENDENT = "token by token in float64 with routing in plain Python; transformers' ERNIE 4.5 MoE block"
COUNTED = (0.15, 1.0)  # the reference pads each batch of experts to the longest of them


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """The anchor for all tokens, of large shapes for six."""
    x, gate_w, bias, w_gate_up, w_down, shared_gate_up, shared_down, k = inputs
    large = w_down.numel() > 1 << 20
    tokens = torch.randperm(len(x))[:6].tolist() if large else range(len(x))

    def mlp(row: torch.Tensor, both: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = (both.double() @ row).view(2, -1)
        return down.double() @ (gate / (1 + torch.exp(-gate)) * up)

    for t in tokens:
        row = x[t].double()
        logits = (gate_w.double() * row).sum(1).tolist()
        total = math.fsum(math.exp(z) for z in logits)
        p = [math.exp(z) / total for z in logits]
        chosen = choose_by_sorting([q + b for q, b in zip(p, bias.double().tolist(), strict=True)], k)
        want = mlp(row, shared_gate_up, shared_down)
        for e in chosen:
            want += p[e] / max(sum(p[c] for c in chosen), 1e-12) * mlp(row, w_gate_up[e], w_down[e])
        torch.testing.assert_close(truth[0][t], want, rtol=1e-9, atol=1e-11)
    if not large:
        _transformers(inputs, truth[0])


def _transformers(inputs: Sequence[Any], truth: torch.Tensor) -> None:
    """The model's own block in float64, but for its router, which works in float32."""
    from transformers import Ernie4_5_MoeConfig
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeMLP, Ernie4_5_MoeSparseMoeBlock

    x, gate_w, bias, w_gate_up, w_down, shared_gate_up, shared_down, k = inputs
    config = Ernie4_5_MoeConfig(
        hidden_size=x.shape[1],
        moe_intermediate_size=w_down.shape[2],
        moe_num_experts=len(gate_w),
        moe_k=k,
        moe_num_shared_experts=1,
        use_bias=False,
    )
    block = Ernie4_5_MoeSparseMoeBlock(config)
    block.shared_experts = shared = Ernie4_5_MoeMLP(config, shared_down.shape[1])
    block.double().to(x.device)
    gate, up = shared_gate_up.double().chunk(2)
    values = {
        block.gate.weight: gate_w.double(),
        block.gate.moe_statics.e_score_correction_bias: bias.double().unsqueeze(0),
        block.experts.gate_up_proj: w_gate_up.double(),
        block.experts.down_proj: w_down.double(),
        shared.gate_proj.weight: gate,
        shared.up_proj.weight: up,
        shared.down_proj.weight: shared_down.double(),
    }
    for parameter, value in values.items():
        assert parameter.shape == value.shape
        parameter.data = value
    with torch.no_grad():
        torch.testing.assert_close(block(x.double().unsqueeze(0))[0], truth, rtol=1e-5, atol=1e-5)


def _variant(
    routing: Callable[..., tuple[torch.Tensor, ...]] = route,
    shared: float = 1.0,
    swap: bool = False,
) -> Callable[..., torch.Tensor]:
    """The reference with one thing changed."""

    def run(x: torch.Tensor, gate_w: torch.Tensor, bias: torch.Tensor, *rest: Any) -> torch.Tensor:
        w_gate_up, w_down, shared_gate_up, shared_down, k = rest
        if swap:
            w_gate_up = w_gate_up.unflatten(1, (2, -1)).flip(1).flatten(1, 2)
        chosen, weights = routing(x, gate_w, bias, k)
        routed = (routed_swiglu(x, chosen, w_gate_up, w_down).float() * weights.unsqueeze(-1)).sum(1)
        return (routed + shared * swiglu(x, shared_gate_up, shared_down).float()).bfloat16()

    return run


def _biased_weights(x: torch.Tensor, gate_w: torch.Tensor, bias: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    values = (x.float() @ gate_w.T).softmax(-1) + bias
    chosen = best(values, k)
    weights = values.gather(-1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True)


def _not_normalised(x: torch.Tensor, gate_w: torch.Tensor, bias: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    p = (x.float() @ gate_w.T).softmax(-1)
    chosen = best(p + bias, k)
    return chosen, p.gather(-1, chosen)


def _unbiased(x: torch.Tensor, gate_w: torch.Tensor, bias: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    return route(x, gate_w, torch.zeros_like(bias), k)


def _rounded_logits(x: torch.Tensor, gate_w: torch.Tensor, bias: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    p = (x.float() @ gate_w.T).bfloat16().float().softmax(-1)
    chosen = best(p + bias, k)
    weights = p.gather(-1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True)


def _rounded_weights(x: torch.Tensor, gate_w: torch.Tensor, bias: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    chosen, weights = route(x, gate_w, bias, k)
    return chosen, weights.bfloat16().float()


def _float32_inside(x: torch.Tensor, gate_w: torch.Tensor, bias: torch.Tensor, *rest: Any) -> torch.Tensor:
    """No rounding before the result; one expert after the other."""
    w_gate_up, w_down, shared_gate_up, shared_down, k = rest
    chosen, weights = route(x, gate_w, bias, k)
    rows = x.float()
    total = sum_of_experts(rows, chosen, weights, len(w_down), lambda e, r: swiglu(r, w_gate_up[e], w_down[e]))
    return (total + swiglu(rows, shared_gate_up, shared_down)).bfloat16()


WRONG = {
    "weights with the bias": _variant(_biased_weights),
    "weights not normalised": _variant(_not_normalised),
    "router logits rounded to bfloat16": _variant(_rounded_logits),
    "the choice without the bias": _variant(_unbiased),
    "gate and up rows swapped": _variant(swap=True),
    "no shared expert": _variant(shared=0.0),
}
SECOND = {
    "no rounding inside": _float32_inside,
    "weights rounded to bfloat16, as in the model's own code": _variant(_rounded_weights),
}
