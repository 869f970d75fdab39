"""Pretrained weights: what fits is loaded, and the rest is named."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from plsp_train.models import Network, as_network, build_model, load_pretrained


class Small(nn.Module):
    def __init__(self, num_outputs: int, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.stem(inputs)).relu())


def network_of(num_classes: int) -> Network:
    return as_network(Small(num_classes), (3,), num_classes)


def save(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


def test_weights_of_the_same_module_are_loaded_completely(tmp_path: Path) -> None:
    pretrained = Small(5).eval()
    network = network_of(5).eval()
    report = load_pretrained(network, save(tmp_path / "small.pt", pretrained.state_dict()))
    assert (report.loaded, report.kept, report.skipped) == (9, (), ())
    inputs = torch.randn(2, 3)
    assert torch.equal(network(inputs), pretrained(inputs))
    assert str(report) == f"{tmp_path / 'small.pt'}: 9 of 9 tensors loaded"


def test_classifier_of_another_number_of_classes_is_skipped(tmp_path: Path) -> None:
    pretrained = Small(1000)
    network = network_of(5)
    before = network.classifier.weight.clone()
    report = load_pretrained(network, save(tmp_path / "small.pt", pretrained.state_dict()))
    assert report.loaded == 7
    assert report.kept == ("classifier.weight", "classifier.bias")
    assert report.skipped == ("head.weight (1000, 4), not (5, 4)", "head.bias (1000,), not (5,)")
    assert torch.equal(network.classifier.weight, before)
    assert torch.equal(network.state_dict()["body.stem.weight"], pretrained.stem.weight)
    assert "7 of 9 tensors loaded; keeping their initial values: classifier.weight, classifier.bias" in str(report)


@pytest.mark.parametrize("key", [None, "state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_weights_may_be_wrapped_as_training_scripts_do(tmp_path: Path, key: str | None, prefix: str) -> None:
    weights = {prefix + name: tensor for name, tensor in Small(5).state_dict().items()}
    content = weights if key is None else {"epoch": 3, key: weights}
    assert load_pretrained(network_of(5), save(tmp_path / "small.pt", content)).loaded == 9


def test_networks_own_names_are_taken_too(tmp_path: Path) -> None:
    pretrained = network_of(5)
    content = {"model": "my_module:build", "state_dict": pretrained.state_dict()}
    network = network_of(5)
    assert load_pretrained(network, save(tmp_path / "model.pt", content)).kept == ()
    assert torch.equal(network.classifier.weight, pretrained.classifier.weight)


class InnerClassifier(nn.Module):
    """Of equal shapes, so that only the names tell the layers apart."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.classifier(inputs).relu())


@pytest.mark.parametrize("own_names", [False, True])
def test_inner_layer_named_classifier_is_not_confused_with_the_classifier(tmp_path: Path, own_names: bool) -> None:
    pretrained = InnerClassifier()
    inputs = torch.randn(2, 3)
    expected = pretrained(inputs)
    weights = dict(pretrained.state_dict())
    wrapped = as_network(pretrained, (3,), 3)
    network = as_network(InnerClassifier(), (3,), 3)
    load_pretrained(network, save(tmp_path / "inner.pt", wrapped.state_dict() if own_names else weights))
    assert torch.equal(network(inputs), expected)


def test_registered_networks_load_their_own_weights(tmp_path: Path) -> None:
    path = save(tmp_path / "mlp.pt", build_model("mlp", (6,), 3).state_dict())
    assert load_pretrained(build_model("mlp", (6,), 3), path).kept == ()
    assert load_pretrained(build_model("mlp", (6,), 4), path).kept == ("classifier.weight", "classifier.bias")


def test_half_precision_weights_keep_the_networks_dtype(tmp_path: Path) -> None:
    network = network_of(5)
    load_pretrained(network, save(tmp_path / "small.pt", Small(5).half().state_dict()))
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}


def test_loaded_weights_are_trained(tmp_path: Path) -> None:
    network = network_of(5)
    load_pretrained(network, save(tmp_path / "small.pt", Small(5).state_dict()))
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in network.parameters())


def test_safetensors_are_loaded_where_installed(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "small.safetensors"
    safetensors.save_file(Small(5).state_dict(), path)
    assert load_pretrained(network_of(5), path).loaded == 9
    path.write_bytes(b"not a file of tensors")
    with pytest.raises(ValueError, match=r"small.safetensors is not a readable .safetensors file"):
        load_pretrained(network_of(5), path)


def test_safetensors_without_the_package_name_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (tmp_path / "small.safetensors").touch()
    with pytest.raises(ImportError, match=r"small.safetensors needs safetensors, .* pip install safetensors"):
        load_pretrained(network_of(5), tmp_path / "small.safetensors")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            Small(5, width=7).state_dict(),
            r"has no weights of this network: it holds stem.weight \(7, 3\), not \(4, 3\)",
        ),
        ({"other.weight": torch.zeros(3)}, "it holds other.weight, and the network has stem.weight, stem.bias"),
        ({}, "it holds nothing, and the network has"),
        ({"norm.num_batches_tracked": torch.tensor(3)}, "has no weights of this network"),
        ({"epoch": 3}, "must hold a state_dict"),
        (torch.zeros(3), "must hold a state_dict"),
        (Small(5), "must be written by torch.save and hold tensors"),
    ],
    ids=["shapes", "names", "empty", "buffer", "no tensors", "tensor", "module"],
)
def test_file_without_fitting_weights_is_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        load_pretrained(network_of(5), save(tmp_path / "small.pt", content))
    assert "small.pt" in str(raised.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file .*missing.pt: give an existing file"):
        load_pretrained(network_of(5), tmp_path / "missing.pt")
