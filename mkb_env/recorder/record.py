"""Record one submission: import it, call ``solve`` over recorded tensors, hand back a plan or why there is none."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import io
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mkb_env.dsl import Dsl
from mkb_env.plan import Launch, OutputTree, PlanError, encode, validate
from mkb_env.recorder.errors import failure_from
from mkb_env.recorder.protocol import Call, Failure, OutputSpec, Recording, RecordRequest, TensorInput
from mkb_env.recorder.sink import Sink
from mkb_env.recorder.tape import Tape, dtype_name
from mkb_env.recorder.tensors import Recorder, recording

MODULE = "submission"
MAX_LOG = 4000


class Rejection(Exception):
    """The submission breaks the contract in a way that only its import or its result shows."""

    def __init__(self, kind: Any, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.failure = Failure(kind, message, hint=hint)


def record(request: RecordRequest, dsl: Dsl, scratch: Path, progress: Callable[[str], None]) -> Recording:
    """Run the submission in this process and return what it asked for. Never raises for what the submission does."""
    seconds: dict[str, float] = {}
    log = Log()
    tape = Tape(request.dsl)
    sink = Sink(tape, dsl.attach(tape, str(scratch)))
    recorder = Recorder(tape)
    path = scratch / f"{MODULE}.py"
    # with a byte-order mark, Python takes the file for UTF-8 whatever a coding line in it says
    path.write_text(request.source, encoding="utf-8-sig")
    plans: list[bytes] = []
    failure = None
    with log.capturing():
        try:
            with timed(seconds, "import"), recording(recorder):
                progress("import")
                solve = check_solve(load(path), len(request.calls[0].inputs))
            for call in request.calls:
                tape.begin_call()
                arguments = make_arguments(call, recorder)
                with timed(seconds, "solve"), recording(recorder):
                    progress("solve")
                    result = solve(*arguments)
                plans.append(finish(result, call, recorder, dsl, request.source))
        except Rejection as rejection:
            failure = rejection.failure
        except PlanError as error:
            failure = Failure("launch_error", f"the launches cannot run: {error}")
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: they are the submission's
            failure = failure_from(tape.refusal or error, error, path, request.source, dsl)
    del sink
    return Recording(tuple(plans), failure, log.tail(), seconds)


def finish(result: Any, call: Call, recorder: Recorder, dsl: Dsl, source: str) -> bytes:
    """The encoded plan of a call that returned ``result``.

    Raises:
        HostRefusal: kept from a callback, where the DSL swallowed it.
        Rejection, PlanError: if the call is not a valid answer.
    """
    tape = recorder.tape
    if tape.refusal:
        raise tape.refusal
    outputs, tree = check_outputs(result, call, recorder)
    if not any(isinstance(step, Launch) for step in tape.steps):
        raise Rejection(
            "host_error",
            "solve returned without launching a kernel; every call must launch at least one, whatever the shape",
        )
    plan = tape.plan(outputs, tree, dsl.versions(), hashlib.sha256(source.encode()).hexdigest())
    validate(plan)
    return encode(plan)


def make_arguments(call: Call, recorder: Recorder) -> list[Any]:
    """``solve``'s arguments: recorded tensors, readable where the host may know their values, and scalars."""
    arguments: list[Any] = []
    for position, spec in enumerate(call.inputs):
        if not isinstance(spec, TensorInput):
            arguments.append(spec.value)
            continue
        dtype = getattr(torch, spec.dtype)
        meta = torch.empty(spec.shape, dtype=dtype, device="meta")
        nbytes = meta.numel() * meta.element_size()
        buffer = recorder.tape.allocate(nbytes, input=position, data=spec.host_values)
        arguments.append(recorder.over(buffer, spec.shape, tuple(meta.stride()), dtype))
    return arguments


def load(path: Path) -> ModuleType:
    """Import the submission from its file: both DSLs read kernels back from their source."""
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)
    return module


def check_solve(module: ModuleType, count: int) -> Callable[..., Any]:
    """The submission's ``solve``, if it can be called with ``count`` arguments. Raises Rejection."""
    solve = getattr(module, "solve", None)
    if not callable(solve):
        raise Rejection("rejected", "the source must define a function solve(*inputs) at top level")
    try:
        inspect.signature(solve).bind(*range(count))
    except TypeError as error:
        raise Rejection(
            "rejected", f"solve must accept the task's {count} inputs as positional arguments: {error}"
        ) from None
    except ValueError:
        pass  # a callable without a signature: the call will tell
    return solve


def check_outputs(result: Any, call: Call, recorder: Recorder) -> tuple[list[torch.Tensor], OutputTree]:
    """Compare ``solve``'s return value with what the task asks for. Raises Rejection."""
    wanted = call.outputs
    described = ", ".join(f"{list(spec.shape)} {spec.dtype}" for spec in wanted)
    if call.returns_tuple:
        if not isinstance(result, tuple):
            raise Rejection(
                "host_error", f"solve must return a tuple of {len(wanted)} tensors ({described}), got {kind(result)}"
            )
        values = list(result)
    else:
        if not isinstance(result, torch.Tensor):
            raise Rejection("host_error", f"solve must return one tensor ({described}), got {kind(result)}")
        values = [result]
    if len(values) != len(wanted):
        raise Rejection("host_error", f"solve must return {len(wanted)} tensors ({described}), got {len(values)}")
    for number, (value, spec) in enumerate(zip(values, wanted, strict=True)):
        check_output(value, spec, f"output {number}", recorder)
    leaf = OutputTree("tensor")
    return values, OutputTree("tuple", tuple(leaf for _ in values)) if call.returns_tuple else leaf


def check_output(value: Any, spec: OutputSpec, name: str, recorder: Recorder) -> None:
    """Check one returned tensor. Raises Rejection."""
    if not isinstance(value, torch.Tensor):
        raise Rejection("host_error", f"{name} must be a tensor, got {kind(value)}")
    if not recorder.is_recorded(value):
        raise Rejection(
            "host_error", f"{name} must be on the target device, got a CPU tensor", 'allocate it with device="cuda"'
        )
    shape, dtype = tuple(value.shape), dtype_name(value.dtype)
    if shape != spec.shape or dtype != spec.dtype:
        raise Rejection("host_error", f"{name} must be {list(spec.shape)} {spec.dtype}, got {list(shape)} {dtype}")


def kind(value: Any) -> str:
    """How a message names a value of the wrong type."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


@contextlib.contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the wall clock spent inside to ``seconds[stage]``."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start


class Log(io.TextIOBase):
    """Keeps the end of what the submission prints."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        """Keep the last characters."""
        self.text = (self.text + text)[-2 * MAX_LOG :]
        return len(text)

    def tail(self) -> str:
        """The last characters printed."""
        return self.text[-MAX_LOG:].encode(errors="backslashreplace").decode()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Send Python's stdout and stderr here."""
        with contextlib.redirect_stdout(self), contextlib.redirect_stderr(self):
            yield
