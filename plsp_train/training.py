"""A run from its data to its files, alone or as one fold of a cross-validation."""

import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from plsp_train.checkpoint import has_checkpoint
from plsp_train.config import Config
from plsp_train.console import Reporter, SilentReporter
from plsp_train.data import Source, TrainTestData, ambiguity_summary
from plsp_train.data.candidate_sets import CandidateSets
from plsp_train.distributed import is_main
from plsp_train.divergence import NonFiniteLoss
from plsp_train.engine import Engine, StopRun
from plsp_train.files import remove_unfinished, write_json
from plsp_train.model_selection import choose_settings
from plsp_train.preparation import prepare
from plsp_train.runs import read_config, read_json

# Scores of a fold that are averaged, if it has them.
_FOLD_SCORES = ("micro_f1", "macro_f1", "micro_f1_last10", "macro_f1_last10", "covering_rate", "approximated_accuracy")


def train(config: Config, source: Source, out: Path, *, resume: bool = False, profile: bool = False) -> int:
    """Train one run into `out`; returns the exit code."""
    if is_main():
        remove_unfinished(out)
    reporter = Reporter(out, tensorboard=config.tensorboard) if is_main() else SilentReporter()
    for note in source.notes:
        reporter.line(note)
    data, candidates = prepare(config, source)
    _describe(config, data, candidates, out, reporter)
    if config.select and not resume:
        config = choose_settings(config, source, out, reporter)
        data, candidates = prepare(config, source)
    engine = Engine(config, data, candidates, out, reporter)
    if engine.held_out is not None:
        reporter.line(f"{len(engine.held_out.candidates)} of the training instances are held out for validation")
    if resume:
        engine.resume()
        reporter.line(f"resuming {out} after {engine.epochs_done} epochs and {engine.steps_done} steps")
    if is_main():
        write_json(out / "config.json", {**config.to_json(), "out": str(out)})
    try:
        if profile:
            reporter.line(f"trace written to {engine.profile()}")
        else:
            engine.run()
    except StopRun as stopped:
        reporter.line(f"stopped by {stopped}; continue with: python -m plsp_train --resume --out {out}")
        return stopped.exit_code
    except NonFiniteLoss as error:
        if is_main():
            saved = f" The last checkpoint in {out} is intact." if has_checkpoint(out) else ""
            print(f"plsp_train: {error}.{saved}", file=sys.stderr)
        return 1
    return 0


def _describe(config: Config, data: TrainTestData, candidates: CandidateSets, out: Path, reporter: Reporter) -> None:
    ambiguity = ambiguity_summary(candidates, data.train_labels)
    tested = "no test set" if data.test_inputs is None else f"{len(data.test_inputs)} test instances"
    covered = "" if ambiguity.true_label_share is None else f", {ambiguity.true_label_share:.1%} contain the true label"
    fold = f" (fold {config.fold} of {config.folds})" if config.fold else ""
    reporter.line(
        f"{data.name}{fold}: {len(data.train_inputs)} training instances, {tested}, {data.num_classes} classes; "
        f"candidate sets of {ambiguity.mean_size:.2f} labels on average "
        f"({ambiguity.min_size} to {ambiguity.max_size}){covered}"
    )
    if is_main():
        write_json(out / "ambiguity.json", ambiguity._asdict())


def train_folds(config: Config, source: Source, out: Path, *, resume: bool = False, profile: bool = False) -> int:
    """Train every fold into `out`/fold<i>; finished ones are kept, an interrupted one is resumed."""
    if profile:
        raise ValueError("--profile looks at a single run: add --fold 1")
    if is_main():
        write_json(out / "config.json", {**config.to_json(), "out": str(out)})
    for fold in range(1, config.folds + 1):
        directory = out / f"fold{fold}"
        if resume and (directory / "summary.json").exists():
            continue
        if is_main():
            directory.mkdir(exist_ok=True)
        interrupted = resume and has_checkpoint(directory)
        # What an interrupted fold has chosen by --select is part of its own settings.
        settings = read_config(directory) if interrupted else replace(config, fold=fold)
        exit_code = train(settings, source, directory, resume=interrupted)
        if exit_code:
            if is_main():
                print(
                    f"plsp_train: continue all folds with: python -m plsp_train --resume --out {out}", file=sys.stderr
                )
            return exit_code
    if is_main():
        summary = _summarise_folds(out, config.folds)
        write_json(out / "folds.json", summary)
        print(f"\nmean ± std over {config.folds} folds")
        for name, score in summary["scores"].items():
            print(f"{name:<22}  {score['mean']:.4f} ± {score['std']:.4f}")
        print(f"{'run':<22}  {out}")
    return 0


def _summarise_folds(out: Path, folds: int) -> dict[str, Any]:
    summaries = [read_json(out / f"fold{fold}" / "summary.json") for fold in range(1, folds + 1)]
    values = {name: [summary[name] for summary in summaries if name in summary] for name in _FOLD_SCORES}
    scores = {
        name: {"mean": fmean(given), "std": stdev(given), "folds": given} for name, given in values.items() if given
    }
    return {"folds": folds, "scores": scores}
