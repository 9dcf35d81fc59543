"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import gelu, layer_norm

from mkb_env.problems.quantized_projection import common, oracle
from mkb_env.problems.quantized_projection.multimodal_embedding_projection_qwen3vl_nvfp4.problem import reference

INDEPENDENT = "transformers' Qwen3VLVisionPatchMerger in float64, weights by exhaustive e2m1 and e4m3 tables"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The anchor against the model's own module for at most 64 visual tokens, and the copied rows bit by bit."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionPatchMerger

    patches, ln_w, ln_b, *weights, text, positions = inputs
    w1, b1, w2, b2 = oracle.fp4(*weights[:3]), weights[3], oracle.fp4(*weights[4:7]), weights[7]
    oracle.check_fp4(patches.device)
    with torch.device("meta"):
        config = Qwen3VLVisionConfig(hidden_size=len(ln_w), out_hidden_size=len(b2), spatial_merge_size=2)
        merger = Qwen3VLVisionPatchMerger(config)
    state = {"norm.weight": ln_w, "norm.bias": ln_b, "linear_fc1.weight": w1, "linear_fc1.bias": b1}
    state |= {"linear_fc2.weight": w2, "linear_fc2.bias": b2}
    merger.load_state_dict({name: value.double() for name, value in state.items()}, assign=True)
    tokens = oracle.sample(len(positions), 64, patches.device)
    with torch.no_grad():
        want = merger(patches.double().view(-1, 4, len(ln_w))[tokens].flatten(0, 1))
    torch.testing.assert_close(truth[0][positions.long()[tokens]], want, rtol=1e-9, atol=1e-11)
    kept = torch.ones(len(text), dtype=torch.bool, device=text.device)
    kept[positions.long()] = False
    assert torch.equal(truth[0][kept], text[kept].double())


Linear = Callable[..., torch.Tensor]


def _variant(
    norm: Callable[..., torch.Tensor] = lambda x, w, b: layer_norm(x, x.shape[-1:], w, b, 1e-6),
    linear: Linear = common.fp4_linear,
    rounded: bool = True,
) -> Callable[..., torch.Tensor]:
    """The merger in float32 with torch's operators."""

    def run(patches: torch.Tensor, ln_w: torch.Tensor, ln_b: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        *w1, b1, p2, s2, g2, b2, text, positions = others
        round_ = (lambda x: x.bfloat16().float()) if rounded else (lambda x: x)
        m = round_(norm(patches.float(), ln_w.float(), ln_b.float())).view(-1, 4 * len(ln_w))
        h = round_(gelu(linear(m, *w1) + b1.float()))
        y = linear(h, p2, s2, g2) + b2.float()
        return text.index_copy(0, positions.long(), y.bfloat16())

    return run


def _norm_of_merged(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    merged = x.view(-1, 4 * x.shape[1])
    return layer_norm(merged, merged.shape[-1:], weight.repeat(4), bias.repeat(4), 1e-6)


def _strided_merge(*inputs: torch.Tensor) -> torch.Tensor:
    return reference(inputs[0].view(4, -1, inputs[0].shape[1]).transpose(0, 1).reshape(inputs[0].shape), *inputs[1:])


def _one_late(*inputs: torch.Tensor) -> torch.Tensor:
    late = [*inputs[:-1], (inputs[-1] + 1) % len(inputs[-2])]
    return reference(*late)


WRONG = {
    "high nibble first": _variant(linear=oracle.fp4_nibbles_swapped),
    "one scale for 32 elements": _variant(linear=oracle.fp4_scale_of_pair),
    "norm over the merged channels": _variant(norm=_norm_of_merged),
    "patches of a token taken a quarter apart": _strided_merge,
    "positions counted from 1": _one_late,
    "no bias in the norm": _variant(norm=lambda x, weight, bias: layer_norm(x, x.shape[-1:], weight, None, 1e-6)),
}
SECOND = {
    "nothing rounded on the way": _variant(rounded=False),
    "weights rounded to bfloat16 with their factor": _variant(linear=oracle.fp4_linear_rounded),
    "four partial sums": _variant(linear=oracle.fp4_linear_split),
}
