"""Weak and strong views of whole batches, computed on the device of the batch.

Random numbers come from the generator that is passed in. With a host generator the same seed gives the same views on
every device, without host–device synchronisation. A generator on the device of the batch works too.

If the inputs are only a shard of a batch, random numbers are still drawn for the whole of it: neither the view of an
instance nor the state of the generator depends on how the batch is shared out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from plsp_train.data.autoaugment import auto_augment
from plsp_train.data.shard import Shard
from plsp_train.data.splits import TrainTestData
from plsp_train.data.transfer import to_device

Device = torch.device | str


@dataclass(frozen=True)
class AugmentPolicy:
    """Views of images. Weak: flip and crop. Strong: also AutoAugment and cutout."""

    horizontal_flip: bool = True
    padding: int = 4  # reflected border that crops may reach into
    cutout: int = 16  # side of the square hole
    auto_augment: bool = False


# A mirrored digit is not a digit, and 8×8 pixels call for smaller shifts and holes.
_DIGITS_POLICY = AugmentPolicy(horizontal_flip=False, padding=1, cutout=3)


def augment_policy(name: str, input_shape: tuple[int, ...], horizontal_flip: bool = True) -> AugmentPolicy:
    """Shifts by up to an eighth of the image and holes of half its side, as the paper has them at 32×32.

    AutoAugment, which was found on photographs, applies to images in colour.
    """
    if name == "digits":
        return _DIGITS_POLICY
    channels, height, width = input_shape
    # Fashion-MNIST's 28×28 images are augmented as CIFAR's 32×32 ones.
    side = 32 if min(height, width) == 28 else min(height, width)
    return AugmentPolicy(horizontal_flip, side // 8, side // 2, auto_augment=channels == 3)


@dataclass(frozen=True)
class VectorAugmentPolicy:
    """Views of feature vectors, in units of each feature's standard deviation.

    Weak: Gaussian noise. Strong: more noise, and random features replaced by their mean.
    """

    weak_noise: float = 0.05
    strong_noise: float = 0.2
    strong_dropout: float = 0.2


class ImageAugmentation:
    """Views of uint8 images (N, C, H, W) as normalised float32 in the given memory format.

    Unless augment_weak is set, weak views are the normalised images.
    """

    def __init__(
        self,
        policy: AugmentPolicy,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        *,
        augment_weak: bool = True,
        device: Device = "cpu",
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        self.policy = policy
        self.augment_weak = augment_weak
        self.memory_format = memory_format
        std_tensor, mean_tensor = (torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (std, mean))
        self._scale = 1 / (255 * std_tensor)
        self._shift = -mean_tensor / std_tensor

    def plain(self, images: Tensor) -> Tensor:
        """The normalised images."""
        return self._normalised(images).contiguous(memory_format=self.memory_format)

    def weak(self, images: Tensor, generator: torch.Generator, shard: Shard | None = None) -> Tensor:
        """Horizontal flip with probability 1/2, and a crop from the reflect-padded image."""
        return self.plain(self._shifted(images, generator, shard) if self.augment_weak else images)

    def strong(self, images: Tensor, generator: torch.Generator, shard: Shard | None = None) -> Tensor:
        """Flip and crop, AutoAugment if the policy has it, then one black cutout hole."""
        images = self._shifted(images, generator, shard)
        if self.policy.auto_augment:
            images = auto_augment(images, generator, shard)
        height, width = images.shape[-2:]
        row, column = _draw_integers((height, width), images, generator, shard)
        return self.plain(cutout(images, row, column, self.policy.cutout))

    def _normalised(self, images: Tensor) -> Tensor:
        # Before the change of memory format: twice as fast on a CPU as after it.
        return images.float().mul_(self._scale).add_(self._shift)

    def _shifted(self, images: Tensor, generator: torch.Generator, shard: Shard | None) -> Tensor:
        padding = self.policy.padding
        offsets = 2 * padding + 1
        bounds = (offsets, offsets, 1 + self.policy.horizontal_flip)
        top, left, flip = _draw_integers(bounds, images, generator, shard)
        return crop_and_flip(images, top, left, flip.bool(), padding)


class VectorAugmentation:
    """Views of float32 feature vectors (N, d), normalised feature by feature.

    Unless augment_weak is set, weak views are the normalised vectors.
    """

    def __init__(
        self,
        policy: VectorAugmentPolicy,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        *,
        augment_weak: bool = True,
        device: Device = "cpu",
    ) -> None:
        self.policy = policy
        self.augment_weak = augment_weak
        self._mean = torch.tensor(mean, device=device)
        self._std = torch.tensor(std, device=device)

    def plain(self, vectors: Tensor) -> Tensor:
        """The normalised vectors."""
        return (vectors - self._mean) / self._std

    def weak(self, vectors: Tensor, generator: torch.Generator, shard: Shard | None = None) -> Tensor:
        """Gaussian noise."""
        if not self.augment_weak:
            return self.plain(vectors)
        return self._with_noise(vectors, self.policy.weak_noise, generator, shard)

    def strong(self, vectors: Tensor, generator: torch.Generator, shard: Shard | None = None) -> Tensor:
        """More Gaussian noise, and features set to their mean, which is zero after normalisation."""
        shape, rows = _whole_batch(vectors, shard)
        chance = torch.rand(shape, generator=generator, device=generator.device)[rows]
        dropped = to_device(chance, vectors.device) < self.policy.strong_dropout
        return self._with_noise(vectors, self.policy.strong_noise, generator, shard).masked_fill_(dropped, 0.0)

    def _with_noise(self, vectors: Tensor, strength: float, generator: torch.Generator, shard: Shard | None) -> Tensor:
        shape, rows = _whole_batch(vectors, shard)
        noise = torch.randn(shape, generator=generator, device=generator.device)[rows]
        return self.plain(vectors).add_(to_device(noise, vectors.device), alpha=strength)


Augmentation = ImageAugmentation | VectorAugmentation


def build_augmentation(
    data: TrainTestData,
    *,
    horizontal_flip: bool = True,
    augment_weak: bool = True,
    device: Device = "cpu",
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Augmentation:
    """The augmentation of a data set. Mirroring and the memory format apply to images."""
    statistics = data.mean, data.std
    if not data.is_image:
        return VectorAugmentation(VectorAugmentPolicy(), *statistics, augment_weak=augment_weak, device=device)
    policy = augment_policy(data.name, data.input_shape, horizontal_flip)
    return ImageAugmentation(policy, *statistics, augment_weak=augment_weak, device=device, memory_format=memory_format)


def crop_and_flip(images: Tensor, top: Tensor, left: Tensor, flip: Tensor, padding: int) -> Tensor:
    """Pad by reflection, crop at (top, left) to the old size, then mirror where `flip`: one gather per batch."""
    count, channels, height, width = images.shape
    if padding >= min(height, width):
        raise ValueError(f"padding must be smaller than the {height}×{width} images it reflects, got {padding}")
    rows = _reflect(_window(top - padding, height), height)
    columns = _reflect(_window(left - padding, width), width)
    columns = torch.where(flip[:, None], columns.flip(1), columns)
    source = (rows[:, :, None] * width + columns[:, None, :]).view(count, 1, height * width)
    return images.flatten(2).gather(2, source.expand(-1, channels, -1)).view(images.shape)


def cutout(images: Tensor, row: Tensor, column: Tensor, side: int) -> Tensor:
    """Set to zero, in place, a square of the given side centred at (row, column) and clipped at the border."""
    height, width = images.shape[-2:]
    in_rows = _in_hole(row, side, height)
    in_columns = _in_hole(column, side, width)
    return images.masked_fill_((in_rows[:, :, None] & in_columns[:, None, :])[:, None], 0)


def _window(start: Tensor, length: int) -> Tensor:
    return start[:, None] + torch.arange(length, device=start.device)


def _reflect(position: Tensor, length: int) -> Tensor:
    """Fold positions outside 0..length-1 back in, not repeating the border pixel."""
    last = length - 1
    return last - (last - position.abs()).abs()


def _in_hole(centre: Tensor, side: int, length: int) -> Tensor:
    """(N, length) bool: the `side` positions from centre - side // 2 on."""
    distance = _window(side // 2 - centre, length)
    return (distance >= 0) & (distance < side)


def _draw_integers(bounds: tuple[int, ...], images: Tensor, generator: torch.Generator, shard: Shard | None) -> Tensor:
    """(len(bounds), N) on the images' device: row i uniform over 0..bounds[i]-1, one draw per image."""
    (count, *_), rows = _whole_batch(images, shard)
    draws = [torch.randint(bound, (count,), generator=generator, device=generator.device)[rows] for bound in bounds]
    return to_device(torch.stack(draws), images.device)


def _whole_batch(inputs: Tensor, shard: Shard | None) -> tuple[tuple[int, ...], slice]:
    """The shape of the batch that the inputs are a shard of, and their rows in it."""
    if shard is None:
        return tuple(inputs.shape), slice(None)
    return (shard.total, *inputs.shape[1:]), shard.rows
