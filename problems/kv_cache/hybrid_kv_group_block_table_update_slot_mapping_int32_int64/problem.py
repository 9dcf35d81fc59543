"""Write newly allocated blocks into the block tables of three groups of cache layers with different page sizes, then
find the slot of every scheduled token in each group (hybrid models).

There are 3 groups g, R request rows, tables of W_g columns, S staged writes of up to C block ids, B rows in the batch
and N tokens at most. Allocated blocks hold A = (16, 32, 8) tokens by group; the kernels' pages hold K = (16, 16, 8), so
an allocated block makes X = A / K = (1, 2, 1) pages.

Inputs, contiguous and row-major:
  block_table_0    [R, W_0]    int32  pages of each request, group 0
  block_table_1    [R, W_1]    int32
  block_table_2    [R, W_2]    int32
  num_blocks       [3, R]      int32  pages in use of each request by group
  write_requests   [S]         int32  request row of each write, in [0, R); rows may occur several times
  overwrite        [S]         bool   whether a write begins at column 0 rather than behind the pages in use
  staged_ids       [3, S, C]   int32  allocated blocks by group and write; -1 from staged_counts on
  staged_counts    [3, S]      int32  how many, 0 to C
  idx_mapping      [B]         int32  request row of each row of the batch, all different
  query_start_loc  [B + 1]     int32  0 = query_start_loc[0] <= ... <= query_start_loc[B] <= N
  positions        [N]         int64  position of each token in its request; positions[i] // K_g < W_g

Outputs, a tuple in this order, contiguous and row-major:
  block_table_0    [R, W_0]    int32
  block_table_1    [R, W_1]    int32
  block_table_2    [R, W_2]    int32
  num_blocks       [3, R]      int32
  slot_mappings    [3, N]      int64

First, beginning with copies of the four inputs of the same names, for each group g and each write w = 0, 1, ..., S - 1
in this order, with r = write_requests[w] and c = staged_counts[g, w]:
  start = 0 if overwrite[w] else num_blocks[g, r]
  block_table_g[r, start + X_g j + e] = X_g staged_ids[g, w, j] + e     for 0 <= j < c, 0 <= e < X_g
  num_blocks[g, r] = start + X_g c
Then, from the updated tables, for each batch row b and token i with query_start_loc[b] <= i < query_start_loc[b + 1]:
  page = block_table_g[idx_mapping[b], positions[i] // K_g]
  slot_mappings[g, i] = page K_g + positions[i] % K_g
and slot_mappings[g, i] = -1 for all i >= query_start_loc[B].

Numerics: integers are exact. Pages fit int32, slots need not: they are computed in int64.

Rules:
- Several writes to one row take effect in their order: the next begins where the last one ended.
- Columns behind the new end keep what they held, also after overwriting; with c = 0 only the count becomes 0 then.
- Columns are read whether or not they lie below num_blocks.
- start + X_g c <= W_g always. Batch rows may have no tokens.
- query_start_loc is fixed by the workload and its values are visible to host code; those of all other inputs are not.
- The inputs are not changed; each output is a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mkb_env.problems.contract import Cost, Shape, Spec
from mkb_env.problems.drawing import integers, offsets, permutation, redraw

TITLE = "Block-table updates and slot mappings for three KV-cache groups"
NUMBER = 26
MODEL = "hybrid models"
INPUTS = (
    "block_table_0", "block_table_1", "block_table_2", "num_blocks", "write_requests", "overwrite", "staged_ids",
    "staged_counts", "idx_mapping", "query_start_loc", "positions",
)  # fmt: skip
OUTPUTS = ("block_table_0", "block_table_1", "block_table_2", "num_blocks", "slot_mappings")
HOST_VISIBLE = ("query_start_loc",)
ALLOCATED, PAGE = (16, 32, 8), (16, 16, 8)
EXPANSION = tuple(a // k for a, k in zip(ALLOCATED, PAGE, strict=True))
FAR = 2**27
WORKLOADS = {
    "full": {
        "R": 64, "S": 128, "C": 4, "N": 4096, "widths": [512, 1024, 512], "lengths": [37 * b % 65 for b in range(64)],
        "positions": 64, "initial": 10, "first_id": FAR,
    },
    "small": {
        "R": 4, "S": 16, "C": 2, "N": 24, "widths": [16, 32, 16], "lengths": [5, 0, 6, 3], "positions": 32,
        "initial": 6, "first_id": FAR,
    },
    "heldout": [
        {
            "R": 37, "S": 150, "C": 5, "N": 1500, "widths": [128, 256, 128],
            "lengths": [b % 5 and 29 * b % 97 for b in range(23)], "positions": 640, "initial": 10, "repeats": 9,
        },
        {
            "R": 16, "S": 32, "C": 4, "N": 512, "widths": [512, 1024, 512],
            "lengths": [b % 2 * (3 * b + 7) for b in range(16)], "positions": 64, "first_id": FAR, "empty_group": 2,
        },
    ],
}  # fmt: skip


def geometry(shape: Shape) -> dict[str, list[int]]:
    """Where each batch row's tokens begin."""
    return {"query_start_loc": offsets(shape["lengths"])}


