"""Means, standard deviations and the paired t-test."""

import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

LEVEL = 0.01


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """The sample standard deviation; None for a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def significant_gain(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> int:
    """1 if ours are significantly higher, -1 if lower, else 0: two-sided t-test, paired by seed and fold."""
    from scipy.stats import ttest_rel  # type: ignore[import-untyped]

    pairs = sorted(ours.keys() & theirs.keys())
    if len(pairs) < 2:
        return 0
    with warnings.catch_warnings():
        # Constant differences have no spread: the p-value is 0, or nan if there is no difference.
        warnings.simplefilter("ignore", RuntimeWarning)
        test = ttest_rel([ours[pair] for pair in pairs], [theirs[pair] for pair in pairs])
    if not test.pvalue < LEVEL:
        return 0
    return 1 if test.statistic > 0 else -1
