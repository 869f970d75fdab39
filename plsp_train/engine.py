"""Stages, epochs, steps: drives any method, measures it, and never loses its work.

A checkpoint is written after every epoch, and after the running step when the run is told to stop. It holds all that
the next step depends on, so a resumed run continues to the same numbers.
"""

import math
import platform
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from plsp_kernels import __version__
from plsp_train.checkpoint import load_tensors, save_tensors, write_json
from plsp_train.config import Config
from plsp_train.data import TrainTestData, build_augmentation, generate_candidates
from plsp_train.distributed import agree, average_gradients, is_main, num_ranks, own_device, share_out
from plsp_train.methods import Step, Task, build_method
from plsp_train.metrics import f1_scores, predict
from plsp_train.models import build_model
from plsp_train.report import Reporter
from plsp_train.validation import criteria, hold_out, selected_epochs

CHECKPOINT_FORMAT = 1
LAST_EPOCHS = 10  # the summary's means are taken over this many
_AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class StopRun(Exception):
    """The run was told to stop, and is saved."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


class NonFiniteLoss(Exception):
    """The loss is not a number any more; the last checkpoint is from before."""


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:i, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name} is not there: torch sees no GPU; use --device cpu")
    return own_device(device)


def draw_candidates(config: Config, data: TrainTestData) -> Tensor:
    """The candidate sets that came with the data, or generated ones, which depend on nothing but the seed."""
    if data.train_candidates is not None:
        return data.train_candidates
    return generate_candidates(
        config.candidates,
        data.train_labels,
        data.num_classes,
        torch.Generator().manual_seed(config.seed),
        flip_probability=config.flip_probability,
        noise_rate=config.noise_rate,
        recipe=config.recipe,
    )


class Engine:
    """One run in one folder."""

    def __init__(self, config: Config, data: TrainTestData, candidates: Tensor, out: Path, reporter: Reporter) -> None:
        self.config, self.out, self.reporter = config, out, reporter
        self.device = pick_device(config.device)
        self.test_inputs, self.test_labels = data.test_inputs, data.test_labels
        data, candidates, self.held_out = hold_out(data, candidates, config.validation_fraction, config.seed)
        self.augmentation = build_augmentation(data, device=self.device, memory_format=torch.channels_last)
        torch.manual_seed(config.seed)
        model = build_model(config.model, data.input_shape, data.num_classes).to(self.device)
        if data.is_image:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        share_out(model)
        self.model = model
        task = Task(
            config=config,
            model=model,
            inputs=data.train_inputs.to(self.device),
            candidates=candidates.to(self.device),
            true_labels=data.train_labels.to(self.device),
            augmentation=self.augmentation,
            generator=torch.Generator().manual_seed(config.seed + 1),
        )
        self.method = build_method(task)
        self.generator = task.generator
        if config.compile:
            model.features = torch.compile(model.features)  # type: ignore[method-assign]
        self.optimizer = torch.optim.SGD(
            [*model.parameters(), *self.method.parameters()],
            lr=config.lr,
            momentum=0.9,
            weight_decay=config.weight_decay,
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.amp == "fp16")
        self.rebuild = {"model": config.model, "input_shape": list(data.input_shape), "num_classes": data.num_classes}
        # Progress: epochs done, steps done in the present one, and the sums of its terms.
        self.epochs_done, self.steps_done = 0, 0
        self.sums: dict[str, Tensor] = {}
        self.epoch_report: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.seconds = 0.0
        self.stop_signal: int | None = None

    # ------------------------------------------------------------------------------------------------ training

    def run(self) -> dict[str, Any]:
        """Train to the end; returns the summary."""
        plan = [(stage.name, epoch) for stage in self.method.stages() for epoch in range(1, stage.epochs + 1)]
        if not plan:
            raise ValueError("nothing to train: the stages of this run have 0 epochs in all; raise --epochs")
        with self._catch_signals():
            for stage, epoch in plan[self.epochs_done :]:
                self._epoch(stage, epoch, len(plan))
        summary = self._summary()
        if is_main():
            write_json(self.out / "summary.json", summary)
            save_tensors(self.out / "model.pt", {**self.rebuild, "state_dict": self.model.state_dict()})
        self.reporter.finish(summary, self.history, self.out)
        return summary

    def _epoch(self, stage: str, epoch: int, num_epochs: int) -> None:
        start, before = time.perf_counter(), self.seconds
        for group in self.optimizer.param_groups:
            group["lr"] = self.method.learning_rate(stage, epoch)
        if self.steps_done == 0:
            self.sums = {}
            self.epoch_report = self.method.start_epoch(stage, epoch)
        self.model.train()
        num_steps, num_images = self.method.num_iterations(stage), 0
        with self.reporter.progress(stage, self.epochs_done + 1, num_epochs, num_steps, self.steps_done) as progress:
            while self.steps_done < num_steps:
                step = self._step(stage, epoch)
                self.steps_done += 1
                num_images += step.num_images
                # All ranks look at the means and stop at the same step, whichever of them was told to.
                stop_signal, due = agree(self.stop_signal or 0, progress.due())
                if due:
                    progress.show(self.steps_done, self._means(), num_images)
                if stop_signal and self.steps_done < num_steps:
                    self._means()
                    self.seconds = before + time.perf_counter() - start
                    self._save()
                    raise StopRun(stop_signal)
        training_seconds = time.perf_counter() - start
        metrics = {
            "epoch": self.epochs_done + 1,
            "stage": stage,
            "stage_epoch": epoch,
            **self._means(),
            **self.epoch_report,
            **self.method.end_epoch(stage),
            **f1_scores(predict(self.model, self.test_inputs, self.augmentation), self.test_labels),
            **self._criteria(),
            "lr": self.optimizer.param_groups[0]["lr"],
        }
        self.seconds = before + time.perf_counter() - start
        metrics["seconds"] = round(self.seconds, 3)
        metrics["images_per_second"] = round(num_images / training_seconds, 1)
        self.history.append(metrics)
        self.epochs_done, self.steps_done = self.epochs_done + 1, 0
        self._save()
        self.reporter.epoch(metrics, num_epochs, self.out)
        (stop_signal,) = agree(self.stop_signal or 0)
        if stop_signal and self.epochs_done < num_epochs:
            raise StopRun(stop_signal)

    def _criteria(self) -> dict[str, float]:
        if self.held_out is None:
            return {}
        logits = predict(self.model, self.held_out.inputs, self.augmentation)
        return criteria(logits, self.held_out.candidates.to(logits.device))

    def _step(self, stage: str, epoch: int) -> Step:
        with self._autocast():
            step = self.method.step(stage, epoch)
        # Looking at the loss is free on a CPU; a GPU is asked only when the progress is shown anyway.
        if self.device.type == "cpu" and not math.isfinite(step.loss.item()):
            raise NonFiniteLoss(self._explain(step, epoch, stage))
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(step.loss).backward()
        average_gradients(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with self._autocast():
            self.method.after_step(stage)
        for name, value in step.terms.items():
            self.sums[name] = self.sums[name] + value.detach() if name in self.sums else value.detach().clone()
        return step

    def _autocast(self) -> AbstractContextManager[Any]:
        amp = _AMP_DTYPES.get(self.config.amp)
        return nullcontext() if amp is None else torch.autocast(self.device.type, dtype=amp)

    def _means(self) -> dict[str, float | None]:
        """The epoch's terms so far: the one place where the host waits for the device."""
        names = list(self.sums)
        values = (torch.stack([self.sums[name].double() for name in names]) / self.steps_done).tolist()
        means = dict(zip(names, values, strict=True))
        if not math.isfinite(means["loss"]):
            raise NonFiniteLoss(f"the mean loss of this epoch is {means['loss']} after {self.steps_done} steps")
        return self.method.report(means)

    def _explain(self, step: Step, epoch: int, stage: str) -> str:
        terms = ", ".join(f"{name} {value.item():.4g}" for name, value in step.terms.items())
        weights = max(parameter.detach().abs().max().item() for parameter in self.model.parameters())
        return (
            f"the loss became {step.loss.item()} in step {self.steps_done + 1} of {stage} epoch {epoch} ({terms}; "
            f"largest weight {weights:.4g}, learning rate {self.optimizer.param_groups[0]['lr']:g})"
        )

    @contextmanager
    def _catch_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM let the running step finish; a second one ends at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self.stop_signal is not None:
                raise KeyboardInterrupt
            self.stop_signal = number

        try:
            before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: whoever runs us there handles signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def profile(self, warm_up: int = 5, steps: int = 10) -> Path:
        """Trace a few steps of the last stage, print where the time goes, and write the trace for a viewer."""
        stage = self.method.stages()[-1]
        self.method.start_epoch(stage.name, 1)
        self.model.train()
        for _ in range(warm_up):
            self._step(stage.name, 1)
        with torch.profiler.profile() as profiler:
            for _ in range(steps):
                self._step(stage.name, 1)
        totals = profiler.key_averages()
        self.reporter.line(totals.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=48))
        path = self.out / "trace.json"
        if is_main():
            profiler.export_chrome_trace(str(path))
        return path

    # ------------------------------------------------------------------------------------------------- results

    def _summary(self) -> dict[str, Any]:
        last = self.history[-1]
        recent = self.history[-LAST_EPOCHS:]
        stage_ends = {line["stage"]: line["seconds"] for line in self.history}
        return {
            "micro_f1": last["micro_f1"],
            "macro_f1": last["macro_f1"],
            f"micro_f1_last{LAST_EPOCHS}": sum(line["micro_f1"] for line in recent) / len(recent),
            f"macro_f1_last{LAST_EPOCHS}": sum(line["macro_f1"] for line in recent) / len(recent),
            "micro_f1_best": max(line["micro_f1"] for line in self.history),
            **selected_epochs(self.history),
            "epochs": len(self.history),
            "seconds": round(self.seconds, 3),
            "seconds_at_end_of": stage_ends,
            "seed": self.config.seed,
            "device": str(self.device),
            "ranks": num_ranks(),
            "versions": {"plsp": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }

    # -------------------------------------------------------------------------------------------- never lose work

    def _save(self) -> None:
        if not is_main():
            return
        save_tensors(
            self.out / "checkpoint.pt",
            {
                "format": CHECKPOINT_FORMAT,
                "config": self.config.to_json(),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "method": self.method.state_dict(),
                "generator": self.generator.get_state(),
                "torch_generator": torch.get_rng_state(),
                "epochs_done": self.epochs_done,
                "steps_done": self.steps_done,
                "sums": self.sums,
                "epoch_report": self.epoch_report,
                "history": self.history,
                "seconds": self.seconds,
            },
        )

    def resume(self) -> None:
        """Continue where the checkpoint of this folder was written."""
        state = load_tensors(self.out / "checkpoint.pt", self.device)
        if state.get("format") != CHECKPOINT_FORMAT:
            raise ValueError(f"{self.out / 'checkpoint.pt'} was written by another version of plsp_train")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.method.load_state_dict(state["method"])
        self.generator.set_state(state["generator"].cpu())
        torch.set_rng_state(state["torch_generator"].cpu())
        self.epochs_done, self.steps_done = state["epochs_done"], state["steps_done"]
        self.sums, self.epoch_report = state["sums"], state["epoch_report"]
        self.history, self.seconds = state["history"], state["seconds"]
        self.reporter.rewrite(self.history, self.out)
