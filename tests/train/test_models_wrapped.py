"""Anyone's module becomes a network: features and classifier are found, and what cannot be used is refused."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plsp_train.models import Linear, Network, WrappedNetwork, as_network, build_model
from plsp_train.torchvision_compat import import_torchvision

NUM_CLASSES = 5


def wrap(module: nn.Module, input_shape: tuple[int, ...] = (6,)) -> WrappedNetwork:
    network = as_network(module, input_shape, NUM_CLASSES)
    assert isinstance(network, WrappedNetwork)
    return network


def check_network(network: Network, input_shape: tuple[int, ...], num_features: int) -> None:
    """Shapes, the linear classifier, deep copies, a gradient step."""
    inputs = torch.randn(3, *input_shape)
    network.eval()
    with torch.no_grad():
        features, logits = network.features(inputs), network(inputs)
        assert features.shape == (3, num_features) == (3, network.num_features)
        torch.testing.assert_close(logits, F.linear(features, network.classifier.weight, network.classifier.bias))
        assert torch.equal(copy.deepcopy(network)(inputs), logits)
    network.train()
    F.cross_entropy(network(inputs), torch.arange(3)).backward()
    assert network.classifier.weight.grad is not None


class Convolutional(nn.Module):
    """A user's network in the style of many tutorials."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, kernel_size=3, padding=1)
        self.drop = nn.Dropout()
        self.fc = nn.Linear(4 * 4 * 4, num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        out = F.max_pool2d(F.relu(self.conv(inputs)), 2)
        return self.fc(self.drop(out.view(out.size(0), -1)))


# ---------------------------------------------------------------------------------------------- what is found


def test_last_linear_layer_becomes_the_classifier() -> None:
    last = nn.Linear(8, NUM_CLASSES)
    network = wrap(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), last))
    assert network.classifier is last
    assert network.classifier_name == "2"
    check_network(network, (6,), 8)


def test_logits_are_those_of_the_module() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))
    inputs = torch.randn(4, 6)
    expected = module(inputs)
    assert torch.equal(wrap(module)(inputs), expected)


def test_classifier_of_another_number_of_classes_is_replaced() -> None:
    network = wrap(Convolutional(1000), (1, 8, 8))
    assert network.classifier.out_features == NUM_CLASSES
    assert network.classifier_name == "fc"
    assert not any("fc" in name for name in network.state_dict())
    check_network(network, (1, 8, 8), 64)


def test_output_without_a_final_linear_layer_is_the_features() -> None:
    network = wrap(nn.Sequential(nn.Conv2d(1, 4, kernel_size=3), nn.ReLU()), (1, 5, 5))
    assert network.classifier_name is None
    check_network(network, (1, 5, 5), 4 * 3 * 3)


@pytest.mark.parametrize("inplace", [False, True])
def test_activation_after_the_last_linear_layer_makes_features(inplace: bool) -> None:
    """In place, the output is still the tensor that the linear layer returned, here even with the same values."""
    linear = nn.Linear(6, NUM_CLASSES)
    nn.init.constant_(linear.bias, 100.0)
    network = wrap(nn.Sequential(linear, nn.ReLU(inplace=inplace)))
    assert network.classifier_name is None
    check_network(network, (6,), NUM_CLASSES)


def test_layer_that_is_used_twice_is_not_the_classifier() -> None:
    layer = nn.Linear(6, 6)
    network = as_network(nn.Sequential(layer, nn.ReLU(), layer), (6,), 6)
    assert isinstance(network, WrappedNetwork)
    assert network.classifier_name is None
    check_network(network, (6,), 6)


