"""Gradients of a token embedding followed by RMSNorm (the input of Jamba): of the table and of the norm's weight.

The forward pass was y[b, s] = e / sqrt(mean(e^2) + 1e-6) * weight with e = embedding[input_ids[b, s]]. B sequences of S
tokens, a vocabulary of V tokens, D channels. Token 0 is padding: its row of the table gets no gradient.

Inputs, contiguous and row-major:
  grad_y          [B, S, D]  bfloat16  gradient of y
  input_ids       [B, S]     int64     token ids in [0, V)
  embedding       [V, D]     bfloat16
  weight          [D]        bfloat16

Outputs, a tuple in this order, contiguous and row-major:
  grad_embedding  [V, D]     bfloat16
  grad_weight     [D]        bfloat16

For every token (b, s), with e = embedding[input_ids[b, s]], in float32 and with means over the D channels:
  r = 1 / sqrt(mean(e^2) + 1e-6)
  z[b, s] = e * r
  q = grad_y[b, s] * weight
  g[b, s] = bfloat16(r * (q - z[b, s] * mean(q * z[b, s])))
For every id v and channel d:
  grad_embedding[v] = bfloat16(sum of g[b, s] over all (b, s) with input_ids[b, s] = v)  for v > 0
  grad_embedding[0] = 0
  grad_weight[d] = bfloat16(sum over all (b, s) of grad_y[b, s, d] * z[b, s, d])

Numerics: inputs are widened to float32; means and both sums are accumulated in float32, in any order, and each sum is
rounded once, to nearest even. An id may occur hundreds of times: sums that are rounded to bfloat16 as they grow are not
accurate enough. Leaving out the rounding of g is within the tolerance.

Rules:
- Rows of ids that do not occur are exactly 0 and must be written, too.
- Only grad_embedding leaves out token 0; grad_weight takes all tokens.
- Rows of the table may be zero (then r = 1000 and z = 0) or much smaller than the others, so the 1e-6 matters.
- B, S and V are any positive numbers; D is a multiple of 8.
- The inputs are not changed; both outputs are new tensors.
"""

from __future__ import annotations

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import integers, normal, permutation
from mkb_env.problems.mlp_norm.common import rms_norm_backward

TITLE = "Backward of embedding + RMSNorm: gradients of the table and of the norm's weight"
NUMBER = 43
MODEL = "Jamba"
INPUTS = ("grad_y", "input_ids", "embedding", "weight")
OUTPUTS = ("grad_embedding", "grad_weight")
HOST_VISIBLE = ()
EPS = 1e-6
PADDING_ID, FAINT_ID, ZERO_ID = 0, 1, 2
WORKLOADS = {
    "full": {"B": 2, "S": 4096, "V": 65536, "D": 4096, "repeats": 1000, "special_rows": True},
    "small": {"B": 2, "S": 400, "V": 20, "D": 96, "repeats": 600, "special_rows": True},
    "heldout": [
        {"B": 1, "S": 1, "V": 300, "D": 1024, "values": 0},
        {"B": 3, "S": 777, "V": 1024, "D": 2560, "values": 5},
        {"B": 3, "S": 23, "V": 501, "D": 136, "repeats": 11, "special_rows": True},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    batch, length, channels = shape["B"], shape["S"], shape["D"]
    return (
        ((batch, length, channels), torch.bfloat16),
        ((batch, length), torch.int64),
        ((shape["V"], channels), torch.bfloat16),
        ((channels,), torch.bfloat16),
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return ((shape["V"], shape["D"]), torch.bfloat16), ((shape["D"],), torch.bfloat16)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal gradients, ids V u^3 for uniform u, embeddings of scale 0.02, a weight around 1.

    ``repeats``: so many random tokens have one random id instead. ``values``: all ids are from so many random ones, or
    padding if 0. ``special_rows``: row 1 of the table is a hundredth as large as the others, row 2 is 0.
    """
    batch, length, vocabulary, channels = (shape[key] for key in ("B", "S", "V", "D"))
    tokens = batch * length
    grad_y = normal(generator, batch, length, channels, dtype=torch.bfloat16)
    uniform = torch.rand(tokens, generator=generator, device=generator.device)
    ids = (vocabulary * uniform**3).long().clamp_max_(vocabulary - 1)
    embedding = normal(generator, vocabulary, channels, dtype=torch.bfloat16, scale=0.02)
    weight = normal(generator, channels, dtype=torch.bfloat16, scale=0.1, mean=1.0)
    if repeats := shape.get("repeats", 0):
        often = integers(generator, 1, low=ZERO_ID + 1, high=vocabulary, dtype=torch.int64)
        ids[permutation(generator, tokens)[:repeats]] = often
    if (values := shape.get("values")) is not None:
        chosen = permutation(generator, vocabulary - 1, dtype=torch.int64)[:values] + 1
        ids = chosen[integers(generator, tokens, high=values)] if values else torch.full_like(ids, PADDING_ID)
    if shape.get("special_rows"):
        embedding[FAINT_ID] *= 0.01
        embedding[ZERO_ID] = 0.0
    return grad_y, ids.view(batch, length), embedding, weight


def reference(
    grad_y: torch.Tensor, input_ids: torch.Tensor, embedding: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's formula; float64 inputs are computed in float64."""
    dtype, channels = embedding.dtype, embedding.shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    ids = input_ids.flatten()
    grad_rows, weight_terms = rms_norm_backward(
        grad_y.view(-1, channels).to(wide), embedding[ids].to(wide), weight.to(wide), EPS
    )
    table = torch.zeros(embedding.shape, dtype=wide, device=embedding.device)
    table.index_add_(0, ids, grad_rows.to(dtype).to(wide))
    table[PADDING_ID] = 0.0
    return table.to(dtype), weight_terms.sum(dim=0).to(dtype)


def COST(shape: Shape) -> Cost:
    """Gradients, ids, at most one table row per token and the table's gradient cross memory once."""
    tokens, vocabulary, channels = shape["B"] * shape["S"], shape["V"], shape["D"]
    rows = min(tokens, shape.get("values") or vocabulary)
    return Cost(
        bytes=2 * channels * (tokens + rows + vocabulary + 2) + 8 * tokens,
        flops=14 * tokens * channels,
        unit="fp32",
    )
