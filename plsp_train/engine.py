"""Drives any method through stages, epochs and steps, evaluates it and writes checkpoints.

A checkpoint is written after every epoch, and after the current step if a signal stops the run. It holds everything
the next step depends on: a resumed run reproduces the uninterrupted one, bit for bit on a CPU.
"""

import math
import platform
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from plsp_kernels import __version__
from plsp_train.alarms import ClassWatch, alarms_of
from plsp_train.checkpoint import load_checkpoint, save_checkpoint
from plsp_train.config import Config
from plsp_train.console import Progress, Reporter
from plsp_train.data import TrainTestData, build_augmentation
from plsp_train.data.candidate_sets import AnyCandidates, CandidateSets
from plsp_train.data.fingerprint import fingerprint
from plsp_train.distributed import agree, from_all_ranks, is_main, num_ranks, pick_device
from plsp_train.divergence import NonFiniteLoss, all_finite, likely_cause
from plsp_train.files import write_json
from plsp_train.methods import Iteration, Task, build_method
from plsp_train.metrics import f1_scores, only_prediction, own_logits, predictions
from plsp_train.model_file import ModelFile, save_model
from plsp_train.models import Network, build_model, load_pretrained
from plsp_train.outcome import Outcome, Trained, describe_instances, summarise
from plsp_train.results import NonFiniteLogits, save_results
from plsp_train.validation import criteria_of_instances, hold_out, mean_criteria, selected_epochs

