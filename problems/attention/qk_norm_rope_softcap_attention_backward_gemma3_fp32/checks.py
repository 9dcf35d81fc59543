"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mkb_env.problems.attention.common import tf32
from mkb_env.problems.attention.qk_norm_rope_softcap_attention_backward_gemma3_fp32 import problem
from mkb_env.problems.attention.variants import altered

INDEPENDENT = "autograd through torch's rms_norm, transformers' rotary embedding and a softmax, float64"
Tensors = tuple[torch.Tensor, ...]


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    scale: float,
    softcap: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp as the model's layer computes them, from heads repeated over their groups."""
    from transformers.models.gemma3.modeling_gemma3 import apply_rotary_pos_emb, repeat_kv

    rms_norm = torch.nn.functional.rms_norm
    heads = (rms_norm(x, x.shape[-1:], 1 + w, eps).transpose(1, 2) for x, w in ((q, q_weight), (k, k_weight)))
    query, key = apply_rotary_pos_emb(*heads, cos[None], sin[None])
    groups = q.shape[2] // k.shape[2]
    logits = torch.tanh(query @ repeat_kv(key, groups).transpose(2, 3) * scale / softcap) * softcap
    logits = logits + torch.full(logits.shape[-2:], -math.inf, dtype=q.dtype, device=q.device).triu(1)
    out = logits.softmax(dim=-1) @ repeat_kv(v.transpose(1, 2), groups)
    return out.transpose(1, 2), logits.logsumexp(dim=-1)


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """The saved tensors and the gradients against autograd.

    ``out`` and ``lse`` reach the anchor rounded to float32, so it agrees to about 1e-6; the same formula on the forward
    pass's own float64 results agrees to rounding. At tiny sizes autograd's forward is itself checked by differences.
    """
    wide: list[Any] = [x.double() if isinstance(x, torch.Tensor) else x for x in inputs]
    grad_out, q, k, v, out, lse, *rest = wide
    weights, others = rest[:2], rest[2:]
    with torch.enable_grad():
        leaves: Any = tuple(x.clone().requires_grad_() for x in (q, k, v, *weights))
        exact_out, exact_lse = _forward(*leaves, *others)
        want = torch.autograd.grad(exact_out, leaves, grad_out)
        if q.numel() <= 10_000:
            assert torch.autograd.gradcheck(lambda *x: _forward(*x, *others)[0], leaves, fast_mode=True)
    torch.testing.assert_close(out, exact_out.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, exact_lse.detach(), rtol=1e-5, atol=1e-5)
    exact = problem.reference(grad_out, q, k, v, exact_out.detach(), exact_lse.detach(), *rest)
    for name, ours, rounded, theirs in zip(problem.OUTPUTS, exact, truth, want, strict=True):
        scale = theirs.square().mean().sqrt().item()
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * scale, msg=f"{name} differs")
        torch.testing.assert_close(rounded, theirs, rtol=1e-4, atol=1e-4 * scale)


def _blocked(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    scale: float,
    softcap: float,
    eps: float,
    rounded: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    block: int = 128,
    fault: str = "",
) -> Tensors:
    """Query blocks against the keys that they see, head by head of the repeated keys; ``rounded`` rounds operands."""
    group = q.shape[2] // k.shape[2]
    query, q_unit, q_r = problem.rotated(q, q_weight, cos, sin, eps)
    key, k_unit, k_r = problem.rotated(k, k_weight, cos, sin, eps)
    queries, grads, outs = (x.transpose(1, 2) for x in (query, grad_out, out))
    keys, values = (rounded(x.transpose(1, 2).repeat_interleave(group, dim=1)) for x in (key, v))
    d_query, d_key, d_value = (torch.zeros_like(x) for x in (queries, keys, values))
    for begin in range(0, q.shape[1], block):
        rows = slice(begin, begin + block)
        end = min(begin + block, q.shape[1])
        head, grad = rounded(queries[:, :, rows]), rounded(grads[:, :, rows])
        seen, seen_values = keys[:, :, :end], values[:, :, :end]
        t = torch.tanh(head @ seen.mT * (scale / softcap))
        hidden = torch.ones(t.shape[-2:], dtype=torch.bool, device=q.device).triu(begin + (fault != "diagonal"))
        p = (softcap * t - lse[:, :, rows, None]).exp().masked_fill(hidden, 0.0)
        delta = (grads[:, :, rows] * outs[:, :, rows]).sum(-1, keepdim=True)
        slope = torch.ones_like(t) if fault == "softcap" else 1 - t * t
        ds = rounded(p * (grad @ seen_values.mT - (0 if fault == "delta" else delta)) * slope * scale)
        d_query[:, :, rows] = ds @ seen
        d_key[:, :, :end] += ds.mT @ head
        d_value[:, :, :end] += rounded(p).mT @ grad
    d_key, d_value = (x.unflatten(1, (-1, group)).sum(2) for x in (d_key, d_value))
    grad_q, grad_k = d_query.transpose(1, 2), d_key.transpose(1, 2)
    if fault == "rotation":
        sin = -sin
    found = [
        problem.through_norm(grad_q.contiguous(), q_unit, q_r, q_weight, cos, sin),
        problem.through_norm(grad_k.contiguous(), k_unit, k_r, k_weight, cos, sin),
    ]
    return found[0][0], found[1][0], d_value.transpose(1, 2).contiguous(), found[0][1], found[1][1]


WRONG = {
    "the softcap's derivative left out": partial(_blocked, fault="softcap"),
    "delta left out": partial(_blocked, fault="delta"),
    "a mask that hides the diagonal": partial(_blocked, fault="diagonal"),
    "the rotation not transposed": partial(_blocked, fault="rotation"),
    "norm weights w instead of 1 + w": altered(_blocked, lambda weight: weight - 1, 6, 7),
}
SECOND = {
    "blocks of queries, recomputed": _blocked,
    "operands rounded to TF32": partial(_blocked, rounded=tf32, block=64),
}
