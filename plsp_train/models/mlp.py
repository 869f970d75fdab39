"""A multilayer perceptron for feature vectors and for very small images: 64 features."""

import math

from torch import Tensor, nn

from plsp_train.models.base import MODELS, Network


@MODELS.register("mlp")
class MLP(Network):
    """Two hidden layers with batch normalisation, which lets it train at the learning rates of the larger networks."""

    def __init__(
        self, input_shape: tuple[int, ...], num_classes: int, *, num_hidden: int = 256, num_features: int = 64
    ) -> None:
        super().__init__()
        self.hidden = nn.Sequential(
            nn.Flatten(),
            # A bias before batch normalisation would have no effect.
            nn.Linear(math.prod(input_shape), num_hidden, bias=False),
            nn.BatchNorm1d(num_hidden),
            nn.ReLU(),
            nn.Linear(num_hidden, num_features, bias=False),
            nn.BatchNorm1d(num_features),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(num_features, num_classes)

    def features(self, inputs: Tensor) -> Tensor:
        return self.hidden(inputs)
