"""Every setting of a run, its default, and where defaults come from.

Defaults are in `Config`. For a benchmark set `PRESETS`, the paper's table, overrides them; for user data the rules of
`rules.py` do, from their size and kind; then `defaults` of a method. The command line and configuration files are
derived from the fields below.
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plsp_kernels.dispatch import IMPLEMENTATIONS
from plsp_train.data import (
    BUILT_IN_GENERATORS,
    DATASETS,
    GENERATORS,
    NORMALISATIONS,
    REAL_PARTIAL_LABEL_SETS,
    RECIPES,
    Source,
)
from plsp_train.methods import LWS_SURROGATES, METHODS, Method
from plsp_train.methods.plsp import SCHEDULES
from plsp_train.models import MODELS, find_builder
from plsp_train.registry import import_plugin
from plsp_train.rules import OWN_CANDIDATES, preset_for

METHOD_RECIPES = tuple(recipe for method in METHODS.values() for recipe in method.recipes)


def _setting(default: Any, group: str, help: str, choices: tuple[str, ...] = (), examples: tuple[str, ...] = ()) -> Any:
    """Choices are all that a setting takes; examples are names it knows, beside those of the user's own."""
    metadata = {"group": group, "help": help, "choices": choices, "examples": examples}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """The settings of one run."""

    dataset: str = _setting(
        "digits", "data", "a benchmark set, a file (.npz, .mat, .csv, .parquet) or a folder", examples=tuple(DATASETS)
    )
    data_root: str = _setting("data", "data", "directory of the benchmark sets, or the file of one (.npz, .mat)")
    download: bool = _setting(False, "data", "download the benchmark set if it is missing")
    candidates: str = _setting(
        "fps",
        "data",
        "generator of candidate sets; own keeps those that come with the data",
        examples=(OWN_CANDIDATES, *BUILT_IN_GENERATORS),
    )
    flip_probability: float = _setting(0.5, "data", "probability that fps, pair, hierarchical or noisy add a label")
    noise_rate: float = _setting(0.1, "data", "probability that noisy drops the true label")
    annotators: str = _setting(
        "union",
        "data",
        "candidates from several annotators: all their answers, or the most frequent",
        ("union", "vote"),
    )
    image_size: int = _setting(0, "data", "side to which a folder's images are resized; 0: chosen from their sizes")
    normalise: str = _setting("feature", "data", "scale vectors per feature, by one factor, or not", NORMALISATIONS)
    horizontal_flip: bool = _setting(True, "data", "mirror your own images at random when augmenting")
    test_fraction: float = _setting(0.0, "data", "fraction of the instances to test on; needs true labels")
    folds: int = _setting(0, "data", "number of folds of a cross-validation; 0: none")
    fold: int = _setting(0, "data", "train a single fold, from 1; 0: all of them")
    split_seed: int = _setting(0, "data", "seed of the split into training and test instances or folds")
    validation_fraction: float = _setting(0.0, "data", "fraction of the training instances held out to select an epoch")

    method: str = _setting("plsp", "method", "learning method", examples=tuple(METHODS))
    recipe: str = _setting(
        "paper",
        "method",
        "the paper, its released code where they differ, or plsp's own variant",
        (*RECIPES, *METHOD_RECIPES),
    )
    model: str = _setting(
        "mlp", "method", "network, also torchvision:NAME, timm:NAME or module:function", examples=tuple(MODELS)
    )
    pretrained: str = _setting("", "method", "file of initial weights for the network (state_dict or .safetensors)")
    select: str = _setting(
        "", "method", "settings to choose by held-out candidate sets before training, such as model,normalise,lr"
    )
    lws_surrogate: str = _setting(
        "cross-entropy",
        "lws",
        "loss of each label; sigmoid needs a network with batch normalisation",
        tuple(LWS_SURROGATES),
    )
    lws_leverage: float = _setting(1.0, "lws", "β, weight of the labels outside the candidate set")
    cavl_warm_up: float = _setting(0.25, "cavl", "share of the epochs with uniform confidences; 0: as published")
    k: int = _setting(200, "plsp", "most reliable instances per class, which are treated as labelled")
    strength: float = _setting(0.01, "plsp", "λ0, maximum strength of the semantic transformation")
    ss_weight: float = _setting(1.0, "plsp", "γ0, maximum weight of the semi-supervised terms")
    threshold: float = _setting(0.75, "plsp", "τ0, maximum confidence threshold")
    beta: float = _setting(math.pi**2 / 8, "plsp", "β, scale of the probit")
    semantic: bool = _setting(True, "plsp", "semantic transformation; --no-semantic is the ablation 'w/o ST'")
    covariance: str = _setting("full", "plsp", "class covariances", ("full", "diagonal"))
    blend_likelihood: bool = _setting(
        False, "plsp", "blend the pre-training loss, from epoch to epoch, into the likelihood of the candidate sets"
    )
    schedule: str = _setting("step", "plsp", "learning rate: the paper's steps, or a cosine to zero", SCHEDULES)
    average_epochs: float = _setting(
        0.0, "plsp", "length in epochs of a moving average of the weights, used to score, select and test; 0: none"
    )
    align_sizes: bool = _setting(
        False, "plsp", "correct the selection for classes predicted less often than the candidate sets suggest"
    )
    bound_ss_weight: bool = _setting(
        False, "plsp", "cap γ so that wrong labels cannot sustain themselves at this degree of ambiguity"
    )

    epochs: int = _setting(250, "training", "T, epochs; for plsp, those of semi-supervised training")
    pretrain_epochs: int = _setting(10, "plsp", "T0, epochs of pre-training on all candidates")
    iterations: int = _setting(200, "plsp", "I, iterations per semi-supervised epoch")
    pretrain_batch: int = _setting(256, "plsp", "batch size of pre-training")
    labeled_batch: int = _setting(64, "plsp", "B_l, labelled instances per iteration")
    unlabeled_batch: int = _setting(256, "plsp", "B_u, unlabelled instances per iteration")
    batch_size: int = _setting(256, "training", "batch size of the methods without pre-training")
    augment_weak: bool = _setting(True, "training", "augment weak views; otherwise they are the unmodified instances")
    lr: float = _setting(0.1, "training", "initial learning rate")
    weight_decay: float = _setting(1e-4, "training", "weight decay")
    seed: int = _setting(0, "training", "seed of candidate sets, initial weights, batches and augmentation")

    device: str = _setting("auto", "execution", "auto, cpu, cuda or cuda:i")
    amp: str = _setting("off", "execution", "automatic mixed precision", ("off", "bf16", "fp16"))
    compile: bool = _setting(False, "execution", "compile the network with torch.compile")
    deterministic: bool = _setting(False, "execution", "use only deterministic algorithms, or stop with an error")
    impl: str = _setting("auto", "execution", "implementation of the loss", IMPLEMENTATIONS)
    out: str = _setting("", "execution", "output directory (default: a new one in runs, named after the settings)")
    tensorboard: bool = _setting(False, "execution", "also write TensorBoard logs")
    workers: int = _setting(0, "execution", "processes that decode or read a folder's images; 0: one per core")
    plugin: str = _setting(
        "", "execution", "modules to import first, separated by commas, which register your own names"
    )

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            _check(setting, getattr(self, setting.name))
        if self.folds == 1 or self.fold > self.folds:
            raise ValueError(
                f"folds must be at least 2, and fold at most folds, got folds {self.folds}, fold {self.fold}"
            )
        if self.folds and self.test_fraction:
            raise ValueError("folds and test_fraction both decide what to test on: give one of them")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


