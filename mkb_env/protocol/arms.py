"""The arms of the protocol: solo in either DSL, and with the skill of a solo trial in the other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    """How a trial starts."""

    name: str
    dsl: str
    """The DSL that is written in: the target."""
    source: str | None = None
    """The DSL in which the skill was distilled; None: solo."""

    @property
    def source_arm(self) -> str | None:
        """The arm whose trial (same agent, problem and repetition) gives the skill; None for a solo arm."""
        return f"solo_{self.source}" if self.source else None

    @property
    def base_arm(self) -> str:
        """The arm without a skill in the same target DSL: what a transfer is compared with."""
        return f"solo_{self.dsl}"


ARMS = {
    arm.name: arm
    for arm in (
        Arm("solo_cute", "cute"),
        Arm("solo_tirx", "tirx"),
        Arm("cute2tirx", "tirx", "cute"),
        Arm("tirx2cute", "cute", "tirx"),
    )
}
"""Name -> arm."""
