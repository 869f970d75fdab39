"""DenseNet-BC (Huang et al. 2017) for small images. Depth 22, growth 12, compression 2: 69 features."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plsp_train.models.base import MODELS, Network, check_image_shape, initialise_convolutions

_NUM_STAGES = 3
_BOTTLENECK = 4  # the 1×1 convolution makes this many times the growth


class _BottleneckLayer(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, _BOTTLENECK * growth, kernel_size=1, bias=False)
        self.bn2 = nn.BatchNorm2d(_BOTTLENECK * growth)
        self.conv2 = nn.Conv2d(_BOTTLENECK * growth, growth, kernel_size=3, padding=1, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.bn1(inputs)))
        out = self.conv2(F.relu(self.bn2(out)))
        return torch.cat((inputs, out), dim=1)


class _Transition(nn.Module):
    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, out_channels, kernel_size=1, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(F.relu(self.bn(inputs))), 2)


@MODELS.register("densenet")
class DenseNet(Network):
    """Three dense stages of (depth - 4) / 6 bottleneck layers each, with a compressing transition in between."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        depth: int = 22,
        growth: int = 12,
        compression: int = 2,
    ) -> None:
        super().__init__()
        check_image_shape("densenet", input_shape, smallest=4)
        layers_per_stage = (depth - 4) // (2 * _NUM_STAGES)
        channels = 2 * growth
        self.stem = nn.Conv2d(input_shape[0], channels, kernel_size=3, padding=1, bias=False)
        layers: list[nn.Module] = []
        for stage in range(_NUM_STAGES):
            if stage > 0:
                layers.append(_Transition(channels, channels // compression))
                channels //= compression
            for _ in range(layers_per_stage):
                layers.append(_BottleneckLayer(channels, growth))
                channels += growth
        self.stages = nn.Sequential(*layers)
        self.bn = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, num_classes)
        initialise_convolutions(self)

    def features(self, inputs: Tensor) -> Tensor:
        out = F.relu(self.bn(self.stages(self.stem(inputs))))
        return out.mean(dim=(2, 3))
