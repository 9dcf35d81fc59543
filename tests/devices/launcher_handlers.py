"""Handlers that a launcher's child runs in tests; none of them touches CUDA."""

import ctypes
import os
import sys
import time

from mkb_env.devices.base import DeviceFault
from mkb_env.devices.launcher import progress


def obey(job: bytes, device: object) -> bytes:
    """Do what the job's first word says."""
    verb, _, rest = job.decode().partition(" ")
    return globals()[f"_{verb}"](rest, device)


def _echo(text: str, device: object) -> bytes:
    return f"{os.getpid()} {device} {text}".encode()


def _size(text: str, device: object) -> bytes:
    return str(len(text)).encode()


def _huge(text: str, device: object) -> bytes:
    return bytes(range(256)) * (int(text) // 256)


def _hang(text: str, device: object) -> bytes:
    progress("checking")
    progress("timing")
    while True:
        time.sleep(1)


def _steps(text: str, device: object) -> bytes:
    """As many stages, a tenth of a second each."""
    for number in range(int(text)):
        progress(f"step {number}")
        time.sleep(0.1)
    return b"done"


def _exit(text: str, device: object) -> bytes:
    print("last words")
    os._exit(int(text))


def _segfault(text: str, device: object) -> bytes:
    ctypes.string_at(0)
    return b""


def _kill(text: str, device: object) -> bytes:
    os.kill(os.getpid(), int(text))
    time.sleep(60)
    return b""


def _later(text: str, device: object) -> bytes:
    """Answer, then die before the next job."""
    import threading

    threading.Timer(float(text), os._exit, (7,)).start()
    return b"ok"


def _fault(text: str, device: object) -> bytes:
    raise DeviceFault("unsupported", f"no instruction {text}", "kernel_1")


def _raise(text: str, device: object) -> bytes:
    raise ValueError(text)


def _stages(text: str, device: object) -> bytes:
    for stage in text.split():
        progress(stage)
    return b"done"


def _noise(text: str, device: object) -> bytes:
    for _ in range(int(text)):
        sys.stdout.write("x" * 1023 + "\n")
    os._exit(3)
