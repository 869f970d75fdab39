"""The command line: `python -m plsp_train.sweep`."""

import argparse
import dataclasses
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plsp_train import cli
from plsp_train.command import Parser
from plsp_train.config import FREE_ON_RESUME, Config, read_config_file
from plsp_train.files import locked
from plsp_train.sweep.grid import PAPER_GRID, GridRun, expand
from plsp_train.sweep.runner import execute

_EPILOG = """examples:
  python -m plsp_train.sweep --method plsp df --flip-probability 0.3 0.5 0.7 --seed 0 1 2 3 4 --jobs 2
  python -m plsp_train.sweep --semantic true false --seed 0 1 2 --out runs/ablation
  python -m plsp_train.sweep --dataset fmnist --paper-grid --dry-run -- --data-root ~/data --epochs 40

Options after -- are those of python -m plsp_train and apply to all runs. Repeat the command to continue: finished
runs are skipped, interrupted ones resume.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m plsp_train.sweep",
        description="Train every combination of settings, each in its own process and directory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sweep = parser.add_argument_group("sweep")
    sweep.add_argument("--out", default="runs/sweep", help="parent directory of the runs (default: %(default)s)")
    sweep.add_argument("--jobs", type=int, default=1, metavar="N", help="parallel runs (default: %(default)s)")
    sweep.add_argument("--paper-grid", action="store_true", help="the paper's grid of learning rates × weight decays")
    sweep.add_argument("--dry-run", action="store_true", help="list the runs and their states, and exit")
    grid = parser.add_argument_group("grid", "one or more values each; defaults are those of python -m plsp_train")
    for setting in dataclasses.fields(Config):
        if setting.name != "out":
            _add_setting(grid, setting)
    return parser


def _add_setting(group: Any, setting: "dataclasses.Field[Any]") -> None:
    is_bool, choices = isinstance(setting.default, bool), setting.metadata["choices"]
    known = choices or setting.metadata["examples"]
    group.add_argument(
        "--" + setting.name.replace("_", "-"),
        # These do not affect the numbers, so they do not span a grid.
        nargs=1 if setting.name in FREE_ON_RESUME else "+",
        type=_parse_bool if is_bool else type(setting.default),
        choices=choices or None,
        default=argparse.SUPPRESS,
        metavar="true|false" if is_bool else setting.name.upper(),
        help=setting.metadata["help"] + (f": {', '.join(known)}" if known else ""),
    )


def _parse_bool(text: str) -> bool:
    try:
        return {"true": True, "false": False}[text]
    except KeyError:
        raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 some run failed, 2 invalid input, 128 + signal if stopped."""
    own, common = _split(list(sys.argv[1:] if argv is None else argv))
    grid = vars(build_parser().parse_args(own))
    out, jobs, paper_grid, dry_run = (grid.pop(name) for name in ("out", "jobs", "paper_grid", "dry_run"))
    try:
        if jobs < 1:
            raise ValueError(f"--jobs must be at least 1, got {jobs}")
        runs = expand(_with_paper_grid(grid) if paper_grid else grid, _common_settings(common, grid), Path(out))
        if dry_run:
            for run in runs:
                print(f"{run.state:11}  {run.name}")
            return 0
        Path(out).mkdir(parents=True, exist_ok=True)
        with locked(Path(out)):
            return _run(runs, jobs, out)
    except (ValueError, OSError, ImportError) as error:
        print(f"plsp_train.sweep: error: {error}", file=sys.stderr)
        return 2


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:place], arguments[place + 1 :]


def _with_paper_grid(grid: dict[str, Any]) -> dict[str, Any]:
    twice = [f"--{name.replace('_', '-')}" for name in PAPER_GRID if name in grid]
    if twice:
        raise ValueError(f"--paper-grid sets {' and '.join(twice)} itself: remove one of them")
    return grid | PAPER_GRID


def _common_settings(arguments: list[str], grid: dict[str, Any]) -> dict[str, Any]:
    options = vars(cli.build_parser().parse_args(arguments))
    file = options.pop("config")
    settings = {setting.name for setting in dataclasses.fields(Config)} - {"out"}
    for name, value in list(options.items()):
        flag = "--" + name.replace("_", "-")
        if name in grid:
            raise ValueError(f"{flag} is given before and after --: remove one of them")
        if name not in settings:
            if value:
                raise ValueError(f"{flag} is not allowed after --: every run of a sweep has its own")
            del options[name]
    from_file = read_config_file(file) if file else {}
    return {name: value for name, value in from_file.items() if name != "out"} | options


def _run(runs: list[GridRun], jobs: int, out: str) -> int:
    left = [run for run in runs if run.state != "finished"]
    num_finished = len(runs) - len(left)
    if num_finished:
        print(f"{num_finished} of {len(runs)} runs are already finished", flush=True)
    outcome = execute(left, jobs)
    num_finished += outcome.num_done
    for failure in outcome.failures:
        print(f"failed: {failure}", file=sys.stderr)
    if outcome.stop_signal is not None:
        name = signal.Signals(outcome.stop_signal).name
        print(f"stopped by {name} with {num_finished} of {len(runs)} runs finished; the same command continues")
        return 128 + outcome.stop_signal
    print(f"{num_finished} of {len(runs)} runs are finished in {out}; tables: python -m plsp_train.table {out}")
    return 1 if outcome.failures else 0
