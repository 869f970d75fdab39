"""The examples in docs/data.md."""

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plsp_train.data.files import ReadOptions, read_source

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
TABLE, LABELS = re.findall(r"```csv\n(.*?)```", PAGE, re.DOTALL)
GOOD = {"features": np.ones((90, 4)), "candidates": np.eye(3, dtype=bool)[np.arange(90) % 3]}


@pytest.fixture(autouse=True)
def in_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLSP_CACHE", str(tmp_path / "cache"))


def test_snippets_print_what_is_shown() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for snippet in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(snippet, {})
    assert f"```text\n{printed.getvalue()}```" in PAGE
    source = read_source(Path("flowers.npz"), ReadOptions())
    assert source.class_names == ("iris", "lily", "rose")
    assert source.input_shape == (4,)


def test_the_table_is_read() -> None:
    Path("flowers.csv").write_text(TABLE)
    source = read_source(Path("flowers.csv"), ReadOptions())
    assert source.feature_names == ("petal", "sepal")
    assert source.row_names == ("p1", "p2", "p3")
    assert source.test_inputs is not None


def write_animals() -> None:
    for line in LABELS.splitlines()[1:]:
        path = Path("animals", line.split(",")[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (48, 40)).save(path)
    Path("animals/labels.csv").write_text(LABELS)


def test_the_folder_is_read() -> None:
    write_animals()
    source = read_source(Path("animals"), ReadOptions())
    assert source.class_names == ("cat", "dog", "fox", "lynx")
    assert source.input_shape == (3, 48, 48)


def write_csv(*lines: str) -> Path:
    Path("flowers.csv").write_text("\n".join(lines))
    return Path("flowers.csv")


def write_npz(**arrays: np.ndarray) -> Path:
    np.savez("flowers.npz", **GOOD | arrays)
    return Path("flowers.npz")


def write_broken_folder() -> Path:
    write_animals()
    Path("animals/0002.jpg").unlink()
    return Path("animals")


@pytest.mark.parametrize(
    "write",
    [
        lambda: write_csv("colour,candidates", "1,a|b", "red,a"),
        lambda: write_csv("colour,candidates", "1,a|b", "2,a", "3,"),
        lambda: write_npz(features=np.where(np.arange(360).reshape(90, 4) == 14, np.nan, 1.0)),
        lambda: write_npz(labels=np.zeros(89, dtype=int)),
        lambda: write_npz(labels=np.array([None] * 90)),
        write_broken_folder,
    ],
)
def test_errors_read_as_shown(write: Callable[[], Path]) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        read_source(write(), ReadOptions())
    assert f"\nplsp_train: error: {error.value}\n" in PAGE
