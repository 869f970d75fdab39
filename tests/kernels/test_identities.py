"""Identities, extreme inputs, and memory use of the closed form."""

import math

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import plsp_kernels
from benchmarks.memory import peak_extra_bytes
from cases import (
    DIFFERENTIABLE,
    KINDS,
    STRENGTH,
    TERMS,
    assert_error_rule,
    assert_same,
    make_problem,
    torch_impl_module,
)
from plsp_kernels import torch_impl
from plsp_kernels.ops.registration import KERNELS
from plsp_kernels.rows import Rows, class_slots

IMPLEMENTATIONS = ("auto", "reference")
LOGITS = ("labeled_logits", "weak_logits", "strong_logits")


def assert_finite(problem, impl, **options):
    """Every output and every gradient of every term, and of the functions, is finite; returns the loss."""
    problem = problem.leaves()
    loss = problem.loss(impl=impl, **options)
    for name, value in loss._asdict().items():
        assert value.isfinite().all(), name
    for term in TERMS:
        for name, gradient in problem.gradients(getattr(loss, term)).items():
            assert gradient.isfinite().all(), (term, name)
    strength = options.get("strength", STRENGTH)
    samples = problem.weight, problem.covariance, loss.pseudo_labels
    log_probability = plsp_kernels.semantic_log_softmax(problem.weak_logits, *samples, strength=strength, impl=impl)
    assert log_probability.isfinite().all()
    for name, gradient in problem.gradients(log_probability.sum(), ["weak_logits", "weight"]).items():
        assert gradient.isfinite().all(), name
    probabilities = plsp_kernels.probit_probabilities(problem.weak_logits, *samples, strength=strength, impl=impl)
    assert ((probabilities >= 0) & (probabilities <= 1)).all()
    return loss


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
class TestPlainSoftmax:
    """Without a transformation, either strength 0 or Σ = 0, everything reduces to the plain softmax."""

    @pytest.fixture(params=["strength", "covariance"])
    def plain(self, request):
        problem = make_problem(6, 9).leaves()
        if request.param == "strength":
            return problem, 0.0
        return problem.map(torch.zeros_like, ["covariance"]), STRENGTH

    def test_log_softmax(self, plain, impl):
        problem, strength = plain
        found = plsp_kernels.semantic_log_softmax(
            problem.weak_logits, problem.weight, problem.covariance, problem.pseudo_labels, strength=strength, impl=impl
        )
        assert_same(found.detach(), problem.weak_logits.detach().log_softmax(1), 1e-14)

    def test_cross_entropy(self, plain, impl):
        problem, strength = plain
        found = plsp_kernels.semantic_cross_entropy(
            problem.labeled_logits, problem.weight, problem.covariance, problem.labels, strength=strength, impl=impl
        )
        expected = F.cross_entropy(problem.labeled_logits, problem.labels)
        assert_same(found.detach(), expected.detach(), 1e-14)
        gradients = problem.gradients(found, ["labeled_logits", "weight"])
        assert_same(
            gradients["labeled_logits"], problem.gradients(expected, ["labeled_logits"])["labeled_logits"], 1e-14
        )
        assert gradients["weight"].abs().max() <= 1e-15

    def test_loss(self, plain, impl):
        problem, strength = plain
        loss = problem.loss(impl=impl, strength=strength)
        assert_same(loss.supervised.detach(), F.cross_entropy(problem.labeled_logits, problem.labels).detach(), 1e-14)
        outside = ~problem.candidates
        complementary = -((1 - problem.weak_logits.softmax(1)).log() * outside).sum(1).mean()
        assert_same(loss.complementary.detach(), complementary.detach(), 1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_shifting_all_logits_changes_nothing(impl, kind):
    problem = make_problem(6, 9, kind=kind)
    options = {"pseudo_labels": problem.pseudo_labels, "impl": impl}
    shifted = problem.map(lambda logits: logits + 3.25, LOGITS)
    expected, found = problem.loss(**options), shifted.loss(**options)
    for name in (*TERMS, "confidence"):
        assert_same(getattr(found, name), getattr(expected, name), 1e-13, name)
    assert torch.equal(found.mask, expected.mask)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_gradients_of_the_logits_sum_to_zero(impl):
    """Shift invariance in differential form."""
    problem = make_problem(6, 9).leaves()
    gradients = problem.gradients(problem.loss(impl=impl).total)
    for name in LOGITS:
        assert gradients[name].abs().max() > 1e-4
        assert gradients[name].sum(1).abs().max() < 1e-14


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_shifting_all_rows_of_the_weight_changes_nothing(impl):
    """Only differences of rows enter."""
    problem = make_problem(6, 9)
    shifted = problem.map(lambda weight: weight + torch.linspace(-2, 2, 19, dtype=weight.dtype), ["weight"])
    for term in TERMS:
        assert_same(getattr(shifted.loss(impl=impl), term), getattr(problem.loss(impl=impl), term), 1e-13, term)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_permuting_the_classes_permutes_the_result(impl, kind):
    problem = make_problem(6, 9, kind=kind).leaves()
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    place = order.argsort()
    permuted = problem.map(lambda t: t.detach()[:, order], LOGITS).map(lambda t: t[:, order], ["candidates"])
    permuted = permuted.map(lambda t: t.detach()[order], ["weight", "covariance"])
    permuted = permuted.map(lambda t: place[t], ["labels", "pseudo_labels"]).leaves()
    expected = problem.loss(impl=impl, pseudo_labels=problem.pseudo_labels)
    found = permuted.loss(impl=impl, pseudo_labels=permuted.pseudo_labels)
    for term in TERMS:
        assert_same(getattr(found, term).detach(), getattr(expected, term).detach(), 1e-13, term)
    assert torch.equal(found.prediction, place[expected.prediction])
    gradients, expected_gradients = permuted.gradients(found.total), problem.gradients(expected.total)
    for name in LOGITS:
        assert_same(gradients[name], expected_gradients[name][:, order], 1e-13, name)
    assert_same(gradients["weight"], expected_gradients["weight"][order], 1e-13)

    samples = {"strength": STRENGTH, "impl": impl}
    for function in (plsp_kernels.semantic_log_softmax, plsp_kernels.probit_probabilities):
        plain = function(problem.weak_logits, problem.weight, problem.covariance, problem.pseudo_labels, **samples)
        moved = function(permuted.weak_logits, permuted.weight, permuted.covariance, permuted.pseudo_labels, **samples)
        assert_same(moved.detach(), plain.detach()[:, order], 1e-13)
    plain = plsp_kernels.pairwise_quadratic_form(problem.weight, problem.covariance, impl=impl).detach()
    moved = plsp_kernels.pairwise_quadratic_form(permuted.weight, permuted.covariance, impl=impl).detach()
    assert_same(moved, plain[order][:, order][:, :, order], 1e-13)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_single_candidate_acts_as_a_label(impl):
    problem = make_problem(6, 9, pattern="single")
    loss = problem.loss(impl=impl, thresholds=0, argmax_in_candidates=False)
    label = problem.candidates.long().argmax(1)
    assert torch.equal(loss.pseudo_labels, label)
    assert loss.mask.all()
    supervised = plsp_kernels.semantic_cross_entropy(
        problem.strong_logits, problem.weight, problem.covariance, label, strength=STRENGTH, impl=impl
    )
    assert_same(loss.consistency, supervised, 1e-14)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_complementary_term_is_zero_if_all_classes_are_candidates(impl):
    problem = make_problem(6, 9, pattern="full").leaves()
    loss = problem.loss(impl=impl, labeled_candidates=problem.labeled_candidates)
    assert loss.complementary == 0
    for gradient in problem.gradients(loss.complementary).values():
        assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("offset", [0.0, 30.0], ids=["centred", "far from the origin"])
def test_nearly_equal_weight_rows_are_accurate(impl, dtype, offset):
    """Q of rows 1e-4 apart suffers cancellation from entries of G: it must stay ≥ 0 and results accurate."""
    base = make_problem(6, 9, dtype=dtype)
    weight = base.weight * 1e-4 + offset / 19**0.5
    problem = base.map(lambda _: weight, ["weight"])
    form = plsp_kernels.pairwise_quadratic_form(weight, problem.covariance, impl=impl)
    truth = plsp_kernels.pairwise_quadratic_form(weight.double(), problem.covariance.double(), impl="reference")
    assert (form >= 0).all()
    # Rounding of W enters only through exact differences of rows; those of the differences' own size cost 8 epsilon
    # (the mean row that the closed form takes off is rounded at the size of the rows, hence the second summand).
    error = (form.double() - truth).abs().max()
    eps = torch.finfo(dtype).eps
    assert error <= 8 * eps * truth.max() + 4 * (eps * float(weight.abs().max())) * truth.max().sqrt() * 19**0.5
    assert_finite(problem, impl, strength=1e6)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_equal_weight_rows_have_zero_distance(impl):
    problem = make_problem(6, 9, dtype=torch.float32).map(lambda w: w[:1].expand_as(w).contiguous(), ["weight"])
    assert_finite(problem, impl)
    form = plsp_kernels.pairwise_quadratic_form(problem.weight, problem.covariance, impl=impl)
    assert form.abs().max() <= 1e-12
    plain = F.cross_entropy(problem.labeled_logits, problem.labels)
    assert_same(problem.loss(impl=impl).supervised, plain, 4 * 1.2e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_weight_rows_equal_up_to_rounding_stay_finite_at_any_strength(kind, form):
    """Q of such rows is rounding noise of either sign; a negative value would make the root in the probit NaN."""
    problem = make_problem(6, 9, 12, 19, dtype=torch.float32, kind=kind)
    weight = problem.weight.clone()
    weight[1::2] = weight[::2] * (1 + torch.finfo(torch.float32).eps)
    problem = problem.map(lambda _: weight, ["weight"])
    centred = weight - weight.mean(0)
    gram, _ = torch_impl_module("class_gram").class_gram(centred, problem.covariance, torch.arange(12), False)
    diagonal = gram.diagonal(dim1=1, dim2=2)
    assert (diagonal[:, :, None] + diagonal[:, None, :] - 2 * gram).min() < 0
    assert_finite(problem, "auto", strength=1e8)


DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", ["flipped", "single"])
def test_large_logits_stay_finite(impl, dtype, pattern):
    problem = make_problem(6, 9, dtype=dtype, pattern=pattern)
    signs = torch.where(torch.arange(7) % 3 == 0, 1e4, -1e4).to(dtype)
    large = problem.map(lambda logits: logits + signs, LOGITS)
    loss = assert_finite(large, impl, thresholds=0.0, argmax_in_candidates=False)
    # some label among the three large ones is wrong and some non-candidate is certain: the losses are of that size
    assert 1e3 < loss.total < 1e6


def test_large_logits_are_accurate_in_float32(impl):
    problem = make_problem(6, 9, dtype=torch.float32)
    signs = torch.where(torch.arange(7) % 3 == 0, 1e4, -1e4)
    large = problem.map(lambda logits: logits + signs, LOGITS)
    options = {"pseudo_labels": problem.pseudo_labels, "thresholds": 0.0}
    truth = large.to(torch.float64).loss(impl="reference", **options)
    rival, found = large.loss(impl="reference", **options), large.loss(impl=impl, **options)
    for term in TERMS:
        assert_error_rule(getattr(found, term), getattr(rival, term), getattr(truth, term), 4, term)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reach", [50.0, 200.0, 2000.0])
def test_strong_transformations_stay_finite_and_accurate(impl, dtype, kind, reach):
    """λG of 200 and more: exponents overflow float32 unless the maximum is subtracted."""
    problem = make_problem(6, 9, dtype=dtype, kind=kind)
    centred = problem.to(torch.float64).weight - problem.to(torch.float64).weight.mean(0)
    gram = torch.stack([centred @ (c if kind == "full" else c.diag()) @ centred.T for c in problem.covariance.double()])
    strength = reach / float(gram.abs().max())
    options = {"strength": strength, "pseudo_labels": problem.pseudo_labels}
    loss = assert_finite(problem, impl, strength=strength)
    truth = problem.to(torch.float64).loss(impl="reference", **options)
    rival, loss = problem.loss(impl="reference", **options), problem.loss(impl=impl, **options)
    for term in TERMS:
        # slack: an exponent of size `reach` is rounded by as many epsilon, of the largest loss
        assert_error_rule(getattr(loss, term), getattr(rival, term), getattr(truth, term), 4 * reach, term)


class TestProbitTails:
    """For two classes without transformation p̂ is Φ(±β (z_1 - z_2)), computed here with 40 digits."""

    @staticmethod
    def probabilities(margins, dtype, beta=1.0):
        logits = torch.stack([margins, torch.zeros_like(margins)], 1).to(dtype)
        weight, covariance = torch.zeros(2, 1, dtype=dtype), torch.zeros(2, 1, dtype=dtype)
        classes = torch.zeros(logits.shape[0], dtype=torch.int64)
        found = plsp_kernels.probit_probabilities(
            logits, weight, covariance, classes, strength=0.0, beta=beta, impl="auto"
        )
        with mpmath.workdps(40):
            truth = [[mpmath.ncdf(beta * float(z)), mpmath.ncdf(-beta * float(z))] for z in logits[:, 0]]
        return found, torch.tensor([[float(p) for p in row] for row in truth], dtype=torch.float64)

    @pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 37.0), (torch.float32, 12.8)], ids=str)
    def test_accurate_wherever_representable(self, dtype, limit):
        margins = torch.linspace(-limit, limit, 297, dtype=torch.float64)
        found, truth = self.probabilities(margins, dtype)
        # erfc's condition number grows as x²: its argument, rounded once, moves it by x² epsilon
        relative = (found.double() - truth).abs() / truth
        allowed = torch.finfo(dtype).eps * (8 + 2 * margins.square())
        assert (relative <= allowed[:, None]).all()

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_saturate_at_zero_and_one(self, dtype):
        found, _ = self.probabilities(torch.tensor([40.0, -40.0, 1e4, -1e4]), dtype)
        assert found.tolist() == [[1.0, 0.0], [0.0, 1.0]] * 2

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)], ids=str)
    def test_several_classes_are_accurate(self, dtype, tolerance):
        """The smallest here is 1e-34: relative tolerances of x² ≈ 150 times a few epsilon."""
        logits = torch.tensor([[0.0, 3.5, -4.0, 8.0, -0.25], [1.0, 1.0, 1.0, 1.0, 1.0]], dtype=dtype)
        weight, covariance = torch.zeros(5, 1, dtype=dtype), torch.zeros(5, 1, dtype=dtype)
        found = plsp_kernels.probit_probabilities(
            logits, weight, covariance, torch.zeros(2, dtype=torch.int64), strength=0.0, beta=1.0, impl="auto"
        )
        with mpmath.workdps(60):
            for row, values in zip(logits.tolist(), found.tolist(), strict=True):
                for j, value in enumerate(values):
                    truth = 1 / (-len(row) + mpmath.fsum(1 / mpmath.ncdf(row[j] - other) for other in row))
                    assert abs(value / float(truth) - 1) < tolerance

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("scale", [0.0, 1.0, 100.0])
    def test_lie_between_zero_and_one(self, scale, dtype, kind):
        problem = make_problem(1, 40, 9, 5, kind=kind).map(lambda z: z * scale, ["weak_logits"]).to(dtype)
        found = plsp_kernels.probit_probabilities(
            problem.weak_logits, problem.weight, problem.covariance, problem.pseudo_labels, strength=STRENGTH
        )
        assert ((found >= 0) & (found <= 1)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_underflowing_candidates_fall_back_to_the_softmax(impl, dtype):
    """All candidates lie 500 below the best class: their probit probabilities are zero in any dtype."""
    problem = make_problem(3, 4, dtype=dtype)  # as many samples as classes, as required by C
    candidates = torch.tensor([[True, True, False, False, False, False, False]] * 4)
    logits = problem.weak_logits.clone()
    logits[:, 6] = 500.0
    problem = problem.map(lambda _: logits, ["weak_logits"]).map(lambda _: candidates, ["candidates"])
    loss = assert_finite(problem, impl, thresholds=0.0, argmax_in_candidates=False)
    assert loss.mask.all()
    targets = logits.masked_fill(~candidates, -math.inf).softmax(1)
    log_probability = plsp_kernels.semantic_log_softmax(
        problem.strong_logits, problem.weight, problem.covariance, loss.pseudo_labels, strength=STRENGTH, impl=impl
    )
    assert_same(loss.consistency.detach(), -(targets * log_probability).sum(1).mean(), 8 * torch.finfo(dtype).eps)


def test_certain_non_candidates_keep_their_gradient(impl):
    """log(1 - p) at p = 1 in float32: the loss equals the margin, and its gradient does not vanish."""
    problem = make_problem(2, 1, 3, 2, dtype=torch.float32)
    problem = problem.map(lambda _: torch.tensor([[60.0, 0.0, 0.0]]), ["weak_logits"])
    problem = problem.map(lambda _: torch.tensor([[False, True, True]]), ["candidates"]).leaves()
    loss = problem.loss(impl=impl, strength=0.0)
    assert_same(loss.complementary.detach(), torch.tensor(60 - math.log(2)), 1e-6)
    gradient = problem.gradients(loss.complementary)["weak_logits"]
    assert_same(gradient, torch.tensor([[1.0, -0.5, -0.5]]), 1e-6)


@pytest.mark.parametrize("excluded", [[0], [2, 5], [0, 1, 2, 3, 4]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_minus_infinity_exclude_their_classes(kind, excluded, form):
    """The loss and its gradients are those of the problem without these classes."""
    kept = [j for j in range(7) if j not in excluded]
    small = make_problem(6, 9, len(kept), 5, kind=kind, dtype=torch.float32)
    small = small.map(lambda mask: mask.index_fill(1, torch.tensor([0]), True), ["candidates", "labeled_candidates"])

    def widen(tensor, value, dims):
        for dim in dims:
            shape = [7 if d == dim else size for d, size in enumerate(tensor.shape)]
            tensor = tensor.new_full(shape, value).index_copy_(dim, torch.tensor(kept), tensor)
        return tensor

    wide = small.map(lambda tensor: widen(tensor, -math.inf, [1]), LOGITS)
    wide = wide.map(lambda tensor: widen(tensor, False, [1]), ["candidates", "labeled_candidates"])
    wide = wide.map(lambda tensor: widen(tensor, 0.3, [0]), ["weight", "covariance", "class_thresholds"])
    wide = wide.map(lambda classes: torch.tensor(kept)[classes], ["labels", "pseudo_labels"])
    results = []
    for problem in (wide.leaves(), small.leaves()):
        options = {"pseudo_labels": problem.pseudo_labels, "labeled_candidates": problem.labeled_candidates}
        loss = problem.loss(impl="auto", thresholds=0.0, argmax_in_candidates=False, **options)
        results.append((loss, problem.gradients(loss.total)))
    (found, gradients), (expected, expected_gradients) = results
    assert expected.mask.all()
    for term in TERMS:
        assert_same(getattr(found, term).detach(), getattr(expected, term).detach(), 2e-6, term)
    for name in DIFFERENTIABLE:
        dim = 0 if name == "weight" else 1
        assert_same(gradients[name].index_select(dim, torch.tensor(kept)), expected_gradients[name], 2e-6, name)
        assert not gradients[name].index_select(dim, torch.tensor(excluded)).any(), name


def test_single_remaining_class_gives_finite_gradients(form):
    problem = make_problem(6, 9, 7, 5, dtype=torch.float32)
    problem.labels.fill_(6)
    problem.candidates[:, 6] = True
    for name in LOGITS:
        getattr(problem, name)[2, :6] = -math.inf
    problem = problem.leaves()
    loss = problem.loss(impl="auto", thresholds=0.0)
    assert loss.total.isfinite()
    for name, gradient in problem.gradients(loss.total).items():
        assert gradient.isfinite().all(), name


class TestUninitialisedMemory:
    @staticmethod
    def poison(monkeypatch):
        """Fill uninitialised allocations with NaN (or the largest integer)."""
        count = []

        def poisoned(original):
            def allocate(*args, **kwargs):
                tensor = original(*args, **kwargs)
                count.append(tensor.numel())
                return tensor.fill_(math.nan if tensor.is_floating_point() else 2**62)

            return allocate

        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
            (torch.Tensor, "new_empty_strided"),
        ):
            monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
        return count

    @pytest.mark.parametrize("direct", [False, True], ids=["separable form", "direct form"])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", [(3, 9, 7, 5), (3, 4, 41, 5), (0, 4, 7, 5)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_is_never_read(self, dtype, shape, kind, direct, monkeypatch):
        if direct:
            monkeypatch.setattr(torch_impl_module("log_odds")._Separable, "of", staticmethod(lambda *args: None))

        def run():
            problem = make_problem(*shape, kind=kind, dtype=dtype).leaves()
            loss = problem.loss(impl="auto")
            samples = problem.weight, problem.covariance, problem.pseudo_labels
            odd = plsp_kernels.semantic_log_softmax(problem.weak_logits, *samples, strength=STRENGTH).sum()
            entropy = plsp_kernels.semantic_cross_entropy(problem.weak_logits, *samples, strength=STRENGTH)
            form = plsp_kernels.pairwise_quadratic_form(*samples).sum()
            results = [*loss, odd, entropy, form]
            for scalar in (loss.total, odd, entropy, form):
                results += problem.gradients(scalar).values()
            return results

        expected = run()
        allocated = self.poison(monkeypatch)
        found = run()
        assert sum(allocated) > 0
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


class Recorder(TorchDispatchMode):
    """Records the sizes of all tensors that operators create, including inside the library's operators."""

    def __init__(self):
        super().__init__()
        self.sizes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "plsp":
            with self:
                return KERNELS[func._opname](*args)
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and not _is_view(func) and tensor.numel():
                self.sizes.setdefault(tensor.numel(), f"{func} {tuple(tensor.shape)}")
        return result


def _is_view(func):
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


class TestMemory:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("direct", [False, True], ids=["separable form", "direct form"])
    # more classes than features, where pairs dominate; fewer, where a gathered Σ or W Σ would
    @pytest.mark.parametrize("shape", [(8, 24, 40, 32), (8, 24, 12, 64), (2, 3, 40, 32)], ids=str)
    def test_no_tensor_exceeds_the_allowed_sizes(self, shape, direct, kind, monkeypatch):
        num_labeled, num_unlabeled, num_classes, num_features = shape
        if direct:
            monkeypatch.setattr(torch_impl_module("log_odds")._Separable, "of", staticmethod(lambda *args: None))
        budget = 4 * 2 * num_classes * (4 * num_classes + num_features)  # two classes at a time
        for name in ("chunks", "groups"):
            monkeypatch.setattr(torch_impl_module(name), "PAIR_BYTES", budget)
        problem = make_problem(*shape, kind=kind, dtype=torch.float32).leaves()
        with Recorder() as recorder:
            problem.loss(impl="torch").total.backward()
        samples = num_labeled + 2 * num_unlabeled
        allowed = max(2 * num_classes**2, 2 * num_classes * num_features, num_features**2, budget // 16)
        allowed = max(allowed, samples * num_classes)  # the logits themselves
        largest = max(recorder.sizes)
        assert largest <= allowed, recorder.sizes[largest]
        assert largest >= 2 * num_classes**2, "the recorder missed the Gram matrices"

    @pytest.mark.parametrize("kind", KINDS)
    def test_peak_memory_does_not_grow_with_the_classes_of_a_step(self, kind):
        """The Gram matrices of all classes alone would take 160 MiB."""
        problem = make_problem(20, 30, 920, 8, kind=kind, dtype=torch.float32)
        problem = problem.map(lambda _: torch.arange(20), ["labels"])
        options = {"impl": "torch", "pseudo_labels": torch.arange(20, 50)}
        problem = problem.leaves()
        make_problem().leaves().loss(**{**options, "pseudo_labels": None}).total.backward()  # imports and warms up

        def step():
            problem.loss(**options).total.backward()

        peak = peak_extra_bytes(step, torch.device("cpu"))
        assert math.isnan(peak) or peak < 100 * 2**20

    def test_default_budget_is_at_most_64_megabytes(self):
        assert torch_impl_module("chunks").PAIR_BYTES <= 64 * 2**20

    @pytest.mark.parametrize("budget", [2**12, 2**16])
    def test_pair_temporaries_stay_within_the_budget(self, budget, monkeypatch):
        """All temporaries of one chunk: four tensors of at most a quarter of the budget each, or one row of pairs."""
        monkeypatch.setattr(torch_impl_module("log_odds")._Separable, "of", staticmethod(lambda *args: None))
        monkeypatch.setattr(torch_impl_module("chunks"), "PAIR_BYTES", budget)
        generator = torch.Generator().manual_seed(0)
        logits, gram = torch.randn(60, 20, generator=generator), torch.eye(20).expand(1, 20, 20).contiguous()
        rows = Rows(logits, gram, torch.zeros(60, dtype=torch.int64), torch.tensor(0.1))
        with Recorder() as recorder:
            log_odds = torch_impl.log_odds(rows)
            torch_impl.log_odds_backward(rows, log_odds, log_odds, True, True)
            torch_impl.probit_probabilities(rows, 1.0)
        assert max(recorder.sizes) <= max(budget // 16, logits.numel())

    def test_unbalanced_classes_stay_within_the_budget(self, monkeypatch):
        """Padding every class to the size of the largest would take 30 times the logits."""
        budget = 2**16
        for name in ("chunks", "groups"):
            monkeypatch.setattr(torch_impl_module(name), "PAIR_BYTES", budget)
        num_classes, num_samples = 30, 400
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(num_samples, num_classes, generator=generator)
        gram = torch.eye(num_classes).expand(num_classes, -1, -1).contiguous()
        slots = torch.zeros(num_samples, dtype=torch.int64)
        slots[:num_classes] = torch.arange(num_classes)
        rows = Rows(logits, gram, slots, torch.tensor(0.1))
        with Recorder() as recorder:
            log_odds = torch_impl.log_odds(rows)
            torch_impl.log_odds_backward(rows, log_odds, log_odds, True, True)
        assert max(recorder.sizes) <= max(budget // 16, gram.numel(), logits.numel())

    @pytest.mark.parametrize("classes", [[5, 2, 5, 0], [3], [], [6, 5, 4, 3, 2, 1, 0], [1] * 9], ids=str)
    def test_each_class_of_a_step_gets_one_slot(self, classes):
        """Unused slots are marked, so that nothing is computed for them."""
        distinct, slots = class_slots(torch.tensor(classes, dtype=torch.int64), 7)
        assert distinct[slots].tolist() == classes
        if len(classes) >= 7:
            assert distinct.tolist() == list(range(7))
        else:
            assert distinct.tolist() == sorted(set(classes)) + [-1] * (len(classes) - len(set(classes)))
