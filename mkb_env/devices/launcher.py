"""A process that owns one GPU, and the supervisor that replaces it when device code breaks or hangs it.

Supervisor and child talk over a socket pair in frames: four bytes of length (little-endian), then one msgpack record
of :data:`Frame`. The child runs ``handler(job, device) -> bytes``, named as ``package.module:function``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import faulthandler
import importlib
import math
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from mkb_env.devices.base import DeviceFault

if TYPE_CHECKING:
    from mkb_env.devices.cuda import CudaDevice

MAX_FRAME_BYTES = 2**31 - 1
START_SECONDS = 120.0
"""Limit on a child's start: imports, the CUDA context, the health probe."""
_STOP_SECONDS = 30.0
"""A killed process may take this long to leave: the driver first tears down its context."""
_LOG_BYTES = 32768
_LOG_SHOWN = 1500
_PR_SET_PDEATHSIG = 1
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)

Stage = Literal["launch_error", "timeout", "unsupported", "infra_error"]


class Job(msgspec.Struct, frozen=True, tag="job"):
    """Supervisor to child: one job for the handler."""

    body: bytes


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The child has its device and passed the probe; ``versions`` is empty without a device."""

    device: str = ""
    versions: dict[str, str] = {}


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The handler entered a stage."""

    stage: str


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The handler's result."""

    body: bytes


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """The job, or the start, failed. After ``broken`` the child exits by itself."""

    stage: Stage
    message: str
    kernel: str = ""
    broken: bool = False


Frame = Job | Ready | Progress | Answer | Fault
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Frame)


def _send(connection: socket.socket, frame: Frame) -> None:
    data = msgspec.msgpack.encode(frame)
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame holds at most {MAX_FRAME_BYTES} bytes, got {len(data)}")
    connection.sendall(struct.pack("<I", len(data)))
    connection.sendall(data)


def _receive_exactly(connection: socket.socket, size: int, deadline: float | None) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        count = connection.recv_into(view[done:])
        if not count:
            raise EOFError
        done += count
    return data


def _receive(connection: socket.socket, deadline: float | None = None) -> Any:
    """The next frame. Raises EOFError when the other side is gone, TimeoutError at ``deadline`` (monotonic seconds)."""
    (size,) = struct.unpack("<I", _receive_exactly(connection, 4, deadline))
    if size > MAX_FRAME_BYTES:
        raise EOFError
    return _decoder.decode(_receive_exactly(connection, size, deadline))


class _LogTail:
    """Keeps the last bytes of a pipe; reads until every writer is gone."""

    def __init__(self, descriptor: int) -> None:
        self._chunks: collections.deque[bytes] = collections.deque()
        self._descriptor, self._size = descriptor, 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._drain, name="launcher-log", daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        with open(self._descriptor, "rb", buffering=0) as pipe:
            while chunk := pipe.read(8192):
                with self._lock:
                    self._chunks.append(chunk)
                    self._size += len(chunk)
                    while self._size - len(self._chunks[0]) >= _LOG_BYTES:
                        self._size -= len(self._chunks.popleft())

    def finish(self) -> None:
        """Wait until the dead writer's last bytes are read."""
        self._thread.join(2.0)

    def text(self, limit: int) -> str:
        """At most the last ``limit`` characters."""
        with self._lock:
            data = b"".join(self._chunks)
        return data.decode(errors="replace").strip()[-limit:]


