"""results.npz: labels chosen from logits and candidate sets, saved, read and validated."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plsp_train import results as results_module
from plsp_train.results import Results, disambiguate, load_results, save_results
from small_results import results

LOGITS = [[3.0, 1.0, 0.0], [0.0, 0.5, 4.0], [1.0, 1.0, 1.0]]
CANDIDATES = [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


def complete() -> Results:
    """Results with every optional array."""
    return results(
        LOGITS,
        CANDIDATES,
        names=np.array(["a.png", "b, c.png", "Zürich.png"]),
        true_label=np.array([0, 2, 2]),
        picture_index=np.array([1]),
        pictures=np.zeros((1, 3, 4, 4), dtype=np.uint8),
        test_confusion=np.eye(3, dtype=np.int64),
    )


def test_label_is_the_most_probable_candidate() -> None:
    found = results(LOGITS, CANDIDATES)
    assert found.label.tolist() == [0, 1, 2]
    first = np.exp(3) / (np.exp(3) + np.exp(1))
    np.testing.assert_allclose(found.confidence, [first, 1 / (1 + np.exp(-0.5)), 1], rtol=1e-6)
    classes, probabilities = found.candidates(1)
    assert classes.tolist() == [1, 0], "the most probable first"
    np.testing.assert_allclose(probabilities, [found.confidence[1], 1 - found.confidence[1]], rtol=1e-6)


def test_prediction_outside_the_candidates_is_a_contradiction() -> None:
    found = results(LOGITS, CANDIDATES)
    assert found.prediction[:2].tolist() == [0, 2]
    assert found.prediction_probability[1] == pytest.approx(torch.tensor(LOGITS[1]).softmax(0)[2].item())
    assert found.contradictions()[:2].tolist() == [False, True]


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(2, 7), st.integers(0, 2**31))
def test_arrays_agree_with_dense_probabilities(count: int, num_classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(count, num_classes, generator=generator)
    candidates = torch.rand(count, num_classes, generator=generator) < 0.4
    candidates[torch.arange(count), torch.randint(num_classes, (count,), generator=generator)] = True
    found = disambiguate(logits, candidates)
    weights = logits.double().softmax(1) * candidates
    dense = np.zeros((count, num_classes))
    dense[np.repeat(np.arange(count), np.diff(found.offsets)), found.classes] = found.probabilities
    np.testing.assert_allclose(dense, weights / weights.sum(1, keepdim=True), atol=1e-6)
    np.testing.assert_array_equal(found.label, dense.argmax(1))
    np.testing.assert_allclose(found.confidence, dense.max(1), atol=1e-6)
    np.testing.assert_array_equal(found.prediction, logits.argmax(1))


def test_batches_and_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, candidates = torch.randn(50, 4), torch.ones(50, 4, dtype=torch.bool)
    expected = disambiguate(logits, candidates)
    monkeypatch.setattr(results_module, "_CHUNK", 7)
    for given_logits in (logits, iter(logits.split(16))):
        for found, wanted in zip(disambiguate(given_logits, candidates), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_extreme_logits_stay_finite() -> None:
    found = disambiguate(torch.tensor([[1000.0, -1000.0, -1000.0]]), torch.tensor([[False, True, True]]))
    assert found.probabilities.tolist() == [0.5, 0.5]


def test_logits_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="logits of 2 instances"):
        disambiguate(torch.zeros(2, 3), torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="finite"):
        disambiguate(torch.tensor([[0.0, torch.nan]]), torch.ones(1, 2, dtype=torch.bool))


def test_results_survive_saving(tmp_path: Path) -> None:
    for number, expected in enumerate((complete(), results(LOGITS, CANDIDATES))):
        save_results(tmp_path / f"{number}.npz", expected)
        found = load_results(tmp_path / f"{number}.npz")
        assert found.arrays().keys() == expected.arrays().keys()
        for name, array in expected.arrays().items():
            np.testing.assert_array_equal(getattr(found, name), array)
            assert getattr(found, name).dtype == array.dtype


def test_instances_are_taken_with_their_candidates() -> None:
    whole = complete()
    part = whole.take(np.array([2, 0]))
    assert len(part) == 2
    assert part.names is not None
    assert part.names.tolist() == ["Zürich.png", "a.png"]
    assert part.pictures is None
    for i, j in enumerate((2, 0)):
        assert part.label[i] == whole.label[j]
        for found, expected in zip(part.candidates(i), whole.candidates(j), strict=True):
            np.testing.assert_array_equal(found, expected)


# -------------------------------------------------------------------------------------------------------- invalid files


def refused(path: Path) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as raised:
        load_results(path)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("label", np.array([0, 1])),
        ("label", np.array([0, 1, 2], dtype=np.int32)),
        ("label", np.array([2, 1, 2])),
        ("prediction", np.array([0, 1, 3])),
        ("true_label", np.array([0, -1, 2])),
        ("offsets", np.array([0, 2, 2, 5])),
        ("offsets", np.array([0, 2, 4])),
        ("offsets", np.array([0, 2, 4, 6])),
        ("classes", np.array([0, 1, 0, 9, 2], dtype=np.int32)),
        ("probabilities", np.ones(4, dtype=np.float32)),
        ("names", np.array(["a", "b"])),
        ("pictures", np.zeros((2, 3, 4, 4), dtype=np.uint8)),
        ("picture_index", np.array([3])),
        ("test_confusion", np.zeros((3, 2), dtype=np.int64)),
        ("class_names", np.array([1, 2, 3])),
    ],
)
def test_error_names_file_and_array(tmp_path: Path, key: str, value: np.ndarray) -> None:
    path = tmp_path / "results.npz"
    np.savez(path, **complete().arrays() | {key: value})
    assert key in refused(path)


def test_missing_and_unknown_arrays_are_named(tmp_path: Path) -> None:
    path, arrays = tmp_path / "results.npz", complete().arrays()
    np.savez(path, **{name: array for name, array in arrays.items() if name != "changes"})
    assert "lacks changes" in refused(path)
    np.savez(path, **arrays, surprise=np.zeros(1))
    assert "surprise" in refused(path)
    np.savez(path, **{name: array for name, array in arrays.items() if name != "pictures"})
    assert "pictures" in refused(path)


@pytest.mark.parametrize("content", [b"", b"no zip file", b"PK\x03\x04 cut off"])
def test_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "results.npz"
    path.write_bytes(content)
    assert "not a results file" in refused(path)


def test_single_array_and_pickled_objects_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.npz"
    with open(path, "wb") as file:
        np.save(file, np.zeros(3))
    assert "not a results file" in refused(path)
    np.savez(path, **complete().arrays() | {"names": np.array([{}, {}, {}], dtype=object)})
    assert "not a results file" in refused(path)


def test_missing_and_truncated_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.npz"
    assert "no results file" in refused(path)
    save_results(path, complete())
    path.write_bytes(path.read_bytes()[:-100])
    assert "damaged" in refused(path)
