"""What a problem must hold before anyone is judged by it.

Each check takes a problem and raises :class:`Unqualified` with one sentence that says what is wrong and where. The
same checks run in the tests (on the CPU, at the shapes that the simulator judges), in ``mkb check-problem`` and, at
full size, in ``scripts/problems``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import msgspec
import torch
from torch.utils.flop_counter import FlopCounterMode

from mkb_env.devices.function import FunctionDevice, outline
from mkb_env.judge import draws, tolerance
from mkb_env.judge.draws import Value
from mkb_env.judge.evaluate import EvaluateOptions, evaluate
from mkb_env.judge.verdict import Evaluation, Stage
from mkb_env.plan import DTYPE_BYTES
from mkb_env.problems.contract import Problem, Shape, catalog, load, load_checks
from mkb_env.task import brief

SMALL_FLOPS, SMALL_BYTES = 10_000_000, 16 << 20
"""What ``small`` and one held-out shape may take: seconds in the simulator, even for a plain kernel."""
FULL_BYTES = 8 << 30
COUNTED = (0.45, 1.3)
"""COST's flops over those of the reference's matrix products: references multiply what is masked, too."""
SECTIONS = ("\nInputs", "\nOutput", "\nNumerics", " new tensor")
UNITS = ("bf16", "fp8", "tf32", "3xtf32", "fp32")
MOST_FLOPS = 200
"""Operations per input and output element, where the reference has no matrix products to count."""
CPU = torch.device("cpu")


class Unqualified(Exception):
    """A problem that breaks the contract."""


def require(holds: object, complaint: str) -> None:
    """Raise :class:`Unqualified` with ``complaint`` unless ``holds``."""
    if not holds:
        raise Unqualified(complaint)


def quick_shapes(problem: Problem) -> list[tuple[str, int]]:
    """(workload, index) of every shape that the simulator judges."""
    return [
        (workload, index)
        for workload in ("small", "heldout")
        for index, shape in enumerate(problem.shapes(workload))
        if problem.fits_simulator(shape)
    ]


# -- what the file says ------------------------------------------------------------------------------------------------


def check_text(problem: Problem) -> None:
    """The docstring has its sections and mentions every input and output; the constants can be read."""
    for section in SECTIONS:
        require(section in problem.task, f"the task text has no {section.strip()!r}")
    for name in (*problem.inputs, *problem.outputs):
        require(re.search(rf"\b{re.escape(name)}\b", problem.task), f"the task text does not mention {name}")
    unfilled = [path.name for path in sorted(problem.ref.folder.glob("*.py")) if "FILL IN" in path.read_text("utf-8")]
    require(not unfilled, f"{' and '.join(unfilled)} still say FILL IN")
    told = brief(problem.slug)
    require((told.inputs, told.outputs) == (problem.inputs, problem.outputs), "INPUTS and OUTPUTS must be literals")
    others = {slug: brief(slug).number for slug in catalog() if slug != problem.slug}
    same = [slug for slug, number in others.items() if number == problem.number]
    require(not same, f"NUMBER {problem.number} is that of {', '.join(same)} too; take {max(others.values()) + 1}")
    longest = max(map(len, problem.task.splitlines()))
    require(longest <= 120, f"the task text has a line of {longest} characters; 120 fit")


def check_workloads(problem: Problem) -> None:
    """Full, small and held-out shapes: plain data, of the right size, all different."""
    require(set(problem.workloads) == {"full", "small", "heldout"}, "WORKLOADS must have full, small and heldout")
    require(json.loads(json.dumps(problem.workloads)) == problem.workloads, "WORKLOADS must be plain JSON data")
    full, small, held_out = (problem.shapes(name) for name in ("full", "small", "heldout"))
    require(len(held_out) >= 2, "WORKLOADS needs at least two heldout shapes")
    shown = [*full, *small]
    require(all(shape not in shown for shape in held_out), "a heldout shape is also full or small")
    require(_is_small(problem, small[0]), f"small takes more than {SMALL_FLOPS} flops or {SMALL_BYTES >> 20} MiB")
    require(any(_is_small(problem, s) for s in held_out), "one heldout shape must be as small as small may be")
    size = problem.tensor_bytes(full[0])
    require(size < FULL_BYTES, f"full has {size / 2**30:.1f} GiB of inputs and outputs, 8 GiB are allowed")


def _is_small(problem: Problem, shape: Shape) -> bool:
    return problem.cost(shape).flops <= SMALL_FLOPS and problem.tensor_bytes(shape) <= SMALL_BYTES


def check_specs(problem: Problem) -> None:
    """Specs name what a plan can name; geometry is given for exactly the visible inputs."""
    for workload in problem.workloads:
        for shape in problem.shapes(workload):
            specs = problem.input_specs(shape)
            require(len(specs) == len(problem.inputs), "input_specs and INPUTS differ in number")
            require(
                len(problem.output_specs(shape)) == len(problem.outputs), "output_specs and OUTPUTS differ in number"
            )
            for name, spec in zip(
                (*problem.inputs, *problem.outputs), (*specs, *problem.output_specs(shape)), strict=True
            ):
                if isinstance(spec, tuple):
                    require(str(spec[1]).removeprefix("torch.") in DTYPE_BYTES, f"{name}: no plan knows {spec[1]}")
                    require(all(type(size) is int for size in spec[0]), f"{name}: sizes must be ints, got {spec[0]}")
                else:
                    require(isinstance(spec, bool | int | float), f"{name}: a scalar must be bool, int or float")
            geometry = problem.geometry(shape) if problem.geometry else {}
            require(set(geometry) == set(problem.host_visible), "geometry must give exactly what HOST_VISIBLE names")


def check_cost(problem: Problem, checks: ModuleType) -> None:
    """COST is positive, moves no more than all tensors and no less than the outputs, and fits the counted flops."""
    for workload in problem.workloads:
        for shape in problem.shapes(workload):
            cost, where = problem.cost(shape), f"COST({shape})"
            require(type(cost.bytes) is int and type(cost.flops) is int, f"{where} must be in ints, got {cost}")
            require(cost.bytes > 0 and cost.flops > 0 and cost.unit in UNITS, f"{where} is {cost}")
            outputs = _bytes(problem.output_specs(shape))
            total = outputs + _bytes(problem.input_specs(shape))
            require(outputs <= cost.bytes, f"{where} moves {cost.bytes} bytes, but the outputs alone have {outputs}")
            require(cost.bytes <= total, f"{where} moves {cost.bytes} bytes, but all tensors together have {total}")
    small = problem.shapes("small")[0]
    specs = (*problem.input_specs(small), *problem.output_specs(small))
    elements = sum(torch.Size(spec[0]).numel() for spec in specs if isinstance(spec, tuple))
    counted = counted_flops(problem, small)
    if not counted:
        flops = problem.cost(small).flops
        require(flops <= MOST_FLOPS * elements, f"COST's flops are {flops}, over {MOST_FLOPS} per element")
    else:
        low, high = getattr(checks, "COUNTED", COUNTED)
        ratio = problem.cost(small).flops / counted
        require(low <= ratio <= high, f"COST's flops are {ratio:.3f} times those counted, not within {low} to {high}")


def _bytes(specs: Sequence[Any]) -> int:
    return sum(torch.Size(spec[0]).numel() * spec[1].itemsize for spec in specs if isinstance(spec, tuple))


def counted_flops(problem: Problem, shape: Shape) -> int:
    """Operations in the reference's matrix products and convolutions at ``shape``; runs it on the CPU."""
    inputs = draws.draw(problem, shape, 1, CPU, shift=False)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        problem.reference(*inputs)
    return int(counter.get_total_flops())


