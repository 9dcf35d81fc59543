"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkb_env.problems.moe.common import best, choose_by_sorting, split_tf32_product, tf32
from mkb_env.problems.moe.sparse_expert_dispatch_combine_gptoss_fp32.problem import ALPHA, LIMIT, activation, route

INDEPENDENT = "token by token in float64 with routing in plain Python; transformers' gpt-oss block in float64"


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """The anchor for all tokens, of large shapes for eight."""
    x, router_w, router_b, w_gate_up, b_gate_up, w_down, b_down, k = inputs
    large = w_down.numel() > 1 << 20
    limited = 0
    for t in torch.randperm(len(x))[:8].tolist() if large else range(len(x)):
        row = x[t].double()
        logits = (router_w.double().mv(row) + router_b.double()).tolist()
        chosen = choose_by_sorting(logits, k)
        total = math.fsum(math.exp(logits[e] - logits[chosen[0]]) for e in chosen)
        want = torch.zeros_like(row)
        for e in chosen:
            pairs = (torch.einsum("h,hi->i", row, w_gate_up[e].double()) + b_gate_up[e].double()).view(-1, 2)
            limited += int((pairs.abs() > 7).sum())
            gate = torch.minimum(pairs[:, 0], torch.full_like(pairs[:, 0], 7))
            up = pairs[:, 1].clip(-7, 7)
            a = (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
            y = torch.einsum("i,ih->h", a, w_down[e].double()) + b_down[e].double()
            want += math.exp(logits[e] - logits[chosen[0]]) / total * y
        torch.testing.assert_close(truth[0][t], want, rtol=1e-9, atol=1e-11)
    assert limited, "no value reaches a limit"
    if not large:
        _transformers(inputs, truth[0])


def _transformers(inputs: Sequence[Any], truth: torch.Tensor) -> None:
    """The model's own block in float64."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    x, router_w, router_b, w_gate_up, b_gate_up, w_down, b_down, k = inputs
    config = GptOssConfig(
        hidden_size=x.shape[1],
        intermediate_size=w_down.shape[1],
        num_local_experts=len(w_down),
        num_experts_per_tok=k,
    )
    block = GptOssMLP(config).double().to(x.device)
    state = {
        "router.weight": router_w,
        "router.bias": router_b,
        "experts.gate_up_proj": w_gate_up,
        "experts.gate_up_proj_bias": b_gate_up,
        "experts.down_proj": w_down,
        "experts.down_proj_bias": b_down,
    }
    block.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(block(x.double().unsqueeze(0))[0][0], truth, rtol=1e-9, atol=1e-11)


def _variant(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
    inner: Callable[[torch.Tensor], torch.Tensor] = activation,
    routing: Callable[..., tuple[torch.Tensor, ...]] = route,
    weighted_bias: bool = True,
) -> Callable[..., torch.Tensor]:
    """Choice after choice, the tokens of each expert together, with another product or one thing changed."""

    def run(x: torch.Tensor, router_w: torch.Tensor, router_b: torch.Tensor, *rest: Any) -> torch.Tensor:
        w_gate_up, b_gate_up, w_down, b_down, k = rest
        chosen, weights = routing(x, router_w, router_b, k)
        out = torch.zeros_like(x)
        for e in range(len(w_down)):
            tokens, slots = (chosen == e).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            v = product(x[tokens], w_gate_up[e]) + b_gate_up[e]
            y, w = product(inner(v), w_down[e]), weights[tokens, slots, None]
            out[tokens] += w * (y + b_down[e]) if weighted_bias else w * y + b_down[e]
        return out

    return run


def _over_all(x: torch.Tensor, router_w: torch.Tensor, router_b: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    logits = x @ router_w.T + router_b
    chosen = best(logits, k)
    return chosen, logits.softmax(-1).gather(-1, chosen)


def _activation(v: torch.Tensor, highest: float = LIMIT, alpha: float = ALPHA, shift: float = 1.0) -> torch.Tensor:
    gate, up = v[..., 0::2].clamp(max=highest), v[..., 1::2].clamp(-LIMIT, LIMIT)
    return (up + shift) * gate * torch.sigmoid(alpha * gate)


def _up_unlimited(v: torch.Tensor) -> torch.Tensor:
    gate = v[..., 0::2].clamp(max=LIMIT)
    return (v[..., 1::2] + 1) * gate * torch.sigmoid(ALPHA * gate)


def _halves(v: torch.Tensor) -> torch.Tensor:
    """The first half of the columns taken for gates."""
    return activation(v.unflatten(-1, (2, -1)).mT.flatten(-2))


def _exponential(v: torch.Tensor) -> torch.Tensor:
    """The sigmoid by an exponential in base 2."""
    gate, up = (part.clamp(max=LIMIT) for part in v.unflatten(-1, (-1, 2)).unbind(-1))
    return (up.clamp(min=-LIMIT) + 1) * (gate / (1 + torch.exp2(gate * (-ALPHA * 1.4426950408889634))))


WRONG = {
    "products of TF32 operands": _variant(lambda a, b: tf32(a) @ tf32(b)),
    "gates in the first half of the columns": _variant(inner=_halves),
    "up not limited": _variant(inner=_up_unlimited),
    "gates not limited": _variant(inner=lambda v: _activation(v, highest=math.inf)),
    "silu in place of the steeper sigmoid": _variant(inner=lambda v: _activation(v, alpha=1.0)),
    "up without its 1": _variant(inner=lambda v: _activation(v, shift=0.0)),
    "weights normalised over all experts": _variant(routing=_over_all),
    "the bias of the down product not weighted": _variant(weighted_bias=False),
}
SECOND = {
    "three products of split TF32 operands": _variant(split_tf32_product),
    "sigmoid in base 2": _variant(inner=_exponential),
}
