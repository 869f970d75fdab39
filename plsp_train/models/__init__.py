"""Networks: each has `features`, a linear `classifier`, and returns logits.

A name of `MODELS`, `torchvision:NAME`, `timm:NAME` and `my_module:build` name a network. A builder is a function of the
shape of an input and the number of classes, or a class of modules that takes them. Plain modules are wrapped.
"""

import inspect

from torch import nn

from plsp_train.models.base import MODELS, Builder, Network
from plsp_train.models.densenet import DenseNet
from plsp_train.models.lenet import LeNet5
from plsp_train.models.libraries import LIBRARIES
from plsp_train.models.linear import Linear
from plsp_train.models.mlp import MLP
from plsp_train.models.pretrained import Pretrained, load_pretrained
from plsp_train.models.resnet import ResNet18
from plsp_train.models.wrapped import WrappedNetwork, as_network

__all__ = [
    "MLP",
    "MODELS",
    "Builder",
    "DenseNet",
    "LeNet5",
    "Linear",
    "Network",
    "Pretrained",
    "ResNet18",
    "WrappedNetwork",
    "as_network",
    "build_model",
    "find_builder",
    "load_pretrained",
]


def build_model(name: str, input_shape: tuple[int, ...], num_classes: int) -> Network:
    """Build a network for inputs of shape (C, H, W) or (d,), with freshly initialised weights."""
    module = find_builder(name)(input_shape, num_classes)
    try:
        return as_network(module, input_shape, num_classes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"model {name}: {error}") from error


def find_builder(name: str) -> Builder:
    """What builds the network of this name; ValueError if there is no such network."""
    library, _, library_name = name.partition(":")
    builder = LIBRARIES[library](library_name) if library in LIBRARIES else MODELS[name]
    if isinstance(builder, nn.Module) or not _takes_two_arguments(builder):
        raise ValueError(
            f"model {name} must be a function of input_shape and num_classes, or a class of modules that takes them, "
            f"got {' '.join(repr(builder).split())}"
        )
    return builder


def _takes_two_arguments(builder: object) -> bool:
    try:
        inspect.signature(builder).bind(None, None)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True
