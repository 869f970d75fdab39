"""Candidate-set generators: exact distributions at few classes, exact rules at a hundred."""

import itertools
from collections.abc import Callable
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, chisquare

from plsp_train.data.candidates import (
    BUILT_IN_GENERATORS,
    CIFAR100_SUPERCLASSES,
    Ambiguity,
    ambiguity_summary,
    generate_candidates,
)

P_VALUE = 1e-4
DRAWS = 100_000


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_distribution(candidates: torch.Tensor, probability: Callable[[frozenset[int]], float]) -> None:
    """Chi-square of the drawn sets against exact probabilities of all 2^l sets; impossible sets must not occur."""
    num_classes = candidates.shape[1]
    sets = [
        frozenset(itertools.compress(range(num_classes), bits))
        for bits in itertools.product((0, 1), repeat=num_classes)
    ]
    code = (candidates.long() * 2 ** torch.arange(num_classes - 1, -1, -1)).sum(1)
    observed = torch.bincount(code, minlength=len(sets)).double()
    expected = torch.tensor([probability(s) for s in sets], dtype=torch.float64)
    assert expected.sum().item() == pytest.approx(1)
    assert observed[expected == 0].sum() == 0
    possible = expected > 0
    if possible.sum() > 1:
        assert chisquare(observed[possible], expected[possible] * len(candidates)).pvalue > P_VALUE


def fps_probability(
    candidates: frozenset[int], label: int, others: list[int], q: float, *, force: bool, full: int | None
) -> float:
    """P(set) under FPS among `others`; `full` is the size of the excluded full set."""
    entered = candidates - {label}
    if label not in candidates or not entered <= set(others):
        return 0.0
    probability = q ** len(entered) * (1 - q) ** (len(others) - len(entered))
    if full is not None:
        probability = 0.0 if len(candidates) == full else probability / (1 - q ** len(others))
    if force:
        none = (1 - q) ** len(others) / ((1 - q ** len(others)) if full is not None else 1)
        if len(entered) == 0:
            probability = 0.0
        elif len(entered) == 1:
            probability += none / len(others)
    return probability


@pytest.mark.parametrize(("num_classes", "label"), [(2, 1), (3, 0), (4, 2)])
def test_uss_is_uniform_over_the_sets_with_the_true_label_except_the_full_set(num_classes: int, label: int) -> None:
    candidates = generate_candidates(Ambiguity("uss"), torch.full((DRAWS,), label), num_classes, seeded())
    count = 2 ** (num_classes - 1) - 1
    assert_distribution(candidates, lambda s: float(label in s and len(s) < num_classes) / count)


