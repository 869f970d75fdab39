"""The tutorial on user data: its files work as written, and its commands print what it shows."""

import csv
import importlib
import re
import shlex
from pathlib import Path

import pytest

from tutorials import Command, assert_shown, console_commands

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "own-data.md").read_text(encoding="utf-8")
SCRIPT, SNIPPET = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def output_of(command: Command, capsys: pytest.CaptureFixture[str]) -> str:
    program, *arguments = shlex.split(command.line)
    if program == "head":
        return "\n".join(Path(arguments[-1]).read_text().splitlines()[: -int(arguments[0])])
    if arguments == ["make_shapes.py"]:
        exec(SCRIPT, {})
        return ""
    assert (program, arguments[0]) == ("python", "-m")
    assert importlib.import_module(f"{arguments[1]}.cli").main(arguments[2:]) == 0
    return capsys.readouterr().out


def test_tutorial_runs_from_the_folder_to_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLSP_CACHE", str(tmp_path / "cache"))
    commands = console_commands(PAGE)
    assert {line.split()[2] for line, _ in commands if line.startswith("python -m")} == {
        *("plsp_train", "plsp_train.report", "plsp_train.disambiguate", "plsp_train.predict"),
    }
    for command in commands:
        assert_shown(command, output_of(command, capsys))
    assert "<html" in (tmp_path / "shapes.html").read_text()
    with open(tmp_path / "new.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["label"] == "square"
    exec(SNIPPET, {})
    assert "'square'" in capsys.readouterr().out.splitlines()[-1].replace('"', "'")
