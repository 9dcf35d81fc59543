"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

EPS = 1e-6
INDEPENDENT = "autograd through embedding(padding_idx=0) and rms_norm of torch.nn.functional in float64"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """The formulas against autograd; with many ids, of a table of the occurring ones only, renumbered."""
    grad_y, input_ids, embedding, weight = inputs
    known = torch.cat((input_ids.new_zeros(1), input_ids.flatten())).unique()
    table = embedding[known].double().requires_grad_()
    scale = weight.double().requires_grad_()
    with torch.enable_grad():
        rows = torch.nn.functional.embedding(torch.searchsorted(known, input_ids), table, padding_idx=0)
        y = torch.nn.functional.rms_norm(rows, weight.shape, scale, eps=EPS)
        grad_table, grad_weight = torch.autograd.grad(y, (table, scale), grad_y.double())
    torch.testing.assert_close(truth[0][known], grad_table, rtol=1e-9, atol=1e-11 * float(grad_table.abs().max()))
    torch.testing.assert_close(truth[1], grad_weight, rtol=1e-9, atol=1e-11 * float(grad_weight.abs().max()))
    unused = torch.ones(len(embedding), dtype=torch.bool, device=embedding.device).index_fill_(0, known[1:], False)
    assert not truth[0][unused].any(), "an id that does not occur, or padding, has a gradient"


def _token_gradients(
    grad_y: torch.Tensor, ids: torch.Tensor, embedding: torch.Tensor, weight: torch.Tensor, eps: float, along: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per token, float32 [T, D]: r q - e (r^3 mean(q e)) and grad_y z; ``along``: factor of the second term."""
    dy, e = grad_y.flatten(0, 1).float(), embedding[ids].float()
    r = 1 / torch.sqrt(e.square().mean(-1, keepdim=True) + eps)
    q = dy * weight.float()
    return r * q - e * (along * r**3 * (q * e).mean(-1, keepdim=True)), dy * (e * r)


def _sorted(
    grad_y: torch.Tensor,
    input_ids: torch.Tensor,
    embedding: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = EPS,
    along: float = 1.0,
    padding_row: bool = False,
    padding_in_weight: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens sorted by id, each run of an id summed by itself, no rounding before that; weight sums in blocks."""
    ids, order = input_ids.flatten().sort()
    grads, terms = _token_gradients(grad_y, input_ids.flatten(), embedding, weight, eps, along)
    used, counts = ids.unique_consecutive(return_counts=True)
    grad_embedding = torch.zeros_like(embedding)
    grad_embedding[used] = torch.segment_reduce(grads[order], "sum", lengths=counts, axis=0).bfloat16()
    if not padding_row:
        grad_embedding[0] = 0.0
    if not padding_in_weight:
        terms = terms * (input_ids.flatten() != 0).unsqueeze(1)
    blocks = torch.stack([part.sum(0) for part in terms.split(128)])
    return grad_embedding, blocks.sum(0).bfloat16()


def _bfloat16_sums(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A bfloat16 table, to which the k-th tokens of all ids are added together, for k = 0, 1, ..."""
    grad_y, input_ids, embedding, weight = inputs
    grads, terms = _token_gradients(grad_y, input_ids.flatten(), embedding, weight, EPS, 1.0)
    ids, order = input_ids.flatten().sort()
    used, counts = ids.unique_consecutive(return_counts=True)
    begins, table = counts.cumsum(0) - counts, torch.zeros_like(embedding)
    for k in range(int(counts.max())):
        left = counts > k
        table[used[left]] += grads[order[begins[left] + k]].bfloat16()
    table[0] = 0.0
    return table, terms.sum(0).bfloat16()


def _overwritten(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grad_y, input_ids, embedding, weight = inputs
    grads, terms = _token_gradients(grad_y, input_ids.flatten(), embedding, weight, EPS, 1.0)
    table = torch.zeros_like(embedding)
    table[input_ids.flatten()] = grads.bfloat16()
    table[0] = 0.0
    return table, terms.sum(0).bfloat16()


WRONG = {
    "sums of an id rounded to bfloat16 at every step": _bfloat16_sums,
    "a later token of an id overwrites the earlier ones": _overwritten,
    "padding's row gets a gradient": lambda *inputs: _sorted(*inputs, padding_row=True),
    "padding left out of grad_weight": lambda *inputs: _sorted(*inputs, padding_in_weight=False),
    "no projection along z": lambda *inputs: _sorted(*inputs, along=0.0),
    "epsilon 1e-5": lambda *inputs: _sorted(*inputs, eps=1e-5),
    "the weight left out": lambda dy, ids, table, w: _sorted(dy, ids, table, torch.ones_like(w)),
}
SECOND = {"tokens sorted by id, runs summed without rounding": _sorted}