@pytest.mark.parametrize("q", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("recipe", ["paper", "released"])
def test_fps_has_the_exact_distribution(q: float, recipe: str) -> None:
    candidates = generate_candidates(Ambiguity("fps", q), torch.full((DRAWS,), 1), 4, seeded(1), recipe=recipe)
    paper = recipe == "paper"
    assert_distribution(
        candidates, lambda s: fps_probability(s, 1, [0, 2, 3], q, force=paper, full=4 if paper else None)
    )


def test_pair_adds_only_the_next_label() -> None:
    candidates = generate_candidates(Ambiguity("pair", 0.3), torch.full((DRAWS,), 3), 4, seeded(2))
    expected = {frozenset({3}): 0.7, frozenset({3, 0}): 0.3}
    assert_distribution(candidates, lambda s: expected.get(s, 0.0))


def test_circulant_adds_neighbours_by_their_distance() -> None:
    entry = {0: 1.0, 1: 0.5, 2: 0.3, 3: 0.1, 4: 0.0, 5: 0.1, 6: 0.3, 7: 0.5}  # by label, seen from label 0
    candidates = generate_candidates(Ambiguity("circulant"), torch.zeros(DRAWS, dtype=torch.int64), 8, seeded(3))
    assert_distribution(candidates, lambda s: prod(p if label in s else 1 - p for label, p in entry.items()))


@pytest.mark.parametrize("recipe", ["paper", "released"])
def test_noisy_drops_the_true_label_at_the_given_rate_and_leaves_no_set_empty(recipe: str) -> None:
    q, noise, label, others = 0.4, 0.25, 1, [0, 2, 3]
    candidates = generate_candidates(
        Ambiguity("noisy", q, noise), torch.full((DRAWS,), label), 4, seeded(4), recipe=recipe
    )
    paper = recipe == "paper"

    def probability(s: frozenset[int]) -> float:
        with_label = fps_probability(s | {label}, label, others, q, force=paper, full=4 if paper else None)
        if label in s:
            return (1 - noise) * with_label
        if not s:
            return 0.0
        alone = fps_probability(frozenset({label}), label, others, q, force=paper, full=4 if paper else None)
        return noise * (with_label + (alone / 3 if len(s) == 1 else 0.0))

    assert_distribution(candidates, probability)


@pytest.mark.parametrize(("recipe", "q"), [("paper", 0.3), ("released", 0.3), ("paper", 0.0)])
def test_hierarchical_is_fps_within_the_superclass(recipe: str, q: float) -> None:
    members = list(CIFAR100_SUPERCLASSES[8])  # bear, leopard, lion, tiger, wolf
    candidates = generate_candidates(
        Ambiguity("hierarchical", q), torch.full((20_000,), members[2]), 100, seeded(5), recipe=recipe
    )
    assert candidates.sum() == candidates[:, members].sum()
    assert_distribution(
        candidates[:, members],
        lambda s: fps_probability(s, 2, [0, 1, 3, 4], q, force=recipe == "paper", full=None),
    )


def test_superclasses_are_twenty_disjoint_fives() -> None:
    assert len(CIFAR100_SUPERCLASSES) == 20
    assert {len(members) for members in CIFAR100_SUPERCLASSES} == {5}
    assert sorted(itertools.chain(*CIFAR100_SUPERCLASSES)) == list(range(100))


def test_superclasses_are_the_coarse_labels_of_the_data_set() -> None:
    coarse_of_fine = (
        "4 1 14 8 0 6 7 7 18 3 3 14 9 18 7 11 3 9 7 11 6 11 5 10 7 "
        "6 13 15 3 15 0 11 1 10 12 14 16 9 11 5 5 19 8 8 15 13 14 17 18 10 "
        "16 4 17 4 2 0 17 4 18 17 10 3 2 12 12 16 12 1 9 19 2 10 0 1 16 "
        "12 9 13 15 13 16 19 2 4 6 19 5 5 8 19 18 1 2 15 6 0 17 8 14 13"
    )
    for fine, coarse in enumerate(map(int, coarse_of_fine.split())):
        assert fine in CIFAR100_SUPERCLASSES[coarse]


def test_distribution_is_exact_at_a_hundred_classes() -> None:
    labels = torch.arange(100).repeat(200)
    uss = generate_candidates(Ambiguity("uss"), labels, 100, seeded(6))
    others = int(uss.sum()) - len(labels)
    assert binomtest(others, 99 * len(labels), 0.5).pvalue > P_VALUE
    # The sizes of the sets are binomial too, not only their mean.
    assert (uss.sum(1) - 1).double().var().item() == pytest.approx(99 / 4, rel=0.05)

    q = 0.05
    fps = generate_candidates(Ambiguity("fps", q), labels, 100, seeded(7))
    assert fps.sum(1).min() == 2
    share_of_pairs = 99 * q * (1 - q) ** 98 + (1 - q) ** 99
    pairs = int((fps.sum(1) == 2).sum())
    assert binomtest(pairs, len(labels), share_of_pairs).pvalue > P_VALUE
    assert not generate_candidates(Ambiguity("fps", 0.99), labels, 100, seeded(8)).all(1).any()


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(BUILT_IN_GENERATORS),
    num_classes=st.integers(8, 30),
    q=st.floats(0, 0.95),
    recipe=st.sampled_from(["paper", "released"]),
    seed=st.integers(0, 2**32),
)
def test_every_set_obeys_its_generators_rules(name: str, num_classes: int, q: float, recipe: str, seed: int) -> None:
    num_classes = 100 if name == "hierarchical" else num_classes
    labels = torch.randint(num_classes, (50,), generator=seeded(seed))

    def draw() -> torch.Tensor:
        return generate_candidates(Ambiguity(name, q, 0.5), labels, num_classes, seeded(seed), recipe=recipe)

    candidates = draw()
    assert candidates.dtype == torch.bool
    assert candidates.shape == (50, num_classes)
    assert candidates.any(1).all()
    if name != "noisy":
        assert candidates.gather(1, labels[:, None]).all()
    if recipe == "paper":
        assert not candidates.all(1).any()
    assert torch.equal(candidates, draw())