class Launcher:
    """Supervisor of one child process; starts it at the first call and again after it died, broke or hung.

    Jobs run one at a time; :meth:`call` may be used from several threads. Without an ``ordinal`` the handler gets None
    for its device and no CUDA is touched.
    """

    def __init__(self, handler: str, ordinal: int | None = 0, start_seconds: float = START_SECONDS) -> None:
        self.handler, self.ordinal, self.start_seconds = handler, ordinal, start_seconds
        self.ready: Ready | None = None
        """What the running child said of its device; None while there is no child."""
        self.starts = 0
        """Children started so far."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._log: _LogTail | None = None
        # The kernel sends the parent-death signal when the *thread* that started the child ends, so one thread that
        # lives as long as this object starts them all.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="launcher-start")

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the running child."""
        return self._process.pid if self._process else None

    def log_tail(self, limit: int = _LOG_SHOWN) -> str:
        """The end of what the current or last child printed."""
        return self._log.text(limit) if self._log else ""

    def call(
        self,
        job: bytes,
        seconds: float,
        on_progress: Callable[[str], None] | None = None,
        stall_seconds: float = math.inf,
    ) -> bytes:
        """Run ``job`` and return the handler's answer; ``on_progress`` hears of each stage the handler enters.

        ``seconds`` counts from the moment the child has the device; starting one has its own limit. A handler that
        enters no new stage for ``stall_seconds`` is taken to hang.

        Raises:
            DeviceFault: the handler's own, or ``timeout`` if there was no answer in time (the child was killed),
                ``launch_error`` if the child crashed, ``infra_error`` if it ended or could not be started.
        """
        with self._lock:
            self._ensure_started()
            deadline = time.monotonic() + seconds
            assert self._connection is not None
            stage, limit = "", deadline
            try:
                self._connection.settimeout(max(seconds, 1e-3))
                _send(self._connection, Job(job))
                limit = min(deadline, time.monotonic() + stall_seconds)
                while isinstance(frame := _receive(self._connection, limit), Progress):
                    limit = min(deadline, time.monotonic() + stall_seconds)
                    stage = frame.stage
                    if on_progress:
                        on_progress(stage)
            except TimeoutError:
                self._stop()
                waited = seconds if limit == deadline else stall_seconds
                what = "answer" if limit == deadline else "progress"
                raise DeviceFault("timeout", f"no {what} within {waited:g} s{_during(stage)}; stopped") from None
            except (EOFError, OSError, msgspec.DecodeError):
                raise self._death(_during(stage)) from None
            except BaseException:
                # An interrupted call leaves an answer under way that the next call must not take for its own.
                self._stop()
                raise
            return self._result(frame)

    def _result(self, frame: Any) -> bytes:
        if isinstance(frame, Answer):
            return frame.body
        if isinstance(frame, Fault):
            if frame.broken:
                self._stop()
            raise DeviceFault(frame.stage, frame.message, frame.kernel)
        self._stop()
        raise DeviceFault("infra_error", f"the launcher answered a job with a {type(frame).__name__} frame")

    def close(self) -> None:
        """Let the child go, and kill it if it stays. The launcher cannot be used afterwards."""
        with self._lock:
            self._stop(grace=2.0)
            self._starter.shutdown()

    def _ensure_started(self) -> None:
        if self._process and self._process.poll() is None and self.ready:
            return
        self._stop()
        self._starter.submit(self._spawn).result()
        assert self._connection is not None
        try:
            frame = _receive(self._connection, time.monotonic() + self.start_seconds)
        except TimeoutError:
            self._stop()
            tail = self._shown_log()
            raise DeviceFault("infra_error", f"the launcher did not start in {self.start_seconds:g} s{tail}") from None
        except (EOFError, OSError, msgspec.DecodeError):
            fault = self._death(" while starting")
            raise DeviceFault("infra_error", fault.message) from None
        except BaseException:
            self._stop()
            raise
        if not isinstance(frame, Ready):
            self._stop()
            raise DeviceFault(
                "infra_error", frame.message if isinstance(frame, Fault) else f"unexpected {frame!r:.200}"
            )
        self.ready = frame

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        reader, writer = os.pipe()
        command = [sys.executable, "-P", "-u", "-m", "mkb_env.devices.launcher", "--serve", str(theirs.fileno())]
        command += ["--handler", self.handler, "--parent", str(os.getpid())]
        command += [] if self.ordinal is None else ["--ordinal", str(self.ordinal)]
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": path},
            )
        except BaseException:
            ours.close()
            os.close(reader)
            raise
        finally:
            theirs.close()
            os.close(writer)
        self._connection, self._log = ours, _LogTail(reader)
        self.starts += 1

    def _stop(self, grace: float = 0.0) -> int | None:
        """End the child, at once or after ``grace`` seconds of its own; its exit status, or None if there was none."""
        self.ready = None
        if self._connection:
            self._connection.close()
            self._connection = None
        if not self._process:
            return None
        if grace:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        self._process.kill()
        try:
            status = self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            message = f"process {self._process.pid} did not end within {_STOP_SECONDS:g} s of being killed"
            raise DeviceFault("infra_error", f"{message}; the driver may be stuck") from None
        self._process = None
        if self._log:
            self._log.finish()
        return status

    def _death(self, during: str) -> DeviceFault:
        """Why the child closed its connection."""
        if self._process:
            # The connection closes a moment before the process is gone: let it end by itself, to see its own status.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        status = self._stop()
        if status is not None and status < 0:
            number = signal.Signals(-status)
            stage: Stage = "launch_error" if number in _CRASHES else "infra_error"
            return DeviceFault(stage, f"the launching process was ended by {number.name}{during}{self._shown_log()}")
        return DeviceFault("infra_error", f"the launching process exited with {status}{during}{self._shown_log()}")

    def _shown_log(self) -> str:
        tail = self.log_tail()
        return f"; it last printed:\n{tail}" if tail else ""


