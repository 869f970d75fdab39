"""The command line: `python -m plsp_train`."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plsp_train.command import Parser, explain_import
from plsp_train.config import FREE_ON_RESUME, Config, build_config, check_names, import_plugins, read_config_file
from plsp_train.data import DATASETS, Source
from plsp_train.determinism import deterministic_algorithms
from plsp_train.distributed import (
    RankLost,
    agree,
    is_main,
    launch_id,
    one_rank_first,
    pick_device,
    print_error,
    process_group,
)
from plsp_train.files import locked, write_atomically
from plsp_train.methods import METHODS
from plsp_train.preparation import load_source, unused_data_settings
from plsp_train.rules import PRESETS
from plsp_train.runs import ambiguity_of, dataset_name, differences, holds_run, read_config, settings_that_matter
from plsp_train.training import train, train_folds

_GROUPS = {
    "data": "data and its ambiguity",
    "method": "method",
    **{name: f"only for method {name}" for name in METHODS},
    "training": "training",
    "execution": "execution and output",
}
_EPILOG = """examples:
  python -m plsp_train                                      digits, seconds on a CPU
  python -m plsp_train --dataset images.npz                 your own data: .npz, .mat, .csv, .parquet
  python -m plsp_train --dataset photos/                    a folder of images with labels.csv
  python -m plsp_train --dataset lost.mat --folds 10 --select model,normalise
  python -m plsp_train --dataset fmnist --flip-probability 0.7 --epochs 40
  python -m plsp_train --method proden                      one of the baselines
  python -m plsp_train --dataset cifar100 --download --device cuda --amp bf16
  python -m plsp_train --resume --out runs/digits-fps0.5-seed0
  torchrun --standalone --nproc-per-node 2 -m plsp_train --dataset cifar100 --data-root data
"""


class _Parser(Parser):
    def tell(self, text: str) -> None:
        """Once, however many ranks meet the error."""
        print_error(text)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m plsp_train",
        description="Train a classifier from partial labels with PLSP or one of its baselines. "
        "Without arguments: PLSP on scikit-learn's digits.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    groups = {name: parser.add_argument_group(title) for name, title in _GROUPS.items()}
    groups["method"].description = "\n".join(f"{name:<12}{method.help}" for name, method in METHODS.items())
    for setting in dataclasses.fields(Config):
        _add_setting(groups[setting.metadata["group"]], setting)
    run = parser.add_argument_group("run")
    run.add_argument("--config", metavar="FILE", help="read settings from a .toml or .json file; options override it")
    run.add_argument("--print-config", action="store_true", help="print the settings of the run as JSON and exit")
    run.add_argument("--resume", action="store_true", help="continue the run in --out from its checkpoint")
    run.add_argument("--profile", action="store_true", help="write a torch.profiler trace of a few steps and exit")
    return parser


def _add_setting(group: Any, setting: "dataclasses.Field[Any]") -> None:
    flag = "--" + setting.name.replace("_", "-")
    help = setting.metadata["help"]
    if setting.metadata["examples"]:
        help += f": {', '.join(setting.metadata['examples'])}"
    if any(setting.name in preset for preset in PRESETS.values()):
        help += " (default: by data set)"
    elif setting.default != "":
        help += f" (default: {setting.default})"
    # SUPPRESS: an option that is not given is absent, so that presets and files apply.
    if isinstance(setting.default, bool):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help)
        return
    options: dict[str, Any] = {"type": type(setting.default), "default": argparse.SUPPRESS}
    if setting.metadata["choices"]:  # checked by Config, whose error is one line
        options["metavar"] = f"{{{','.join(setting.metadata['choices'])}}}"
    else:
        options["metavar"] = {int: "N", float: "X"}.get(type(setting.default), setting.name.upper())
    group.add_argument(flag, help=help, **options)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 invalid input, 130 or 143 stopped by a signal."""
    options = vars(build_parser().parse_args(argv))
    file, print_config, resume, profile = (
        options.pop(name) for name in ("config", "print_config", "resume", "profile")
    )
    try:
        given = (read_config_file(file) if file else {}) | options
        if resume:
            given = _resumed_settings(given)
        config = build_config(given)  # refuses invalid settings before anything is loaded
        if print_config and config.dataset in DATASETS:
            print(json.dumps(config.to_json(), indent=2))
            return 0
        with process_group(pick_device(config.device)):
            with one_rank_first():
                source = load_source(given)
            config = build_config(given, source)
            if print_config:
                print(json.dumps(config.to_json(), indent=2))
                return 0
            if is_main():
                _warn_of_unused(given, config, source)
            with deterministic_algorithms(config.deterministic):
                return _run(config, source, given, resume, profile)
    except RankLost as error:
        print_error(f"plsp_train: {error}", is_consequence=True)
        return 1
    except ImportError as error:
        print_error(f"plsp_train: error: {explain_import(error)}")
        return 2
    except (ValueError, OSError) as error:
        print_error(f"plsp_train: error: {error}")
        return 2