# -- what it computes --------------------------------------------------------------------------------------------------


def check_draws(problem: Problem, shape: Shape, device: torch.device = CPU) -> None:
    """Inputs follow the generator alone, fit their specs, and share no memory."""
    torch.manual_seed(1)
    first = draws.draw(problem, shape, 5, device, shift=False)
    torch.manual_seed(2)
    again, other = (draws.draw(problem, shape, seed, device, shift=False) for seed in (5, 6))
    require(not draws.changed(first, again, device).any(), "one seed gave two draws: use the generator for everything")
    require(draws.changed(first, other, device).any(), "two seeds gave the same inputs")
    generator = torch.Generator(device).manual_seed(5)
    tensors = {
        n: v for n, v in zip(problem.inputs, problem.make_inputs(generator, shape), strict=True) if _is_tensor(v)
    }
    for name, value in tensors.items():
        require(value.device.type == device.type, f"{name} is on {value.device}, the generator on {device}")
        require(value.is_contiguous(), f"{name} is not contiguous")
    addresses = [value.untyped_storage().data_ptr() for value in tensors.values() if value.numel()]
    require(len(set(addresses)) == len(addresses), "two inputs share memory")
    for name, values in (problem.geometry(shape) if problem.geometry else {}).items():
        require(tensors[name].tolist() == list(values), f"{name} is not what geometry says")


def _is_tensor(value: Value) -> bool:
    return isinstance(value, torch.Tensor)


