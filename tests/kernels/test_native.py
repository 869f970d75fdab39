"""The compiled step: when it serves, and what only C can get wrong. Its accuracy is tested wherever the loss is."""

import contextlib
import math
import shutil

import pytest
import torch

import plsp_kernels
from cases import FORMS, KINDS, assert_same, closed_form, make_problem, torch_impl_module
from plsp_kernels import native, reference
from plsp_kernels.ops.registration import KERNELS

VERSIONS = FORMS[1:]
NAMES = ("values", "grad_rows", "grad_weight", "odds", "grad_odds", "centred", "gram", "product")
NAMES += ("confidence", "prediction", "mask")


def step(num_labeled=6, num_unlabeled=9, num_classes=7, num_features=5, *, kind="full", again=False, **changes):
    """Arguments of the operator in float32, by name."""
    problem = make_problem(num_labeled, num_unlabeled, num_classes, num_features, kind=kind, dtype=torch.float32)
    arguments = {
        "labeled": problem.labeled_logits,
        "strong": problem.strong_logits,
        "weak": problem.weak_logits,
        "weight": problem.weight,
        "covariance": problem.covariance,
        "labels": problem.labels,
        "pseudo_labels": problem.pseudo_labels,
        "candidates": problem.candidates,
        "labeled_candidates": problem.labeled_candidates if again else None,
        "thresholds": problem.class_thresholds,
        "strength": 0.3,
        "ss_weight": 0.7,
        "beta": 1.2,
        "argmax_in_candidates": True,
        "need_logits": True,
        "need_weight": True,
    }
    return arguments | changes


def double(arguments):
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def upper_bound(arguments, form):
    with closed_form(form):
        served = native.serves(
            arguments["labels"].shape[0] + arguments["pseudo_labels"].shape[0],
            arguments["weight"],
            arguments["covariance"],
        )
        assert served == (form != "operators" and arguments["weight"].dtype == torch.float32)
        return dict(zip(NAMES, KERNELS["upper_bound"](*arguments.values(), "torch"), strict=True))


def assert_close(found, truth, classes, tolerance=4e-6):
    """Up to Gram matrices of classes without a sample, which the operators compute and the C function does not."""
    for name in NAMES:
        if name in ("gram", "product") and truth[name].numel():
            found[name], truth[name] = found[name][classes], truth[name][classes]
        assert found[name].shape == truth[name].shape, name
        error = (found[name].double() - truth[name].double()).abs()
        scale = truth[name].double().abs().amax().clamp(min=1) if truth[name].numel() else 1
        assert (error <= tolerance * scale).all(), name


def assert_agrees(arguments, version):
    classes = torch.cat([arguments["labels"], arguments["pseudo_labels"]]).unique()
    assert_close(upper_bound(arguments, version), upper_bound(double(arguments), "operators"), classes)


@contextlib.contextmanager
def counting(monkeypatch, calls):
    original = native.upper_bound
    with monkeypatch.context() as patch:
        patch.setattr(native, "upper_bound", lambda *args: calls.append(1) or original(*args))
        yield


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build it with")
def test_it_is_built_where_there_is_a_compiler():
    assert native.VERSIONS[:1] == ("baseline",)


