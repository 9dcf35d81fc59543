"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mkb_env.problems.attention.common import tf32
from mkb_env.problems.attention.dual_stream_joint_attention_fibo_fp32 import problem
from mkb_env.problems.attention.variants import altered

INDEPENDENT = (
    "rms_norm, complex rotation and scaled_dot_product_attention in float64; diffusers' FluxAttention and angles"
)
Pair = tuple[torch.Tensor, torch.Tensor]


class _Given(torch.nn.Module):
    """A projection that returns one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor.flatten(2)

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.tensor


def _flux(inputs: Sequence[Any], visible: torch.Tensor) -> Pair:
    """The image and text outputs of Flux's layer (rotation in float32); its projections return the inputs."""
    from diffusers.models.transformers.transformer_flux import FluxAttention

    width = inputs[0].shape[2] * inputs[0].shape[3]
    with torch.device("meta"):
        layer: Any = FluxAttention(
            width, inputs[0].shape[2], inputs[0].shape[3], added_kv_proj_dim=width, eps=inputs[-1]
        )
    names = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
    for name, tensor in zip(names, inputs[:6], strict=True):
        setattr(layer, name, _Given(tensor))
    for name, weight in zip(("norm_q", "norm_k", "norm_added_q", "norm_added_k"), inputs[6:10], strict=True):
        getattr(layer, name).weight = torch.nn.Parameter(weight)
    layer.to_out[0] = layer.to_add_out = torch.nn.Identity()
    tokens = (inputs[at].flatten(2) for at in (0, 3))
    return layer.eval()(*tokens, attention_mask=visible[:, None, None], image_rotary_emb=inputs[10:12])


def _check_angles(inputs: Sequence[Any]) -> None:
    from diffusers.models.transformers.transformer_flux import FluxPosEmbed

    workloads: dict[str, Any] = problem.WORKLOADS
    shapes = [workloads["full"], workloads["small"], *workloads["heldout"]]
    sizes = (*inputs[0].shape[1:3], inputs[3].shape[1])
    shape = next(s for s in shapes if (s["grid"][0] * s["grid"][1], s["N"], s["St"]) == sizes)
    ids = torch.zeros(shape["St"] + sizes[0], 3)
    ids[: shape["St"], 0] = torch.arange(shape["St"]) + 1
    ids[shape["St"] :, 1] = torch.arange(sizes[0]) // shape["grid"][1]
    ids[shape["St"] :, 2] = torch.arange(sizes[0]) % shape["grid"][1]
    for ours, theirs in zip(inputs[10:12], FluxPosEmbed(10000, shape["axes"])(ids), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=1e-5)