def check_reference(problem: Problem, shape: Shape, device: torch.device = CPU) -> None:
    """Outputs fit their specs and alias nothing, inputs stay, the reference passes and zeros do not."""
    given = draws.draw(problem, shape, 3, device)
    outputs = draws.expected(problem, shape, given)
    require(
        not draws.changed(given, draws.draw(problem, shape, 3, device), device).any(), "the reference changes inputs"
    )
    owned = {value.untyped_storage().data_ptr() for value in given if isinstance(value, torch.Tensor) and value.numel()}
    for name, output in zip(problem.outputs, outputs, strict=True):
        require(output.is_contiguous(), f"{name} is not contiguous")
        address = output.untyped_storage().data_ptr()
        require(not output.numel() or address not in owned, f"{name} shares memory with an input or another output")
        owned.add(address)
    truth = draws.decoded(problem, draws.anchors(problem, given, outputs))
    wanted, zeros = (draws.decoded(problem, v) for v in (outputs, [torch.zeros_like(output) for output in outputs]))
    for position, name in enumerate(problem.outputs):
        found = tolerance.compare(problem, position, wanted[position], wanted[position], truth[position], given)
        require(found.passed, f"{name}: the reference itself is {found.share:.3g} times its allowance off the anchor")
        if truth[position].numel() and bool((wanted[position] != zeros[position]).any()):
            blank = tolerance.compare(problem, position, zeros[position], wanted[position], truth[position], given)
            require(not blank.passed, f"{name}: an output of zeros passes")


def check_independent(problem: Problem, checks: ModuleType, shape: Shape, device: torch.device = CPU) -> None:
    """The anchor's outputs agree with what ``checks.independent`` computes by other means."""
    inputs = draws.draw(problem, shape, 4, device)
    truth = draws.anchors(problem, inputs, draws.expected(problem, shape, inputs))
    try:
        checks.independent(inputs, truth)
    except AssertionError as error:
        raise Unqualified(f"the anchor differs from {checks.INDEPENDENT}: {error}") from None


def check_variants(
    problem: Problem,
    checks: ModuleType,
    shape: Shape,
    device: torch.device = CPU,
    options: EvaluateOptions | None = None,
) -> dict[str, Evaluation]:
    """The judge rejects every function of ``WRONG`` and accepts every one of ``SECOND``; the evaluations by name."""
    require(checks.WRONG and checks.SECOND, "checks.py needs at least one function in WRONG and one in SECOND")
    options = options or EvaluateOptions(timing=False, correctness_draws=2)
    found: dict[str, Evaluation] = {}
    for expected, functions in ((Stage.INCORRECT, checks.WRONG), (Stage.PASSED, checks.SECOND)):
        for name, function in functions.items():
            evaluation = evaluate(problem, shape, outline(problem, shape), FunctionDevice(function, device), options)
            require(
                evaluation.stage is expected,
                f"{name!r} at {shape} came out as {evaluation.stage.value}, not {expected.value}: {evaluation.message}",
            )
            found[name] = evaluation
    return found


# -- all of it ---------------------------------------------------------------------------------------------------------


class Finding(msgspec.Struct, frozen=True):
    """What one check found."""

    check: str
    passed: bool
    message: str = ""


def examine(slug: str, device: str = "cpu", workload: str | None = None) -> Iterator[Finding]:
    """Run every check of one problem, at the shapes of ``workload`` or at all that a CPU does quickly.

    Raises:
        ValueError: if there is no such problem or workload, or its files lack what the contract asks for.
    """
    problem, checks = load(slug), load_checks(slug)
    if workload is None:
        places = quick_shapes(problem)
    else:
        places = [(workload, index) for index in range(len(problem.shapes(workload)))]
    yield _find("text", lambda: check_text(problem))
    yield _find("workloads", lambda: check_workloads(problem))
    yield _find("specs", lambda: check_specs(problem))
    yield _find("cost", lambda: check_cost(problem, checks))
    where = torch.device(device)
    for name, index in places:
        shape = problem.shapes(name)[index]
        place = f"{name} {index}" if name == "heldout" else name
        yield _find(f"draws, {place}", partial(check_draws, problem, shape, where))
        right = _find(f"reference, {place}", partial(check_reference, problem, shape, where))
        yield right
        if not right.passed:  # what follows would only blame others for it
            continue
        yield _find(f"independent, {place}", partial(check_independent, problem, checks, shape, where))
        if name != "heldout":
            yield _find(f"variants, {place}", partial(check_variants, problem, checks, shape, where))


def _find(name: str, check: Callable[[], object]) -> Finding:
    try:
        check()
    except (Unqualified, draws.ProblemError) as error:
        return Finding(name, False, str(error))
    except Exception as error:  # the problem's own code: whatever it raises is a finding
        return Finding(name, False, f"{type(error).__name__}: {error}")
    return Finding(name, True)
