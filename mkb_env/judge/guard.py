"""Who is to blame when a plan cannot be run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mkb_env.devices.base import DeviceFault


@contextmanager
def plan_at_fault() -> Iterator[None]:
    """Within: a plan is loaded, bound or run. What goes wrong there is the plan's doing, whatever its exception.

    It would be free of charge as a fault of ours, and so a plan made to break our code would buy a retry. Drawing,
    reference and comparison, which no plan touches, stay outside.

    Raises:
        DeviceFault: the device's own, else a ``launch_error`` that quotes the exception.
    """
    try:
        yield
    except DeviceFault:
        raise
    except Exception as error:
        text = str(error).split("\n")[0][:500]
        raise DeviceFault("launch_error", f"the plan cannot be run: {type(error).__name__}: {text}") from error
