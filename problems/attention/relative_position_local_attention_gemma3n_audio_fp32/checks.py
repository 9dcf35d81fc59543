"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mkb_env.problems.attention.common import tf32
from mkb_env.problems.attention.relative_position_local_attention_gemma3n_audio_fp32 import problem
from mkb_env.problems.attention.variants import altered

INDEPENDENT = (
    "transformers' Gemma3nAudioAttention (blocks of 12 frames), and single queries one key at a time in float64"
)


def _layer(inputs: Sequence[Any]) -> torch.Tensor:
    """The model's own layer in float64 (its softmax is in float32), with projections that return the inputs."""
    from transformers.models.gemma3n import modeling_gemma3n as model

    q, k, v, per_dim_scale, rel_emb, mask, left, right, softcap = inputs
    config = model.Gemma3nAudioConfig(
        hidden_size=q.shape[2] * q.shape[3],
        conf_num_attention_heads=q.shape[2],
        conf_attention_context_left=left + 1,
        conf_attention_context_right=right,
        conf_attention_logit_cap=softcap,
    )
    with torch.device("meta"):
        layer: Any = model.Gemma3nAudioAttention(config)
    for owner, name, tensor in (
        *((layer, f"{letter}_proj", x) for letter, x in zip("qkv", (q, k, v), strict=True)),
        (layer.relative_position_embedding, "pos_proj", rel_emb),
    ):
        setattr(owner, name, _Given(tensor.double()))
    layer.relative_position_embedding.inv_timescales = torch.ones(1, 1, 1, device=q.device)
    layer.per_dim_scale = torch.nn.Parameter(per_dim_scale.double())
    layer.q_scale = torch.tensor(q.shape[3] ** -0.5 / math.log(2), dtype=torch.float64, device=q.device)
    layer.softcap = torch.tensor(softcap, dtype=torch.float64, device=q.device)
    layer.local_causal_valid_mask = layer.create_local_causal_valid_mask().to(q.device)
    return layer(q.flatten(2).double(), mask)


