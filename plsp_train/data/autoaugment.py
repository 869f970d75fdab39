"""AutoAugment's CIFAR-10 policy on whole batches, with a sub-policy drawn for every image.

torchvision's transform draws one sub-policy per call. Here each image draws its own; images that drew the same
operation are then transformed together by torchvision's functional form of it, so a batch costs a few dozen calls.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from plsp_train.data.shard import Shard
from plsp_train.data.transfer import to_device
from plsp_train.torchvision_compat import import_torchvision

# (operation, probability, magnitude level 0..9), two in a row: the published CIFAR-10 sub-policies (Cubuk et al. 2019,
# table 7). The released code of PLSP imports an extended list from a file that is missing in the public copy of its
# repository. Rather than guess its content, both recipes use the published list.
CIFAR10_POLICIES: tuple[tuple[tuple[str, float, int | None], tuple[str, float, int | None]], ...] = (
    (("Invert", 0.1, None), ("Contrast", 0.2, 6)),
    (("Rotate", 0.7, 2), ("TranslateX", 0.3, 9)),
    (("Sharpness", 0.8, 1), ("Sharpness", 0.9, 3)),
    (("ShearY", 0.5, 8), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.5, None), ("Equalize", 0.9, None)),
    (("ShearY", 0.2, 7), ("Posterize", 0.3, 7)),
    (("Color", 0.4, 3), ("Brightness", 0.6, 7)),
    (("Sharpness", 0.3, 9), ("Brightness", 0.7, 9)),
    (("Equalize", 0.6, None), ("Equalize", 0.5, None)),
    (("Contrast", 0.6, 7), ("Sharpness", 0.6, 5)),
    (("Color", 0.7, 7), ("TranslateX", 0.5, 8)),
    (("Equalize", 0.3, None), ("AutoContrast", 0.4, None)),
    (("TranslateY", 0.4, 3), ("Sharpness", 0.2, 6)),
    (("Brightness", 0.9, 6), ("Color", 0.2, 8)),
    (("Solarize", 0.5, 2), ("Invert", 0.0, None)),
    (("Equalize", 0.2, None), ("AutoContrast", 0.6, None)),
    (("Equalize", 0.2, None), ("Equalize", 0.6, None)),
    (("Color", 0.9, 9), ("Equalize", 0.6, None)),
    (("AutoContrast", 0.8, None), ("Solarize", 0.2, 8)),
    (("Brightness", 0.1, 3), ("Color", 0.7, 0)),
    (("Solarize", 0.4, 5), ("AutoContrast", 0.9, None)),
    (("TranslateY", 0.9, 9), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.9, None), ("Solarize", 0.8, 3)),
    (("Equalize", 0.8, None), ("Invert", 0.1, None)),
    (("TranslateY", 0.7, 9), ("AutoContrast", 0.9, None)),
)
_NUM_LEVELS = 10
_UNSIGNED = {"Posterize", "Solarize", "AutoContrast", "Equalize", "Invert"}


class Operation(NamedTuple):
    """An image operation without remaining randomness."""

    name: str
    level: int | None = None
    sign: int = 1


_IDENTITY = Operation("Identity")


def _operation_tables() -> tuple[tuple[Operation, ...], Tensor, Tensor]:
    """All distinct operations; which one (sub-policy, position, sign bit) means; how probable each position is."""
    operations = [_IDENTITY]
    table = torch.zeros(len(CIFAR10_POLICIES), 2, 2, dtype=torch.int64)
    probability = torch.zeros(len(CIFAR10_POLICIES), 2)
    for row, policy in enumerate(CIFAR10_POLICIES):
        for position, (name, p, level) in enumerate(policy):
            probability[row, position] = p
            for bit, sign in enumerate((1, -1)):
                operation = Operation(name, level, 1 if name in _UNSIGNED else sign)
                if operation not in operations:
                    operations.append(operation)
                table[row, position, bit] = operations.index(operation)
    return tuple(operations), table, probability


OPERATIONS, _OPERATION_TABLE, _PROBABILITY = _operation_tables()


def draw_operations(count: int, generator: torch.Generator) -> Tensor:
    """Draw the two operations of each image as indices into OPERATIONS: int64 (count, 2), on the host."""
    # Read by the host: no synchronisation if the generator is on the host.
    device = generator.device
    policy = torch.randint(len(CIFAR10_POLICIES), (count,), generator=generator, device=device).cpu()
    sign_bit = torch.randint(2, (count, 2), generator=generator, device=device).cpu()
    chance = torch.rand(count, 2, generator=generator, device=device).cpu()
    drawn = _OPERATION_TABLE[policy[:, None], torch.arange(2), sign_bit]
    return torch.where(chance < _PROBABILITY[policy], drawn, OPERATIONS.index(_IDENTITY))


def apply_operations(images: Tensor, operations: Tensor) -> Tensor:
    """Apply to image i the operation OPERATIONS[operations[i]]; equal operations run as one call."""
    if len(images) == 0:
        return images
    present, counts = operations.unique(return_counts=True)
    order = to_device(operations.argsort(), images.device)
    groups = images[order].split(counts.tolist())
    changed = [apply_operation(group, OPERATIONS[i]) for group, i in zip(groups, present.tolist(), strict=True)]
    return torch.empty_like(images).index_copy_(0, order, torch.cat(changed))


def auto_augment(images: Tensor, generator: torch.Generator, shard: Shard | None = None) -> Tensor:
    """AutoAugment on uint8 images (N, C, H, W), distributed as torchvision's transform applied to each image alone."""
    count, rows = (len(images), slice(None)) if shard is None else (shard.total, shard.rows)
    first, second = draw_operations(count, generator)[rows].unbind(1)
    return apply_operations(apply_operations(images, first), second)


