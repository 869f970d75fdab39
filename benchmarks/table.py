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
from benchmarks.measure import RIVALS
from benchmarks.shapes import BETWEEN, SHAPES, SUPERVISED
from benchmarks.subjects import (
    CASES,
    CLOSED_FORM,
    COMPILED,
    COMPILED_GRAM_FORM,
    DISTINCT,
    GRAM_FORM,
    ISDA_FORM,
    NATIVE,
    OURS,
    REFERENCE,
    STATE,
    TRITON,
)
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
        steps = sorted((SHAPES | BETWEEN).values(), key=lambda shape: shape.num_classes)
        self.losses = {shape.name: row for shape in steps if (row := self.ours("loss", shape.name)) is not None}
        last = max(self.losses.values(), key=lambda row: row["run"])
        self.machine = f"{last['hardware']}, torch {last['torch']}"

    @property
    def shapes(self) -> list[str]:
        return list(self.losses)

    def ours(self, case: str, name: str) -> dict[str, str] | None:
        """Row of the implementation that impl="auto" selects, or of a state update."""
        return next((row for subject in (*OURS, STATE) if (row := self.found.get((case, name, subject)))), None)

    def gram_form(self, case: str, name: str) -> dict[str, str] | None:
        """Row of the faster Gram form, eager or compiled; if neither was timed, the row that says why."""
        found = [row for subject in RIVALS["gram_form"] if (row := self.found.get((case, name, subject)))]
        return min(found, key=lambda row: float(row["step_ms"] or row["forward_ms"] or "inf"), default=None)

    def rows_of(self, case: str, subject: str) -> dict[str, dict[str, str]]:
        """Rows of a subject, by shape."""
        return {key[1]: row for key, row in self.found.items() if (key[0], key[2]) == (case, subject)}


def summary(rows: Rows) -> str:
    """Markdown for the README: one step compared with eager PyTorch, in a narrow table."""
    measured = Measured(rows)
    body = []
    for name, ours in measured.losses.items():
        eager, gram_form = measured.found.get(("loss", name, REFERENCE)), measured.gram_form("loss", name)
        body.append(
            [
                f"{name} ({ours['num_classes']} classes)",
                _time_and_ratio(eager, ours, "reference"),
                _time_and_ratio(gram_form, ours, "gram_form"),
                _time(ours),
                " / ".join(map(_memory, (eager, gram_form, ours))),
            ]
        )
    return "\n\n".join(
        [
            f"One step of the loss, forward and backward, float32, {measured.machine}:",
            _table(["shape", "paper's formulation", "Gram form", "fused", "extra MiB"], body) + "\n",
        ]
    )


def render(rows: Rows) -> str:
    """Markdown for docs/benchmarks.md: the whole loss, every function, ISDA, scaling, a training step."""
    measured = Measured(rows)
    parts = [
        f"{measured.machine}, float32. One step of the loss, forward and backward:",
        _losses(measured),
        "Time relative to one batched product of all classes and to the GEMMs of the classes present; extra memory:",
        _floors(measured),
        "Speed-up of each function over its eager reference, forward and backward where it is differentiable:",
        _functions(measured, "reference"),
    ]
    if any(measured.gram_form(case, name) for case in CASES if case != "loss" for name in measured.shapes):
        parts += ["Speed-up of each function over the faster Gram form:", _functions(measured, "gram_form")]
    if any(measured.ours("cross_entropy", name) for name in SUPERVISED):
        parts += ["Semantic cross-entropy at the settings of ISDA, forward and backward:", _supervised(measured)]
    rows, found = measured.rows, measured.found
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


def _losses(measured: Measured) -> str:
    ours = [subject for subject in (CLOSED_FORM, NATIVE, TRITON) if measured.rows_of("loss", subject)]
    subjects = REFERENCE, COMPILED, GRAM_FORM, COMPILED_GRAM_FORM, *ours
    header = ["shape", *subjects, "× reference", "× Gram form"]
    body = [
        [
            _shape(row),
            *(_time(measured.found.get(("loss", name, subject))) for subject in subjects),
            *(_times(row.get(f"times_faster_than_{rival}", "")) for rival in ("reference", "gram_form")),
        ]
        for name, row in measured.losses.items()
    ]
    return _table(header, body)


def _floors(measured: Measured) -> str:
    body = [
        [
            name,
            _times(row["times_bare_bmm"]),
            _times(row.get("times_gemms", "")),
            _memory(measured.found.get(("loss", name, REFERENCE))),
            _memory(measured.gram_form("loss", name)),
            _memory(row),
        ]
        for name, row in measured.losses.items()
    ]
    memory = [f"MiB, {subject}" for subject in (REFERENCE, GRAM_FORM, "fused")]
    return _table(["shape", "bmm(W, Σ)", "its GEMMs", *memory], body)


def _functions(measured: Measured, rival: str) -> str:
    """Speed-up of every function at every shape over a rival."""

    def other(case: str, name: str) -> dict[str, str] | None:
        return measured.gram_form(case, name) if rival == "gram_form" else measured.found.get((case, name, REFERENCE))

    shapes = measured.shapes
    body = [
        [f"`{case}`", *(_speedup(other(case, name), measured.ours(case, name), rival) for name in shapes)]
        for case in CASES
        if case != "loss" and any(other(case, name) for name in shapes)
    ]
    return _table(["", *shapes], body)


def _supervised(measured: Measured) -> str:
    body = []
    for name in SUPERVISED:
        ours = measured.ours("cross_entropy", name)
        if ours is not None:
            released = measured.found.get(("cross_entropy", name, ISDA_FORM))
            gram_form = measured.gram_form("cross_entropy", name)
            body.append(
                [
                    _shape(ours),
                    _time_and_ratio(released, ours, "isda"),
                    _time_and_ratio(gram_form, ours, "gram_form"),
                    _time(ours),
                    _times(ours["times_gemms"]),
                    " / ".join(map(_memory, (released, gram_form, ours))),
                ]
            )
    header = ["batch", ISDA_FORM, GRAM_FORM, "fused", "relative to its GEMMs", "extra MiB"]
    return _table(header, body)


def _shape(row: dict[str, str]) -> str:
    kind = "" if row["covariance"] == "full" else ", diagonal Σ"
    supervised = row["num_unlabeled"] == "0"
    batch = f"N {row['num_labeled']}" if supervised else f"Bl {row['num_labeled']}, Bu {row['num_unlabeled']}"
    return f"{row['name']}: {batch}, l {row['num_classes']}, d {row['num_features']}{kind}"


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _time(row: dict[str, str] | None) -> str:
    if row is None or not row["step_ms"]:
        return row["note"] if row else ""
    milliseconds = float(row["step_ms"])
    return f"{_rounded(milliseconds)} ms"


def _times(value: str) -> str:
    return f"{_rounded(float(value))} ×" if value else ""


def _time_and_ratio(other: dict[str, str] | None, ours: dict[str, str], rival: str) -> str:
    """Time of a rival and how many times faster we are, or in short why it was not timed."""
    ratio = _times(ours.get(f"times_faster_than_{rival}", ""))
    return _time(other).split(":")[0] + (f" ({ratio})" if ratio else "")


def _memory(row: dict[str, str] | None) -> str:
    size = row["memory_mib"] if row else ""
    return (f"{float(size):,.0f}" if float(size) >= 10 else f"{float(size):.1f}") if size else "–"


def _speedup(other: dict[str, str] | None, ours: dict[str, str] | None, rival: str) -> str:
    if ours is None or other is None:
        return ""
    return _times(ours.get(f"times_faster_than_{rival}", "")) or other["note"].split(":")[0]


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