@pytest.mark.skipif(not VERSIONS, reason="not built")
class TestService:
    def calls(self, monkeypatch, shape, dtype):
        calls = []
        problem = make_problem(*shape, dtype=dtype).leaves()
        with counting(monkeypatch, calls):
            problem.loss(impl="auto").total.backward()
        return len(calls)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_small_steps_take_it(self, dtype, monkeypatch):
        assert self.calls(monkeypatch, (64, 256, 10, 84), dtype) == 1

    def test_few_samples_do_not(self, monkeypatch):
        """Each class has its Gram matrix at its own place in the result, which then has more than samples need."""
        assert self.calls(monkeypatch, (3, 4, 7, 5), torch.float32) == 1
        assert self.calls(monkeypatch, (3, 3, 7, 5), torch.float32) == 0

    def test_float64_does_not(self, monkeypatch):
        assert self.calls(monkeypatch, (6, 9, 7, 5), torch.float64) == 0

    def test_many_classes_do_not(self, monkeypatch):
        assert self.calls(monkeypatch, (16, 16, native.MOST_CLASSES, 5), torch.float32) == 1
        assert self.calls(monkeypatch, (16, 16, native.MOST_CLASSES + 1, 5), torch.float32) == 0

    def test_large_batches_do_not(self):
        weight, covariance = torch.empty(4, 5), torch.empty(4, 5, 5)
        assert native.serves(native.MOST_PAIRS // 32, weight, covariance)
        assert not native.serves(native.MOST_PAIRS // 32 + 1, weight, covariance)

    def test_many_features_do_not(self):
        width = math.isqrt(native.MOST_PRODUCTS // 16) + 1
        weight, covariance = torch.empty(4, width), torch.empty(4, 1, 1).expand(4, width, width)
        assert not native.serves(9, weight, covariance)
        assert native.serves(9, weight[:, :-9], covariance[:, :-9, :-9])
        assert native.serves(9, weight, covariance[:, 0])

    def test_other_devices_do_not(self):
        assert not native.serves(9, torch.empty(4, 5, device="meta"), torch.empty(4, 5, device="meta"))

    def test_without_it_the_operators_serve(self, monkeypatch):
        calls = []
        problem = make_problem(6, 9, dtype=torch.float32)
        with closed_form("operators"), counting(monkeypatch, calls):
            without = problem.loss(impl="auto").total
        assert not calls
        torch.testing.assert_close(without, problem.loss(impl="auto").total)


@pytest.mark.parametrize("version", VERSIONS)
class TestStep:
    # below, at and above the number of lanes of every version, in one class and spread over several
    @pytest.mark.parametrize("count", [4, 5, 7, 8, 9, 15, 16, 17, 33])
    @pytest.mark.parametrize("num_classes", [2, 7])
    def test_blocks_of_any_size_agree(self, num_classes, count, version):
        assert_agrees(step(count, count, num_classes, again=True), version)
        one_class = {name: torch.zeros(count, dtype=torch.int64) for name in ("labels", "pseudo_labels")}
        assert_agrees(step(count, count, num_classes, **one_class), version)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("again", [False, True])
    # classes and features around the lanes of a vector and the columns of a product
    @pytest.mark.parametrize("num_features", [1, 4, 7, 8, 13, 84])
    @pytest.mark.parametrize("num_classes", [2, 4, 8, 10, 17, 24])
    def test_shapes_agree(self, num_classes, num_features, again, kind, version):
        assert_agrees(step(13, 20, num_classes, num_features, kind=kind, again=again), version)

    @pytest.mark.parametrize("sizes", [(0, 9), (9, 0)], ids=str)
    @pytest.mark.parametrize("again", [False, True])
    def test_empty_batches_agree(self, sizes, again, version):
        assert_agrees(step(*sizes, again=again), version)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("need_weight", [False, True])
    @pytest.mark.parametrize("need_logits", [False, True])
    def test_unneeded_gradients_are_empty_and_change_nothing(self, need_logits, need_weight, kind, version):
        everything = upper_bound(step(kind=kind), version)
        found = upper_bound(step(kind=kind, need_logits=need_logits, need_weight=need_weight), version)
        needed = {"grad_rows": need_logits, "grad_weight": need_weight, "product": need_weight}
        for name in NAMES:
            if needed.get(name, True):
                assert torch.equal(found[name], everything[name]), name
            else:
                assert found[name].numel() == 0

    @pytest.mark.parametrize("strength", [40.0, 1e4])
    def test_interactions_beyond_the_exponent_range_agree(self, strength, version):
        """The direct form: λG of the first reaches past half of float32's exponents, of the second past all."""
        arguments = step(strength=strength)
        found, truth = upper_bound(arguments, version), upper_bound(double(arguments), "operators")
        assert strength * truth["gram"].abs().max() > 60
        # an exponent is rounded by its size in epsilon, and moves odds and shares by as much
        size = float(strength * truth["gram"].abs().max())
        for name in ("odds", "grad_odds", "grad_rows"):
            assert (found[name] - truth[name]).abs().max() <= 2 * size * 1.2e-7 * truth[name].abs().max().clamp(min=1)

    def test_covariances_that_are_none_do_not_overflow_unseen(self, version):
        """Not positive semi-definite: interactions of 150 either way, yet the diagonals of all Gram matrices are 0."""
        covariance = torch.zeros(4, 2, 2)
        covariance[:, 0, 1] = covariance[:, 1, 0] = 150.0
        weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        arguments = step(3, 4, 4, 2, strength=1.0, covariance=covariance, weight=weight)
        found, truth = upper_bound(arguments, version)["odds"], upper_bound(double(arguments), "operators")["odds"]
        assert truth.abs().max() > 140
        assert (found - truth).abs().max() < 1e-6 * truth.abs().max()

    def test_gradients_of_the_weight_move_no_mean(self, version):
        """The loss sees differences of rows only."""
        found = upper_bound(step(20, 30), version)["grad_weight"]
        assert found.abs().max() > 1e-3
        assert found.sum(0).abs().max() < 1e-6

    def test_classes_without_a_sample_are_left_out(self, version):
        found = upper_bound(step(labels=torch.ones(6).long(), pseudo_labels=torch.ones(9).long()), version)
        for name in ("gram", "product"):
            assert found[name][1].any()
            assert not found[name][[0, 2, 3, 4, 5, 6]].any()

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_element_is_written_and_none_beyond(self, kind, version, monkeypatch):
        """Outputs are cut from poisoned memory with a margin of poison on either side."""
        arenas = []

        def poisoned(like, *size):
            size = size[0] if isinstance(size[0], tuple) else size
            arena = torch.full((math.prod(size) + 128,), math.nan if like.is_floating_point() else 77).to(like.dtype)
            arenas.append(arena)
            return arena[64 : 64 + math.prod(size)].view(size)

        arguments = step(5, 11, 7, 13, kind=kind, again=True, labels=torch.tensor([0, 1, 1, 3, 5]))
        expected = upper_bound(arguments, version)
        monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
        found = upper_bound(arguments, version)
        monkeypatch.undo()
        assert len(arenas) == len(NAMES)
        for arena in arenas:
            for margin in (arena[:64], arena[-64:]):
                assert margin.isnan().all() if arena.is_floating_point() else (margin == margin[0]).all()
        for name in NAMES:
            assert torch.equal(found[name], expected[name]), name

    def test_same_bits_in_any_order_of_instances(self, version):
        """A row's results depend on no other row, wherever in a block it comes to lie."""
        arguments = step(0, 20)
        order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
        names = ("strong", "weak", "pseudo_labels", "candidates")
        moved = arguments | {name: arguments[name][order] for name in names}
        found, expected = upper_bound(moved, version), upper_bound(arguments, version)
        for name in ("odds", "grad_odds", "grad_rows"):
            again = torch.cat([rows[order] for rows in expected[name].split(20)])
            assert torch.equal(found[name], again), name
        for name in ("confidence", "prediction", "mask"):
            assert torch.equal(found[name], expected[name][order]), name

    @pytest.mark.parametrize("name", ["labeled", "strong", "weak"])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_logits_that_are_not_finite_show_in_the_loss(self, value, name, version):
        # every instance takes part, and some class is outside its candidates
        changes = {"thresholds": torch.zeros(7), "argmax_in_candidates": False}
        arguments = step(candidates=torch.ones(9, 7, dtype=torch.bool).tril(5), **changes)
        arguments[name] = arguments[name].clone()
        arguments[name][2] = value
        assert not upper_bound(arguments, version)["values"][0].isfinite()

    @pytest.mark.parametrize("name", ["labels", "pseudo_labels"])
    @pytest.mark.parametrize("value", [7, -1, 2**40])
    def test_numbers_out_of_range_are_refused(self, name, value, version):
        arguments = step()
        arguments[name] = arguments[name].clone()
        arguments[name][3] = value
        with pytest.raises(IndexError, match=r"labels and pseudo_labels must lie in \[0, 7\)"):
            upper_bound(arguments, version)

    def test_tails_keep_their_relative_accuracy(self, version):
        """Slopes far down the sigmoid, and pseudo-targets whose probabilities are far down the normal distribution."""
        spread = torch.linspace(0.5, 9, 40)
        arguments = step(0, 40, 3, strength=0.0, thresholds=torch.zeros(3), argmax_in_candidates=False)
        arguments["weak"] = torch.stack([torch.zeros(40), -spread, -1.05 * spread - 0.3], 1)
        arguments["strong"] = torch.stack([torch.zeros(40), 9 * spread, -9 * spread], 1)
        arguments["candidates"] = torch.tensor([[False, True, True]]).repeat(40, 1)
        found = upper_bound(arguments, version)["grad_odds"].double()
        truth = upper_bound(double(arguments), "operators")["grad_odds"]
        tails = truth.abs() > torch.finfo(torch.float32).tiny
        assert truth[tails].abs().min() < 1e-30
        # the condition of a tail is its exponent, here at most 81 + 58: rounding the logits alone moves it that much
        assert ((found - truth).abs()[tails] <= 140 * 1.2e-7 * truth[tails].abs()).all()
        assert (found[~tails].abs() < 2 * torch.finfo(torch.float32).tiny).all()


@pytest.mark.skipif(not VERSIONS, reason="not built")
class TestClassActivationLabels:
    def test_agree_with_the_reference(self):
        problem = make_problem(1, 200, 9, 5, dtype=torch.float32)
        found = native.class_activation_labels(problem.weak_logits, problem.candidates)
        assert torch.equal(found, reference.class_activation_labels(problem.weak_logits, problem.candidates))

    def test_the_first_of_equals_is_taken(self):
        logits, candidates = torch.zeros(1, 4), torch.tensor([[False, True, True, True]])
        assert native.class_activation_labels(logits, candidates).tolist() == [1]

    def test_are_candidates_whatever_the_logits(self):
        logits = torch.tensor([[math.nan, math.nan, 5.0], [-math.inf, 1.0, 2.0], [math.inf, 0.0, math.nan]])
        candidates = torch.tensor([[False, True, False], [True, False, False], [False, True, True]])
        found = native.class_activation_labels(logits, candidates)
        assert candidates.gather(1, found[:, None]).all()

    def test_are_taken_by_the_public_function(self, monkeypatch):
        problem = make_problem(1, 9, dtype=torch.float32)
        calls, original = [], native.class_activation_labels
        monkeypatch.setattr(native, "class_activation_labels", lambda *args: calls.append(1) or original(*args))
        plsp_kernels.class_activation_labels(problem.weak_logits, problem.candidates)
        plsp_kernels.class_activation_labels(problem.weak_logits.double(), problem.candidates)
        assert len(calls) == 1


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
class TestCovarianceUpdate:
    """What the tests of SemanticCovariance, which run for every version, do not ask."""

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

    def test_autograd_knows_that_they_were_written(self, kind, version):
        state = plsp_kernels.SemanticCovariance(3, 4, kind)
        scale = torch.ones_like(state.covariance, requires_grad=True)
        product = (scale * state.covariance).sum()
        with closed_form(version):
            state.update(torch.ones(2, 4), torch.tensor([0, 1]))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()

    def test_inference_mode_may_make_and_update_them(self, kind, version):
        with torch.inference_mode(), closed_form(version):
            state = plsp_kernels.SemanticCovariance(3, 4, kind)
            state.update(torch.ones(2, 4), torch.tensor([0, 1]))
        assert state.count.tolist() == [1, 1, 0]

    def test_labels_out_of_range_are_refused_before_anything_is_written(self, kind, version):
        state = plsp_kernels.SemanticCovariance(3, 4, kind)
        with closed_form(version), pytest.raises(IndexError, match=r"labels must lie in \[0, 3\)"):
            native.covariance_update(*state.buffers(), torch.ones(2, 4), torch.tensor([0, 3]))
        assert not any(buffer.any() for buffer in state.buffers())

    def test_one_bad_sample_spoils_its_class_alone(self, kind, version):
        state = plsp_kernels.SemanticCovariance(3, 4, kind)
        features = torch.ones(4, 4)
        features[1] = math.nan
        with closed_form(version):
            state.update(features, torch.tensor([0, 1, 2, 2]))
        assert not state.mean[1].isfinite().any()
        assert state.mean[[0, 2]].isfinite().all()
        assert state.covariance[[0, 2]].isfinite().all()

    def test_statistics_that_are_not_dense_are_left_to_the_operators(self, kind, version):
        shape = (3, 4, 4) if kind == "full" else (3, 4)
        spread = [torch.zeros(*shape, 2)[..., 0], torch.zeros(3, 4, 2)[..., 0], torch.zeros(6, dtype=torch.int64)[::2]]
        dense = [tensor.clone(memory_format=torch.contiguous_format) for tensor in spread]
        batch = torch.arange(20.0).view(5, 4), torch.tensor([0, 1, 1, 2, 0])
        with closed_form(version):
            assert not native.serves_update(*spread, batch[0])
            for state in (spread, dense):
                torch_impl_module("covariance_update").covariance_update(*state, *batch)
        for found, expected in zip(spread, dense, strict=True):
            assert_same(found, expected, 2e-6)

    def test_large_updates_are_left_to_the_operators(self, kind, version):
        state = plsp_kernels.SemanticCovariance(2, 512, kind)
        with closed_form(version):
            assert native.serves_update(*state.buffers(), torch.empty(8, 512))
            assert native.serves_update(*state.buffers(), torch.empty(9, 512)) == (kind == "diagonal")
