"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import gelu, layer_norm, linear

from mkb_env.problems.mlp_norm.common import gelu_tanh_backward, nearest_tf32

INDEPENDENT = "autograd through the feed-forward and norm of transformers' AlbertLayer in float64, and gradcheck"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The formulas against autograd of the model's own modules."""
    from transformers import AlbertConfig
    from transformers.models.albert.modeling_albert import AlbertLayer

    grad_y, a, w1, b1, w2, b2, gamma = (tensor.double() for tensor in inputs)
    with torch.device("meta"):
        layer = AlbertLayer(AlbertConfig(hidden_size=len(b2), intermediate_size=len(b1), hidden_act="gelu_new"))
    parts = (layer.ffn, layer.ffn_output, layer.full_layer_layer_norm)
    for part, weight, bias in zip(parts, (w1, w2, gamma), (b1, b2, torch.zeros_like(b2)), strict=True):
        part.load_state_dict({"weight": weight, "bias": bias}, assign=True)
    leaf = a.clone().requires_grad_()
    leaves = [leaf, *(tensor for part in parts for tensor in (part.weight, part.bias))]
    with torch.enable_grad():
        y = layer.full_layer_layer_norm(layer.ff_chunk(leaf) + leaf)
        wanted = torch.autograd.grad(y, leaves, grad_y)
    for got, want in zip(truth, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10 * float(want.abs().max()))
    _check_forward()


def _check_forward() -> None:
    """Autograd of the same forward pass, against difference quotients at a tiny size."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 3), (4, 3), (4,), (3, 4), (3,), (3,))
    tiny = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in sizes]

    def forward(a: torch.Tensor, *p: torch.Tensor) -> torch.Tensor:
        return layer_norm(
            linear(gelu(linear(a, p[0], p[1]), approximate="tanh"), p[2], p[3]) + a, (3,), p[4], eps=1e-12
        )

    with torch.enable_grad():
        assert torch.autograd.gradcheck(forward, tiny)


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _gradients(
    grad_y: torch.Tensor,
    a: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
    gamma: torch.Tensor,
    *,
    product: Product = torch.matmul,
    residual: float = 1.0,
    mean: float = 1.0,
    along: float = 1.0,
    skip: float = 1.0,
    slope_of: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = gelu_tanh_backward,
) -> tuple[torch.Tensor, ...]:
    """Variance from one pass around the first channel, sums over rows in blocks; factors of terms to leave out."""
    rows, dy = a.flatten(0, 1), grad_y.flatten(0, 1)
    p, slope = slope_of(product(rows, w1.T) + b1)
    s = product(p, w2.T) + b2 + residual * rows
    shifted = s - s[:, :1]
    mu = shifted.mean(-1, keepdim=True)
    r = torch.rsqrt((shifted.square().mean(-1, keepdim=True) - mu.square()).clamp_min(0) + 1e-12)
    z, q = (shifted - mu) * r, dy * gamma
    ds = r * (q - mean * q.mean(-1, keepdim=True) - z * (along * (q * z).mean(-1, keepdim=True)))
    df = product(ds, w2) * slope
    sums = (torch.stack([part.sum(0) for part in t.split(64)]).sum(0) for t in (df, ds, dy * z, dy))
    grad_b1, grad_b2, grad_gamma, grad_beta = sums
    grad_a = (product(df, w1) + skip * ds).view(a.shape)
    return grad_a, product(df.T, rows), grad_b1, product(ds.T, p), grad_b2, grad_gamma, grad_beta


def _single_slope(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The derivative with 0.044715 in place of three times that."""
    p, _ = gelu_tanh_backward(h)
    factor = (2 / torch.pi) ** 0.5
    t = torch.tanh(factor * (h + 0.044715 * h**3))
    return p, 0.5 * (1 + t) + 0.5 * h * (1 - t.square()) * factor * (1 + 0.044715 * h.square())


WRONG = {
    "no second path to a": lambda *inputs: _gradients(*inputs, skip=0.0),
    "the residual left out of the norm's input": lambda *inputs: _gradients(*inputs, residual=0.0),
    "no mean of q": lambda *inputs: _gradients(*inputs, mean=0.0),
    "no projection along z": lambda *inputs: _gradients(*inputs, along=0.0),
    "gamma left out": lambda dy, a, w1, b1, w2, b2, gamma: _gradients(dy, a, w1, b1, w2, b2, torch.ones_like(gamma)),
    "0.044715 f^2 in the derivative, not three times that": lambda *inputs: _gradients(*inputs, slope_of=_single_slope),
    "operands rounded to bfloat16": lambda *inputs: _gradients(
        *inputs, product=lambda x, y: x.bfloat16().float() @ y.bfloat16().float()
    ),
}
SECOND = {
    "one-pass variance, sums in blocks": _gradients,
    "operands rounded to TF32": lambda *inputs: _gradients(
        *inputs, product=lambda x, y: nearest_tf32(x) @ nearest_tf32(y)
    ),
}