def test_generator_advances_and_empty_input_gives_empty_output() -> None:
    generator, labels = seeded(), torch.arange(10)
    assert not torch.equal(*(generate_candidates(Ambiguity("uss"), labels, 10, generator) for _ in range(2)))
    assert generate_candidates(Ambiguity("uss"), labels[:0], 10, generator).shape == (0, 10)


def test_ambiguity_keeps_only_the_parameters_of_its_generator() -> None:
    kept = {name: Ambiguity(name, 0.3, 0.1).used() for name in BUILT_IN_GENERATORS}
    assert {name for name, used in kept.items() if used.flip_probability} == {"fps", "pair", "hierarchical", "noisy"}
    assert {name for name, used in kept.items() if used.noise_rate} == {"noisy"}


def test_ambiguity_summary() -> None:
    candidates = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1], [1, 1, 1]], dtype=torch.bool)
    summary = ambiguity_summary(candidates, torch.tensor([0, 1, 0, 2]))
    assert summary == (2.0, 1, 3, 0.25, 0.75)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"candidates": "magic"}, "unknown candidate generator 'magic': choose one of uss"),
        ({"recipe": "secret"}, "unknown recipe"),
        ({"flip_probability": 1.0}, r"flip_probability must lie in \[0, 1\)"),
        ({"flip_probability": -0.1}, r"flip_probability must lie in \[0, 1\)"),
        ({"flip_probability": float("nan")}, r"flip_probability must lie in \[0, 1\)"),
        ({"flip_probability": None}, "flip_probability must lie in"),
        ({"flip_probability": 0.9999}, "too close to 1"),
        ({"candidates": "noisy", "noise_rate": 1.0}, r"noise_rate must lie in \[0, 1\)"),
        ({"num_classes": 9}, r"labels must lie in 0..8, got 0..9"),
        ({"labels": torch.tensor([-1])}, "labels must lie in"),
        ({"labels": torch.tensor([0.0])}, "labels must be int64"),
        ({"labels": torch.tensor([0, 1]), "num_classes": 2}, "fps needs at least 3 classes"),
        ({"candidates": "uss", "labels": torch.tensor([0]), "num_classes": 1}, "uss needs at least 2 classes"),
        (
            {"candidates": "circulant", "labels": torch.tensor([0]), "num_classes": 7},
            "circulant needs at least 8 classes",
        ),
        ({"candidates": "hierarchical"}, "needs 100 classes, got 10"),
    ],
)
def test_wrong_arguments_are_named_in_one_line(arguments: dict, message: str) -> None:
    given = {"candidates": "fps", "flip_probability": 0.5, "labels": torch.arange(10), "num_classes": 10} | arguments
    ambiguity = Ambiguity(**{name: given.pop(name) for name in Ambiguity._fields if name in given})
    with pytest.raises(ValueError, match=message) as error:
        generate_candidates(ambiguity, generator=seeded(), **given)
    assert "\n" not in str(error.value)
