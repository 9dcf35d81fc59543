"""A verdict as text for an agent or a person to read."""

from __future__ import annotations

from mkb_env.devices.base import KernelInfo, short_name
from mkb_env.judge.verdict import OutputDiff, Timing, Verdict

MAX_KERNELS = 8
MAX_LOG = 2000
"""Characters of a submission's own output that are shown, from its end."""


def render(verdict: Verdict) -> str:
    """Everything in the verdict that helps to write the next submission, most important first.

    What the verdict's message tells already (the worst output, estimated times) is not told again.
    """
    parts = [f"{verdict.stage.value}: {verdict.message}".rstrip(": \n")]
    if verdict.hint:
        parts.append(f"hint: {verdict.hint}")
    location = verdict.location
    if location and location.text.strip() not in verdict.message:
        caret = f"\n    {' ' * (location.column - 1)}^" if location.column else ""
        parts.append(f"line {location.line} of the source:\n    {location.text}{caret}")
    parts += [_diff(diff) for diff in verdict.diffs if diff.passed or diff.name not in verdict.message]
    if verdict.timing and not verdict.timing.simulated:
        parts.append(_timing(verdict.timing))
    parts += [_kernel(kernel) for kernel in verdict.kernels[:MAX_KERNELS]]
    if len(verdict.kernels) > MAX_KERNELS:
        parts.append(f"and {len(verdict.kernels) - MAX_KERNELS} more kernel launches")
    if verdict.log.strip():
        parts.append(f"printed by the submission:\n{verdict.log.strip()[-MAX_LOG:]}")
    return "\n".join(parts)


def _diff(diff: OutputDiff) -> str:
    head = f"{diff.name} {diff.dtype}{list(diff.shape)}"
    error = f"max |error| {diff.max_abs_error:.3g}, allowed {diff.allowance:.3g}"
    if diff.passed:
        return f"{head}: right ({error})"
    shown = f" ({error})" if diff.got is not None else ""
    text = f"{head}: wrong{shown}, {100 * diff.share_outside:.3g} % of its elements outside"
    if diff.got is not None and diff.want is not None:
        text += f"; worst at {list(diff.worst_index)}: got {diff.got:.6g}, want {diff.want:.6g}"
    if diff.nan_count or diff.inf_count:
        text += f"; {diff.nan_count} NaN, {diff.inf_count} Inf"
    return f"{text}; {diff.pattern}" if diff.pattern else text


def _timing(timing: Timing) -> str:
    speedup = timing.speedup
    text = f"speed-up {speedup.value:.3f}, 95 % interval {speedup.low:.3f} to {speedup.high:.3f} ({timing.draws} draws)"
    if device := timing.device_speedup:
        text += f"; on the device alone {device.value:.3f}, {device.low:.3f} to {device.high:.3f}"
    if timing.impossible:
        return f"{text}; the time is below what the device can do at all: it does not count as a measurement"
    if timing.bound_us:
        text += f"; {timing.roofline:.0%} of the roofline (at least {timing.bound_us:.1f} us)"
    return text


def _kernel(kernel: KernelInfo) -> str:
    text = f"launched {short_name(kernel.name)}: grid {list(kernel.grid)}, block {list(kernel.block)}"
    if kernel.cluster != (1, 1, 1):
        text += f", cluster {list(kernel.cluster)}"
    text += f", {kernel.shared_bytes} B shared"
    if kernel.registers is not None:
        text += f", {kernel.registers} registers"
    if kernel.spill_bytes:
        text += f", {kernel.spill_bytes} B spilled"
    return text
