"""Random inputs of one training step at a given shape."""

import torch
from torch import Tensor

from benchmarks.shapes import Shape
from plsp_kernels import class_activation_labels
from plsp_kernels.functional import PAPER_BETA
from plsp_kernels.step import Step

STRENGTH, THRESHOLD = 0.01, 0.5


class Problem:
    """Logits, classifier, statistics and candidate sets, with the same values for every dtype and device."""

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
        # Worst case: every sample from a different class, as far as there are enough classes.
        distinct = (torch.randperm(count, generator=generator) % num_classes).to(device)
        self.distinct_classes = distinct.split([shape.num_labeled, shape.num_unlabeled])

    def step(self, labels: Tensor | None = None, pseudo_labels: Tensor | None = None) -> Step:
        """Return the step, optionally with other classes."""
        return Step(
            self.labeled,
            self.weak,
            self.strong,
            self.weight,
            self.covariance,
            self.labels if labels is None else labels,
            self.candidates,
            self.pseudo_labels if pseudo_labels is None else pseudo_labels,
            None,
            self.weight.new_full((self.shape.num_classes,), THRESHOLD),
            torch.tensor(STRENGTH, dtype=torch.float64),
            torch.tensor(1.0, dtype=torch.float64),
            PAPER_BETA,
            True,
        )

    @property
    def device(self) -> torch.device:
        return self.weight.device
