"""What shows that the problem is right, and its tolerance neither blind nor brittle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from mkb_env.problems.kv_cache.common import with_inputs

from .problem import ALLOCATED, EXPANSION, INPUTS, PAGE, reference

INDEPENDENT = "the writes replayed on Python lists, and each token's slot from the numbers of its allocated block"


def independent(inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """All outputs, in Python's integers."""
    given = {name: value.tolist() for name, value in zip(INPUTS, inputs, strict=True)}
    for g in range(3):
        table, used = given[f"block_table_{g}"], given["num_blocks"][g]
        for w, row in enumerate(given["write_requests"]):
            staged = given["staged_ids"][g][w][: given["staged_counts"][g][w]]
            pages = [block * ALLOCATED[g] // PAGE[g] + e for block in staged for e in range(ALLOCATED[g] // PAGE[g])]
            kept = [] if given["overwrite"][w] else table[row][: used[row]]
            table[row] = kept + pages + table[row][len(kept) + len(pages) :]
            used[row] = len(kept) + len(pages)
        slots = []
        for row, (begin, end) in zip(given["idx_mapping"], pairwise(given["query_start_loc"]), strict=True):
            for position in given["positions"][begin:end]:
                column, place = divmod(position, PAGE[g])
                slots.append(table[row][column] * PAGE[g] + place)
        slots += [-1] * (len(given["positions"]) - len(slots))
        assert truth[g].tolist() == table, f"table {g}"
        assert truth[3][g].tolist() == used, f"counts {g}"
        assert truth[4][g].tolist() == slots, f"slots {g}"


def _row_by_row(*inputs: torch.Tensor) -> Any:
    """A thread for each group and row: it scans the row's writes for their places, then writes them."""
    tables, num_blocks = [table.clone() for table in inputs[:3]], inputs[3].clone()
    requests, fresh, staged, counts = (value.tolist() for value in inputs[4:8])
    for g, table in enumerate(tables):
        rows = table.tolist()
        for row, pages in enumerate(rows):
            used = int(num_blocks[g, row])
            for w in (w for w, request in enumerate(requests) if request == row):
                used = 0 if fresh[w] else used
                for block in staged[g][w][: counts[g][w]]:
                    for e in range(EXPANSION[g]):
                        pages[used] = block * EXPANSION[g] + e
                        used += 1
            num_blocks[g, row] = used
        tables[g] = torch.tensor(rows, dtype=table.dtype, device=table.device)
    return *tables, num_blocks, _slots_by_search(tables, *inputs[8:])


def _slots_by_search(
    tables: Sequence[torch.Tensor], batch: torch.Tensor, begins: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """A thread for each token: it finds its batch row by bisection."""
    tokens = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
    owners = torch.searchsorted(begins, tokens, right=True) - 1
    rows = batch[owners.clamp(max=len(batch) - 1)]
    slots = [
        table.flatten()[rows.long() * table.shape[1] + positions // size].long() * size + positions % size
        for table, size in zip(tables, PAGE, strict=True)
    ]
    return torch.where(owners < len(batch), torch.stack(slots), -1)


def _all_at_once(*inputs: torch.Tensor) -> Any:
    """Every write begins at the count that its row had at first; the later of two writes to a row wins."""
    tables, new_counts = [table.clone() for table in inputs[:3]], inputs[3].clone()
    for w, row in enumerate(inputs[4].tolist()):
        one = slice(w, w + 1)
        write = inputs[4][one], inputs[5][one], inputs[6][:, one], inputs[7][:, one]
        alone = reference(*inputs[:4], *write, *inputs[8:])
        new_counts[:, row] = alone[3][:, row]
        for table, former, written in zip(tables, inputs[:3], alone, strict=False):
            changed = written[row] != former[row]
            table[row, changed] = written[row, changed]
    return *tables, new_counts, _slots_by_search(tables, *inputs[8:])


def _slots_with(change: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """The reference's tables, but the slots that ``change`` makes of inputs, tables and right slots."""

    def function(*inputs: torch.Tensor) -> Any:
        *others, slots = reference(*inputs)
        return *others, change(inputs, others, slots)

    return function


def _of(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], **changes: torch.Tensor) -> torch.Tensor:
    """Slots from the given tables, with other values of some inputs."""
    names = ("idx_mapping", "query_start_loc", "positions")
    return _slots_by_search(outputs[:3], *(changes.get(name, inputs[INPUTS.index(name)]) for name in names))


WRONG = {
    "writes in the opposite order": with_inputs(
        reference,
        INPUTS,
        **{name: lambda given, name=name: given[name].flip(0) for name in ("write_requests", "overwrite")},
        **{name: lambda given, name=name: given[name].flip(1) for name in ("staged_ids", "staged_counts")},
    ),
    "appending only": with_inputs(reference, INPUTS, overwrite=lambda given: torch.zeros_like(given["overwrite"])),
    "initial counts ignored": with_inputs(reference, INPUTS, num_blocks=lambda given: 0 * given["num_blocks"]),
    "all writes at once": _all_at_once,
    "slots from the former tables": _slots_with(lambda given, new, slots: _of(given, given)),
    "the batch row for the request row": _slots_with(
        lambda given, new, slots: _of(new, given, idx_mapping=torch.arange(len(given[8]), device=slots.device))
    ),
    "slots in int32": _slots_with(lambda given, new, slots: slots.int().long()),
    "slot 0 for tokens past the end": _slots_with(lambda given, new, slots: slots.clamp(min=0)),
}
SECOND = {"a thread for each group and row, then one for each token": _row_by_row}
