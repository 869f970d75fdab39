"""LeNet-5 (LeCun et al. 1998) with ReLU and max-pooling: 84 features."""

import torch.nn.functional as F
from torch import Tensor, nn

from plsp_train.models import native
from plsp_train.models.base import MODELS, Network, check_image_shape


@MODELS.register("lenet")
class LeNet5(Network):
    """For 32×32 images, or for 28×28 ones, which are padded to 32×32 as in the original."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        check_image_shape("lenet", input_shape)
        channels, height, width = input_shape
        padding = {(28, 28): 2, (32, 32): 0}.get((height, width))
        if padding is None:
            raise ValueError(
                f"lenet takes images of 28×28 or 32×32, got {height}×{width}: "
                "choose mlp or resnet18, or resize the images"
            )
        self.conv1 = nn.Conv2d(channels, 6, kernel_size=5, padding=padding)
        self.conv2 = nn.Conv2d(6, 16, kernel_size=5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.classifier = nn.Linear(84, num_classes)

    def features(self, inputs: Tensor) -> Tensor:
        out = F.relu(self.fc1(self._stages(inputs)))
        return F.relu(self.fc2(out))

    def _stages(self, inputs: Tensor) -> Tensor:
        if native.serves(inputs, self.conv1.weight):
            return native.stages(inputs, self.conv1, self.conv2)
        # ReLU after pooling: the same values and gradients from a quarter of the elements.
        out = F.relu(F.max_pool2d(self.conv1(inputs), 2))
        return F.relu(F.max_pool2d(self.conv2(out), 2)).flatten(1)
