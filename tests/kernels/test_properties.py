"""Property-based tests: any shape, dtype, layout, candidate pattern and strength against the float64 reference.

The rule and the sources of its slack are those of test_functional; larger strengths make larger exponents, whose
rounding scales with their size.
"""

import dataclasses

import hypothesis.strategies as st
import torch
from hypothesis import assume, given, settings
from test_functional import GRADIENT_SLACK, VALUE_SLACK

import plsp_kernels
from cases import (
    FORMS,
    KINDS,
    PATTERNS,
    TERMS,
    Problem,
    assert_error_rule,
    clear_threshold,
    closed_form,
    make_problem,
    maximum,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, torch.ones_like(tensor)], dim=-1)[..., 0]


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


LAYOUTS = {"contiguous": lambda tensor: tensor, "strided": _strided, "transposed": _transposed}


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    sizes = draw(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(2, 12), st.integers(1, 9)))
    problem = make_problem(
        *sizes,
        dtype=draw(st.sampled_from(DTYPES)),
        kind=draw(st.sampled_from(KINDS)),
        pattern=draw(st.sampled_from(PATTERNS)),
        seed=draw(st.integers(0, 2**31)),
    )
    scale = draw(st.sampled_from([0.0, 0.25, 1.0, 8.0]))
    problem = problem.map(lambda logits: logits * scale, ["labeled_logits", "weak_logits", "strong_logits"])
    for field in dataclasses.fields(problem):
        problem = problem.map(LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))], [field.name])
    return problem


strengths = st.one_of(st.just(0.0), st.floats(1e-3, 10.0))


def exponent_size(problem: Problem, strength: float) -> float:
    double = problem.to(torch.float64)
    form = plsp_kernels.pairwise_quadratic_form(double.weight, double.covariance, impl="reference")
    logits = [maximum(getattr(double, name)) for name in ("labeled_logits", "weak_logits", "strong_logits")]
    return max(1.0, strength / 2 * maximum(form), *logits)


def check(found, rival, truth, slack, name):
    if found.dtype == torch.float64:
        slack *= (
            torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps * 16
        )  # any summation order: 16 times more
    assert_error_rule(found.detach(), rival.detach(), truth.detach(), slack, name)


@settings(max_examples=300)
@given(problems(), strengths, st.booleans(), st.booleans(), st.floats(0, 2), st.sampled_from(FORMS))
def test_loss_is_as_accurate_as_the_reference(problem, strength, inside, with_candidates, ss_weight, form):
    double = problem.to(torch.float64)
    options = {"strength": strength, "pseudo_labels": problem.pseudo_labels, "ss_weight": ss_weight}
    options["argmax_in_candidates"] = inside
    if with_candidates:
        options["labeled_candidates"] = problem.labeled_candidates
    probabilities = plsp_kernels.probit_probabilities(
        double.weak_logits, double.weight, double.covariance, double.pseudo_labels, strength=strength, impl="reference"
    )
    best = probabilities.topk(2).values
    # equal logits give equal probabilities, and rounding decides the class
    assume(((best[:, 0] - best[:, 1]) > 1e-4 * best[:, 0]).all())
    options["thresholds"] = clear_threshold(best[:, 0])

    runs = []
    for case, impl in ((problem, "auto"), (problem, "reference"), (double, "reference")):
        leaves = case.map(
            lambda t: t.detach().requires_grad_(), ["labeled_logits", "weak_logits", "strong_logits", "weight"]
        )
        with closed_form(form):
            loss = leaves.loss(impl=impl, **options)
        runs.append((loss, leaves.gradients(loss.total)))
    (found, gradients), (rival, rival_gradients), (truth, true_gradients) = runs
    exponent = exponent_size(problem, strength)
    for term in (*TERMS, "confidence"):
        check(getattr(found, term), getattr(rival, term), getattr(truth, term), VALUE_SLACK * exponent, term)
    assert torch.equal(found.mask, truth.mask)
    assert torch.equal(found.prediction, truth.prediction)
    for name, gradient in gradients.items():
        check(gradient, rival_gradients[name], true_gradients[name], GRADIENT_SLACK * exponent, name)


@settings(max_examples=100)
@given(problems(), strengths)
def test_functions_are_as_accurate_as_the_reference(problem, strength):
    def run(case, impl):
        samples = case.weight, case.covariance, case.pseudo_labels
        options = {"strength": strength, "impl": impl}
        return {
            "log_softmax": plsp_kernels.semantic_log_softmax(case.weak_logits, *samples, **options),
            "probit": plsp_kernels.probit_probabilities(case.weak_logits, *samples, **options),
            "cross_entropy": plsp_kernels.semantic_cross_entropy(
                case.labeled_logits, *samples[:2], case.labels, reduction="none", **options
            ),
            "quadratic_form": plsp_kernels.pairwise_quadratic_form(*samples, impl=impl),
        }

    found, rival, truth = run(problem, "auto"), run(problem, "reference"), run(problem.to(torch.float64), "reference")
    exponent = exponent_size(problem, strength)
    for name in truth:
        check(found[name], rival[name], truth[name], VALUE_SLACK * exponent, name)
    assert ((found["probit"] >= 0) & (found["probit"] <= 1)).all()
    assert (found["quadratic_form"] >= 0).all()


@settings(max_examples=100)
@given(problems())
def test_class_activation_labels_are_the_best_candidates(problem):
    found = plsp_kernels.class_activation_labels(problem.weak_logits, problem.candidates)
    for row, candidates, label in zip(
        problem.weak_logits.tolist(), problem.candidates.tolist(), found.tolist(), strict=True
    ):
        values = {j: z * abs(z - 1) for j, (z, inside) in enumerate(zip(row, candidates, strict=True)) if inside}
        # rounding in float32 may decide between values this close
        assert label in values
        assert values[label] >= max(values.values()) - 1e-6 * max(1, abs(max(values.values())))


@settings(max_examples=60)
@given(st.data())
def test_statistics_do_not_depend_on_the_split(data):
    """float32 batches of any size, including empty ones, give the population covariance of all samples."""
    num_classes, num_features = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 6))
    sizes = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=8))
    kind = data.draw(st.sampled_from(KINDS))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    features = torch.randn(sum(sizes), num_features, generator=generator)
    labels = torch.randint(num_classes, (sum(sizes),), generator=generator)
    statistics = plsp_kernels.SemanticCovariance(num_classes, num_features, kind)
    for part, part_labels in zip(features.split(sizes), labels.split(sizes), strict=True):
        statistics.update(part, part_labels)
    for y in range(num_classes):
        members = features[labels == y].double()
        if len(members) == 0:
            assert not statistics.covariance[y].any()
            continue
        centred = members - members.mean(0)
        expected = centred.T @ centred / len(members)
        expected = expected if kind == "full" else expected.diag()
        torch.testing.assert_close(statistics.covariance[y].double(), expected, rtol=0, atol=2e-6)
