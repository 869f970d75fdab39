"""Generate the speed tables of README.md and docs/benchmarks.md from measured rows.

    python -m benchmarks.table benchmarks/results/<machine>.csv

Writes between the two speed markers of each page: the short table into the README, all tables into docs/benchmarks.md.
The first marker records the CSV file.
"""

import argparse
import re
import sys
from pathlib import Path

from benchmarks import results
from benchmarks.shapes import SHAPES
from benchmarks.subjects import CASES, CLOSED_FORM, COMPILED, DISTINCT, NATIVE, OURS, REFERENCE, STATE, TRITON
from benchmarks.sweeps import SWEEPS, exponent, points
from benchmarks.training_step import PARTS
from plsp_train.files import write_atomically

ROOT = Path(__file__).parent.parent
README, BENCHMARKS = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
SECTION = re.compile(r"(<!-- speed: (?P<csv>\S+) -->\n).*?(<!-- /speed -->)", re.DOTALL)

Rows = list[dict[str, str]]


def latest(rows: Rows) -> Rows:
    """Keep the last row of every measurement."""
    keys = ("case", "name", "num_labeled", "num_unlabeled", "num_classes", "num_features", "subject")
    return list({tuple(row.get(key, "") for key in keys): row for row in rows}.values())


class Measured:
    """Latest row of every measurement, by case, shape and subject."""

    def __init__(self, rows: Rows) -> None:
        self.rows = latest(rows)
        self.found = {(row["case"], row["name"], row["subject"]): row for row in self.rows}
        rows_of_loss = {name: self.ours("loss", name) for name in SHAPES}
        self.losses = {name: row for name, row in rows_of_loss.items() if row is not None}
        last = self.losses[max(self.losses, key=list(SHAPES).index)]
        self.machine = f"{last['hardware']}, torch {last['torch']}"

    @property
    def shapes(self) -> list[str]:
        return list(self.losses)

    def ours(self, case: str, name: str) -> dict[str, str] | None:
        """Row of the implementation that impl="auto" selects, or of a state update."""
        return next((row for subject in (*OURS, STATE) if (row := self.found.get((case, name, subject)))), None)

    def rows_of(self, case: str, subject: str) -> dict[str, dict[str, str]]:
        """Rows of a subject, by shape."""
        return {key[1]: row for key, row in self.found.items() if (key[0], key[2]) == (case, subject)}


def summary(rows: Rows) -> str:
    """Markdown for the README: one step compared with the eager reference, in a narrow table."""
    measured = Measured(rows)
    body = []
    for name, ours in measured.losses.items():
        eager = measured.found.get(("loss", name, REFERENCE))
        speedup = _times(ours["times_faster_than_reference"])
        body.append(
            [
                f"{name} ({ours['num_classes']} classes)",
                _time(eager).split(":")[0],
                _time(ours) + (f" ({speedup})" if speedup else ""),
                _memory(eager, ours),
            ]
        )
    return "\n\n".join(
        [
            f"One step of the loss, forward and backward, float32, {measured.machine}:",
            _table(["shape", "eager", "fused", "extra memory"], body) + "\n",
        ]
    )


