"""Commands of a tutorial, and what it shows below them."""

import re
from typing import NamedTuple

import pytest


class Command(NamedTuple):
    line: str
    shown: list[str]


def console_commands(page: str) -> list[Command]:
    """Commands of the console blocks and the output shown below them, without what is left out (...)."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, *shown = part.splitlines()
            found.append(Command(line, [text for text in shown if text != "..."]))
    return found


def assert_shown(command: Command, output: str) -> None:
    """Every line that is shown was printed, with numbers that differ by no more than a rounding of a run does."""
    for shown in command.shown:
        printed = [line for line in output.splitlines() if _without_numbers(line) == _without_numbers(shown)]
        assert any(_numbers(line) == pytest.approx(_numbers(shown), abs=0.03) for line in printed), (shown, output)


def _without_numbers(line: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "#", line)


def _numbers(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", line)]
