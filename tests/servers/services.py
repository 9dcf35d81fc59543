"""Two small services for the tests of the servers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

loaded = 0


def preload(argument: str) -> None:
    global loaded
    loaded = os.getpid()


def confine(memory_bytes: int) -> tuple[str, ...]:
    return ("time",)


def enter() -> None:
    pass


def clean(pid: int) -> None:
    pass


def close() -> None:
    pass


def handle(payload: bytes, progress: Callable[[str], None]) -> bytes:
    word, _, rest = payload.decode().partition(" ")
    progress(word)
    if word == "sleep":
        time.sleep(float(rest))
    elif word == "exit":
        os._exit(int(rest))
    elif word == "signal":
        os.kill(os.getpid(), int(rest))
        signal.pause()
    elif word == "raise":
        raise ValueError(rest)
    elif word == "touch":
        Path(rest).touch()
    elif word == "environ":
        return repr(sorted(os.environ)).encode()
    elif word == "size":
        return bytes(int(rest))
    return f"{word} {loaded} {os.getpid()}".encode()


class Worker:
    """Serial."""

    def call(self, payload: bytes, seconds: float, on_progress: Callable[[str], None]) -> bytes:
        return handle(payload, on_progress)

    def close(self) -> None:
        pass


def connect(argument: str) -> Any:
    preload(argument)
    return Worker()
