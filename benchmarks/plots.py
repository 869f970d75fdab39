"""Figures of the last run of each shape and sweep, and the figures in the documentation.

python -m benchmarks.plots speed benchmarks/results/<machine>.csv --out docs/images/speed.png
python -m benchmarks.plots curves runs/tutorial/*fps0.7* --out docs/images/training.png
"""

import argparse
import json
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


def draw_curves(runs: list[Path], score: str, path: Path) -> Path:
    """Draw the test score over epochs, mean and range over seeds, one curve per method."""
    pyplot = _pyplot()
    curves: dict[str, list[list[float]]] = {}
    setting, pretraining = "", 0
    for folder in runs:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        curves.setdefault(config["method"], []).append([json.loads(line)[score] for line in lines])
        setting = f"{config['dataset']}, {config['candidates'].upper()} {config['flip_probability']:g}"
        if config["method"] == "plsp":
            pretraining = config["pretrain_epochs"]
    figure, axis = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for method, seeds in curves.items():
        epochs = range(1, min(map(len, seeds)) + 1)
        columns = list(zip(*seeds, strict=True))
        label = f"{method.upper()} ({len(seeds)} seeds)"
        (line,) = axis.plot(epochs, [sum(column) / len(column) for column in columns], label=label)
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        axis.fill_between(epochs, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    if pretraining:
        axis.axvline(pretraining + 0.5, color="grey", linestyle=":", linewidth=1)
        axis.annotate(
            "PLSP: end of pre-training", (pretraining + 1, 0.02), xycoords=("data", "axes fraction"), fontsize=8
        )
    axis.set_xlabel("epoch")
    axis.set_ylabel(f"test {score.replace('_', '-').replace('f1', 'F1')}")
    axis.set_title(setting, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
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
    curves = commands.add_parser("curves", help="test score over epochs, one curve per method, from finished runs")
    curves.add_argument("runs", type=Path, nargs="+", help="run directories that differ only in method and seed")
    curves.add_argument("--score", default="micro_f1", help="score in metrics.jsonl (default: %(default)s)")
    for command in (speed, curves):
        command.add_argument("--out", type=Path, required=True, help="output file")
    options = parser.parse_args()
    try:
        if options.command == "speed":
            draw_speed(results.read(options.csv), options.out)
        else:
            draw_curves(options.runs, options.score, options.out)
    except KeyError as missing:
        print(f"benchmarks.plots: error: the input has no {missing}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"benchmarks.plots: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