# May change on resume: locations, and what does not affect the numbers beyond rounding.
FREE_ON_RESUME = (
    *("out", "data_root", "download", "tensorboard"),
    *("device", "deterministic", "impl", "workers", "plugin"),
)

_POSITIVE = ("iterations", "batch_size", "pretrain_batch", "labeled_batch", "unlabeled_batch", "lr", "beta")
_UNIT = ("flip_probability", "noise_rate", "threshold", "cavl_warm_up")
# torch.Generator takes 64 bits, and a run derives further seeds from its own. All workers are started at once.
_LARGEST = {"seed": 2**63 - 1, "split_seed": 2**63 - 1, "workers": 1024}
_LARGEST_COUNT = 2**31 - 1


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
        if name in ("validation_fraction", "test_fraction") and value >= 1:
            raise ValueError(f"{name} must lie in [0, 1), got {value}")
        largest = _LARGEST.get(name, _LARGEST_COUNT)
        if kind is int and value > largest:
            raise ValueError(f"{name} must be at most {largest}, got {value}")


def build_config(given: dict[str, Any], source: Source | None = None) -> Config:
    """Defaults, overridden by those of the data and the method, overridden by the given settings.

    The source is that of user data, whose defaults depend on their size and kind.
    """
    names = {setting.name for setting in dataclasses.fields(Config)}
    unknown = sorted(set(given) - names)
    if unknown:
        raise ValueError(f"unknown setting {unknown[0]!r}: choose from {', '.join(sorted(names))}")
    check_names(given)
    import_plugins(given)
    preset = preset_for(given.get("dataset", Config.dataset), source)
    if given.get("folds"):  # every instance is in a fold: nothing else needs to be held out
        preset = {name: value for name, value in preset.items() if name not in ("test_fraction", "validation_fraction")}
    method = METHODS[given.get("method", Config.method)]
    if preset.get("recipe") not in method.recipes:
        preset = {name: value for name, value in preset.items() if name != "recipe"}
    recipe = given.get("recipe", preset.get("recipe"))
    config = Config(**{**preset, **_defaults_of(method, recipe), **given})
    if config.candidates not in (OWN_CANDIDATES, *BUILT_IN_GENERATORS):
        GENERATORS[config.candidates]  # raises for unknown names
    find_builder(config.model)
    return config


