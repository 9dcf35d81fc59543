"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import rms_norm, silu

from mkb_env.problems.mlp_norm.common import some
from mkb_env.problems.mlp_norm.residual_rmsnorm_swiglu_mlp_hermes_bf16.problem import EPS, reference

INDEPENDENT = (
    "torch's rms_norm and transformers' LlamaMLP in float64 (64 tokens of large shapes); on the CPU also the reference "
    "against LlamaRMSNorm and LlamaMLP in bfloat16, bit for bit"
)


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against public modules; the reference's rounding points against the model's."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    width, hidden = inputs[5].shape
    with torch.device("meta"):
        mlp = LlamaMLP(LlamaConfig(hidden_size=width, intermediate_size=hidden, num_attention_heads=1))
        norm = LlamaRMSNorm(width, eps=EPS)

    def parameters(dtype: torch.dtype) -> None:
        names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
        weights = (weight.to(dtype) for weight in inputs[3:])
        mlp.load_state_dict(dict(zip(names, weights, strict=True)), assign=True)
        norm.load_state_dict({"weight": inputs[2].to(dtype)}, assign=True)

    added, kept = (tensor.flatten(0, 1) for tensor in inputs[:2])
    rows = some(len(added), 64, added.device)
    r = added[rows].double() + kept[rows].double()
    parameters(torch.float64)
    with torch.no_grad():
        want = r + mlp(rms_norm(r, (width,), norm.weight, EPS))
        torch.testing.assert_close(truth[0].flatten(0, 1)[rows], want, rtol=1e-9, atol=1e-11)
        if added.device.type == "cpu":
            parameters(torch.bfloat16)
            r = inputs[0] + inputs[1]
            assert torch.equal(reference(*inputs), r + mlp(norm(r))), "the reference rounds elsewhere than the model"


def _half(
    last: str = "r",
    eps: float = EPS,
    activation: Callable[[torch.Tensor], torch.Tensor] = silu,
    exchange: bool = False,
) -> Callable[..., torch.Tensor]:
    """The operation with bfloat16 operands and as few roundings as possible, or with one fault.

    Args:
        last: what the MLP's result is added to: ``r``, ``hidden``, ``residual`` or ``nothing``.
        eps: of the norm.
        activation: of the gate.
        exchange: whether the activation is applied to ``u`` in place of ``g``.
    """

    def function(
        hidden_states: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        w_gate, w_up, w_down = (weight.float() for weight in weights)
        added, kept = hidden_states.float(), residual.float()
        r = added + kept
        n = (r * torch.rsqrt(r.square().mean(-1, keepdim=True) + eps) * norm_weight.float()).bfloat16().float()
        g, u = n @ w_gate.T, n @ w_up.T
        m = (activation(u) * g if exchange else activation(g) * u).bfloat16().float()
        terms = {"r": r, "hidden": added, "residual": kept, "nothing": torch.zeros_like(r)}
        return (terms[last] + m @ w_down.T).bfloat16()

    return function


def _scaled_after(
    hidden_states: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, *weights: torch.Tensor
) -> torch.Tensor:
    """The row's factor follows the product, the weight is in its operand; down projection in four parts of F."""
    w_gate, w_up, w_down = (weight.float() for weight in weights)
    r = hidden_states + residual
    factor = torch.rsqrt(r.float().square().mean(-1, keepdim=True) + EPS)
    weighted = (r * norm_weight).float()
    g, u = (factor * (weighted @ w.T) for w in (w_gate, w_up))
    m = (silu(g) * u).bfloat16()
    parts = [a.float() @ w.T for a, w in zip(m.chunk(4, -1), w_down.chunk(4, 1), strict=True)]
    return (r.float() + sum(parts)).bfloat16()


WRONG = {
    "hidden_states alone in the last sum": _half(last="hidden"),
    "residual alone in the last sum": _half(last="residual"),
    "no last sum": _half(last="nothing"),
    "no epsilon": _half(eps=0.0),
    "epsilon 1e-6": _half(eps=1e-6),
    "gate and up exchanged": _half(exchange=True),
    "GELU for SiLU": _half(activation=torch.nn.functional.gelu),
    "no norm weight": lambda added, kept, norm, *weights: reference(added, kept, torch.ones_like(norm), *weights),
}
SECOND = {
    "sums and activations in float32": _half(),
    "the row's factor after the product, F in parts": _scaled_after,
}
