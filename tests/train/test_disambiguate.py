"""`python -m plsp_train.disambiguate`: labels of the training instances, and the review list."""

import csv
from pathlib import Path

import numpy as np
import pytest

from plsp_train.disambiguate.cli import main
from plsp_train.results import Results, save_results
from small_results import results

NAMES = np.array(["first.png", 'with "quotes", and a comma.png', "two\nlines.png"])
LOGITS = [[9.0, 0.0, 0.0], [0.0, 0.5, 9.0], [1.0, 1.5, -5.0]]
CANDIDATES = [[1, 1, 0], [1, 1, 0], [1, 1, 1]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    save_results(directory / "results.npz", learned())
    return directory


def learned() -> Results:
    return results(
        LOGITS,
        CANDIDATES,
        row=np.array([0, 4, 7]),
        names=NAMES,
        labeled=np.array([True, False, False]),
        held_out=np.array([False, False, True]),
        changes=np.array([0, 2, 1], dtype=np.int32),
    )


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_instance_has_its_label(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "labels.csv"
    assert main([str(run), "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"3 labels written to {out}; predictions outside the candidate set: 1\n"
    found = rows(out)
    assert [row["name"] for row in found] == NAMES.tolist()
    assert [row["row"] for row in found] == ["0", "4", "7"]
    assert [row["label"] for row in found] == ["cat", "dog", "dog"]
    assert [row["in_labelled_set"] for row in found] == ["yes", "no", "no"]
    assert [row["held_out"] for row in found] == ["no", "no", "yes"]
    assert [row["changes"] for row in found] == ["0", "2", "1"]
    assert [row["contradicting_prediction"] for row in found] == ["", "owl", ""]
    assert found[1]["candidates"] == "dog:0.622|cat:0.378"
    assert float(found[1]["confidence"]) == pytest.approx(learned().confidence[1], rel=1e-5)
    assert "true_label" not in found[0]


def test_true_labels_are_written_and_names_are_optional(tmp_path: Path) -> None:
    save_results(tmp_path / "results.npz", results(LOGITS, CANDIDATES, true_label=np.array([0, 2, 1])))
    assert main([str(tmp_path), "-o", str(tmp_path / "labels.csv")]) == 0
    found = rows(tmp_path / "labels.csv")
    assert [row["true_label"] for row in found] == ["cat", "owl", "dog"]
    assert "name" not in found[0]


def test_review_lists_the_most_urgent_first(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "review.csv"
    assert main([str(run), "-o", str(out), "--review", "2"]) == 0
    found = rows(out)
    assert [row["row"] for row in found] == ["4", "7"]
    assert found[0]["reason"].startswith("prediction owl (1.00) is not a candidate; undecided between dog (0.62)")
    assert found[0]["candidates"] == "dog:0.622|cat:0.378"
    assert main([str(run), "-o", str(out), "--review", "99"]) == 0
    assert len(rows(out)) == 3


def test_arrays_are_written_to_npz(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "labels.npz"
    assert main([str(run), "-o", str(out)]) == 0
    with np.load(out) as found:
        for name, array in learned().arrays().items():
            np.testing.assert_array_equal(found[name], array)
    assert main([str(run), "-o", str(out), "--review", "1"]) == 0
    with np.load(out) as found:
        assert found["row"].tolist() == [4]
        assert len(found["reason"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}/missing", "-o", "{out}.csv"], "there is no run"),
        (["{out}", "-o", "{out}.csv"], "has no results.npz"),
        (["{run}", "-o", "{out}.txt"], "must end in .csv or .npz"),
        (["{run}", "-o", "{out}/no/labels.csv"], "there is no directory"),
        (["{run}", "-o", "{out}.csv", "--review", "0"], "--review must be at least 1"),
    ],
)
def test_errors_are_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    places = {"run": run, "out": tmp_path}
    assert main([argument.format(**places) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("plsp_train.disambiguate: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_cross_validation_points_to_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folds.json").write_text("{}")
    assert main([str(tmp_path), "-o", str(tmp_path / "labels.csv")]) == 2
    assert str(tmp_path / "fold1") in capsys.readouterr().err