def render(rows: Rows) -> str:
    """Markdown for docs/benchmarks.md: the whole loss, every function, scaling, a training step."""
    measured = Measured(rows)
    rows, found, shapes = measured.rows, measured.found, measured.shapes
    subjects = [subject for subject in (CLOSED_FORM, NATIVE, TRITON) if measured.rows_of("loss", subject)]
    parts = [
        f"{measured.machine}, float32. One step of the loss, forward and backward:",
        _table(
            [
                "shape",
                "eager reference",
                "compiled reference",
                *subjects,
                "speed-up",
                "relative to bmm(W, Σ)",
                "extra memory",
            ],
            [
                [
                    _shape(ours),
                    *(_time(found.get(("loss", name, subject))) for subject in (REFERENCE, COMPILED, *subjects)),
                    _times(ours["times_faster_than_reference"]),
                    _times(ours["times_bare_bmm"]),
                    _memory(found.get(("loss", name, REFERENCE)), ours),
                ]
                for name, ours in measured.losses.items()
            ],
        ),
        "Speed-up of each function over its eager reference, forward and backward where it is differentiable:",
        _table(
            ["", *shapes],
            [
                [
                    f"`{case}`",
                    *(_speedup(found.get((case, name, REFERENCE)), measured.ours(case, name)) for name in shapes),
                ]
                for case in CASES
                if case != "loss" and any((case, name, REFERENCE) in found for name in shapes)
            ],
        ),
    ]
    distinct = found.get(("loss", "cifar100", DISTINCT))
    if distinct is not None:
        ratio = _times(distinct["times_bare_bmm"])
        parts.append(f"Worst case at the cifar100 shape (every sample from a different class): {ratio} the bare `bmm`.")
    slopes = [
        f"{exponent(sizes):.2f} in {name}" for name in SWEEPS if len(sizes := points(rows, name, CLOSED_FORM)) >= 3
    ]
    if slopes:
        parts.append(f"Scaling exponents of a step, fitted to the last three sizes: {', '.join(slopes)}.")
    steps = [row for row in rows if row["case"] == "training_step"]
    if steps:
        parts.append("One training step of `plsp_train`, in milliseconds:")
        header = ["", "whole step", "images/s", *PARTS]
        parts.append(
            _table(
                header,
                [
                    [
                        f"{row['name']}, {row['subject']}",
                        row["step_ms"],
                        f"{int(row['images_per_second']):,}",
                        *(row[f"{part}_ms"] for part in PARTS),
                    ]
                    for row in steps
                ],
            )
        )
    return "\n\n".join(parts) + "\n"


def _shape(row: dict[str, str]) -> str:
    kind = "" if row["covariance"] == "full" else ", diagonal Σ"
    sizes = f"Bl {row['num_labeled']}, Bu {row['num_unlabeled']}, l {row['num_classes']}, d {row['num_features']}"
    return f"{row['name']}: {sizes}{kind}"


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _time(row: dict[str, str] | None) -> str:
    if row is None or not row["step_ms"]:
        return row["note"] if row else ""
    milliseconds = float(row["step_ms"])
    return f"{_rounded(milliseconds)} ms"


def _times(value: str) -> str:
    return f"{_rounded(float(value))} ×" if value else ""


def _memory(reference: dict[str, str] | None, ours: dict[str, str]) -> str:
    sizes = [row["memory_mib"] for row in (reference, ours) if row is not None and row["memory_mib"]]
    return " → ".join(f"{float(size):,.0f}" if float(size) >= 10 else f"{float(size):.1f}" for size in sizes) + " MiB"


def _speedup(eager: dict[str, str] | None, row: dict[str, str] | None) -> str:
    if row is None or eager is None:
        return ""
    return _times(row["times_faster_than_reference"]) or eager["note"].split(":")[0]


def _table(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__.split("\n")[0])
    parser.add_argument("csv", type=Path, help="measured rows: benchmarks/results/<machine>.csv")
    path = parser.parse_args().csv
    try:
        rows = results.read(path)
        if not rows:
            raise ValueError(f"{path} holds no rows: run python -m benchmarks first")
        marker = f"<!-- speed: {path.resolve().relative_to(ROOT).as_posix()} -->\n"
        pages = {page: _with_section(page, marker, made(rows)) for page, made in PAGES.items()}
    except KeyError as missing:
        print(f"benchmarks.table: error: {path} holds no rows of python -m benchmarks: no {missing}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"benchmarks.table: error: {error}", file=sys.stderr)
        return 2
    for page, text in pages.items():
        write_atomically(page, text.encode())
    return 0


def _with_section(page: Path, marker: str, section: str) -> str:
    text, count = SECTION.subn(lambda match: marker + section + match[3], page.read_text(encoding="utf-8"))
    if count != 1:
        raise ValueError(f"{page.name} must contain both speed markers exactly once")
    return text


PAGES = {README: summary, BENCHMARKS: render}


if __name__ == "__main__":
    raise SystemExit(main())
