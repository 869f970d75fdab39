"""The C extension: which calls it serves, and failures specific to C. Tests of the loss cover its accuracy."""

import math
import shutil

import pytest
import torch

import plsp_kernels
from cases import FORMS, KINDS, assert_same, closed_form, make_problem
from plsp_kernels import native, reference, torch_impl
from plsp_kernels.batch import CrossEntropyResult, LabeledBatch
from plsp_kernels.quadratic import centred_rows
from plsp_kernels.step import Step, StepResult

VERSIONS = FORMS[1:]
NAMES = StepResult._fields


def make_step(*shape, kind="full", again=False, **changes):
    """A step in float32 of shape (Bl, Bu, l, d); sizes that are not given are those of (6, 9, 7, 5)."""
    shape = (*shape, *(6, 9, 7, 5)[len(shape) :])
    return make_problem(*shape, kind=kind, dtype=torch.float32).step(again)._replace(**changes)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def upper_bound(step, version, upstream=None, need_logits=True, need_weight=True):
    with closed_form(version):
        return native.upper_bound(step, upstream, need_logits, need_weight)


def closed_form_in_float64(step, upstream=None):
    """Ground truth."""
    is_float = [isinstance(value, torch.Tensor) and value.is_floating_point() for value in step]
    double = [value.double() if floats else value for value, floats in zip(step, is_float, strict=True)]
    return StepResult(*torch.ops.plsp.upper_bound(*double, upstream, True, True, "torch"))


def assert_agrees(step, version, upstream=None, tolerance=4e-6):
    found, truth = upper_bound(step, version, upstream), closed_form_in_float64(step, upstream)
    for name, result, expected in zip(NAMES, found, truth, strict=True):
        assert result.shape == expected.shape, name
        error = (result.double() - expected.double()).abs()
        scale = expected.double().abs().amax().clamp(min=1) if expected.numel() else 1
        assert (error <= tolerance * scale).all(), name


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build it with")
def test_extension_is_built_if_there_is_a_compiler():
    assert native.VERSIONS[:1] == ("baseline",)


