"""Static rules over a submission's source, and over the note a skill is.

The rules are a tripwire that gives clear messages early and cheaply. They are not the boundary: that is the recorder's
sandbox, and the fact that a submission's Python never meets a GPU, a clock or an input value.
"""

from mkb_env.legality.rules import RULES, Rule, check, refuse_baseline
from mkb_env.legality.skill import MAX_SKILL_CHARACTERS, refuse_skill

__all__ = ["MAX_SKILL_CHARACTERS", "RULES", "Rule", "check", "refuse_baseline", "refuse_skill"]
