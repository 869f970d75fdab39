"""Subjects of each case: the eager reference, its rivals, our implementations, and baselines for scale."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import plsp_kernels
from benchmarks import gram_form, isda_form
from benchmarks.problem import STRENGTH, THRESHOLD, Problem
from plsp_kernels import CurriculumThreshold, SemanticCovariance, native, reference
from plsp_kernels.batch import LabeledBatch
from plsp_kernels.step import Step

REFERENCE, COMPILED = "reference", "compiled reference"
GRAM_FORM, COMPILED_GRAM_FORM, ISDA_FORM = "Gram form", "compiled Gram form", "ISDA as released"
CLOSED_FORM, NATIVE, TRITON = "closed form", "native", "triton"
OURS = (TRITON, NATIVE, CLOSED_FORM)
"""Our implementations, in the order of preference of impl="auto"."""
STATE = "O(batch) update"
DISTINCT, FLOOR, PLAIN = "closed form, all classes distinct", "bare bmm(W, Σ)", "plain cross-entropy"
GEMMS = "GEMMs of the classes present"
CONTEXT = (DISTINCT, FLOOR, GEMMS, PLAIN)
"""Baselines for scale, with other functions or inputs; not compared with the reference."""

NUM_INSTANCES = 60_000  # size of Fashion-MNIST, for the curriculum


class Subject(NamedTuple):
    """A pair of calls. Both return their results; `step` also returns the gradients."""

    forward: Callable[[], list[Tensor]]
    step: Callable[[], list[Tensor]] | None = None
    """None if there is nothing to differentiate."""

    @property
    def whole(self) -> Callable[[], list[Tensor]]:
        return self.step or self.forward


def _differentiable(function: Callable[[], Tensor], inputs: list[Tensor]) -> Subject:
    """Subject whose step calls backward on the sum of the results."""

    def forward() -> list[Tensor]:
        return [function().detach()]

    def step() -> list[Tensor]:
        result = function()
        return [result.detach(), *torch.autograd.grad(result.sum(), inputs)]

    return Subject(forward, step)


def _implementations(name: str, problem: Problem) -> dict[str, Callable[..., Any]]:
    """Subjects of a row-wise function, one per implementation available on the device."""
    found = _eager(getattr(reference, name), getattr(gram_form, name))
    public = getattr(plsp_kernels, name)
    found[CLOSED_FORM] = partial(public, impl="torch")
    if problem.device.type == "cuda":
        found[TRITON] = partial(public, impl="triton")
    return found


def _eager(literal: Callable[..., Any], rival: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {
        REFERENCE: literal,
        COMPILED: torch.compile(literal),
        GRAM_FORM: rival,
        COMPILED_GRAM_FORM: torch.compile(rival),
    }


def _losses(problem: Problem) -> dict[str, Callable[[Step], Tensor]]:
    """Subjects of the loss, one per implementation that can serve the problem."""

    def literal(step: Step) -> Tensor:
        return reference.semantic_upper_bound_loss(step).total

    def public(impl: str) -> Callable[[Step], Tensor]:
        def loss(step: Step) -> Tensor:
            options = step._asdict() | {"strength": STRENGTH, "thresholds": THRESHOLD, "ss_weight": 1.0, "impl": impl}
            return plsp_kernels.semantic_upper_bound_loss(**options).total

        return loss

    found = _eager(literal, gram_form.semantic_upper_bound_loss)
    found[CLOSED_FORM] = public("torch")
    if native.step_refusal(problem.step()) is None:
        found[NATIVE] = public("native")
    if problem.device.type == "cuda":
        found[TRITON] = public("triton")
    return found


def loss(problem: Problem) -> dict[str, Subject]:
    """The whole loss of a step."""
    inputs = [problem.labeled, problem.weak, problem.strong, problem.weight]

    def subject(function: Callable[[Step], Tensor], step: Step) -> Subject:
        return _differentiable(lambda: function(step), inputs)

    functions = _losses(problem)
    subjects = {name: subject(function, problem.step()) for name, function in functions.items()}
    subjects[DISTINCT] = subject(functions[CLOSED_FORM], problem.step(*problem.distinct_classes))
    if problem.covariance.dim() == 3:
        weight = problem.weight.detach().expand(problem.shape.num_classes, *problem.weight.shape)
        subjects[FLOOR] = Subject(lambda: [torch.bmm(weight, problem.covariance)])
    subjects[GEMMS] = _loss_gemms(problem)
    subjects[PLAIN] = _differentiable(lambda: F.cross_entropy(problem.labeled, problem.labels), [problem.labeled])
    return subjects


def _loss_gemms(problem: Problem) -> Subject:
    """T = W Σ_y, which is no GEMM for a diagonal Σ_y, G = T Wᵀ and the sum of ∂L/∂G T, class by class in one buffer."""
    weight, covariance = problem.weight.detach(), problem.covariance
    classes = torch.cat([problem.labels, problem.pseudo_labels]).unique().tolist()
    transform = torch.mm if covariance.dim() == 3 else torch.mul
    product, gram = torch.empty_like(weight), weight.new_empty(len(weight), len(weight))

    def multiply() -> list[Tensor]:
        total = torch.zeros_like(weight)
        for y in classes:
            transform(weight, covariance[y], out=product)
            torch.mm(product, weight.t(), out=gram)
            total.addmm_(gram, product)  # any (l, l) matrix will do
        return [total]

    return Subject(multiply)


def quadratic_form(problem: Problem) -> dict[str, Subject]:
    """Quadratic forms of all class pairs, for every class of the step."""
    classes = torch.cat([problem.labels, problem.pseudo_labels]).unique()
    return {
        name: _differentiable(partial(function, problem.weight, problem.covariance, classes), [problem.weight])
        for name, function in _implementations("pairwise_quadratic_form", problem).items()
    }


def class_gram(problem: Problem) -> dict[str, Subject]:
    """Gram matrices W Σ Wᵀ for every class of the step; here the reference is torch.bmm on the gathered Σ."""
    classes = torch.cat([problem.labels, problem.pseudo_labels]).unique()
    weight, covariance = problem.weight.detach(), problem.covariance

    def multiply() -> list[Tensor]:
        selected = covariance[classes]
        if covariance.dim() == 2:
            product = weight * selected[:, None, :]
        else:
            product = torch.bmm(weight.expand(len(classes), *weight.shape), selected)
        return [torch.bmm(product, weight.t().expand(len(classes), *weight.t().shape))]

    def subject(impl: str) -> Subject:
        return Subject(lambda: [torch.ops.plsp.class_gram(weight, covariance, classes, False, impl)[0]])

    found = {REFERENCE: Subject(multiply), CLOSED_FORM: subject("torch")}
    if problem.device.type == "cuda":
        found[TRITON] = subject("triton")
    return found


def log_softmax(problem: Problem) -> dict[str, Subject]:
    """Semantic log-softmax of the strong view."""
    arguments = problem.strong, problem.weight, problem.covariance, problem.pseudo_labels
    return {
        name: _differentiable(partial(function, *arguments, strength=STRENGTH), [problem.strong, problem.weight])
        for name, function in _implementations("semantic_log_softmax", problem).items()
    }


def cross_entropy(problem: Problem) -> dict[str, Subject]:
    """Semantic cross-entropy of the labelled batch."""
    arguments = problem.labeled, problem.weight, problem.covariance, problem.labels
    functions = _implementations("semantic_cross_entropy", problem) | {ISDA_FORM: isda_form.semantic_cross_entropy}
    strength = torch.tensor(STRENGTH, device=problem.device)
    if native.batch_refusal(LabeledBatch(*arguments, None, strength, 0.0, -100, "mean")) is None:
        functions[NATIVE] = partial(plsp_kernels.semantic_cross_entropy, impl="native")
    subjects = {
        name: _differentiable(partial(function, *arguments, strength=STRENGTH), [problem.labeled, problem.weight])
        for name, function in functions.items()
    }
    return subjects | {GEMMS: _cross_entropy_gemms(problem)}


def _cross_entropy_gemms(problem: Problem) -> Subject:
    """Full: T = W Σ_y of the classes present, in one buffer. Diagonal: two (N, d) × (d, l), and two back to (l, d)."""
    weight, covariance, labels = problem.weight.detach(), problem.covariance, problem.labels
    if covariance.dim() == 3:
        classes, product = labels.unique().tolist(), torch.empty_like(weight)
        return Subject(lambda: [torch.mm(weight, covariance[y], out=product) for y in classes])
    variance = covariance[labels]

    def multiply() -> list[Tensor]:
        columns = [variance @ weight.t() for _ in range(2)]
        return [column.t() @ variance for column in columns]

    return Subject(multiply)


def probit(problem: Problem) -> dict[str, Subject]:
    """Probit probabilities of the weak view."""
    arguments = problem.weak.detach(), problem.weight.detach(), problem.covariance, problem.pseudo_labels

    def subject(function: Callable[..., Any]) -> Subject:
        return Subject(lambda: [function(*arguments, strength=STRENGTH)])

    return {name: subject(f) for name, f in _implementations("probit_probabilities", problem).items()}


def covariance_update(problem: Problem) -> dict[str, Subject]:
    """Update of the class statistics with one labelled batch."""
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
    """Update of the thresholds with one unlabelled batch, out of 60,000 instances."""
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
    for case in (
        *(loss, class_gram, quadratic_form, log_softmax, cross_entropy, probit),
        *(covariance_update, curriculum_update),
    )
}

SUPERVISED_CASES = ("cross_entropy", "covariance_update")
"""Cases that need no unlabelled batch."""
