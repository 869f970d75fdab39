"""Means, standard deviations and the paired t-test."""

import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

LEVEL = 0.01


class PairedDifference(NamedTuple):
    """Ours minus theirs, with its 95 % interval; a single pair has neither interval nor p-value."""

    mean: float
    low: float | None
    high: float | None
    p_value: float
    num_pairs: int


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """The sample standard deviation; None for a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def paired_difference(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> PairedDifference | None:
    """Two-sided t-test, paired by seed and fold; None without a pair."""
    from scipy.stats import ttest_rel  # type: ignore[import-untyped]

    pairs = sorted(ours.keys() & theirs.keys())
    if not pairs:
        return None
    mean = statistics.fmean(ours[pair] - theirs[pair] for pair in pairs)
    if len(pairs) == 1:
        return PairedDifference(mean, None, None, float("nan"), 1)
    with warnings.catch_warnings():
        # Constant differences have no spread: the p-value is 0, or nan if there is no difference.
        warnings.simplefilter("ignore", RuntimeWarning)
        test = ttest_rel([ours[pair] for pair in pairs], [theirs[pair] for pair in pairs])
        low, high = test.confidence_interval()
    return PairedDifference(mean, float(low), float(high), float(test.pvalue), len(pairs))


def significant_gain(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> int:
    """1 if ours are significantly higher, -1 if lower, else 0."""
    difference = paired_difference(ours, theirs)
    if difference is None or not difference.p_value < LEVEL:
        return 0
    return 1 if difference.mean > 0 else -1
