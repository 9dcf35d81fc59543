"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mkb_env.problems.mlp_norm.swiglu_mlp_backward_hermes_bf16.problem import reference

INDEPENDENT = (
    "autograd through transformers' LlamaMLP in float64; central differences on a tiny one; on the CPU also the "
    "reference against autograd in bfloat16, bit for bit"
)


def _autograd(inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    grad_out, x, *weights = (tensor.to(dtype) for tensor in inputs)
    width, hidden = weights[2].shape
    with torch.device("meta"):
        mlp = LlamaMLP(LlamaConfig(hidden_size=width, intermediate_size=hidden, num_attention_heads=1))
    names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    mlp.load_state_dict(dict(zip(names, weights, strict=True)), assign=True)
    parameters = [mlp.get_parameter(name).requires_grad_() for name in names]
    with torch.enable_grad():
        x = x.requires_grad_()
        return list(torch.autograd.grad(mlp(x), [x, *parameters], grad_out))


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against autograd; the formulas against differences; the rounding points against the model's."""
    for found, want in zip(truth, _autograd(inputs, torch.float64), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
    generator = torch.Generator().manual_seed(1)
    sizes = ((2, 3), (2, 3), (5, 3), (5, 3), (3, 5))
    tiny = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    for position, gradient in enumerate(reference(*tiny)):
        torch.testing.assert_close(gradient, _differences(tiny, position), rtol=1e-6, atol=1e-8)
    if inputs[0].device.type == "cpu":
        for found, want in zip(reference(*inputs), _autograd(inputs, torch.bfloat16), strict=True):
            assert torch.equal(found, want), "the reference rounds elsewhere than autograd"


def _differences(tiny: Sequence[torch.Tensor], position: int) -> torch.Tensor:
    """Central differences of sum(grad_out * y) by each element of x or of a weight."""
    grad_out, *arguments = tiny
    gradient = torch.empty_like(arguments[position])
    for place in range(gradient.numel()):
        values = []
        for step in (1e-5, -1e-5):
            moved = [argument.clone() for argument in arguments]
            moved[position].view(-1)[place] += step
            x, w_gate, w_up, w_down = moved
            g = x @ w_gate.T
            values.append((grad_out * ((g / (1 + torch.exp(-g)) * (x @ w_up.T)) @ w_down.T)).sum())
        gradient.view(-1)[place] = (values[0] - values[1]) / 2e-5
    return gradient


Slope = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _slope(g: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return s * (1 + g * (1 - s))


def _backward(
    slope: Slope = _slope, parts: int = 1, tokens: int | None = None
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The gradients with one rounding before each product, sums over tokens in parts.

    Args:
        slope: the derivative of SiLU, of g and sigmoid(g).
        parts: how many partial sums the weights' gradients have.
        tokens: how many tokens they sum over; all of them for None.
    """

    def function(grad_out: torch.Tensor, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w_gate, w_up, w_down = (weight.float() for weight in weights)
        grad_out, x = grad_out.float(), x.float()
        g, u, dh = x @ w_gate.T, x @ w_up.T, grad_out @ w_down
        s = torch.sigmoid(g)
        h, du = (g * s * u).bfloat16(), (dh * g * s).bfloat16()
        dg = (dh * u * slope(g, s)).bfloat16()

        def over_tokens(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            pairs = zip(left[:tokens].float().chunk(parts), right[:tokens].float().chunk(parts), strict=True)
            return torch.stack([a.T @ b for a, b in pairs]).sum(0).bfloat16()

        grad_x = (dg.float() @ w_gate + du.float() @ w_up).bfloat16()
        return grad_x, over_tokens(dg, x), over_tokens(du, x), over_tokens(grad_out, h)

    return function


def _exchanged(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    grad_x, grad_w_gate, grad_w_up, grad_w_down = reference(*inputs)
    return grad_x, grad_w_up, grad_w_gate, grad_w_down


def _gate_only(grad_out: torch.Tensor, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """grad_x without the up projection's share: u is given, not a function of x."""
    w_gate, w_up, w_down = weights
    g, u = x.float() @ w_gate.float().T, x.float() @ w_up.float().T
    dg = (grad_out.float() @ w_down.float() * u * _slope(g, torch.sigmoid(g))).bfloat16()
    return dg @ w_gate, *reference(grad_out, x, *weights)[1:]


WRONG = {
    "sigmoid in place of SiLU's slope": _backward(lambda g, s: s),
    "the sigmoid's slope in place of SiLU's": _backward(lambda g, s: s * (1 - s)),
    "SiLU's slope with 1 - g (1 - s)": _backward(lambda g, s: s * (1 - g * (1 - s))),
    "the last token left out of the weights' gradients": _backward(tokens=-1),
    "gradients of gate and up exchanged": _exchanged,
    "grad_x through the gate alone": _gate_only,
}
SECOND = {
    "one rounding before each product": _backward(),
    "sums over tokens in two parts": _backward(parts=2),
}
