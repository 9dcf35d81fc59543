"""Which warps run ahead of which.

In lockstep every warp has written before any goes on to read, so a missing barrier changes nothing. A drifting run
sorts each block's warps into groups and lets a group run until all of it waits (for a barrier, a flag, lanes) or has
ended, then the next: a reader ahead of its writer finds the poison, or the old value, that a GPU may show it.

Two numbers below a square can be told apart by their two digits in the base of its root. A block's warps are numbered
at random, grouped by one digit in one direction, and the four combinations of digit and direction take turns, by block
and by run: within four drifting runs every warp of every block runs ahead of every other one.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
COMBINATIONS = 4


class Schedule:
    """The order of warps in run number ``run`` (0: lockstep) of a plan whose runs share ``seed``."""

    def __init__(self, run: int = 0, seed: int = 0) -> None:
        self.run, self.seed = run, seed

    def groups(self, warps: int, cooperative: bool) -> int:
        """How many groups blocks of ``warps`` warps fall into."""
        if self.run == 0:
            return 1
        return max(math.isqrt(warps - 1) + 1, 2 if cooperative else 1)

    def ranks(self, warps: int, first: int, ctas: int, cooperative: bool) -> Array:
        """The group of each warp of blocks ``first`` to ``first + ctas``, int64 of shape (ctas, warps); low runs first.

        Blocks of a cooperative launch, which may wait for each other, are shifted against each other at random.
        """
        groups = self.groups(warps, cooperative)
        generator = random.Random(self.seed + (self.run - 1) // COMBINATIONS)
        numbers = np.array(generator.sample(range(warps), warps))
        digits = np.stack([numbers % groups, numbers // groups])
        orders = np.concatenate([digits, groups - 1 - digits])
        blocks = np.arange(first, first + ctas)
        ranks: Array = orders[(self.run + blocks) % COMBINATIONS]
        if cooperative:
            shift = np.random.default_rng(self.seed + self.run).integers(groups, size=ctas)
            ranks = (ranks + shift[:, None]) % groups
        return ranks
