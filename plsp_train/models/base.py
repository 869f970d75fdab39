"""What every network here offers."""

from abc import ABC, abstractmethod

from torch import Tensor, nn


class Network(nn.Module, ABC):
    """A feature extractor and a linear classifier on top: z = W a + b, where a are the deep features."""

    classifier: nn.Linear

    @abstractmethod
    def features(self, inputs: Tensor) -> Tensor:
        """Deep features (N, d)."""

    @property
    def num_features(self) -> int:
        return self.classifier.in_features

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (N, l)."""
        return self.classifier(self.features(inputs))


def initialise_convolutions(network: nn.Module) -> None:
    """He initialisation for convolutions followed by ReLU; batch norms start as the identity by default."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
