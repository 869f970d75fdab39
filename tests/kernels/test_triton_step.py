"""The whole step of the loss in Triton kernels against `torch_impl`, on a GPU or in Triton's interpreter.

Shapes are odd on purpose, as in `test_triton.py`. Chunks of slots are forced by a small memory budget. All allocations
are poisoned, and so are the margins around them.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.5")

from triton_cases import (
    DEVICE,
    LOW_DTYPES,
    POISONED,
    SMALLEST_TILING,
    assert_as_accurate,
    assert_same,
    assert_same_bits,
    fenced,
    guarded,
    scattered,
)

from cases import KINDS, make_problem
from plsp_kernels import torch_impl, triton_impl
from plsp_kernels.step import Step, StepResult, replace
from plsp_kernels.triton_impl import preparation, scalars, tiles

# (Bl, Bu, l, d): more samples than classes and fewer, one tile and several
SHAPES = [(1, 3, 2, 1), (3, 5, 7, 19), (2, 3, 41, 33), (1, 1, 130, 5)]
FLOATS = ("labeled_logits", "weak_logits", "strong_logits", "weight", "covariance")
LOGITS = FLOATS[:3]

pytestmark = POISONED


def number(value: float) -> Tensor:
    """A Python number as operators receive it."""
    return torch.tensor(value, dtype=torch.float64)


def make_step(
    num_labeled: int = 3,
    num_unlabeled: int = 5,
    num_classes: int = 7,
    num_features: int = 19,
    kind: str = "full",
    again: bool = False,
) -> Step:
    """A step in float64 whose logits, weight and covariance are exact in bfloat16."""
    problem = make_problem(num_labeled, num_unlabeled, num_classes, num_features, kind=kind)
    problem = problem.map(lambda tensor: tensor.bfloat16().double().to(DEVICE))
    return Step(
        *(getattr(problem, name) for name in FLOATS),
        problem.labels.to(DEVICE),
        problem.candidates.to(DEVICE),
        None,
        problem.labeled_candidates.to(DEVICE) if again else None,
        thresholds=number(0.1),
        strength=number(0.7),
        ss_weight=number(0.6),
        beta=math.pi**2 / 8,
        argmax_in_candidates=False,
    )


def mapped(step: Step, function: Callable[[Tensor], Tensor], names: tuple[str, ...] = FLOATS) -> Step:
    return replace(step, **{name: function(getattr(step, name)) for name in names})


def run(step: Step, upstream: Tensor | None = None, impl: Any = triton_impl) -> StepResult:
    return impl.upper_bound(step, upstream, True, True)


def moved(step: Step) -> Step:
    """The same step with poison around every tensor."""
    sets = ("candidates",) if step.labeled_candidates is None else ("candidates", "labeled_candidates")
    step = mapped(step, fenced, (*FLOATS, *sets))
    return mapped(step, guarded, ("labels",))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that fits no more than one slot at a time."""
    monkeypatch.setattr(tiles, "CHUNK_BYTES", 1)


# Accuracy


@pytest.mark.parametrize(("kind", "again"), [("full", True), ("diagonal", False)])
@pytest.mark.parametrize("shape", SHAPES)
def test_step_equals_the_closed_form_in_float64(shape: tuple[int, ...], kind: str, again: bool) -> None:
    step = make_step(*shape, kind=kind, again=again)
    expected = run(step, impl=torch_impl)
    assert_same(run(moved(step)), expected, 1e-11)
    assert expected.mask.any()  # the consistency term is active


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 5, 7, 19), (1, 1, 130, 5)])
def test_chunks_of_slots_give_the_same_results(shape: tuple[int, ...], kind: str) -> None:
    step = make_step(*shape, kind=kind, again=True)
    assert_same(run(moved(step)), run(step, impl=torch_impl), 1e-11)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_step_is_as_accurate_as_plain_float32(dtype: torch.dtype) -> None:
    step = make_step(2, 3, 41, 33, again=True)
    low = mapped(step, lambda tensor: tensor.to(dtype))
    plain = mapped(step, lambda tensor: tensor.to(torch.float32))
    assert_as_accurate(run(low), run(plain, impl=torch_impl), run(step, impl=torch_impl))


@pytest.mark.parametrize("widest", [torch.float32, torch.float64])
def test_each_tensor_may_have_a_dtype_of_its_own(widest: torch.dtype) -> None:
    step = make_step()
    dtypes = torch.float16, torch.bfloat16, widest, torch.bfloat16, torch.float16
    tensors = {name: getattr(step, name).to(dtype) for name, dtype in zip(FLOATS, dtypes, strict=True)}
    wide = mapped(step, lambda tensor: tensor.to(widest))
    # Kernels read Σ as it is, and elements of 16 bits enter the matrix instructions in another order: one rounding.
    assert_same(run(replace(step, **tensors)), run(wide), torch.finfo(widest).eps)


