"""The command line: `python -m plsp_train`."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plsp_train.checkpoint import write_json
from plsp_train.config import FREE_ON_RESUME, PRESETS, Config, build_config, read_config_file
from plsp_train.data import REAL_PARTIAL_LABEL_SETS, TrainTestData, ambiguity_summary, load_dataset
from plsp_train.distributed import RankLost, is_main, one_rank_first, process_group
from plsp_train.engine import Engine, NonFiniteLoss, StopRun, draw_candidates, pick_device
from plsp_train.report import Reporter, SilentReporter
from plsp_train.runs import sole_use

_GROUPS = {
    "data": "data and its ambiguity",
    "method": "method",
    "plsp": "method plsp alone",
    "training": "training",
    "execution": "execution and output",
}
_EPILOG = """examples:
  python -m plsp_train                                      digits, some seconds on a CPU
  python -m plsp_train --dataset fmnist --flip-probability 0.7 --epochs 40
  python -m plsp_train --method proden                      one of the methods that plsp is compared with
  python -m plsp_train --dataset cifar100 --download --device cuda --amp bf16
  python -m plsp_train --resume --out runs/digits-fps0.5-seed0
  torchrun --nproc-per-node 2 -m plsp_train --dataset cifar100 --data-root data
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m plsp_train",
        description="Train a classifier from partial labels with PLSP or one of the methods it is compared with. "
        "Without arguments: PLSP on scikit-learn's digits.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    groups = {name: parser.add_argument_group(title) for name, title in _GROUPS.items()}
    for setting in dataclasses.fields(Config):
        _add_setting(groups[setting.metadata["group"]], setting)
    run = parser.add_argument_group("run")
    run.add_argument("--config", metavar="FILE", help="read settings from a .toml or .json file; the command line wins")
    run.add_argument("--print-config", action="store_true", help="print the settings of the run as JSON and stop")
    run.add_argument("--resume", action="store_true", help="continue the run in --out from its checkpoint")
    run.add_argument("--profile", action="store_true", help="write a torch.profiler trace of a few steps and stop")
    return parser


def _add_setting(group: Any, setting: "dataclasses.Field[Any]") -> None:
    flag = "--" + setting.name.replace("_", "-")
    help = setting.metadata["help"]
    if any(setting.name in preset for preset in PRESETS.values()):
        help += " (default: by data set)"
    elif setting.default != "":
        help += f" (default: {setting.default})"
    # argparse.SUPPRESS: only what was typed is taken, so that presets and files can speak first.
    if isinstance(setting.default, bool):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help)
        return
    options: dict[str, Any] = {"type": type(setting.default), "default": argparse.SUPPRESS}
    if setting.metadata["choices"]:  # checked by Config, which says it in one line
        options["metavar"] = f"{{{','.join(setting.metadata['choices'])}}}"
    else:
        options["metavar"] = {int: "N", float: "X"}.get(type(setting.default), setting.name.upper())
    group.add_argument(flag, help=help, **options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0 done, 2 wrong input, 1 failed, 130 or 143 stopped by a signal."""
    options = vars(build_parser().parse_args(argv))
    file, print_config, resume, profile = (
        options.pop(name) for name in ("config", "print_config", "resume", "profile")
    )
    try:
        given = (read_config_file(file) if file else {}) | options
        if print_config:
            print(json.dumps(build_config(given).to_json(), indent=2))
            return 0
        config = _resumed_config(given) if resume else build_config(given)
        with process_group(pick_device(config.device)):
            return _run(config, resume, profile)
    except RankLost as error:
        print(f"plsp_train: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError, ImportError) as error:
        print(f"plsp_train: error: {error}", file=sys.stderr)
        return 2


def _run(config: Config, resume: bool, profile: bool) -> int:
    with one_rank_first():
        data = load_dataset(config.dataset, config.data_root, download=config.download, recipe=config.recipe)
    if not is_main():  # writes nothing, and reads from the folder that --resume names
        return _train(config, data, Path(config.out), resume, profile)
    out = Path(config.out) if config.out else _free_folder(config)
    out.mkdir(parents=True, exist_ok=True)
    with sole_use(out):
        if not resume and (out / "checkpoint.pt").exists():
            raise ValueError(f"{out} already holds a run: continue it with --resume, or choose another --out")
        return _train(config, data, out, resume, profile)


def _train(config: Config, data: TrainTestData, out: Path, resume: bool, profile: bool) -> int:
    candidates = draw_candidates(config, data)
    reporter = Reporter(tensorboard=config.tensorboard) if is_main() else SilentReporter()
    ambiguity = ambiguity_summary(candidates, data.train_labels)
    reporter.line(
        f"{config.dataset}: {len(data.train_labels)} training and {len(data.test_labels)} test instances, "
        f"{data.num_classes} classes; candidate sets of {ambiguity.mean_size:.2f} labels on average "
        f"({ambiguity.min_size} to {ambiguity.max_size}), {ambiguity.true_label_share:.1%} with the true one"
    )
    engine = Engine(config, data, candidates, out, reporter)
    if engine.held_out is not None:
        reporter.line(f"{len(engine.held_out.candidates)} of the training instances are held out for validation")
    if resume:
        engine.resume()
        reporter.line(f"resuming {out} after {engine.epochs_done} epochs and {engine.steps_done} steps")
    if is_main():
        write_json(out / "config.json", {**config.to_json(), "out": str(out)})
        write_json(out / "ambiguity.json", ambiguity._asdict())
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
            print(f"plsp_train: {error}; try a smaller --lr. The last checkpoint in {out} is intact.", file=sys.stderr)
        return 1
    return 0


def _resumed_config(given: dict[str, Any]) -> Config:
    """The settings of the run in --out; whatever else was given must not contradict them."""
    out = given.get("out")
    if not out:
        raise ValueError("--resume needs --out, the folder of the run to continue")
    path = Path(out) / "config.json"
    if not (Path(out) / "checkpoint.pt").exists() or not path.exists():
        raise ValueError(f"{out} holds no run to resume: it has no checkpoint.pt and config.json")
    # Through Config, so that a setting newer than the run has the value that the run was made with.
    stored = build_config(json.loads(path.read_text(encoding="utf-8"))).to_json()
    changed = [
        f"{name} was {stored[name]!r}, now {value!r}"
        for name, value in given.items()
        if name not in FREE_ON_RESUME and name in stored and stored[name] != value
    ]
    if changed:
        raise ValueError(f"cannot resume {out} with other settings: {'; '.join(changed)}")
    return build_config(stored | given)


def _free_folder(config: Config) -> Path:
    """A fresh folder runs/<name>, or runs/<name>-2 and so on if there already is such a run."""
    drawn = f"-{config.candidates}{config.flip_probability:g}" if config.candidates != "uss" else "-uss"
    method = "" if config.method == Config.method else f"{config.method}-"
    name = f"{method}{config.dataset}{'' if config.dataset in REAL_PARTIAL_LABEL_SETS else drawn}-seed{config.seed}"
    Path("runs").mkdir(exist_ok=True)
    folder, number = Path("runs") / name, 2
    while True:
        try:
            folder.mkdir()  # by making it: a run that starts at the same moment gets another one
            return folder
        except FileExistsError:
            folder, number = Path("runs") / f"{name}-{number}", number + 1
