"""The compiled step: when it serves, and what only C can get wrong. Its accuracy is tested wherever the loss is."""

import contextlib
import math
import shutil

import pytest
import torch

from cases import FORMS, SHAPES, closed_form, make_problem, torch_impl_module
from plsp_kernels import native
from plsp_kernels.slots import class_slots

VERSIONS = FORMS[1:]
NAMES = ("values", "odds", "grad_odds", "grad_rows", "grad_gram", "confidence", "prediction", "mask")


def step(num_labeled=6, num_unlabeled=9, num_classes=7, *, again=False, seed=0):
    """Arguments of upper_bound in float32, up to what is needed of the gradients."""
    problem = make_problem(num_labeled, num_unlabeled, num_classes, 5, dtype=torch.float32, seed=seed)
    classes, slots = class_slots(torch.cat([problem.labels, problem.pseudo_labels]), num_classes)
    gram, _ = torch_impl_module("class_gram").class_gram(problem.weight, problem.covariance, classes, False)
    blocks, block_slots = [problem.labeled_logits, problem.strong_logits, problem.weak_logits], [slots]
    block_slots.append(slots[num_labeled:])
    if again:
        blocks.append(problem.labeled_logits)
        block_slots.append(slots[:num_labeled])
    labeled_candidates = problem.labeled_candidates if again else None
    sets = problem.labels, problem.candidates, labeled_candidates
    return [torch.cat(blocks), gram, torch.cat(block_slots), *sets, problem.class_thresholds, 0.3, 0.7, 1.2, True]


def double(arguments):
    return [arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in arguments]


def upper_bound(arguments, form, need_rows=True, need_gram=True):
    with closed_form(form):
        found = torch_impl_module("upper_bound").upper_bound(*arguments, need_rows, need_gram)
    return dict(zip(NAMES, found, strict=True))


