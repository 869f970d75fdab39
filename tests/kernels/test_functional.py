"""Every public function against the float64 reference: values, gradients, options, layouts, both inner forms.

Tolerances: in float64 the closed form and the reference differ by rounding, on this grid by at most 61 epsilon of the
largest element; 1e-12 allows 4500. Other dtypes follow `assert_error_rule`, whose slack covers the summation order in
float32: at most 2.1 epsilon for values and 44 for gradients were measured (log-softmax at l = 41, d = 1, a sum of 697
signed terms); 4 and 64 are allowed.
"""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

import plsp_kernels
from cases import (
    DIFFERENTIABLE,
    KINDS,
    PATTERNS,
    SHAPES,
    STRENGTH,
    TERMS,
    Elsewhere,
    Problem,
    assert_error_rule,
    assert_same,
    clear_threshold,
    closed_form,
    make_problem,
    maximum,
    torch_impl_module,
)
from plsp_kernels import SemanticCovariance, torch_impl
from plsp_kernels.step import Step

VALUE_SLACK, GRADIENT_SLACK = 4, 64
LOW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def upstream(result: Tensor) -> Tensor:
    """A fixed upstream gradient of mixed signs, exact in every dtype."""
    return ((torch.arange(result.numel()) % 7 - 3).view(result.shape) / 4).to(result.dtype)


def log_softmax(problem: Problem, impl: str, strength: float) -> Tensor:
    return plsp_kernels.semantic_log_softmax(
        problem.weak_logits, problem.weight, problem.covariance, problem.pseudo_labels, strength=strength, impl=impl
    )


def cross_entropy(problem: Problem, impl: str, strength: float, reduction: str = "mean") -> Tensor:
    return plsp_kernels.semantic_cross_entropy(
        problem.labeled_logits,
        problem.weight,
        problem.covariance,
        problem.labels,
        strength=strength,
        reduction=reduction,
        impl=impl,
    )


def probit(problem: Problem, impl: str, strength: float) -> Tensor:
    return plsp_kernels.probit_probabilities(
        problem.weak_logits, problem.weight, problem.covariance, problem.pseudo_labels, strength=strength, impl=impl
    )


def quadratic_form(problem: Problem, impl: str, strength: float) -> Tensor:
    return plsp_kernels.pairwise_quadratic_form(problem.weight, problem.covariance, problem.pseudo_labels, impl=impl)


FUNCTIONS = {
    "log_softmax": (log_softmax, ("weak_logits", "weight")),
    "cross_entropy": (cross_entropy, ("labeled_logits", "weight")),
    "probit": (probit, ()),
    "quadratic_form": (quadratic_form, ("weight",)),
}


def evaluate_function(name: str, problem: Problem, impl: str, strength: float) -> dict[str, Tensor]:
    """The function's value and its gradients with respect to every differentiable input."""
    function, inputs = FUNCTIONS[name]
    problem = problem.leaves()
    result = function(problem, impl, strength)
    found = {"value": result.detach()}
    if inputs:
        scalar = (result * upstream(result)).sum(dtype=torch.promote_types(result.dtype, torch.float32))
        found |= problem.gradients(scalar, inputs)
    return found


def evaluate_loss(problem: Problem, impl: str, **options) -> dict[str, Tensor]:
    """The terms and other outputs of the loss, and every gradient of every term."""
    problem = problem.leaves()
    loss = problem.loss(impl=impl, **options)
    found = {name: value.detach() for name, value in loss._asdict().items()}
    for term in TERMS:
        gradients = problem.gradients(getattr(loss, term))
        found |= {f"d {term} / d {name}": gradient for name, gradient in gradients.items()}
    return found