def input_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``INPUTS``."""
    rows, writes, batch = shape["R"], shape["S"], len(shape["lengths"])
    return (
        *(((rows, width), torch.int32) for width in shape["widths"]),
        ((3, rows), torch.int32),
        ((writes,), torch.int32),
        ((writes,), torch.bool),
        ((3, writes, shape["C"]), torch.int32),
        ((3, writes), torch.int32),
        ((batch,), torch.int32),
        ((batch + 1,), torch.int32),
        ((shape["N"],), torch.int64),
    )


def output_specs(shape: Shape) -> tuple[Spec, ...]:
    """Sizes and dtype of each of ``OUTPUTS``."""
    return *input_specs(shape)[:4], ((3, shape["N"]), torch.int64)


def make_inputs(generator: torch.Generator, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Random ids, counts, rows and positions, in ``INPUTS``' order.

    Ids lie in [first_id, first_id + 2048), initial counts in [0, initial]. Without ``repeats`` the writes' rows are
    random orders of all rows one after another, with it each write has any row, none more often than ``repeats``.
    Group ``empty_group`` has no staged ids.
    """
    rows, writes, most, device = shape["R"], shape["S"], shape["C"], generator.device
    first = shape.get("first_id", 0)

    def ids(*sizes: int) -> torch.Tensor:
        return integers(generator, *sizes, low=first, high=first + 2048)

    tables = [ids(rows, width) for width in shape["widths"]]
    num_blocks = integers(generator, 3, rows, high=shape.get("initial", 0) + 1)
    if repeats := shape.get("repeats"):
        every = torch.arange(rows, device=device)
        requests = redraw(
            lambda n: integers(generator, n, writes, high=rows),
            lambda drawn: (drawn.unsqueeze(2) == every).sum(dim=1).amax(dim=1) <= repeats,
            rows=1,
        )[0].clone()
    else:
        requests = torch.cat([permutation(generator, rows) for _ in range(writes // rows)])
    overwrite = integers(generator, writes, high=2).bool()
    counts = integers(generator, 3, writes, high=most + 1)
    if "empty_group" in shape:
        counts[shape["empty_group"]] = 0
    filled = torch.arange(most, device=device, dtype=torch.int32) < counts.unsqueeze(2)
    staged = torch.where(filled, ids(3, writes, most), -1)
    batch = permutation(generator, rows)[: len(shape["lengths"])].clone()
    begins = torch.tensor(geometry(shape)["query_start_loc"], dtype=torch.int32, device=device)
    positions = integers(generator, shape["N"], high=shape["positions"], dtype=torch.int64)
    return *tables, num_blocks, requests, overwrite, staged, counts, batch, begins, positions


def reference(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The module's formula; what steers it is read to the host once."""
    tables, (counts, *staged), scheduled = [table.clone() for table in inputs[:3]], inputs[3:8], inputs[8:]
    new_counts = _write(tables, counts, *staged)
    return *tables, new_counts, _slots(tables, *scheduled)


def _write(
    tables: Sequence[torch.Tensor],
    num_blocks: torch.Tensor,
    write_requests: torch.Tensor,
    overwrite: torch.Tensor,
    staged_ids: torch.Tensor,
    staged_counts: torch.Tensor,
) -> torch.Tensor:
    """Put the staged blocks into ``tables``, write by write; the new counts."""
    in_use, requests, fresh = num_blocks.tolist(), write_requests.tolist(), overwrite.tolist()
    for table, ids, counts, used, expansion in zip(
        tables, staged_ids, staged_counts.tolist(), in_use, EXPANSION, strict=True
    ):
        parts = torch.arange(expansion, dtype=ids.dtype, device=ids.device)
        pages = (ids.unsqueeze(2) * expansion + parts).flatten(1)
        for w, row in enumerate(requests):
            start = 0 if fresh[w] else used[row]
            used[row] = start + counts[w] * expansion
            if counts[w]:
                table[row, start : used[row]] = pages[w, : counts[w] * expansion]
    return torch.tensor(in_use, dtype=num_blocks.dtype, device=num_blocks.device)


def _slots(
    tables: Sequence[torch.Tensor], idx_mapping: torch.Tensor, query_start_loc: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Each token's slot by group, -1 for tokens that no batch row has."""
    rows = torch.repeat_interleave(idx_mapping, query_start_loc.diff())
    slots = torch.full((len(tables), len(positions)), -1, dtype=torch.int64, device=positions.device)
    scheduled = positions[: len(rows)]
    for table, size, mapping in zip(tables, PAGE, slots, strict=True):
        mapping[: len(rows)] = table[rows, scheduled // size].long() * size + scheduled % size
    return slots


def COST(shape: Shape) -> Cost:
    """Tables and counts read and written, writes and the scheduled tokens' positions read, slots written."""
    rows, writes, batch, tokens = shape["R"], shape["S"], len(shape["lengths"]), sum(shape["lengths"])
    tables = 2 * 4 * rows * (sum(shape["widths"]) + 3)
    staged = writes * (4 + 1 + 3 * 4 * (shape["C"] + 1))
    others = 4 * (2 * batch + 1) + 8 * tokens + 8 * 3 * shape["N"]
    return Cost(bytes=tables + staged + others, flops=1, unit="fp32")
