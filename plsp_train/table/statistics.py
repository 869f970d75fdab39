"""Means, standard deviations and the paired t-test."""

import statistics
import warnings
from collections.abc import Mapping, Sequence

LEVEL = 0.01


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """The std is that of a sample; a single value has none."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def significant_gain(ours: Mapping[int, float], theirs: Mapping[int, float]) -> int:
    """1 if ours are significantly higher, -1 if lower, 0 if neither: paired by seed, two-sided."""
    from scipy.stats import ttest_rel  # type: ignore[import-untyped]

    seeds = sorted(ours.keys() & theirs.keys())
    if len(seeds) < 2:
        return 0
    with warnings.catch_warnings():
        # Differences that are all alike: no spread, which the p-value of 0 (or nan, if there is no difference) says.
        warnings.simplefilter("ignore", RuntimeWarning)
        test = ttest_rel([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
    if not test.pvalue < LEVEL:
        return 0
    return 1 if test.statistic > 0 else -1
