"""Environment ids: one per problem and DSL, one per family and DSL. Reads folder names only."""

from __future__ import annotations

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from mkb_env.dsl import NAMES
from mkb_env.problems import FAMILIES, catalog

ENTRY_POINT = "mkb_env.env:KernelEnv"


def problem_id(slug: str, dsl: str) -> str:
    """The id of the environment of one problem, for example ``MKB/rmsnorm-h128-qwen3-30b-bf16-cute-v0``."""
    return f"MKB/{slug.replace('_', '-')}-{dsl}-v0"


def family_id(family: str, dsl: str) -> str:
    """The id of the environment that draws a problem of one family (its folder's name) at each reset."""
    return f"MKB/{FAMILIES[family]}-{dsl}-v0"


def register_all() -> None:
    """Register every id that is not registered yet. A family without a problem gets none."""
    problems = catalog()
    families = sorted({ref.family for ref in problems.values()})
    for dsl in NAMES:
        for slug in problems:
            _register(problem_id(slug, dsl), {"problem": slug, "dsl": dsl})
        for family in families:
            _register(family_id(family, dsl), {"family": family, "dsl": dsl})


def _register(name: str, kwargs: dict[str, str]) -> None:
    if name not in gym.registry:
        # gym.register looks through all ids for each new one: 160 of them would take a tenth of a second.
        gym.registry[name] = EnvSpec(name, entry_point=ENTRY_POINT, nondeterministic=True, kwargs=dict(kwargs))
