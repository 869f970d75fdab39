"""The Triton kernels of the semantic cross-entropy against the closed form, in poisoned memory."""

import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.5")

from triton_cases import (
    DEVICE,
    LOW_DTYPES,
    POISONED,
    assert_as_accurate,
    assert_same,
    assert_same_bits,
    fenced,
    guarded,
    scattered,
)

from cases import KINDS, STRENGTH, make_problem
from plsp_kernels import torch_impl, triton_impl
from plsp_kernels.batch import CrossEntropyResult, LabeledBatch
from plsp_kernels.triton_impl import tiles

pytestmark = POISONED

# (N, l, d): one and several tiles, more and fewer rows than classes
SHAPES = [(5, 2, 1), (11, 7, 19), (3, 41, 33)]


def make_batch(num_rows: int, num_classes: int, num_features: int, kind: str = "full", **changes: Any) -> LabeledBatch:
    """A batch in float64 whose floats are exact in every dtype; row 1 is ignored."""
    problem = make_problem(num_rows, 0, num_classes, num_features, kind=kind)
    problem = problem.map(lambda tensor: tensor.bfloat16().double().to(DEVICE))
    labels = problem.labels.clone()
    labels[1] = -100
    samples = problem.labeled_logits, problem.weight, problem.covariance, labels.to(DEVICE)
    batch = LabeledBatch(*samples, problem.class_thresholds, torch.tensor(STRENGTH), 0.1, -100, "none")
    return batch._replace(**changes)


def upstream_of(batch: LabeledBatch) -> Tensor:
    return torch.arange(batch.labels.shape[0], device=DEVICE, dtype=torch.float64) % 5 - 1.5


def moved(batch: LabeledBatch) -> LabeledBatch:
    """The same batch with poison around every tensor."""
    floats = {name: fenced(getattr(batch, name)) for name in ("logits", "weight", "covariance")}
    return batch._replace(**floats, labels=guarded(batch.labels), class_weight=guarded(batch.class_weight))


