"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkb_env.problems.moe.common import best, choose_by_sorting, sum_of_experts
from mkb_env.problems.moe.grouped_routing_block_scale_deepseek_fp8.problem import (
    BLOCK,
    route,
    widen_hidden,
    widen_weight,
)

INDEPENDENT = "token by token with a table of the 256 codes, float64; transformers' DeepSeek-V3 router and experts"

COUNTED = (0.3, 3.0)  # COST takes the expected number of local rows; with a dozen tokens the drawn one varies


def _table() -> torch.Tensor:
    """What each e4m3fn code stands for: 1 sign, 4 exponent (bias 7), 3 mantissa bits; 0x7f and 0xff are NaN."""
    values = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        values.append(math.nan if code & 127 == 127 else -size if code & 128 else size)
    return torch.tensor(values, dtype=torch.float64)


def _dense(codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    spread = scales.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return table[codes.view(torch.uint8).int()] * spread


def _choice(scores: list[float], bias: list[float], n_group: int, topk_group: int, k: int) -> list[int]:
    size = len(scores) // n_group
    biased = [score + b for score, b in zip(scores, bias, strict=True)]
    sums = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(n_group)]
    kept = choose_by_sorting(sums, topk_group)
    return choose_by_sorting([b if e // size in kept else -math.inf for e, b in enumerate(biased)], k)


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """The anchor for all tokens, of large shapes for a few with local experts and one without."""
    logits, bias, hidden, hidden_scale, w1, s1, w2, s2, offset, scaling, n_group, topk_group, k = inputs
    table = _table().to(hidden.device)
    tokens: list[int] = list(range(len(logits)))
    if w1.numel() > 1 << 20:
        has = truth[0].ne(0).any(dim=1)
        tokens = has.nonzero()[:4].flatten().tolist() + (~has).nonzero()[:1].flatten().tolist()
    for t in tokens:
        scores = [1 / (1 + math.exp(-z)) for z in logits[t].tolist()]
        chosen = _choice(scores, bias.tolist(), n_group, topk_group, k)
        x = table[hidden[t].view(torch.uint8).int()] * hidden_scale[:, t].double().repeat_interleave(BLOCK)
        want = torch.zeros_like(x)
        for expert in chosen:
            if offset <= expert < offset + len(w1):
                up, gate = (_dense(w1[expert - offset], s1[expert - offset], table) @ x).chunk(2)
                y = _dense(w2[expert - offset], s2[expert - offset], table) @ (up * gate * torch.sigmoid(gate))
                want += scaling * scores[expert] / sum(scores[e] for e in chosen) * y
        torch.testing.assert_close(truth[0][t], want, rtol=1e-9, atol=1e-11)
    if len(tokens) == len(logits) > 1:
        _transformers(inputs, truth[0], table)


def _transformers(inputs: Sequence[Any], truth: torch.Tensor, table: torch.Tensor) -> None:
    """The library's router (float32) on an identity matrix, and its experts with those of other ranks zero."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts, DeepseekV3TopkRouter

    logits, bias, hidden, hidden_scale, w1, s1, w2, s2, offset, scaling, n_group, topk_group, k = inputs
    config = DeepseekV3Config(
        hidden_size=logits.shape[1],
        moe_intermediate_size=w2.shape[2],
        n_routed_experts=logits.shape[1],
        num_experts_per_tok=k,
        n_group=n_group,
        topk_group=topk_group,
        routed_scaling_factor=scaling,
        norm_topk_prob=True,
    )
    router = DeepseekV3TopkRouter(config).to(logits.device)
    router.weight.data = torch.eye(logits.shape[1], device=logits.device)
    router.e_score_correction_bias.data = bias.float()
    config.hidden_size = hidden.shape[1]
    experts = DeepseekV3Experts(config).double().to(logits.device)
    for parameter in experts.parameters():
        parameter.data.zero_()
    for e in range(len(w1)):
        up, gate = _dense(w1[e], s1[e], table).chunk(2)
        experts.gate_up_proj.data[offset + e] = torch.cat((gate, up))
        experts.down_proj.data[offset + e] = _dense(w2[e], s2[e], table)
    x = table[hidden.view(torch.uint8).int()] * hidden_scale.T.double().repeat_interleave(BLOCK, 1)
    with torch.no_grad():
        _, weights, chosen = router(logits)
        torch.testing.assert_close(experts(x, chosen, weights.double()), truth, rtol=1e-5, atol=1e-5)


def _variant(
    routing: Callable[..., Any] = route,
    hidden: Callable[..., torch.Tensor] = widen_hidden,
    swap: bool = False,
    inner: Callable[[torch.Tensor], torch.Tensor] = lambda h: h,
    product: Callable[..., torch.Tensor] = lambda x, w, s: x @ widen_weight(w, s, torch.float32).T,
) -> Callable[..., torch.Tensor]:
    """The reference with some of its pieces replaced."""

    def run(logits: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, x_scale: torch.Tensor, *rest: Any) -> Any:
        w1, s1, w2, s2, offset, *how = rest

        def mlp(e: int, rows: torch.Tensor) -> torch.Tensor:
            up, gate = product(rows, w1[e], s1[e]).chunk(2, dim=-1)
            up, gate = (gate, up) if swap else (up, gate)
            return product(inner(torch.nn.functional.silu(gate) * up), w2[e], s2[e])

        chosen, weights = routing(logits, bias, *how)
        rows = hidden(x, x_scale, torch.float32)
        return sum_of_experts(rows, chosen - offset, weights, len(w1), mlp).bfloat16()

    return run


def _biased_weights(logits: torch.Tensor, bias: torch.Tensor, scaling: float, *how: int) -> tuple[torch.Tensor, ...]:
    chosen, _ = route(logits, bias, scaling, *how)
    weights = (logits.sigmoid() + bias.float()).gather(-1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) * scaling


def _no_groups(logits: torch.Tensor, bias: torch.Tensor, scaling: float, *how: int) -> tuple[torch.Tensor, ...]:
    chosen = best(logits.sigmoid() + bias.float(), how[-1])
    weights = logits.sigmoid().gather(-1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) * scaling


def _by_block(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Operands of 8 significant bits, each product of 128 terms scaled in float32 before it is added."""
    blocks = x.bfloat16().float().unflatten(1, (-1, BLOCK)).transpose(0, 1)
    parts = blocks @ w.float().unflatten(1, (-1, BLOCK)).permute(1, 2, 0)
    return (parts * s.T.repeat_interleave(BLOCK, 1).unsqueeze(1)).sum(0)


WRONG = {
    "gate rows taken for up rows": _variant(swap=True),
    "weights with the bias": _variant(_biased_weights),
    "no limit on groups": _variant(_no_groups),
    "activation scales read as [T, H / 128]": _variant(hidden=lambda x, s, d: widen_hidden(x, s.view(s.T.shape).T, d)),
    "h rounded to 8 bits": _variant(inner=lambda h: h.to(torch.float8_e4m3fn).float()),
}
SECOND = {
    "h rounded to bfloat16": _variant(inner=lambda h: h.bfloat16().float()),
    "bfloat16 operands, scales applied to partial sums of 128": _variant(product=_by_block),
}
