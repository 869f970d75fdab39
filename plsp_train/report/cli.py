"""The command line: `python -m plsp_train.report`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from plsp_train.command import Parser
from plsp_train.files import write_atomically

_EPILOG = """examples:
  python -m plsp_train.report runs/birds
  python -m plsp_train.report runs/plsp runs/proden -o comparison.html
  python -m plsp_train.report runs/cross-validation --review 100

The page opens in any browser, without a network connection. Of several runs it shows a comparison first.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m plsp_train.report",
        description="Write one self-contained HTML page about one or more runs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run or of a cross-validation")
    parser.add_argument("-o", "--out", default="report.html", metavar="FILE", help="output file (default: %(default)s)")
    review = "list the N instances that a person should look at first (default: %(default)s)"
    parser.add_argument("--review", type=int, default=20, metavar="N", help=review)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 invalid input."""
    options = build_parser().parse_args(argv)
    try:
        _run(options.runs, Path(options.out), options.review)
    except (ValueError, OSError) as error:
        print(f"plsp_train.report: error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(paths: Sequence[str], out: Path, num_review: int) -> None:
    if num_review < 0:
        raise ValueError(f"--review must be at least 0, got {num_review}")
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"-o must name an .html file, got {out}")
    from plsp_train.report.page import build_page
    from plsp_train.report.run import read_subjects

    content = build_page(read_subjects(paths), num_review).encode("utf-8", "replace")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, content)
    print(f"{out}: {len(content) / 1000:,.0f} kB")