def cast(batch: LabeledBatch, dtype: torch.dtype) -> LabeledBatch:
    floats = {name: getattr(batch, name).to(dtype) for name in ("logits", "weight", "covariance")}
    weight = batch.class_weight
    return batch._replace(**floats, class_weight=None if weight is None else weight.to(dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_equal_the_closed_form_in_float64(kind: str, shape: tuple[int, int, int]) -> None:
    batch = make_batch(*shape, kind)
    expected = torch_impl.cross_entropy(batch, upstream_of(batch), True, True)
    assert_same(triton_impl.cross_entropy(moved(batch), guarded(upstream_of(batch)), True, True), expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("options", list(itertools.product((True, False), (0.0, 0.1), (-100, 2))), ids=str)
def test_options_equal_the_closed_form(options: tuple[bool, float, int], reduction: str) -> None:
    weighted, label_smoothing, ignore_index = options
    batch = make_batch(9, 7, 5, "diagonal", label_smoothing=label_smoothing, reduction=reduction)
    if not weighted:
        batch = batch._replace(class_weight=None)
    labels = batch.labels.clone()
    labels[labels < 0] = 2 if ignore_index == 2 else -100
    batch = batch._replace(labels=labels, ignore_index=ignore_index)
    batch.logits[1] = math.nan  # of an ignored row
    expected = torch_impl.cross_entropy(batch, None, True, True)
    assert_same(triton_impl.cross_entropy(batch, None, True, True), expected)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_as_accurate_as_plain_float32(kind: str, dtype: torch.dtype) -> None:
    exact = make_batch(5, 19, 33, kind)
    low, plain = cast(exact, dtype), cast(exact, torch.float32)
    results = triton_impl.cross_entropy(low, upstream_of(exact).float(), True, True)
    rival = torch_impl.cross_entropy(plain, upstream_of(exact).float(), True, True)
    truth = torch_impl.cross_entropy(exact, upstream_of(exact), True, True)
    for found in zip(results, rival, truth, strict=True):
        assert_as_accurate(*found)


def test_half_precision_weight_and_covariance_are_exact_with_logits_in_float64() -> None:
    exact = make_batch(5, 19, 33)
    mixed = exact._replace(weight=exact.weight.bfloat16(), covariance=exact.covariance.half())
    found, expected = (triton_impl.cross_entropy(batch, upstream_of(batch), True, True) for batch in (mixed, exact))
    assert_same(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_unneeded_gradients_are_empty_and_needed_ones_unchanged(kind: str) -> None:
    batch = make_batch(9, 7, 19, kind, reduction="mean")
    both = triton_impl.cross_entropy(batch, None, True, True)
    for need in itertools.product((True, False), repeat=2):
        found = triton_impl.cross_entropy(batch, None, *need)
        assert torch.equal(found.loss, both.loss)
        for gradient, needed, expected in zip(found[1:], need, both[1:], strict=True):
            assert torch.equal(gradient, expected) if needed else gradient.shape == (0,)


def test_products_that_do_not_fit_the_budget_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(9, 7, 19)
    saved = triton_impl.cross_entropy(batch, upstream_of(batch), True, True)
    monkeypatch.setattr(tiles, "CHUNK_BYTES", 0)
    assert_same(triton_impl.cross_entropy(batch, upstream_of(batch), True, True), saved)


@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_the_tiles(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warps = {"num_warps": 1, "num_stages": 1}
    monkeypatch.setattr(tiles, "row_blocks", lambda num_classes: {"BLOCK_L": 16, **warps})
    monkeypatch.setattr(tiles, "sum_blocks", lambda: {"BLOCK_N": 8, **warps})
    monkeypatch.setattr(tiles, "group_blocks", lambda num_classes: {"BLOCK_N": 8, "BLOCK_L": 16, **warps})
    monkeypatch.setattr(tiles, "column_gradient_blocks", lambda num_classes: {"BLOCK_N": 2, "BLOCK_L": 16, **warps})
    small = {"BLOCK_U": 2, "BLOCK_L": 16, "BLOCK_D": 8, **warps}
    monkeypatch.setattr(tiles, "diagonal_column_blocks", lambda num_classes: small)
    square = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, **warps}
    monkeypatch.setattr(tiles, "label_product_blocks", lambda num_classes, num_features, like: square)
    monkeypatch.setattr(tiles, "num_splits", lambda steps, num_tiles: 3)
    batch = make_batch(11, 19, 19, kind)
    expected = torch_impl.cross_entropy(batch, upstream_of(batch), True, True)
    assert_same(triton_impl.cross_entropy(batch, upstream_of(batch), True, True), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_non_contiguous_inputs_and_repeated_calls_give_the_same_bits(kind: str) -> None:
    batch = cast(make_batch(9, 7, 19, kind), torch.float32)
    strided = [scattered(value) if isinstance(value, Tensor) and value.dim() else value for value in batch]
    found, expected = (
        triton_impl.cross_entropy(given, upstream_of(batch).float(), True, True)
        for given in (LabeledBatch(*strided), batch)
    )
    assert_same_bits(found, expected)


def test_strength_on_the_device_gives_the_same_bits() -> None:
    batch = make_batch(9, 7, 19, reduction="mean", strength=torch.tensor(STRENGTH, dtype=torch.float64))
    number = triton_impl.cross_entropy(batch, None, True, True)
    on_device = batch._replace(strength=torch.tensor(STRENGTH, dtype=torch.float64, device=DEVICE))
    with mock.patch("plsp_kernels.triton_impl.scalars.host_number", lambda tensor: tensor):
        assert_same_bits(triton_impl.cross_entropy(on_device, None, True, True), number)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("label", [-1, 7, 2**40])
def test_rows_with_a_label_out_of_range_are_nan_and_others_unaffected(label: int, kind: str) -> None:
    batch = make_batch(9, 7, 5, kind)
    expected = make_batch(9, 7, 5, kind)
    batch.labels[3], expected.labels[3] = label, -100  # without the row
    found = triton_impl.cross_entropy(moved(batch), guarded(upstream_of(batch)), True, True)
    others = triton_impl.cross_entropy(expected, upstream_of(batch), True, True)
    assert found.loss[3].isnan()
    assert found.grad_logits[3].isnan().all()
    kept = torch.tensor([0, 1, 2, 4, 5, 6, 7, 8], device=DEVICE)
    assert_same_bits(
        (found.loss[kept], found.grad_logits[kept], found.grad_weight),
        (others.loss[kept], others.grad_logits[kept], others.grad_weight),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_excluded_classes_have_finite_gradients(kind: str) -> None:
    batch = make_batch(9, 19, 5, kind, class_weight=None, label_smoothing=0.0)
    batch.logits[:, ::2] = -math.inf
    batch.logits[3] = -math.inf
    batch.logits[3, batch.labels[3]] = 0.0  # no class is left besides the label
    batch.logits[4, batch.labels[4]] = -math.inf
    found = triton_impl.cross_entropy(batch, upstream_of(batch), True, True)
    assert found.loss[3] == 0
    assert found.loss[4] == math.inf
    assert found.grad_logits.isfinite().all()
    assert found.grad_weight.isfinite().all()


@pytest.mark.parametrize("scale", [1e4, 1e-4])
def test_extreme_logits_stay_exact(scale: float) -> None:
    batch = make_batch(5, 19, 5)
    batch = batch._replace(logits=scale * batch.logits)
    expected = torch_impl.cross_entropy(batch, upstream_of(batch), True, True)
    assert_same(triton_impl.cross_entropy(batch, upstream_of(batch), True, True), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_empty_batch_has_no_loss_and_zero_gradient(kind: str, reduction: str) -> None:
    batch = make_batch(2, 7, 5, kind, reduction=reduction)
    batch = batch._replace(logits=batch.logits[:0], labels=batch.labels[:0])
    found = triton_impl.cross_entropy(batch, None, True, True)
    assert_same(found, CrossEntropyResult(*(torch.zeros_like(value) for value in found)))
    assert found.grad_logits.shape == (0, 7)
    assert found.grad_weight.shape == (7, 5)
