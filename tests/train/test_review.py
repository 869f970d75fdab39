"""The review list: contradictions, doubt and changing labels come first."""

import numpy as np

from plsp_train.review import reasons, review_order
from small_results import results

SURE, UNDECIDED = [9.0, 0.0, 0.0], [1.0, 1.01, -5.0]


def test_doubt_precedes_certainty() -> None:
    found = results([SURE, UNDECIDED, SURE], [[1, 1, 0]] * 3)
    assert review_order(found).tolist() == [1, 0, 2], "ties keep the order of the file"


def test_confident_contradiction_precedes_doubt() -> None:
    found = results([UNDECIDED, SURE], [[1, 1, 0], [0, 1, 0]])
    assert review_order(found).tolist() == [1, 0]


def test_changing_labels_precede_stable_ones() -> None:
    found = results([SURE] * 3, [[1, 1, 0]] * 3, changes=np.array([0, 3, 5], dtype=np.int32))
    assert review_order(found).tolist() == [2, 1, 0]


def test_reasons_say_why_a_label_is_doubtful() -> None:
    found = results(
        [UNDECIDED, SURE, SURE, SURE],
        [[1, 1, 1], [0, 1, 0], [1, 1, 0], [1, 0, 0]],
        changes=np.array([0, 1, 4, 0], dtype=np.int32),
    )
    assert reasons(found, np.arange(4)) == [
        "undecided between dog (0.50) and cat (0.50)",
        "prediction cat (1.00) is not a candidate; label changed once during training",
        "label changed 4 times during training",
        "no sign of a problem",
    ]


def test_no_instances_give_an_empty_list() -> None:
    found = results([SURE], [[1, 0, 0]])
    empty = {
        name: array[:0]
        for name, array in vars(found).items()
        if array is not None and name not in ("class_names", "offsets")
    }
    none = type(found)(class_names=found.class_names, offsets=found.offsets[:1], **empty)
    assert review_order(none).tolist() == []
