"""Pictures of the last run of each shape and sweep."""

from pathlib import Path

from benchmarks.subjects import CLOSED_FORM, COMPILED, FLOOR, REFERENCE, TRITON
from benchmarks.sweeps import SWEEPS, exponent, points

_SUBJECTS = (REFERENCE, COMPILED, CLOSED_FORM, TRITON, FLOOR)


def draw(rows: list[dict[str, str]], stem: Path) -> list[Path]:
    """`<stem>-loss.png` and `<stem>-sweeps.png`, as far as there are rows for them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

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
                places = [shapes.index(name) + 0.16 * (position - 2) for name in found]
                if found:
                    axis.bar(places, list(found.values()), 0.15, color=f"C{position}", label=subject)
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


def _save(figure: object, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=110)  # type: ignore[attr-defined]
    pyplot.close(figure)  # type: ignore[arg-type]
    return path
