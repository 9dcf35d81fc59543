"""A server that does one job after another. Run as ``python -m mkb_env.servers.serial SERVICE SOCKET ARGUMENT``.

The service is a module with ``connect(argument) -> worker``; the worker has ``call(payload, seconds, on_progress) ->
bytes``, which keeps to the time limit itself and never raises for what a job does, and ``close()``.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from mkb_env.servers.daemon import idle_seconds, listen
from mkb_env.servers.waiting import Request, Waiting, take
from mkb_env.servers.wire import Ended, Message, receive_frame, send_frame, token, token_digest

SEND_SECONDS = 30.0
"""A client that neither sends its payload nor reads its answer for so long is given up: others wait."""


def serve(worker: Any, listener: socket.socket) -> None:
    """Take jobs until asked to stop or idle for too long; a thread accepts while one job runs."""
    door = _Door(listener)
    door.start()
    while request := door.next():
        with request.control, request.data:
            _do(worker, request)


class _Door(threading.Thread):
    """Accepts clients and keeps their jobs in order."""

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(name="door", daemon=True)
        self.listener, self.waiting = listener, Waiting()
        self.changed = threading.Condition()
        self.digest = token_digest(token())
        self.stopping = False

    def run(self) -> None:
        while not self.stopping:
            with self.changed:
                self.changed.wait_for(lambda: not self.waiting.full)
            taken = take(self.listener, self.digest)
            with self.changed:
                if taken and (taken[2] is None or taken[0].stop):
                    taken[1].close()
                    self.stopping = True
                elif taken:
                    header, control, data = taken
                    assert data is not None
                    self.waiting.add(header, control, data)
                self.changed.notify_all()

    def next(self) -> Request | None:
        """The next job; None when asked to stop, or when none came for too long."""
        limit = idle_seconds()
        with self.changed:
            while True:
                request = self.waiting.pop()
                self.changed.notify_all()
                if request or self.stopping:
                    return request
                if not self.changed.wait(limit):
                    return None


def _do(worker: Any, request: Request) -> None:
    control, data = request.control, request.data

    def progress(stage: str) -> None:
        with contextlib.suppress(OSError):  # the client may have gone; the job goes on to a clean end
            send_frame(data, Message(progress=stage))

    ended = Ended(exit_code=0)
    try:
        data.settimeout(SEND_SECONDS)
        payload = receive_frame(data, bytes)
        result = worker.call(payload, request.header.seconds, progress)
        send_frame(data, Message(result=result))
    except (OSError, EOFError):
        return
    except Exception as error:
        traceback.print_exc()
        ended = Ended(exit_code=70, detail=f"{type(error).__name__}: {error}")
    data.close()
    with contextlib.suppress(OSError):
        control.settimeout(SEND_SECONDS)
        send_frame(control, ended)


def main() -> None:
    """Command line of a serial server."""
    name, path, argument = sys.argv[1:4]
    listener = listen(path)
    worker = None
    try:
        worker = importlib.import_module(name).connect(argument)
        serve(worker, listener)
    finally:
        Path(path).unlink(missing_ok=True)
        if worker is not None:
            worker.close()


if __name__ == "__main__":
    main()
