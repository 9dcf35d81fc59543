"""Recurrences with a matrix for a state that several problems of this family share.

Head-first layouts throughout: [B, H, T, D] with a gate per token [B, H, T]. Everything follows its inputs' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn.functional import pad, softplus

from mkb_env.problems.contract import Allowance
from mkb_env.problems.drawing import integers, normal, uniform

Operand = Callable[[torch.Tensor], torch.Tensor]
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def same(x: torch.Tensor) -> torch.Tensor:
    """The operand of a product as it is."""
    return x


def as_bf16(x: torch.Tensor) -> torch.Tensor:
    """The operand of a product as a tensor core takes it: rounded to bfloat16, products and sums wide."""
    return x.bfloat16().to(x.dtype)


def log_uniform(generator: torch.Generator, *sizes: int, low: float, high: float) -> torch.Tensor:
    """Float32 numbers whose logarithm is uniform between those of ``low`` and ``high``."""
    return uniform(generator, *sizes, low=math.log(low), high=math.log(high)).exp()


def strong_runs(generator: torch.Generator, decays: torch.Tensor, runs: int, low: float = -5.0) -> None:
    """In each sequence of ``decays`` [B, T, ...], set ``runs`` runs of 16 tokens to ``low``, in place.

    They lie at random places and never touch; each run takes a random half of the trailing places.
    """
    batch, length, *rest = decays.shape
    if not runs:
        return
    part = length // runs
    starts = integers(generator, batch, runs, high=part - 16, dtype=torch.int64)
    starts += part * torch.arange(runs, device=starts.device)
    since = torch.arange(length, device=starts.device) - starts.unsqueeze(-1)
    chosen = uniform(generator, batch, runs, 1, *rest) < 0.5
    inside = ((since >= 0) & (since < 16)).view(batch, runs, length, *(1 for _ in rest))
    for run in range(runs):
        decays.masked_fill_(inside[:, run] & chosen[:, run], low)


def step_bias(generator: torch.Generator, heads: int) -> torch.Tensor:
    """Per head the number whose softplus is log-uniform in [0.001, 0.1): how such models start their time steps."""
    step = log_uniform(generator, heads, low=1e-3, high=0.1)
    return step + torch.log(-torch.expm1(-step))


def l2n(x: torch.Tensor) -> torch.Tensor:
    """``x`` over the root of its squares' sum plus 1e-6, along the last axis."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


def unit(x: torch.Tensor) -> torch.Tensor:
    """``x`` over its Euclidean norm, which counts as 1e-12 at least, along the last axis."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-12)


def by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, T, H, ...] as [B, heads, T, ...]; each of the H heads serves ``heads`` / H neighbours."""
    return x.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2)


def segment_sums(x: torch.Tensor) -> torch.Tensor:
    """[..., T] to [..., T, T]: entry (i, j) is x[j + 1] + ... + x[i], so 0 for i = j; -inf for i < j."""
    length = x.shape[-1]
    lower = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    rows = x.unsqueeze(-1).expand(*x.shape, length)
    return rows.masked_fill(~lower.tril(-1), 0.0).cumsum(dim=-2).masked_fill(~lower, -math.inf)


def chunk_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    chunk: int = 64,
    operand: Operand = same,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule, ``chunk`` tokens at a time.

    Per token S <- e^g S, then S <- S + k (x) beta (v - k^T S), then o = q^T S. Within a chunk, the corrections
    beta (v - k^T S) of all tokens solve one unit lower triangular system, which is inverted in the inputs' dtype.

    Args:
        q: [B, H, T, K], scaled.
        k: [B, H, T, K].
        v: [B, H, T, V].
        g: [B, H, T], logarithm of the decay.
        beta: [B, H, T].
        state: [B, H, K, V] before the first token.
        chunk: how many tokens at a time.
        operand: applied to each operand of every matrix product.

    Returns:
        o [B, H, T, V] and the state after the last token.
    """
    length = q.shape[2]
    tail = -length % chunk
    q, k, v = (pad(x, (0, 0, 0, tail)).unflatten(2, (-1, chunk)) for x in (q, k, v))
    g, beta = (pad(x, (0, tail)).unflatten(2, (-1, chunk)) for x in (g, beta))
    sums = segment_sums(g)
    pairs, since, until = sums.exp(), g.cumsum(dim=-1).exp().unsqueeze(-1), sums[..., -1, :].exp().unsqueeze(-1)
    weighted, keys = k * beta.unsqueeze(-1), operand(k).mT
    system = (operand(weighted) @ keys) * pairs
    identity = torch.eye(chunk, dtype=q.dtype, device=q.device).expand_as(system)
    inverse = operand(torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True))
    own, others = inverse @ operand(v * beta.unsqueeze(-1)), operand(inverse @ operand(weighted * since))
    attention = operand((operand(q) @ keys) * pairs)
    queries, writes = operand(q * since), operand(k * until).mT
    o = torch.empty_like(v)
    for c in range(q.shape[2]):
        read = operand(state)
        new = operand(own[:, :, c] - others[:, :, c] @ read)
        o[:, :, c] = queries[:, :, c] @ read + attention[:, :, c] @ new
        state = state * since[:, :, c, -1:] + writes[:, :, c] @ new
    return o.flatten(2, 3)[:, :, :length], state


def token_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`chunk_delta_rule`, token by token; ``g`` may also be [B, H, T, K], one decay per key channel."""
    decay = (g if g.dim() == 4 else g.unsqueeze(-1)).exp().unsqueeze(-1)
    o = torch.empty_like(v)
    for t in range(q.shape[2]):
        state = state * decay[:, :, t]
        correction = beta[:, :, t, None, None] * (v[:, :, t, None] - k[:, :, t, None] @ state)
        state = state + k[:, :, t, :, None] @ correction
        o[:, :, t] = (q[:, :, t, None] @ state).squeeze(2)
    return o, state


