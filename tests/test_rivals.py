"""The rivals of the benchmarks compute what the reference computes: values and gradients in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks import gram_form, isda_form
from benchmarks.problem import STRENGTH, Problem
from benchmarks.shapes import Shape
from plsp_kernels import reference

SHAPES = [
    Shape("odd", 5, 9, 7, 11),
    Shape("odd", 5, 9, 7, 11, "diagonal"),
    Shape("more samples than classes", 9, 23, 3, 2),
    Shape("one of each", 1, 1, 2, 1),
]


def assert_same(found: Callable[..., Tensor], expected: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    results = []
    for function in (found, expected):
        value = function()
        upstream = torch.linspace(-1, 2, value.numel(), dtype=value.dtype).view_as(value) if value.dim() else None
        results.append([value, *torch.autograd.grad(value, inputs, upstream)])
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gram_form_of_the_loss_is_the_reference(shape: Shape) -> None:
    problem = Problem(shape, dtype=torch.float64)
    step = problem.step()
    assert_same(
        lambda: gram_form.semantic_upper_bound_loss(step),
        lambda: reference.semantic_upper_bound_loss(step).total,
        [problem.labeled, problem.weak, problem.strong, problem.weight],
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gram_form_of_every_function_is_the_reference(shape: Shape) -> None:
    problem = Problem(shape, dtype=torch.float64)
    classes, matrices = problem.pseudo_labels, (problem.weight, problem.covariance)
    assert_same(
        lambda: gram_form.pairwise_quadratic_form(*matrices, classes),
        lambda: reference.pairwise_quadratic_form(*matrices, classes),
        [problem.weight],
    )
    assert_same(
        lambda: gram_form.semantic_log_softmax(problem.strong, *matrices, classes, strength=STRENGTH),
        lambda: reference.semantic_log_softmax(problem.strong, *matrices, classes, strength=STRENGTH),
        [problem.strong, problem.weight],
    )
    with torch.no_grad():
        found = gram_form.probit_probabilities(problem.weak, *matrices, classes, strength=STRENGTH)
        expected = reference.probit_probabilities(problem.weak, *matrices, classes, strength=STRENGTH)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rival", [gram_form, isda_form], ids=lambda rival: rival.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cross_entropy_of_the_rivals_is_the_reference(shape: Shape, rival: object) -> None:
    problem = Problem(shape, dtype=torch.float64)
    arguments = problem.labeled, problem.weight, problem.covariance, problem.labels
    assert_same(
        lambda: rival.semantic_cross_entropy(*arguments, strength=STRENGTH),  # type: ignore[attr-defined]
        lambda: reference.semantic_cross_entropy(*arguments, strength=STRENGTH),
        [problem.labeled, problem.weight],
    )
