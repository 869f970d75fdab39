"""Forms of candidate sets."""

import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from plsp_train.data.annotations import (
    RowError,
    annotator_agreement,
    candidate_matrix,
    checked_class_names,
    from_annotations,
    from_complementary,
    sorted_class_names,
)

MASK = np.array([[True, True, False], [False, True, False], [True, False, True]])
NAMES = ("cat", "dog", "fox")
ANSWERS = np.array([[1, 0, 1], [1, -1, 1], [0, 2, -1]])


class FakeFrame:
    """What a table of pandas or polars offers."""

    def to_numpy(self) -> np.ndarray:
        return MASK


@pytest.mark.parametrize(
    "form",
    [
        MASK,
        MASK.astype(int),
        MASK.astype(np.float64),
        torch.from_numpy(MASK),
        MASK.tolist(),
        list(MASK),
        FakeFrame(),
        ANSWERS,
        ANSWERS.astype(np.int8),
        np.array([[1, 0, 1], [1, 1, 1], [0, 2, 2]], dtype=np.uint8),
        [[0, 1], [1], [2, 0]],
        [{0, 1}, {1}, {0, 2}],
        ((0, 1), 1, (0, 2)),
        [np.array([0, 1]), np.int64(1), np.array([0, 2])],
        [["cat", "dog"], ["dog"], ["cat", "fox"]],
        [{"cat", "dog"}, "dog", ("cat", "fox")],
        ["cat|dog", "dog", "cat|fox"],
        np.array(["cat|dog", " dog ", "cat | fox"]),
        np.array([["cat", "dog"], ["dog", "dog"], ["fox", "cat"]]),
    ],
    ids=lambda form: type(form).__name__,  # the text of sets and objects differs between processes
)
def test_every_form_gives_the_same_matrix(form: Any) -> None:
    matrix, names = candidate_matrix(form, NAMES)
    assert names == NAMES
    assert matrix.dtype == torch.bool
    assert torch.equal(matrix, torch.from_numpy(MASK))
    without_names, found = candidate_matrix(form)
    assert torch.equal(without_names, matrix)
    assert found in (NAMES, ("0", "1", "2"))


def test_a_matrix_is_not_shared_with_the_caller_by_accident() -> None:
    mask = MASK.copy()
    matrix, _ = candidate_matrix(mask)
    mask[:] = False
    assert torch.equal(matrix, torch.from_numpy(MASK))


def test_labels_are_sets_of_one() -> None:
    matrix, names = candidate_matrix([2, 0, 1])
    assert matrix.nonzero().tolist() == [[0, 2], [1, 0], [2, 1]]
    assert names == ("0", "1", "2")


def test_class_names_may_include_unused_classes() -> None:
    matrix, names = candidate_matrix([{"dog"}, {"cat"}], ["dog", "cat", "fox"])
    assert names == ("dog", "cat", "fox")
    assert matrix.tolist() == [[True, False, False], [False, True, False]]


def test_zeros_and_ones_are_answers_if_they_have_no_column_for_each_class() -> None:
    matrix, _ = candidate_matrix(np.array([[0, 1, 1], [0, 0, 0]]), ["no", "yes"])
    assert matrix.tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["b", "a", "b"], ("a", "b")),
        (["10", "9", "2"], ("2", "9", "10")),
        (["10", "9", "x"], ("10", "9", "x")),
        (["1", "01"], ("01", "1")),
    ],
)
def test_names_are_sorted_as_numbers_if_they_are(names: list[str], expected: tuple[str, ...]) -> None:
    assert sorted_class_names(names) == expected


