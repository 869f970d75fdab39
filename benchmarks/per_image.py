"""torchvision's augmentation image by image, as training code commonly has it: the baseline of the whole-batch one."""

import torch
from torch import Tensor

from plsp_train.data import AUGMENT_POLICIES, ImageAugmentation, TrainTestData
from plsp_train.data.torchvision_compat import import_torchvision


class PerImageAugmentation(ImageAugmentation):
    """The same distribution of views; random numbers come from torch's global generator."""

    def __init__(self, data: TrainTestData, memory_format: torch.memory_format) -> None:
        super().__init__(AUGMENT_POLICIES[data.name], data.mean, data.std, memory_format=memory_format)
        import_torchvision()
        from torchvision import transforms

        policy, size = self.policy, data.input_shape[-1]
        crop = transforms.RandomCrop(size, padding=policy.padding, padding_mode="reflect")
        shift = [transforms.RandomHorizontalFlip(0.5 * policy.horizontal_flip), crop]
        change = [transforms.AutoAugment(transforms.AutoAugmentPolicy.CIFAR10)] if policy.auto_augment else []
        normalise = [transforms.ConvertImageDtype(torch.float32), transforms.Normalize(data.mean, data.std)]
        self._weak = transforms.Compose([*shift, *normalise])
        self._strong = transforms.Compose([*shift, *change, transforms.Lambda(self._with_hole), *normalise])

    def weak(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return self._stacked([self._weak(image) for image in images], images)

    def strong(self, images: Tensor, generator: torch.Generator) -> Tensor:
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