def _during(stage: str) -> str:
    return f" (in stage {stage})" if stage else ""


# ---- the child -------------------------------------------------------------------------------------------------------

_served: socket.socket | None = None


def progress(stage: str) -> None:
    """Tell the supervisor that the handler enters ``stage``; does nothing outside a launcher's child."""
    if _served is not None:
        _send(_served, Progress(stage))


def _probe(device: CudaDevice) -> None:
    """A tiny computation whose result is known."""
    import torch

    with device.faults():
        total = int(torch.arange(1024, device=device.torch_device).sum().item())
    if total != 1024 * 1023 // 2:
        raise DeviceFault("infra_error", f"{device.name} added 0..1023 up to {total}")


def _load_handler(name: str) -> Callable[[bytes, Any], bytes]:
    module, _, attribute = name.partition(":")
    handler: Callable[[bytes, Any], bytes] = getattr(importlib.import_module(module), attribute)
    return handler


def _start(handler: str, ordinal: int | None) -> tuple[Callable[[bytes, Any], bytes], CudaDevice | None, Ready]:
    if ordinal is None:
        return _load_handler(handler), None, Ready()
    from mkb_env.devices.cuda import CudaDevice

    device = CudaDevice(ordinal)
    _probe(device)
    return _load_handler(handler), device, Ready(device.name, device.versions())


def _run_job(handler: Callable[[bytes, Any], bytes], job: bytes, device: CudaDevice | None) -> Answer | Fault:
    """One job. Waits for the device whatever happened, so that no fault reaches the next job."""
    failure: BaseException | None = None
    answer = b""
    try:
        answer = handler(job, device)
    except Exception as error:
        failure = error
    if device is not None and not device.broken:
        try:
            device.synchronize()
        except DeviceFault as fault:
            failure = fault
    broken = device is not None and device.broken
    if isinstance(failure, DeviceFault):
        return Fault(failure.stage, failure.message, failure.kernel, broken)
    if failure is not None:
        text = "".join(traceback.format_exception(failure))[-3000:]
        return Fault("infra_error", f"the launcher's handler failed: {text}", broken=broken)
    if broken:
        return Fault("infra_error", "the handler answered although the CUDA context was lost", broken=True)
    return Answer(answer)


def _serve(connection: socket.socket, handler_name: str, ordinal: int | None) -> int:
    global _served
    try:
        handler, device, ready = _start(handler_name, ordinal)
    except Exception as error:
        _send(connection, Fault("infra_error", f"the launcher cannot start: {type(error).__name__}: {error}"))
        return 1
    _served = connection
    _send(connection, ready)
    while True:
        try:
            frame = _receive(connection)
        except EOFError:
            return 0
        result = _run_job(handler, frame.body, device)
        _send(connection, result)
        if isinstance(result, Fault) and result.broken:
            return 0


def main() -> None:
    """Entry point of the child."""
    parser = argparse.ArgumentParser(description="Own one GPU and run jobs from a supervisor.")
    parser.add_argument("--serve", type=int, required=True, metavar="FD", help="descriptor of the connected socket")
    parser.add_argument("--handler", required=True, help="package.module:function")
    parser.add_argument("--parent", type=int, required=True, help="process id of the supervisor")
    parser.add_argument("--ordinal", type=int, help="CUDA device; left out: none")
    options = parser.parse_args()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != options.parent:
        raise SystemExit("the supervisor ended before its launcher started")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    status = 0
    with socket.socket(fileno=options.serve) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        status = _serve(connection, options.handler, options.ordinal)
    sys.stdout.flush()
    # Not sys.exit: destroying a broken context at interpreter shutdown may crash or hang.
    os._exit(status)


if __name__ == "__main__":
    # The handler imports this module by its name; serving from that same copy lets it find ``progress``'s socket.
    importlib.import_module("mkb_env.devices.launcher").main()