@pytest.mark.parametrize(
    ("form", "class_names", "row", "message"),
    [
        (np.array([[1, 0], [0, 0]]), None, 1, "row 1 has no candidate"),
        (np.array([[0.5, 1.0]]), None, None, "matrix of 0 and 1"),
        (np.ones((2, 3, 4), dtype=bool), None, None, "got shape (2, 3, 4)"),
        (np.array([[np.nan, 1.0]]), None, None, "matrix of 0 and 1"),
        (MASK, ["a", "b"], None, "2 columns, got bool of shape (3, 3)"),
        (np.zeros((0, 3), dtype=bool), None, None, "got shape (0, 3)"),
        (np.array([[0, 1], [-2, 1]]), None, 1, "row 1 has -2"),
        (np.array([[0, 1], [7, 1]]), ["a", "b", "c"], 1, "row 1 has 7: classes are 0..2"),
        (np.array([[3, 1], [-1, -1]]), None, 1, "row 1 has no answer from any annotator"),
        ([["cat"], []], None, 1, "row 1 has no candidate"),
        (["cat", ""], None, 1, "row 1 has no candidate"),
        (["cat|dog", "cat||dog"], None, 1, "row 1 has an empty name in 'cat||dog'"),
        (["cat", "dgo"], NAMES, 1, "unknown label 'dgo'; known are cat, dog, fox; did you mean 'dog'?"),
        ([{0}, {3}], NAMES, 1, "row 1 has the unknown label 3; known are 0..2"),
        ([{0}, {-1}], None, 1, "row 1 has the unknown label -1"),
        ([{0}, {"cat"}], None, 1, "all labels by name, or all by number"),
        ([{0}, {0.5}], None, 1, "row 1 has 0.5 among its candidates"),
        ([{0}, None], None, 1, "row 1 has None"),
        ([[True, False], [True]], None, 1, "row 1 has 1 values, and row 0 has 2"),
        ([[1, 0, 0], [0, 1, 0]], None, None, "numpy.array(candidates)"),
        ([[0, 1], [1, 0]], None, None, "numpy.array(candidates)"),
        (np.ones((3, 2), dtype=bool), None, None, "nothing can be learned"),
        ([], None, None, "got shape (0, 0)"),
        (["cat", "dog"], ["cat", "cat"], None, "class 1 is named 'cat'"),
        (["cat", "dog"], ["cat", " "], None, "class 1 is named ''"),
        ([{0}, {10**9}], None, None, "class number 1000000000"),
    ],
)
def test_errors_name_the_row(form: Any, class_names: list[str] | None, row: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        candidate_matrix(form, class_names)
    assert "\n" not in str(error.value)
    assert (error.value.row if isinstance(error.value, RowError) else None) == row


def test_a_long_list_of_classes_is_shortened_in_errors() -> None:
    with pytest.raises(ValueError, match=r"c18, c19 and 80 more$"):
        candidate_matrix(["???"], [f"c{number}" for number in range(100)])


# --------------------------------------------------------------------------------------------------- annotators


def test_vote_keeps_the_labels_with_most_votes_and_all_of_a_tie() -> None:
    assert from_annotations(ANSWERS, 3, "vote").tolist() == [
        [False, True, False],
        [False, True, False],
        [True, False, True],
    ]
    assert torch.equal(from_annotations(ANSWERS, 3), torch.from_numpy(MASK))
    with pytest.raises(ValueError, match="annotators must be one of union, vote, got 'mean'"):
        from_annotations(ANSWERS, 3, "mean")


def answers_of(num_classes: int) -> st.SearchStrategy[np.ndarray]:
    shapes = hnp.array_shapes(min_dims=2, max_dims=2, max_side=6)
    return hnp.arrays(np.int64, shapes, elements=st.integers(-1, num_classes - 1))


@given(answers_of(4))
def test_union_and_vote_follow_their_definitions(answers: np.ndarray) -> None:
    given_answers = [[answer for answer in row if answer >= 0] for row in answers.tolist()]
    assume(all(given_answers) and any(len(set(row)) < 4 for row in given_answers))
    union, vote = (from_annotations(answers, 4, combine) for combine in ("union", "vote"))
    for row, labels in enumerate(given_answers):
        counts = [labels.count(label) for label in range(4)]
        assert union[row].tolist() == [count > 0 for count in counts]
        assert vote[row].tolist() == [count == max(counts) for count in counts]


@given(answers_of(3))
def test_agreement_counts_pairs(answers: np.ndarray) -> None:
    rows = [[answer for answer in row if answer >= 0] for row in answers.tolist()]
    rows = [row for row in rows if len(row) > 1]
    found = annotator_agreement(answers, 3)
    if not rows:
        assert found is None
        return
    assert found is not None
    pairs = [np.mean([first == second for first, second in combinations(row, 2)]) for row in rows]
    assert found.pairwise == pytest.approx(np.mean(pairs))
    assert found.unanimous == pytest.approx(np.mean([len(set(row)) == 1 for row in rows]))


# ------------------------------------------------------------------------------------------ complementary labels


@pytest.mark.parametrize("wrong", [~MASK, np.array([[2, -1], [0, 2], [-1, 1]]), np.array([[2, 2], [0, 2], [1, 1]])])
def test_complementary_labels_leave_the_others(wrong: np.ndarray) -> None:
    assert torch.equal(from_complementary(wrong, 3), torch.from_numpy(MASK))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (np.array([[0, 1], [1, 0]]), "row 0 excludes every class"),
        (np.array([[False, True, False]]), "must have one column for each of the 2 classes"),
        (np.array([[0], [2]]), "row 1 has 2: classes are 0..1"),
        (np.array([[0.0], [1.0]]), "must be class numbers"),
        (np.array([[-1], [-1]]), "nothing can be learned"),
    ],
)
def test_impossible_complementary_labels_are_refused(wrong: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_complementary(wrong, 2)


@given(hnp.arrays(bool, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6)))
def test_forms_agree(mask: np.ndarray) -> None:
    assume(mask.any(axis=1).all() and not mask.all())
    expected, num_classes = torch.from_numpy(mask), mask.shape[1]
    names = [f"class {number}" for number in range(num_classes)]
    forms: list[Callable[[np.ndarray], Any]] = [
        lambda row: set(np.flatnonzero(row).tolist()),
        lambda row: [names[number] for number in np.flatnonzero(row)],
        lambda row: "|".join(names[number] for number in np.flatnonzero(row)),
    ]
    for form in forms:
        assert torch.equal(candidate_matrix([form(row) for row in mask], names)[0], expected)
    answers = np.where(mask, np.arange(num_classes), -1)
    assert torch.equal(from_annotations(answers, num_classes), expected)
    assert torch.equal(from_complementary(~mask, num_classes), expected)


def test_class_names_are_strings() -> None:
    assert checked_class_names(np.array(["a ", "b"])) == ("a", "b")
