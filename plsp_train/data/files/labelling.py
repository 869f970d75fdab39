"""What the text columns of a table say: candidate sets, true labels, and the split into training and test rows."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from plsp_train.data.annotations import (
    MISSING,
    SEPARATOR,
    RowError,
    annotator_agreement,
    checked_candidates,
    from_annotations,
    from_complementary,
    label_mask,
    sorted_class_names,
    split_names,
)
from plsp_train.data.files.checks import agreement_note, located
from plsp_train.data.files.columns import ANNOTATOR, Table
from plsp_train.data.files.options import ReadOptions
from plsp_train.data.source import Source

_Rows = list[int]


@dataclass(frozen=True)
class Labelling:
    """Training and test rows, and their labels."""

    train: _Rows
    test: _Rows
    class_names: tuple[str, ...]
    candidates: Tensor | None
    labels: Tensor | None
    test_labels: Tensor | None
    notes: tuple[str, ...]

    def source(self, name: str, inputs: Tensor, row_names: list[str] | None) -> Source:
        """Join the labels with the inputs and names of all rows."""
        return Source(
            name=name,
            inputs=inputs[self.train] if self.test else inputs,
            class_names=self.class_names,
            candidates=self.candidates,
            labels=self.labels,
            test_inputs=inputs[self.test] if self.test else None,
            test_labels=self.test_labels,
            rows=torch.tensor(self.train) if self.test else None,
            row_names=None if row_names is None else tuple(row_names[row] for row in self.train),
            notes=self.notes,
        )


def read_labelling(table: Table, options: ReadOptions) -> Labelling:
    columns = _candidate_columns(table)
    by_annotators = bool(columns) and columns[0].startswith(ANNOTATOR)
    if options.annotators is not None and not by_annotators:
        raise ValueError(
            f"{table.path} has no columns named {ANNOTATOR}…: the option annotators={options.annotators} does not apply"
        )
    train, test = _split(table)
    labels, test_labels = _labels(table, train), _labels(table, test)
    if not columns and labels is None:
        raise ValueError(f"{table.path} has neither candidate sets nor true labels of its training rows")
    candidates: Tensor | None = None
    notes: tuple[str, ...] = ()
    with located(table.path, lambda row: table.row_name(train[row])):
        sets = [_names(table, columns, row, number) for number, row in enumerate(train)]
        class_names = sorted_class_names(chain(*sets, labels or (), test_labels or ()))
        if by_annotators:
            candidates, notes = _from_answers(table, train, class_names, options.annotators or "union")
        elif columns:
            mask = label_mask(sets, class_names)
            candidates = from_complementary(mask, len(class_names)) if columns == ["not"] else checked_candidates(mask)
    unused = sum(any(table.text[column][row] for column in columns) for row in test)
    if unused:
        notes += (f"Candidate sets of test rows are not used; {unused} of {len(test)} test rows have one.",)
    numbers, test_numbers = _numbers(labels, class_names), _numbers(test_labels, class_names)
    return Labelling(train, test, class_names, candidates, numbers, test_numbers, notes)


def _numbers(labels: list[str] | None, class_names: tuple[str, ...]) -> Tensor | None:
    number_of = {name: number for number, name in enumerate(class_names)}
    return None if labels is None else torch.tensor([number_of[label] for label in labels])


def _candidate_columns(table: Table) -> list[str]:
    """The column or columns that give candidate sets; none if they are to be drawn from true labels."""
    annotators = [column for column in table.text if column.startswith(ANNOTATOR)]
    forms = [form for form in (["candidates"], ["not"], annotators) if form and form[0] in table.text]
    if len(forms) > 1:
        found = " and ".join(form[0] for form in forms)
        raise ValueError(f"{table.path} gives candidate sets in more than one way, in {found}: keep one")
    if not forms and "label" not in table.text:
        raise ValueError(f"{table.path} has no column 'candidates', 'not', '{ANNOTATOR}…' or 'label'")
    return forms[0] if forms else []


def _split(table: Table) -> tuple[_Rows, _Rows]:
    """Training and test rows."""
    parts: dict[str, _Rows] = {"train": [], "test": []}
    for row, part in enumerate(table.text.get("split", ["train"] * len(table))):
        if part not in parts:
            raise ValueError(f"{table.place(row)}: split is {part!r}, and must be train or test")
        parts[part].append(row)
    if not parts["train"]:
        raise ValueError(f"{table.path} has no training rows: all of them are in split 'test'")
    return parts["train"], parts["test"]


def _labels(table: Table, rows: _Rows) -> list[str] | None:
    """The true labels of these rows, which have one each or none at all."""
    labels = [table.text["label"][row] for row in rows] if "label" in table.text else []
    if not any(labels):
        return None
    if not all(labels):
        row = rows[labels.index("")]
        raise ValueError(f"{table.place(row)}: label is empty, and other rows of the same split have one")
    return labels


def _names(table: Table, columns: list[str], row: int, number: int) -> list[str]:
    """The names in these columns of a row, which is the number-th of its split."""
    names = []
    for column in columns:
        cell = table.text[column][row]
        if column.startswith(ANNOTATOR) and SEPARATOR in cell:
            raise RowError(number, f"has {cell!r} in column {column!r}: an annotator gives one answer")
        names += split_names(cell, number)
    return names


def _from_answers(
    table: Table, rows: _Rows, class_names: tuple[str, ...], combine: str
) -> tuple[Tensor, tuple[str, ...]]:
    number_of = {"": MISSING} | {name: number for number, name in enumerate(class_names)}
    annotators = [column for column in table.text if column.startswith(ANNOTATOR)]
    answers = np.array([[number_of[table.text[column][row]] for column in annotators] for row in rows])
    note = agreement_note(annotator_agreement(answers, len(class_names)), combine)
    return from_annotations(answers, len(class_names), combine), (note,)
