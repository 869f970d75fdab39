"""What callers have at hand: integers of any width, NumPy's numbers, lists, and values that are wrong in themselves."""

import numpy as np
import pytest
import torch

import plsp_kernels
from cases import make_problem
from plsp_kernels import CurriculumThreshold, SemanticCovariance, SemanticUpperBoundLoss, checks

INTEGERS = (torch.int32, torch.int16, torch.uint8)


def _loss(problem, **changes):
    tensors = {
        name: getattr(problem, name)
        for name in ("labeled_logits", "weak_logits", "strong_logits", "weight", "covariance", "labels", "candidates")
    }
    options = {"strength": 0.5, "thresholds": 0.25, "pseudo_labels": problem.pseudo_labels}
    return plsp_kernels.semantic_upper_bound_loss(**{**tensors, **options, **changes})


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
def test_class_numbers_of_any_width_are_accepted(dtype, impl):
    problem = make_problem()
    labels, pseudo_labels = problem.labels.to(dtype), problem.pseudo_labels.to(dtype)
    found = _loss(problem, labels=labels, pseudo_labels=pseudo_labels, impl=impl)
    assert torch.equal(found.total, _loss(problem, impl=impl).total)
    samples = problem.labeled_logits, problem.weight, problem.covariance
    for function in (plsp_kernels.semantic_log_softmax, plsp_kernels.semantic_cross_entropy):
        options = {"strength": 0.5, "impl": impl}
        assert torch.equal(function(*samples, labels, **options), function(*samples, problem.labels, **options))
    form = plsp_kernels.pairwise_quadratic_form
    assert torch.equal(form(*samples[1:], labels), form(*samples[1:], problem.labels))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_state_updates_accept_integers_of_any_width(dtype):
    states = [SemanticCovariance(3, 2) for _ in range(2)]
    curricula = [CurriculumThreshold(5, 3) for _ in range(2)]
    features, labels, index = torch.randn(4, 2), torch.tensor([0, 2, 2, 1]), torch.tensor([4, 0, 1, 2])
    for kind, state, curriculum in zip((torch.int64, dtype), states, curricula, strict=True):
        state.update(features, labels.to(kind))
        curriculum.update(index.to(kind), labels.to(kind), torch.ones(4, dtype=torch.bool))
    for ours, theirs in ((states[0], states[1]), (curricula[0], curricula[1])):
        assert all(map(torch.equal, ours.buffers(), theirs.buffers()))


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, np.int64], ids=lambda kind: kind.__name__)
def test_numpy_numbers_are_accepted(kind):
    problem = make_problem()
    names = ("strength", "ss_weight", "thresholds", "beta")
    found, expected = (_loss(problem, **dict.fromkeys(names, value)) for value in (kind(1), 1.0))
    assert torch.equal(found.total, expected.total)
    criterion = SemanticUpperBoundLoss(
        np.int64(9), np.int32(4), np.uint8(3), threshold=np.float32(0.5), beta=np.float32(1.5)
    )
    assert (criterion.beta, criterion.curriculum.threshold) == (1.5, 0.5)
    assert type(criterion.beta) is type(criterion.curriculum.threshold) is float


@pytest.mark.parametrize("form", [list, tuple, np.array], ids=["list", "tuple", "array"])
def test_thresholds_may_be_a_sequence(form):
    problem = make_problem()
    values = [0.125 * i for i in range(problem.weight.shape[0])]
    assert torch.equal(
        _loss(problem, thresholds=form(values)).total, _loss(problem, thresholds=torch.tensor(values)).total
    )
    with pytest.raises(ValueError, match=r"thresholds must lie in \[0, 1\]"):
        _loss(problem, thresholds=form([*values[:-1], 1.5]))
    with pytest.raises(ValueError, match="thresholds must have shape"):
        _loss(problem, thresholds=form(values[:-1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sigma: sigma + torch.eye(sigma.shape[1]).roll(1, 0), "symmetric"),
        (lambda sigma: -sigma, "not be negative, but class [0-9] has an eigenvalue"),
        (lambda sigma: -sigma.diagonal(dim1=1, dim2=2), "not be negative, but class [0-9] has a variance"),
        (lambda sigma: sigma * torch.inf, "finite"),
        (lambda sigma: sigma * torch.nan, "finite"),
    ],
)
def test_value_checks_name_an_invalid_covariance(change, message, monkeypatch):
    problem = make_problem()
    wrong = change(problem.covariance)
    monkeypatch.setattr(checks, "_CHECK_VALUES", True)
    assert _loss(problem).total.isfinite()
    with pytest.raises(ValueError, match=f"covariance must .*{message}"):
        _loss(problem, covariance=wrong)


def test_a_running_covariance_passes_the_value_checks(monkeypatch):
    """Statistics are symmetric and not negative up to rounding only."""
    monkeypatch.setattr(checks, "_CHECK_VALUES", True)
    state = SemanticCovariance(3, 5)
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        state.update(100 + torch.randn(7, 5, generator=generator)[:, :1].expand(7, 5), torch.arange(7) % 3)
    plsp_kernels.pairwise_quadratic_form(torch.ones(3, 5), state.covariance)


@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_function_transforms_are_refused_with_an_alternative(impl):
    problem = make_problem()
    samples = problem.covariance, problem.labels

    def mean_loss(weight, impl):
        return plsp_kernels.semantic_cross_entropy(problem.labeled_logits, weight, *samples, strength=0.5, impl=impl)

    with pytest.raises(RuntimeError, match=r"torch\.func.*impl='reference'"):
        torch.func.grad(lambda weight: mean_loss(weight, impl))(problem.weight)
    gradient = torch.func.grad(lambda weight: mean_loss(weight, "reference"))(problem.weight)
    assert gradient.shape == problem.weight.shape
    assert gradient.any()
