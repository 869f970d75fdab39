"""Benchmark shapes: one training step of each data set in the paper, large ones, and those of other users."""

from typing import NamedTuple


class Shape(NamedTuple):
    name: str
    num_labeled: int
    num_unlabeled: int
    num_classes: int
    num_features: int
    covariance: str = "full"


def _by_name(*shapes: Shape) -> dict[str, Shape]:
    return {shape.name: shape for shape in shapes}


SHAPES = _by_name(
    Shape("fmnist", 64, 256, 10, 84),
    Shape("cifar10", 64, 256, 10, 69),
    Shape("cifar100", 16, 64, 100, 512),
    Shape("large", 64, 256, 1000, 512),
    Shape("large-diagonal", 64, 256, 1000, 2048, "diagonal"),
)

BETWEEN = _by_name(
    Shape("classes-40", 64, 256, 40, 128),
    Shape("classes-200", 16, 64, 200, 256),
    Shape("large-batch", 256, 1024, 100, 64),
)
"""Steps between those of the paper and the large ones, where no single cost dominates."""

SUPERVISED = _by_name(
    Shape("cifar10-resnet110", 128, 0, 10, 64),
    Shape("cifar100-resnet110", 128, 0, 100, 64),
    Shape("cifar100-wrn16-8", 128, 0, 100, 512),
    Shape("cifar10-wrn28-10", 128, 0, 10, 640),
    Shape("cifar100-wrn28-10", 128, 0, 100, 640),
    Shape("imagenet-resnet50", 256, 0, 1000, 2048, "diagonal"),
    Shape("imagenet-resnet18", 256, 0, 1000, 512),
)
"""Batches of implicit semantic data augmentation (ISDA): the batch sizes, networks and kinds of covariance of its
experiments, and 1000 classes with full covariances."""

ALL_SHAPES = SHAPES | BETWEEN | SUPERVISED
