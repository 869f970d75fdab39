"""The command line: `python -m plsp_train.table`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from plsp_train.command import Parser
from plsp_train.files import write_atomically
from plsp_train.report.wording import count
from plsp_train.table.comparison import compare
from plsp_train.table.curves import curve_figures
from plsp_train.table.figures import sensitivity_figures
from plsp_train.table.finished import CRITERIA, SELECTIONS, read_runs
from plsp_train.table.render import RENDERERS, markdown
from plsp_train.table.tables import build_tables


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m plsp_train.table",
        description="Tables of finished runs as Markdown, CSV and LaTeX, learning curves, and the sensitivity to k.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run directories, or directories that contain them")
    parser.add_argument("--out", default="tables", help="output directory (default: %(default)s)")
    select = "epochs to take the scores from (default: %(default)s)"
    parser.add_argument("--select", choices=tuple(SELECTIONS), default="last10", help=select)
    parser.add_argument("--tune", action="store_true", help="show each method at its best settings by --select")
    compared = 'say which of two rows is better and by how much, e.g. --compare PLSP "CC (lr 0.1)"'
    parser.add_argument("--compare", nargs=2, metavar="ROW", help=compared)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 invalid input."""
    options = build_parser().parse_args(argv)
    try:
        text = _run(options)
    except (ValueError, OSError, ImportError) as error:
        print(f"plsp_train.table: error: {error}", file=sys.stderr)
        return 2
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader has seen enough, as head does; Python would complain when it flushes on exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _run(options: argparse.Namespace) -> str:
    """Writes tables and figures; returns what to print."""
    out, select, tune = Path(options.out), options.select, options.tune
    if tune and select not in CRITERIA:
        raise ValueError(f"--tune needs a criterion without clean labels: --select {' or '.join(CRITERIA)}")
    runs, num_unfinished = read_runs(options.runs)
    if num_unfinished:
        print(f"unfinished runs skipped: {num_unfinished}", file=sys.stderr)
    tables = build_tables(runs, select, tune)
    verdicts = compare(runs, *options.compare, select=select) if options.compare else []
    figures = sensitivity_figures(runs, select) | curve_figures(runs)
    out.mkdir(parents=True, exist_ok=True)
    for table in tables:
        for ending, render in RENDERERS.items():
            write_atomically(out / f"{table.name}.{ending}", render(table).encode())
    for name, png in figures.items():
        write_atomically(out / f"{name}.png", png)
    made = f"{count(len(tables), 'table')}, {count(len(figures), 'figure')}"
    paragraphs = [markdown(table) for table in tables]
    if verdicts:
        paragraphs.append("\n".join(verdicts) + "\n")
    return "\n".join([*paragraphs, f"read {count(len(runs), 'run')}; wrote to {out}: {made}"])
