"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import conv2d, gelu

from mkb_env.problems.mlp_norm.common import nearest_tf32
from mkb_env.problems.mlp_norm.gelu_grn_mlp_convnextv2_fp32.problem import EPS

INDEPENDENT = "transformers' ConvNextV2GRN between 1 x 1 convolutions in float64 (4 images of large shapes)"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against the model's own normalisation, GELU by the normal distribution, convolutions on NCHW."""
    from transformers.models.convnextv2.modeling_convnextv2 import ConvNextV2GRN

    x, w1, b1, grn_w, grn_b, w2, b2 = (tensor.double() for tensor in inputs)
    images = [0, 1, len(x) // 2, len(x) - 1] if len(x) > 4 else list(range(len(x)))
    h = conv2d(x[images].permute(0, 3, 1, 2), w1[..., None, None], b1).permute(0, 2, 3, 1)
    grn = ConvNextV2GRN(len(b1)).to(x)
    grn.load_state_dict({"weight": grn_w.view(1, 1, 1, -1), "bias": grn_b.view(1, 1, 1, -1)})
    with torch.no_grad():
        g = grn(h * torch.special.ndtr(h))
    want = conv2d(g.permute(0, 3, 1, 2), w2[..., None, None], b2).permute(0, 2, 3, 1)
    torch.testing.assert_close(truth[0][images], want, rtol=1e-9, atol=1e-10)


Function = Callable[[torch.Tensor], torch.Tensor]
Normalise = Callable[[torch.Tensor], torch.Tensor]


def _exact(t: torch.Tensor) -> torch.Tensor:
    return t


def _normalised(a: torch.Tensor) -> torch.Tensor:
    """G over its mean, with G from two levels of partial sums: rows of an image, then the image."""
    response = a.square().sum(2).sum(1).sqrt()[:, None, None]
    return response / (response.sum(-1, keepdim=True) / a.shape[-1] + EPS)


def _mlp(
    normalise: Normalise = _normalised, rounded: Function = _exact, skip: bool = True
) -> Callable[..., torch.Tensor]:
    """The MLP with another normalisation, with rounded operands, or without the sum's last term."""

    def function(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        grn_w, grn_b, w2, b2 = others
        a = gelu(rounded(x) @ rounded(w1).T + b1)
        g = a * (grn_w * normalise(a) + (1.0 if skip else 0.0)) + grn_b
        return rounded(g) @ rounded(w2).T + b2

    return function


def _recomputed(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Two passes over the first product, tiles of 64 hidden channels, offset folded into the second bias."""
    grn_w, grn_b, w2, b2 = others

    def activation(channels: slice) -> torch.Tensor:
        return gelu(nearest_tf32(x) @ nearest_tf32(w1[channels]).T + b1[channels])

    tiles = [slice(begin, begin + 64) for begin in range(0, len(b1), 64)]
    response = torch.cat([activation(t).square().sum((1, 2)) for t in tiles], -1).sqrt()
    factor = 1 + grn_w * response / (response.mean(-1, keepdim=True) + EPS)
    y = torch.zeros_like(x)
    for t in tiles:
        g = activation(t) * factor[:, None, None, t]
        y += nearest_tf32(g) @ nearest_tf32(w2[:, t]).T
    return y + (w2 @ grn_b + b2)


def _by(response: torch.Tensor) -> torch.Tensor:
    return response / (response.mean(-1, keepdim=True) + EPS)


def _without_epsilon(a: torch.Tensor) -> torch.Tensor:
    response = a.square().sum((1, 2), keepdim=True).sqrt()
    return response / response.mean(-1, keepdim=True)


WRONG = {
    "response of the whole batch": _mlp(lambda a: _by(a.square().sum((0, 1, 2), keepdim=True).sqrt())),
    "response of a row of pixels": _mlp(lambda a: _by(a.square().sum(2, keepdim=True).sqrt())),
    "response without the square root": _mlp(lambda a: _by(a.square().sum((1, 2), keepdim=True))),
    "response over the root mean square of the channels": _mlp(
        lambda a: (r := a.square().sum((1, 2), keepdim=True).sqrt()) / (r.square().mean(-1, keepdim=True).sqrt() + EPS)
    ),
    "no epsilon": _mlp(_without_epsilon),
    "without + a": _mlp(skip=False),
    "bfloat16 operands": _mlp(rounded=lambda t: t.bfloat16().float()),
    "the first bias left out": lambda x, w1, b1, *others: _mlp()(x, w1, torch.zeros_like(b1), *others),
}
SECOND = {
    "partial sums by rows of pixels": _mlp(),
    "TF32 operands": _mlp(rounded=nearest_tf32),
    "the first product twice, in tiles, TF32 operands": _recomputed,
}
