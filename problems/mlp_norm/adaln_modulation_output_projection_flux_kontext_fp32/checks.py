"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mkb_env.problems.mlp_norm.common import nearest_tf32

INDEPENDENT = "diffusers' AdaLayerNormContinuous and torch.nn.Linear in float64"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against the model's own modules with the inputs as their parameters."""
    from diffusers.models.normalization import AdaLayerNormContinuous

    x, temb, w_mod, b_mod, w_out, b_out = (tensor.double() for tensor in inputs)
    wide = x.shape[-1]
    with torch.device("meta"):
        norm = AdaLayerNormContinuous(wide, wide, elementwise_affine=False, eps=1e-6)
        projection = torch.nn.Linear(wide, len(b_out))
    norm.load_state_dict({"linear.weight": w_mod, "linear.bias": b_mod}, assign=True)
    projection.load_state_dict({"weight": w_out, "bias": b_out}, assign=True)
    with torch.no_grad():
        torch.testing.assert_close(truth[0], projection(norm(x, temb)), rtol=1e-9, atol=1e-11)


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _modulation(temb: torch.Tensor, w_mod: torch.Tensor, b_mod: torch.Tensor, product: Product) -> torch.Tensor:
    return product(temb / (1 + torch.exp(-temb)), w_mod.T) + b_mod


def _layer(
    x: torch.Tensor,
    temb: torch.Tensor,
    w_mod: torch.Tensor,
    b_mod: torch.Tensor,
    w_out: torch.Tensor,
    b_out: torch.Tensor,
    *,
    product: Product = torch.matmul,
    order: tuple[int, int] = (0, 1),
    one: float = 1.0,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Variance in one pass around the first channel, division by a square root."""
    halves = _modulation(temb, w_mod, b_mod, product).unsqueeze(1).chunk(2, dim=-1)
    scale, shift = halves[order[0]], halves[order[1]]
    shifted = x - x[..., :1]
    mu = shifted.mean(-1, keepdim=True)
    variance = (shifted.square().mean(-1, keepdim=True) - mu.square()).clamp_min(0)
    return product((shifted - mu) / torch.sqrt(variance + eps) * (one + scale) + shift, w_out.T) + b_out


def _folded(
    x: torch.Tensor,
    temb: torch.Tensor,
    w_mod: torch.Tensor,
    b_mod: torch.Tensor,
    w_out: torch.Tensor,
    b_out: torch.Tensor,
) -> torch.Tensor:
    """Norm and scale moved behind the product: r (x W - mean(x) sum(W)) + w_out shift + b_out, W per image."""
    scale, shift = _modulation(temb, w_mod, b_mod, torch.matmul).chunk(2, dim=-1)
    weights = w_out.T * (1 + scale).unsqueeze(-1)
    first = x[..., :1]
    mu = (x - first).mean(-1, keepdim=True)
    r = torch.rsqrt((x - first - mu).square().mean(-1, keepdim=True) + 1e-6)
    products = (x - first) @ weights - mu * weights.sum(1, keepdim=True)
    return r * products + (shift @ w_out.T + b_out).unsqueeze(1)


WRONG = {
    "shift first": lambda *inputs: _layer(*inputs, order=(1, 0)),
    "scale in place of 1 + scale": lambda *inputs: _layer(*inputs, one=0.0),
    "modulated by another image's condition": lambda x, temb, *weights: _layer(x, temb.roll(1, 0), *weights),
    "no bias of the modulation": lambda x, temb, w, b, *out: _layer(x, temb, w, torch.zeros_like(b), *out),
    "epsilon 1e-5": lambda *inputs: _layer(*inputs, eps=1e-5),
    "operands rounded to bfloat16": lambda *inputs: _layer(
        *inputs, product=lambda a, b: a.bfloat16().float() @ b.bfloat16().float()
    ),
}
SECOND = {
    "one-pass variance": _layer,
    "operands rounded to TF32": lambda *inputs: _layer(*inputs, product=lambda a, b: nearest_tf32(a) @ nearest_tf32(b)),
    "norm and scale applied after the projection": _folded,
}
