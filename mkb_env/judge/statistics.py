"""The ratio of two medians, with its interval.

Kernel and baseline are timed in turn, so draw ``i`` gives a pair of times under the same clocks and temperature. The
interval is the percentile bootstrap over pairs (Efron & Tibshirani 1993, chapter 13): resampling pairs keeps whatever
the two have in common. Its coverage for medians of 50 and more is measured in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mkb_env.judge.verdict import Interval

RESAMPLES = 1000
CONFIDENCE = 0.95


def ratio_of_medians(baseline: Sequence[float], kernel: Sequence[float], resamples: int = RESAMPLES) -> Interval:
    """median(baseline) / median(kernel) with its 95 % interval, from times in any one unit, paired by draw.

    Raises:
        ValueError: if the two differ in length, are empty, or hold a time that is not positive.
    """
    pairs = np.asarray([baseline, kernel], dtype=np.float64) if len(baseline) == len(kernel) else np.empty(0)
    if not pairs.size or not (pairs > 0).all():
        raise ValueError(
            f"expected as many positive baseline as kernel times, got {len(baseline)} and {len(kernel)}, "
            f"the smallest {min([*baseline, *kernel], default=None)}"
        )
    count = pairs.shape[1]
    # A fixed generator: the same times give the same interval whenever a verdict is recomputed.
    picks = np.random.default_rng(0).integers(count, size=(resamples, count))
    medians = np.median(pairs[:, picks], axis=2)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(medians[0] / medians[1], [tail, 100 - tail])
    top, bottom = np.median(pairs, axis=1)
    return Interval(float(top / bottom), float(low), float(high))


def is_narrow(interval: Interval, tolerance: float) -> bool:
    """Whether the interval lies within +- ``tolerance`` (a share) of its value."""
    widest = max(interval.high - interval.value, interval.value - interval.low)
    return widest <= tolerance * interval.value


def certain(value: float) -> Interval:
    """An interval collapsed to its value, for estimates that have no spread."""
    return Interval(value, value, value)
