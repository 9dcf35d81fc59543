"""What can be said of a plan's inputs and outputs before any value is compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mkb_env.judge.draws import Value
from mkb_env.plan import DTYPE_BYTES, LaunchPlan, TensorView
from mkb_env.problems.contract import Problem, Shape


def misfit(plan: LaunchPlan, problem: Problem, inputs: Sequence[Value]) -> str:
    """Why the plan's input buffers cannot stand for ``inputs``, or an empty string."""
    for buffer in plan.buffers:
        if buffer.input is None:
            continue
        if buffer.input >= len(inputs):
            return f"the plan reads input {buffer.input}, but solve has {len(inputs)} arguments"
        value, name = inputs[buffer.input], problem.inputs[buffer.input]
        if not isinstance(value, torch.Tensor):
            return f"the plan reads argument {buffer.input} (`{name}`) as a tensor, but it is a {type(value).__name__}"
        if buffer.nbytes != value.nbytes:
            return (
                f"the plan was recorded for another workload: input {buffer.input} (`{name}`) has {value.nbytes} bytes "
                f"here and {buffer.nbytes} in the plan"
            )
    return ""


def aliases(plan: LaunchPlan, device: torch.device) -> str:
    """Which output shares bytes with an input, another output or itself, or an empty string."""
    for position, view in enumerate(plan.outputs):
        source = plan.buffers[view.buffer].input
        if source is not None and view.numel:
            return (
                f"output[{position}] lies in the memory of input {source}; outputs must be tensors of their own: "
                "allocate one and let a kernel write it"
            )
    for position, view in enumerate(plan.outputs):
        if _overlaps_itself(view):
            return (
                f"output[{position}] has shape {view.shape} with strides {view.strides}: several of its elements share "
                "one address; return a tensor whose every element has memory of its own"
            )
        for other in range(position):
            if _overlap(view, plan.outputs[other], device):
                return f"output[{other}] and output[{position}] share memory; every output needs memory of its own"
    return ""


def _overlaps_itself(view: TensorView) -> bool:
    """Whether the strides are smaller than what they step over (no false alarm for slices, transposes, permutes)."""
    reach = 0
    for stride, size in sorted(zip(view.strides, view.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _overlap(first: TensorView, second: TensorView, device: torch.device) -> bool:
    """Whether two outputs share a byte; slices of one buffer that interleave do not."""
    if first.buffer != second.buffer or not first.numel or not second.numel:
        return False
    if first.end <= second.offset or second.end <= first.offset:
        return False
    begin, end = min(first.offset, second.offset), max(first.end, second.end)
    owned = torch.zeros(end - begin, dtype=torch.bool, device=device)
    _byte_view(owned, first, begin).fill_(True)
    return bool(_byte_view(owned, second, begin).any())


def _byte_view(flags: torch.Tensor, view: TensorView, begin: int) -> torch.Tensor:
    size = DTYPE_BYTES[view.dtype]
    return flags.as_strided((*view.shape, size), (*(s * size for s in view.strides), 1), view.offset - begin)


def wrong(plan: LaunchPlan, problem: Problem, shape: Shape) -> str:
    """How the plan's outputs differ in structure, shape or dtype from what the problem asks for, or ''."""
    specs = problem.output_specs(shape)
    kind = "tuple" if len(specs) > 1 else "tensor"
    tree = plan.output_tree
    flat = all(child.kind == "tensor" for child in tree.children)
    if tree.kind != kind or not flat or len(plan.outputs) != len(specs):
        got, wanted = _structure(tree.kind, len(tree.children)), _structure(kind, len(specs), problem.outputs)
        return f"solve returned {got}; it must return {wanted}"
    for position, (output, (size, dtype)) in enumerate(zip(plan.outputs, specs, strict=True)):
        if (output.shape, output.dtype) != (tuple(size), str(dtype).removeprefix("torch.")):
            return (
                f"output[{position}] (`{problem.outputs[position]}`) has shape {output.shape} and dtype "
                f"{output.dtype}; it must have shape {tuple(size)} and dtype {str(dtype).removeprefix('torch.')}"
            )
    return ""


def _structure(kind: str, count: int, names: Sequence[str] = ()) -> str:
    listed = f" ({', '.join(names)})" if names else ""
    return ("one tensor" if kind == "tensor" else f"a {kind} of {count} items") + listed
