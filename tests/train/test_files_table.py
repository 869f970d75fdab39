"""Tables: CSV and Parquet."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plsp_train.data.files import InputSpec, ReadOptions, read_inputs, read_source
from plsp_train.data.source import Source

HEADER = "width,candidates,height,label,split,id"
ROWS = [
    "1.5,cat|dog,2,cat,train,a",
    "-3e2,fox,4,fox,train,b",
    "0,,1,dog,test,c",
    " 7 , dog | fox ,0.25,cat,train,d",
]


def write(folder: Path, *lines: str) -> Path:
    path = folder / "own.csv"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def read(folder: Path, *lines: str, **options: Any) -> Source:
    return read_source(write(folder, *lines), ReadOptions(**options))


def test_a_table_with_everything(tmp_path: Path) -> None:
    source = read(tmp_path, HEADER, *ROWS)
    assert (source.name, source.class_names) == ("own", ("cat", "dog", "fox"))
    assert source.feature_names == ("width", "height")
    assert source.row_names == ("a", "b", "d")
    assert source.inputs.dtype == torch.float32
    assert source.inputs.tolist() == [[1.5, 2], [-300, 4], [7, 0.25]]
    assert source.candidates is not None
    assert source.candidates.int().tolist() == [[1, 1, 0], [0, 0, 1], [0, 1, 1]]
    assert source.labels is not None
    assert source.labels.tolist() == [0, 2, 0]
    assert source.test_inputs is not None
    assert source.test_inputs.tolist() == [[0, 1]]
    assert source.test_labels is not None
    assert source.test_labels.tolist() == [1]
    assert source.notes == ("1 of 3 candidate sets (33.3%) lack the true label.",)


def test_candidates_alone_are_enough(tmp_path: Path) -> None:
    source = read(tmp_path, "x,candidates", "1,a|b", "2,b")
    assert (source.labels, source.test_inputs, source.test_labels, source.row_names) == (None, None, None, None)


def test_labels_alone_leave_the_candidate_sets_to_be_drawn(tmp_path: Path) -> None:
    source = read(tmp_path, "x,label", "1,b", "2,a")
    assert source.candidates is None
    assert source.labels is not None
    assert source.labels.tolist() == [1, 0]


def test_training_rows_may_lack_the_labels_that_test_rows_have(tmp_path: Path) -> None:
    source = read(tmp_path, "x,candidates,label,split", "1,a|b,,train", "2,a,,train", "3,a|b,b,test")
    assert source.labels is None
    assert source.test_labels is not None
    assert source.test_labels.tolist() == [1]
    assert source.notes == ("Candidate sets of test rows are not used; 1 of 1 test rows have one.",)


def test_lines_name_the_rows_beside_test_rows_without_identifiers(tmp_path: Path) -> None:
    source = read(tmp_path, "x,candidates,split", "1,a|b,train", "2,,test", "", "3,a,train")
    assert source.row_names == ("line 2", "line 5")


def test_annotators_answer_in_columns_of_their_own(tmp_path: Path) -> None:
    lines = ("annotator1,x,annotator_b,annotator 3", "cat,1,dog,cat", "fox,2,,", "dog,3,fox,")
    union = read(tmp_path, *lines)
    assert union.feature_names == ("x",)
    assert union.class_names == ("cat", "dog", "fox")
    assert union.candidates is not None
    assert union.candidates.int().tolist() == [[1, 1, 0], [0, 0, 1], [0, 1, 1]]
    assert union.notes[0].startswith(
        "All annotators agree on 0.0% of the instances; two answers to an instance agree in 16.7%"
    )
    vote = read(tmp_path, *lines, annotators="vote")
    assert vote.candidates is not None
    assert vote.candidates.int().tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 1]]


def test_complementary_names(tmp_path: Path) -> None:
    source = read(tmp_path, "x,not", "1,cat", "2,", "3,dog|fox")
    assert source.candidates is not None
    assert source.candidates.int().tolist() == [[0, 1, 1], [1, 1, 1], [1, 0, 0]]


def test_numbers_are_names_in_numerical_order(tmp_path: Path) -> None:
    assert read(tmp_path, "x,candidates", "1,10|9", "2,2").class_names == ("2", "9", "10")


def test_a_label_outside_all_candidate_sets_is_a_class(tmp_path: Path) -> None:
    source = read(tmp_path, "x,candidates,label", "1,a|b,a", "2,b,gnu")
    assert source.class_names == ("a", "b", "gnu")
    assert source.notes[0] == "No candidate set holds gnu: such a class cannot be learned."


def test_spreadsheet_exports_are_read(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_bytes('\ufeffx,candidates\r\n1,"red ""fox""|naïve, cat"\r\n2,"naïve, cat"\r\n'.encode())
    assert read_source(path, ReadOptions()).class_names == ("naïve, cat", 'red "fox"')


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "own.csv has no rows"),
        (["x,candidates"], "own.csv has no rows"),
        (["x,candidates", "1"], "line 2 has 1 cells, but the header has 2"),
        (["x,candidates,", "1,a,2"], "has a column without a name: export the table without its index"),
        (["x,x,candidates", "1,2,a"], "has two columns named 'x'"),
        (["x;candidates", "1;a"], "must separate its columns with commas, but its header is 'x;candidates'"),
        (["x,label,split", "1,,train", "2,a,test"], "neither candidate sets nor true labels of its training rows"),
        (["candidates", "a"], "has no feature column: its columns are candidates"),
        (["x,y", "1,2"], "has no column 'candidates', 'not', 'annotator…' or 'label'"),
        (["x,candidates,not", "1,a,b"], "in more than one way, in candidates and not"),
        (["x,candidates,annotator1", "1,a,b"], "in more than one way, in candidates and annotator1"),
        (["x,candidates", "1,a|b", "2,"], "line 3 has no candidate"),
        (["x,candidates", "1,a|b", "2,a||b"], "line 3 has an empty name in 'a||b'"),
        (["x,candidates", "1,a|b", "2,a|b"], "nothing can be learned"),
        (
            ["x,colour,candidates", "1,2,a|b", "1,red,a"],
            "line 3: column 'colour' is 'red', but features must be",
        ),
        (["x,colour,candidates", "1,,a|b", "1,red,a"], "line 2: column 'colour' is empty"),
        (["x,candidates", "1,a|b", "nan,a"], "line 3: column 'x' is nan"),
        (["x,candidates", "1,a|b", "-inf,a"], "line 3: column 'x' is -inf"),
        (["x,candidates", "1,a|b", "1e39,a"], "line 3: column 'x' is 1e+39"),
        (["x,Candidates", "1,a|b"], "column 'Candidates' is 'a|b', but features must be finite numbers; did you mean"),
        (["file,candidates", "a.png,a|b"], "for images, give the folder that holds this table"),
        (
            ["x,candidates,split", "1,a|b,train", "2,a,validation"],
            "line 3: split is 'validation', and must be",
        ),
        (["x,candidates,split", "1,a|b,test"], "has no training rows"),
        (
            ["x,candidates,label", "1,a|b,a", "2,a,"],
            "line 3: label is empty, and other rows of the same",
        ),
        (["x,annotator1", "1,a|b"], "line 2 has 'a|b' in column 'annotator1': an annotator gives one answer"),
        (["x,annotator1,annotator2", "1,a,b", "2,,"], "line 3 has no answer from any annotator"),
        (["x,not", "1,a|b", "2,a"], "line 2 excludes every class"),
        (["x,candidates", '1,"a|b'], "line 2: unexpected end of data"),
        (["x,candidates,split", "0,,test", "1,a|b,train", "2,,train"], "line 4 has no candidate"),
    ],
)
def test_bad_tables_are_named(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read(tmp_path, *lines)
    assert str(error.value).startswith(str(tmp_path / "own.csv"))
    assert str(error.value).count(str(tmp_path)) == 1
    assert "\n" not in str(error.value)


def test_annotators_option_needs_annotators(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no columns named annotator…: the option annotators=vote does not apply"):
        read(tmp_path, HEADER, *ROWS, annotators="vote")


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_bytes("x,candidates\n1,naïve\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"own\.csv is not text in UTF-8 \(.* at byte 17\)"):
        read_source(path, ReadOptions())


names = st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters='|"'), min_size=1, max_size=5)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sets(names, min_size=1, max_size=3)),
        min_size=2,
        max_size=6,
    )
)
def test_round_trip(tmp_path: Path, rows: list[tuple[float, set[str]]]) -> None:
    every_name = set().union(*(labels for _, labels in rows))
    rows.append((0.0, {"only here"}))  # so that not every set is full
    source = read(tmp_path, "x,candidates", *(f'{value!r},"{"|".join(labels)}"' for value, labels in rows))
    assert set(source.class_names) == every_name | {"only here"}
    assert source.inputs.squeeze(1).tolist() == [value for value, _ in rows]
    assert source.candidates is not None
    for row, (_, labels) in zip(source.candidates, rows, strict=True):
        assert {source.class_names[number] for number in row.nonzero()} == labels


# ------------------------------------------------------------------------------------------------- predictions


def test_predictions_take_features_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, "height,id,width,label", "2,a,1.5,cat", "4,b,-3e2,")
    found = read_inputs(path, InputSpec((2,), ("width", "height")))
    assert found.inputs.tolist() == [[1.5, 2], [-300, 4]]
    assert found.row_names == ("a", "b")
    by_position = read_inputs(path, InputSpec((2,)))
    assert by_position.inputs.tolist() == [[2, 1.5], [4, -300]]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (InputSpec((2,), ("width", "heigth")), "trained on: heigth; did you mean 'height'?"),
        (InputSpec((1,), ("width",)), "has columns that the network was not trained on: height"),
        (InputSpec((3,)), "the network was trained on features 3, got 2"),
        (InputSpec((1, 8, 8)), "holds vectors, but the network was trained on images"),
    ],
)
def test_predictions_refuse_other_columns(tmp_path: Path, spec: InputSpec, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_inputs(write(tmp_path, "height,width", "1,2"), spec)


# ----------------------------------------------------------------------------------------------------- Parquet


def test_parquet_without_pyarrow_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    (tmp_path / "own.parquet").touch()
    with pytest.raises(ImportError, match=r"reading .*own\.parquet needs pyarrow: pip install pyarrow"):
        read_source(tmp_path / "own.parquet", ReadOptions())


def write_parquet(folder: Path, **columns: Any) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), folder / "own.parquet")
    return folder / "own.parquet"


def test_parquet_is_read_like_csv(tmp_path: Path) -> None:
    columns: dict[str, Any] = {
        "width": np.array([1.5, -300, 0, 7]),
        "candidates": ["cat|dog", "fox", None, "dog|fox"],
        "height": np.array([2, 4, 1, 0.25], dtype=np.float32),
        "label": ["cat", "fox", "dog", "cat"],
        "split": ["train", "train", "test", "train"],
        "id": ["a", "b", "c", "d"],
    }
    found = read_source(write_parquet(tmp_path, **columns), ReadOptions())
    expected = read(tmp_path, HEADER, *ROWS)
    for name in ("name", "class_names", "feature_names", "row_names", "notes"):
        assert getattr(found, name) == getattr(expected, name)
    for name in ("inputs", "candidates", "labels", "test_inputs", "test_labels"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"x": [1, None], "candidates": ["a|b", "a"]}, "row 1: column 'x' is empty"),
        ({"x": [1, float("nan")], "candidates": ["a|b", "a"]}, "row 1: column 'x' is nan"),
        ({"x": ["red", "blue"], "candidates": ["a|b", "a"]}, "row 0: column 'x' is 'red'"),
        ({"x": [1, 2], "candidates": [["a"], ["b"]]}, "row 0: column 'candidates' is ['a'], but must be text"),
        ({"x": [1, 2], "candidates": ["a|b", None]}, "row 1 has no candidate"),
        ({"x": [1], "candidates": ["a"], "__index_level_0__": [0]}, "without its index"),
    ],
)
def test_bad_parquet_files_are_named(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_source(write_parquet(tmp_path, **columns), ReadOptions())


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "own.parquet").write_bytes(b"not Parquet")
    with pytest.raises(ValueError, match="cannot be read as a Parquet file") as error:
        read_source(tmp_path / "own.parquet", ReadOptions())
    assert "\n" not in str(error.value)
