"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import gelu, silu

from mkb_env.problems.mlp_norm.common import nearest_tf32, some

INDEPENDENT = "transformers' LlamaMLP in float64 (64 frames of large shapes), and one element by hand with math.fsum"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against a public gated MLP, and against Python's exp and sums."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    x, w_gate, w_up, w_down = (tensor.double() for tensor in inputs)
    hidden, width = w_gate.shape
    config = LlamaConfig(hidden_size=width, intermediate_size=hidden, num_attention_heads=1, hidden_act="silu")
    with torch.device("meta"):
        mlp = LlamaMLP(config)
    names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    mlp.load_state_dict(dict(zip(names, (w_gate, w_up, w_down), strict=True)), assign=True)
    frames, results = x.flatten(0, 1), truth[0].flatten(0, 1)
    rows = some(len(frames), 64, x.device)
    with torch.no_grad():
        torch.testing.assert_close(results[rows], mlp(frames[rows]), rtol=1e-9, atol=1e-11)
    row = int(x.flatten(0, 1).abs().amax(1).argmin())
    column = int(rows[0]) % width
    gates, ups = ((weight @ frames[row]).tolist() for weight in (w_gate, w_up))
    terms = zip(gates, ups, w_down[column].tolist(), strict=True)
    by_hand = math.fsum(g / (1 + math.exp(-g)) * u * w for g, u, w in terms)
    assert math.isclose(float(results[row, column]), by_hand, rel_tol=1e-9, abs_tol=1e-10)


Function = Callable[[torch.Tensor], torch.Tensor]


def _gated(activation: Function, rounded: Function) -> Callable[..., torch.Tensor]:
    """The MLP with another activation and with rounded operands."""

    def function(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor) -> torch.Tensor:
        x = rounded(x)
        a = activation(x @ rounded(w_gate).T) * (x @ rounded(w_up).T)
        return rounded(a) @ rounded(w_down).T

    return function


def _exact(x: torch.Tensor) -> torch.Tensor:
    return x


def _by_division(g: torch.Tensor) -> torch.Tensor:
    return g / (1 + torch.exp(-g))


def _overflowing(g: torch.Tensor) -> torch.Tensor:
    return g * torch.exp(g) / (1 + torch.exp(g))


def _joined(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor) -> torch.Tensor:
    """One product with both first weights, the last one in four parts of F, TF32 operands."""
    both = nearest_tf32(x) @ nearest_tf32(torch.cat((w_gate, w_up))).T
    g, u = both.chunk(2, -1)
    parts = zip(nearest_tf32(silu(g) * u).chunk(4, -1), nearest_tf32(w_down).chunk(4, 1), strict=True)
    return torch.stack([a @ w.T for a, w in parts]).sum(0)


_plain = _gated(_by_division, _exact)
WRONG = {
    "gate and up exchanged": lambda x, w_gate, w_up, w_down: _plain(x, w_up, w_gate, w_down),
    "bfloat16 operands": _gated(_by_division, lambda t: t.bfloat16().float()),
    "a sigmoid whose exponential overflows": _gated(_overflowing, _exact),
    "sigmoid for SiLU": _gated(torch.sigmoid, _exact),
    "GELU for SiLU": _gated(gelu, _exact),
    "the hidden width's last four left out": lambda x, w_gate, w_up, w_down: _plain(
        x, w_gate[:-4], w_up[:-4], w_down[:, :-4]
    ),
}
SECOND = {
    "SiLU by division": _plain,
    "TF32 operands": _gated(silu, nearest_tf32),
    "one product for gate and up, F in parts, TF32 operands": _joined,
}