def assert_all_same(found: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        if value.is_floating_point():
            assert_same(found[name], value, tolerance, name)
        else:
            assert torch.equal(found[name], value), name


def assert_all_within_rule(
    found: dict[str, Tensor], rival: dict[str, Tensor], truth: dict[str, Tensor], exponent: float = 1.0
) -> None:
    """`exponent` bounds the exponents: rounding one of size E changes its term by E epsilon."""
    for name, value in truth.items():
        if value.is_floating_point():
            slack = VALUE_SLACK if name == "value" or name in (*TERMS, "confidence") else GRADIENT_SLACK
            assert_error_rule(found[name], rival[name], value, slack * max(1.0, exponent), name)
        else:
            assert torch.equal(found[name], value), name


def loss_options(problem: Problem) -> dict[str, object]:
    """Given pseudo-labels and a threshold away from every confidence, so that rounding cannot flip a decision."""
    confidence = problem.to(torch.float64).loss(impl="reference", pseudo_labels=problem.pseudo_labels).confidence
    return {"pseudo_labels": problem.pseudo_labels, "thresholds": clear_threshold(confidence)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
class TestAgainstReference:
    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_functions_agree_in_float64(self, name, shape, kind):
        problem = make_problem(*shape, kind=kind)
        truth = evaluate_function(name, problem, "reference", STRENGTH)
        assert_all_same(evaluate_function(name, problem, "auto", STRENGTH), truth)

    @pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_functions_are_as_accurate_as_the_reference(self, name, dtype, shape, kind):
        problem = make_problem(*shape, kind=kind, dtype=dtype)
        truth = evaluate_function(name, problem.to(torch.float64), "reference", STRENGTH)
        rival = evaluate_function(name, problem, "reference", STRENGTH)
        assert_all_within_rule(evaluate_function(name, problem, "auto", STRENGTH), rival, truth)

    def test_loss_agrees_in_float64(self, shape, kind):
        problem = make_problem(*shape, kind=kind)
        options = loss_options(problem)
        truth = evaluate_loss(problem, "reference", **options)
        assert_all_same(evaluate_loss(problem, "auto", **options), truth)

    @pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
    def test_loss_is_as_accurate_as_the_reference(self, dtype, shape, kind, form):
        problem = make_problem(*shape, kind=kind, dtype=dtype)
        options = loss_options(problem)
        truth = evaluate_loss(problem.to(torch.float64), "reference", **options)
        rival = evaluate_loss(problem, "reference", **options)
        assert_all_within_rule(evaluate_loss(problem, "auto", **options), rival, truth)


@pytest.mark.parametrize("strength", [0.01, 3.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_small_and_large_strengths_are_as_accurate_as_the_reference(dtype, strength, form):
    problem = make_problem(3, 17, 7, 19, dtype=dtype)
    options = {"pseudo_labels": problem.pseudo_labels, "strength": strength}
    truth = evaluate_loss(problem.to(torch.float64), "reference", **options)
    rival = evaluate_loss(problem, "reference", **options)
    found = evaluate_loss(problem, "auto", **options)
    assert_all_same(found, truth) if dtype == torch.float64 else assert_all_within_rule(found, rival, truth)


@pytest.mark.parametrize("dtype", [torch.float64, *LOW_DTYPES], ids=str)
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_results_and_gradients_have_the_documented_dtypes(impl, dtype):
    problem = make_problem(dtype=dtype).leaves()
    computed = torch.promote_types(dtype, torch.float32)
    loss = problem.loss(impl=impl)
    assert {getattr(loss, term).dtype for term in TERMS} == {computed}
    assert {getattr(loss, term).dim() for term in TERMS} == {0}
    assert loss.confidence.dtype == computed
    assert (loss.prediction.dtype, loss.pseudo_labels.dtype, loss.mask.dtype) == (torch.int64, torch.int64, torch.bool)
    assert cross_entropy(problem, impl, STRENGTH).dtype == computed
    assert cross_entropy(problem, impl, STRENGTH, "none").dtype == computed
    for name in ("log_softmax", "probit", "quadratic_form"):
        assert FUNCTIONS[name][0](problem, impl, STRENGTH).dtype == dtype
    for gradient in problem.gradients(loss.total).values():
        assert gradient.dtype == dtype


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_only_losses_and_log_probabilities_carry_gradients(impl):
    problem = make_problem().leaves((*DIFFERENTIABLE, "covariance"))
    loss = problem.loss(impl=impl)
    assert all(getattr(loss, term).requires_grad for term in TERMS)
    assert not any(tensor.requires_grad for tensor in loss[4:])
    assert not probit(problem, impl, STRENGTH).requires_grad


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_no_gradient_flows_into_the_covariance(impl):
    problem = make_problem().leaves((*DIFFERENTIABLE, "covariance"))
    for result in (problem.loss(impl=impl).total, *(FUNCTIONS[n][0](problem, impl, STRENGTH).sum() for n in FUNCTIONS)):
        if result.requires_grad:
            (gradient,) = torch.autograd.grad(result, [problem.covariance], allow_unused=True)
            assert gradient is None


@pytest.mark.parametrize("names", [s for n in range(5) for s in itertools.combinations(DIFFERENTIABLE, n)], ids=str)
def test_gradients_do_not_depend_on_which_inputs_require_grad(names):
    problem = make_problem(3, 9, 7, 5)
    everything = problem.leaves()
    expected = everything.gradients(everything.loss(impl="auto").total)
    masked = problem.leaves(names)
    total = masked.loss(impl="auto").total
    assert torch.equal(total, everything.loss(impl="auto").total)
    assert total.requires_grad == bool(names)
    if names:
        total.backward()
    for name in DIFFERENTIABLE:
        gradient = getattr(masked, name).grad
        assert (gradient is None) == (name not in names)
        if name in names:
            assert_same(gradient, expected[name], 1e-14, name)


@pytest.mark.parametrize("names", [("weak_logits",), ("weight",)], ids=str)
@pytest.mark.parametrize("name", ["log_softmax", "cross_entropy"])
def test_functions_support_gradients_of_a_single_input(name, names):
    function, inputs = FUNCTIONS[name]
    names = tuple({"weak_logits": inputs[0]}.get(n, n) for n in names)
    problem = make_problem(5, 5)
    both, one = problem.leaves(inputs), problem.leaves(names)
    expected = both.gradients(function(both, "auto", STRENGTH).sum(), names)
    found = one.gradients(function(one, "auto", STRENGTH).sum(), names)
    assert_all_same(found, expected, 1e-14)


@pytest.mark.parametrize(
    "mix",
    [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0.7, -1.3, 2.5), (1.5, -0.2, 0.4, 3), (0, 0, 2, -1)],
    ids=str,
)
def test_any_combination_of_terms_can_be_differentiated(mix):
    gradients = {}
    for impl in ("reference", "auto"):
        problem = make_problem(3, 9, 7, 5).leaves()
        loss = problem.loss(impl=impl, ss_weight=0.6)
        used = [w * getattr(loss, t) for w, t in zip(mix, TERMS, strict=True) if w]
        gradients[impl] = problem.gradients(sum(used))
    assert_all_same(gradients["auto"], gradients["reference"])


def test_per_sample_upstream_gradients_are_applied():
    for reduction in ("none", "sum", "mean"):
        gradients = {}
        for impl in ("reference", "auto"):
            problem = make_problem(9, 1).leaves()
            losses = cross_entropy(problem, impl, STRENGTH, reduction)
            gradients[impl] = problem.gradients(
                (losses * upstream(losses).add(0.1)).sum(), ["labeled_logits", "weight"]
            )
        assert_all_same(gradients["auto"], gradients["reference"])


def test_terms_can_be_differentiated_in_sequence():
    problem = make_problem().leaves()
    loss = problem.loss(impl="auto")
    loss.supervised.backward(retain_graph=True)
    loss.consistency.backward(retain_graph=True)
    loss.complementary.backward()
    expected = make_problem().leaves()
    total = expected.gradients(expected.loss(impl="auto").total)
    for name in DIFFERENTIABLE:
        assert_same(getattr(problem, name).grad, total[name], 1e-14, name)


@pytest.mark.parametrize("ss_weight", [0.0, 0.25, 2.0])
def test_total_is_the_weighted_sum_of_the_terms(ss_weight):
    loss = make_problem().loss(impl="auto", ss_weight=ss_weight)
    expected = ss_weight * (loss.supervised + loss.consistency) + loss.complementary
    torch.testing.assert_close(loss.total, expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("name", ["strength", "ss_weight", "thresholds"])
def test_numbers_may_be_tensors_that_change_between_calls(name, impl):
    problem = make_problem(8, 60, dtype=torch.float32)
    number = torch.tensor(0.0, dtype=torch.float64)
    results = []
    for value in (0.1, 0.95):
        number.fill_(value)
        found = evaluate_loss(problem, impl, **{name: number})
        for key, expected in evaluate_loss(problem, impl, **{name: value}).items():
            assert torch.equal(found[key], expected), key
        results.append(found["total"])
    assert results[0] != results[1]


@pytest.mark.parametrize("name", ["log_softmax", "cross_entropy", "probit"])
@pytest.mark.parametrize("kind", ["torch", "reference"])
def test_strength_of_functions_may_be_a_tensor(kind, name):
    problem = make_problem(dtype=torch.float32)
    found = evaluate_function(name, problem, kind, torch.tensor(STRENGTH, dtype=torch.float64))
    for key, expected in evaluate_function(name, problem, kind, STRENGTH).items():
        assert torch.equal(found[key], expected), key


def test_float16_gradients_survive_a_scaled_loss(impl):
    """Unscaled, many of them are below the smallest float16; mixed precision training scales the loss for this."""
    problem = make_problem(30, 300, 9, 5, dtype=torch.float32).map(lambda t: 3 * t.half(), DIFFERENTIABLE[:3])
    exact = problem.map(lambda t: t.float(), DIFFERENTIABLE[:3]).leaves()
    problem, scale = problem.leaves(), 2.0**12
    found = problem.gradients(problem.loss(impl=impl, thresholds=0.0).total * scale)
    truth = exact.gradients(exact.loss(impl=impl, thresholds=0.0).total)
    for name in DIFFERENTIABLE[:3]:
        tiny = (truth[name].abs() < 2.0**-25) & (truth[name].abs() * scale > 2.0**-14)
        assert tiny.any()
        assert ((found[name].float() / scale - truth[name]).abs() <= 2.0**-11 * truth[name].abs())[tiny].all(), name


@pytest.mark.parametrize("term", TERMS[1:])
def test_terms_cannot_be_differentiated_after_an_update_of_the_covariance(term, form):
    """They refer to Σ instead of copying it. The total has its gradients already."""
    problem = make_problem(8, 9, 5, 4, dtype=torch.float32).leaves()
    statistics = SemanticCovariance(5, 4)
    loss = problem.map(lambda _: statistics.covariance, ["covariance"]).loss(impl="auto")
    statistics.update(torch.ones(3, 4), torch.arange(3))
    problem.gradients(loss.total)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        problem.gradients(getattr(loss, term))


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_reductions_match_the_unreduced_losses(impl):
    problem = make_problem(9, 1)
    losses = cross_entropy(problem, impl, STRENGTH, "none")
    assert losses.shape == (9,)
    torch.testing.assert_close(cross_entropy(problem, impl, STRENGTH, "sum"), losses.sum(), rtol=1e-15, atol=0)
    torch.testing.assert_close(cross_entropy(problem, impl, STRENGTH, "mean"), losses.mean(), rtol=1e-15, atol=0)


def test_cross_entropy_is_the_labelled_column_of_the_log_softmax():
    problem = make_problem(9, 1)
    log_probability = plsp_kernels.semantic_log_softmax(
        problem.labeled_logits, problem.weight, problem.covariance, problem.labels, strength=STRENGTH, impl="auto"
    )
    column = log_probability.gather(1, problem.labels[:, None])[:, 0]
    assert_same(cross_entropy(problem, "auto", STRENGTH, "none"), -column, 1e-14)


OPTIONS = {
    "given pseudo-labels": lambda p: {"pseudo_labels": p.pseudo_labels},
    "own pseudo-labels": lambda p: {},
    "labelled candidates": lambda p: {"labeled_candidates": p.labeled_candidates},
    "argmax anywhere": lambda p: {"argmax_in_candidates": False},
    "threshold per class": lambda p: {"thresholds": p.class_thresholds},
    "threshold 0": lambda p: {"thresholds": 0},
    "threshold 1": lambda p: {"thresholds": 1.0},
    "usual probit": lambda p: {"beta": (torch.pi / 8) ** 0.5},
    "half weight": lambda p: {"ss_weight": 0.5},
    "everything": lambda p: {
        "pseudo_labels": p.pseudo_labels,
        "labeled_candidates": p.labeled_candidates,
        "argmax_in_candidates": False,
        "thresholds": p.class_thresholds,
        "beta": 0.6,
        "ss_weight": 0.5,
    },
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("option", OPTIONS)
def test_options_agree_with_the_reference(option, pattern):
    problem = make_problem(4, 13, 7, 5, pattern=pattern, seed=2)
    options = OPTIONS[option](problem)
    truth = evaluate_loss(problem, "reference", **options)
    assert_all_same(evaluate_loss(problem, "auto", **options), truth)


@pytest.mark.parametrize(
    "option", ["given pseudo-labels", "labelled candidates", "argmax anywhere", "threshold per class", "usual probit"]
)
def test_options_change_the_loss(option):
    """Guards the test above: an option that both implementations ignored would pass it."""
    problem = make_problem(4, 40, 7, 5, seed=2)
    plain = problem.loss(impl="auto").total
    assert (problem.loss(impl="auto", **OPTIONS[option](problem)).total - plain).abs() > 1e-3


def test_mask_follows_threshold_and_candidates():
    problem = make_problem(4, 60, 7, 5, seed=2)
    thresholds = problem.class_thresholds
    anywhere = problem.loss(impl="auto", thresholds=thresholds, argmax_in_candidates=False)
    inside = problem.loss(impl="auto", thresholds=thresholds)
    confident = anywhere.confidence >= thresholds[anywhere.prediction]
    candidate = problem.candidates.gather(1, anywhere.prediction[:, None])[:, 0]
    assert torch.equal(anywhere.mask, confident)
    assert torch.equal(inside.mask, confident & candidate)
    assert 0 < inside.mask.sum() < anywhere.mask.sum() < 60


def test_confidence_and_prediction_match_the_probit_probabilities():
    problem = make_problem(4, 20, 7, 5)
    loss = problem.loss(impl="auto", pseudo_labels=problem.pseudo_labels)
    confidence, prediction = probit(problem, "auto", STRENGTH).max(1)
    assert torch.equal(loss.confidence, confidence)
    assert torch.equal(loss.prediction, prediction)


def test_pseudo_labels_are_the_class_activation_labels():
    problem = make_problem(4, 20, 7, 5)
    expected = plsp_kernels.class_activation_labels(problem.weak_logits, problem.candidates)
    assert torch.equal(problem.loss(impl="auto").pseudo_labels, expected)
    given = problem.loss(impl="auto", pseudo_labels=problem.pseudo_labels)
    assert torch.equal(given.pseudo_labels, problem.pseudo_labels)


def test_class_activation_labels_choose_the_best_candidate():
    logits = torch.tensor([[5.0, -1.0, 0.5], [-3.0, -2.0, -9.0], [0.5, 0.9, 2.0], [0.5, 0.9, -1.0]])
    candidates = torch.tensor([[False, True, True], [True, True, False], [True, True, True], [True, True, True]])
    # activations: (20, -2, 0.25), (-12, -6, -90), (0.25, 0.09, 2), (0.25, 0.09, -2)
    assert plsp_kernels.class_activation_labels(logits, candidates).tolist() == [2, 1, 2, 0]


def test_class_activation_labels_do_not_overflow_in_half_precision():
    logits = torch.tensor([[400.0, 500.0, 300.0]], dtype=torch.float16)  # squares beyond float16's 65504
    candidates = torch.ones(1, 3, dtype=torch.bool)
    assert plsp_kernels.class_activation_labels(logits, candidates).tolist() == [1]


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_quadratic_form_covers_all_classes_by_default(impl, kind):
    problem = make_problem(kind=kind)
    everything = plsp_kernels.pairwise_quadratic_form(problem.weight, problem.covariance, impl=impl)
    assert everything.shape == (7, 7, 7)
    classes = torch.tensor([3, 3, 0])
    some = plsp_kernels.pairwise_quadratic_form(problem.weight, problem.covariance, classes, impl=impl)
    assert_same(some, everything[classes], 1e-14)
    difference = problem.weight[2] - problem.weight[5]
    matrix = problem.covariance[3] if kind == "full" else problem.covariance[3].diag()
    assert_same(some[0, 2, 5], difference @ matrix @ difference, 1e-14)


def test_quadratic_form_is_symmetric_nonnegative_with_zero_diagonal():
    problem = make_problem(dtype=torch.float32)
    form = plsp_kernels.pairwise_quadratic_form(problem.weight, problem.covariance, impl="auto")
    assert torch.equal(form.diagonal(dim1=1, dim2=2), torch.zeros(7, 7))
    assert (form >= 0).all()
    torch.testing.assert_close(form, form.mT, rtol=1e-6, atol=1e-6)


class TestInnerForms:
    """The separable form, the direct form and any chunking compute the same log-odds."""

    CASES = ((3, 9, 7, 5), (17, 17, 2, 19), (3, 30, 30, 4), (17, 3, 41, 8))  # the last two group by padding

    @staticmethod
    def force_direct(monkeypatch):
        monkeypatch.setattr(torch_impl_module("log_odds")._Separable, "of", staticmethod(lambda *args: None))

    @staticmethod
    def limit_memory(monkeypatch, limit):
        monkeypatch.setattr(torch_impl_module("chunks"), "PAIR_BYTES", limit)
        monkeypatch.setattr(torch_impl_module("groups"), "PAIR_BYTES", limit)

    @pytest.mark.parametrize("shape", CASES, ids=str)
    def test_separable_form_is_the_default(self, shape, monkeypatch):
        module = torch_impl_module("log_odds")
        monkeypatch.setattr(module.RowLogOdds, "_exponents", lambda *args: pytest.fail("direct form"))
        make_problem(*shape).leaves().loss(impl="torch").total.backward()

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", CASES, ids=str)
    def test_direct_form_agrees(self, shape, kind, monkeypatch):
        problem = make_problem(*shape, kind=kind)
        separable = evaluate_loss(problem, "torch"), evaluate_function("log_softmax", problem, "torch", STRENGTH)
        self.force_direct(monkeypatch)
        direct = evaluate_loss(problem, "torch"), evaluate_function("log_softmax", problem, "torch", STRENGTH)
        assert_all_same(direct[0], separable[0])
        assert_all_same(direct[1], separable[1])

    # budgets of one row of pairs (column chunks of one), of a few columns, and of a few samples
    @pytest.mark.parametrize("limit", [1, 1_500, 20_000])
    @pytest.mark.parametrize("direct", [False, True], ids=["either form", "direct form"])
    @pytest.mark.parametrize("shape", CASES, ids=str)
    def test_chunked_computation_agrees(self, shape, direct, limit, monkeypatch):
        problem = make_problem(*shape)
        names = ("log_softmax", "probit")
        whole = [evaluate_loss(problem, "torch")] + [evaluate_function(n, problem, "torch", STRENGTH) for n in names]
        if direct:
            self.force_direct(monkeypatch)
        self.limit_memory(monkeypatch, limit)
        parts = [evaluate_loss(problem, "torch")] + [evaluate_function(n, problem, "torch", STRENGTH) for n in names]
        for part, expected in zip(parts, whole, strict=True):
            assert_all_same(part, expected)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("with_candidates", [False, True], ids=["", "labelled candidates"])
    def test_step_streamed_class_by_class_agrees(self, with_candidates, kind, monkeypatch):
        problem = make_problem(12, 20, 9, 5, kind=kind)
        options = {"thresholds": problem.class_thresholds, "ss_weight": 0.7}
        if with_candidates:
            options["labeled_candidates"] = problem.labeled_candidates
        whole = evaluate_loss(problem, "torch", **options)
        self.limit_memory(monkeypatch, 1)
        streamed = evaluate_loss(problem, "torch", **options)
        assert_all_same(streamed, whole)
        for name, value in evaluate_loss(problem, "torch", **options).items():
            assert torch.equal(value, streamed[name]), name

    # rows of G, features up to which Σ is gathered, rows of probit pairs: all that usually depends on the shape
    @pytest.mark.parametrize(
        "constant", ["class_gram._BLOCK_ROWS", "class_gram._GATHERED_FEATURES", "probit._TILE_ROWS"]
    )
    @pytest.mark.parametrize("kind", KINDS)
    def test_block_sizes_do_not_matter(self, kind, constant, monkeypatch):
        problem = make_problem(9, 12, 10, 5, kind=kind)
        module, name = constant.split(".")
        default = evaluate_loss(problem, "torch")
        for size in (0, 100) if "FEATURES" in name else (1, 3, 100):
            monkeypatch.setattr(torch_impl_module(module), name, size)
            assert_all_same(evaluate_loss(problem, "torch"), default)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("with_candidates", [False, True], ids=["", "labelled candidates"])
    def test_step_agrees_without_reading_values_on_the_host(self, with_candidates, kind):
        """Other devices compute all classes at once, and read λ, γ and τ themselves."""
        step = make_problem(9, 12, 41, 5, kind=kind).step(with_candidates)
        elsewhere = Step(*(value.as_subclass(Elsewhere) if isinstance(value, Tensor) else value for value in step))
        for upstream in (None, torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)):
            found = torch_impl.upper_bound(elsewhere, upstream, True, True)._asdict()
            expected = torch_impl.upper_bound(step, upstream, True, True)._asdict()
            assert_all_same({name: value.as_subclass(Tensor) for name, value in found.items()}, expected)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("num_labeled", [1, 9])
    def test_labelled_classes_without_unlabelled_samples_agree(self, num_labeled, kind, monkeypatch):
        """They use one column of class pairs; all, some or none of the labelled samples may be of this kind."""
        problem = make_problem(num_labeled, 4, 41, 5, kind=kind)
        module = torch_impl_module("upper_bound")
        real, calls = module.cross_entropy, []
        problem.pseudo_labels.copy_(torch.arange(4))
        monkeypatch.setattr(module, "cross_entropy", lambda *args: calls.append(len(args[0].labels)) or real(*args))
        for shared in (0, min(2, num_labeled), num_labeled):
            problem.labels[:shared] = 2
            problem.labels[shared:] = 10 + torch.arange(num_labeled - shared)
            options = {"pseudo_labels": problem.pseudo_labels}
            truth = evaluate_loss(problem, "reference", **options)
            for least in (41, 42):
                monkeypatch.setattr(module, "_COLUMN_CLASSES", least)
                assert_all_same(evaluate_loss(problem, "torch", **options), truth)
        alone = num_labeled - min(2, num_labeled)
        assert set(calls) == {num_labeled, alone} - {0}

    @pytest.mark.parametrize("kind", KINDS)
    def test_step_runs_on_tensors_without_memory(self, kind):
        """Reading a value on the host raises there."""
        step = make_problem(9, 12, 41, 5, kind=kind, dtype=torch.float32).step(with_candidates=True)
        on_device = Step(*(value.to("meta") if isinstance(value, Tensor) else value for value in step))
        found = torch_impl.upper_bound(on_device, None, True, True)
        for value, expected in zip(found, torch_impl.upper_bound(step, None, True, True), strict=True):
            assert (value.shape, value.dtype) == (expected.shape, expected.dtype)

    @pytest.mark.parametrize("name", ["labels", "pseudo_labels"])
    @pytest.mark.parametrize("value", [-1, 41, 2**40])
    def test_classes_out_of_range_are_not_read(self, value, name):
        """They are an error on a CPU; on other devices, where they cannot be checked, they make the loss NaN."""
        step = make_problem(9, 12, 41, 5).step()
        getattr(step, name)[3] = value
        with pytest.raises(IndexError, match=rf"^{name} must lie in \[0, 41\)"):
            torch_impl.upper_bound(step, None, True, True)
        elsewhere = Step(*(value.as_subclass(Elsewhere) if isinstance(value, Tensor) else value for value in step))
        assert torch_impl.upper_bound(elsewhere, None, True, True).total.isnan()

    @pytest.mark.parametrize("kind", KINDS)
    def test_chunked_class_gram_agrees(self, kind, monkeypatch):
        problem = make_problem(9, 9, kind=kind)
        whole = evaluate_function("quadratic_form", problem, "auto", STRENGTH)
        self.limit_memory(monkeypatch, 1)
        assert_all_same(evaluate_function("quadratic_form", problem, "auto", STRENGTH), whole)

    @pytest.mark.parametrize("classes", [[0, 1, 2, 3, 4, 5, 6], [4, 2, -1, -1], []], ids=str)
    def test_class_gram_agrees_without_reading_classes_on_the_host(self, classes):
        """Other devices gather covariances to avoid a host sync."""
        problem = make_problem()
        class_gram = torch_impl_module("class_gram").class_gram
        arguments = problem.covariance, torch.tensor(classes, dtype=torch.int64), True
        found = class_gram(problem.weight.as_subclass(Elsewhere), *arguments)
        for a, b in zip(found, class_gram(problem.weight, *arguments), strict=True):
            assert_same(a.as_subclass(Tensor), b, 1e-14)
            assert not b[[y < 0 for y in classes]].any()

    # λ max G of about 500 in float32: outside the exponent range of the separable form
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_large_strength_is_as_accurate_as_the_reference(self, dtype, form):
        problem = make_problem(3, 9, 7, 19, dtype=dtype)
        options = {"strength": 200.0, "pseudo_labels": problem.pseudo_labels}
        truth = evaluate_loss(problem.to(torch.float64), "reference", **options)
        rival = evaluate_loss(problem, "reference", **options)
        found = evaluate_loss(problem, "auto", **options)
        if dtype == torch.float64:
            assert_all_same(found, truth)
        else:
            assert_all_within_rule(found, rival, truth, exponent=100 * maximum(quadratic_form(problem, "reference", 0)))

    def test_large_strength_uses_the_direct_form(self, monkeypatch):
        module = torch_impl_module("log_odds")
        calls = []
        original = module.RowLogOdds._exponents
        monkeypatch.setattr(module.RowLogOdds, "_exponents", lambda *args: calls.append(1) or original(*args))
        problem = make_problem(3, 9, 7, 19, dtype=torch.float32).leaves()
        with closed_form("operators"):
            problem.loss(impl="auto", strength=200.0).total.backward()
        assert len(calls) >= 2  # forward and backward

    # λG is small, but one dominant logit makes the sums of the separable form underflow
    def test_dominant_logits_are_as_accurate_as_the_reference(self, form):
        problem = make_problem(3, 9, 7, 19, dtype=torch.float32)
        spread = problem.map(lambda logits: logits * 40, ["labeled_logits", "weak_logits", "strong_logits"])
        options = {"pseudo_labels": problem.pseudo_labels}
        truth = evaluate_loss(spread.to(torch.float64), "reference", **options)
        rival = evaluate_loss(spread, "reference", **options)
        assert_all_within_rule(evaluate_loss(spread, "auto", **options), rival, truth)


LAYOUTS = {
    "transposed": lambda t: t.transpose(-2, -1).contiguous().transpose(-2, -1) if t.dim() > 1 else t,
    "strided": lambda t: torch.stack([t, torch.full_like(t, 1)], dim=-1)[..., 0],
    "offset": lambda t: torch.cat([torch.full_like(t[:1], 1), t])[1:],
}


class TestInputs:
    @pytest.mark.parametrize("impl", ["auto", "reference"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_inputs_are_never_modified(self, impl, kind):
        problem = make_problem(5, 9, kind=kind).leaves()
        names = [field.name for field in dataclasses.fields(problem)]
        before = {name: (getattr(problem, name).detach().clone(), getattr(problem, name)._version) for name in names}
        options = {name: getattr(problem, name) for name in ("pseudo_labels", "labeled_candidates")}
        problem.loss(impl=impl, thresholds=problem.class_thresholds, **options).total.backward()
        for name in FUNCTIONS:
            result = FUNCTIONS[name][0](problem, impl, STRENGTH)
            if result.requires_grad:
                result.sum().backward()
        plsp_kernels.class_activation_labels(problem.weak_logits, problem.candidates)
        for name, (value, version) in before.items():
            assert torch.equal(getattr(problem, name), value), name
            assert getattr(problem, name)._version == version, name

    def test_upstream_gradients_are_not_modified(self):
        problem = make_problem(5, 9).leaves()
        result = log_softmax(problem, "auto", STRENGTH)
        gradient = upstream(result)
        copy, version = gradient.clone(), gradient._version
        result.backward(gradient)
        assert torch.equal(gradient, copy)
        assert gradient._version == version

    @pytest.mark.parametrize("shape", [(3, 9, 7, 5), (17, 3, 41, 8)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_results_are_deterministic(self, dtype, shape, form):
        problem = make_problem(*shape, dtype=dtype)
        first, second = (evaluate_loss(problem, "auto") for _ in range(2))
        for name, value in first.items():
            assert torch.equal(second[name], value), name
        for name in FUNCTIONS:
            first, second = (evaluate_function(name, problem, "auto", STRENGTH) for _ in range(2))
            assert all(torch.equal(second[key], value) for key, value in first.items()), name

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-5)], ids=str)
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_results_do_not_depend_on_memory_layout(self, kind, layout, dtype, tolerance):
        problem = make_problem(5, 9, kind=kind, dtype=dtype)
        names = [field.name for field in dataclasses.fields(problem)]
        relaid = problem.map(LAYOUTS[layout], names)
        assert layout == "offset" or not relaid.weight.is_contiguous()
        for name in FUNCTIONS:
            with torch.no_grad():
                expected, found = (FUNCTIONS[name][0](p, "auto", STRENGTH) for p in (problem, relaid))
            assert_same(found, expected, tolerance, name)
        differentiable = relaid.map(lambda tensor: tensor.detach().requires_grad_(), DIFFERENTIABLE)
        loss = differentiable.loss(
            impl="auto", thresholds=relaid.class_thresholds, labeled_candidates=relaid.labeled_candidates
        )
        expected = evaluate_loss(
            problem, "auto", thresholds=problem.class_thresholds, labeled_candidates=problem.labeled_candidates
        )
        assert_same(loss.total.detach(), expected["total"], tolerance)
        for name, gradient in differentiable.gradients(loss.total).items():
            assert_same(gradient, expected[f"d total / d {name}"], tolerance, name)

    def test_expanded_tensors_and_upstream_gradients_are_supported(self):
        problem = make_problem(6, 6)
        alike = problem.map(lambda t: t[:1].expand_as(t), ["labeled_logits", "weak_logits", "strong_logits", "weight"])
        alike = alike.map(lambda t: t[:1].expand_as(t), ["covariance", "labels", "candidates", "pseudo_labels"])
        copied = alike.map(lambda t: t.contiguous(), [f.name for f in dataclasses.fields(alike)])
        assert torch.equal(alike.loss(impl="auto").total, copied.loss(impl="auto").total)
        # the backward of sum() produces an expanded gradient of stride zero
        leaves = problem.leaves()
        found = leaves.gradients(log_softmax(leaves, "auto", STRENGTH).sum(), ["weak_logits", "weight"])
        result = log_softmax(leaves, "auto", STRENGTH)
        expected = leaves.gradients((result * torch.ones_like(result)).sum(), ["weak_logits", "weight"])
        assert_all_same(found, expected, 1e-14)

    @pytest.mark.parametrize("impl", ["auto", "reference"])
    @pytest.mark.parametrize("covariance_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
    @pytest.mark.parametrize("kind", KINDS)
    def test_covariance_dtype_may_differ_from_weight(self, kind, covariance_dtype, impl):
        problem = make_problem(5, 9, kind=kind, dtype=torch.float32)
        mixed = problem.map(lambda t: t.to(covariance_dtype), ["covariance"])
        same = mixed.map(lambda t: t.float(), ["covariance"])
        for name in FUNCTIONS:
            function = FUNCTIONS[name][0]
            # 8 epsilon: a float64 covariance promotes the reference to float64
            assert_same(function(mixed, impl, STRENGTH), function(same, impl, STRENGTH), 8 * 1.2e-7, name)
        assert_same(mixed.loss(impl=impl).total, same.loss(impl=impl).total, 8 * 1.2e-7)

    @pytest.mark.parametrize("impl", ["auto", "reference"])
    def test_logits_dtype_may_differ_from_weight(self, impl):
        problem = make_problem(5, 9, dtype=torch.float32)
        logits = ["labeled_logits", "weak_logits", "strong_logits"]
        half = problem.map(lambda t: t.bfloat16(), logits).leaves()
        same = half.map(lambda t: t.detach().float(), logits).leaves()
        found, expected = half.loss(impl=impl), same.loss(impl=impl)
        assert torch.equal(found.total, expected.total)
        gradients = half.gradients(found.total)
        assert gradients["weak_logits"].dtype == torch.bfloat16
        assert gradients["weight"].dtype == torch.float32
        assert torch.equal(gradients["weight"], same.gradients(expected.total)["weight"])


class TestEmptyBatches:
    @pytest.mark.parametrize("with_candidates", [False, True])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("impl", ["auto", "reference"])
    @pytest.mark.parametrize("sizes", [(0, 9), (9, 0), (0, 0)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_empty_batches_give_zero_terms_and_zero_gradients(self, dtype, sizes, impl, kind, with_candidates):
        problem = make_problem(*sizes, kind=kind, dtype=dtype).leaves()
        options = {"labeled_candidates": problem.labeled_candidates} if with_candidates else {}
        loss = problem.loss(impl=impl, thresholds=0.1, **options)
        zero = {"supervised"} if not sizes[0] else set()
        zero |= {"consistency"} if not sizes[1] else set()
        zero |= {"complementary"} if not sizes[1] and not (with_candidates and sizes[0]) else set()
        zero |= {"total"} if len(zero) == 3 else set()
        for term in TERMS:
            assert (float(getattr(loss, term).detach()) == 0) == (term in zero), term
            for name, gradient in problem.gradients(getattr(loss, term)).items():
                assert gradient.isfinite().all(), (term, name)
                assert term not in zero or not gradient.any(), (term, name)
        assert loss.mask.shape == loss.confidence.shape == (sizes[1],)

    @pytest.mark.parametrize("impl", ["auto", "reference"])
    def test_functions_accept_empty_batches(self, impl):
        problem = make_problem(0, 0).leaves()
        assert log_softmax(problem, impl, STRENGTH).shape == (0, 7)
        assert probit(problem, impl, STRENGTH).shape == (0, 7)
        assert quadratic_form(problem, impl, STRENGTH).shape == (0, 7, 7)
        assert plsp_kernels.class_activation_labels(problem.weak_logits, problem.candidates).shape == (0,)
        assert cross_entropy(problem, impl, STRENGTH, "none").shape == (0,)
        loss = cross_entropy(problem, impl, STRENGTH)
        assert loss == 0
        assert not problem.gradients(loss, ["weight"])["weight"].any()


class TestImplementations:
    @pytest.mark.parametrize("kind", KINDS)
    def test_triton_agrees(self, kind):
        """One tiny case, on a GPU or in the interpreter; test_triton.py tests the kernels."""
        pytest.importorskip("triton", minversion="3.5")
        pytest.importorskip("plsp_kernels.triton_impl", exc_type=ImportError)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        problem = make_problem(2, 3, 5, 4, kind=kind, dtype=torch.float32)
        options = loss_options(problem)
        truth = evaluate_loss(problem.to(torch.float64), "reference", **options)
        rival = evaluate_loss(problem, "reference", **options)
        placed = problem.map(lambda t: t.to(device), [f.name for f in dataclasses.fields(problem)])
        found = evaluate_loss(placed, "triton", **{**options, "pseudo_labels": placed.pseudo_labels})
        assert_all_within_rule({name: value.cpu() for name, value in found.items()}, rival, truth)
        for name in FUNCTIONS:
            truth = evaluate_function(name, problem.to(torch.float64), "reference", STRENGTH)
            rival = evaluate_function(name, problem, "reference", STRENGTH)
            found = evaluate_function(name, placed, "triton", STRENGTH)
            assert_all_within_rule({key: value.cpu() for key, value in found.items()}, rival, truth)
