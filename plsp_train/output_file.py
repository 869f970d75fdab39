"""Files that a command writes where its user asks for them."""

import csv
import io
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plsp_train.files import write_atomically


def output_path(given: str, endings: Collection[str]) -> Path:
    """The file to write, checked before any work is done for it."""
    path = Path(given).expanduser()
    if path.suffix.lower() not in endings:
        raise ValueError(f"-o {given}: the name must end in {' or '.join(endings)}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"-o {given}: there is no directory {path.parent}")
    return path


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table atomically, in UTF-8."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    # Names of files need not be valid Unicode: their bytes are written as they are.
    write_atomically(path, text.getvalue().encode(errors="surrogateescape"))


def write_npz(path: Path, arrays: dict[str, Any]) -> None:
    """Write arrays atomically, compressed."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_atomically(path, buffer.getvalue())
