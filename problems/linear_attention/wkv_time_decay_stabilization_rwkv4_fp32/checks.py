"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from mkb_env.problems.linear_attention.wkv_time_decay_stabilization_rwkv4_fp32 import problem

INDEPENDENT = "transformers' RWKV loop, and the sums over all earlier tokens written out, float64"
Tensors = tuple[torch.Tensor, ...]


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The model's own loop on everything; on at most 48 channels every weight of every token, without a recurrence."""
    from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

    time_decay, time_first, key, value, num, den, mx = (x.double() for x in inputs)
    state = [x.clone() for x in (num, den, mx)]
    out, state = rwkv_linear_attention_cpu(time_decay, time_first, key, value, state=state, return_state=True)
    for ours, theirs in zip(truth, (out, *state), strict=True):
        torch.testing.assert_close(ours, theirs.double(), rtol=1e-6, atol=1e-6)
    tokens, channels = key.shape[1:]
    some = torch.linspace(0, channels - 1, min(48, channels), device=key.device).long()
    w, u, k, v, num, den, mx = (x[..., some] for x in (-time_decay.exp(), time_first, key, value, num, den, mx))
    place = torch.arange(tokens, device=key.device, dtype=torch.float64)
    # Exponents of token i (second axis) in the state after n = 0 ... tokens tokens (first axis), and of the past.
    age = torch.arange(tokens + 1, device=key.device)[:, None] - 1 - place
    logs = torch.where((age >= 0)[..., None], k[:, None] + age[..., None] * w, -math.inf)
    past = mx[:, None] + torch.arange(tokens + 1, device=key.device)[:, None] * w
    highest = torch.maximum(logs.amax(2), past)
    weights, old = (logs - highest[:, :, None]).exp(), (past - highest).exp()
    nums, dens = torch.einsum("bnic,bic->bnc", weights, v) + old * num[:, None], weights.sum(2) + old * den[:, None]
    now = k + u
    top = torch.maximum(now, highest[:, :-1])
    before, bonus = (highest[:, :-1] - top).exp(), (now - top).exp()
    want = (before * nums[:, :-1] + bonus * v) / (before * dens[:, :-1] + bonus)
    for ours, direct in zip(truth, (want, nums[:, -1], dens[:, -1], highest[:, -1]), strict=True):
        torch.testing.assert_close(ours[..., some], direct, rtol=1e-9, atol=1e-9)


def _loop(
    time_decay: torch.Tensor,
    time_first: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    num: torch.Tensor,
    den: torch.Tensor,
    mx: torch.Tensor,
    base: float = math.e,
    fault: str = "",
) -> Tensors:
    """One token after another, exponents in units of log(base)."""
    unit = 1 / math.log(base)
    w, u, key, mx = -time_decay.exp() * unit, time_first * unit, key * unit, mx * unit
    outs = []
    for k, v in zip(key.unbind(1), value.unbind(1), strict=True):
        bonus, past = k + u, mx + w if fault == "output" else mx
        m1 = torch.maximum(past, bonus)
        e1, e2 = base ** (past - m1), base ** (bonus - m1)
        outs.append((e1 * num + e2 * v) / (e1 * den + e2))
        k = bonus if fault == "bonus" else k
        m2 = torch.maximum(mx + w, k)
        m2 = m1 if fault == "maximum" else m2
        e1, e2 = base ** (mx + w - m2), base ** (k - m2)
        num, den, mx = e1 * num + e2 * v, e1 * den + e2, m2
    return torch.stack(outs, dim=1), num, den, mx / unit


def _joined(first: Tensors, second: Tensors, decay: torch.Tensor) -> Tensors:
    """The state after two runs of tokens, the second from no past; ``decay``: w times its tokens."""
    mx = torch.maximum(first[2] + decay, second[2])
    old, new = (first[2] + decay - mx).exp(), (second[2] - mx).exp()
    return old * first[0] + new * second[0], old * first[1] + new * second[1], mx


def _in_chunks(
    time_decay: torch.Tensor,
    time_first: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    num: torch.Tensor,
    den: torch.Tensor,
    mx: torch.Tensor,
    chunk: int = 8,
) -> Tensors:
    """Chunks from no past side by side, their states joined one after another, then every chunk with its own past."""
    nothing = torch.zeros_like(num), torch.zeros_like(den), torch.full_like(mx, problem.FRESH)
    state: Tensors = (num, den, mx)
    outs = []
    for begin in range(0, key.shape[1], chunk):
        part = slice(begin, begin + chunk)
        keys, values = key[:, part], value[:, part]
        outs.append(problem.reference(time_decay, time_first, keys, values, *state)[0])
        alone = problem.reference(time_decay, time_first, keys, values, *nothing)[1:]
        state = _joined(state, alone, -time_decay.exp() * keys.shape[1])
    return torch.cat(outs, dim=1), *state


WRONG = {
    "the bonus in the state, too": partial(_loop, fault="bonus"),
    "the past decayed before the output": partial(_loop, fault="output"),
    "the output's maximum kept in the state": partial(_loop, fault="maximum"),
    "the raw decay, not its exponential": lambda d, *x: problem.reference((-d).clamp_min(1e-3).log(), *x),
    "no decay": lambda d, *x: problem.reference(torch.full_like(d, -1e3), *x),
}
SECOND = {
    "token by token in base 2": partial(_loop, base=2.0),
    "token by token": _loop,
    "chunks of 8 tokens, states joined": _in_chunks,
}
