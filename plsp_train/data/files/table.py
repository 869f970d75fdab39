"""Tables: feature columns beside columns that describe the labels."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from plsp_train.data.annotations import did_you_mean, shortened
from plsp_train.data.files.columns import Table, read_table
from plsp_train.data.files.labelling import read_labelling
from plsp_train.data.files.options import Inputs, InputSpec, ReadOptions
from plsp_train.data.source import Source


def read_table_source(path: Path, options: ReadOptions) -> Source:
    """Read a .csv or .parquet file of training data."""
    table = read_table(path)
    if not table.feature_names:
        raise ValueError(f"{path} has no feature column: its columns are {', '.join(table.text)}")
    labelling = read_labelling(table, options)
    source = labelling.source(path.stem, torch.from_numpy(table.features.astype(np.float32)), _row_names(table))
    return replace(source, feature_names=table.feature_names)


def _row_names(table: Table) -> list[str] | None:
    """Identifiers; without them, lines where a split makes the order of training rows differ from the file's."""
    if "id" in table.text or "split" not in table.text:
        return table.text.get("id")
    return [table.row_name(row) for row in range(len(table))]


def read_table_inputs(path: Path, wanted: InputSpec) -> Inputs:
    """Read the features of all rows in the order that the network knows. Columns that describe labels are not used."""
    table = read_table(path)
    order = list(range(len(table.feature_names)))
    if wanted.feature_names is not None:
        missing = [name for name in wanted.feature_names if name not in table.feature_names]
        if missing:
            hint = did_you_mean(missing[0], table.feature_names)
            raise ValueError(f"{path} lacks columns that the network was trained on: {shortened(missing)}{hint}")
        unknown = [name for name in table.feature_names if name not in wanted.feature_names]
        if unknown:
            raise ValueError(f"{path} has columns that the network was not trained on: {shortened(unknown)}")
        order = [table.feature_names.index(name) for name in wanted.feature_names]
    features = torch.from_numpy(table.features[:, order].astype(np.float32))
    names = tuple(table.text["id"]) if "id" in table.text else None
    return Inputs(features, names, tuple(name for name in table.text if name != "id"))
