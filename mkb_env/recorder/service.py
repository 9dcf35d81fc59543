"""The recorder as a forking server: warm with torch and both DSLs, one confined child per submission."""

from __future__ import annotations

import inspect
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from mkb_env.recorder.protocol import Recording, RecordRequest

_root: Path
_scratch: Path


def preload(argument: str) -> None:
    """Import torch and both DSLs without touching a CUDA driver."""
    global _root
    _root = Path(tempfile.mkdtemp(prefix="mkb-record-"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from mkb_env.recorder.libraries import load_driver

    load_driver()
    import torch

    from mkb_env import dsl
    from mkb_env.recorder import record, standins  # noqa: F401

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    # torch imports what the first operator on a meta tensor needs only then: a second in every child
    torch.empty_like(torch.empty(1, device="meta"))
    for name in dsl.NAMES:
        dsl.get(name).preload()
    standins.install_torch_cuda()
    standins.install_cuda_bindings()
    # both DSLs look for the source of a function by its file; the table of all modules' files is made on first use
    inspect.stack()


def confine(memory_bytes: int) -> tuple[str, ...]:
    """Put the child into its scratch folder and its sandbox."""
    from mkb_env.recorder import sandbox

    global _scratch
    _scratch = _scratch_of(os.getpid())
    _scratch.mkdir(mode=0o700)
    os.chdir(_scratch)
    os.environ.update(HOME=str(_scratch), TMPDIR=str(_scratch))
    tempfile.tempdir = str(_scratch)
    return sandbox.confine(memory_bytes, _scratch)


def close() -> None:
    """In the parent, at its end."""
    subprocess.run(["rm", "-rf", "--", str(_root)], check=False)


def enter() -> None:
    """In the worker: from here on no process can be started, and no socket opened."""
    from mkb_env.recorder import seccomp

    seccomp.install()


def clean(pid: int) -> None:
    """In the parent, once a job is over: remove its scratch folder, which it may not do itself.

    By a program of its own: a tree may be as deep as a submission likes, and removing it may take long.
    """
    subprocess.Popen(["rm", "-rf", "--", str(_scratch_of(pid))], stdin=subprocess.DEVNULL, start_new_session=True)


def _scratch_of(pid: int) -> Path:
    return _root / f"job-{pid}"


def handle(payload: bytes, progress: Callable[[str], None]) -> bytes:
    """Record one request (see :mod:`mkb_env.recorder.protocol`)."""
    from mkb_env import dsl
    from mkb_env.recorder.record import record

    start = time.perf_counter()
    request = msgspec.msgpack.decode(payload, type=RecordRequest)
    recording: Recording = record(request, dsl.get(request.dsl), _scratch, progress)
    recording = msgspec.structs.replace(recording, seconds={**recording.seconds, "record": time.perf_counter() - start})
    return msgspec.msgpack.encode(recording)
