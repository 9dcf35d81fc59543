"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mkb_env.problems.mlp_norm.common import gelu_tanh_backward, nearest_tf32

INDEPENDENT = "autograd through diffusers' FeedForward(gelu-approximate) in float64, and gradcheck of its activation"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The formulas against autograd of the model's own module."""
    from diffusers.models.attention import FeedForward

    grad_y, x, w1, b1, w2 = (tensor.double() for tensor in inputs)
    with torch.device("meta"):
        module = FeedForward(x.shape[1], inner_dim=len(b1), activation_fn="gelu-approximate")
    names = ("net.0.proj.weight", "net.0.proj.bias", "net.2.weight", "net.2.bias")
    weights = dict(zip(names, (w1, b1, w2, torch.zeros_like(x[0])), strict=True))
    module.load_state_dict(weights, assign=True)
    leaf = x.clone().requires_grad_()
    with torch.enable_grad():
        leaves = [leaf, *(module.get_parameter(name) for name in names)]
        wanted = torch.autograd.grad(module(leaf), leaves, grad_y)
    for got, want in zip(truth, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10 * float(want.abs().max()))
    points = torch.linspace(-6, 6, 49, dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        assert torch.autograd.gradcheck(lambda f: torch.nn.functional.gelu(f, approximate="tanh"), points)


def _exponential(f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """GELU as f times a logistic function g of 2 u, and its derivative g + 2 f g (1 - g) u'."""
    factor = (2 / torch.pi) ** 0.5
    g = torch.sigmoid(2 * factor * (f + 0.044715 * f**3))
    return f * g, g + 2 * f * g * (1 - g) * factor * (1 + 0.134145 * f.square())


def _unsafe(f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The hyperbolic tangent as a quotient of exponentials: infinity over infinity where f is large."""
    factor = (2 / torch.pi) ** 0.5
    power = torch.exp(2 * factor * (f + 0.044715 * f**3))
    t = (power - 1) / (power + 1)
    return 0.5 * f * (1 + t), 0.5 * (1 + t) + 0.5 * f * (1 - t.square()) * factor * (1 + 0.134145 * f.square())


def _value_as_slope(f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The derivative without its second term."""
    p, _ = gelu_tanh_backward(f)
    return p, 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (f + 0.044715 * f**3)))


def _gradients(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    *,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
    activation: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = _exponential,
) -> tuple[torch.Tensor, ...]:
    """Sums over rows in blocks of 64, products with rows as the inner axis in blocks, too."""
    p, slope = activation(product(x, w1.T) + b1)
    df = product(grad_y, w2) * slope
    bias_gradients = (torch.stack([part.sum(0) for part in t.split(64)]).sum(0) for t in (df, grad_y))
    grad_b1, grad_b2 = bias_gradients
    half = (len(x) + 1) // 2
    grad_w1 = product(df[:half].T, x[:half]) + product(df[half:].T, x[half:])
    return product(df, w1), grad_w1, grad_b1, product(grad_y.T, p), grad_b2


WRONG = {
    "the derivative without its second term": lambda *inputs: _gradients(*inputs, activation=_value_as_slope),
    "tanh that overflows": lambda *inputs: _gradients(*inputs, activation=_unsafe),
    "no b1": lambda dy, x, w1, b1, w2: _gradients(dy, x, w1, torch.zeros_like(b1), w2),
    "the last row left out of the weights' gradients": lambda *inputs: (
        _gradients(*inputs)[0],
        *_gradients(inputs[0][:-1], inputs[1][:-1], *inputs[2:])[1:],
    ),
    "operands rounded to bfloat16": lambda *inputs: _gradients(
        *inputs, product=lambda a, b: a.bfloat16().float() @ b.bfloat16().float()
    ),
}
SECOND = {
    "a logistic function for tanh, rows in blocks": _gradients,
    "operands rounded to TF32": lambda *inputs: _gradients(
        *inputs, product=lambda a, b: nearest_tf32(a) @ nearest_tf32(b)
    ),
}
