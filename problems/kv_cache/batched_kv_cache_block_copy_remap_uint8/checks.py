"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .problem import reference

INDEPENDENT = "every output page held against the one page it must equal, by a dictionary of destinations"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """All pages of both outputs."""
    src_k, src_v, dst_k, dst_v, block_mapping = inputs
    origin = {destination: source for source, destination in block_mapping.tolist()}
    assert len(origin) == len(block_mapping), "a destination occurs twice"
    for output, source, former in ((truth[0], src_k, dst_k), (truth[1], src_v, dst_v)):
        for page in range(len(output)):
            want = source[origin[page]] if page in origin else former[page]
            assert torch.equal(output[page], want), f"page {page}"


def _with_map(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The reference with another list of pairs."""
    return lambda src_k, src_v, dst_k, dst_v, pairs: reference(src_k, src_v, dst_k, dst_v, change(pairs))


def _without_last_slot(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The last slot of each copied page stays."""
    outputs = reference(*inputs)
    for output, former in zip(outputs, inputs[2:4], strict=True):
        output[:, -1] = former[:, -1]
    return outputs


def _by_inverse(
    src_k: torch.Tensor, src_v: torch.Tensor, dst_k: torch.Tensor, dst_v: torch.Tensor, block_mapping: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every output page gathered from the one place it comes from."""
    pages = torch.arange(len(dst_k), device=dst_k.device)
    pages[block_mapping[:, 1]] = len(dst_k) + block_mapping[:, 0]
    return torch.cat((dst_k, src_k))[pages], torch.cat((dst_v, src_v))[pages]


WRONG = {
    "source and destination exchanged": _with_map(lambda pairs: pairs.flip(1)),
    "the last pair left out": _with_map(lambda pairs: pairs[:-1]),
    "pairs read column by column": _with_map(lambda pairs: pairs.flatten().view(2, -1).T),
    "pages of the destination caches as sources": lambda sk, sv, dk, dv, pairs: reference(dk, dv, dk, dv, pairs),
    "keys for values": lambda sk, sv, dk, dv, pairs: reference(sk, sk, dk, dv, pairs),
    "the last slot of a page left out": _without_last_slot,
}
SECOND = {
    "gather by the inverse of the mapping": _by_inverse,
    "pair by pair from the last": _with_map(lambda pairs: pairs.flip(0)),
}