class Cosine(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(F.normalize(input), F.normalize(self.weight))


class Truncated(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)[:, :2]


class Plain(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


@pytest.mark.parametrize(("layer", "name"), [(Cosine, None), (Truncated, None), (Plain, "0")])
def test_subclass_of_linear_is_the_classifier_only_if_it_computes_a_linear_map(
    layer: type[nn.Linear], name: str | None
) -> None:
    network = wrap(nn.Sequential(layer(6, NUM_CLASSES)))
    assert network.classifier_name == name
    check_network(network, (6,), network.num_features)


def test_single_linear_layer_is_a_network() -> None:
    layer = nn.Linear(6, NUM_CLASSES)
    network = wrap(layer)
    assert network.classifier is layer
    check_network(network, (6,), 6)


def test_layer_registered_under_two_names_is_replaced_everywhere() -> None:
    module = Convolutional(NUM_CLASSES)
    module.alias = module.fc
    network = wrap(module, (1, 8, 8))
    assert [name for name in network.state_dict() if name.endswith("weight")] == [
        "body.conv.weight",
        "classifier.weight",
    ]


def test_layer_called_with_a_keyword_is_found() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, NUM_CLASSES)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.fc(input=inputs)

    assert wrap(Keyword()).classifier_name == "fc"


def test_lazy_layers_get_their_shapes_from_the_probe() -> None:
    module = nn.Sequential(nn.LazyConv2d(4, kernel_size=3), nn.Flatten(), nn.LazyLinear(NUM_CLASSES))
    network = wrap(module, (1, 5, 5))
    assert network.classifier_name == "2"
    check_network(network, (1, 5, 5), 36)


def test_probe_changes_neither_modes_nor_statistics() -> None:
    frozen = nn.BatchNorm1d(6).eval()
    trained = nn.BatchNorm1d(6)
    network = wrap(nn.Sequential(frozen, trained, nn.Linear(6, NUM_CLASSES)))
    assert network.training
    assert trained.training
    assert not frozen.training
    assert trained.num_batches_tracked == 0
    assert not network.classifier._forward_hooks


def test_new_classifier_has_the_dtype_of_the_module() -> None:
    network = wrap(nn.Sequential(nn.Linear(6, 8), nn.ReLU()).double())
    assert network(torch.randn(2, 6, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_memory_format_is_one_that_the_module_can_compute_in(channels: int, views: bool) -> None:
    """`view` fails on what a convolution returns in channels_last. With one channel, strides do not tell the format."""
    convolution = nn.Conv2d(channels, 4, kernel_size=3, padding=1)
    module = nn.Sequential(convolution, View() if views else nn.Flatten(), nn.Linear(100, NUM_CLASSES))
    network = wrap(module, (channels, 5, 5))
    assert network.memory_format == (torch.contiguous_format if views else torch.channels_last)
    inputs = torch.randn(2, channels, 5, 5)
    expected = network(inputs)
    network.to(memory_format=network.memory_format)  # type: ignore[call-overload]
    inputs = inputs.clone(memory_format=torch.channels_last).contiguous(memory_format=network.memory_format)
    torch.testing.assert_close(network(inputs), expected)


class View(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.view(len(inputs), -1)


def test_user_network_with_the_interface_is_not_wrapped() -> None:
    network = Linear((6,), NUM_CLASSES)
    assert as_network(network, (6,), NUM_CLASSES) is network


# --------------------------------------------------------------------------------------------- what is refused


class Returns(nn.Module):
    """A module with any output."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.output = output

    def forward(self, inputs: Tensor) -> Any:
        return self.output(inputs)


class OwnWeight(nn.Module):
    """Reads an attribute of its last layer that nothing else can have."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, NUM_CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.fc(inputs * self.fc.weight.norm())


def unused_lazy_layer() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 3))
    module[0].unused = nn.LazyLinear(4)
    return module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Returns(lambda x: (x, x)), "Returns returns a tuple in evaluation mode: return the logits or features alone"),
        (Returns(lambda x: {"logits": x}), "returns a dict"),
        (Returns(lambda x: x.sum(1)), r"must return logits or features \(N, d\), got \(2,\) for 2 inputs"),
        (Returns(lambda x: x.sum()), r"got \(\) for 2 inputs"),
        (Returns(lambda x: x.T), r"got \(6, 2\) for 2 inputs"),
        (nn.Linear(7, 5), r"Linear cannot take inputs of shape \(6,\) \(RuntimeError: mat1 and mat2 shapes cannot be"),
        (nn.Sequential(nn.Linear(6, NUM_CLASSES), nn.Softmax(1)), "returns probabilities: remove the softmax"),
        (nn.Sequential(nn.Linear(6, NUM_CLASSES), nn.LogSoftmax(1)), "returns probabilities: remove the softmax"),
        (unused_lazy_layer(), "never uses its lazy parameter 0.unused.weight"),
        (OwnWeight(), "OwnWeight does not run without its last layer fc: return the features"),
    ],
)
def test_unusable_modules_are_explained(module: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        as_network(module, (6,), NUM_CLASSES)
    assert "\n" not in str(raised.value)


def test_objects_that_are_not_modules_are_refused() -> None:
    with pytest.raises(TypeError, match=r"a network must be a torch.nn.Module, got 'resnet18'"):
        as_network("resnet18", (6,), NUM_CLASSES)  # type: ignore[arg-type]


def test_tuple_in_training_mode_is_named_when_it_appears() -> None:
    """Some networks return auxiliary logits, but in training mode only."""

    class Auxiliary(nn.Module):
        def forward(self, inputs: Tensor) -> Any:
            return (inputs, inputs) if self.training else inputs

    network = wrap(Auxiliary())
    with pytest.raises(ValueError, match="Auxiliary returns a tuple in training mode"):
        network(torch.randn(2, 6))


class Untidy(Network):
    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier  # type: ignore[assignment]

    def features(self, inputs: Tensor) -> Tensor:
        return inputs[:, None]


@pytest.mark.parametrize(
    ("classifier", "message"),
    [
        (nn.Linear(6, 3), "Untidy.classifier must be a torch.nn.Linear with 5 outputs, got Linear"),
        (nn.Identity(), "Untidy.classifier must be a torch.nn.Linear with 5 outputs, got Identity"),
        (nn.Linear(6, 5), r"Untidy.features must return \(N, 6\), .* got \(2, 1, 6\) for 2 inputs"),
    ],
)
def test_network_that_breaks_the_interface_is_refused(classifier: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_network(Untidy(classifier), (6,), NUM_CLASSES)


# -------------------------------------------------------------------------------------- names of other people's


@pytest.mark.parametrize(
    ("name", "num_features", "classifier_name"),
    [("resnet18", 512, "fc"), ("densenet121", 1024, "classifier"), ("mobilenet_v3_small", 1024, "classifier.3")],
)
def test_torchvision_networks_are_wrapped(name: str, num_features: int, classifier_name: str) -> None:
    network = build_model(f"torchvision:{name}", (3, 32, 32), NUM_CLASSES)
    assert isinstance(network, WrappedNetwork)
    assert network.classifier_name == classifier_name
    check_network(network, (3, 32, 32), num_features)


def test_torchvision_network_with_auxiliary_classifiers_returns_one_tensor_in_training_mode() -> None:
    network = build_model("torchvision:googlenet", (3, 32, 32), NUM_CLASSES)
    assert network.training
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, NUM_CLASSES)


def test_vision_transformer_is_wrapped() -> None:
    transformer = import_torchvision().models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=1, num_heads=2, hidden_dim=12, mlp_dim=8
    )
    network = wrap(transformer, (3, 16, 16))
    assert network.classifier_name == "heads.head"
    check_network(network, (3, 16, 16), 12)