@cache
def _magnitude(operation: Operation, height: int, width: int) -> float:
    """The level's magnitude as torchvision computes it, in float32 (it is truncated to whole pixels and bits)."""
    name, level, sign = operation
    if level is None:
        return 0.0
    if name == "Posterize":
        return float(8 - round(level / ((_NUM_LEVELS - 1) / 4)))
    largest = {
        "ShearX": 0.3,
        "ShearY": 0.3,
        "TranslateX": 150.0 / 331.0 * width,
        "TranslateY": 150.0 / 331.0 * height,
        "Rotate": 30.0,
    }.get(name, 0.9)
    levels = (
        torch.linspace(255.0, 0.0, _NUM_LEVELS) if name == "Solarize" else torch.linspace(0.0, largest, _NUM_LEVELS)
    )
    return sign * float(levels[level])


def apply_operation(images: Tensor, operation: Operation) -> Tensor:
    """One operation on uint8 images (N, C, H, W): torchvision's own, nearest neighbour, black outside the image."""
    import_torchvision()
    from torchvision.transforms.v2 import functional as F

    name = operation.name
    magnitude = _magnitude(operation, images.shape[-2], images.shape[-1])

    def affine(translate: tuple[int, int] = (0, 0), shear: tuple[float, float] = (0.0, 0.0)) -> Tensor:
        # AutoAugment shears about the corner; the centre does not matter to a translation.
        return F.affine(images, angle=0.0, translate=list(translate), scale=1.0, shear=list(shear), center=[0, 0])

    match name:
        case "Identity":
            return images
        case "ShearX":
            return affine(shear=(math.degrees(math.atan(magnitude)), 0.0))
        case "ShearY":
            return affine(shear=(0.0, math.degrees(math.atan(magnitude))))
        case "TranslateX":
            return affine(translate=(int(magnitude), 0))
        case "TranslateY":
            return affine(translate=(0, int(magnitude)))
        case "Rotate":
            return F.rotate(images, angle=magnitude)
        case "Brightness":
            return F.adjust_brightness(images, brightness_factor=1.0 + magnitude)
        case "Color":
            return F.adjust_saturation(images, saturation_factor=1.0 + magnitude)
        case "Contrast":
            return F.adjust_contrast(images, contrast_factor=1.0 + magnitude)
        case "Sharpness":
            return F.adjust_sharpness(images, sharpness_factor=1.0 + magnitude)
        case "Posterize":
            return F.posterize(images, bits=int(magnitude))
        case "Solarize":
            return F.solarize(images, threshold=magnitude)
        case "AutoContrast":
            return F.autocontrast(images)
        case "Equalize":
            return F.equalize(images)
        case "Invert":
            return F.invert(images)
    raise ValueError(f"unknown operation {name!r}")
