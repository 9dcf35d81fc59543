"""An estimate of what the reference takes in eager PyTorch on an H200, for verdicts of the simulator.

Eager execution is a sequence of kernels, each of which takes the longest of three times: the host's to launch it, the
memory's to move its operands, the arithmetic units' to compute. The estimate adds these up over the operators that
the reference dispatches, whatever device it runs on. It serves to rank kernels on a machine without a GPU, and is
marked as simulated everywhere; the measured baseline takes its place on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mkb_env.judge.draws import Value, strict_math
from mkb_env.problems.contract import Problem
from mkb_env.recorder.dispatch import QuickDispatchMode

LAUNCH_US = 5.0
"""Host time of one eager operator that launches a kernel (dispatch, allocation, launch); measured 4.5-6 us, H200."""
VIEW_US = 1.0
"""Host time of an operator that launches nothing: a view, an allocation."""
SYNC_US = 15.0
"""A value read by the host: the stream drains, 8 bytes cross the bus."""
MEMORY_BYTES_PER_US = 0.7 * 4.8e6
"""4.8 TB/s (H200 datasheet) times 0.7, as for kernels: the references of both norms reach 2.9 to 3.1 TB/s, cold."""
FLOPS_PER_US = {
    torch.bfloat16: 790e6,  # measured, 8192^3; datasheet 989 TFLOP/s dense
    torch.float16: 790e6,
    torch.float8_e4m3fn: 1580e6,  # 0.8 of the datasheet's 1979 TFLOP/s, as for bf16
    torch.float8_e5m2: 1580e6,
    torch.float32: 50e6,  # CUDA cores, TF32 off: 0.75 of the datasheet's 67 TFLOP/s
    torch.float64: 50e6,  # tensor cores, datasheet 67 TFLOP/s
}
"""Rate of matrix products by operand dtype."""

_GATHERS = {"index", "gather", "index_select", "embedding", "take", "take_along_dim"}
"""Operators that read only as much of their first operand as they return."""
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view"}


def eager_us(problem: Problem, inputs: Sequence[Value]) -> float:
    """Estimated duration of ``problem.reference(*inputs)`` in microseconds. Runs it once."""
    model = _EagerModel()
    with strict_math(), torch.no_grad(), model:
        problem.reference(*inputs)
    return model.total_us


class _EagerModel(QuickDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.total_us = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.total_us += _operator_us(func, args, kwargs, result)
        return result


def _operator_us(func: Any, args: tuple, kwargs: dict, result: Any) -> float:
    name = func._schema.name.removeprefix("aten::")
    if name in ("_local_scalar_dense", "nonzero", "masked_select"):
        return SYNC_US
    aliases = [value.alias_info for value in func._schema.returns if value.alias_info is not None]
    if name in _ALLOCATIONS or any(not alias.is_write for alias in aliases):
        return VIEW_US
    operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if name in _GATHERS:
        moved = 2 * sum(map(_bytes, results)) + sum(map(_bytes, operands[1:]))
    else:
        moved = sum(_bytes(tensor) for tensor in {id(t): t for t in (*operands, *results)}.values())
    flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=result) if _counts(func) else 0
    rate = FLOPS_PER_US.get(operands[0].dtype if operands else torch.float32, FLOPS_PER_US[torch.float32])
    return max(LAUNCH_US, moved / MEMORY_BYTES_PER_US, flops / rate)


def _counts(func: Any) -> bool:
    return func.overloadpacket in flop_registry


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes that reading a tensor once touches; an expanded tensor is no larger than its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
