"""Per-image augmentation with torchvision, as in common training code: the baseline of batched augmentation."""

import torch
from torch import Tensor

from plsp_train.data import ImageAugmentation, TrainTestData, augment_policy
from plsp_train.data.shard import Shard
from plsp_train.torchvision_compat import import_torchvision


class PerImageAugmentation(ImageAugmentation):
    """Same distribution of views as the base class; draws from torch's global generator."""

    def __init__(self, data: TrainTestData, memory_format: torch.memory_format) -> None:
        super().__init__(augment_policy(data.name, data.input_shape), data.mean, data.std, memory_format=memory_format)
        import_torchvision()
        from torchvision import transforms

        policy, size = self.policy, data.input_shape[-1]
        crop = transforms.RandomCrop(size, padding=policy.padding, padding_mode="reflect")
        shift = [transforms.RandomHorizontalFlip(0.5 * policy.horizontal_flip), crop]
        change = [transforms.AutoAugment(transforms.AutoAugmentPolicy.CIFAR10)] if policy.auto_augment else []
        normalise = [transforms.ConvertImageDtype(torch.float32), transforms.Normalize(data.mean, data.std)]
        self._weak = transforms.Compose([*shift, *normalise])
        self._strong = transforms.Compose([*shift, *change, transforms.Lambda(self._with_hole), *normalise])

    def weak(self, images: Tensor, generator: torch.Generator, shard: Shard | None = None) -> Tensor:
        return self._stacked([self._weak(image) for image in images], images)

    def strong(self, images: Tensor, generator: torch.Generator, shard: Shard | None = None) -> Tensor:
        return self._stacked([self._strong(image) for image in images], images)

    def _stacked(self, views: list[Tensor], images: Tensor) -> Tensor:
        together = torch.stack(views) if views else images.float()
        return together.contiguous(memory_format=self.memory_format)

    def _with_hole(self, image: Tensor) -> Tensor:
        side = self.policy.cutout
        height, width = image.shape[-2:]
        top, left = (int(torch.randint(length, ())) - side // 2 for length in (height, width))
        image = image.clone()
        image[:, max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = 0
        return image