def test_step_in_float64_with_half_precision_covariance_is_exact() -> None:
    for kind in KINDS:
        step = make_step(kind=kind)
        half = mapped(step, lambda tensor: tensor.to(torch.bfloat16), ("covariance",))
        assert_same(run(half), run(step, impl=torch_impl), 1e-11)


# Gradients


@pytest.mark.parametrize("weights", [(0.3, -2.0, 5.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
def test_gradients_are_those_of_the_weighted_terms(weights: tuple[float, ...]) -> None:
    step, upstream = make_step(again=True), torch.tensor(weights, dtype=torch.float64, device=DEVICE)
    assert_same(run(step, guarded(upstream)), run(step, upstream, torch_impl), 1e-11)


def test_upstream_gradients_may_be_strided_or_expanded() -> None:
    step, weights = make_step(), torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64, device=DEVICE)
    assert_same_bits(run(step, scattered(weights)), run(step, weights))
    assert_same_bits(run(step, weights[1].expand(3)), run(step, torch.full_like(weights, 3.0)))


@pytest.mark.parametrize("need_logits", [False, True])
@pytest.mark.parametrize("need_weight", [False, True])
def test_unneeded_gradients_are_empty_and_the_rest_unchanged(need_logits: bool, need_weight: bool) -> None:
    step = make_step(again=True)
    both, result = run(step), triton_impl.upper_bound(step, None, need_logits, need_weight)
    wanted = both._replace(
        grad_logits=both.grad_logits if need_logits else both.grad_logits.new_empty(0),
        grad_weight=both.grad_weight if need_weight else both.grad_weight.new_empty(0),
    )
    assert_same_bits(result, wanted)


# Inputs


def test_given_pseudo_labels_are_used() -> None:
    step = make_step()
    pseudo_labels = run(step).pseudo_labels
    given = replace(step, pseudo_labels=guarded((pseudo_labels + 1) % 7))
    result = run(given)
    assert result.pseudo_labels.shape == (0,)
    assert_same(result, run(given, impl=torch_impl), 1e-11)
    repeated = run(replace(step, pseudo_labels=pseudo_labels))
    assert_same_bits(repeated._replace(pseudo_labels=pseudo_labels), run(step))


def test_scattered_inputs_give_the_same_bits() -> None:
    step = replace(make_step(again=True), thresholds=torch.linspace(0.1, 0.4, 7, dtype=torch.float64, device=DEVICE))
    names = (*FLOATS, "labels", "candidates", "labeled_candidates", "thresholds")
    assert_same_bits(run(mapped(step, scattered, names)), run(step))


@pytest.mark.parametrize(("num_labeled", "num_unlabeled"), [(0, 4), (2, 0), (0, 0)])
@pytest.mark.parametrize("again", [False, True])
def test_empty_batches_contribute_zero(num_labeled: int, num_unlabeled: int, again: bool) -> None:
    step = make_step(num_labeled, num_unlabeled, again=again)
    result = run(step)
    assert_same(result, run(step, impl=torch_impl), 1e-11)
    assert num_labeled or result.terms[0] == 0
    assert num_unlabeled or result.terms[1] == 0


@pytest.mark.parametrize("argmax_in_candidates", [False, True])
def test_thresholds_may_differ_between_classes(argmax_in_candidates: bool) -> None:
    step = make_step(1, 6)._replace(argmax_in_candidates=argmax_in_candidates)
    confidence, prediction = run(step)[5:7]
    thresholds = torch.full((7,), 0.5, dtype=torch.float64, device=DEVICE)
    thresholds[prediction[0]] = confidence[0]  # the threshold itself is confident enough
    thresholds[prediction[1]] = float(confidence[1]) + 1e-9
    step = replace(step, thresholds=guarded(thresholds))
    result = run(step)
    assert_same(result, run(step, impl=torch_impl), 1e-11)
    assert 0 < result.mask.sum() < 6


@pytest.mark.parametrize("block", [16, 64])
def test_prediction_ties_go_to_the_lowest_class(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = {"BLOCK_L": block, "num_warps": 1, "num_stages": 1}
    monkeypatch.setattr(tiles, "row_blocks", lambda num_classes: blocks)  # ties within a tile and across tiles
    step = make_step(2, 4, 41)
    weak = torch.full_like(step.weak_logits, -1e4)  # probabilities of exactly zero: sums do not depend on their order
    weak[:, [3, 4, 20]] = 1.0
    step = replace(step, weak_logits=weak, covariance=torch.zeros_like(step.covariance))
    assert run(step).prediction.tolist() == [3] * 4


def test_targets_fall_back_to_the_candidate_softmax_on_underflow() -> None:
    step = make_step(2, 4)
    weak, candidates = torch.full_like(step.weak_logits, 100.0), torch.zeros_like(step.candidates)
    weak[:, :2] = torch.tensor([0.5, -0.5], dtype=torch.float64)
    candidates[:, :2] = True
    step = replace(step, weak_logits=weak, candidates=candidates, thresholds=number(0.0))
    result = run(step)
    assert result.mask.all()
    assert_same(result, run(step, impl=torch_impl), 1e-11)


# Numbers on the device


@pytest.fixture
def numbers_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read 0-d tensors themselves, as they do if these are on a GPU."""
    monkeypatch.setattr(scalars, "host_number", lambda tensor: tensor.to(DEVICE))


@pytest.mark.usefixtures("numbers_on_device")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kernels_read_numbers_from_the_device(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("strength", "ss_weight", "thresholds")
    step = mapped(make_step(again=True), lambda tensor: guarded(tensor.to(dtype)), names)
    on_device = run(step)
    monkeypatch.undo()
    assert_same_bits(on_device, run(mapped(step, Tensor.double, names)))


@pytest.mark.usefixtures("numbers_on_device")
def test_the_same_call_follows_numbers_that_change_on_the_device() -> None:
    step = make_step()
    names = ("strength", "ss_weight", "thresholds")
    step = mapped(step, lambda tensor: tensor.clone().to(DEVICE), names)

    def replay() -> StepResult:  # what a captured graph does: the same pointers, whatever they hold
        return run(step)

    before = replay()
    step.strength.fill_(0.2)
    step.ss_weight.fill_(0.9)
    step.thresholds.fill_(0.99)
    after = replay()
    expected = replace(step, strength=number(0.2), ss_weight=number(0.9), thresholds=number(0.99))
    assert_same(after, run(expected, impl=torch_impl), 1e-11)
    assert after.mask.sum() < before.mask.sum()


# Safety


@pytest.mark.parametrize("chunked", [False, True])
def test_classes_out_of_range_make_the_loss_nan_and_leave_other_rows_alone(
    chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunked:
        monkeypatch.setattr(tiles, "CHUNK_BYTES", 1)
    good = make_step(again=True)
    good = moved(replace(good, pseudo_labels=run(good).pseudo_labels))
    labels, pseudo_labels = good.labels.clone(), good.pseudo_labels.clone()
    labels[0], labels[2], pseudo_labels[1], pseudo_labels[3] = -1, 7, 2**40, -(2**40)
    found, expected = run(replace(good, labels=guarded(labels), pseudo_labels=guarded(pseudo_labels))), run(good)
    lost = [0, 2, 3 + 1, 3 + 3, 8 + 1, 8 + 3]
    others = [row for row in range(13) if row not in lost]
    assert found.total.isnan()
    assert found.terms.isnan().all()
    assert found.grad_logits[lost].isnan().all()
    assert_same_bits(found.grad_logits[others], expected.grad_logits[others])
    assert found.grad_weight.isfinite().all()
    assert found.confidence[[1, 3]].isnan().all()
    assert not found.mask[[1, 3]].any()
    assert found.prediction[[1, 3]].tolist() == [0, 0]
    for ours, theirs in zip(found[5:], expected[5:], strict=True):
        assert_same_bits(ours[[0, 2, 4]], theirs[[0, 2, 4]])


@pytest.mark.parametrize("which", ["labels", "pseudo_labels"])
def test_only_terms_of_samples_without_class_are_nan(which: str) -> None:
    step = make_step()
    step = replace(step, pseudo_labels=run(step).pseudo_labels)
    wrong = mapped(step, lambda classes: classes.clone().index_fill_(0, torch.tensor([1], device=DEVICE), -1), (which,))
    assert run(wrong).terms.isnan().tolist() == ([True, False, False] if which == "labels" else [False, True, True])


def test_batch_without_any_class_has_loss_nan_and_zero_weight_gradient() -> None:
    step = make_step()
    none = torch.full((5,), -1, device=DEVICE)
    result = run(replace(step, labels=none[:3], pseudo_labels=none))
    assert result.total.isnan()
    assert result.grad_logits.isnan().all()
    assert not result.grad_weight.any()


@pytest.mark.parametrize("name", LOGITS)
def test_excluded_classes_have_finite_gradients(name: str) -> None:
    step = make_step(3, 5, again=True)
    logits = getattr(step, name).clone()
    logits[:, 4:] = -math.inf
    logits[1, 1:] = -math.inf  # a single class is left
    result = run(replace(step, **{name: logits}))
    assert result.grad_logits.isfinite().all()
    assert result.grad_weight.isfinite().all()
    assert result.confidence.isfinite().all()


def test_excluded_candidates_share_the_pseudo_target() -> None:
    step = make_step(2, 4)
    weak = step.weak_logits.clone()
    weak[step.candidates] = -math.inf
    result = run(replace(step, weak_logits=weak, thresholds=number(0.0)))
    assert result.grad_logits.isfinite().all()


def test_nan_logits_predict_a_class_in_range() -> None:
    step = make_step()
    weak = step.weak_logits.clone()
    weak[0, 3:] = math.nan
    weak[1] = math.nan
    prediction = run(replace(step, weak_logits=weak)).prediction
    assert ((prediction >= 0) & (prediction < 7)).all()


@pytest.mark.parametrize("num_classes", [2, 41])
def test_extreme_logits_give_finite_losses_and_gradients_in_float32(num_classes: int) -> None:
    step = mapped(make_step(2, 4, num_classes, again=True), Tensor.float)
    step = mapped(step, lambda logits: torch.where(logits > 0, 1e4, -1e4) + logits, LOGITS)
    step = replace(step, covariance=step.covariance * 100, strength=number(1.0))
    result = run(step)
    for tensor in (result.total, result.terms, result.grad_logits, result.grad_weight, result.confidence):
        assert tensor.isfinite().all()


# Preparation


@pytest.mark.parametrize("counts", [(0, 1), (3, 5), (70, 90), (1, 200)])
@pytest.mark.parametrize("num_classes", [2, 41, 130])
def test_samples_are_grouped_by_class(counts: tuple[int, int], num_classes: int) -> None:
    generator = torch.Generator().manual_seed(num_classes)
    labels, pseudo_labels = (
        torch.randint(-2, num_classes + 2, (count,), generator=generator).to(DEVICE) for count in counts
    )
    step = make_step(num_classes=num_classes, num_features=5)._replace(labels=guarded(labels))
    groups, classes, used, _ = preparation.prepare(step, guarded(pseudo_labels))
    samples = torch.cat([labels, pseudo_labels])
    lost = (samples < 0) | (samples >= num_classes)
    distinct, slots, sizes = samples[~lost].unique(return_inverse=True, return_counts=True)
    num_slots = min(len(samples), num_classes)
    assert int(used) == len(distinct)
    assert classes.tolist() == distinct.tolist() + [-1] * (num_slots - len(distinct))
    assert groups.slots[~lost].tolist() == slots.tolist()
    assert (groups.slots[lost] == -1).all()
    assert groups.order.tolist() == samples.where(~lost, num_classes).sort(stable=True).indices.tolist()
    ends = sizes.cumsum(0).tolist()
    assert groups.bounds.tolist() == [0, *ends] + [(ends or [0])[-1]] * (num_slots - len(distinct))


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_weight_is_centred_in_the_compute_dtype(dtype: torch.dtype) -> None:
    step = mapped(make_step(num_classes=41, num_features=33), lambda tensor: fenced(tensor.to(dtype)))
    centred = preparation.prepare(step, step.labels).centred
    assert centred.dtype == torch.float32
    weight = step.weight.double()
    assert_same(centred.double(), weight - weight.mean(0), 1e-6)


# Launching


def test_results_do_not_depend_on_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """At these sizes one tile usually suffices; the smallest tiles make every loop run several times."""
    step = make_step(1, 2, 19, 17, again=True)
    warps = {"num_warps": 1, "num_stages": 1}
    monkeypatch.setattr(tiles, "row_blocks", lambda num_classes: {"BLOCK_L": 16, **warps})
    monkeypatch.setattr(tiles, "sum_blocks", lambda: {"BLOCK_N": 2, **warps})
    monkeypatch.setattr(tiles, "pair_blocks", lambda num_classes, dtype: {"BLOCK_J": 8, "BLOCK_K": 8, **warps})
    monkeypatch.setattr(tiles, "pulled_blocks", lambda num_classes: {"BLOCK_J": 8, "BLOCK_K": 16, **warps})
    monkeypatch.setattr(tiles, "gram_gradient_blocks", lambda num_classes: {"BLOCK_N": 1, "BLOCK_L": 16, **warps})
    smallest = {"BLOCK_N": 2, "BLOCK_L": 2, "BLOCK_D": 16, **warps}
    monkeypatch.setattr(tiles, "preparation_blocks", lambda num_classes: smallest)
    monkeypatch.setattr(tiles, "FUSED_GRAM_CLASSES", 0)
    monkeypatch.setattr(tiles, "matrix_tilings", lambda *_, **__: [SMALLEST_TILING])
    assert_same(run(step), run(step, impl=torch_impl), 1e-11)


@pytest.mark.parametrize("chunked", [False, True])
def test_repeated_calls_give_the_same_bits(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if chunked:
        monkeypatch.setattr(tiles, "CHUNK_BYTES", 1)
    step = mapped(make_step(again=True), Tensor.float)
    assert_same_bits(run(step), run(step))
