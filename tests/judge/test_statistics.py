"""The interval of a ratio of medians: what it covers, and what it says of bad input."""

import numpy as np
import pytest

from mkb_env.judge.statistics import certain, is_narrow, ratio_of_medians


@pytest.mark.parametrize("drift", [0.0, 0.002])
@pytest.mark.parametrize("count", [50, 120])
def test_the_interval_covers_the_true_ratio_as_often_as_it_says(count: int, drift: float) -> None:
    rng, trials, hits = np.random.default_rng(count), 400, 0
    for _ in range(trials):
        common = np.exp(np.cumsum(rng.standard_normal(count)) * drift)
        baseline = 270 * common * np.exp(0.03 * rng.standard_normal(count))
        kernel = 75 * common * np.exp(0.02 * rng.standard_normal(count))
        interval = ratio_of_medians(baseline.tolist(), kernel.tolist(), resamples=400)
        hits += interval.low <= 270 / 75 <= interval.high
    # 95 %, with three standard errors of 400 trials (1.1 %) and the conservatism of medians of few draws.
    assert 0.92 <= hits / trials <= 0.985


def test_outliers_move_nothing() -> None:
    kernel = [10.0] * 60
    baseline = [20.0] * 55 + [5000.0] * 5
    assert ratio_of_medians(baseline, kernel) == certain(2.0)


def test_narrowness_is_relative_to_the_value() -> None:
    noisy = ratio_of_medians(np.linspace(90, 110, 51).tolist(), [10.0] * 51)
    assert noisy.value == 10 and is_narrow(noisy, 0.1) and not is_narrow(noisy, 0.005)


@pytest.mark.parametrize(("baseline", "kernel"), [([], []), ([1.0], [1.0, 2.0]), ([1.0, 0.0], [1.0, 1.0])])
def test_impossible_times_are_refused(baseline: list[float], kernel: list[float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        ratio_of_medians(baseline, kernel)
