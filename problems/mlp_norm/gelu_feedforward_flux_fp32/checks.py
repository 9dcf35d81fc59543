"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from mkb_env.problems.mlp_norm.common import nearest_tf32, some

INDEPENDENT = "diffusers' FeedForward in float64 (64 tokens of large shapes), and one element by hand with math.fsum"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against the module of the model's own blocks, and against Python's tanh and sums."""
    from diffusers.models.attention import FeedForward

    x, w1, b1, w2, b2 = (tensor.double() for tensor in inputs)
    with torch.device("meta"):
        module = FeedForward(x.shape[-1], inner_dim=len(b1), activation_fn="gelu-approximate")
    names = ("net.0.proj.weight", "net.0.proj.bias", "net.2.weight", "net.2.bias")
    module.load_state_dict(dict(zip(names, (w1, b1, w2, b2), strict=True)), assign=True)
    tokens, results = x.flatten(0, 1), truth[0].flatten(0, 1)
    rows = some(len(tokens), 64, x.device)
    with torch.no_grad():
        torch.testing.assert_close(results[rows], module(tokens[rows]), rtol=1e-9, atol=1e-11)
    row, column = int(rows[0]), int(rows[-1]) % len(b2)
    h = (w1 @ tokens[row] + b1).tolist()
    a = [v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in h]
    by_hand = math.fsum(p * w for p, w in zip(a, w2[column].tolist(), strict=True)) + float(b2[column])
    assert math.isclose(float(results[row, column]), by_hand, rel_tol=1e-9, abs_tol=1e-10)


Activation = Callable[[torch.Tensor], torch.Tensor]


def _inner(h: torch.Tensor) -> torch.Tensor:
    return math.sqrt(2 / math.pi) * (h + 0.044715 * h * h * h)


def _by_sigmoid(h: torch.Tensor) -> torch.Tensor:
    """0.5 (1 + tanh z) = 1 / (1 + exp(-2 z)): no cancellation, and exp may overflow."""
    return h / (1 + torch.exp(-2 * _inner(h)))


def _overflowing(h: torch.Tensor) -> torch.Tensor:
    e = torch.exp(2 * _inner(h))
    return 0.5 * h * (1 + (e - 1) / (e + 1))


def _feed_forward(activation: Activation, rounded: Activation) -> Callable[..., torch.Tensor]:
    def function(
        x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor
    ) -> torch.Tensor:
        a = activation(rounded(x) @ rounded(w1).T + b1)
        return rounded(a) @ rounded(w2).T + b2

    return function


def _exact(x: torch.Tensor) -> torch.Tensor:
    return x


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def _streamed(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor) -> torch.Tensor:
    """A quarter of the hidden width at a time, TF32 operands, one float32 accumulator."""
    y = torch.zeros_like(x)
    for up, bias, down in zip(w1.chunk(4), b1.chunk(4), w2.chunk(4, 1), strict=True):
        a = _by_sigmoid(nearest_tf32(x) @ nearest_tf32(up).T + bias)
        y += nearest_tf32(a) @ nearest_tf32(down).T
    return y + b2


_plain = _feed_forward(_by_sigmoid, _exact)
WRONG = {
    "bfloat16 operands": _feed_forward(_by_sigmoid, _bf16),
    "x sigmoid(1.702 x) for GELU": _feed_forward(lambda h: h * torch.sigmoid(1.702 * h), _exact),
    "tanh by exponentials that overflow": _feed_forward(_overflowing, _exact),
    "the first bias left out": lambda x, w1, b1, w2, b2: _plain(x, w1, torch.zeros_like(b1), w2, b2),
    "the second bias left out": lambda x, w1, b1, w2, b2: _plain(x, w1, b1, w2, torch.zeros_like(b2)),
}
SECOND = {
    "GELU by a sigmoid": _plain,
    "TF32 operands": _feed_forward(_by_sigmoid, nearest_tf32),
    "hidden width in quarters, TF32 operands": _streamed,
}
