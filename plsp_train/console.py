"""Output of a run: progress bar, a line per epoch, summary table, curves."""

import io
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from plsp_train.files import write_atomically
from plsp_train.validation import CRITERIA

_REFRESH_SECONDS = 0.5
# What the final table shows besides F1 scores.
_FINAL = ("disambiguation_accuracy", "covering_rate", "approximated_accuracy", "label_agreement")


# Metrics in the line of an epoch, with their labels.
_SCORES = (("micro_f1", "micro-F1"), ("macro_f1", "macro-F1"))
_SHARES = (
    ("labeled_purity", "labelled purity"),
    ("mask_rate", "mask rate"),
    ("pseudo_label_purity", "pseudo-label purity"),
    ("covering_rate", "covering rate"),
    ("approximated_accuracy", "approximated accuracy"),
)


class Progress:
    """A progress bar on a terminal, nothing elsewhere."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._next, self._start = 0.0, time.perf_counter()

    def due(self) -> bool:
        return self._bar is not None and time.perf_counter() >= self._next

    def show(self, steps_done: int, means: dict[str, Any], num_images: int) -> None:
        if self._bar is None:
            return
        now = time.perf_counter()
        self._next = now + _REFRESH_SECONDS
        shown = {name: f"{value:.3f}" for name, value in means.items() if value is not None}
        self._bar.set_postfix(shown | {"images/s": f"{num_images / (now - self._start):.0f}"}, refresh=False)
        self._bar.update(steps_done - self._bar.n)


class Reporter:
    """Prints, and writes metrics and curves into the output directory if there is one."""

    def __init__(self, out: Path | None, *, stream: TextIO | None = None, tensorboard: bool = False) -> None:
        self.out = out
        self.stream = stream or sys.stdout
        self._tensorboard = tensorboard
        self._writer: Any = None

    def line(self, text: str) -> None:
        try:
            print(text, file=self.stream, flush=True)
        except OSError as error:  # a closed pipe, a full disk; the error does not say what was written to
            raise OSError(error.errno, error.strerror, "standard output") from None

    @contextmanager
    def progress(self, stage: str, epoch: int, num_epochs: int, num_steps: int, done: int) -> Iterator[Progress]:
        if not self.stream.isatty():
            yield Progress(None)
            return
        from tqdm import tqdm

        with tqdm(total=num_steps, initial=done, desc=f"{stage} {epoch}/{num_epochs}", leave=False) as bar:
            yield Progress(bar)

    def epoch(self, metrics: dict[str, Any], num_epochs: int) -> None:
        if self.out is not None:
            with open(self.out / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(metrics) + "\n")
            if self._tensorboard:
                self._log_scalars(metrics, self.out)
        parts = [
            f"epoch {metrics['epoch']:>{len(str(num_epochs))}}/{num_epochs} {metrics['stage']:8}",
            f"loss {metrics['loss']:.4f}",
        ]
        parts += [f"{label} {metrics[name]:.4f}" for name, label in _SCORES if name in metrics]
        # Agreement is a sign for runs that have nothing better.
        signs = _SHARES if "micro_f1" in metrics else (*_SHARES, ("label_agreement", "label agreement"))
        parts += [f"{label} {metrics[name]:.1%}" for name, label in signs if metrics.get(name) is not None]
        parts.append(f"{metrics['images_per_second']:.0f} images/s")
        self.line("  ".join(parts))

    def rewrite(self, history: list[dict[str, Any]]) -> None:
        """Truncate the metrics to those of the checkpoint: later epochs run again."""
        if self.out is not None:
            text = "".join(json.dumps(metrics) + "\n" for metrics in history)
            write_atomically(self.out / "metrics.jsonl", text.encode())

    def finish(self, summary: dict[str, Any], history: list[dict[str, Any]]) -> None:
        rows = [(name, f"{value:.4f}") for name, value in summary.items() if name in _FINAL or "_f1" in name]
        for name, value in summary.items():
            if name.startswith("selected_by_"):
                score = f", micro-F1 {value['micro_f1']:.4f}" if "micro_f1" in value else f", {value['value']:.4f}"
                rows.append((name, f"epoch {value['epoch']}{score}"))
        rows += [("epochs", str(summary["epochs"])), ("seconds", f"{summary['seconds']:.1f}")]
        if self.out is not None:
            rows.append(("run", str(self.out)))
            if not draw_curves(history, self.out / "curves.png"):
                rows.append(("curves", "not drawn: install matplotlib"))
        if self._writer is not None:
            self._writer.close()
        width = max(len(name) for name, _ in rows)
        self.line("")
        for name, text in rows:
            self.line(f"{name:<{width}}  {text}")
        for warning in summary["warnings"]:
            self.line(f"warning: {warning}")

    def _log_scalars(self, metrics: dict[str, Any], out: Path) -> None:
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ValueError("--tensorboard needs the tensorboard package: pip install tensorboard") from None
            self._writer = SummaryWriter(str(out / "tensorboard"))
        for name, value in metrics.items():
            if isinstance(value, int | float) and name != "epoch":
                self._writer.add_scalar(name, value, metrics["epoch"])


class SilentReporter(Reporter):
    """For all ranks but rank 0, and for runs inside another program."""

    def __init__(self) -> None:
        super().__init__(None)

    def line(self, text: str) -> None: ...

    @contextmanager
    def progress(self, stage: str, epoch: int, num_epochs: int, num_steps: int, done: int) -> Iterator[Progress]:
        yield Progress(None)

    def epoch(self, metrics: dict[str, Any], num_epochs: int) -> None: ...

    def rewrite(self, history: list[dict[str, Any]]) -> None: ...

    def finish(self, summary: dict[str, Any], history: list[dict[str, Any]]) -> None: ...


def draw_curves(history: list[dict[str, Any]], path: Path) -> bool:
    """Plot F1, losses, shares and thresholds over epochs; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 7), layout="constrained")
    f1, losses, purity, thresholds = figure.subplots(2, 2).flat
    panels = [
        (f1, "F1 on the test set, agreement of labels", ("micro_f1", "macro_f1", "label_agreement")),
        (losses, "loss and its terms", ("loss", "supervised", "consistency", "complementary")),
        (purity, "shares", ("labeled_purity", "pseudo_label_purity", "mask_rate", *CRITERIA)),
    ]
    for axes, title, names in panels:
        axes.set_title(title)
        for name in names:
            points = [(line["epoch"], line[name]) for line in history if line.get(name) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=name.replace("_", " "))
        if axes.lines:
            axes.legend(fontsize="small")
    thresholds.set_title("confidence threshold of each class")
    lines = [line for line in history if "thresholds" in line]
    if lines:
        thresholds.plot([line["epoch"] for line in lines], [line["thresholds"] for line in lines], linewidth=0.8)
    changes = [after["epoch"] - 0.5 for before, after in pairwise(history) if before["stage"] != after["stage"]]
    for axes in (f1, losses, purity, thresholds):
        axes.set_xlabel("epoch")
        for change in changes:
            axes.axvline(change, color="gray", linestyle=":", linewidth=1)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, format="png")
    write_atomically(path, buffer.getvalue())
    return True