def independent(inputs: Sequence[Any], truth: Sequence[torch.Tensor]) -> None:
    """Three heads at most: in float64 tightly, and as Flux's layer computes them."""
    _check_angles(inputs)
    heads = sorted({0, inputs[0].shape[2] // 2, inputs[0].shape[2] - 1})
    wide: list[Any] = [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs]
    wide[:6] = [x[:, :, heads] for x in wide[:6]]
    q_img, k_img, v_img, q_txt, k_txt, v_txt, wq_img, wk_img, wq_txt, wk_txt, cos, sin, txt_len, eps = wide
    norm, turn = torch.nn.functional.rms_norm, torch.complex(cos[:, None, ::2], sin[:, None, 1::2])
    rotated = []
    for text, text_weight, image, image_weight in ((q_txt, wq_txt, q_img, wq_img), (k_txt, wk_txt, k_img, wk_img)):
        streams = [norm(x, x.shape[-1:], w, eps) for x, w in ((text, text_weight), (image, image_weight))]
        pairs = torch.view_as_complex(torch.cat(streams, dim=1).unflatten(-1, (-1, 2)).contiguous())
        rotated.append(torch.view_as_real(pairs * turn).flatten(-2).transpose(1, 2))
    count = q_txt.shape[1]
    ours = torch.cat((truth[1], truth[0]), dim=1).unflatten(2, (inputs[0].shape[2], -1))[:, :, heads]
    everywhere = torch.ones(ours.shape[:2], dtype=torch.bool, device=ours.device)
    for b, length in enumerate(txt_len.tolist()):
        keep = torch.cat((torch.arange(length), torch.arange(count, ours.shape[1]))).to(ours.device)
        q, k, v = (x[b : b + 1, :, keep] for x in (*rotated, torch.cat((v_txt, v_img), dim=1).transpose(1, 2)))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)
        torch.testing.assert_close(ours[b, keep], found, rtol=1e-9, atol=1e-11)
        assert not ours[b, length:count].any(), "padded text is not 0"
        everywhere[b, length:count] = False
    image, text = _flux(wide, everywhere)
    theirs = torch.cat((text, image), dim=1).unflatten(2, (len(heads), -1))
    torch.testing.assert_close(ours[everywhere], theirs[everywhere], rtol=1e-4, atol=1e-5)


def _compacted(*inputs: Any, rounded: Callable[[torch.Tensor], torch.Tensor] = lambda x: x, block: int = 512) -> Pair:
    """Real tokens only, online softmax over blocks of keys; ``rounded`` rounds the products' operands."""
    q_img, k_img, v_img, q_txt, k_txt, v_txt, wq_img, wk_img, wq_txt, wk_txt, cos, sin, txt_len, eps = inputs
    text, scale = q_txt.shape[1], math.log2(math.e) / math.sqrt(q_txt.shape[3])
    q = problem.joint(q_img, q_txt, wq_img, wq_txt, cos, sin, eps)
    k = problem.joint(k_img, k_txt, wk_img, wk_txt, cos, sin, eps)
    q, k, v = (rounded(x.transpose(1, 2)) for x in (q * scale, k, torch.cat((v_txt, v_img), dim=1)))
    out = torch.zeros_like(q)
    for b, length in enumerate(txt_len.tolist()):
        head, keys, values = (torch.cat((x[b, :, :length], x[b, :, text:]), dim=1) for x in (q, k, v))
        total, weight = torch.zeros_like(head), head.new_zeros(*head.shape[:2], 1)
        highest = torch.full_like(weight, -1e30)
        for begin in range(0, keys.shape[1], block):
            logits = head @ keys[:, begin : begin + block].mT
            new = torch.maximum(highest, logits.amax(-1, keepdim=True))
            p, rescale = torch.exp2(logits - new), torch.exp2(highest - new)
            weight = weight * rescale + p.sum(-1, keepdim=True)
            total = total * rescale + rounded(p) @ values[:, begin : begin + block]
            highest = new
        total /= weight
        out[b, :, :length], out[b, :, text:] = total[:, :length], total[:, length:]
    out = out.transpose(1, 2)
    return out[:, text:].flatten(2).contiguous(), out[:, :text].flatten(2).contiguous()


def _no_mask(*inputs: Any) -> Pair:
    """Padded text keys are visible."""
    text, lengths = inputs[3].shape[1], inputs[12]
    image, words = altered(problem.reference, lambda lengths: torch.full_like(lengths, text), 12)(*inputs)
    padding = torch.arange(text, device=words.device) >= lengths[:, None]
    return image, words.masked_fill(padding[..., None], 0.0)


def _halves(*inputs: Any) -> Pair:
    """Rotation pairs (i, i + D/2)."""
    order = torch.arange(inputs[0].shape[-1], device=inputs[0].device).view(2, -1).T.flatten()
    places = (0, 1, 3, 4, 6, 7, 8, 9)
    return problem.reference(*(x[..., order].contiguous() if at in places else x for at, x in enumerate(inputs)))


def _one_stream(*inputs: Any) -> Pair:
    """The text's queries and keys with the image's norm weights."""
    values: list[Any] = [*inputs[:8], *inputs[6:8], *inputs[10:]]
    return problem.reference(*values)


def _text_not_rotated(*inputs: Any) -> Pair:
    """Text positions have cosine 1 and sine 0."""
    text = inputs[3].shape[1]
    cos, sin = (torch.cat((x[:text] * 0 + value, x[text:])) for x, value in zip(inputs[10:12], (1, 0), strict=True))
    values: list[Any] = [*inputs[:10], cos, sin, *inputs[12:]]
    return problem.reference(*values)


WRONG = {
    "text not rotated": _text_not_rotated,
    "no eps": altered(problem.reference, lambda _: 0.0, 13),
    "padded text keys visible": _no_mask,
    "rotation pairs of half-split channels": _halves,
    "the image's norm weights for the text, too": _one_stream,
    "the text's values normalised": altered(
        problem.reference, lambda v: torch.nn.functional.rms_norm(v, v.shape[-1:]), 5
    ),
    "norm weights 1 + w": altered(problem.reference, lambda w: w + 1, 6, 7, 8, 9),
}
SECOND = {
    "real tokens only, online softmax in base 2": _compacted,
    "operands rounded to TF32, blocks of 64 keys": partial(_compacted, rounded=tf32, block=64),
}
