"""A linear model: the features are the normalised inputs themselves."""

import math

from torch import Tensor, nn

from plsp_train.models.base import MODELS, Network


@MODELS.register("linear")
class Linear(Network):
    """For feature vectors that are descriptive already, and as a baseline for images, which are flattened."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(math.prod(input_shape), num_classes)

    def features(self, inputs: Tensor) -> Tensor:
        return inputs.flatten(1)
