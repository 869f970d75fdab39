"""ResNet-18 (He et al. 2016) for small images, with a 3×3 stem and no max-pooling: 512 features."""

import torch.nn.functional as F
from torch import Tensor, nn

from plsp_train.models.base import MODELS, Network, check_image_shape, initialise_convolutions


class _BasicBlock(nn.Module):
    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out_channels, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, inputs: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(inputs)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(inputs))


@MODELS.register("resnet18")
class ResNet18(Network):
    """Four stages of two basic blocks with 64, 128, 256 and 512 channels; all but the first halve the image."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        check_image_shape("resnet18", input_shape)
        channels = 64
        self.stem = nn.Conv2d(input_shape[0], channels, kernel_size=3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        blocks: list[nn.Module] = []
        for out_channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [_BasicBlock(channels, out_channels, stride), _BasicBlock(out_channels, out_channels, 1)]
            channels = out_channels
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, num_classes)
        initialise_convolutions(self)

    def features(self, inputs: Tensor) -> Tensor:
        return self.blocks(F.relu(self.bn(self.stem(inputs)))).mean(dim=(2, 3))
