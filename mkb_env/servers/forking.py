"""A server that forks one child per job. Run as ``python -m mkb_env.servers.forking SERVICE SOCKET ARGUMENT``.

The service is a module with::

    def preload(argument: str) -> None          # import what jobs need; runs once, in the parent
    def confine(memory_bytes: int) -> tuple[str, ...]   # in the child, before the payload is read; what is in force
    def enter() -> None                                  # last step before the payload is read; no fork after it
    def handle(payload: bytes, progress) -> bytes        # the job, in the child
    def clean(pid: int) -> None                # in the parent, after the end of the child whose confine ran as pid
    def close() -> None                        # in the parent, at its end

The parent stays single-threaded and never reads a payload, so a child inherits nothing of another job.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from mkb_env.servers.daemon import idle_seconds, listen
from mkb_env.servers.waiting import Request, Waiting, take
from mkb_env.servers.wire import Ended, Header, Message, receive_frame, send_frame, token, token_digest

PR_SET_PDEATHSIG = 1
CLONE_NEWPID = 0x20000000


class Job:
    """A running child, seen from the parent."""

    def __init__(self, control: socket.socket, header: Header, pid: int, report: int) -> None:
        self.control, self.pid, self.report = control, pid, report
        self.deadline = time.monotonic() + header.seconds
        self.worker: int | None = None
        self.sandbox: tuple[str, ...] = ()
        self.timed_out = False
        self.pidfd = os.pidfd_open(pid)
        os.set_blocking(report, False)

    def read_report(self) -> None:
        """Learn the worker's pid and confinement from its guard (written before any untrusted code runs)."""
        with contextlib.suppress(BlockingIOError):
            text = os.read(self.report, 4096).decode(errors="replace")
            for line in text.splitlines():
                key, _, value = line.partition("=")
                if key == "worker":
                    self.worker = int(value)
                elif key == "sandbox":
                    self.sandbox = tuple(filter(None, value.split(",")))

    def kill(self) -> None:
        self.read_report()
        for pid in (self.worker, self.pid):
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def finish(self) -> None:
        """Reap the child and tell the client how it ended."""
        self.read_report()
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code > 128:  # the guard passes its worker's signal on this way
            code = 128 - code
        ended = Ended(code if code >= 0 else None, -code if code < 0 else None, self.timed_out, self.sandbox)
        with contextlib.suppress(OSError):
            send_frame(self.control, ended)
        self.control.close()
        os.close(self.pidfd)
        os.close(self.report)


class ForkingServer:
    """Accepts jobs and watches their children; at most ``workers`` at a time."""

    def __init__(self, service: ModuleType, listener: socket.socket, workers: int) -> None:
        self.service, self.listener, self.workers = service, listener, workers
        self.jobs: dict[int, Job] = {}
        self.waiting = Waiting()
        self.digest = token_digest(token())
        self.selector = selectors.DefaultSelector()
        self.stopping = False

    def serve(self) -> None:
        """Run until asked to stop or idle for too long."""
        last_use = time.monotonic()
        self.selector.register(self.listener, selectors.EVENT_READ, "accept")
        listening = True
        while self.jobs or self.waiting or not self.stopping:
            want = not self.stopping and not self.waiting.full
            if want != listening:
                if want:
                    self.selector.register(self.listener, selectors.EVENT_READ, "accept")
                else:
                    self.selector.unregister(self.listener)
                listening = want
            for key, _ in self.selector.select(self._wait(last_use)):
                if key.data == "accept":
                    self._accept()
                else:
                    self._attend(key.data, key.fd)
                last_use = time.monotonic()
            while len(self.jobs) < self.workers and (request := self.waiting.pop()):
                self._begin(request)
            now = time.monotonic()
            for job in self.jobs.values():
                if now > job.deadline and not job.timed_out:
                    job.timed_out = True
                    job.kill()
            if not self.jobs and now - last_use > idle_seconds():
                return

    def _wait(self, last_use: float) -> float:
        now = time.monotonic()
        ends = [job.deadline for job in self.jobs.values() if not job.timed_out] or [last_use + idle_seconds()]
        return min(max(min(ends) - now, 0.0) + 0.005, 5.0)

    def _attend(self, pid: int, descriptor: int) -> None:
        job = self.jobs.get(pid)
        if job is None:
            return
        if (
            descriptor == job.control.fileno()
        ):  # the client went away, or sent what it must not: nobody waits for this job
            self.selector.unregister(job.control)
            job.kill()
            return
        self.selector.unregister(job.pidfd)
        with contextlib.suppress(KeyError):
            self.selector.unregister(job.control)
        del self.jobs[pid]
        job.finish()
        try:
            self.service.clean(pid)
        except Exception:  # what a job leaves must not end the server
            traceback.print_exc()

    def _accept(self) -> None:
        taken = take(self.listener, self.digest)
        if taken is None:
            return
        header, control, data = taken
        if data is None or header.stop:
            self.stopping = True
            control.close()
        else:
            self.waiting.add(header, control, data)

    def _begin(self, request: Request) -> None:
        header, control, data = request.header, request.control, request.data
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            self._become_guard(control, data, write, header)
        os.close(write)
        data.close()
        job = Job(control, header, pid, read)
        self.jobs[pid] = job
        self.selector.register(job.pidfd, selectors.EVENT_READ, pid)
        self.selector.register(control, selectors.EVENT_READ, pid)

    def _become_guard(self, control: socket.socket, data: socket.socket, report: int, header: Header) -> NoReturn:
        """Between server and worker: gives the worker a pid namespace, so that its end ends all it started."""
        try:
            self.selector.close()
            self.listener.close()
            control.close()
            self.waiting.close()
            for job in self.jobs.values():
                job.control.close()
                os.close(job.report)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            libc = ctypes.CDLL(None, use_errno=True)
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            sandbox = self.service.confine(header.memory_bytes)
            if "processes" in sandbox:
                worker = os.fork()
                if worker:
                    data.close()
                    os.write(report, f"worker={worker}\nsandbox={','.join(sandbox)}\n".encode())
                    os.close(report)
                    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
                    os._exit(code if code >= 0 else 128 - code)
                libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            else:
                os.write(report, f"sandbox={','.join(sandbox)}\n".encode())
            os.close(report)
            null = os.open(os.devnull, os.O_RDWR)
            for standard in range(3):  # the server's log is not the job's to write
                os.dup2(null, standard)
            self.service.enter()
            self._work(data)
        except BaseException:
            traceback.print_exc()
            os._exit(70)

    def _work(self, data: socket.socket) -> NoReturn:
        payload = receive_frame(data, bytes)
        result = self.service.handle(payload, lambda stage: send_frame(data, Message(progress=stage)))
        send_frame(data, Message(result=result))
        # _exit: exit handlers of compilers loaded in the parent belong to the parent
        os._exit(0)


def main() -> None:
    """Command line of a forking server."""
    name, path, argument = sys.argv[1:4]
    listener = listen(path)
    try:
        service = importlib.import_module(name)
        service.preload(argument)
        try:
            ForkingServer(service, listener, workers=max(2, os.cpu_count() or 1)).serve()
        finally:
            service.close()
    finally:
        Path(path).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
