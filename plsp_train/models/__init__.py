"""Networks: each has `features`, a linear `classifier`, and gives logits when called."""

from collections.abc import Callable

from plsp_train.models.base import Network
from plsp_train.models.densenet import DenseNet
from plsp_train.models.lenet import LeNet5
from plsp_train.models.mlp import MLP
from plsp_train.models.resnet import ResNet18

MODELS: dict[str, Callable[[tuple[int, ...], int], Network]] = {
    "lenet": LeNet5,
    "densenet": DenseNet,
    "resnet18": ResNet18,
    "mlp": MLP,
}


def build_model(name: str, input_shape: tuple[int, ...], num_classes: int) -> Network:
    """Build a network for inputs of shape (C, H, W) or (d,), with freshly initialised weights."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}: choose one of {', '.join(MODELS)}")
    return MODELS[name](input_shape, num_classes)


__all__ = ["MLP", "MODELS", "DenseNet", "LeNet5", "Network", "ResNet18", "build_model"]