def assert_close(found, truth, tolerance=2e-6):
    for name in NAMES:
        error = (found[name].double() - truth[name].double()).abs()
        assert (error <= tolerance * truth[name].double().abs().amax().clamp(min=1)).all(), name


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

    def test_float64_does_not(self, monkeypatch):
        assert self.calls(monkeypatch, (6, 9, 7, 5), torch.float64) == 0

    def test_many_classes_do_not(self, monkeypatch):
        assert self.calls(monkeypatch, (6, 9, native.MOST_CLASSES, 5), torch.float32) == 1
        assert self.calls(monkeypatch, (6, 9, native.MOST_CLASSES + 1, 5), torch.float32) == 0

    def test_large_batches_do_not(self, monkeypatch):
        rows = torch.empty(native.MOST_PAIRS // 16 + 1, 4)
        assert native.serves(rows[:-1])
        assert not native.serves(rows)

    def test_other_devices_do_not(self):
        assert not native.serves(torch.empty(6, 4, device="meta"))

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
    @pytest.mark.parametrize("count", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33])
    @pytest.mark.parametrize("num_classes", [2, 7])
    def test_blocks_of_any_size_agree(self, num_classes, count, version):
        arguments = step(count, count, num_classes, again=True)
        for slots in (arguments[2], torch.zeros_like(arguments[2])):
            arguments[2] = slots
            assert_close(upper_bound(arguments, version), upper_bound(double(arguments), "operators"))

    @pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[2] <= native.MOST_CLASSES], ids=str)
    @pytest.mark.parametrize("again", [False, True])
    def test_shapes_agree(self, shape, again, version):
        arguments = step(*shape[:3], again=again)
        assert_close(upper_bound(arguments, version), upper_bound(double(arguments), "operators"))

    @pytest.mark.parametrize("need_gram", [False, True])
    @pytest.mark.parametrize("need_rows", [False, True])
    def test_unneeded_gradients_are_empty_and_change_nothing(self, need_rows, need_gram, version):
        everything = upper_bound(step(), version)
        found = upper_bound(step(), version, need_rows, need_gram)
        for name in NAMES:
            if {"grad_rows": need_rows, "grad_gram": need_gram}.get(name, True):
                assert torch.equal(found[name], everything[name]), name
            else:
                assert found[name].numel() == 0

    def test_gram_gradients_are_symmetric_with_rows_that_sum_to_zero(self, version):
        found = upper_bound(step(20, 30), version)["grad_gram"]
        assert torch.equal(found, found.mT)
        assert found.abs().max() > 1e-3
        assert found.sum(-1).abs().max() < 1e-6

    def test_unused_slots_have_no_gradient(self, version):
        arguments = step(2, 3)
        arguments[2] = torch.zeros_like(arguments[2])
        found = upper_bound(arguments, version)["grad_gram"]
        assert found[0].any()
        assert not found[1:].any()

    def test_every_element_is_written_and_none_beyond(self, version, monkeypatch):
        """Outputs are cut from poisoned memory with a margin of poison on either side."""
        arenas = []

        def poisoned(size, like, dtype):
            arena = torch.full((math.prod(size) + 128,), math.nan if dtype.is_floating_point else 77).to(dtype)
            arenas.append(arena)
            return arena[64:-64].view(size)

        arguments = step(5, 11, again=True)
        expected = upper_bound(arguments, version)
        monkeypatch.setattr(torch, "empty_like", lambda like: poisoned(like.shape, like, like.dtype))
        monkeypatch.setattr(torch.Tensor, "new_empty", lambda like, size: poisoned((size,), like, like.dtype))
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
        moved = list(arguments)
        moved[0] = torch.cat([rows[order] for rows in arguments[0].split(20)])
        moved[2] = torch.cat([slots[order] for slots in arguments[2].split(20)])
        moved[4] = arguments[4][order]
        found, expected = upper_bound(moved, version), upper_bound(arguments, version)
        for name in ("odds", "grad_odds", "grad_rows"):
            again = torch.cat([rows[order] for rows in expected[name].split(20)])
            assert torch.equal(found[name], again), name
        for name in ("confidence", "prediction", "mask"):
            assert torch.equal(found[name], expected[name][order]), name

    @pytest.mark.parametrize("row", [0, 6, 15], ids=["labelled", "strong", "weak"])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_logits_that_are_not_finite_show_in_the_loss(self, value, row, version):
        arguments = step()
        arguments[6] = torch.zeros(7)  # every instance takes part
        arguments[4] = torch.ones_like(arguments[4]).tril(5)  # some class is outside, whatever the prediction
        arguments[10] = False
        arguments[0][row] = value
        assert not upper_bound(arguments, version)["values"][0].isfinite()

    @pytest.mark.parametrize(("argument", "value"), [(2, 7), (2, -1), (3, 7), (3, -1), (2, 2**40)])
    def test_numbers_out_of_range_are_refused(self, argument, value, version):
        arguments = step()
        arguments[argument] = arguments[argument].clone()
        arguments[argument][3] = value
        with pytest.raises(IndexError, match=r"labels and pseudo_labels must lie in \[0, 7\)"):
            upper_bound(arguments, version)

    def test_tails_keep_their_relative_accuracy(self, version):
        """Slopes far down the sigmoid, and pseudo-targets whose probabilities are far down the normal distribution."""
        spread = torch.linspace(0.5, 9, 40)
        weak = torch.stack([torch.zeros(40), -spread, -1.05 * spread - 0.3], 1)
        strong = torch.stack([torch.zeros(40), 9 * spread, -9 * spread], 1)
        candidates = torch.tensor([[False, True, True]]).repeat(40, 1)
        none = torch.empty(0, dtype=torch.int64)
        slots = torch.zeros(80, dtype=torch.int64)
        arguments = [torch.cat([strong, weak]), torch.zeros(1, 3, 3), slots, none, candidates, None]
        arguments += [torch.zeros(3), 0.0, 1.0, 1.2, False]
        found = upper_bound(arguments, version)["grad_odds"].double()
        truth = upper_bound(double(arguments), "operators")["grad_odds"]
        tails = truth.abs() > torch.finfo(torch.float32).tiny
        assert truth[tails].abs().min() < 1e-30
        # the condition of a tail is its exponent, here at most 81 + 58: rounding the logits alone moves it that much
        assert ((found - truth).abs()[tails] <= 140 * 1.2e-7 * truth[tails].abs()).all()
        assert (found[~tails].abs() < 2 * torch.finfo(torch.float32).tiny).all()
