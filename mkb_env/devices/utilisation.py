"""How busy a GPU is, by NVML: the share of time in which some kernel ran. Loads no torch."""

from __future__ import annotations

import threading
from typing import Any

PERIOD = 0.2
"""Seconds between two looks; NVML's own figure covers the time since about the last one."""


class Utilisation:
    """Watches a GPU while it is entered as a context manager; ``share`` is known after.

    Args:
        device: ``"cuda"`` or ``"cuda:N"``; None watches nothing.
    """

    share: float | None = None
    """Of the time, between 0 and 1; None without a GPU or without NVML."""

    def __init__(self, device: str | None) -> None:
        self._ordinal = None if device is None else int(device.partition(":")[2] or 0)
        self._seen: list[int] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Utilisation:
        if self._ordinal is not None and (handle := _handle(self._ordinal)) is not None:
            self._thread = threading.Thread(target=self._watch, args=(handle,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread:
            self._thread.join()
        if self._seen:
            self.share = round(sum(self._seen) / len(self._seen) / 100, 3)

    def _watch(self, handle: Any) -> None:
        import pynvml

        while not self._over.wait(PERIOD):
            self._seen.append(int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu))


def _handle(ordinal: int) -> Any:
    """NVML's handle of a CUDA device, or None where NVML is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByIndex(ordinal)
    except (ImportError, OSError):
        return None
    except Exception as error:  # NVML's own errors, whose class is not there without NVML
        if type(error).__module__.startswith("pynvml"):
            return None
        raise