@pytest.mark.skipif(not VERSIONS, reason="not built")
class TestRefusal:
    """Refusals that the dispatcher checks before a call."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_float32_and_half_precision_on_a_cpu_are_served(self, dtype):
        step = make_step()
        assert native.step_refusal(Step(*(tensor.to(dtype) for tensor in step[:4]), *step[4:])) is None
        assert native.labels_refusal(step.weak_logits.to(dtype)) is None

    @pytest.mark.parametrize("name", ["labeled_logits", "weak_logits", "strong_logits", "weight"])
    def test_float64_is_refused(self, name):
        step = make_step()
        assert native.step_refusal(step._replace(**{name: getattr(step, name).double()})) == "float64 inputs"
        assert native.labels_refusal(step.weak_logits.double()) == "float64 inputs"

    def test_float64_statistics_are_served(self):
        step = make_step()
        step = step._replace(covariance=step.covariance.double(), thresholds=step.thresholds.double())
        assert native.step_refusal(step) is None

    def test_other_devices_are_refused(self):
        step, state = make_step(), [torch.zeros(3, 4, device="meta"), torch.zeros(3, 4), *torch.zeros(2, 3).long()]
        assert native.step_refusal(step._replace(weight=step.weight.to("meta"))) == "inputs on meta"
        assert native.labels_refusal(step.weak_logits.to("meta")) == "inputs on meta"
        assert native.update_refusal(*state, torch.zeros(2, 4)) == "inputs on meta"

    def test_many_classes_are_refused(self):
        assert native.step_refusal(make_step(24, 24, native.MOST_CLASSES)) is None
        assert native.step_refusal(make_step(24, 25, native.MOST_CLASSES + 1)) == "more than 48 classes"

    def test_fewer_samples_than_classes_are_refused(self):
        assert native.step_refusal(make_step(3, 4, 7)) is None
        assert native.step_refusal(make_step(3, 3, 7)) == "fewer samples than classes"

    def test_everything_is_refused_without_the_extension(self, monkeypatch):
        step, state = make_step(9, 9, 30), plsp_kernels.SemanticCovariance(3, 4).buffers()
        monkeypatch.setattr(native, "VERSIONS", ())
        not_built = "the C extension is not built; reinstall with a C compiler"
        assert native.step_refusal(step) == not_built
        assert native.labels_refusal(step.weak_logits.double()) == not_built
        assert native.update_refusal(*state, torch.zeros(2, 4)) == not_built

    @pytest.mark.parametrize("kind", KINDS)
    def test_statistics_must_be_contiguous_float32(self, kind):
        shape = (3, 4, 4) if kind == "full" else (3, 4)
        state, features = [torch.zeros(shape), torch.zeros(3, 4), *torch.zeros(2, 3).long()], torch.zeros(2, 4)
        spread = [torch.zeros(*shape, 2)[..., 0], torch.zeros(3, 4, 2)[..., 0], *torch.zeros(2, 6).long()[:, ::2]]
        assert native.update_refusal(*state, features) is None
        for i in range(4):
            changed = [*state[:i], spread[i], *state[i + 1 :]]
            assert native.update_refusal(*changed, features) == "statistics that are not contiguous"
        assert native.update_refusal(state[0].double(), *state[1:], features) == "float64 inputs"
        assert (
            native.update_refusal(state[0], state[1].half(), *state[2:], features) == "statistics that are not float32"
        )

    def test_large_batches_are_left_to_operators(self):
        step, most = make_step(4, 4, 4), native.MOST_PAIRS // 32
        assert native.step_pays(step._replace(candidates=step.candidates[:1].expand(most - 4, 4)))
        assert not native.step_pays(step._replace(candidates=step.candidates[:1].expand(most - 3, 4)))

    def test_many_features_are_left_to_operators(self):
        step, width = make_step(9, 0, 4), math.isqrt(native.MOST_PRODUCTS // 16) + 1
        step = step._replace(weight=torch.empty(4, width), covariance=torch.empty(4, 1, 1).expand(4, width, width))
        assert not native.step_pays(step)
        assert native.step_pays(step._replace(weight=step.weight[:, :-9], covariance=step.covariance[:, :-9, :-9]))
        assert native.step_pays(step._replace(covariance=step.covariance[:, 0]))

    @pytest.mark.parametrize("kind", KINDS)
    def test_large_updates_are_left_to_operators(self, kind):
        state = plsp_kernels.SemanticCovariance(2, 512, kind)
        assert native.update_pays(state.covariance, torch.empty(8, 512))
        assert native.update_pays(state.covariance, torch.empty(9, 512)) == (kind == "diagonal")

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_refusals_can_be_compiled(self, dynamic):
        def ask(*fields):
            step = Step(*fields)
            served = native.step_refusal(step) is None and native.step_pays(step)
            update = step.covariance, step.weight, step.labels, step.labels, step.weight
            served = served and native.update_refusal(*update) is None and native.update_pays(update[0], update[-1])
            return step.weight + (1 if served and native.labels_refusal(step.weak_logits) is None else 2)

        step = make_step()
        found = torch.compile(ask, fullgraph=True, dynamic=dynamic, backend="eager")(*step)
        assert torch.equal(found, step.weight + 1)


@pytest.mark.parametrize("version", VERSIONS)
class TestStep:
    # below, at and above the lanes of every version, in one class and over several
    @pytest.mark.parametrize("count", [4, 5, 7, 8, 9, 15, 16, 17, 33])
    @pytest.mark.parametrize("num_classes", [2, 7])
    def test_blocks_of_any_size_agree(self, num_classes, count, version):
        assert_agrees(make_step(count, count, num_classes, again=True), version)
        one_class = {name: torch.zeros(count, dtype=torch.int64) for name in ("labels", "pseudo_labels")}
        assert_agrees(make_step(count, count, num_classes, **one_class), version)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("again", [False, True])
    # classes and features around the lanes of a vector and the columns of a product
    @pytest.mark.parametrize("num_features", [1, 4, 7, 8, 13, 84])
    @pytest.mark.parametrize("num_classes", [2, 4, 8, 10, 17, 48])
    def test_shapes_agree(self, num_classes, num_features, again, kind, version):
        assert_agrees(make_step(13, 35, num_classes, num_features, kind=kind, again=again), version)

    @pytest.mark.parametrize("sizes", [(0, 9), (9, 0)], ids=str)
    @pytest.mark.parametrize("again", [False, True])
    def test_empty_batches_agree(self, sizes, again, version):
        assert_agrees(make_step(*sizes, again=again), version)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("need_weight", [False, True])
    @pytest.mark.parametrize("need_logits", [False, True])
    def test_unneeded_gradients_are_empty_and_change_nothing(self, need_logits, need_weight, kind, version):
        everything = upper_bound(make_step(kind=kind), version)
        found = upper_bound(make_step(kind=kind), version, None, need_logits, need_weight)
        needed = {"grad_logits": need_logits, "grad_weight": need_weight}
        for name, result, expected in zip(NAMES, found, everything, strict=True):
            if needed.get(name, True):
                assert torch.equal(result, expected), name
            else:
                assert result.numel() == 0

    @pytest.mark.parametrize("upstream", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.5, -2, 3)], ids=str)
    @pytest.mark.parametrize("again", [False, True])
    def test_gradients_of_weighted_terms_agree(self, again, upstream, version):
        step = make_step(again=again, thresholds=torch.zeros(7))
        assert_agrees(step, version, torch.tensor(upstream, dtype=torch.float32))
        plain, weighted = upper_bound(step, version), upper_bound(step, version, torch.tensor(upstream))
        for name in ("total", "terms", "confidence", "mask"):
            assert torch.equal(getattr(plain, name), getattr(weighted, name)), name

    def test_pseudo_labels_are_chosen_if_none_are_given(self, version):
        given = make_step(pseudo_labels=native.class_activation_labels(make_step().weak_logits, make_step().candidates))
        found, expected = upper_bound(given._replace(pseudo_labels=None), version), upper_bound(given, version)
        assert torch.equal(found.pseudo_labels, given.pseudo_labels)
        assert expected.pseudo_labels.shape == (0,)
        for name in NAMES:
            if name != "pseudo_labels":
                assert torch.equal(getattr(found, name), getattr(expected, name)), name

    @pytest.mark.parametrize("strength", [40.0, 1e4])
    def test_direct_form_agrees_beyond_the_exponent_range(self, strength, version):
        """λG exceeds half of the float32 exponent range in the first case and all of it in the second."""
        step = make_step(strength=number(strength))
        found, truth = upper_bound(step, version), closed_form_in_float64(step)
        # rounding an exponent of size E changes log-odds and shares by E epsilon
        gram, _ = torch_impl.class_gram(centred_rows(step.weight), step.covariance, torch.arange(7), False)
        size = float(strength * gram.abs().max())
        assert size > 60
        for name in ("total", "terms", "grad_logits"):
            result, expected = getattr(found, name), getattr(truth, name)
            assert (result - expected).abs().max() <= 2 * size * 1.2e-7 * expected.abs().max().clamp(min=1)

    def test_invalid_covariance_does_not_overflow_silently(self, version):
        """Not positive semi-definite: interactions of ±150, although all Gram diagonals are zero."""
        covariance = torch.zeros(4, 2, 2)
        covariance[:, 0, 1] = covariance[:, 1, 0] = 150.0
        weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        step = make_step(3, 4, 4, 2, strength=number(1.0), covariance=covariance, weight=weight)
        found, truth = upper_bound(step, version).terms, closed_form_in_float64(step).terms
        assert truth.max() > 70
        assert (found - truth).abs().max() < 1e-6 * truth.max()

    def test_weight_gradient_sums_to_zero_over_classes(self, version):
        """The loss depends only on differences of rows."""
        found = upper_bound(make_step(20, 30), version).grad_weight
        assert found.abs().max() > 1e-3
        assert found.sum(0).abs().max() < 1e-6

    def test_classes_without_samples_are_skipped(self, version):
        """Their covariances are not even read."""
        step = make_step(labels=torch.ones(6).long(), pseudo_labels=torch.ones(9).long())
        expected = upper_bound(step, version)
        step.covariance[[0, 2, 3, 4, 5, 6]] = math.nan
        for found, wanted in zip(upper_bound(step, version), expected, strict=True):
            assert torch.equal(found, wanted)

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_output_element_is_written_and_none_beyond(self, kind, version, monkeypatch):
        """Outputs are allocated in poisoned memory with a poisoned margin on either side."""
        arenas = []

        def poisoned(like, *size):
            size = size[0] if isinstance(size[0], tuple) else size
            arena = torch.full((math.prod(size) + 128,), math.nan if like.is_floating_point() else 77).to(like.dtype)
            arenas.append(arena)
            return arena[64 : 64 + math.prod(size)].view(size)

        step = make_step(5, 11, 7, 13, kind=kind, again=True, labels=torch.tensor([0, 1, 1, 3, 5]), pseudo_labels=None)
        expected = upper_bound(step, version)
        monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
        found = upper_bound(step, version)
        monkeypatch.undo()
        assert len(arenas) == len(NAMES)
        for arena in arenas:
            for margin in (arena[:64], arena[-64:]):
                assert margin.isnan().all() if arena.is_floating_point() else (margin == margin[0]).all()
        for name, result, wanted in zip(NAMES, found, expected, strict=True):
            assert torch.equal(result, wanted), name

    def test_results_do_not_depend_on_instance_order(self, version):
        """Results of a row do not depend on other rows or on its position in a block."""
        step = make_step(0, 20)
        order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
        names = ("strong_logits", "weak_logits", "pseudo_labels", "candidates")
        moved = step._replace(**{name: getattr(step, name)[order] for name in names})
        found, expected = upper_bound(moved, version), upper_bound(step, version)
        again = torch.cat([rows[order] for rows in expected.grad_logits.split(20)])
        assert torch.equal(found.grad_logits, again)
        for name in ("confidence", "prediction", "mask"):
            assert torch.equal(getattr(found, name), getattr(expected, name)[order]), name

    @pytest.mark.parametrize("name", ["labeled_logits", "strong_logits", "weak_logits"])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_non_finite_logits_propagate_to_the_loss(self, value, name, version):
        # every instance enters the consistency term and has a non-candidate class
        changes = {"thresholds": torch.zeros(7), "argmax_in_candidates": False}
        step = make_step(candidates=torch.ones(9, 7, dtype=torch.bool).tril(5), **changes)
        getattr(step, name)[2] = value
        assert not upper_bound(step, version).total.isfinite()

    @pytest.mark.parametrize("name", ["labels", "pseudo_labels"])
    @pytest.mark.parametrize("value", [7, -1, 2**40])
    def test_out_of_range_classes_are_rejected(self, name, value, version):
        step = make_step()
        getattr(step, name)[3] = value
        with pytest.raises(IndexError, match=rf"^{name} must lie in \[0, 7\)"):
            upper_bound(step, version)

    def assert_relatively_accurate(self, step, version, column, condition):
        """The gradient of one column of the strong logits, against float64."""
        found, truth = (
            result.grad_logits[:40, column].double()
            for result in (upper_bound(step, version), closed_form_in_float64(step))
        )
        normal = truth.abs() > torch.finfo(torch.float32).tiny
        assert normal.sum() > 30
        assert ((found - truth).abs()[normal] <= condition * 1.2e-7 * truth[normal].abs()).all()
        assert (found[~normal].abs() < 2 * torch.finfo(torch.float32).tiny).all()
        return truth

    # The condition of a tail is its exponent: rounding the logits alone moves it that much.

    def test_tails_of_the_sigmoid_keep_their_relative_accuracy(self, version):
        spread = torch.linspace(0.5, 9, 40)
        step = make_step(
            0,
            40,
            3,
            strength=number(0.0),
            thresholds=torch.zeros(3),
            argmax_in_candidates=False,
            strong_logits=torch.stack([torch.zeros(40), 9 * spread, -9 * spread], 1),
            candidates=torch.tensor([[False, True, False]]).repeat(40, 1),  # a pseudo-target of one
        )
        assert self.assert_relatively_accurate(step, version, 1, 81).abs().min() < 1e-30

    def test_tails_of_the_probit_keep_their_relative_accuracy(self, version):
        """Pseudo-targets whose probabilities are far down the normal distribution."""
        spread = torch.linspace(0.5, 9, 40)
        step = make_step(
            0,
            40,
            3,
            strength=number(0.0),
            thresholds=torch.zeros(3),
            argmax_in_candidates=False,
            weak_logits=torch.stack([torch.zeros(40), -spread, -1.05 * spread - 0.3], 1),
            strong_logits=torch.tensor([[0.0, 200.0, 0.0]]).repeat(40, 1),  # only the second candidate has a slope
            candidates=torch.tensor([[False, True, True]]).repeat(40, 1),
        )
        targets = -40 * self.assert_relatively_accurate(step, version, 2, 2 * 69)
        assert targets.min() < 1e-4
        assert targets.max() > 0.1


TENSORS = Step._fields[:10]
LOGITS = ("labeled_logits", "weak_logits", "strong_logits")


@pytest.mark.skipif(not VERSIONS, reason="not built")
class TestValidationOfSteps:
    """C receives raw addresses, so invalid tensors must be rejected before the call."""

    def refuses(self, error, name, step):
        with pytest.raises(error, match=rf"^{name} must "):
            native.upper_bound(step, None, True, True)

    @pytest.mark.parametrize("name", TENSORS)
    def test_other_dtypes_are_rejected(self, name):
        step = make_step(again=True)
        for dtype in {torch.int32, torch.uint8, torch.complex64} - {getattr(step, name).dtype}:
            self.refuses(TypeError, name, step._replace(**{name: getattr(step, name).to(dtype)}))

    @pytest.mark.parametrize("name", [*LOGITS, "weight"])
    def test_float64_is_rejected(self, name):
        step = make_step()
        with pytest.raises(ValueError, match="impl='native' cannot serve this call: float64 inputs"):
            native.upper_bound(step._replace(**{name: getattr(step, name).double()}), None, True, True)

    @pytest.mark.parametrize("name", TENSORS)
    def test_short_tensors_are_rejected(self, name):
        """Short by one row. If sizes of two tensors disagree, the error may name either."""
        step = make_step(again=True)
        with pytest.raises(ValueError, match=r"^\w+ must have shape \("):
            native.upper_bound(step._replace(**{name: getattr(step, name)[:-1]}), None, True, True)

    @pytest.mark.parametrize("name", TENSORS)
    @pytest.mark.parametrize("change", ["scalar", "empty", "flat", "narrow"])
    def test_other_shapes_are_rejected(self, name, change):
        step = make_step(again=True)
        tensor = getattr(step, name)
        if (name, change) == ("thresholds", "scalar"):
            pytest.skip("one threshold for all classes")
        changed = {
            "scalar": tensor.flatten()[0],
            "empty": tensor[..., :0],
            "flat": tensor[None] if tensor.dim() == 1 else tensor.flatten(),
            "narrow": tensor[..., :-1],
        }
        with pytest.raises(ValueError, match=r"^\w+ must have (shape|\d dimensions?)"):
            native.upper_bound(step._replace(**{name: changed[change]}), None, True, True)

    @pytest.mark.parametrize("name", TENSORS)
    def test_other_devices_are_refused(self, name):
        step = make_step(again=True)
        self.refuses(ValueError, name, step._replace(**{name: getattr(step, name).to("meta")}))

    @pytest.mark.parametrize("name", [*LOGITS, "weight", "covariance", "thresholds"])
    def test_sparse_tensors_are_rejected(self, name):
        step = make_step()
        self.refuses(ValueError, name, step._replace(**{name: getattr(step, name).to_sparse()}))

    @pytest.mark.parametrize("name", [*LOGITS, "thresholds"])
    def test_missing_tensors_are_rejected(self, name):
        self.refuses(TypeError, name, make_step()._replace(**{name: None}))

    def test_unsupported_steps_are_rejected(self):
        with pytest.raises(ValueError, match="impl='native' cannot serve this call: fewer samples than classes"):
            native.upper_bound(make_step(3, 3, 7), None, True, True)

    @pytest.mark.parametrize("name", TENSORS)
    def test_non_contiguous_tensors_are_copied(self, name):
        step = make_step(again=True)
        tensor = getattr(step, name)
        spread = torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0]
        assert not spread.is_contiguous()
        found = native.upper_bound(step._replace(**{name: spread}), None, True, True)
        for result, expected in zip(found, native.upper_bound(step, None, True, True), strict=True):
            assert torch.equal(result, expected)

    def test_one_threshold_serves_all_classes(self):
        step = make_step(thresholds=torch.full((7,), 0.4))
        found = native.upper_bound(step._replace(thresholds=number(0.4)), None, True, True)
        for result, expected in zip(found, native.upper_bound(step, None, True, True), strict=True):
            assert torch.equal(result, expected)

    @pytest.mark.parametrize("name", [*LOGITS, "weight", "covariance", "thresholds"])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
    def test_other_float_dtypes_are_converted(self, name, dtype):
        if dtype == torch.float64 and name not in ("covariance", "thresholds"):
            pytest.skip("rejected")
        step = make_step()
        rounded = getattr(step, name).to(dtype)
        found = native.upper_bound(step._replace(**{name: rounded}), None, True, True)
        expected = native.upper_bound(step._replace(**{name: rounded.float()}), None, True, True)
        for result, wanted in zip(found, expected, strict=True):
            assert torch.equal(result, wanted)


def make_batch(num_rows=17, num_classes=7, num_features=5, *, kind="full", **changes):
    """A batch in float32, with class weights and label smoothing."""
    problem = make_problem(num_rows, 0, num_classes, num_features, kind=kind, dtype=torch.float32)
    samples = problem.labeled_logits, problem.weight, problem.covariance, problem.labels
    batch = LabeledBatch(*samples, problem.class_thresholds, number(0.3), 0.1, -100, "none")
    return batch._replace(**changes)


def cross_entropy(batch, version, upstream=None, need_logits=True, need_weight=True):
    with closed_form(version):
        return native.cross_entropy(batch, upstream, need_logits, need_weight)


def assert_cross_entropy_agrees(batch, version, upstream=None):
    is_float = [isinstance(value, torch.Tensor) and value.is_floating_point() for value in batch]
    double = [value.double() if floats else value for value, floats in zip(batch, is_float, strict=True)]
    truth = torch_impl.cross_entropy(LabeledBatch(*double), upstream, True, True)
    found = cross_entropy(batch, version, upstream)
    for name, result, expected in zip(CrossEntropyResult._fields, found, truth, strict=True):
        assert result.shape == expected.shape, name
        assert_same(result, expected, 4e-6, name)


@pytest.mark.parametrize("version", VERSIONS)
class TestCrossEntropy:
    @pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 9, 16, 17, 33])
    @pytest.mark.parametrize("num_classes", [2, 9, 128])
    def test_blocks_of_any_size_agree(self, num_classes, count, version):
        batch = make_batch(count, num_classes)
        batch.labels[: count // 2] = 1  # one class with many samples
        assert_cross_entropy_agrees(batch, version, torch.arange(count) % 5 - 1.5)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("num_features", [1, 8, 19, 84])
    @pytest.mark.parametrize("num_classes", [3, 16])
    def test_shapes_agree(self, num_classes, num_features, kind, version):
        assert_cross_entropy_agrees(make_batch(17, num_classes, num_features, kind=kind), version)

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("ignore_index", [-100, 2])
    @pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
    @pytest.mark.parametrize("weighted", [True, False])
    def test_options_agree(self, weighted, label_smoothing, ignore_index, reduction, version):
        batch = make_batch(label_smoothing=label_smoothing, ignore_index=ignore_index, reduction=reduction)
        batch.labels[1] = ignore_index
        batch.logits[1] = math.nan
        assert_cross_entropy_agrees(batch if weighted else batch._replace(class_weight=None), version)

    def test_rows_that_are_all_ignored_have_no_loss(self, version):
        batch = make_batch(3, ignore_index=2)
        batch.labels.fill_(2)
        for reduction in ("mean", "none"):
            found = cross_entropy(batch._replace(reduction=reduction), version)
            assert not any(value.any() for value in found)

    @pytest.mark.parametrize("kind", KINDS)
    def test_unneeded_gradients_are_empty_and_change_nothing(self, kind, version):
        batch = make_batch(kind=kind, reduction="mean")
        both = cross_entropy(batch, version)
        for need in ((True, False), (False, True), (False, False)):
            found = cross_entropy(batch, version, None, *need)
            assert torch.equal(found.loss, both.loss)
            for gradient, needed, expected in zip(found[1:], need, both[1:], strict=True):
                assert torch.equal(gradient, expected) if needed else gradient.shape == (0,)

    @pytest.mark.parametrize("scale", [1e4, 1e-4])
    def test_extreme_logits_agree(self, scale, version):
        batch = make_batch()
        assert_cross_entropy_agrees(batch._replace(logits=scale * batch.logits), version)

    def test_small_losses_keep_their_relative_precision(self, version):
        batch = make_batch(1, 3, 3, class_weight=None, label_smoothing=0.0)
        batch.labels[0], batch.logits[0] = 0, torch.tensor([30.0, 0.0, -1.0])
        exact = torch_impl.cross_entropy(
            batch._replace(logits=batch.logits.double(), weight=batch.weight.double()), None, False, False
        )
        assert 0 < float(exact.loss) < 1e-8
        torch.testing.assert_close(cross_entropy(batch, version).loss.double(), exact.loss, rtol=1e-5, atol=0)

    def test_excluded_classes_have_finite_gradients(self, version):
        batch = make_batch(class_weight=None, label_smoothing=0.0)
        batch.labels.clamp_(max=4)
        batch.logits[:, 5:] = -math.inf
        batch.labels[3], batch.logits[3, 1:] = 0, -math.inf  # no class is left besides the label
        batch.logits[4, batch.labels[4]] = -math.inf
        found = cross_entropy(batch, version)
        assert found.loss[3] == 0
        assert found.loss[4] == math.inf
        assert found.grad_logits.isfinite().all()
        assert found.grad_weight.isfinite().all()

    def test_nearly_equal_rows_do_not_cancel(self, version):
        batch = make_batch(num_features=84, class_weight=None, label_smoothing=0.0, strength=number(2.0))
        batch.weight[2] += 30.0
        batch.weight[5] = batch.weight[2] * (1 + 1e-3)
        batch.labels[:8], batch.labels[8:] = 2, 5
        batch.logits[:, [0, 1, 3, 4, 6]] = -math.inf
        assert_cross_entropy_agrees(batch, version)

    @pytest.mark.parametrize("value", [-1, 7, 2**40])
    def test_out_of_range_labels_are_rejected(self, value, version):
        batch = make_batch()
        batch.labels[2] = value
        with pytest.raises(IndexError, match=r"^labels must lie in \[0, 7\)"):
            cross_entropy(batch, version)

    def test_non_contiguous_and_half_precision_inputs_are_converted(self, version):
        batch = make_batch()
        batch = batch._replace(logits=batch.logits.half(), weight=batch.weight.bfloat16())
        moved = batch._replace(logits=batch.logits.t().contiguous().t(), weight=batch.weight.t().contiguous().t())
        wide = batch._replace(logits=batch.logits.float(), weight=batch.weight.float())
        for found, expected in zip(cross_entropy(moved, version), cross_entropy(wide, version), strict=True):
            assert torch.equal(found, expected)

    @pytest.mark.parametrize("name", ["logits", "weight", "covariance", "labels", "class_weight"])
    def test_tensors_of_other_shapes_are_rejected(self, name, version):
        batch = make_batch()
        with pytest.raises(ValueError, match="must have"):
            cross_entropy(batch._replace(**{name: getattr(batch, name)[:-1]}), version)


@pytest.mark.skipif(not VERSIONS, reason="not built")
class TestDispatchOfTheCrossEntropy:
    def test_small_batches_are_served_and_large_ones_left_to_operators(self):
        assert native.batch_refusal(make_batch()) is None
        assert native.batch_pays(make_batch())
        assert not native.batch_pays(make_batch(3, 48, 400))
        assert native.batch_refusal(make_batch(3, 128)) is None
        assert native.batch_refusal(make_batch(3, 129)) == "more than 128 classes"
        assert "float64" in native.batch_refusal(make_batch()._replace(logits=torch.zeros(17, 7).double()))

    def test_unsupported_batches_are_rejected(self):
        with pytest.raises(ValueError, match="more than 128 classes"):
            native.cross_entropy(make_batch(3, 129), None, True, True)


@pytest.mark.skipif(not VERSIONS, reason="not built")
class TestClassActivationLabels:
    def test_agree_with_the_reference(self):
        problem = make_problem(1, 200, 9, 5, dtype=torch.float32)
        found = native.class_activation_labels(problem.weak_logits, problem.candidates)
        assert torch.equal(found, reference.class_activation_labels(problem.weak_logits, problem.candidates))

    def test_ties_go_to_the_lowest_class(self):
        logits, candidates = torch.zeros(1, 4), torch.tensor([[False, True, True, True]])
        assert native.class_activation_labels(logits, candidates).tolist() == [1]

    def test_are_candidates_whatever_the_logits(self):
        logits = torch.tensor([[math.nan, math.nan, 5.0], [-math.inf, 1.0, 2.0], [math.inf, 0.0, math.nan]])
        candidates = torch.tensor([[False, True, False], [True, False, False], [False, True, True]])
        found = native.class_activation_labels(logits, candidates)
        assert candidates.gather(1, found[:, None]).all()

    def test_invalid_tensors_are_rejected(self):
        logits, candidates = torch.zeros(3, 4), torch.ones(3, 4, dtype=torch.bool)
        for error, name, arguments in [
            (TypeError, "logits", (logits.double(), candidates)),
            (ValueError, "logits", (logits[0], candidates)),
            (ValueError, "logits", (logits.to("meta"), candidates)),
            (TypeError, "candidates", (logits, candidates.long())),
            (ValueError, "candidates", (logits, candidates[:2])),
            (ValueError, "candidates", (logits, candidates.mT)),
        ]:
            with pytest.raises(error, match=rf"^{name} must "):
                native.class_activation_labels(*arguments)

    def test_non_contiguous_tensors_are_copied(self):
        problem = make_problem(1, 9, dtype=torch.float32)
        logits, candidates = problem.weak_logits.mT.contiguous().mT, problem.candidates.mT.contiguous().mT
        expected = native.class_activation_labels(problem.weak_logits, problem.candidates)
        assert torch.equal(native.class_activation_labels(logits, candidates), expected)

    def test_used_by_the_public_function(self, monkeypatch):
        problem = make_problem(1, 9, dtype=torch.float32)
        calls, original = [], native.class_activation_labels
        monkeypatch.setattr(native, "class_activation_labels", lambda *args: calls.append(1) or original(*args))
        plsp_kernels.class_activation_labels(problem.weak_logits, problem.candidates)
        plsp_kernels.class_activation_labels(problem.weak_logits.double(), problem.candidates)
        assert len(calls) == 1


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
class TestCovarianceUpdate:
    """Complements the tests of SemanticCovariance, which run for every version."""

    # features around the lanes of a vector and the columns of a product
    @pytest.mark.parametrize("num_features", [1, 3, 4, 7, 8, 13, 16, 17, 84])
    @pytest.mark.parametrize("num_samples", [1, 9, 40])
    def test_agrees_with_the_operators(self, num_samples, num_features, kind, version):
        generator = torch.Generator().manual_seed(0)
        states = {form: plsp_kernels.SemanticCovariance(5, num_features, kind) for form in ("operators", version)}
        states["operators"].double()
        for _ in range(3):
            features = torch.randn(num_samples, num_features, generator=generator)
            labels = torch.randint(5, (num_samples,), generator=generator)
            for form, state in states.items():
                with closed_form(form):
                    state.update(features, labels)
        for found, expected in zip(states[version].buffers(), states["operators"].buffers(), strict=True):
            assert_same(found.to(expected.dtype), expected, 2e-6)

    def test_full_covariances_are_symmetric_to_the_bit(self, kind, version):
        if kind == "diagonal":
            return
        state = plsp_kernels.SemanticCovariance(3, 13)
        with closed_form(version):
            for seed in range(5):
                generator = torch.Generator().manual_seed(seed)
                state.update(torch.randn(20, 13, generator=generator), torch.randint(3, (20,), generator=generator))
        assert torch.equal(state.covariance, state.covariance.mT)

    def test_update_bumps_the_version_counter(self, kind, version):
        state = plsp_kernels.SemanticCovariance(3, 4, kind)
        scale = torch.ones_like(state.covariance, requires_grad=True)
        product = (scale * state.covariance).sum()
        with closed_form(version):
            state.update(torch.ones(2, 4), torch.tensor([0, 1]))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()

    def test_inference_mode_tensors_can_be_updated(self, kind, version):
        with torch.inference_mode(), closed_form(version):
            state = plsp_kernels.SemanticCovariance(3, 4, kind)
            state.update(torch.ones(2, 4), torch.tensor([0, 1]))
        assert state.count.tolist() == [1, 1, 0]

    def test_out_of_range_labels_are_rejected_before_any_write(self, kind, version):
        state = plsp_kernels.SemanticCovariance(3, 4, kind)
        with closed_form(version), pytest.raises(IndexError, match=r"labels must lie in \[0, 3\)"):
            native.covariance_update(*state.buffers(), torch.ones(2, 4), torch.tensor([0, 3]))
        assert not any(buffer.any() for buffer in state.buffers())

    def test_sample_that_is_not_finite_is_left_out_and_counted(self, kind, version):
        state = plsp_kernels.SemanticCovariance(3, 4, kind)
        features = torch.ones(4, 4)
        features[1] = math.nan
        with closed_form(version):
            state.update(features, torch.tensor([0, 1, 2, 2]))
        assert state.count.tolist() == [1, 0, 2]
        assert state.skipped.tolist() == [0, 1, 0]
        assert state.mean.tolist() == [[1.0] * 4, [0.0] * 4, [1.0] * 4]
        assert not state.covariance.any()

    @pytest.mark.parametrize(
        ("name", "change", "error"),
        [
            ("covariance", lambda tensor: tensor.double(), TypeError),
            ("covariance", lambda tensor: tensor[:2], ValueError),
            ("covariance", lambda tensor: tensor[..., :3], ValueError),
            ("covariance", lambda tensor: tensor[0, 0], ValueError),
            ("covariance", lambda tensor: tensor.to("meta"), ValueError),
            ("mean", lambda tensor: tensor.half(), TypeError),
            ("mean", lambda tensor: tensor[0], ValueError),
            ("count", lambda tensor: tensor.int(), TypeError),
            ("count", lambda tensor: tensor[:2], ValueError),
            ("count", lambda tensor: tensor[:, None], ValueError),
            ("skipped", lambda tensor: tensor.int(), TypeError),
            ("skipped", lambda tensor: tensor[:2], ValueError),
            ("features", lambda tensor: tensor.long(), TypeError),
            ("features", lambda tensor: tensor[0], ValueError),
            ("features", lambda tensor: tensor[:, :3], ValueError),
            ("features", lambda tensor: tensor.to("meta"), ValueError),
            ("labels", lambda tensor: tensor.int(), TypeError),
            ("labels", lambda tensor: tensor[:1], ValueError),
            ("labels", lambda tensor: tensor[:0], ValueError),
            ("labels", lambda tensor: tensor[0], ValueError),
        ],
    )
    def test_invalid_tensors_are_rejected_before_any_write(self, name, change, error, kind, version):
        state = plsp_kernels.SemanticCovariance(3, 4, kind)
        names = ("covariance", "mean", "count", "skipped", "features", "labels")
        tensors = dict(zip(names, (*state.buffers(), torch.ones(2, 4), torch.tensor([0, 1])), strict=True))
        tensors[name] = change(tensors[name])
        with closed_form(version), pytest.raises(error, match=rf"^{name} must "):
            native.covariance_update(*tensors.values())
        assert not any(buffer.any() for buffer in state.buffers())

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
    def test_features_of_any_float_dtype_are_converted(self, dtype, kind, version):
        states = [plsp_kernels.SemanticCovariance(3, 4, kind) for _ in range(2)]
        features, labels = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).to(dtype), torch.arange(5) % 3
        with closed_form(version):
            native.covariance_update(*states[0].buffers(), features, labels)
            native.covariance_update(*states[1].buffers(), features.float(), labels)
        for found, expected in zip(states[0].buffers(), states[1].buffers(), strict=True):
            assert torch.equal(found, expected)

    def test_statistics_must_match_the_mean(self, kind, version):
        covariance, _, count, skipped = plsp_kernels.SemanticCovariance(3, 4, kind).buffers()
        for mean in (torch.zeros(2, 4), torch.zeros(3, 5)):
            with closed_form(version), pytest.raises(ValueError, match="must have shape"):
                native.covariance_update(covariance, mean, count, skipped, torch.ones(2, 4), torch.tensor([0, 1]))

    @pytest.mark.parametrize("position", [0, 1, 2, 3])
    def test_non_contiguous_statistics_are_rejected(self, position, kind, version):
        state = list(plsp_kernels.SemanticCovariance(3, 4, kind).buffers())
        state[position] = torch.stack([state[position]] * 2, -1)[..., 0]
        with closed_form(version), pytest.raises(ValueError, match="must be contiguous"):
            native.covariance_update(*state, torch.ones(2, 4), torch.tensor([0, 1]))
        assert not any(buffer.any() for buffer in state)

    def test_non_contiguous_batches_are_copied(self, kind, version):
        features, labels = torch.arange(20.0).view(4, 5).mT, torch.tensor([0, 9, 1, 9, 1, 9, 2, 9, 0, 9])[::2]
        spread, dense = (plsp_kernels.SemanticCovariance(3, 4, kind) for _ in range(2))
        with closed_form(version):
            native.covariance_update(*spread.buffers(), features, labels)
            native.covariance_update(*dense.buffers(), features.contiguous(), labels.contiguous())
        for found, expected in zip(spread.buffers(), dense.buffers(), strict=True):
            assert torch.equal(found, expected)