def test_shape_that_a_torchvision_network_cannot_take_is_explained() -> None:
    message = (
        r"model torchvision:mobilenet_v3_small: MobileNetV3 cannot take inputs of shape \(1, 28, 28\) .* 3 channels"
    )
    with pytest.raises(ValueError, match=message):
        build_model("torchvision:mobilenet_v3_small", (1, 28, 28), NUM_CLASSES)


def test_unknown_torchvision_networks_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown model torchvision:resnet1: .* did you mean .*resnet18"):
        build_model("torchvision:resnet1", (3, 32, 32), NUM_CLASSES)
    with pytest.raises(ValueError, match="unknown model torchvision:fasterrcnn_resnet50_fpn"):
        build_model("torchvision:fasterrcnn_resnet50_fpn", (3, 32, 32), NUM_CLASSES)


def test_missing_timm_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"timm:resnet18 needs timm, .* pip install timm"):
        build_model("timm:resnet18", (3, 32, 32), NUM_CLASSES)


def test_timm_networks_are_wrapped() -> None:
    import_torchvision()
    pytest.importorskip("timm")
    check_network(build_model("timm:mobilenetv3_small_050", (1, 32, 32), NUM_CLASSES), (1, 32, 32), 1024)


OWN_MODULE = """
from torch import nn

def build(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], 8), nn.ReLU())

class Net(nn.Sequential):
    def __init__(self, input_shape, num_classes):
        super().__init__(nn.Linear(input_shape[0], num_classes))

def no_module(input_shape, num_classes):
    return "a string"

def other_arguments(width):
    return nn.Linear(width, 2)

module = nn.Linear(6, 5)
number = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_networks.py").write_text(OWN_MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_networks", raising=False)
    return "own_networks"


@pytest.mark.parametrize(("attribute", "num_features"), [("build", 8), ("Net", 6)])
def test_user_builder_is_named_by_module_and_attribute(own_module: str, attribute: str, num_features: int) -> None:
    check_network(build_model(f"{own_module}:{attribute}", (6,), NUM_CLASSES), (6,), num_features)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("no_module", "model own_networks:no_module: a network must be a torch.nn.Module, got 'a string'"),
        ("other_arguments", "model own_networks:other_arguments must be a function of input_shape and num_classes"),
        ("module", "model own_networks:module must be a function of input_shape and num_classes"),
        ("number", "model own_networks:number must be a function of input_shape and num_classes, .* got 3"),
        ("missing", "model 'own_networks:missing': module own_networks has no attribute 'missing'"),
    ],
)
def test_unusable_builder_is_named(own_module: str, attribute: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(f"{own_module}:{attribute}", (6,), NUM_CLASSES)
