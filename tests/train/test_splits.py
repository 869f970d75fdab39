"""Splits of a source: what is trained and tested on, and how it is normalised."""

import pytest
import torch

from plsp_train.data import Source, Split, split_source

COUNT = 40


def numbered(**changes: object) -> Source:
    """Vectors that hold their own number and its square."""
    number = torch.arange(COUNT)
    given = {
        "name": "numbered",
        "inputs": torch.stack([number, number**2], 1).float(),
        "class_names": ("even", "odd"),
        "candidates": torch.ones(COUNT, 2, dtype=torch.bool),
        "labels": number % 2,
    }
    return Source(**(given | changes))  # type: ignore[arg-type]


def numbers(inputs: torch.Tensor | None) -> list[int]:
    assert inputs is not None
    return inputs[:, 0].int().tolist()


def test_features_whose_variance_overflows_are_refused() -> None:
    with pytest.raises(ValueError, match="the variance of the features overflows in float32"):
        split_source(numbered(inputs=numbered().inputs * 1e35), Split(), normalise="global")


def test_without_a_split_the_source_is_kept_whole() -> None:
    data = split_source(numbered(), Split())
    assert numbers(data.train_inputs) == list(range(COUNT))
    assert data.test_inputs is None


def test_a_fraction_is_held_out_for_testing_by_the_seed() -> None:
    data = split_source(numbered(), Split(test_fraction=0.25, seed=3))
    train, test = numbers(data.train_inputs), numbers(data.test_inputs)
    assert (len(test), sorted(train + test)) == (10, list(range(COUNT)))
    assert data.test_labels is not None
    assert data.test_labels.tolist() == [number % 2 for number in test]
    assert data.train_rows is not None
    assert data.train_rows.tolist() == train
    assert numbers(split_source(numbered(), Split(test_fraction=0.25, seed=3)).test_inputs) == test
    assert numbers(split_source(numbered(), Split(test_fraction=0.25, seed=4)).test_inputs) != test


def test_every_instance_is_tested_in_exactly_one_fold() -> None:
    folds = [split_source(numbered(), Split(folds=3, fold=fold)) for fold in (1, 2, 3)]
    tested = [numbers(data.test_inputs) for data in folds]
    assert sorted(number for part in tested for number in part) == list(range(COUNT))
    assert {len(part) for part in tested} == {13, 14}
    for data, part in zip(folds, tested, strict=True):
        assert not set(numbers(data.train_inputs)) & set(part)


def test_folds_without_labels_keep_their_candidate_sets() -> None:
    data = split_source(numbered(labels=None), Split(folds=2, fold=1))
    assert data.test_labels is None
    assert data.test_candidates is not None
    assert len(data.test_candidates) == COUNT // 2


@pytest.mark.parametrize(
    ("changes", "split", "message"),
    [
        ({"labels": None}, Split(test_fraction=0.5), "test_fraction needs true labels"),
        ({"test_inputs": torch.zeros(1, 2)}, Split(folds=2, fold=1), "has a test set of its own"),
        ({}, Split(test_fraction=0.001), "leaves none"),
        ({}, Split(folds=50, fold=1), "impossible for 40 instances"),
    ],
)
def test_impossible_splits_are_explained(changes: dict[str, object], split: Split, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_source(numbered(**changes), split)


def test_vectors_are_scaled_by_feature_by_one_scale_or_not() -> None:
    inputs = torch.tensor([[0.0, 0.0, 5.0], [2.0, 200.0, 5.0]]).repeat(20, 1)
    by_feature, by_one, unscaled = (
        split_source(numbered(inputs=inputs), Split(), normalise=how) for how in ("feature", "global", "none")
    )
    assert (by_feature.mean, by_feature.std) == ((1.0, 100.0, 5.0), (1.0, 100.0, 1.0))
    assert by_one.mean == by_feature.mean
    assert by_one.std == pytest.approx([((1 + 100**2 + 0) / 3) ** 0.5] * 3)
    assert (unscaled.mean, unscaled.std) == ((0.0,) * 3, (1.0,) * 3)


def test_images_are_normalised_by_channel() -> None:
    images = torch.randint(0, 256, (COUNT, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[:, 2] = 7
    data = split_source(numbered(inputs=images), Split())
    std, mean = torch.std_mean(images.double() / 255, dim=(0, 2, 3), correction=0)
    assert data.mean == pytest.approx(mean.tolist())
    assert data.std[:2] == pytest.approx(std[:2].tolist())
    assert data.std[2] == 1.0, "a constant channel stays at zero"
