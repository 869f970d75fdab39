"""Figures of the last run of each shape and sweep, and the figures in the documentation.

python -m benchmarks.plots speed benchmarks/results/<machine>.csv --out docs/images/speed.png
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.subjects import COMPILED, COMPILED_GRAM_FORM, FLOOR, GEMMS, GRAM_FORM, OURS, REFERENCE
from benchmarks.sweeps import SWEEPS, exponent, points

_SUBJECTS = (REFERENCE, COMPILED, GRAM_FORM, COMPILED_GRAM_FORM, *OURS, FLOOR, GEMMS)


def draw(rows: list[dict[str, str]], stem: Path) -> list[Path]:
    """Draw `<stem>-loss.png` and `<stem>-sweeps.png`, if there are rows for them."""
    pyplot = _pyplot()
    written = []
    whole = [row for row in rows if row["case"] == "loss" and not row["name"].startswith("sweep")]
    if whole:
        shapes = list(dict.fromkeys(row["name"] for row in whole))
        figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
        for axis, column, label in (
            (axes[0], "step_ms", "milliseconds, forward + backward"),
            (axes[1], "memory_mib", "extra MiB"),
        ):
            for position, subject in enumerate(_SUBJECTS):
                found = {
                    row["name"]: float(row[column] or row["forward_ms"])
                    for row in whole
                    if row["subject"] == subject and (row[column] or (column == "step_ms" and row["forward_ms"]))
                }
                places = [shapes.index(name) + 0.09 * (position - len(_SUBJECTS) // 2) for name in found]
                if found:
                    axis.bar(places, list(found.values()), 0.08, color=f"C{position}", label=subject)
            axis.set_yscale("log")
            axis.set_xticks(range(len(shapes)), shapes)
            axis.set_ylabel(label)
        axes[0].legend()
        written.append(_save(figure, stem.with_name(stem.name + "-loss.png")))
    if any(row["name"].startswith("sweep") for row in rows):
        figure, axes = pyplot.subplots(1, len(SWEEPS), figsize=(12, 4), layout="constrained", sharey=True)
        for axis, name in zip(axes, SWEEPS, strict=True):
            for colour, subject in enumerate(_SUBJECTS):
                measured = points(rows, name, subject)
                if len(measured) >= 3:
                    label = f"{subject}: slope {exponent(measured):.2f}"
                    axis.loglog(*zip(*measured, strict=True), marker="o", color=f"C{colour}", label=label)
            axis.set_xlabel(name)
            axis.legend()
        axes[0].set_ylabel("milliseconds, forward + backward")
        written.append(_save(figure, stem.with_name(stem.name + "-sweeps.png")))
    return written


def draw_speed(rows: list[dict[str, str]], path: Path) -> Path:
    """Draw the figure of the README: time and memory of one step, compared with eager PyTorch."""
    from benchmarks.table import Measured

    pyplot = _pyplot()
    measured = Measured(rows)
    bars: tuple[tuple[str, str, Mapping[str, dict[str, str] | None]], ...] = (
        ("paper's formulation, eager", "#c3c9cf", measured.rows_of("loss", REFERENCE)),
        ("paper's formulation, torch.compile", "#9aa3ad", measured.rows_of("loss", COMPILED)),
        (
            "Gram form, eager or torch.compile",
            "#5b6b7b",
            {name: measured.gram_form("loss", name) for name in measured.shapes},
        ),
        ("plsp_kernels", "#d1495b", measured.losses),
    )
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    for axis, column, title in ((axes[0], "step_ms", "time, ms"), (axes[1], "memory_mib", "extra memory, MiB")):
        for offset, (label, colour, rows_of) in zip((-0.33, -0.11, 0.11, 0.33), bars, strict=True):
            found = [rows_of.get(name) for name in measured.shapes]
            heights = [_number(row, column) for row in found]
            places = [place + offset for place in range(len(heights))]
            axis.bar(places, [height or 0 for height in heights], 0.2, color=colour, label=label)
            for place, height, row in zip(places, heights, found, strict=True):
                if height:
                    axis.annotate(_short(height), (place, height), ha="center", va="bottom", fontsize=6.5)
                elif row and row["note"]:
                    axis.text(
                        place, 0.02, row["note"].split(":")[0], rotation=90, ha="center", va="bottom", fontsize=7.5,
                        color=colour, transform=axis.get_xaxis_transform(),
                    )  # fmt: skip
        axis.set_yscale("log")
        axis.set_ylim(top=axis.get_ylim()[1] * 2)
        names = [f"{name}\nl={row['num_classes']}" for name, row in measured.losses.items()]
        axis.set_xticks(range(len(names)), [name.replace("-", "-\n") for name in names], fontsize=8.5)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8.5, frameon=False, loc="upper left")
    figure.suptitle(f"One step of the loss, forward + backward, float32 ({measured.machine})", fontsize=11)
    return _save(figure, path)


def _number(row: dict[str, str] | None, column: str) -> float | None:
    return float(row[column]) if row and row[column] else None


def _short(number: float) -> str:
    return f"{number / 1000:.3g}k" if number >= 1000 else f"{number:.2g}" if number < 10 else f"{number:.0f}"


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots", description="Draw the figures of the documentation."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    speed = commands.add_parser("speed", help="time and memory of one step, from measured rows")
    speed.add_argument("csv", type=Path, help="benchmarks/results/<machine>.csv")
    speed.add_argument("--out", type=Path, required=True, help="output file")
    options = parser.parse_args()
    try:
        draw_speed(results.read(options.csv), options.out)
    except KeyError as missing:
        print(f"benchmarks.plots: error: the input has no {missing}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"benchmarks.plots: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
