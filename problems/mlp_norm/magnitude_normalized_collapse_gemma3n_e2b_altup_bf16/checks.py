"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mkb_env.problems.mlp_norm.common import some

STREAMS, FLOOR = 4, float(torch.tensor(1e-5, dtype=torch.bfloat16))
INDEPENDENT = "einsum and vector norms of sampled tokens in float64"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """Unit vectors instead of divisions by a mean square: c_i = p_i / |p_i| |h_0|, or p_i |h_0| / sqrt(D e)."""
    streams, w = (tensor.double().flatten(1, -2) if tensor.dim() == 4 else tensor.double() for tensor in inputs)
    tokens, channels = streams.shape[1:]
    sample = some(tokens, 512, streams.device)
    streams, got = streams[:, sample], truth[0].flatten(0, -2)[sample]
    projected = torch.einsum("kod,ktd->kto", w, streams[1:])
    norms = torch.linalg.vector_norm(projected, dim=-1, keepdim=True)
    least = (channels * FLOOR) ** 0.5
    directions = torch.where(norms < least, projected / least, projected / norms)
    want = (streams[0] + (directions * torch.linalg.vector_norm(streams[0], dim=-1, keepdim=True)).sum(0)) / STREAMS
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)


def _float32(
    streams: torch.Tensor,
    w: torch.Tensor,
    *,
    project: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.nn.functional.linear,
    bounded: Callable[[torch.Tensor], torch.Tensor] = lambda mean: mean.clamp_min(FLOOR),
    target_floor: float = 0.0,
    divisor: int = STREAMS,
) -> torch.Tensor:
    """Everything in float32, rounded at the end; the row's scale as one factor."""
    target = streams[0].float().square().mean(-1, keepdim=True).clamp_min(target_floor).sqrt()
    total = streams[0].float()
    for stream, projection in zip(streams[1:], w, strict=True):
        projected = project(stream.float(), projection.float())
        total = total + projected * (target * torch.rsqrt(bounded(projected.square().mean(-1, keepdim=True))))
    return (total / divisor).bfloat16()


def _split(x: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """The product in four parts along its inner axis, the sum rounded to bfloat16."""
    pairs = zip(x.chunk(4, -1), projection.chunk(4, -1), strict=True)
    parts = [torch.nn.functional.linear(left, right) for left, right in pairs]
    return torch.stack(parts).sum(0).bfloat16().float()


def _magnitude_before_projection(streams: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Scales that could be had without the whole projected row."""
    target = streams[0].float().square().mean(-1, keepdim=True).sqrt()
    total = streams[0].float()
    for stream, projection in zip(streams[1:].float(), w.float(), strict=True):
        magnitude = stream.square().mean(-1, keepdim=True).clamp_min(FLOOR).sqrt()
        total = total + torch.nn.functional.linear(stream, projection) * target / magnitude
    return (total / STREAMS).bfloat16()


WRONG = {
    "projections read as [in, out]": lambda streams, w: _float32(streams, w, project=torch.matmul),
    "projections of the next stream": lambda streams, w: _float32(streams, w.roll(1, 0)),
    "the magnitude before the projection": _magnitude_before_projection,
    "the bound added to the mean square": lambda streams, w: _float32(streams, w, bounded=lambda mean: mean + FLOOR),
    "no lower bound": lambda streams, w: _float32(streams, w, bounded=lambda mean: mean),
    "a lower bound for stream 0, too": lambda streams, w: _float32(streams, w, target_floor=FLOOR),
    "the sum of four divided by 3": lambda streams, w: _float32(streams, w, divisor=STREAMS - 1),
}
SECOND = {
    "float32 from the products to the end": _float32,
    "products in four parts": lambda streams, w: _float32(streams, w, project=_split),
}