def chunk_channel_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    *,
    chunk: int,
    operand: Operand = same,
) -> torch.Tensor:
    """:func:`token_delta_rule` with one decay per key channel, from a state of zeros, ``chunk`` tokens at a time.

    Keys are divided by the decay since the chunk began, so ``chunk`` must be short enough for e^-sum(g) to be finite.

    Args:
        q: [B, H, T, K], scaled.
        k: [B, H, T, K].
        v: [B, H, T, V].
        g: [B, H, T, K], logarithm of the decay.
        beta: [B, H, T]; None for plain linear attention: S <- diag(e^g) S + k (x) v, without the correction.
        chunk: how many tokens at a time.
        operand: applied to each operand of every matrix product.

    Returns:
        o [B, H, T, V].
    """
    length = q.shape[2]
    q, k, v, g = (pad(x, (0, 0, 0, -length % chunk)).unflatten(2, (-1, chunk)) for x in (q, k, v, g))
    sums = g.cumsum(dim=-2)
    queries, grown, shrunk = operand(q * sums.exp()), operand(k * (-sums).exp()).mT, k * sums.exp()
    writes = operand(k * (sums[..., -1:, :] - sums).exp()).mT
    attention, new, others = operand((queries @ grown).tril()), operand(v), None
    if beta is not None:
        beta = pad(beta, (0, -length % chunk)).unflatten(2, (-1, chunk)).unsqueeze(-1)
        system = (operand(shrunk * beta) @ grown).tril()
        identity = torch.eye(chunk, dtype=q.dtype, device=q.device).expand_as(system)
        inverse = operand(torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True))
        new, others = inverse @ operand(v * beta), operand(inverse @ operand(shrunk * beta))
    o, state = torch.empty_like(v), q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    for c in range(q.shape[2]):
        read, added = operand(state), new[:, :, c]
        if others is not None:
            added = operand(added - others[:, :, c] @ read)
        o[:, :, c] = queries[:, :, c] @ read + attention[:, :, c] @ added
        state = state * sums[:, :, c, -1, :, None].exp() + writes[:, :, c] @ added
    return o.flatten(2, 3)[:, :, :length]


def running_sums(decay: torch.Tensor, gain: torch.Tensor, start: torch.Tensor | None = None) -> torch.Tensor:
    """n_t = decay_t n_{t-1} + gain_t along the last axis, from ``start`` (default 0), by doubling."""
    total, factor = gain.clone(), decay.expand_as(gain).clone()
    if start is not None:
        total[..., 0] += factor[..., 0] * start
    step = 1
    while step < total.shape[-1]:
        total[..., step:] += factor[..., step:] * total[..., :-step].clone()
        factor[..., step:] *= factor[..., :-step].clone()
        step *= 2
    return total


