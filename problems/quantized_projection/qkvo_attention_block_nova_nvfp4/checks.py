"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkb_env.problems.quantized_projection import common, oracle

INDEPENDENT = "torch.nn.MultiheadAttention in float64, sequence by sequence, all tensors by exhaustive e2m1 tables"


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against torch's own module, for at most 64 queries of every sequence."""
    x, w_qkv, w_o = (oracle.fp4(*inputs[first : first + 3]) for first in (0, 3, 7))
    oracle.check_fp4(x.device)
    attention = torch.nn.MultiheadAttention(x.shape[-1], inputs[-1], batch_first=True, device=x.device).double()
    state = {"in_proj_weight": w_qkv, "in_proj_bias": inputs[6], "out_proj.weight": w_o, "out_proj.bias": inputs[10]}
    attention.load_state_dict({name: value.double() for name, value in state.items()})
    for sequence, tokens in enumerate(x):
        queries = oracle.sample(len(tokens), 64, x.device)
        with torch.no_grad():
            want, _ = attention(tokens[queries], tokens, tokens, need_weights=False)
        torch.testing.assert_close(truth[0][sequence, queries], want, rtol=1e-9, atol=1e-10)


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of the reference's form; ``q`` holds the scale."""
    return (q @ k.transpose(-1, -2)).softmax(dim=-1).bfloat16().float() @ v


def _online(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """64 keys at a time, unnormalised probabilities rounded to bfloat16, as a kernel does it."""
    total, sums = torch.zeros_like(q), torch.zeros_like(q[..., :1])
    largest = torch.full_like(sums, -torch.inf)
    for keys, values in zip(k.split(64, -2), v.split(64, -2), strict=True):
        logits = q @ keys.transpose(-1, -2)
        now = torch.maximum(largest, logits.amax(-1, keepdim=True))
        p, keep = torch.exp(logits - now), torch.exp(largest - now)
        sums, total = sums * keep + p.sum(-1, keepdim=True), total * keep + p.bfloat16().float() @ values
        largest = now
    return total / sums


def _padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A fault: the last tile of 64 keys is filled up with copies of the last key."""
    index = torch.arange(k.shape[2] + -k.shape[2] % 64, device=k.device).clamp_max(k.shape[2] - 1)
    return _softmax(q, k[:, :, index], v[:, :, index])


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


def _variant(
    attend: Attend = _softmax,
    linear: Callable[..., torch.Tensor] = common.fp4_linear,
    grouped: bool = True,
    late_bias: bool = True,
    whole: bool = False,
) -> Callable[..., torch.Tensor]:
    """The block in float32; ``grouped``: all of q, then k, then v; ``whole``: the scale is that of all channels."""

    def run(*inputs: Any) -> torch.Tensor:
        heads, b_qkv, b_o = inputs[-1], inputs[6].float(), inputs[10].float()
        x = common.fp4_values(inputs[0], inputs[1], torch.float32)
        factor = inputs[2] * inputs[5]
        qkv = linear(x, *inputs[3:5], factor) + (b_qkv if late_bias else b_qkv * factor)
        order = (3, heads, -1) if grouped else (heads, 3, -1)
        parts = qkv.bfloat16().float().unflatten(-1, order).movedim(-3 if grouped else -2, 0).transpose(2, 3)
        q, k, v = parts
        scale = x.shape[-1] ** -0.5 if whole else q.shape[-1] ** -0.5
        a = attend(q * scale, k, v).bfloat16().float().transpose(1, 2).flatten(2)
        return (linear(a, *inputs[7:10]) + b_o).bfloat16()

    return run


WRONG = {
    "high nibble first": _variant(linear=oracle.fp4_nibbles_swapped),
    "one scale for 32 elements": _variant(linear=oracle.fp4_scale_of_pair),
    "q, k and v head by head": _variant(grouped=False),
    "the factors applied to the bias, too": _variant(late_bias=False),
    "logits scaled by all channels": _variant(whole=True),
    "the last tile of keys filled up with the last key": _variant(_padded),
    "a causal mask": _variant(_causal),
    "the last key missed": _variant(lambda q, k, v: _softmax(q, k[..., :-1, :], v[..., :-1, :])),
}
SECOND = {
    "online softmax over 64 keys": _variant(_online),
    "four partial sums": _variant(_online, linear=oracle.fp4_linear_split),
}
