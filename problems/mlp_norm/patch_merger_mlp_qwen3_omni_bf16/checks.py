"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import gelu

from mkb_env.problems.mlp_norm.common import some
from mkb_env.problems.mlp_norm.patch_merger_mlp_qwen3_omni_bf16.problem import EPS, MERGED, reference

INDEPENDENT = "transformers' Qwen3OmniMoeVisionPatchMerger in float64 (64 merged rows of large shapes)"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against the model's own module with the inputs as its parameters."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeVisionEncoderConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionPatchMerger

    x, ln_w, ln_b, w1, b1, w2, b2 = (tensor.double() for tensor in inputs)
    config = Qwen3OmniMoeVisionEncoderConfig(hidden_size=x.shape[1], out_hidden_size=w2.shape[0], spatial_merge_size=2)
    with torch.device("meta"):
        merger = Qwen3OmniMoeVisionPatchMerger(config)
    names = ("ln_q.weight", "ln_q.bias", "mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias")
    merger.load_state_dict(dict(zip(names, (ln_w, ln_b, w1, b1, w2, b2), strict=True)), assign=True)
    rows = some(len(x) // MERGED, 64, x.device)
    patches = x.unflatten(0, (-1, MERGED))[rows].flatten(0, 1)
    with torch.no_grad():
        torch.testing.assert_close(truth[0][rows], merger(patches), rtol=1e-9, atol=1e-11)


def _normalise(x: torch.Tensor, ln_w: torch.Tensor, ln_b: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    x = x.float()
    centred = x - x.mean(-1, keepdim=True)
    return (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * ln_w + ln_b).bfloat16()


def _mlp(m: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """bfloat16 operands, but nothing is rounded between a product and its activation."""
    w1, b1, w2, b2 = (weight.float() for weight in weights)
    a = gelu(m.float() @ w1.T + b1).bfloat16()
    return (a.float() @ w2.T + b2).bfloat16()


def _fused(x: torch.Tensor, ln_w: torch.Tensor, ln_b: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    return _mlp(_normalise(x, ln_w, ln_b).view(-1, MERGED * x.shape[1]), *weights)


def _one_pass(x: torch.Tensor, ln_w: torch.Tensor, ln_b: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Moments around the first channel in one pass, products in four parts of K, h rounded."""
    w1, b1, w2, b2 = (weight.float() for weight in weights)
    shifted = x.float() - x[:, :1].float()
    mean = shifted.mean(-1, keepdim=True)
    var = (shifted.square().mean(-1, keepdim=True) - mean.square()).clamp_min(0)
    n = ((shifted - mean) / torch.sqrt(var + EPS) * ln_w.float() + ln_b.float()).bfloat16()
    m = n.view(-1, MERGED * x.shape[1])
    parts = [a.float() @ w.T for a, w in zip(m.chunk(4, 1), w1.chunk(4, 1), strict=True)]
    a = gelu((parts[0] + parts[1] + parts[2] + parts[3] + b1).bfloat16())
    halves = [p.float() @ w.T for p, w in zip(a.chunk(2, 1), w2.chunk(2, 1), strict=True)]
    return (halves[0] + halves[1] + b2).bfloat16()


def _norm_after_merging(
    x: torch.Tensor, ln_w: torch.Tensor, ln_b: torch.Tensor, *weights: torch.Tensor
) -> torch.Tensor:
    merged = x.view(-1, MERGED * x.shape[1])
    return _mlp(_normalise(merged, ln_w.repeat(MERGED), ln_b.repeat(MERGED)), *weights)


def _channels_first(x: torch.Tensor, ln_w: torch.Tensor, ln_b: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    n = _normalise(x, ln_w, ln_b).unflatten(0, (-1, MERGED))
    return _mlp(n.transpose(1, 2).flatten(1), *weights)


def _without_epsilon(x: torch.Tensor, ln_w: torch.Tensor, ln_b: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    return _mlp(_normalise(x, ln_w, ln_b, eps=0.0).view(-1, MERGED * x.shape[1]), *weights)


def _without_mean(x: torch.Tensor, ln_w: torch.Tensor, ln_b: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    n = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * ln_w + ln_b).bfloat16()
    return _mlp(n.view(-1, MERGED * x.shape[1]), *weights)


WRONG = {
    "one norm over the merged row": _norm_after_merging,
    "merged channel by channel": _channels_first,
    "no epsilon": _without_epsilon,
    "the mean is not subtracted": _without_mean,
    "no GELU": lambda x, ln_w, ln_b, w1, b1, w2, b2: torch.nn.functional.linear(
        torch.nn.functional.linear(_normalise(x, ln_w, ln_b).view(-1, MERGED * x.shape[1]), w1, b1), w2, b2
    ),
    "the first bias left out": lambda x, ln_w, ln_b, w1, b1, w2, b2: reference(
        x, ln_w, ln_b, w1, torch.zeros_like(b1), w2, b2
    ),
}
SECOND = {"h is not rounded": _fused, "one pass for the moments, products in parts": _one_pass}
