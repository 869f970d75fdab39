"""The command line: `python -m plsp_train.disambiguate`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from plsp_train.command import Parser
from plsp_train.output_file import output_path
from plsp_train.run_files import results_of

_EPILOG = """examples:
  python -m plsp_train.disambiguate runs/mine -o labels.csv
  python -m plsp_train.disambiguate runs/mine -o review.csv --review 50
  python -m plsp_train.disambiguate runs/mine -o labels.npz

Candidates are written with their probabilities, the most probable first: cat:0.812|dog:0.188. A prediction outside the
candidate set is written as contradicting_prediction.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m plsp_train.disambiguate",
        description="Write the label that a run has chosen for every training instance, with its confidence, the "
        "probabilities of its candidates, and whether it was in the labelled set.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="directory of a finished run")
    parser.add_argument("-o", "--out", required=True, help="file to write: .csv or .npz")
    review = "only the N instances that a person should look at first, the most urgent first, with the reason"
    parser.add_argument("--review", type=int, metavar="N", help=review)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 invalid input."""
    options = build_parser().parse_args(argv)
    try:
        _run(Path(options.run).expanduser(), options.out, options.review)
    except (ValueError, OSError) as error:
        print(f"plsp_train.disambiguate: error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(run: Path, given_out: str, num_review: int | None) -> None:
    from plsp_train.disambiguate.labels import ENDINGS, write_labels
    from plsp_train.results import load_results
    from plsp_train.review import reasons, review_order

    out = output_path(given_out, ENDINGS)
    if num_review is not None and num_review < 1:
        raise ValueError(f"--review must be at least 1, got {num_review}")
    results = load_results(results_of(run))
    if num_review is None:
        write_labels(out, results)
        outside = results.contradictions().sum()
        print(f"{len(results)} labels written to {out}; predictions outside the candidate set: {outside}")
    else:
        index = review_order(results)[:num_review]
        write_labels(out, results.take(index), reasons(results, index))
        print(f"{len(index)} of {len(results)} instances to review written to {out}")
