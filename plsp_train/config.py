"""Every setting of a run, its default, and what each data set and method changes.

`Config` is the one place of a default; `PRESETS` holds the paper's table, `METHOD_PRESETS` what a method changes in it.
The command line and configuration files are derived from the fields below.
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plsp_train.data import DATASETS, GENERATORS, RECIPES
from plsp_train.models import MODELS

# Learning rates are those of the paper's grid that suit the digits best (docs/methods.md).
METHOD_PRESETS: dict[str, dict[str, Any]] = {
    "plsp": {},
    "df": {"lr": 0.05},
    "cc": {"lr": 0.05},
    "rc": {"lr": 0.1},
    "proden": {"lr": 0.1},
    "lws": {"lr": 0.1},
    "cavl": {"lr": 0.1},
    "pico": {"lr": 0.1},
}


def _setting(default: Any, group: str, help: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"group": group, "help": help, "choices": choices})


@dataclass(frozen=True)
class Config:
    """One run."""

    dataset: str = _setting("digits", "data", "data set to train on", DATASETS)
    data_root: str = _setting("data", "data", "folder of the data sets, or an .npz or .mat file")
    download: bool = _setting(False, "data", "fetch the data set if it is not there")
    candidates: str = _setting("fps", "data", "generator of the candidate sets", GENERATORS)
    flip_probability: float = _setting(0.5, "data", "probability with which fps, pair and noisy add a label")
    noise_rate: float = _setting(0.1, "data", "probability with which noisy drops the true label")
    validation_fraction: float = _setting(0.0, "data", "share of the training instances held out to choose an epoch by")

    method: str = _setting("plsp", "method", "how to learn from the candidate sets", tuple(METHOD_PRESETS))
    recipe: str = _setting("paper", "method", "the paper, or the variants of its released code", RECIPES)
    model: str = _setting("mlp", "method", "network", tuple(MODELS))
    lws_leverage: float = _setting(1.0, "method", "β of lws, weight of the labels outside the candidate set")
    k: int = _setting(200, "plsp", "most reliable instances per class that count as labelled")
    strength: float = _setting(0.01, "plsp", "λ0, largest strength of the semantic transformation")
    ss_weight: float = _setting(1.0, "plsp", "γ0, largest weight of the semi-supervised terms")
    threshold: float = _setting(0.75, "plsp", "τ0, largest confidence threshold")
    beta: float = _setting(math.pi**2 / 8, "plsp", "β, scale of the probit")
    semantic: bool = _setting(True, "plsp", "the semantic transformation; --no-semantic is the ablation 'w/o ST'")
    covariance: str = _setting("full", "plsp", "kind of the class covariances", ("full", "diagonal"))

    epochs: int = _setting(250, "training", "T, epochs; those of plsp are the semi-supervised ones")
    pretrain_epochs: int = _setting(10, "plsp", "T0, epochs of pre-training on all candidates")
    iterations: int = _setting(200, "plsp", "I, iterations of a semi-supervised epoch")
    pretrain_batch: int = _setting(256, "training", "batch size; of plsp, that of pre-training")
    labeled_batch: int = _setting(64, "plsp", "B_l, labelled instances of an iteration")
    unlabeled_batch: int = _setting(256, "plsp", "B_u, unlabelled instances of an iteration")
    lr: float = _setting(0.1, "training", "learning rate of the first epoch")
    weight_decay: float = _setting(1e-4, "training", "weight decay")
    seed: int = _setting(0, "training", "seed of candidate sets, initial weights, batches and augmentation")

    device: str = _setting("auto", "execution", "auto, cpu, cuda or cuda:i")
    amp: str = _setting("off", "execution", "automatic mixed precision", ("off", "bf16", "fp16"))
    compile: bool = _setting(False, "execution", "compile the network with torch.compile")
    impl: str = _setting("auto", "execution", "implementation of the loss", ("auto", "triton", "torch", "reference"))
    out: str = _setting(
        "", "execution", "folder of the run (default: a fresh one, runs/[<method>-]<data set>-<candidates>-seed<seed>)"
    )
    tensorboard: bool = _setting(False, "execution", "also write TensorBoard logs")

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            _check(setting, getattr(self, setting.name))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


# What may differ between the two parts of a resumed run: where things are, and what does not change the numbers.
FREE_ON_RESUME = ("out", "data_root", "download", "tensorboard", "device", "impl")

_POSITIVE = ("iterations", "pretrain_batch", "labeled_batch", "unlabeled_batch", "lr", "beta")
_UNIT = ("flip_probability", "noise_rate", "threshold")
# torch.Generator takes 64 bits; runs derive a few seeds from theirs.
_SEEDS = 2**63 - 1


def _check(setting: "dataclasses.Field[Any]", value: Any) -> None:
    name = setting.name
    kind: Any = type(setting.default)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{name} must be {kind.__name__}, got {value!r}")
    choices = setting.metadata["choices"]
    if choices and value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    if kind in (int, float):
        if not math.isfinite(value) or value < 0 or (name in _POSITIVE and value == 0):
            raise ValueError(f"{name} must be {'positive' if name in _POSITIVE else 'at least 0'}, got {value}")
        if name in _UNIT and value > 1:
            raise ValueError(f"{name} must lie in [0, 1], got {value}")
        if name == "validation_fraction" and value >= 1:
            raise ValueError(f"validation_fraction must lie in [0, 1), got {value}")
        if name == "seed" and value > _SEEDS:
            raise ValueError(f"seed must be below 2^63, got {value}")


_VECTORS: dict[str, Any] = {
    "model": "mlp",
    "k": 20,
    "epochs": 50,
    "iterations": 20,
    "pretrain_batch": 128,
    "lr": 0.05,
}

PRESETS: dict[str, dict[str, Any]] = {
    "digits": {
        "model": "mlp",
        "k": 50,
        "epochs": 40,
        "iterations": 40,
        "pretrain_batch": 64,
        "labeled_batch": 32,
        "unlabeled_batch": 128,
        "lr": 0.05,
    },
    "fmnist": {"model": "lenet"},
    "cifar10": {"model": "densenet"},
    "cifar100": {
        "model": "resnet18",
        "flip_probability": 0.1,
        "pretrain_epochs": 50,
        "iterations": 800,
        "pretrain_batch": 64,
        "labeled_batch": 16,
        "unlabeled_batch": 64,
    },
    "lost": _VECTORS,
    "MSRCv2": _VECTORS,
    "BirdSong": _VECTORS,
}


def build_config(given: dict[str, Any]) -> Config:
    """The preset of the data set, changed by that of the method, changed by what was given."""
    names = {setting.name for setting in dataclasses.fields(Config)}
    unknown = sorted(set(given) - names)
    if unknown:
        raise ValueError(f"unknown setting {unknown[0]!r}: choose from {', '.join(sorted(names))}")
    dataset, method = given.get("dataset", Config.dataset), given.get("method", Config.method)
    return Config(**{**PRESETS.get(dataset, {}), **METHOD_PRESETS.get(method, {}), **given})


def read_config_file(path: str) -> dict[str, Any]:
    """Settings from a .toml or .json file."""
    file = Path(path)
    text = file.read_text(encoding="utf-8")
    try:
        if file.suffix == ".json":
            content = json.loads(text)
        elif file.suffix == ".toml":
            content = _parse_toml(text)
        else:
            raise ValueError("its name must end in .toml or .json")
    except ValueError as error:
        raise ValueError(f"cannot read settings from {path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"cannot read settings from {path}: it must hold a table of names and values")
    return {name.replace("-", "_"): value for name, value in content.items()}


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[import-not-found, no-redef]
    return tomllib.loads(text)
