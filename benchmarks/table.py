"""The README's speed tables, from measured rows.

    python -m benchmarks.table benchmarks/results/<machine>.csv

writes them between the two speed markers of README.md; the first marker remembers the file.
"""

import argparse
import re
import sys
from pathlib import Path

from benchmarks import results
from benchmarks.shapes import SHAPES
from benchmarks.subjects import CASES, CLOSED_FORM, COMPILED, DISTINCT, REFERENCE, STATE, TRITON
from benchmarks.sweeps import SWEEPS, exponent, points
from benchmarks.training_step import PARTS
from plsp_train.checkpoint import write_atomically

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
SECTION = re.compile(r"(<!-- speed: (?P<csv>\S+) -->\n).*?(<!-- /speed -->)", re.DOTALL)

Rows = list[dict[str, str]]


def latest(rows: Rows) -> Rows:
    """Of every measurement the last one."""
    keys = ("case", "name", "num_labeled", "num_unlabeled", "num_classes", "num_features", "subject")
    return list({tuple(row.get(key, "") for key in keys): row for row in rows}.values())


def render(rows: Rows) -> str:
    """Markdown: the whole loss, every function, growth; what stands in the README."""
    rows = latest(rows)
    found = {(row["case"], row["name"], row["subject"]): row for row in rows}
    ours = TRITON if any(row["subject"] == TRITON for row in rows) else CLOSED_FORM
    shapes = [name for name in SHAPES if ("loss", name, ours) in found]
    last = found["loss", shapes[-1], ours]
    parts = [
        f"{last['hardware']}, torch {last['torch']}, float32. One step of the loss, forward and backward:",
        _table(
            [
                "shape",
                "eager reference",
                "its torch.compile",
                ours,
                "speed-up",
                "of one bare bmm(W, Σ)",
                "extra memory",
            ],
            [
                [
                    _shape(found["loss", name, ours]),
                    _time(found.get(("loss", name, REFERENCE))),
                    _time(found.get(("loss", name, COMPILED))),
                    _time(found["loss", name, ours]),
                    _times(found["loss", name, ours]["times_faster_than_reference"]),
                    _times(found["loss", name, ours]["times_bare_bmm"]),
                    _memory(found.get(("loss", name, REFERENCE)), found["loss", name, ours]),
                ]
                for name in shapes
            ],
        ),
        "Speed-up of every function over its eager reference, forward and backward where it is differentiable:",
        _table(
            ["", *shapes],
            [
                [
                    f"`{case}`",
                    *(_speedup(found, case, name, STATE if (case, name, STATE) in found else ours) for name in shapes),
                ]
                for case in CASES
                if case != "loss" and any((case, name, REFERENCE) in found for name in shapes)
            ],
        ),
    ]
    distinct = found.get(("loss", "cifar100", DISTINCT))
    if distinct is not None:
        ratio = _times(distinct["times_bare_bmm"])
        parts.append(f"The cifar100 step with a class of its own for every sample takes {ratio} the bare bmm.")
    slopes = [
        f"{exponent(measured):.2f} in the {'number of ' * (name != 'batch')}{name}"
        for name in SWEEPS
        if len(measured := points(rows, name, ours)) >= 3
    ]
    if slopes:
        parts.append(f"The cost of a step grows with the power {', '.join(slopes)} (fitted to the last three sizes).")
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


def _speedup(found: dict[tuple[str, str, str], dict[str, str]], case: str, name: str, subject: str) -> str:
    row, eager = found.get((case, name, subject)), found.get((case, name, REFERENCE))
    if row is None or eager is None:
        return ""
    return _times(row["times_faster_than_reference"]) or eager["note"].split(":")[0]


def _table(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__.split("\n")[0])
    parser.add_argument("csv", type=Path, help="measured rows, benchmarks/results/<machine>.csv")
    path = parser.parse_args().csv
    text = README.read_text(encoding="utf-8")
    try:
        rows = results.read(path)
        if not rows:
            raise ValueError(f"{path} holds no rows: run python -m benchmarks first")
        marker = f"<!-- speed: {path.resolve().relative_to(ROOT).as_posix()} -->\n"
        changed, count = SECTION.subn(lambda match: marker + render(rows) + match[3], text)
        if count != 1:
            raise ValueError("README.md must have the two speed markers once")
    except KeyError as missing:
        print(f"benchmarks.table: error: {path} holds no rows of python -m benchmarks: no {missing}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"benchmarks.table: error: {error}", file=sys.stderr)
        return 2
    write_atomically(README, changed.encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