class _Given(torch.nn.Module):
    """A projection that returns one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.tensor


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """All rows that see a key against the model's layer; up to 300 queries against a loop over keys."""
    q, k, v, per_dim_scale, rel_emb, mask, left, right, softcap = inputs
    batch, frames, heads, dim = q.shape
    hidden = mask.cpu()
    seen = torch.tensor(
        [[not hidden[b, max(0, i - left) : i + right + 1].all() for i in range(frames)] for b in range(batch)]
    ).to(q.device)
    assert not truth[0][~seen].any(), "rows without a key are not 0"
    torch.testing.assert_close(truth[0][seen], _layer(inputs)[seen], rtol=1e-5, atol=1e-5)
    scale = torch.log1p(per_dim_scale.double().exp()) / math.sqrt(dim) / math.log(2)
    places = torch.randperm(batch * frames * heads, generator=torch.Generator().manual_seed(0))[:300].tolist()
    for b, i, n in ((p // heads // frames, p // heads % frames, p % heads) for p in places):
        total, weight = torch.zeros(dim, dtype=torch.float64, device=q.device), 0.0
        for j in range(max(0, i - left), min(frames, i + right + 1)):
            if not hidden[b, j]:
                row = k[b, j, n].double() + rel_emb[left + j - i, n].double()
                e = math.exp(softcap * math.tanh((q[b, i, n].double() * scale * row).sum().item() / softcap))
                total, weight = total + e * v[b, j, n].double(), weight + e
        torch.testing.assert_close(truth[0][b, i, n], total / weight if weight else total, rtol=1e-9, atol=1e-11)


def _one_offset_at_a_time(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    per_dim_scale: torch.Tensor,
    rel_emb: torch.Tensor,
    mask: torch.Tensor,
    left: int,
    right: int,
    softcap: float,
    fault: str = "",
) -> torch.Tensor:
    """Online softmax over the offsets of the band."""
    frames, dim = q.shape[1], q.shape[3]
    u = q * (torch.log1p(per_dim_scale.exp()) * (dim**-0.5 / (1 if fault == "ln 2" else math.log(2))))
    total, weight = torch.zeros_like(q), q.new_zeros(*q.shape[:3], 1)
    highest = torch.full_like(weight, -1e30)
    for offset in range(-left + (fault == "window"), right + 1):
        begin, end = max(0, -offset), min(frames, frames - offset)
        if begin >= end:
            continue
        mine, theirs = slice(begin, end), slice(begin + offset, end + offset)
        position = (u[:, mine] * rel_emb[left + offset]).sum(-1, keepdim=True)
        logit = (u[:, mine] * k[:, theirs]).sum(-1, keepdim=True)
        if fault == "cap":
            logit = softcap * torch.tanh(logit / softcap) + position
        else:
            logit = softcap * torch.tanh((logit + position) / softcap)
        logit = logit.masked_fill(mask[:, theirs, None, None], -torch.inf)
        new = torch.maximum(highest[:, mine], logit)
        p, rescale = (logit - new).exp(), (highest[:, mine] - new).exp()
        weight[:, mine] = weight[:, mine] * rescale + p
        total[:, mine] = total[:, mine] * rescale + p * v[:, theirs]
        highest[:, mine] = new
    if fault == "queries":
        total = total.masked_fill(mask[..., None, None], 0.0)
    return torch.where(weight > 0, total / weight, 0.0)


def _by_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    per_dim_scale: torch.Tensor,
    rel_emb: torch.Tensor,
    mask: torch.Tensor,
    left: int,
    right: int,
    softcap: float,
    rounded: Callable[[torch.Tensor], torch.Tensor] = tf32,
) -> torch.Tensor:
    """Dense tiles of 16 queries against all the keys that some of them see, operands rounded to TF32."""
    frames = q.shape[1]
    u = rounded(q * torch.log1p(per_dim_scale.exp()) * (q.shape[3] ** -0.5 / math.log(2)))
    position = u.transpose(1, 2) @ rounded(rel_emb).permute(1, 2, 0)
    keys, values = (rounded(x.transpose(1, 2)) for x in (k, v))
    context = torch.empty_like(keys)
    for begin in range(0, frames, 16):
        rows, seen = slice(begin, begin + 16), slice(max(0, begin - left), begin + 16 + right)
        i, j = (torch.arange(frames, device=q.device)[part] for part in (rows, seen))
        band = j - i[:, None] + left
        inside = (band >= 0) & (band <= left + right) & ~mask[:, None, seen]
        index = band.clamp(0, left + right).expand(*keys.shape[:2], -1, -1)
        logits = u.transpose(1, 2)[:, :, rows] @ keys[:, :, seen].mT + position[:, :, rows].gather(-1, index)
        z = torch.where(inside[:, None], softcap * torch.tanh(logits / softcap), -torch.inf)
        p = (z - z.amax(-1, keepdim=True).clamp_min(-1e30)).exp()
        context[:, :, rows] = rounded(p) @ values[:, :, seen] / p.sum(-1, keepdim=True).clamp_min(1e-30)
    return context.transpose(1, 2).contiguous()


WRONG = {
    "the oldest offset left out": partial(_one_offset_at_a_time, fault="window"),
    "offsets of rel_emb in reverse": altered(problem.reference, lambda rel_emb: rel_emb.flip(0), 4),
    "the softcap on the content logits only": partial(_one_offset_at_a_time, fault="cap"),
    "no division by ln 2": partial(_one_offset_at_a_time, fault="ln 2"),
    "masked queries zeroed": partial(_one_offset_at_a_time, fault="queries"),
}
SECOND = {
    "online softmax, one offset at a time": _one_offset_at_a_time,
    "dense tiles of 16 queries, operands in TF32": _by_tiles,
}