def _warn_of_unused(given: dict[str, Any], config: Config, source: Source) -> None:
    """Name every setting that was changed and does not matter to this run."""
    defaults = build_config({"dataset": config.dataset, "method": config.method}, source).to_json()
    unused = given.keys() - settings_that_matter(config).keys() - {*FREE_ON_RESUME, "candidates"}
    unused |= given.keys() & unused_data_settings(config, source)
    for name in sorted(name for name in unused if given[name] != defaults[name]):
        flag, drawn = name.replace("_", "-"), str(ambiguity_of(config)) or "own candidate sets"
        message = f"--{flag} has no effect on this run (method {config.method}, {config.dataset}, {drawn})"
        print(f"plsp_train: warning: {message}", file=sys.stderr)


def _run(config: Config, source: Source, given: dict[str, Any], resume: bool, profile: bool) -> int:
    if launch_id() and not config.out:
        raise ValueError("torchrun --max-restarts needs --out, the directory from which a restarted run resumes")
    if not is_main():  # writes nothing; --resume reads from --out
        return _train(config, source, given, _Start(Path(config.out), resume, profile))
    out = Path(config.out) if config.out else _fresh_directory(config)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        is_restart = not resume and _is_restart(out)
        if not resume and not is_restart and holds_run(out):
            raise ValueError(f"{out} already holds a run: add --resume to continue it, or choose another --out")
        return _train(config, source, given, _Start(out, resume, profile, is_restart))


class _Start(NamedTuple):
    out: Path
    resume: bool
    profile: bool
    is_restart: bool = False


def _train(config: Config, source: Source, given: dict[str, Any], start: _Start) -> int:
    resume = start.resume
    if any(agree(start.is_restart)):  # which rank 0 knows
        config, resume = build_config(_resumed_settings(given), source), True
    run = train_folds if config.folds and not config.fold else train
    return run(config, source, start.out, resume=resume, profile=start.profile)


def _resumed_settings(given: dict[str, Any]) -> dict[str, Any]:
    """The settings of the run in --out, which the given ones must not contradict."""
    check_names(given)
    import_plugins(given)
    out = given.get("out")
    if not out:
        raise ValueError("--resume needs --out, the directory of the run to continue")
    if not Path(out).is_dir():
        raise ValueError(f"{out} holds no run to resume: there is no such directory")
    if not holds_run(Path(out)):
        raise ValueError(f"{out} has no checkpoint yet: run the same command again without --resume")
    stored = read_config(Path(out)).to_json()
    changed = differences(stored, given, [name for name in given if name in stored and name not in FREE_ON_RESUME])
    if changed:
        raise ValueError(f"cannot resume {out} with other settings: {changed}")
    return stored | given


def _is_restart(out: Path) -> bool:
    """Whether an earlier attempt of this launch of torchrun has written a checkpoint here. The first leaves a note."""
    launch, note = launch_id(), out / ".launch"
    is_restart = bool(launch) and holds_run(out) and note.exists() and note.read_text(encoding="utf-8") == launch
    if launch and not holds_run(out):
        write_atomically(note, launch.encode())
    return is_restart


def _fresh_directory(config: Config) -> Path:
    """Create runs/<name>, or runs/<name>-2 and so on if it exists."""
    method = "" if config.method == Config.method else config.method.replace(":", ".")
    name = "-".join(filter(None, [method, dataset_name(config), str(ambiguity_of(config)), f"seed{config.seed}"]))
    Path("runs").mkdir(exist_ok=True)
    directory, number = Path("runs") / name, 2
    while True:
        try:
            directory.mkdir()  # atomic: two runs that start together get different directories
            return directory
        except FileExistsError:
            directory, number = Path("runs") / f"{name}-{number}", number + 1
