"""Backward pass of causal grouped-query attention with q/k RMSNorm, rotary embedding and a tanh softcap (Gemma 3).

There are B sequences of S positions, Hq query heads, Hkv key/value heads (Hq = G Hkv, query head h reads key/value head
h // G) and D channels per head, D even.

Inputs, contiguous and row-major:
  grad_out  [B, S, Hq, D]   float32  gradient of the attention's output
  q         [B, S, Hq, D]   float32  projected queries, before norm and rotation
  k         [B, S, Hkv, D]  float32  projected keys, before norm and rotation
  v         [B, S, Hkv, D]  float32  projected values
  out       [B, S, Hq, D]   float32  the forward pass's output, saved
  lse       [B, Hq, S]      float32  the forward pass's logsumexp of each row, natural logarithm, saved
  q_weight  [D]             float32  weight of the queries' norm, applied as 1 + q_weight
  k_weight  [D]             float32  weight of the keys' norm, applied as 1 + k_weight
  cos       [S, D]          float32  rotary cosines by position; channels i and i + D/2 have the same
  sin       [S, D]          float32  rotary sines, likewise
  scale     float                    factor of the dot products
  softcap   float                    c > 0 in c tanh(s / c)
  eps       float                    of both norms

Outputs, a tuple in this order, contiguous and row-major:
  grad_q         [B, S, Hq, D]   float32
  grad_k         [B, S, Hkv, D]  float32
  grad_v         [B, S, Hkv, D]  float32
  grad_q_weight  [D]             float32
  grad_k_weight  [D]             float32

R(x) turns half vectors: R(x)[:D/2] = -x[D/2:], R(x)[D/2:] = x[:D/2]. The forward pass, whose gradients are wanted:
  r = 1 / sqrt(mean(q^2) + eps) per head;  x = r q;  y = x (1 + q_weight);  Q = y cos + R(y) sin
  the same with k and k_weight gives K
  s_ij = scale dot(Q_i, K_j);  t_ij = tanh(s_ij / softcap);  z_ij = softcap t_ij;  key j is visible to query i if j <= i
  lse_i = log(sum over visible j of exp(z_ij));  p_ij = exp(z_ij - lse_i), 0 where invisible;  out_i = sum_j p_ij v_j

The backward pass, from the saved out and lse:
  delta_i = dot(grad_out_i, out_i);  ds_ij = p_ij (dot(grad_out_i, v_j) - delta_i) (1 - t_ij^2) scale
  dQ_i = sum_j ds_ij K_j;  dK_j = sum over the group's heads and over i of ds_ij Q_i
  grad_v_j = sum over the group's heads and over i of p_ij grad_out_i
  for queries, with u = dQ sin:
    dy = dQ cos + R'(u), where R'(u)[:D/2] = u[D/2:], R'(u)[D/2:] = -u[:D/2];  g = dy (1 + q_weight)
    grad_q = r (g - x mean(g x)), the mean over the D channels;  grad_q_weight = sum over b, position and head of dy x
  the same for keys with dK, k and k_weight gives grad_k and grad_k_weight

Numerics: everything is in float32 and accumulated in float32. Products of tensor cores with operands rounded to TF32
are within the tolerance, which follows each output's own root mean square.

Rules:
- G consecutive query heads share a key/value head. D and the head counts vary by workload.
- eps, scale and softcap are arguments and vary; S is any positive number.
- The inputs are not changed; every output is a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.attention.common import half_turn, inverse_rms, rotary_frequencies, tf32_allowance
from mkb_env.problems.contract import Allowance, Cost, Shape, Spec
from mkb_env.problems.drawing import normal, uniform

TITLE = "Backward of causal attention with q/k norm, rotary embedding and softcap"
NUMBER = 10
MODEL = "Gemma-3-4B"
INPUTS = ("grad_out", "q", "k", "v", "out", "lse", "q_weight", "k_weight", "cos", "sin", "scale", "softcap", "eps")
OUTPUTS = ("grad_q", "grad_k", "grad_v", "grad_q_weight", "grad_k_weight")
HOST_VISIBLE = ()
EPS, THETA = 1e-6, 1e6
WORKLOADS = {
    "full": {"B": 2, "S": 2048, "Hq": 8, "Hkv": 4, "D": 256, "scale": 0.0625, "softcap": 50.0, "factor": 8},
    "small": {"B": 1, "S": 24, "Hq": 4, "Hkv": 2, "D": 64, "scale": 0.125, "softcap": 50.0, "factor": 8},
    "heldout": [
        {"B": 1, "S": 1000, "Hq": 4, "Hkv": 1, "D": 256, "scale": 0.0625, "softcap": 20.0, "factor": 1},
        {"B": 2, "S": 333, "Hq": 32, "Hkv": 16, "D": 128, "scale": 168**-0.5, "softcap": 30.0, "factor": 8},
        {"B": 2, "S": 29, "Hq": 6, "Hkv": 2, "D": 64, "scale": 0.1, "softcap": 20.0, "factor": 1},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    batch, length, heads, kv_heads, dim = (shape[key] for key in ("B", "S", "Hq", "Hkv", "D"))
    query, key = ((batch, length, count, dim) for count in (heads, kv_heads))
    sizes = (query, query, key, key, query, (batch, heads, length), (dim,), (dim,), (length, dim), (length, dim))
    return *((size, torch.float32) for size in sizes), shape["scale"], shape["softcap"], EPS


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    _, query, key, value, _, _, q_weight, k_weight, *_ = input_specs(shape)
    return query, key, value, q_weight, k_weight


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor | float, ...]:
    """Standard normal gradients and projections, norm weights in [0.5, 1.5); the forward pass gives the rest."""
    grad_out, q, k, v = (normal(generator, *size) for size, _ in input_specs(shape)[:4])
    q_weight, k_weight = (uniform(generator, shape["D"], low=0.5, high=1.5) for _ in range(2))
    positions = torch.arange(shape["S"], device=generator.device, dtype=torch.float64) / shape["factor"]
    angles = torch.outer(positions, rotary_frequencies(shape["D"], THETA, generator.device)).repeat(1, 2)
    cos, sin, scale, softcap = angles.cos().float(), angles.sin().float(), shape["scale"], shape["softcap"]
    query, key = (rotated(x, w, cos, sin, EPS)[0] for x, w in ((q, q_weight), (k, k_weight)))
    capped = softcap * _tanh(query, key, scale / softcap)
    capped.masked_fill_(_invisible(shape["S"], generator.device), -torch.inf)
    lse = torch.logsumexp(capped, dim=-1)
    out = torch.einsum("bhgij,bjhd->bihgd", (capped - lse[..., None]).exp_(), v).reshape(q.shape).contiguous()
    return grad_out, q, k, v, out, lse.flatten(1, 2), q_weight, k_weight, cos, sin, scale, softcap, EPS


def rotated(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Heads [B, S, H, D] normalised, weighted and rotated; normalised only; and what they were multiplied by."""
    r = inverse_rms(x, eps)
    unit = x * r
    y = unit * (1 + weight)
    return y * cos[:, None] + half_turn(y) * sin[:, None], unit, r


