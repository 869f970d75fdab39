import dataclasses
import json

import pytest

from plsp_train.config import Config, build_config, read_config_file
from plsp_train.data import DATASETS, GENERATORS
from plsp_train.methods import METHODS
from plsp_train.models import MODELS
from plsp_train.registry import Registry
from plsp_train.rules import PRESETS


def test_every_data_set_has_a_valid_preset() -> None:
    assert set(PRESETS) == set(DATASETS)
    for dataset in DATASETS:
        assert build_config({"dataset": dataset}).dataset == dataset


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ("fmnist", ("lenet", 10, 250, 200, 256, 64, 256)),
        ("cifar10", ("densenet", 10, 250, 200, 256, 64, 256)),
        ("cifar100", ("resnet18", 50, 250, 800, 64, 16, 64)),
    ],
)
def test_presets_are_the_papers_table(dataset: str, expected: tuple[object, ...]) -> None:
    config = build_config({"dataset": dataset})
    found = (
        config.model,
        config.pretrain_epochs,
        config.epochs,
        config.iterations,
        config.pretrain_batch,
        config.labeled_batch,
        config.unlabeled_batch,
    )
    assert found == expected
    common = (config.ss_weight, config.strength, config.threshold, config.k, config.lr, config.weight_decay)
    assert common == (1.0, 0.01, 0.75, 200, 0.1, 1e-4)


def test_given_settings_override_the_preset() -> None:
    assert build_config({"dataset": "fmnist", "k": 7}).k == 7


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": -1}, "epochs must be at least 0, got -1"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": float("nan")}, "lr must be positive"),
        ({"threshold": 1.5}, r"threshold must lie in \[0, 1\]"),
        ({"recipe": "mine"}, "recipe must be one of paper, released, robust, got 'mine'"),
        ({"k": 2.5}, "k must be int"),
        ({"k": 10**30}, "k must be at most 2147483647"),
        ({"workers": 10**6}, "workers must be at most 1024"),
        ({"seed": 2**63}, "seed must be at most 9223372036854775807"),
        ({"k": True}, "k must be int"),
        ({"method": "mine"}, "unknown method 'mine': choose one of cc"),
        ({"candidates": "mine"}, "unknown candidate generator 'mine': choose one of uss, fps"),
        ({"folds": 1}, "folds must be at least 2"),
        ({"folds": 3, "fold": 4}, "fold at most folds"),
        ({"folds": 3, "test_fraction": 0.2}, "give one of them"),
        ({"learning_rate": 1}, "unknown setting 'learning_rate'"),
    ],
)
def test_invalid_settings_are_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_config(given)


@pytest.mark.parametrize(
    ("registry", "name"), [(METHODS, "cc"), (MODELS, "mlp"), (DATASETS, "digits"), (GENERATORS, "fps")]
)
def test_a_plugin_cannot_replace_a_built_in_name(registry: Registry, name: str) -> None:
    with pytest.raises(ValueError, match=f"named {name!r} already exists: choose another name"):
        registry.register(name)(object())


def test_files_in_both_formats_give_the_same_settings(tmp_path) -> None:
    (tmp_path / "a.toml").write_text('dataset = "fmnist"\nflip-probability = 0.7\n')
    (tmp_path / "a.json").write_text(json.dumps({"dataset": "fmnist", "flip_probability": 0.7}))
    assert read_config_file(str(tmp_path / "a.toml")) == read_config_file(str(tmp_path / "a.json"))


@pytest.mark.parametrize(
    ("name", "content"), [("a.toml", "k = "), ("a.json", "{"), ("a.json", "[1]"), ("a.ini", "k=1")]
)
def test_unreadable_files_are_named(tmp_path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"cannot read settings from .*{name}"):
        read_config_file(str(tmp_path / name))


def test_a_missing_settings_file_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"cannot read settings from .*none.toml: No such file or directory"):
        read_config_file(str(tmp_path / "none.toml"))


def test_settings_round_trip_through_json() -> None:
    config = build_config({"dataset": "cifar100", "semantic": False})
    assert Config(**json.loads(json.dumps(config.to_json()))) == config


def test_every_setting_has_a_help_text() -> None:
    assert all(setting.metadata["help"] for setting in dataclasses.fields(Config))
