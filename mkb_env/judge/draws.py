"""Secret-seed inputs, and what the reference makes of them.

The candidate never shares an address, a seed or a moment with an expected value: inputs lie at a random place of their
allocation, seeds come from the system's randomness and leave the judge only as one hash, and the reference runs on a
second copy of the inputs that is drawn anew from the seed once the candidate is done. The same second copy proves,
bit by bit, that the candidate left its inputs alone: unlike a checksum it needs no secret, cannot collide, and gives
the reference tensors that the candidate never could write to.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mkb_env.plan import DTYPE_BYTES
from mkb_env.problems.contract import Problem, Shape

Value = torch.Tensor | bool | int | float

ALIGNMENT = 512
"""Bytes; what CUDA's and torch's allocators give, so that no kernel sees less alignment than in an ordinary program."""
SHIFT_PLACES = 2048
"""An input begins at one of this many aligned places of its allocation."""


class ProblemError(Exception):
    """A problem that breaks its own contract: our fault, never the candidate's."""


def new_seeds(count: int) -> tuple[int, ...]:
    """``count`` independent 63-bit seeds from the system's randomness."""
    return tuple(secrets.randbits(63) for _ in range(count))


def seeds_sha256(seeds: Sequence[int]) -> str:
    """Hash, in hex, that commits to the seeds without revealing them."""
    return hashlib.sha256(b"".join(seed.to_bytes(8, "little") for seed in seeds)).hexdigest()


def draw(problem: Problem, shape: Shape, seed: int, device: torch.device, shift: bool = True) -> tuple[Value, ...]:
    """``solve``'s arguments for one seed, contiguous, on ``device``; with ``shift`` at random addresses.

    Raises:
        ProblemError: if ``make_inputs`` gives other inputs than ``input_specs`` says.
    """
    generator = torch.Generator(device).manual_seed(seed)
    inputs = tuple(problem.make_inputs(generator, shape))
    specs = problem.input_specs(shape)
    if (got := [_spec(value) for value in inputs]) != [
        spec if isinstance(spec, tuple) else _spec(spec) for spec in specs
    ]:
        raise ProblemError(f"{problem.slug}: make_inputs gives {got}, input_specs says {specs}")
    return tuple(_place(value, shift) if isinstance(value, torch.Tensor) else value for value in inputs)


def _spec(value: Value) -> tuple[tuple[int, ...], torch.dtype] | tuple[type, bool | int | float]:
    """What ``input_specs`` has to say of a value: sizes and dtype of a tensor, type and value of a scalar."""
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else (type(value), value)


def _place(tensor: torch.Tensor, shift: bool) -> torch.Tensor:
    """A contiguous tensor, copied to a random aligned place of an allocation of its own if ``shift`` is set.

    The allocation has the same size in every draw, so that a caching allocator reuses it instead of asking the driver.
    """
    tensor = tensor.detach().contiguous()
    if not shift or not tensor.numel():
        return tensor
    arena = torch.empty(tensor.nbytes + ALIGNMENT * SHIFT_PLACES, dtype=torch.uint8, device=tensor.device)
    begin = -arena.data_ptr() % ALIGNMENT + ALIGNMENT * secrets.randbelow(SHIFT_PLACES - 1)
    placed = arena[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return placed.copy_(tensor)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a contiguous tensor as a flat integer tensor of the widest fitting type."""
    flat = tensor.contiguous().flatten().view(torch.uint8)
    for dtype in (torch.int64, torch.int32, torch.int16):
        size = DTYPE_BYTES[str(dtype).removeprefix("torch.")]
        if flat.numel() % size == 0 and flat.data_ptr() % size == 0:
            return flat.view(dtype)
    return flat


def changed(left: Sequence[Value], right: Sequence[Value], device: torch.device) -> torch.Tensor:
    """Which inputs differ in any bit between two copies: bool, one per argument, on ``device`` (no host wait)."""
    flags = [
        (raw(a) != raw(b)).any()
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else torch.zeros((), dtype=torch.bool, device=device)
        for a, b in zip(left, right, strict=True)
    ]
    return torch.stack(flags) if flags else torch.zeros(0, dtype=torch.bool, device=device)


def leaves(result: object) -> tuple[torch.Tensor, ...]:
    """The tensors of a reference's result, in order.

    Raises:
        ProblemError: if it is neither a tensor nor a tuple or list of tensors.
    """
    if isinstance(result, torch.Tensor):
        return (result,)
    if isinstance(result, (tuple, list)) and all(isinstance(item, torch.Tensor) for item in result):
        return tuple(result)
    raise ProblemError(f"a reference returns a tensor or a tuple of tensors, got {type(result).__name__}")


def expected(problem: Problem, shape: Shape, inputs: Sequence[Value]) -> tuple[torch.Tensor, ...]:
    """The reference's outputs for ``inputs``, in full fp32 precision.

    Raises:
        ProblemError: if they are not what the problem's ``output_specs`` says.
    """
    with strict_math(), torch.no_grad():
        result = leaves(problem.reference(*inputs))
    specs = [(tuple(size), dtype) for size, dtype in problem.output_specs(shape)]
    if (got := [(tuple(tensor.shape), tensor.dtype) for tensor in result]) != specs:
        raise ProblemError(f"{problem.slug}: the reference returns {got}, output_specs says {specs}")
    return result


def decoded(problem: Problem, outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The numbers that the outputs stand for: themselves, or what the problem's ``decode`` makes of codes."""
    if problem.decode is None:
        return tuple(outputs)
    named = dict(zip(problem.outputs, outputs, strict=True))
    values = (problem.decode(name, named) for name in problem.outputs)
    return tuple(own if value is None else value for value, own in zip(values, outputs, strict=True))


def anchors(problem: Problem, inputs: Sequence[Value], reference: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The truth for every output: float64 for floating outputs, the reference's own type for integers.

    The problem's ``anchor``, else its reference on inputs widened to float64.

    Raises:
        ProblemError: if they do not fit the reference's outputs, or were not computed in float64.
    """
    with strict_math(), torch.no_grad():
        if problem.anchor is not None:
            truth = leaves(problem.anchor(*inputs))
        else:
            truth = leaves(problem.reference(*(_widen(value) for value in inputs)))
    if [t.shape for t in truth] != [r.shape for r in reference]:
        raise ProblemError(f"{problem.slug}: the fp64 anchor and the reference return different shapes")
    for position, (exact, rounded) in enumerate(zip(truth, reference, strict=True)):
        if rounded.is_floating_point() and exact.dtype is not torch.float64:
            raise ProblemError(
                f"{problem.slug}: the anchor of output {position} is {exact.dtype}, not float64; "
                "let the reference follow its inputs' type or give the problem its own anchor"
            )
    return truth


def _widen(value: Value) -> Value:
    return value.to(torch.float64) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@contextmanager
def strict_math() -> Iterator[None]:
    """No TF32 and no reduced-precision reductions while the reference runs; the former settings come back after."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    places: tuple[tuple[Any, str], ...] = (
        (matmul, "allow_tf32"),
        (cudnn, "allow_tf32"),
        (matmul, "allow_bf16_reduced_precision_reduction"),
        (matmul, "allow_fp16_reduced_precision_reduction"),
        (matmul, "allow_fp16_accumulation"),
    )
    before = [getattr(module, name) for module, name in places]
    try:
        for module, name in places:
            setattr(module, name, False)
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)