def _tanh(query: torch.Tensor, key: torch.Tensor, factor: float) -> torch.Tensor:
    """tanh(factor Q K^T), [B, Hkv, G, S, S]."""
    return torch.einsum("bihgd,bjhd->bhgij", _grouped(query, key.shape[2]), key).mul_(factor).tanh_()


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    return x.unflatten(2, (kv_heads, -1))


def _invisible(length: int, device: torch.device) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)


def through_norm(
    grad: torch.Tensor,
    unit: torch.Tensor,
    r: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the gradient of the rotated heads to those of the projected heads and of the norm's weight."""
    dy = grad * cos[:, None] - half_turn(grad * sin[:, None])
    g = dy * (1 + weight)
    return r * (g - unit * (g * unit).mean(dim=-1, keepdim=True)), (dy * unit).sum(dim=(0, 1, 2))


def reference(
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
) -> tuple[torch.Tensor, ...]:
    """The module's backward formula on dense score tensors, in the inputs' type."""
    kv_heads = k.shape[2]
    query, q_unit, q_r = rotated(q, q_weight, cos, sin, eps)
    key, k_unit, k_r = rotated(k, k_weight, cos, sin, eps)
    t = _tanh(query, key, scale / softcap)
    p = (softcap * t).sub_(lse.unflatten(1, (kv_heads, -1))[..., None])
    p = p.masked_fill_(_invisible(q.shape[1], q.device), -torch.inf).exp_()
    grad = _grouped(grad_out, kv_heads)
    delta = (grad * _grouped(out, kv_heads)).sum(dim=-1).permute(0, 2, 3, 1)
    grad_v = torch.einsum("bhgij,bihgd->bjhd", p, grad)
    dz = torch.einsum("bihgd,bjhd->bhgij", grad, v).sub_(delta[..., None]).mul_(p)
    ds = t.square_().neg_().add_(1).mul_(dz).mul_(scale)
    d_query = torch.einsum("bhgij,bjhd->bihgd", ds, key).reshape(q.shape).contiguous()
    d_key = torch.einsum("bhgij,bihgd->bjhd", ds, _grouped(query, kv_heads)).contiguous()
    grad_q, grad_q_weight = through_norm(d_query, q_unit, q_r, q_weight, cos, sin)
    grad_k, grad_k_weight = through_norm(d_key, k_unit, k_r, k_weight, cos, sin)
    return grad_q, grad_k, grad_v.contiguous(), grad_q_weight, grad_k_weight


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> Allowance:
    """1e-2 of each output's own size for nearly all elements, which admits operands rounded to TF32."""
    return tf32_allowance(anchor)


def COST(shape: Shape) -> Cost:
    """Every tensor crosses memory once; five products over the visible pairs."""
    tensors = (*input_specs(shape), *output_specs(shape))
    elements = sum(torch.Size(spec[0]).numel() for spec in tensors if isinstance(spec, tuple))
    pairs = shape["B"] * shape["Hq"] * shape["S"] * (shape["S"] + 1) // 2
    return Cost(bytes=4 * elements, flops=5 * 2 * shape["D"] * pairs, unit="tf32")
