"""Benchmark shapes: one training step of each data set in the paper, and a large one."""

from typing import NamedTuple


class Shape(NamedTuple):
    name: str
    num_labeled: int
    num_unlabeled: int
    num_classes: int
    num_features: int
    covariance: str = "full"


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("fmnist", 64, 256, 10, 84),
        Shape("cifar10", 64, 256, 10, 69),
        Shape("cifar100", 16, 64, 100, 512),
        Shape("large", 64, 256, 1000, 512),
        Shape("large-diagonal", 64, 256, 1000, 2048, "diagonal"),
    )
}