def _defaults_of(method: type[Method], recipe: Any) -> dict[str, Any]:
    """Every method can follow the paper or the released code in its data; other recipes belong to some method."""
    if recipe in METHOD_RECIPES and recipe not in method.recipes:
        raise ValueError(f"method {method.name} has no recipe {recipe!r}: choose {' or '.join(RECIPES)}")
    return method.recipes[recipe] if recipe in METHOD_RECIPES else method.defaults


def check_names(given: dict[str, Any]) -> None:
    """What is looked up before `Config` checks all types."""
    for name in ("dataset", "method", "plugin", "out"):
        if not isinstance(given.get(name, ""), str):
            raise ValueError(f"{name} must be str, got {given[name]!r}")


# What runs did that were stored before these settings existed.
_FORMER_BEHAVIOUR = {"lws_surrogate": "sigmoid", "cavl_warm_up": 0.0, "augment_weak": True}


def stored_config(stored: dict[str, Any]) -> Config:
    """The settings of a run from its file. Names of someone else's methods and networks are not looked up."""
    names = {setting.name for setting in dataclasses.fields(Config)}
    unknown = sorted(set(stored) - names)
    if unknown:
        raise ValueError(f"unknown setting {unknown[0]!r}")
    check_names(stored)
    return Config(**{**preset_for(stored.get("dataset", Config.dataset), None), **_FORMER_BEHAVIOUR, **stored})


def import_plugins(given: dict[str, Any]) -> None:
    for module in filter(None, str(given.get("plugin", "")).split(",")):
        import_plugin(module.strip())


def read_config_file(path: str) -> dict[str, Any]:
    """Settings from a .toml or .json file."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            content = json.loads(text)
        elif file.suffix == ".toml":
            content = _parse_toml(text)
        else:
            raise ValueError("its name must end in .toml or .json")
    except OSError as error:
        raise ValueError(f"cannot read settings from {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # the latter for brackets that are nested very deeply
        raise ValueError(f"cannot read settings from {path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"cannot read settings from {path}: it must hold a table of names and values")
    return current_settings({name.replace("-", "_"): value for name, value in content.items()})


def current_settings(stored: dict[str, Any]) -> dict[str, Any]:
    """Settings from a file of any version.

    pretrain_batch used to be the batch size of every method, and the generator was ignored for real partial-label data.
    Some settings are gone: how fast γ rises, two forms of pre-training, and a selection that remembers.
    """
    # With the values that now hold for every run.
    gone = {"ss_ramp": 1.0, "pretrain_loss": "mean", "likelihood_share": 0.0, "selection_memory": 0.0}
    stored = {name: value for name, value in stored.items() if name not in gone or value != gone[name]}
    if "pretrain_batch" in stored and "batch_size" not in stored:
        stored = {**stored, "batch_size": stored["pretrain_batch"]}
    if stored.get("dataset") in REAL_PARTIAL_LABEL_SETS:
        stored = {**stored, "candidates": OWN_CANDIDATES}
    return stored


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[import-not-found, no-redef]
    return tomllib.loads(text)
