"""What is measured: for each case the eager reference, what replaces it, and what gives the figures a scale."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import plsp_kernels
from benchmarks.problem import STRENGTH, THRESHOLD, Problem
from plsp_kernels import CurriculumThreshold, SemanticCovariance, reference

REFERENCE, COMPILED = "reference", "compiled reference"
CLOSED_FORM, TRITON = "closed form", "triton"
STATE = "O(batch) update"
DISTINCT, FLOOR, PLAIN = "closed form, all classes distinct", "bare bmm(W, Σ)", "plain cross-entropy"
CONTEXT = (DISTINCT, FLOOR, PLAIN)
"""Other functions or inputs, for scale: they are not compared with the reference."""

NUM_INSTANCES = 60_000  # of the curriculum: Fashion-MNIST's


class Subject(NamedTuple):
    """Something to call. Both calls return what they computed; `step` also the gradients."""

    forward: Callable[[], list[Tensor]]
    step: Callable[[], list[Tensor]] | None = None
    """None where nothing is differentiated."""

    @property
    def whole(self) -> Callable[[], list[Tensor]]:
        return self.step or self.forward


def _differentiable(function: Callable[[], Tensor], inputs: list[Tensor]) -> Subject:
    """With the backward from the sum of what the function returns."""

    def forward() -> list[Tensor]:
        return [function().detach()]

    def step() -> list[Tensor]:
        result = function()
        return [result.detach(), *torch.autograd.grad(result.sum(), inputs)]

    return Subject(forward, step)


def _implementations(name: str, problem: Problem) -> dict[str, Callable[..., Any]]:
    """The public function of this name in every implementation that the device has."""
    eager, public = getattr(reference, name), getattr(plsp_kernels, name)
    found = {REFERENCE: eager, COMPILED: torch.compile(eager), CLOSED_FORM: partial(public, impl="torch")}
    if problem.device.type == "cuda":
        found[TRITON] = partial(public, impl="triton")
    return found


def loss(problem: Problem) -> dict[str, Subject]:
    """The whole loss of a step."""
    inputs = [problem.labeled, problem.weak, problem.strong, problem.weight]

    def subject(function: Callable[..., Any], labels: Tensor, pseudo_labels: Tensor) -> Subject:
        return _differentiable(
            lambda: (
                function(
                    *inputs,
                    problem.covariance,
                    labels,
                    problem.candidates,
                    strength=STRENGTH,
                    thresholds=THRESHOLD,
                    pseudo_labels=pseudo_labels,
                ).total
            ),
            inputs,
        )

    functions = _implementations("semantic_upper_bound_loss", problem)
    subjects = {name: subject(f, problem.labels, problem.pseudo_labels) for name, f in functions.items()}
    subjects[DISTINCT] = subject(functions[CLOSED_FORM], *problem.distinct_classes)
    if problem.covariance.dim() == 3:
        weight = problem.weight.detach().expand(problem.shape.num_classes, *problem.weight.shape)
        subjects[FLOOR] = Subject(lambda: [torch.bmm(weight, problem.covariance)])
    subjects[PLAIN] = _differentiable(lambda: F.cross_entropy(problem.labeled, problem.labels), [problem.labeled])
    return subjects


def quadratic_form(problem: Problem) -> dict[str, Subject]:
    """Quadratic forms of all class pairs, of every class that the step needs."""
    classes = torch.cat([problem.labels, problem.pseudo_labels]).unique()
    return {
        name: _differentiable(partial(function, problem.weight, problem.covariance, classes), [problem.weight])
        for name, function in _implementations("pairwise_quadratic_form", problem).items()
    }


def log_softmax(problem: Problem) -> dict[str, Subject]:
    """Adjusted log-softmax of the strong view."""
    arguments = problem.strong, problem.weight, problem.covariance, problem.pseudo_labels
    return {
        name: _differentiable(partial(function, *arguments, strength=STRENGTH), [problem.strong, problem.weight])
        for name, function in _implementations("semantic_log_softmax", problem).items()
    }


def cross_entropy(problem: Problem) -> dict[str, Subject]:
    """Adjusted cross-entropy of the labelled batch."""
    arguments = problem.labeled, problem.weight, problem.covariance, problem.labels
    return {
        name: _differentiable(partial(function, *arguments, strength=STRENGTH), [problem.labeled, problem.weight])
        for name, function in _implementations("semantic_cross_entropy", problem).items()
    }


def probit(problem: Problem) -> dict[str, Subject]:
    """Probit probabilities of the weak view."""
    arguments = problem.weak.detach(), problem.weight.detach(), problem.covariance, problem.pseudo_labels

    def subject(function: Callable[..., Any]) -> Subject:
        return Subject(lambda: [function(*arguments, strength=STRENGTH)])

    return {name: subject(f) for name, f in _implementations("probit_probabilities", problem).items()}


def covariance_update(problem: Problem) -> dict[str, Subject]:
    """Class statistics after one more labelled batch."""
    shape, features, labels = problem.shape, problem.features, problem.labels
    module = SemanticCovariance(shape.num_classes, shape.num_features, shape.covariance).to(features)
    eager = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def update_all() -> list[Tensor]:
        eager["covariance"], eager["mean"], eager["count"] = reference.update_covariance(
            eager["covariance"], eager["mean"], eager["count"], features, labels
        )
        return list(eager.values())

    def update() -> list[Tensor]:
        module.update(features, labels)
        return list(module.buffers())

    return {REFERENCE: Subject(update_all), STATE: Subject(update)}


def curriculum_update(problem: Problem) -> dict[str, Subject]:
    """Thresholds after one more unlabelled batch, of 60,000 instances."""
    num_classes, device = problem.shape.num_classes, problem.device
    module = CurriculumThreshold(NUM_INSTANCES, num_classes).to(device)
    assigned = module.assigned.clone()
    index = torch.randperm(NUM_INSTANCES, generator=torch.Generator().manual_seed(0)).to(device)
    index, prediction = index[: problem.shape.num_unlabeled], problem.pseudo_labels
    selected = problem.candidates[:, 0]

    def recount() -> list[Tensor]:
        assigned[index] = torch.where(selected, prediction, assigned[index])
        count = torch.bincount(assigned, minlength=num_classes + 1)[:-1]
        return [module.threshold * count / count.max().clamp(min=1)]

    def update() -> list[Tensor]:
        module.update(index, prediction, selected)
        return [module.thresholds]

    return {REFERENCE: Subject(recount), STATE: Subject(update)}


CASES: dict[str, Callable[[Problem], dict[str, Subject]]] = {
    case.__name__: case
    for case in (loss, quadratic_form, log_softmax, cross_entropy, probit, covariance_update, curriculum_update)
}


def reference_elements(case: str, problem: Problem) -> int:
    """About how many numbers the eager reference keeps at once: twice the differences of all class pairs per sample."""
    shape = problem.shape
    num_samples = shape.num_labeled + shape.num_unlabeled
    if case == "covariance_update":
        width = shape.num_features if shape.covariance == "full" else shape.num_labeled
        return 4 * shape.num_classes * shape.num_features * width
    samples = {
        "loss": num_samples + shape.num_unlabeled,
        "quadratic_form": min(shape.num_classes, num_samples),
        "log_softmax": shape.num_unlabeled,
        "cross_entropy": shape.num_labeled,
        "probit": shape.num_unlabeled,
        "curriculum_update": 0,
    }[case]
    return 2 * samples * shape.num_classes**2 * shape.num_features
