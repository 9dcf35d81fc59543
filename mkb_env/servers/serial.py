"""A server that does one job after another. Run as ``python -m mkb_env.servers.serial SERVICE SOCKET ARGUMENT``.

The service is a module with ``connect(argument) -> worker``; the worker has ``call(payload, seconds, on_progress) ->
bytes``, which keeps to the time limit itself and never raises for what a job does, and ``close()``.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from mkb_env.servers.daemon import authorised, idle_seconds, listen
from mkb_env.servers.wire import Ended, Header, Message, receive_frame, receive_header, send_frame, token, token_digest


def serve(worker: Any, listener: socket.socket) -> None:
    """Take jobs until asked to stop or idle for too long."""
    digest = token_digest(token())
    listener.settimeout(idle_seconds())
    while True:
        try:
            control, _ = listener.accept()
        except TimeoutError:
            return
        with control:
            control.settimeout(1)
            try:
                header, data = receive_header(control)
            except (OSError, EOFError, ValueError):
                continue
            if not authorised(header, digest):
                continue
            if header.stop:
                return
            if data is not None:
                with data:
                    _do(worker, header, control, data)


def _do(worker: Any, header: Header, control: socket.socket, data: socket.socket) -> None:
    def progress(stage: str) -> None:
        with contextlib.suppress(OSError):  # the client may have gone; the job goes on to a clean end
            send_frame(data, Message(progress=stage))

    ended = Ended(exit_code=0)
    try:
        payload = receive_frame(data, bytes)
        result = worker.call(payload, header.seconds, progress)
        send_frame(data, Message(result=result))
    except (OSError, EOFError):
        return
    except Exception as error:
        traceback.print_exc()
        ended = Ended(exit_code=70, detail=f"{type(error).__name__}: {error}")
    data.close()
    with contextlib.suppress(OSError):
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
