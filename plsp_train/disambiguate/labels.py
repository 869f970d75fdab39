"""The labels of training instances as a file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from plsp_train.output_file import write_csv, write_npz
from plsp_train.results import Results

ENDINGS = (".csv", ".npz")
# What is not about single instances stays in the run.
_LEFT_OUT = ("picture_index", "pictures", "test_confusion")


def write_labels(path: Path, results: Results, reasons: Sequence[str] | None = None) -> None:
    """Write a .csv or an .npz file; with the reasons for a review if they are given."""
    if path.suffix.lower() == ".csv":
        columns = _columns(results)
        if reasons is not None:
            columns["reason"] = reasons
        write_csv(path, list(columns), zip(*columns.values(), strict=True))
        return
    arrays = {name: array for name, array in results.arrays().items() if name not in _LEFT_OUT}
    write_npz(path, arrays if reasons is None else {**arrays, "reason": np.array(reasons, dtype=np.str_)})


def _columns(results: Results) -> dict[str, Sequence[object]]:
    names = results.class_names
    columns: dict[str, Sequence[object]] = {"row": results.row.tolist()}
    if results.names is not None:
        columns["name"] = results.names.tolist()
    columns["label"] = names[results.label].tolist()
    columns["confidence"] = [f"{value:.6g}" for value in results.confidence]
    columns["candidates"] = [_candidates(results, i) for i in range(len(results))]
    columns["in_labelled_set"] = _yes_or_no(results.labeled)
    columns["held_out"] = _yes_or_no(results.held_out)
    columns["changes"] = results.changes.tolist()
    columns["contradicting_prediction"] = np.where(results.contradictions(), names[results.prediction], "").tolist()
    if results.true_label is not None:
        columns["true_label"] = names[results.true_label].tolist()
    return columns


def _candidates(results: Results, i: int) -> str:
    """cat:0.812|dog:0.188"""
    pairs = zip(*results.candidates(i), strict=True)
    return "|".join(f"{results.class_names[label]}:{probability:.3f}" for label, probability in pairs)


def _yes_or_no(values: np.ndarray) -> list[str]:
    return ["yes" if value else "no" for value in values]
