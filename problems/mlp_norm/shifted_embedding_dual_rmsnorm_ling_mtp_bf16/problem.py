"""Input of a multi-token-prediction layer (Ling-mini-2.0): next tokens' embeddings and hidden states, each normalised.

B sequences of S tokens, a vocabulary of V tokens, D channels.

Inputs, contiguous and row-major:
  input_ids      [B, S]     int64     token ids in [0, V)
  embedding      [V, D]     bfloat16  one row per token id
  hidden_states  [B, S, D]  bfloat16
  enorm_weight   [D]        bfloat16  norm weight of the embeddings
  hnorm_weight   [D]        bfloat16  norm weight of the hidden states

Output, contiguous and row-major:
  out            [B, S, 2 D]  bfloat16

Every position looks up the token that follows it in its own sequence; the last position of a sequence has none and
looks up token 0 (row 0 of the table, not a zero vector):
  id[b, s] = input_ids[b, s + 1]  for s < S - 1
  id[b, S - 1] = 0
  out[b, s, :D] = norm(embedding[id[b, s]], enorm_weight)
  out[b, s, D:] = norm(hidden_states[b, s], hnorm_weight)
where, for a row t of D channels and a weight w, in float32:
  norm(t, w) = bfloat16(w * bfloat16(t / sqrt(mean(t^2) + 1e-6)))

Numerics: the mean runs over the D channels and is accumulated in float32. The normalised row is rounded to bfloat16
before the weight is multiplied, and the product is rounded again; one rounding of the whole product is within the
tolerance. The 1e-6 counts: embeddings have a root mean square of about 0.02, and rows of either kind may be much
smaller still, or all zero (then that half of the output row is 0).

B, S and V are any positive numbers (with S = 1 every position looks up token 0); D is a multiple of 8. V D may exceed
2^31. The inputs are not changed; out is a new tensor.
"""

from __future__ import annotations

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import integers, normal, permutation
from mkb_env.problems.mlp_norm.common import llama_rms_norm

TITLE = "Embeddings shifted by one token beside hidden states, each with its own RMSNorm"
NUMBER = 42
MODEL = "Ling-mini-2.0"
INPUTS = ("input_ids", "embedding", "hidden_states", "enorm_weight", "hnorm_weight")
OUTPUTS = ("out",)
HOST_VISIBLE = ()
EPS = 1e-6
ZERO_ID, FAINT_ID = 5, 3
"""Rows of the table that are zero, or smaller than the rest, where a workload asks for such rows."""
WORKLOADS = {
    "full": {"B": 4, "S": 4096, "V": 157184, "D": 2048, "special_ids": 2, "special_tokens": 2},
    "small": {"B": 2, "S": 7, "V": 50, "D": 96, "special_ids": 1, "special_tokens": 1},
    "heldout": [
        {"B": 3, "S": 1, "V": 4000, "D": 2048},
        {"B": 2, "S": 1001, "V": 50304, "D": 4096, "special_ids": 3, "special_tokens": 3},
        {"B": 5, "S": 13, "V": 333, "D": 136, "special_ids": 2, "special_tokens": 1},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    batch, length, channels = shape["B"], shape["S"], shape["D"]
    weight = (channels,), torch.bfloat16
    return (
        ((batch, length), torch.int64),
        ((shape["V"], channels), torch.bfloat16),
        ((batch, length, channels), torch.bfloat16),
        weight,
        weight,
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["B"], shape["S"], 2 * shape["D"]), torch.bfloat16),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Uniform ids, embeddings of scale 0.02, standard normal hidden states, weights around 1, in ``INPUTS``' order.

    With ``special_ids`` = n, row 5 of the table is 0 and row 3 a hundredth as large as the others, and n random
    positions each (never a sequence's first, which nothing looks up) hold these ids. With ``special_tokens`` = n, n
    random hidden states are 0 and n are a thousandth as large as the others.
    """
    batch, length, vocabulary, channels = (shape[key] for key in ("B", "S", "V", "D"))
    input_ids = integers(generator, batch, length, high=vocabulary, dtype=torch.int64)
    embedding = normal(generator, vocabulary, channels, dtype=torch.bfloat16, scale=0.02)
    hidden = normal(generator, batch * length, channels)
    weights = [normal(generator, channels, dtype=torch.bfloat16, scale=0.1, mean=1.0) for _ in range(2)]
    if count := shape.get("special_ids", 0):
        places = permutation(generator, batch * (length - 1), dtype=torch.int64)[: 2 * count]
        rows, columns = places // (length - 1), places % (length - 1) + 1
        input_ids[rows[:count], columns[:count]] = ZERO_ID
        input_ids[rows[count:], columns[count:]] = FAINT_ID
        embedding[ZERO_ID] = 0.0
        embedding[FAINT_ID] *= 0.01
    if count := shape.get("special_tokens", 0):
        tokens = permutation(generator, batch * length)[: 2 * count]
        hidden[tokens[:count]] = 0.0
        hidden[tokens[count:]] *= 1e-3
    return input_ids, embedding, hidden.bfloat16().view(batch, length, channels), weights[0], weights[1]


def reference(
    input_ids: torch.Tensor,
    embedding: torch.Tensor,
    hidden_states: torch.Tensor,
    enorm_weight: torch.Tensor,
    hnorm_weight: torch.Tensor,
) -> torch.Tensor:
    """The module's formula; float64 inputs are computed in float64."""
    following = torch.zeros_like(input_ids)
    following[:, :-1] = input_ids[:, 1:]
    embedded = llama_rms_norm(embedding[following], enorm_weight, EPS)
    return torch.cat((embedded, llama_rms_norm(hidden_states, hnorm_weight, EPS)), dim=-1)


def COST(shape: Shape) -> Cost:
    """Ids that count, one table row for each of them and row 0, hidden states and output cross memory once."""
    batch, length, channels = shape["B"], shape["S"], shape["D"]
    tokens, followed = batch * length, batch * (length - 1)
    rows = min(followed + 1, shape["V"])
    return Cost(
        bytes=2 * channels * (rows + tokens + 2 * tokens + 2) + 8 * followed,
        flops=10 * tokens * channels,
        unit="fp32",
    )