def delta_rule_scale(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Root mean square [B, H, T, 1] that an element of o has for keys and queries in random directions.

    The arguments are those of :func:`chunk_delta_rule`. A query that happens to be nearly orthogonal to the few keys
    that count gives a row of o far below it, but roundings of q, k and S do not shrink with that row.
    """
    keys, values = k.square().sum(dim=-1), v.square().sum(dim=-1)
    kept = (2 * g).exp() * (1 - (2 * beta - beta.square()) * keys / k.shape[-1])
    start = None if state is None else state.square().sum(dim=(-2, -1))
    norms = running_sums(kept, beta.square() * keys * values, start)
    return (q.square().sum(dim=-1) * norms / (k.shape[-1] * v.shape[-1])).sqrt().unsqueeze(-1)


def channel_scale(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Root mean square [B, H, T, 1] that an element of o has for values in random directions and signs.

    The arguments are those of :func:`chunk_channel_rule` without beta, all channels of a state decay on their own.
    """
    gains = k.square() * v.square().sum(dim=-1, keepdim=True)
    norms = running_sums((2 * g).exp().mT, gains.mT).mT
    return ((q.square() * norms).sum(dim=-1, keepdim=True) / v.shape[-1]).sqrt()


def scan_within(
    x: torch.Tensor, sums: torch.Tensor, Bm: torch.Tensor, Cm: torch.Tensor, *, operand: Operand = same
) -> torch.Tensor:
    """What tokens of the same chunk give to y, a state-space scan's output.

    Args:
        x: [B, H, chunks, Q, P], scaled by the time step.
        sums: [B, H, chunks, Q, Q], the segment sums of the decays' logarithms.
        Bm: [B, G, chunks, Q, N]; each group serves H / G neighbouring heads.
        Cm: like ``Bm``.
        operand: applied to each operand of every matrix product.

    Returns:
        [B, H, chunks, Q, P].
    """
    scores = operand(Cm) @ operand(Bm).mT
    weights = sums.exp().unflatten(1, (Bm.shape[1], -1)) * scores.unsqueeze(2)
    return operand(weights.flatten(1, 2)) @ operand(x)


def chunk_scan(
    x: torch.Tensor,
    alpha: torch.Tensor,
    Bm: torch.Tensor,
    Cm: torch.Tensor,
    state: torch.Tensor,
    *,
    chunk: int,
    operand: Operand = same,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A state-space scan, ``chunk`` tokens at a time: per token h <- e^alpha h + x (x) B, then y = h C.

    Args:
        x: [B, H, T, P], scaled by the time step.
        alpha: [B, H, T], logarithm of the decay.
        Bm: [B, G, T, N]; each group serves H / G neighbouring heads.
        Cm: like ``Bm``.
        state: [B, H, P, N] before the first token.
        chunk: how many tokens at a time.
        operand: applied to each operand of every matrix product.

    Returns:
        y [B, H, T, P], the states before each chunk [B, H, chunks, P, N], and the state after the last token.
    """
    length, groups = x.shape[2], Bm.shape[1]
    tail = -length % chunk
    x, Bm, Cm = (pad(part, (0, 0, 0, tail)).unflatten(2, (-1, chunk)) for part in (x, Bm, Cm))
    alpha = pad(alpha, (0, tail)).unflatten(2, (-1, chunk))
    sums = segment_sums(alpha)
    y, since, until = scan_within(x, sums, Bm, Cm, operand=operand), alpha.cumsum(dim=-1).exp(), sums[..., -1, :].exp()
    del sums
    writes = operand(x * until.unsqueeze(-1)).mT.unflatten(1, (groups, -1))
    gains = (writes @ operand(Bm).unsqueeze(2)).flatten(1, 2)
    states = torch.empty_like(gains)
    for c in range(gains.shape[2]):
        states[:, :, c] = state
        state = state * since[:, :, c, -1, None, None] + gains[:, :, c]
    reads = operand(Cm).unsqueeze(2) @ operand(states).mT.unflatten(1, (groups, -1))
    y = y + reads.flatten(1, 2) * since.unsqueeze(-1)
    return y.flatten(2, 3)[:, :, :length], states, state


def scan_scale(
    x: torch.Tensor,
    alpha: torch.Tensor,
    Bm: torch.Tensor,
    Cm: torch.Tensor,
    state: torch.Tensor | None = None,
    *,
    skip: torch.Tensor | None = None,
) -> torch.Tensor:
    """Root mean square [B, H, T, 1] that an element of y has for B and C in random directions.

    The arguments are those of :func:`chunk_scan`; ``skip`` [B, H, T, P] is added to y. A row of y may be far smaller,
    where its terms happen to cancel, but the roundings of the terms do not cancel.
    """
    repeats = x.shape[1] // Bm.shape[1]
    keys, queries = (part.square().sum(dim=-1).repeat_interleave(repeats, dim=1) for part in (Bm, Cm))
    start = None if state is None else state.square().sum(dim=(-2, -1))
    norms = running_sums((2 * alpha).exp(), keys * x.square().sum(dim=-1), start)
    total = queries * norms / (Bm.shape[-1] * x.shape[-1])
    return (total if skip is None else total + skip.square().mean(dim=-1)).sqrt().unsqueeze(-1)


def row_allowance(anchor: torch.Tensor, scale: torch.Tensor) -> Allowance:
    """The general rule for bfloat16, but no row (along the last axis) counts as smaller than ``scale``.

    With eps = 2^-7 an element x may err by 3 eps max(largest of its row, 2 scale); at most 5 % of all elements err by
    more than 1.5 eps max(root mean square of the row, scale, |x| / 2): 1.2 % of the row, twice the standard deviation
    of what bfloat16 operands lead to at worst.
    """
    eps, size = 2.0**-7, anchor.abs()
    largest, mean = size.amax(dim=-1, keepdim=True), anchor.square().mean(dim=-1, keepdim=True).sqrt()
    usual = torch.maximum(torch.maximum(mean, scale), size / 2)
    return Allowance(3 * eps * torch.maximum(largest, 2 * scale), 1.5 * eps * usual, 0.05)


def state_allowance(anchor: torch.Tensor) -> Allowance:
    """:func:`row_allowance` for states [..., K, V], or [..., V, K], with the root mean square of each as its scale."""
    return row_allowance(anchor, anchor.square().mean(dim=(-2, -1), keepdim=True).sqrt())


def gdn_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithm of the decay, -e^A_log softplus(a + dt_bias), and beta, sigmoid(b): in float32, or float64 if given."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return -A_log.to(wide).exp() * softplus(a.to(wide) + dt_bias.to(wide)), b.to(wide).sigmoid()


def gdn_draws(
    generator: torch.Generator, leading: tuple[int, ...], key_heads: int, heads: int, dim: int
) -> tuple[torch.Tensor, ...]:
    """Tokens and gates of a gated delta net, drawn like activations: q, k, v, A_log, a, dt_bias, b.

    q and k [*leading, key_heads, dim] are unit vectors and v [*leading, heads, dim] is small, all in bfloat16; a and b
    [*leading, heads] in bfloat16, A_log and dt_bias [heads] in float32.
    """
    q, k = (unit(normal(generator, *leading, key_heads, dim)).bfloat16() for _ in range(2))
    v = normal(generator, *leading, heads, dim, dtype=torch.bfloat16, scale=0.25)
    A_log = normal(generator, heads, scale=1.2, mean=0.5)
    a = normal(generator, *leading, heads, dtype=torch.bfloat16)
    dt_bias = normal(generator, heads, scale=2.0, mean=-3.5)
    b = normal(generator, *leading, heads, dtype=torch.bfloat16, scale=1.5, mean=0.5)
    return q, k, v, A_log, a, dt_bias, b


def gdn_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of the gated delta rule on states that are value-major.

    Args:
        q: [B, H, K], scaled.
        k: [B, H, K].
        v: [B, H, V].
        g: [B, H], logarithm of the decay.
        beta: [B, H].
        state: [B, H, V, K].

    Returns:
        o [B, H, V] and the new state.
    """
    state = state * g.exp()[..., None, None]
    correction = beta.unsqueeze(-1) * (v - (state @ k.unsqueeze(-1)).squeeze(-1))
    state = state + correction.unsqueeze(-1) @ k.unsqueeze(-2)
    return (state @ q.unsqueeze(-1)).squeeze(-1), state


def gdn_state_allowance(
    before: torch.Tensor, after: torch.Tensor, g: torch.Tensor, rate: torch.Tensor, carried: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """How far float32 states may lie from the truth after one token [B, H, V, 1].

    Sums in any order: 2^-20 of the largest element of a row. The decay: g = -rate softplus(z) by log(1 + exp(z)) errs
    by up to 2^-22 rate beyond its relative error, since 1 + exp(z) is rounded near 1; exp(g) errs by as much, relative
    to itself. Both are many times less than what operands of TF32 or bfloat16 lead to.

    Args:
        before: [B, H, V, K], the state before the token.
        after: [B, H, V, K], the state after it.
        g: [B, H], logarithm of the decay.
        rate: [H].
        carried: what ``before`` itself may lie off.
    """
    decay, shift = (x[..., None, None] for x in (g.exp(), 2.0**-20 * (rate + g.abs())))
    return decay * (carried + shift * before.abs().amax(dim=-1, keepdim=True)) + 2.0**-20 * after.abs().amax(
        dim=-1, keepdim=True
    )


def fused_gdn_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`gdn_step` with both reductions over the state as it was: q S' = e^g q S + (q . k) correction.

    Sums over the key channels run in two halves.
    """
    decay = torch.exp2(g * (1 / math.log(2))).unsqueeze(-1)
    predicted, read = ((state * x.unsqueeze(-2)).unflatten(-1, (2, -1)).sum(dim=-1).sum(dim=-1) for x in (k, q))
    correction = beta.unsqueeze(-1) * (v - decay * predicted)
    o = decay * read + (q * k).sum(dim=-1, keepdim=True) * correction
    return o, state * decay.unsqueeze(-1) + correction.unsqueeze(-1) * k.unsqueeze(-2)
