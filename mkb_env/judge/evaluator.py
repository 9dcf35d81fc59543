"""The evaluator: the process that holds problems, inputs and expected values, and runs plans on a device.

For the simulator it is a forking server (one child per job); for a GPU, a serial server before the one process that
owns the GPU (:mod:`mkb_env.devices.launcher`). Both end in :func:`do`.
"""

from __future__ import annotations

import os
import resource
import traceback
from collections.abc import Callable

import msgspec

from mkb_env.devices.base import Device, DeviceFault
from mkb_env.judge.jobs import Described, DescribeJob, DeviceJob, EvaluateJob, FactsJob, Job, MeasureJob, SpreadJob
from mkb_env.judge.verdict import Evaluation, Stage

STALL_SECONDS = 8.0
"""A draw, its reference and its anchor take well under a second on a GPU; what is not done after this long hangs."""


def do(payload: bytes, device: Device | None, progress: Callable[[str], None]) -> bytes:
    """Do one job; ``device`` is None for the simulator, which is cheap to make."""
    from mkb_env.judge.describe import describe
    from mkb_env.judge.evaluate import EvaluateOptions, evaluate
    from mkb_env.judge.facts import facts
    from mkb_env.plan import PlanError, decode
    from mkb_env.problems import load

    job = msgspec.msgpack.decode(payload, type=Job)
    if isinstance(job, DescribeJob):
        problem = load(job.problem)
        shapes = problem.shapes(job.workload)
        return msgspec.msgpack.encode([Described(describe(problem, s), problem.fits_simulator(s)) for s in shapes])
    if isinstance(job, FactsJob):
        return msgspec.msgpack.encode([facts(load(slug)) for slug in job.problems])
    device = device or _simulator()
    if isinstance(job, DeviceJob):
        return msgspec.msgpack.encode(device.name)
    if isinstance(job, MeasureJob):
        from mkb_env.judge.ceilings import measure

        return msgspec.msgpack.encode(measure(device))
    if isinstance(job, SpreadJob):
        from mkb_env.judge.spread import compare_with_itself

        problem = load(job.problem)
        shape = problem.shapes(job.workload)[job.shape]
        found = compare_with_itself(
            problem, shape, decode(job.plan), device, job.comparisons, lambda done: progress(f"spread {done}")
        )
        return msgspec.msgpack.encode(found)
    assert isinstance(job, EvaluateJob)
    problem = load(job.problem)
    try:
        plan = decode(job.plan)
    except PlanError as error:
        return msgspec.msgpack.encode(Evaluation(Stage.LAUNCH_ERROR, f"the launch plan is refused: {error}"))
    try:
        evaluation = evaluate(
            problem,
            problem.shapes(job.workload)[job.shape],
            plan,
            device,
            EvaluateOptions(correctness_draws=job.draws, timing=job.timing),
            lambda stage, step, steps: progress(f"{stage} {step}/{steps}"),
        )
    except DeviceFault:
        raise
    except Exception as error:  # ours: the submission only supplied the plan
        traceback.print_exc()
        evaluation = Evaluation(Stage.INFRA_ERROR, f"the evaluator failed: {type(error).__name__}: {error}")
    return msgspec.msgpack.encode(evaluation)


def _simulator() -> Device:
    from mkb_env.devices.simulator import SimulatorDevice

    return SimulatorDevice()


# -- the simulator's server (mkb_env.servers.forking) ----------------------------------------------------------------


def preload(argument: str) -> None:
    """Import torch, the judge and the simulator."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    from mkb_env.devices import simulator  # noqa: F401
    from mkb_env.judge import describe, evaluate  # noqa: F401

    torch.set_num_threads(1)


def confine(memory_bytes: int) -> tuple[str, ...]:
    """Bound what a job on hostile device code can take."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    return ("time", "memory")


def enter() -> None:
    """Nothing more to confine."""


def clean(pid: int) -> None:
    """A job leaves nothing behind."""


def close() -> None:
    """Nor does the server."""


def handle(payload: bytes, progress: Callable[[str], None]) -> bytes:
    """Do one job on the simulator."""
    return do(payload, None, progress)


# -- a GPU's server (mkb_env.servers.serial) and its launcher process --------------------------------------------------


def handle_on_device(payload: bytes, device: Device) -> bytes:
    """Do one job on a GPU, in the launcher's child."""
    from mkb_env.devices.launcher import progress

    return do(payload, device, progress)


class GpuWorker:
    """Hands jobs to the process that owns a GPU; its faults become evaluations."""

    def __init__(self, ordinal: int) -> None:
        from mkb_env.devices.launcher import Launcher

        self.launcher = Launcher("mkb_env.judge.evaluator:handle_on_device", ordinal)

    def call(self, payload: bytes, seconds: float, on_progress: Callable[[str], None]) -> bytes:
        """Do one job; a fault that took the process with it comes back as an evaluation."""
        try:
            return self.launcher.call(payload, seconds, on_progress, STALL_SECONDS)
        except DeviceFault as fault:
            name = self.launcher.ready.device if self.launcher.ready else ""
            evaluation = Evaluation(Stage(fault.stage), fault.message, device=name, simulated=False)
            return msgspec.msgpack.encode(evaluation)

    def close(self) -> None:
        """End the launcher's child."""
        self.launcher.close()


def connect(argument: str) -> GpuWorker:
    """The worker of GPU number ``argument``."""
    return GpuWorker(int(argument))
