"""Index batches: every index once per pass, full batches, the same again after a resume."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from plsp_train.data.batches import IndexSampler


def sampler(count: int, batch_size: int, seed: int = 0) -> IndexSampler:
    return IndexSampler(torch.arange(100, 100 + count), batch_size, torch.Generator().manual_seed(seed))


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 40), batch_size=st.integers(1, 60))
def test_batches_are_full_and_every_pass_contains_each_index_once(count: int, batch_size: int) -> None:
    batches = list(itertools.islice(sampler(count, batch_size), 3 * count))
    assert {len(batch) for batch in batches} == {batch_size}
    drawn = torch.cat(batches)
    passes = drawn[: len(drawn) // count * count].view(-1, count)
    assert (passes.sort(dim=1).values == torch.arange(100, 100 + count)).all()


def test_a_batch_that_does_not_fit_into_memory_fails_at_once() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        next(sampler(5, 10**15))


def test_passes_differ_and_positions_are_uniform() -> None:
    passes = torch.stack(list(itertools.islice(sampler(5, 5), 5000))) - 100
    assert chisquare(torch.bincount(passes[:, 0])).pvalue > 1e-4
    assert chisquare(torch.bincount(passes[:, 4])).pvalue > 1e-4


def test_seed_determines_the_batches() -> None:
    first, same, other = (torch.cat(list(itertools.islice(sampler(50, 8, seed), 10))) for seed in (3, 3, 4))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("steps_before", [0, 1, 6, 7])
def test_resumed_sampler_continues_as_if_uninterrupted(steps_before: int, tmp_path: Path) -> None:
    uninterrupted = sampler(20, 3)
    for _, _batch in zip(range(steps_before), uninterrupted, strict=False):
        pass
    torch.save(uninterrupted.state_dict(), tmp_path / "state.pt")
    resumed = IndexSampler(torch.arange(20), 3, torch.Generator().manual_seed(99))
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for _ in range(30):
        assert torch.equal(next(uninterrupted), next(resumed))


def test_zip_with_a_range_draws_exactly_that_many_batches() -> None:
    one, other = sampler(20, 3), sampler(20, 3)
    assert len(list(zip(range(4), one, strict=False))) == 4
    for _ in range(4):
        next(other)
    assert torch.equal(next(one), next(other))


def test_caller_may_change_a_batch_and_state() -> None:
    changed, reference = sampler(20, 3), sampler(20, 3)
    next(changed).zero_()
    changed.state_dict()["order"].zero_()
    next(reference)
    for _ in range(20):
        assert torch.equal(next(changed), next(reference))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="indices must be of shape"):
        sampler(0, 3)
    with pytest.raises(ValueError, match="batch_size must be positive, got 0"):
        sampler(3, 0)
