"""Router of Ring-flash-2.0: gate product, sigmoid, choice of experts limited to the best groups, weights, histogram.

There are T tokens of H channels and E experts in n_group groups of E / n_group consecutive experts, at least two each
(the model has E = 256, k = 8; H = 4096 with 8 groups, of which 4 are kept).

Inputs, contiguous and row-major:
  x            [T, H]  bfloat16
  gate_w       [E, H]  bfloat16
  expert_bias  [E]     float32   takes part in the choice of experts only
  n_group      int
  topk_group   int               less than n_group
  top_k        int               k, less than the number of experts in topk_group groups
  scale        float

Outputs, a tuple in this order, contiguous and row-major:
  topk_idx     [T, k]  int32     chosen experts, best first
  topk_w       [T, k]  float32   their weights
  counts       [E]     int32     how many tokens chose each expert

For every token t, in float32:
  z = gate_w x[t];  s = sigmoid(z);  b = s + expert_bias
  score of a group = sum of the two largest b in it; keep the topk_group groups of the largest score
  topk_idx[t] = the k experts of the largest b among the experts of the kept groups, in descending order of b
  topk_w[t, j] = s_j / (sum of s over the k chosen experts + 1e-20) * scale          with s, not b

Numerics: z is the float32 sum of products of bfloat16 numbers and is not rounded to bfloat16. topk_idx and counts are
compared exactly.

Rules:
- Biased values b may be negative, also those of chosen experts: an expert outside the kept groups is never chosen.
- Two equal largest b in a group both count in its score.
- No tie decides, nor does float32 rounding: the last kept and first dropped group, and neighbours among the k + 1
  largest b of the kept groups, differ by at least 2e-5.
- The inputs are not changed; each output is a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, redraw
from mkb_env.problems.moe.common import best, gaps, group_scores, in_best_groups, large_normal

TITLE = "Router with a group limit: 8 of 256 experts, weights and histogram"
NUMBER = 49
MODEL = "Ring-flash-2.0"
INPUTS = ("x", "gate_w", "expert_bias", "n_group", "topk_group", "top_k", "scale")
OUTPUTS = ("topk_idx", "topk_w", "counts")
HOST_VISIBLE = ()
MARGIN = 2e-5
SIZES = {"H": 4096, "E": 256, "n_group": 8, "topk_group": 4, "k": 8, "scale": 2.5}
TINY = {"H": 64, "E": 32, "n_group": 4, "topk_group": 2, "k": 4, "scale": 2.5}
WORKLOADS = {
    "full": SIZES | {"T": 8192, "bias_mean": -0.9, "bias_std": 0.05},
    "small": TINY | {"T": 16, "bias_mean": -0.9, "bias_std": 0.05},
    "heldout": [
        SIZES | {"T": 1, "bias_mean": 0.0, "bias_std": 0.05},
        SIZES | {"T": 2049, "bias_mean": 0.0, "bias_std": 0.5},
        TINY | {"T": 29, "H": 72, "E": 30, "n_group": 5, "k": 3, "scale": 1.0, "bias_mean": -2.0, "bias_std": 0.5},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype, or value, of each of ``INPUTS``."""
    return (
        ((shape["T"], shape["H"]), torch.bfloat16),
        ((shape["E"], shape["H"]), torch.bfloat16),
        ((shape["E"],), torch.float32),
        *(shape[key] for key in ("n_group", "topk_group", "k", "scale")),
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    choices = shape["T"], shape["k"]
    return (choices, torch.int32), (choices, torch.float32), ((shape["E"],), torch.int32)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[Any, ...]:
    """Normal rows, weights of variance 1 / H and a normal bias, in ``INPUTS``' order.

    A token's row is drawn again while its groups, its experts or their order hang on less than ``MARGIN``.
    """
    hidden, experts, k = shape["H"], shape["E"], shape["k"]
    gate_w = large_normal(generator, experts, hidden, scale=hidden**-0.5)
    bias = normal(generator, experts, scale=shape["bias_std"], mean=shape["bias_mean"])

    def good(x: torch.Tensor) -> torch.Tensor:
        biased = (x.double() @ gate_w.double().T).sigmoid() + bias.double()
        groups = gaps(group_scores(biased, shape["n_group"]), shape["topk_group"])[:, -1]
        order = gaps(in_best_groups(biased, shape["n_group"], shape["topk_group"]), k).amin(dim=-1)
        return torch.minimum(groups, order) >= MARGIN

    x = redraw(lambda rows: large_normal(generator, rows, hidden, scale=1.0), good, shape["T"])
    return x, gate_w, bias, *(shape[key] for key in ("n_group", "topk_group", "k", "scale"))


def reference(
    x: torch.Tensor,
    gate_w: torch.Tensor,
    expert_bias: torch.Tensor,
    n_group: int,
    topk_group: int,
    top_k: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The module's formula; float64 inputs are computed in float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    s = (x.to(wide) @ gate_w.to(wide).T).sigmoid()
    chosen = best(in_best_groups(s + expert_bias, n_group, topk_group), top_k)
    w = s.gather(-1, chosen)
    w = w / (w.sum(dim=-1, keepdim=True) + 1e-20) * scale
    counts = chosen.flatten().bincount(minlength=len(gate_w))
    return chosen.int().contiguous(), w, counts.int()


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor | None:
    """``topk_w`` may err by 5e-5 of each weight.

    Tensor cores cut off what they add: in each of H / 16 = 256 steps z loses at most 2^-23 of itself, so 3e-5 |z| in
    all, and w errs by a share of that: up to 2.2e-5 was seen. A z rounded to bfloat16 is off by fifty times as much.
    """
    return 5e-5 * anchor.abs() if name == "topk_w" else None


def COST(shape: Shape) -> Cost:
    """Rows, router and outputs once; one multiply-add per token, expert and channel."""
    tokens, hidden, experts, k = (shape[key] for key in ("T", "H", "E", "k"))
    moved = 2 * hidden * (tokens + experts) + 8 * tokens * k + 8 * experts
    return Cost(bytes=moved, flops=2 * tokens * experts * hidden, unit="bf16")
