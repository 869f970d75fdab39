"""Gradients against finite differences in float64, for the closed form and for the reference itself."""

import pytest
import torch

import plsp_kernels
from cases import DIFFERENTIABLE, KINDS, STRENGTH, TERMS, clear_threshold, make_problem, torch_impl_module
from plsp_kernels import reference

IMPLEMENTATIONS = ("auto", "reference")


@pytest.mark.parametrize("strength", [0.0, STRENGTH, 4.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
class TestFunctions:
    def test_log_softmax(self, impl, kind, strength):
        problem = make_problem(3, 4, 5, 3, kind=kind).leaves()

        def function(logits, weight):
            return plsp_kernels.semantic_log_softmax(
                logits, weight, problem.covariance, problem.pseudo_labels, strength=strength, impl=impl
            )

        assert torch.autograd.gradcheck(function, (problem.weak_logits, problem.weight))

    @pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
    def test_cross_entropy(self, impl, kind, strength, reduction):
        problem = make_problem(4, 1, 5, 3, kind=kind).leaves()

        def function(logits, weight):
            return plsp_kernels.semantic_cross_entropy(
                logits, weight, problem.covariance, problem.labels, strength=strength, reduction=reduction, impl=impl
            )

        assert torch.autograd.gradcheck(function, (problem.labeled_logits, problem.weight))


@pytest.mark.parametrize("classes", [None, torch.tensor([2, 0, 2])], ids=["all classes", "some classes"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_quadratic_form(impl, kind, classes):
    problem = make_problem(0, 0, 4, 3, kind=kind).leaves()

    def function(weight):
        return plsp_kernels.pairwise_quadratic_form(weight, problem.covariance, classes, impl=impl)

    assert torch.autograd.gradcheck(function, (problem.weight,))


@pytest.mark.parametrize("direct", [False, True], ids=["separable form", "direct form"])
def test_log_softmax_in_both_inner_forms(direct, monkeypatch):
    if direct:
        monkeypatch.setattr(torch_impl_module("log_odds")._Separable, "of", staticmethod(lambda *args: None))
    problem = make_problem(3, 4, 5, 3).leaves()

    def function(logits, weight):
        return plsp_kernels.semantic_log_softmax(
            logits, weight, problem.covariance, problem.pseudo_labels, strength=STRENGTH, impl="auto"
        )

    assert torch.autograd.gradcheck(function, (problem.weak_logits, problem.weight))


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("with_candidates", [False, True], ids=["", "labelled candidates"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_loss(impl, kind, with_candidates, term, monkeypatch):
    """Pseudo-targets are frozen: they depend on weak logits and weight but carry no gradient."""
    problem = make_problem(3, 5, 5, 3, kind=kind, seed=4).leaves()
    targets = plsp_kernels.probit_probabilities(
        problem.weak_logits, problem.weight, problem.covariance, problem.pseudo_labels, strength=STRENGTH
    )
    for module in (reference, torch_impl_module("term_sums")):
        monkeypatch.setattr(module, "probit_probabilities", lambda *args, **options: targets.clone())
    options = {"pseudo_labels": problem.pseudo_labels, "thresholds": clear_threshold(targets.max(1).values)}
    if with_candidates:
        options["labeled_candidates"] = problem.labeled_candidates
    mask = problem.loss(impl=impl, **options).mask
    assert mask.any()
    assert not mask.all()

    def function(labeled, weak, strong, weight):
        loss = plsp_kernels.semantic_upper_bound_loss(
            labeled,
            weak,
            strong,
            weight,
            problem.covariance,
            problem.labels,
            problem.candidates,
            strength=STRENGTH,
            ss_weight=0.7,
            impl=impl,
            **options,
        )
        return getattr(loss, term)

    assert torch.autograd.gradcheck(function, tuple(getattr(problem, name) for name in DIFFERENTIABLE))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_no_gradient_flows_through_the_pseudo_targets(impl):
    """The consistency term depends on the weak logits but gives them no gradient."""
    problem = make_problem(3, 5, seed=1).leaves()
    loss = problem.loss(impl=impl, thresholds=0)
    assert loss.mask.any()
    assert not problem.gradients(loss.consistency)["weak_logits"].any()
    moved = problem.map(lambda t: 1.1 * t, ["weak_logits"])
    options = {"thresholds": 0, "pseudo_labels": loss.pseudo_labels}
    assert moved.loss(impl=impl, **options).consistency != problem.loss(impl=impl, **options).consistency


def _scalars(problem):
    loss = problem.loss(impl="auto")
    samples = problem.weight, problem.covariance, problem.pseudo_labels
    return {
        "loss": loss.total,
        "log_softmax": plsp_kernels.semantic_log_softmax(
            problem.weak_logits, *samples, strength=STRENGTH, impl="auto"
        ).square().sum(),
        "cross_entropy": plsp_kernels.semantic_cross_entropy(
            problem.weak_logits, *samples, strength=STRENGTH, impl="auto"
        ).square(),
        "quadratic_form": plsp_kernels.pairwise_quadratic_form(*samples[:2], impl="auto").square().sum(),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["loss", "log_softmax", "cross_entropy", "quadratic_form"])
@pytest.mark.parametrize("with_respect_to", ["weak_logits", "weight"])
def test_double_backward_is_an_error(name, with_respect_to):
    """Also if the loss itself is part of the differentiated expression, so that the graph is not empty."""
    if (name, with_respect_to) == ("quadratic_form", "weak_logits"):
        pytest.skip("the quadratic form does not depend on logits")
    problem = make_problem(3, 5).leaves([with_respect_to])
    scalar = _scalars(problem)[name]

    def penalise():
        (gradient,) = torch.autograd.grad(scalar, getattr(problem, with_respect_to), create_graph=True)
        (scalar + gradient.square().sum()).backward()

    with pytest.raises(RuntimeError, match=r"(?i)twice|second derivative|double backward"):
        penalise()


def test_reference_supports_second_derivatives():
    problem = make_problem(2, 2, 3, 2).leaves()

    def function(logits, weight):
        return plsp_kernels.semantic_log_softmax(
            logits, weight, problem.covariance, problem.pseudo_labels, strength=STRENGTH, impl="reference"
        )

    assert torch.autograd.gradgradcheck(function, (problem.weak_logits, problem.weight))
