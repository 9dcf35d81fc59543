"""The client's side of a background server: find or start it, run one job, stop it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from mkb_env.servers.wire import (
    ConnectionEnded,
    Ended,
    Header,
    Message,
    code_fingerprint,
    installation,
    receive_frame,
    runtime_folder,
    send_frame,
    send_header,
    short_address,
    token,
)

ENVIRONMENT = (
    "PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH", "XDG_RUNTIME_DIR",
    "MKB_RUNTIME_DIR", "MKB_IDLE_SECONDS", "CUDA_VISIBLE_DEVICES", "CUDA_PATH", "CUDA_HOME", "OMP_NUM_THREADS",
    "MKB_CONFIG_DIR", "XDG_CONFIG_HOME", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE",
)  # fmt: skip
"""Variables a server inherits. Everything else (keys above all) stays out of processes that run untrusted code."""


class ServerError(RuntimeError):
    """A server could not be started, or ended without an answer. Never the submission's fault."""


class Outcome(msgspec.Struct, frozen=True):
    """What came of one job."""

    result: bytes | None
    ended: Ended
    stage: str
    """Last stage the job reported."""
    seconds: float


class ServerClient:
    """Talks to the server of one service, for example ``mkb_env.recorder.service``.

    Args:
        service: dotted name of a module with the functions :mod:`mkb_env.servers.forking` or
            :mod:`mkb_env.servers.serial` asks for.
        kind: ``"forking"`` or ``"serial"``.
        rooms: folders and files of this package whose change makes a running server stale.
        argument: one string handed to the service, for example a GPU's number.
    """

    def __init__(self, service: str, rooms: tuple[str, ...], kind: str = "forking", argument: str = "") -> None:
        self.service, self.rooms, self.kind, self.argument = service, rooms, kind, argument

    @property
    def socket_path(self) -> Path:
        return runtime_folder() / f"{self._stem}-{code_fingerprint(self.rooms)}.sock"

    @property
    def _stem(self) -> str:
        """Name of the service in this installation, whatever the state of its code."""
        name = self.service.removeprefix("mkb_env.").replace(".", "-")
        return f"{name}{self.argument}-{installation()}"

    @property
    def log_path(self) -> Path:
        return self.socket_path.with_suffix(".log")

    def call(
        self,
        payload: bytes,
        *,
        seconds: float,
        memory_bytes: int = 0,
        priority: int = 0,
        on_progress: Callable[[str], None] | None = None,
    ) -> Outcome:
        """Run one job and wait for its end; among jobs that wait for the server, the smallest ``priority`` goes first.

        Raises:
            ServerError: if the server cannot be started or goes away.
        """
        started = time.monotonic()
        for attempt in (0, 1):  # a server may end by idleness between our connect and its accept: once more then
            control = self._connect()
            try:
                header = Header(seconds, memory_bytes, priority, token=token())
                return self._converse(control, payload, header, on_progress, started)
            except ConnectionEnded:
                if attempt:
                    raise ServerError(
                        f"the server of {self.service} ended without an answer; {self._log_tail()}"
                    ) from None
            finally:
                control.close()
        raise AssertionError("unreachable")

    def _converse(
        self,
        control: socket.socket,
        payload: bytes,
        header: Header,
        on_progress: Callable[[str], None] | None,
        started: float,
    ) -> Outcome:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours:
            try:
                with theirs:
                    send_header(control, header, theirs)
            except OSError as error:
                raise ConnectionEnded(str(error)) from None
            result, stage = None, ""
            try:
                send_frame(ours, payload)
                while result is None:
                    message = receive_frame(ours, Message)
                    if message.progress:
                        stage = message.progress[:64]
                        if on_progress:
                            on_progress(stage)
                    result = message.result
            except (ConnectionEnded, OSError, ValueError, msgspec.DecodeError, RecursionError, MemoryError):
                pass  # the job ended, or sent what no honest job sends: how it ended is told on the control connection
            if result is None:
                ours.close()
            ended = receive_frame(control, Ended)
        return Outcome(result, ended, stage, time.monotonic() - started)

    def _connect(self) -> socket.socket:
        path = self.socket_path
        connection = _try_connect(path)
        if connection:
            return connection
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            connection = _try_connect(path)
            if connection:
                return connection
            path.unlink(missing_ok=True)
            for stale in path.parent.glob(f"{self._stem}-*.sock"):  # of code that has changed since
                stop(stale)
            self._start(path)
            connection = _try_connect(path)
            if connection:
                return connection
        raise ServerError(f"the server of {self.service} did not start; {self._log_tail()}")

    def _start(self, path: Path) -> None:
        """Start the server; returns when it listens, or could not (see :mod:`mkb_env.servers.daemon`)."""
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        command = [sys.executable, "-m", f"mkb_env.servers.{self.kind}", self.service, str(path), self.argument]
        with open(self.log_path, "ab") as log:
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd="/", check=False
            )

    def running(self) -> bool:
        """Whether a server of the current code is up."""
        connection = _try_connect(self.socket_path)
        if connection:
            connection.close()
        return connection is not None

    def _log_tail(self) -> str:
        """The end of the server's log, once it has stopped growing: a dying server may still be writing."""
        text, before = "", None
        for _ in range(20):
            try:
                text = self.log_path.read_text(errors="replace").strip()
            except OSError:
                return "it left no log"
            if text == before:
                break
            before = text
            time.sleep(0.1)
        return f"the end of its log: {text[-1500:]}" if text else "its log is empty"


def _try_connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_address(path) as address:
            connection.connect(address)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection


def stop(path: Path) -> bool:
    """Ask the server behind a socket to end, once its jobs are done; whether there was one."""
    connection = _try_connect(path)
    if connection is None:
        path.unlink(missing_ok=True)
        return False
    with connection:
        send_header(connection, Header(seconds=0, stop=True, token=token()), None)
    return True


def stop_all() -> int:
    """Ask every server of this user's runtime folder to end; returns how many were asked."""
    return sum(stop(path) for path in sorted(runtime_folder().glob("*.sock")))


def signal_name(number: int) -> str:
    """``SIGSEGV`` for 11, and so on."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
