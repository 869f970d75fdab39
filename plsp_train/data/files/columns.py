"""CSV and Parquet files as columns of text and of numbers."""

import csv
import importlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plsp_train.data.annotations import did_you_mean
from plsp_train.data.files.checks import first_not_finite
from plsp_train.data.files.memory import check_room

ANNOTATOR = "annotator"
"""Each column whose name begins with this holds the answers of one annotator."""
TEXT_COLUMNS = ("candidates", "not", "label", "split", "id")

# What exported tables call their index.
_INDEX_COLUMNS = ("", "__index_level_0__")


@dataclass(frozen=True)
class Table:
    """A table in memory: its columns of text by name, and all other columns as numbers (n, d)."""

    path: Path
    text: dict[str, list[str]]
    features: np.ndarray
    feature_names: tuple[str, ...]
    row_name: Callable[[int], str]
    """A row as the user knows it, such as its line."""

    def __len__(self) -> int:
        return len(self.features)

    def place(self, row: int) -> str:
        return f"{self.path}: {self.row_name(row)}"


def read_table(path: Path, *, all_text: bool = False) -> Table:
    """Read a CSV or Parquet file. Columns that describe labels are text, the others finite numbers or also text."""
    read = _read_parquet if path.suffix.lower() == ".parquet" else _read_csv
    table = read(path, (lambda _: True) if all_text else _is_text)
    if len(table) == 0:
        raise ValueError(f"{path} has no rows")
    place = first_not_finite(table.features)
    if place is not None:
        row, column = place
        raise _not_a_number(table.place(row), table.feature_names[column], table.features[place])
    return table


def _is_text(column: str) -> bool:
    return column in TEXT_COLUMNS or column.startswith(ANNOTATOR)


def _check_header(path: Path, header: list[str]) -> None:
    if len(header) == 1 and any(separator in header[0] for separator in ";\t"):
        raise ValueError(f"{path} must separate its columns with commas, but its header is {header[0]!r}")
    seen: set[str] = set()
    for name in header:
        if name in _INDEX_COLUMNS:
            raise ValueError(f"{path} has a column without a name: export the table without its index")
        if name in seen:
            raise ValueError(f"{path} has two columns named {name!r}")
        seen.add(name)


def _not_a_number(place: str, column: str, value: object) -> ValueError:
    shown = "empty" if value in ("", None) else value
    hint = did_you_mean(column.lower(), (*TEXT_COLUMNS, ANNOTATOR))
    if column == "file":
        hint = "; for images, give the folder that holds this table"
    return ValueError(f"{place}: column {column!r} is {shown}, but features must be finite numbers{hint}")


# -------------------------------------------------------------------------------------------------------- CSV


def _read_csv(path: Path, is_text: Callable[[str], bool]) -> Table:
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        try:
            return _csv_table(path, reader, is_text)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text in UTF-8 ({error.reason} at byte {error.start})") from error
        except csv.Error as error:
            raise ValueError(f"{path}: line {reader.line_num}: {error}") from error


def _csv_table(path: Path, reader: Any, is_text: Callable[[str], bool]) -> Table:
    header = [name.strip() for name in next(reader, [])]
    _check_header(path, header)
    text: dict[str, list[str]] = {name: [] for name in header if is_text(name)}
    text_columns = [(position, text[name]) for position, name in enumerate(header) if name in text]
    number_columns = [position for position, name in enumerate(header) if name not in text]
    numbers, lines = array("d"), array("q")
    for cells in reader:
        if not cells:
            continue  # a blank line
        if len(cells) != len(header):
            raise ValueError(f"{path}: line {reader.line_num} has {len(cells)} cells, but the header has {len(header)}")
        for position, values in text_columns:
            values.append(cells[position].strip())
        try:
            numbers.extend([float(cells[position]) for position in number_columns])
        except ValueError:
            position = next(position for position in number_columns if not _is_number(cells[position]))
            cell = cells[position].strip()
            raise _not_a_number(f"{path}: line {reader.line_num}", header[position], cell and repr(cell)) from None
        lines.append(reader.line_num)
    features = np.asarray(numbers).reshape(len(lines), len(number_columns))
    return Table(path, text, features, tuple(header[i] for i in number_columns), lambda row: f"line {lines[row]}")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------- Parquet


def _read_parquet(path: Path, is_text: Callable[[str], bool]) -> Table:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(f"reading {path} needs pyarrow: pip install pyarrow") from error
    try:
        with parquet.ParquetFile(path) as file:
            check_room(path, 8 * file.metadata.num_rows * file.metadata.num_columns)
            content = file.read()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a Parquet file: {' '.join(str(error).split())}") from error
    header = content.column_names
    _check_header(path, header)
    text = {name: _texts(path, name, content[name].to_pylist()) for name in header if is_text(name)}
    feature_names = tuple(name for name in header if not is_text(name))
    features = np.empty((content.num_rows, len(feature_names)))
    for position, name in enumerate(feature_names):
        features[:, position] = _numbers(path, name, content[name])
    return Table(path, text, features, feature_names, "row {}".format)


def _texts(path: Path, column: str, values: list[Any]) -> list[str]:
    for row, value in enumerate(values):
        if value is not None and (isinstance(value, bool) or not isinstance(value, str | int)):
            raise ValueError(f"{path}: row {row}: column {column!r} is {value!r}, but must be text")
    return ["" if value is None else str(value).strip() for value in values]


def _numbers(path: Path, name: str, column: Any) -> np.ndarray:
    values = column.to_numpy()
    if column.null_count or values.dtype.kind not in "biuf":
        for row, value in enumerate(column.to_pylist()):
            if not isinstance(value, int | float):
                raise _not_a_number(f"{path}: row {row}", name, value if value is None else repr(value))
    return values
