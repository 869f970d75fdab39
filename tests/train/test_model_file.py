"""model.pt: what is saved is rebuilt, and a file can neither execute nor import code."""

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plsp_train.checkpoint import save_tensors
from plsp_train.model_file import ModelFile, load_model, read_model_file, save_model
from plsp_train.models import as_network, build_model
from small_results import image_model, vector_model


def saved(path: Path, model_file: ModelFile) -> Path:
    save_model(path, model_file)
    return path


def refused(path: Path, **given: Any) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as raised:
        load_model(path, **given)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)
    return str(raised.value)


def test_model_file_survives_saving(tmp_path: Path) -> None:
    for number, model_file in enumerate((vector_model(), image_model())):
        found = read_model_file(saved(tmp_path / f"{number}.pt", model_file))
        assert replace(found, state_dict={}) == replace(model_file, state_dict={})
        assert found.state_dict.keys() == model_file.state_dict.keys()
        assert all(torch.equal(found.state_dict[name], value) for name, value in model_file.state_dict.items())


def test_file_holds_plain_values_only(tmp_path: Path) -> None:
    content = torch.load(saved(tmp_path / "model.pt", vector_model()), weights_only=True)
    assert content["format"] == 2
    assert content["input_shape"] == [4]
    assert content["class_names"] == ["cat", "dog", "owl"]


def test_vectors_are_normalised_by_feature(tmp_path: Path) -> None:
    model_file = vector_model()
    model = load_model(saved(tmp_path / "model.pt", model_file))
    inputs = torch.randn(7, 4)
    network = build_model("mlp", (4,), 3).eval()
    network.load_state_dict(model_file.state_dict)
    with torch.no_grad():
        normalised = (inputs - torch.tensor(model_file.mean)) / torch.tensor(model_file.std)
        torch.testing.assert_close(model.logits(inputs), network(normalised))
        torch.testing.assert_close(model.features(inputs), network.features(normalised))


def test_images_are_normalised_by_channel(tmp_path: Path) -> None:
    model_file = image_model()
    model = load_model(saved(tmp_path / "model.pt", model_file))
    images = torch.randint(256, (5, 1, 28, 28), dtype=torch.uint8)
    network = build_model("lenet", (1, 28, 28), 3).eval()
    network.load_state_dict(model_file.state_dict)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(images), network((images / 255 - 0.25) / 0.5), rtol=1e-4, atol=1e-5)


def test_batches_do_not_change_the_result(tmp_path: Path) -> None:
    model = load_model(saved(tmp_path / "model.pt", vector_model()))
    inputs = torch.randn(11, 4)
    assert [len(part.logits) for part in model.outputs(inputs, batch_size=4)] == [4, 4, 3]
    torch.testing.assert_close(model.logits(inputs, batch_size=4), model.logits(inputs))
    assert not model.logits(inputs).requires_grad


@pytest.mark.parametrize(
    "inputs",
    [torch.zeros(2, 5), torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(4)],
    ids=["width", "dtype", "rank"],
)
def test_inputs_of_another_kind_are_refused(tmp_path: Path, inputs: torch.Tensor) -> None:
    model = load_model(saved(tmp_path / "model.pt", vector_model()))
    with pytest.raises(ValueError, match=r"inputs must be float \(n, 4\), got"):
        model.logits(inputs)


# -------------------------------------------------------------------------------------------------------- invalid files


def test_missing_file(tmp_path: Path) -> None:
    assert "no model file" in refused(tmp_path / "model.pt")


@pytest.mark.parametrize("content", [b"", b"no zip file", b"PK\x03\x04 cut off"])
def test_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    assert "not a model file" in refused(path)


def test_truncated_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.pt", vector_model())
    path.write_bytes(path.read_bytes()[:-200])
    assert "damaged" in refused(path)


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("executed"),))


def test_file_cannot_execute_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.pt"
    save_tensors(path, {"format": 2, "state_dict": Malicious()})
    assert "not a model file" in refused(path)
    assert not Path("executed").exists()


def test_checkpoint_and_old_model_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    save_tensors(path, {"epochs_done": 3})
    assert "holds no state_dict" in refused(path)
    save_tensors(path, {"model": "mlp", "input_shape": [4], "num_classes": 3, "state_dict": {}})
    assert "format 1" in refused(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mean", [0.0]),
        ("std", [1.0, 1.0, 0.0, 1.0]),
        ("mean", [0.0, 1.0, 2.0, float("nan")]),
        ("class_names", []),
        ("class_names", "abc"),
        ("input_shape", [2, 2]),
        ("input_shape", [0]),
        ("feature_names", ["a"]),
        ("model", 3),
        ("state_dict", {"weight": 1.0}),
    ],
)
def test_error_names_the_invalid_key(tmp_path: Path, key: str, value: Any) -> None:
    path = saved(tmp_path / "model.pt", vector_model())
    content = torch.load(path, weights_only=True)
    save_tensors(path, content | {key: value})
    assert key in refused(path)


def test_error_names_the_missing_key(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.pt", vector_model())
    content = torch.load(path, weights_only=True)
    del content["mean"]
    save_tensors(path, content)
    assert "mean" in refused(path)


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    assert "do not fit the network 'mlp'" in refused(
        saved(tmp_path / "model.pt", vector_model(class_names=("cat", "dog")))
    )


# ------------------------------------------------------------------------------------------------------ user networks


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "networks_of_mine.py").write_text("from plsp_train.models import MLP as build\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "networks_of_mine", raising=False)
    return "networks_of_mine"


def test_only_allowed_plugins_are_imported(tmp_path: Path, plugin: str) -> None:
    path = saved(tmp_path / "model.pt", vector_model(model=f"{plugin}:build"))
    assert f"allow its import with --plugin {plugin}" in refused(path)
    assert "allow its import" in refused(path, plugins=["json"]), "another plugin allows nothing"
    assert plugin not in sys.modules
    assert load_model(path, plugins=[plugin]).logits(torch.zeros(2, 4)).shape == (2, 3)


def test_network_of_a_library_needs_no_plugin(tmp_path: Path) -> None:
    network = build_model("torchvision:squeezenet1_1", (3, 32, 32), 2)
    shape = {"input_shape": (3, 32, 32), "class_names": ("a", "b"), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    model_file = ModelFile("torchvision:squeezenet1_1", **shape, state_dict=network.state_dict())
    model = load_model(saved(tmp_path / "model.pt", model_file))
    assert model.logits(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 2)


def test_unregistered_name_asks_for_its_plugin(tmp_path: Path) -> None:
    assert "--plugin" in refused(saved(tmp_path / "model.pt", vector_model(model="mine")))


def test_network_given_in_python_is_given_again(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.pt", vector_model(model=""))
    assert "network=" in refused(path)
    module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    inputs = torch.randn(3, 4)
    expected = module((inputs - torch.tensor(vector_model().mean)) / torch.tensor(vector_model().std)).detach()
    weights = as_network(copy.deepcopy(module), (4,), 3).state_dict()
    save_model(path, vector_model(model="", state_dict=weights))
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    torch.testing.assert_close(load_model(path, network=module).logits(inputs), expected)
