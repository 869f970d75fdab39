"""Random inputs of one training step at a given shape."""

import torch
from torch import Tensor

from benchmarks.shapes import Shape
from plsp_kernels import class_activation_labels

STRENGTH, THRESHOLD = 0.01, 0.5


class Problem:
    """Logits, classifier, statistics and candidate sets; the same numbers for every dtype and device."""

    def __init__(self, shape: Shape, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(0)
        num_classes, d = shape.num_classes, shape.num_features
        count = shape.num_labeled + shape.num_unlabeled

        def floats(*size: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(size, generator=generator)).to(device, dtype)

        self.weight = floats(num_classes, d, scale=d**-0.5).requires_grad_()
        if shape.covariance == "full":
            factor = floats(num_classes, d, d, scale=d**-0.5)
            self.covariance = factor @ factor.mT
        else:
            self.covariance = floats(num_classes, d).square()
        self.labeled, self.weak, self.strong = (
            floats(rows, num_classes, scale=3).requires_grad_()
            for rows in (shape.num_labeled, shape.num_unlabeled, shape.num_unlabeled)
        )
        self.features = floats(shape.num_labeled, d)
        own = torch.randint(num_classes, (shape.num_unlabeled, 1), generator=generator)
        candidates = (torch.rand(shape.num_unlabeled, num_classes, generator=generator) < 0.3).scatter_(1, own, True)
        self.candidates = candidates.to(device)
        self.labels = torch.randint(num_classes, (shape.num_labeled,), generator=generator).to(device)
        self.pseudo_labels = class_activation_labels(self.weak, self.candidates)
        # Every sample of a class of its own, as far as there are classes: as much work as the shape can ask for.
        distinct = (torch.randperm(count, generator=generator) % num_classes).to(device)
        self.distinct_classes = distinct.split([shape.num_labeled, shape.num_unlabeled])

    @property
    def device(self) -> torch.device:
        return self.weight.device
