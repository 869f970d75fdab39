"""The interface of a network, and the names that networks are built by."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from plsp_train.registry import Registry

Builder = Callable[[tuple[int, ...], int], nn.Module]
"""Of the shape of an input, (C, H, W) or (d,), and the number of classes."""

MODELS: Registry[Builder] = Registry("model")


class Network(nn.Module, ABC):
    """A feature extractor and a linear classifier: z = W a + b, where a are the deep features."""

    classifier: nn.Linear
    memory_format: torch.memory_format = torch.channels_last
    """The fastest layout of images and weights that the network can compute in."""

    @abstractmethod
    def features(self, inputs: Tensor) -> Tensor:
        """Deep features (N, d)."""

    @property
    def num_features(self) -> int:
        return self.classifier.in_features

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (N, l)."""
        return self.classifier(self.features(inputs))


def check_image_shape(network: str, input_shape: tuple[int, ...], smallest: int = 1) -> None:
    """Refuse inputs that are not images (C, H, W) with sides of at least `smallest`."""
    if len(input_shape) == 1:
        raise ValueError(f"{network} takes images, got vectors of {input_shape[0]} features: choose mlp or linear")
    expected = f"{network} takes images (C, H, W), got input_shape {input_shape}"
    if len(input_shape) == 2:
        raise ValueError(f"{expected} without a channel axis: use {(1, *input_shape)}")
    if len(input_shape) != 3:
        raise ValueError(expected)
    if min(input_shape[1:]) < smallest:
        raise ValueError(
            f"{network} takes images of at least {smallest}×{smallest}, got {input_shape[1]}×{input_shape[2]}: "
            "choose mlp or linear, or enlarge the images"
        )


def initialise_convolutions(network: nn.Module) -> None:
    """He initialisation for convolutions followed by ReLU; batch norms start as the identity by default."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
