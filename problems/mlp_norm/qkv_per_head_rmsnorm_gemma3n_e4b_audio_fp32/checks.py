"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mkb_env.problems.mlp_norm.common import nearest_tf32

INDEPENDENT = "einsum by head and rms_norm of torch.nn.functional in float64; transformers' Gemma3nRMSNorm in float32"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """Projections split by head before they are used; the model's own norm computes in float32 whatever it is given."""
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm

    x, wq, wk, wv, q_norm, k_norm = (tensor.double() for tensor in inputs)
    dim = len(q_norm)
    for got, projection, weight in zip(truth, (wq, wk, wv), (q_norm, k_norm, None), strict=True):
        heads = torch.einsum("bsc,hdc->bshd", x, projection.view(-1, dim, x.shape[-1]))
        want = torch.nn.functional.rms_norm(heads, (dim,), weight, eps=1e-6)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
        norm = Gemma3nRMSNorm(dim, eps=1e-6, with_scale=weight is not None).to(x)
        if weight is not None:
            norm.load_state_dict({"weight": weight}, assign=True)
        with torch.no_grad():
            torch.testing.assert_close(got.float(), norm(heads.float()), rtol=1e-5, atol=1e-6)


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Norm = Callable[[torch.Tensor], torch.Tensor]


def _by_division(heads: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return heads / torch.sqrt(heads.square().sum(-1, keepdim=True) / heads.shape[-1] + eps)


def _epsilon_outside(heads: torch.Tensor) -> torch.Tensor:
    return heads / (heads.square().mean(-1, keepdim=True).sqrt() + 1e-6)


def _over_all_heads(heads: torch.Tensor) -> torch.Tensor:
    return heads / torch.sqrt(heads.square().mean((-2, -1), keepdim=True) + 1e-6)


def _one_product(
    x: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    wv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    *,
    product: Product = torch.matmul,
    norm: Norm = _by_division,
    v_norm: float | torch.Tensor = 1.0,
) -> tuple[torch.Tensor, ...]:
    """The three projections as one product."""
    joined = product(x, torch.cat((wq, wk, wv)).T)
    parts = joined.split([len(wq), len(wk), len(wv)], dim=-1)
    q, k, v = (norm(part.unflatten(-1, (-1, len(q_norm)))) for part in parts)
    return q * q_norm, k * k_norm, (v * v_norm).contiguous()


WRONG = {
    "norm weights exchanged": lambda x, wq, wk, wv, nq, nk: _one_product(x, wq, wk, wv, nk, nq),
    "1 + weight": lambda x, wq, wk, wv, nq, nk: _one_product(x, wq, wk, wv, 1 + nq, 1 + nk),
    "values with the keys' weight": lambda *inputs: _one_product(*inputs, v_norm=inputs[5]),
    "keys and values exchanged": lambda x, wq, wk, wv, nq, nk: _one_product(x, wq, wv, wk, nq, nk),
    "the mean over all heads": lambda *inputs: _one_product(*inputs, norm=_over_all_heads),
    "epsilon outside the square root": lambda *inputs: _one_product(*inputs, norm=_epsilon_outside),
    "operands rounded to bfloat16": lambda *inputs: _one_product(
        *inputs, product=lambda a, b: a.bfloat16().float() @ b.bfloat16().float()
    ),
}
SECOND = {
    "one product, division by a square root": _one_product,
    "operands rounded to TF32": lambda *inputs: _one_product(
        *inputs, product=lambda a, b: nearest_tf32(a) @ nearest_tf32(b)
    ),
}
