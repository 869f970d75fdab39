"""The tutorial on extensions: its files work as written, and its commands print what it shows."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tutorials import Command, assert_shown, console_commands

ROOT = Path(__file__).parent.parent.parent
TUTORIAL = (ROOT / "docs" / "tutorials" / "extending.md").read_text(encoding="utf-8")

COMMANDS = console_commands(TUTORIAL)

# Runs the commands in one process, as importing torch for each would take longer than the runs.
DRIVER = """
import contextlib, importlib, io, json, sys
results = []
for module, *arguments in json.load(sys.stdin):
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = importlib.import_module(module + ".cli").main(arguments)
    results.append((code, output.getvalue()))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and output of every command, run beside the tutorial's files."""
    folder = tmp_path_factory.mktemp("extending")
    for code, name in re.findall(r"```python\n(# (my_\w+\.py)\n.*?)```", TUTORIAL, re.DOTALL):
        (folder / name).write_text(code, encoding="utf-8")
    arguments = [shlex.split(command.line.removeprefix("python -m ")) for command in COMMANDS]
    found = subprocess.run(
        [sys.executable, "-c", DRIVER],
        cwd=folder,
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr
    return {command.line: tuple(result) for command, result in zip(COMMANDS, json.loads(found.stdout), strict=True)}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.line.removeprefix("python -m "))
def test_command_prints_what_the_tutorial_shows(command: Command, results: dict[str, tuple[int, str]]) -> None:
    code, output = results[command.line]
    assert code == (2 if any("error:" in line for line in command.shown) else 0), output
    assert command.shown
    assert_shown(command, output)


def test_snippet_prints_what_the_tutorial_shows() -> None:
    ((snippet, shown),) = re.findall(r"```python\n((?!# my_).*?)```\n\n```text\n(.*?)```", TUTORIAL, re.DOTALL)
    found = subprocess.run([sys.executable, "-c", snippet], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == shown, found.stderr


def test_every_part_is_named_by_module_and_by_plugin() -> None:
    """Guards the other tests: a command that is lost from the page would not be run."""
    lines = " ".join(command.line for command in COMMANDS)
    for option in ("--model my_network:", "--method my_method:", "--dataset my_data:", "--candidates my_candidates:"):
        assert option in lines
    assert "--plugin my_network,my_method,my_data,my_candidates" in lines
