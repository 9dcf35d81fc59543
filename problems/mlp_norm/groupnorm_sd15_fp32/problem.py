"""GroupNorm with 32 groups on NCHW feature maps (residual blocks of the Stable Diffusion 1.5 UNet).

There are B images with C channels of H x W pixels; group j consists of the C / 32 channels from j C / 32 on.

Inputs, contiguous and row-major:
  x       [B, C, H, W]  float32
  weight  [C]           float32
  bias    [C]           float32

Output, contiguous and row-major:
  y       [B, C, H, W]  float32

For every image and group, over the n = (C / 32) H W elements x of the group:
  mu = mean(x)
  var = mean((x - mu)^2)
  y = (x - mu) / sqrt(var + 1e-5) * weight[c] + bias[c]     for the elements of channel c

Numerics: everything is float32. A group's mean may be a thousand times its standard deviation: the variance is that
around the mean, which mean(x^2) - mu^2 in float32 does not give. A group may be all zero (then y is bias[c]), or so
quiet that the 1e-5 matters.

Rules:
- There is no activation.
- C is a multiple of 32; B, H and W are any positive numbers, so rows need not begin at multiples of 16 bytes.
- The inputs are not changed; y is a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import group_norm

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, permutation

TITLE = "GroupNorm with 32 groups, NCHW"
NUMBER = 31
MODEL = "Stable Diffusion 1.5"
INPUTS = ("x", "weight", "bias")
OUTPUTS = ("y",)
HOST_VISIBLE = ()
GROUPS = 32
EPS = 1e-5
EDGES = {"zero_groups": 1, "offset_groups": 2, "quiet_groups": 1}
WORKLOADS = {
    "full": {"B": 32, "C": 320, "H": 64, "W": 64, **EDGES},
    "small": {"B": 2, "C": 64, "H": 4, "W": 4, **EDGES},
    "heldout": [
        {"B": 2, "C": 1280, "H": 8, "W": 8},
        {"B": 3, "C": 640, "H": 33, "W": 17, **EDGES},
        {"B": 1, "C": 96, "H": 5, "W": 7, **EDGES},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    channels = shape["C"]
    sizes = ((shape["B"], channels, shape["H"], shape["W"]), (channels,), (channels,))
    return tuple((size, torch.float32) for size in sizes)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return (((shape["B"], shape["C"], shape["H"], shape["W"]), torch.float32),)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Standard normal pixels plus an offset 2 N(0, 1) per channel, in ``INPUTS``' order.

    Groups of images at random places are instead: ``zero_groups`` all zero, ``offset_groups`` of mean 100 and standard
    deviation 0.1, ``quiet_groups`` of mean 0 and standard deviation 0.01.
    """
    batch, channels = shape["B"], shape["C"]
    noise = normal(generator, batch, channels, shape["H"], shape["W"])
    offset = normal(generator, channels, 1, 1, scale=2.0)
    weight = normal(generator, channels, scale=0.1, mean=1.0)
    bias = normal(generator, channels, scale=0.1)
    counts = [shape.get(key, 0) for key in EDGES]
    special = permutation(generator, batch * GROUPS)[: sum(counts)].split(counts)
    x = noise + offset
    groups, plain = (tensor.view(batch * GROUPS, -1) for tensor in (x, noise))
    for chosen, mean, deviation in zip(special, (0.0, 100.0, 0.0), (0.0, 0.1, 0.01), strict=True):
        groups[chosen] = mean + deviation * plain[chosen]
    return x, weight, bias


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The module's formula; float64 inputs are computed in float64."""
    return group_norm(x, GROUPS, weight, bias, EPS)


def allowance(name: str, inputs: Sequence[Any], reference: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Allowed absolute error: 1e-5 (1 + |y|), or 1e-6 |mu| / sqrt(var + 1e-5) of the element's group if that is more.

    The second is 16 roundings of the mean: 1e-3 where the mean is a thousand standard deviations, nothing elsewhere.
    """
    groups = inputs[0].double().view(anchor.shape[0], GROUPS, -1)
    var, mean = torch.var_mean(groups, dim=-1, correction=0, keepdim=True)
    ill = (1e-6 * mean.abs() / torch.sqrt(var + EPS)).expand_as(groups).reshape(anchor.shape)
    return torch.maximum(1e-5 * (1 + anchor.abs()), ill)


def COST(shape: Shape) -> Cost:
    """Input and output cross memory once; seven operations per element."""
    elements = shape["B"] * shape["C"] * shape["H"] * shape["W"]
    return Cost(bytes=8 * elements + 8 * shape["C"], flops=7 * elements, unit="fp32")