CHECKPOINT_FORMAT = 4
# What a checkpoint holds of an engine.
_STATEFUL = ("model", "optimizer", "scaler", "method", "watch")
_PROGRESS: dict[str, type] = {
    "epochs_done": int,
    "steps_done": int,
    "sums": dict,
    "epoch_report": dict,
    "history": list,
    "seconds": float,
    "labels": Tensor,
    "changes": Tensor,
}
_GENERATORS = ("generator", "torch_generator")
_OVERFLOWS = "overflows"  # steps of an epoch whose loss overflowed in half precision, which the scaler skips
_AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class StopRun(Exception):
    """A signal stopped the run, which is saved."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


class Engine:
    """One run: its data, network, method and progress. Without an output directory it writes no files."""

    def __init__(
        self,
        config: Config,
        data: TrainTestData,
        candidates: AnyCandidates,
        out: Path | None,
        reporter: Reporter,
        network: Network | None = None,
    ) -> None:
        self.config, self.out, self.reporter = config, out, reporter
        self.device = pick_device(config.device)
        self.fingerprint = fingerprint(data.train_inputs, candidates)
        self.data, candidates, self.held_out = hold_out(data, candidates, config.validation_fraction, config.seed)
        torch.manual_seed(config.seed)
        self.model = self._prepared(network or build_model(config.model, data.input_shape, data.num_classes))
        self.augmentation = build_augmentation(
            data,
            horizontal_flip=config.horizontal_flip,
            augment_weak=config.augment_weak,
            device=self.device,
            memory_format=self.model.memory_format,
        )
        true_labels, inputs = self.data.train_labels, self.data.train_inputs
        task = Task(
            config=config,
            model=self.model,
            inputs=inputs.to(self.device) if isinstance(inputs, Tensor) else inputs,
            candidates=CandidateSets.pack(candidates).to(self.device),
            true_labels=None if true_labels is None else true_labels.to(self.device),
            augmentation=self.augmentation,
            generator=torch.Generator().manual_seed(config.seed + 1),
        )
        self.method = build_method(task)
        self.task, self.generator = task, task.generator
        self.forward = self.method.step if num_ranks() == 1 else self._parallel_step()
        if config.compile:
            self.model.features = torch.compile(self.model.features)  # type: ignore[method-assign]
        self.optimizer = torch.optim.SGD(
            [*self.model.parameters(), *self.method.parameters()],
            lr=config.lr,
            momentum=0.9,
            weight_decay=config.weight_decay,
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.amp == "fp16")
        # Progress: finished epochs, finished steps of the current one, and the sums of its terms.
        self.epochs_done, self.steps_done = 0, 0
        self.sums: dict[str, Tensor] = {}
        self.epoch_report: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.seconds = 0.0
        # Labels of the last epoch, and how often the label of each instance has changed since the one before.
        self.labels = torch.full_like(self.method.labels, -1)
        self.changes = torch.zeros_like(self.labels)
        self.watch = ClassWatch(task.candidates)
        self.stop_signal: int | None = None

    def _prepared(self, model: Network) -> Network:
        """The network on its device, with initial weights from a file if one is given."""
        if self.config.pretrained:
            self.reporter.line(str(load_pretrained(model, self.config.pretrained)))
        model = model.to(self.device)
        if self.data.is_image:
            model = model.to(memory_format=model.memory_format)  # type: ignore[call-overload]
        if num_ranks() > 1:
            from plsp_train.sharding import synchronise_batch_norms

            synchronise_batch_norms(model)
        return model

    def _parallel_step(self) -> Callable[[str, int], Iteration]:
        from plsp_train.sharding import parallel_step

        return parallel_step(self.method, self.augmentation.plain(self.data.train_inputs[:2].to(self.device)))

    # ------------------------------------------------------------------------------------------------ training

    def run(self) -> dict[str, Any]:
        """Train to the end; returns the summary."""
        stages = self.method.stages()
        num_epochs = sum(stage.epochs for stage in stages)
        if num_epochs == 0:
            raise ValueError("nothing to train: all stages have 0 epochs; raise --epochs")
        epochs = ((stage.name, epoch) for stage in stages for epoch in range(1, stage.epochs + 1))
        with self._catch_signals():
            for stage, epoch in islice(epochs, self.epochs_done, None):
                self._epoch(stage, epoch, num_epochs)
        try:
            outcome = self.describe()
        except NonFiniteLogits as error:
            raise NonFiniteLoss(f"{error} after training; {self._likely_cause()}") from None
        summary = self._summary(outcome)
        if self.out is not None and is_main():
            save_model(self.out / "model.pt", self.model_file())
            save_results(self.out / "results.npz", outcome.results)
            write_json(self.out / "summary.json", summary)
        self.reporter.finish(summary, self.history)
        return summary

    def _epoch(self, stage: str, epoch: int, num_epochs: int) -> None:
        """Train what is left of an epoch, evaluate it, and write a checkpoint."""
        start, seconds_before = time.perf_counter(), self.seconds
        self._start_epoch(stage, epoch)
        num_steps = self.method.num_iterations(stage)
        with self.reporter.progress(stage, self.epochs_done + 1, num_epochs, num_steps, self.steps_done) as progress:
            num_images, stop_signal = self._steps(stage, epoch, num_steps, progress)
        training_seconds = time.perf_counter() - start
        means = self._means()
        if self.steps_done < num_steps:
            self._require_finite()
            self.seconds = seconds_before + time.perf_counter() - start
            self._save()
            raise StopRun(stop_signal)
        metrics = {"epoch": self.epochs_done + 1, "stage": stage, "stage_epoch": epoch, **means, **self._scores(stage)}
        self.seconds = seconds_before + time.perf_counter() - start
        metrics["seconds"] = round(self.seconds, 3)
        metrics["images_per_second"] = round(num_images / training_seconds, 1)
        self._require_finite(metrics)
        self._record(metrics, num_epochs)
        (stop_signal,) = agree(self.stop_signal or 0)
        if stop_signal and self.epochs_done < num_epochs:
            raise StopRun(stop_signal)

    def _start_epoch(self, stage: str, epoch: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.method.learning_rate(stage, epoch)
        if self.steps_done == 0:
            self.sums = {}
            self.epoch_report = self.method.start_epoch(stage, epoch)
        self.model.train()

    def _steps(self, stage: str, epoch: int, num_steps: int, progress: Progress) -> tuple[int, int]:
        """Train to the end of the epoch or until a signal; returns the number of images, and the signal or 0."""
        num_images = 0
        while self.steps_done < num_steps:
            step = self._step(stage, epoch)
            self.steps_done += 1
            num_images += step.num_images
            # All ranks compute the means and stop at the same step, whichever of them needs to.
            stop_signal, due = agree(self.stop_signal or 0, progress.due())
            if due:
                progress.show(self.steps_done, self._means(), num_images)
            if stop_signal:
                return num_images, stop_signal
        return num_images, 0

    def _step(self, stage: str, epoch: int) -> Iteration:
        try:
            with self._autocast():
                step = self.forward(stage, epoch)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            message = "batch normalisation cannot train on a batch of one: raise the batch sizes, or use --model linear"
            raise ValueError(message) from None
        # Free on a CPU, a host sync on a GPU, where _means() finds it instead. A scaler skips steps that overflow.
        scales = self.scaler.is_enabled()
        if self.device.type == "cpu" and not scales and not math.isfinite(step.loss.item()):
            raise NonFiniteLoss(self._explain(step, epoch, stage))
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(step.loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with self._autocast():
            self.method.after_step(stage)
        terms = {name: value.detach() for name, value in step.terms.items()}
        if scales:
            finite = step.loss.detach().isfinite()
            terms = {name: value.where(finite, 0) for name, value in terms.items()} | {_OVERFLOWS: (~finite).float()}
        for name, value in terms.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()
        return step

    def _autocast(self) -> AbstractContextManager[Any]:
        amp = _AMP_DTYPES.get(self.config.amp)
        return nullcontext() if amp is None else torch.autocast(self.device.type, dtype=amp)

    def _means(self) -> dict[str, float | None]:
        """Means of the epoch's terms so far; the only host sync of training."""
        names = list(self.sums)
        sums = dict(zip(names, torch.stack([self.sums[name].double() for name in names]).tolist(), strict=True))
        overflows = sums.pop(_OVERFLOWS, 0.0)
        steps = self.steps_done - overflows
        loss = sums["loss"] / steps if steps else math.nan
        if not math.isfinite(loss):
            cause = self._likely_cause()
            raise NonFiniteLoss(f"the mean loss of this epoch is {loss} after {self.steps_done} steps; {cause}")
        means = self.method.report({name: value / steps for name, value in sums.items()})
        return {**means, _OVERFLOWS: int(overflows)} if overflows else means

    # -------------------------------------------------------------------------------------- scores of an epoch

    def _scores(self, stage: str) -> dict[str, Any]:
        """What an epoch reports besides the means of its steps."""
        return {
            **self.epoch_report,
            **self.method.end_epoch(stage),
            **self._agreement(),
            **self._test_scores(),
            **self._criteria(),
            "lr": self.optimizer.param_groups[0]["lr"],
        }

    def _agreement(self) -> dict[str, Any]:
        """The share of instances that keep the label of the previous epoch, over those that had one."""
        before, self.labels = self.labels, self.method.labels.clone()
        known = before >= 0
        changed = known & (self.labels != before)
        self.changes += changed
        count = int(known.sum())
        watched = self.watch.observe(before, self.labels, self.method.labeled_set())
        return watched | ({"label_agreement": 1 - int(changed.sum()) / count} if count else {})

    def _test_scores(self) -> dict[str, Any]:
        if self.data.test_inputs is None or self.data.test_labels is None:
            return {}
        prediction = predictions(self.method.network, self.data.test_inputs, self.augmentation)
        return f1_scores(prediction, self.data.test_labels) | only_prediction(prediction)

    def _criteria(self) -> dict[str, Any]:
        """Scores of instances whose candidate sets are known but not their labels."""
        if self.held_out is not None:
            inputs, candidates = self.held_out.inputs, self.held_out.candidates
        elif self.data.test_inputs is not None and self.data.test_candidates is not None:
            inputs, candidates = self.data.test_inputs, self.data.test_candidates
        else:
            return {}
        parts = [
            (logits.argmax(1), *criteria_of_instances(logits, candidates[rows].to(logits.device)))
            for rows, logits in own_logits(self.method.network, inputs, self.augmentation)
        ]
        prediction, *scores = from_all_ranks(*(torch.cat(column) for column in zip(*parts, strict=True)))
        return mean_criteria(*scores) | only_prediction(prediction)

    def _record(self, metrics: dict[str, Any], num_epochs: int) -> None:
        """Add an epoch to the history, write the checkpoint, and report."""
        alarms = [
            alarm.sentence
            for alarm in alarms_of([*self.history, metrics], self.data.class_names)
            if alarm.epoch == metrics["epoch"]
        ]
        if alarms:
            metrics["alarms"] = alarms
        self.history.append(metrics)
        self.epochs_done, self.steps_done = self.epochs_done + 1, 0
        self._keep_selected()
        self._save()
        self.reporter.epoch(metrics, num_epochs)
        for sentence in alarms:
            self.reporter.line(f"warning: {sentence}")

    def _keep_selected(self) -> None:
        """Keep the weights of the epoch that maximises a criterion, beside those of the last one."""
        if self.held_out is None or self.out is None or not is_main():
            return
        for criterion, selected in selected_epochs(self.history).items():
            if selected["epoch"] == self.epochs_done:
                save_model(self.out / f"model_{criterion}.pt", self.model_file())

    # ---------------------------------------------------------------------------------- divergence and signals

    def _require_finite(self, metrics: dict[str, Any] | None = None) -> None:
        """Stop before a NaN or an infinity reaches a checkpoint, a model file or the metrics."""
        state = self.model.state_dict(), self.optimizer.state_dict(), self.method.state_dict()
        numbers = [value for value in (metrics or {}).values() if isinstance(value, float)]
        if not all_finite(state, self.device) or not all(map(math.isfinite, numbers)):
            epoch, cause = self.epochs_done + 1, self._likely_cause()
            raise NonFiniteLoss(f"weights, statistics or scores are no longer finite in epoch {epoch}; {cause}")

    def _explain(self, step: Iteration, epoch: int, stage: str) -> str:
        terms = ", ".join(f"{name} {value.item():.4g}" for name, value in step.terms.items())
        return (
            f"the loss became {step.loss.item()} in step {self.steps_done + 1} of {stage} epoch {epoch} ({terms}); "
            f"{self._likely_cause()}"
        )

    def _likely_cause(self) -> str:
        return likely_cause(self.model, self.optimizer.param_groups[0]["lr"], self.config.amp)

    @contextmanager
    def _catch_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM let the current step finish; a second signal interrupts it.

        Without an output directory there is nothing to save, and signals are left to the caller.
        """
        if self.out is None:
            yield
            return

        def stop(number: int, frame: FrameType | None) -> None:
            if self.stop_signal is not None:
                raise KeyboardInterrupt
            self.stop_signal = number

        try:
            before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread, where signals are the caller's
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def profile(self, warm_up: int = 5, steps: int = 10) -> Path:
        """Profile a few steps of the last stage: print the time per operator, write a trace for a viewer."""
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
        path = (self.out or Path()) / "trace.json"
        if is_main():
            profiler.export_chrome_trace(str(path))
        return path

    # ------------------------------------------------------------------------------------------------- results

    def model_file(self) -> ModelFile:
        """The network as it is now, with all that a prediction needs."""
        data = self.data
        return ModelFile(
            model=self.config.model,
            input_shape=data.input_shape,
            class_names=data.class_names,
            mean=data.mean,
            std=data.std,
            state_dict=self.method.network.state_dict(),
            feature_names=data.feature_names,
        )

    def describe(self) -> Outcome:
        """What the trained network says about every training instance, and about the test set."""
        return describe_instances(
            Trained(
                self.data,
                self.task.candidates,
                self.held_out,
                self.method.labeled_set(),
                self.changes,
                self.method.network,
                self.augmentation,
            )
        )

    def _summary(self, outcome: Outcome) -> dict[str, Any]:
        return {
            **summarise(outcome, self.history, self.data.class_names),
            "notes": list(self.data.notes),
            "epochs": len(self.history),
            "seconds": round(self.seconds, 3),
            "seconds_at_end_of": {line["stage"]: line["seconds"] for line in self.history},
            "seed": self.config.seed,
            "device": str(self.device),
            "ranks": num_ranks(),
            "versions": {"plsp": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }

    # --------------------------------------------------------------------------------------------- checkpoints

    def _save(self) -> None:
        if self.out is None or not is_main():
            return
        save_checkpoint(
            self.out,
            {
                "format": CHECKPOINT_FORMAT,
                "config": self.config.to_json(),
                "fingerprint": self.fingerprint,
                "generator": self.generator.get_state(),
                "torch_generator": torch.get_rng_state(),
                **{name: getattr(self, name).state_dict() for name in _STATEFUL},
                **{name: getattr(self, name) for name in _PROGRESS},
            },
        )

    def resume(self) -> None:
        """Continue from the checkpoint in the output directory."""
        if self.out is None:
            raise ValueError("a run without an output directory has no checkpoint to resume from")
        state, path, remark = load_checkpoint(self.out, self.device)
        if remark:
            self.reporter.line(remark)
        _check_checkpoint(path, state)
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(f"{path} belongs to other data: the data set has changed since the run was started")
        try:
            self._restore(state)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{path} does not fit this run: {reason}") from None
        self.reporter.rewrite(self.history)

    def _restore(self, state: dict[str, Any]) -> None:
        for name, kind in _PROGRESS.items():
            if not isinstance(state[name], kind):
                raise TypeError(f"{name} is a {type(state[name]).__name__}")
        if len(state["history"]) != state["epochs_done"] or state["steps_done"] < 0:
            raise ValueError("its numbers of epochs and steps contradict each other")
        if not state["labels"].shape == state["changes"].shape == self.labels.shape:
            raise ValueError("it has labels for another number of instances")
        for name in _STATEFUL:
            getattr(self, name).load_state_dict(state[name])
        for name in _PROGRESS:
            setattr(self, name, state[name])
        # After the method, whose samplers share the generator.
        self.generator.set_state(state["generator"].cpu())
        torch.set_rng_state(state["torch_generator"].cpu())


def _check_checkpoint(path: Path, state: Any) -> None:
    wanted = {"fingerprint", *_STATEFUL, *_PROGRESS, *_GENERATORS}
    if not isinstance(state, dict) or "fingerprint" not in state:
        raise ValueError(f"{path} is not a checkpoint")
    if state.get("format") != CHECKPOINT_FORMAT:
        raise ValueError(f"{path} was written by another version of plsp_train")
    missing = sorted(wanted - state.keys())
    if missing:
        raise ValueError(f"{path} is not a complete checkpoint: it lacks {', '.join(missing)}")
