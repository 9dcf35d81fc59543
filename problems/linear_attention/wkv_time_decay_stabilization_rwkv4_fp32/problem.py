"""RWKV-4's weighted averages over time (WKV) with a running maximum and a state carried in and out.

There are B sequences of T tokens and C independent channels.

Inputs, contiguous and row-major:
  time_decay  [C]        float32  raw decay
  time_first  [C]        float32  bonus u of the present token
  key         [B, T, C]  float32
  value       [B, T, C]  float32
  num         [B, C]     float32  state before the first token: numerator
  den         [B, C]     float32  denominator, >= 0
  mx          [B, C]     float32  the exponent that both are scaled down by

Outputs, a tuple in this order, contiguous and row-major:
  out         [B, T, C]  float32
  new_num     [B, C]     float32  state after the last token
  new_den     [B, C]     float32
  new_mx      [B, C]     float32

Per sequence and channel, with w = -exp(time_decay) and u = time_first, for t = 0, 1, ..., T - 1 with k = key[t] and
v = value[t]:
  m1 = max(mx, k + u)
  out[t] = (exp(mx - m1) num + exp(k + u - m1) v) / (exp(mx - m1) den + exp(k + u - m1))
  m2 = max(mx + w, k)
  num, den, mx = exp(mx + w - m2) num + exp(k - m2) v,  exp(mx + w - m2) den + exp(k - m2),  m2
The new values of num, den and mx use the old ones; after the last token they are new_num, new_den and new_mx.

Numerics: everything is in float32. Keys of some sequences are so large that exp(key) overflows: only differences to a
maximum are safe. The state is one of many that stand for the same numbers, and this rule of the maximum fixes which.

Rules:
- The output of a token uses u and no decay; the state that follows uses the decay and no u.
- A sequence without a past has num = den = 0 and mx = -1e38, which is finite.
- w is between about -20 (the past is forgotten at once) and -0.007.
- T is any positive number. The inputs are not changed; every output is a new tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import normal, uniform

TITLE = "WKV recurrence with a running maximum and a state"
NUMBER = 66
MODEL = "RWKV-4-7B"
INPUTS = ("time_decay", "time_first", "key", "value", "num", "den", "mx")
OUTPUTS = ("out", "new_num", "new_den", "new_mx")
HOST_VISIBLE = ()
FRESH = -1e38
# The first "fresh" sequences have no past; the last "large" have keys of deviation 60 instead of 2.
WORKLOADS = {
    "full": {"B": 16, "T": 192, "C": 4096, "fresh": 4, "large": 2},
    "small": {"B": 3, "T": 16, "C": 32, "fresh": 1, "large": 1},
    "heldout": [
        {"B": 3, "T": 77, "C": 768, "fresh": 3, "large": 0},
        {"B": 1, "T": 130, "C": 2048, "fresh": 0, "large": 1},
        {"B": 2, "T": 5, "C": 33, "fresh": 0, "large": 0},
    ],
}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    batch, tokens, channels = shape["B"], shape["T"], shape["C"]
    sizes = *[(channels,)] * 2, *[(batch, tokens, channels)] * 2, *[(batch, channels)] * 3
    return tuple((size, torch.float32) for size in sizes)


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return input_specs(shape)[3:]


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """The model's initial decays and bonuses by channel; normal keys (deviation 2), values and states."""
    batch, tokens, channels = shape["B"], shape["T"], shape["C"]
    index = torch.arange(channels, device=generator.device, dtype=torch.float64)
    time_decay = (-5 + 8 * (index / (channels - 1)) ** 1.35).float()
    time_first = (math.log(0.3) + 0.5 * ((index + 1) % 3 - 1)).float()
    key = normal(generator, batch, tokens, channels, scale=2.0)
    value = normal(generator, batch, tokens, channels)
    num, den = normal(generator, batch, channels), uniform(generator, batch, channels, low=0.5, high=2.0)
    mx = normal(generator, batch, channels)
    fresh, large = slice(0, shape["fresh"]), slice(batch - shape["large"], batch)
    num[fresh], den[fresh], mx[fresh] = 0.0, 0.0, FRESH
    key[large] *= 30
    return time_decay, time_first, key, value, num, den, mx


def reference(
    time_decay: torch.Tensor,
    time_first: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    num: torch.Tensor,
    den: torch.Tensor,
    mx: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The module's formula, in the inputs' type: the states token by token, then the outputs from those at once."""
    w = -time_decay.exp()
    states = [(num, den, mx)]
    for k, v in zip(key.unbind(1), value.unbind(1), strict=True):
        num, den, mx = states[-1]
        decayed = mx + w
        highest = torch.maximum(decayed, k)
        old, new = (decayed - highest).exp_(), (k - highest).exp_()
        states.append((torch.addcmul(new * v, old, num), torch.addcmul(new, old, den), highest))
    num, den, mx = (torch.stack(part, dim=1) for part in zip(*states[:-1], strict=True))
    now = key + time_first
    highest = torch.maximum(mx, now)
    old, new = (mx - highest).exp_(), (now - highest).exp_()
    return (old * num + new * value) / (old * den + new), *states[-1]


def allowance(name: str, inputs: Sequence[torch.Tensor], reference: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Allowed absolute error by sequence and channel, from the roundings that float32 cannot avoid.

    Exponents are differences of numbers of size M at most. Eight roundings (to base 2 and back, w, the bonus, the
    difference) cost 4 eps M; a maximum that lives for n tokens is rounded n times, and n <= 2 M / |w|, for then some
    key exceeds it. So weights err by a factor of 1 + d, d = eps (M (4 + n / 2) + 8 + n), the last two for exponentials
    and sums; weighted sums by 2 d times the sum of the weighted sizes, averages by 2 d times the largest value.
    """
    time_decay, time_first, key, value, num, den, mx = inputs
    w, tokens = -time_decay.exp(), key.shape[1]
    size = key.abs().amax(dim=1) + time_first.abs() + w.abs() + torch.where(mx > FRESH / 2, mx.abs(), 0.0)
    lives = (2 * size / w.abs()).clamp(max=tokens)
    relative = torch.finfo(torch.float32).eps * (size * (4 + lives / 2) + 8 + lives)
    if name == "new_mx":
        return relative
    if name == "new_den":
        return 2 * relative * anchor
    if name == "new_num":
        age = torch.arange(tokens - 1, -1, -1, device=key.device)
        logs, past = key + age[:, None] * w, mx + tokens * w
        highest = torch.maximum(logs.amax(dim=1), past)
        weighted = ((logs - highest[:, None]).exp_() * value.abs()).sum(dim=1)
        return 2 * relative * (weighted + (past - highest).exp() * num.abs())
    largest = torch.maximum(value.abs().amax(dim=1), torch.where(den > 0, num.abs() / den, 0.0))
    return (2 * relative * largest)[:, None].expand_as(anchor)


def COST(shape: Shape) -> Cost:
    """Every tensor crosses memory once; four exponentials and 16 other operations per token and channel."""
    batch, tokens, channels = shape["B"], shape["T"], shape["C"]
    moved = 12 * batch * tokens * channels + 24 * batch * channels + 8 * channels
    return Cost(bytes=moved, flops=20 * batch * tokens * channels, unit="fp32")
