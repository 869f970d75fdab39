"""Launchers of single functions against `torch_impl`, on a GPU or, without one, in Triton's interpreter.

Shapes are odd on purpose: 2 and 7 classes fit in one tile, 41 leaves a ragged tile, 130 needs several tiles and the
unfused Gram kernels. Interpreted programs take a millisecond each, so batches are small. All allocations are poisoned:
an element that a kernel does not write is NaN, or an absurd integer, in every test of this file.
"""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", minversion="3.5")
import triton.language as tl  # noqa: E402
from triton_cases import (  # noqa: E402
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

from plsp_kernels import torch_impl, triton_impl  # noqa: E402
from plsp_kernels.rows import Rows  # noqa: E402
from plsp_kernels.triton_impl import tiles  # noqa: E402
from plsp_kernels.triton_impl.probit import normal_tail  # noqa: E402

STRENGTH, BETA = torch.tensor(0.7, dtype=torch.float64), math.pi**2 / 8
CLASS_COUNTS = (2, 7, 41, 130)
GRAM_SHAPES = ((2, 1), (7, 130), (41, 84), (90, 5), (130, 19))

pytestmark = POISONED


class Samples(NamedTuple):
    """Inputs of the class-pair functions, in float64."""

    logits: Tensor
    gram: Tensor
    slots: Tensor
    grad_log_odds: Tensor

    def to(self, dtype: torch.dtype) -> "Samples":
        """Logits in this dtype, the rest in the compute dtype."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return self._replace(
            logits=self.logits.to(dtype), gram=self.gram.to(wide), grad_log_odds=self.grad_log_odds.to(wide)
        )


def make_samples(num_classes: int, count: int = 5, num_slots: int = 3, seed: int = 0) -> Samples:
    """Samples that alternate between slots 1 and 2; slot 0 has none."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    factor = normal(num_slots, num_classes, 6) / 2
    grad_log_odds = normal(count, num_classes)
    grad_log_odds[1] = 0  # a row without gradient
    grad_log_odds[2, num_classes // 2 :] = 0
    return Samples(
        logits=(3 * normal(count, num_classes)).bfloat16().double().to(DEVICE),  # exact in every dtype
        gram=(factor @ factor.mT).to(DEVICE),
        slots=(1 + torch.arange(count) % 2).to(DEVICE),
        grad_log_odds=grad_log_odds.to(DEVICE),
    )


class Classifier(NamedTuple):
    """Inputs of the Gram matrices, in float64."""

    weight: Tensor
    covariance: Tensor
    classes: Tensor
    grad_gram: Tensor

    def to(self, dtype: torch.dtype) -> "Classifier":
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return Classifier(self.weight.to(dtype), self.covariance.to(dtype), self.classes, self.grad_gram.to(wide))


def make_classifier(num_classes: int, num_features: int, kind: str) -> Classifier:
    generator = torch.Generator().manual_seed(num_classes + num_features)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if kind == "full":
        factor = normal(num_classes, num_features, 4) / 2
        covariance = factor @ factor.mT
    else:
        covariance = normal(num_classes, num_features).square()
    classes = torch.tensor([num_classes - 1, 0, -1])
    grad_gram = normal(3, num_classes, num_classes)
    return Classifier(
        normal(num_classes, num_features).bfloat16().double().to(DEVICE),
        covariance.bfloat16().double().to(DEVICE),
        classes.to(DEVICE),
        (grad_gram + grad_gram.mT).to(DEVICE),
    )


# Class Gram matrices


def assert_same_gram(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Compare G and T of make_classifier; its last slot has no class: G is NaN and T zero."""
    assert_same((actual[0][:2], actual[1]), (expected[0][:2], expected[1]))
    assert actual[0][2].isnan().all()


@pytest.mark.parametrize("kind", ["full", "diagonal"])
@pytest.mark.parametrize("shape", GRAM_SHAPES)
def test_class_gram_and_its_gradient_equal_the_closed_form_in_float64(shape: tuple[int, int], kind: str) -> None:
    weight, covariance, classes, grad_gram = make_classifier(*shape, kind)
    expected = torch_impl.class_gram(weight, covariance, classes, True)
    assert_same_gram(triton_impl.class_gram(fenced(weight), fenced(covariance), guarded(classes), True), expected)
    grad_weight = triton_impl.class_gram_backward(
        guarded(grad_gram), fenced(weight), fenced(covariance), guarded(classes), guarded(expected[1])
    )
    assert_same(grad_weight, torch_impl.class_gram_backward(grad_gram, weight, covariance, classes, expected[1]))


@pytest.mark.parametrize("kind", ["full", "diagonal"])
@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_class_gram_and_its_gradient_are_as_accurate_as_plain_float32(dtype: torch.dtype, kind: str) -> None:
    case = make_classifier(41, 84, kind)
    weight, covariance, classes, grad_gram = case.to(dtype)
    truth = torch_impl.class_gram(case.weight, case.covariance, classes, True)
    plain = torch_impl.class_gram(weight.float(), covariance.float(), classes, True)
    actual = triton_impl.class_gram(weight, covariance, classes, True)
    assert_as_accurate(actual[0][:2], plain[0][:2], truth[0][:2])
    assert_as_accurate(actual[1], plain[1], truth[1])
    assert_as_accurate(
        triton_impl.class_gram_backward(grad_gram, weight, covariance, classes, plain[1]),
        torch_impl.class_gram_backward(grad_gram, weight.float(), covariance.float(), classes, plain[1]),
        torch_impl.class_gram_backward(case.grad_gram, case.weight, case.covariance, classes, truth[1]),
    )


@pytest.mark.parametrize("num_classes", [7, 130])
def test_product_is_empty_unless_saved(num_classes: int) -> None:
    weight, covariance, classes, _ = make_classifier(num_classes, 19, "full")
    gram, product = triton_impl.class_gram(weight, covariance, classes, False)
    assert product.shape == (0, num_classes, 19)
    assert torch.equal(gram[:2], triton_impl.class_gram(weight, covariance, classes, True)[0][:2])


@pytest.mark.parametrize("kind", ["full", "diagonal"])
@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_covariance_dtype_may_differ_from_weight(dtype: torch.dtype, kind: str) -> None:
    weight, covariance, classes, grad_gram = make_classifier(7, 19, kind)
    low = covariance.to(dtype)
    expected = torch_impl.class_gram(weight, low.double(), classes, True)
    assert_same_gram(triton_impl.class_gram(weight, low, classes, True), expected)
    grad_weight = triton_impl.class_gram_backward(grad_gram, weight, low, classes, expected[1])
    assert_same(grad_weight, torch_impl.class_gram_backward(grad_gram, weight, low.double(), classes, expected[1]))


@pytest.mark.parametrize("kind", ["full", "diagonal"])
@pytest.mark.parametrize("num_classes", [7, 130])
def test_slots_of_classes_out_of_range_read_no_covariance(num_classes: int, kind: str) -> None:
    weight, covariance, _, _ = make_classifier(num_classes, 19, kind)
    classes = torch.tensor([-1, -(2**40), num_classes, 2**40, 1], device=DEVICE)
    gram, product = triton_impl.class_gram(guarded(weight), guarded(covariance), classes, True)
    expected = torch_impl.class_gram(weight, covariance, classes[4:], True)
    assert_same((gram[4:], product[4:]), expected)
    assert gram[:4].isnan().all()
    assert not product[:4].any()
    grad_gram = torch.zeros_like(gram)
    grad_gram[4] = torch.eye(num_classes)
    actual = triton_impl.class_gram_backward(grad_gram, guarded(weight), guarded(covariance), classes, product)
    assert_same(actual, torch_impl.class_gram_backward(grad_gram[4:], weight, covariance, classes[4:], expected[1]))


@pytest.mark.parametrize("num_slots", [1, 3, 11])
def test_weight_gradient_does_not_depend_on_the_number_of_splits(
    num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(num_slots)
    weight, covariance, _, _ = make_classifier(7, 19, "full")
    classes = torch.randint(7, (num_slots,), generator=generator).to(DEVICE)
    half = torch.randn(num_slots, 7, 7, generator=generator, dtype=torch.float64).to(DEVICE)
    product = torch_impl.class_gram(weight, covariance, classes, True)[1]
    args = (half + half.mT, weight, covariance, classes, product)
    for splits in (1, 2, num_slots):
        monkeypatch.setattr(tiles, "num_splits", lambda steps, num_tiles, splits=splits: min(splits, steps))
        assert_same(triton_impl.class_gram_backward(*args), torch_impl.class_gram_backward(*args))


# Log-odds and probits


@pytest.mark.parametrize("num_classes", CLASS_COUNTS)
def test_log_odds_and_gradients_equal_the_closed_form_in_float64(num_classes: int) -> None:
    logits, gram, slots, grad_log_odds = make_samples(num_classes)
    log_odds = torch_impl.log_odds(Rows(logits, gram, slots, STRENGTH))
    assert_same(triton_impl.log_odds(Rows(fenced(logits), guarded(gram), guarded(slots), STRENGTH)), log_odds)
    gradients = triton_impl.log_odds_backward(
        Rows(fenced(logits), guarded(gram), guarded(slots), STRENGTH),
        fenced(log_odds),
        fenced(grad_log_odds),
        True,
        True,
    )
    assert_same(
        gradients,
        torch_impl.log_odds_backward(Rows(logits, gram, slots, STRENGTH), log_odds, grad_log_odds, True, True),
    )


@pytest.mark.parametrize("num_classes", CLASS_COUNTS)
def test_probit_probabilities_equal_the_closed_form_in_float64(num_classes: int) -> None:
    logits, gram, slots, _ = make_samples(num_classes)
    actual = triton_impl.probit_probabilities(Rows(fenced(logits), guarded(gram), guarded(slots), STRENGTH), BETA)
    expected = torch_impl.probit_probabilities(Rows(logits, gram, slots, STRENGTH), BETA)
    torch.testing.assert_close(
        actual, expected, rtol=1e-11, atol=0
    )  # small probabilities are as accurate as large ones


@pytest.mark.parametrize("num_classes", [7, 41])
@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_pair_functions_are_as_accurate_as_plain_float32(dtype: torch.dtype, num_classes: int) -> None:
    exact = make_samples(num_classes)
    low, plain = exact.to(dtype), exact.to(torch.float32)
    slots = exact.slots

    def run(impl: Any, samples: Samples) -> list[Tensor]:
        rows, grad = Rows(*samples[:2], slots, STRENGTH), samples.grad_log_odds
        log_odds = impl.log_odds(rows)
        return [
            log_odds,
            *impl.log_odds_backward(rows, log_odds, grad, True, True),
            impl.probit_probabilities(rows, BETA),
        ]

    for results in zip(run(triton_impl, low), run(torch_impl, plain), run(torch_impl, exact), strict=True):
        assert_as_accurate(*results)


def test_unneeded_gradients_are_empty_and_needed_ones_unchanged() -> None:
    *tensors, grad_log_odds = make_samples(7)
    rows = Rows(*tensors, STRENGTH)
    args = (rows, triton_impl.log_odds(rows), grad_log_odds)
    both = triton_impl.log_odds_backward(*args, True, True)
    for need in ((True, False), (False, True), (False, False)):
        for gradient, needed, expected in zip(triton_impl.log_odds_backward(*args, *need), need, both, strict=True):
            assert torch.equal(gradient, expected) if needed else gradient.shape == (0,)


@pytest.mark.parametrize("num_classes", [7, 41])
def test_slots_without_samples_have_zero_gradient(num_classes: int) -> None:
    logits, gram, slots, grad_log_odds = make_samples(num_classes, count=11)
    slots = torch.ones_like(slots)
    rows = Rows(logits, gram, slots, STRENGTH)
    args = (rows, triton_impl.log_odds(rows), grad_log_odds, False, True)
    grad_gram = triton_impl.log_odds_backward(*args)[1]
    assert_same(grad_gram, torch_impl.log_odds_backward(*args)[1])
    assert not grad_gram[0].any()
    assert not grad_gram[2].any()
    assert grad_gram[1].any()


def test_gram_gradient_is_symmetric_with_rows_that_sum_to_zero() -> None:
    *tensors, grad_log_odds = make_samples(41)
    rows = Rows(*tensors, STRENGTH)
    grad_gram = triton_impl.log_odds_backward(rows, triton_impl.log_odds(rows), grad_log_odds, False, True)[1]
    assert torch.equal(grad_gram, grad_gram.mT)
    torch.testing.assert_close(grad_gram.sum(-1), torch.zeros_like(grad_gram[0, :1]).expand(3, 41), rtol=0, atol=1e-13)


def test_non_contiguous_inputs_give_the_same_bits() -> None:
    def scattered_fields(value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(*map(scattered_fields, value))
        return scattered(value) if isinstance(value, Tensor) and value.numel() and value.dim() else value

    *tensors, grad_log_odds = make_samples(7)
    rows = Rows(*tensors, STRENGTH)
    weight, covariance, classes, grad_gram = make_classifier(7, 19, "full")
    log_odds = triton_impl.log_odds(rows)
    variances, no_product = covariance[:, 0].contiguous(), weight.new_empty(0, 7, 19)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("class_gram", (weight, covariance, classes, True)),
        ("class_gram", (weight, variances, classes, True)),
        ("class_gram_backward", (grad_gram, weight, covariance, classes, grad_gram.new_ones(3, 7, 19))),
        ("class_gram_backward", (grad_gram, weight, variances, classes, no_product)),
        ("class_activation_labels", (rows.logits, rows.logits > -3)),
        ("log_odds", (rows,)),
        ("log_odds_backward", (rows, log_odds, grad_log_odds, True, True)),
        ("probit_probabilities", (rows, BETA)),
    ]
    for name, args in calls:
        moved = [scattered_fields(arg) for arg in args]
        launcher = getattr(triton_impl, name)
        assert_same_bits(launcher(*moved), launcher(*args))


def test_expanded_upstream_gradients_are_supported() -> None:
    rows = Rows(*make_samples(7)[:3], STRENGTH)
    log_odds = triton_impl.log_odds(rows)
    ones = torch.ones((), dtype=torch.float64, device=DEVICE)
    actual = triton_impl.log_odds_backward(rows, log_odds, ones.expand(5, 7), True, True)
    assert_same(actual, torch_impl.log_odds_backward(rows, log_odds, torch.ones_like(log_odds), True, True))


# Class activation labels


@pytest.mark.parametrize("dtype", [torch.float64, *LOW_DTYPES])
@pytest.mark.parametrize("num_classes", CLASS_COUNTS)
def test_class_activation_labels_equal_the_closed_form(num_classes: int, dtype: torch.dtype) -> None:
    logits = make_samples(num_classes).logits.to(dtype)
    candidates = torch.rand(5, num_classes, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.5
    candidates[:, num_classes // 2] = True
    wide = logits.to(torch.promote_types(dtype, torch.float32))
    expected = torch_impl.class_activation_labels(wide, candidates)
    assert torch.equal(triton_impl.class_activation_labels(fenced(logits), fenced(candidates)), expected)


def test_class_activation_ties_go_to_the_lowest_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "row_blocks", lambda num_classes: {"BLOCK_L": 16, "num_warps": 1, "num_stages": 1})
    logits = torch.zeros(2, 41, device=DEVICE)
    logits[0, [3, 4, 20]] = 2.0
    logits[1, 18:22] = -1e30  # all candidates are far below every other class
    candidates = torch.ones(2, 41, dtype=torch.bool, device=DEVICE)
    candidates[1, :18] = candidates[1, 22:] = False
    assert triton_impl.class_activation_labels(logits, candidates).tolist() == [3, 18]


# Extremes


@pytest.mark.parametrize("num_classes", [2, 41])
def test_extreme_logits_and_quadratic_forms_stay_exact(num_classes: int) -> None:
    logits, gram, slots, grad_log_odds = make_samples(num_classes)
    logits = torch.where(logits > 0, 1e4, -1e4) + logits
    gram = gram * (200 / float(gram.max()))
    for strength in (1.0, 0.0):
        rows = Rows(logits, gram, slots, torch.tensor(strength))
        log_odds = torch_impl.log_odds(rows)
        assert_same(triton_impl.log_odds(rows), log_odds)
        args = (rows, log_odds, grad_log_odds, True, True)
        assert_same(triton_impl.log_odds_backward(*args), torch_impl.log_odds_backward(*args), 1e-10)


def test_tile_of_excluded_classes_keeps_other_log_odds_exact() -> None:
    logits, gram, slots, _ = make_samples(130)
    logits[:, :70] = -math.inf
    actual = triton_impl.log_odds(Rows(logits, gram, slots, STRENGTH))
    assert_same(actual[:, 70:], torch_impl.log_odds(Rows(logits[:, 70:], gram[:, 70:, 70:], slots, STRENGTH)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probit_of_arguments_up_to_forty_is_accurate_and_never_nan(dtype: torch.dtype) -> None:
    margin = torch.tensor([0.0, 0.1, 1.0, 3.0, 6.0, 9.0, 12.0, 20.0, 37.0, 40.0, 1e4], dtype=dtype, device=DEVICE)
    logits = torch.stack([margin, torch.zeros_like(margin)], 1)  # x = ±margin for β = 1 and λ = 0
    gram = torch.zeros(1, 2, 2, dtype=dtype, device=DEVICE)
    slots = torch.zeros(len(margin), dtype=torch.int64, device=DEVICE)
    actual = triton_impl.probit_probabilities(Rows(logits, gram, slots, torch.tensor(0.0)), 1.0)
    tail = torch.erfc(margin.double() / math.sqrt(2)) / 2
    expected = torch.stack([1 - tail, tail], 1)
    # rounding β/√2 to the dtype is amplified x² times in the tail at x
    rounding = 4 * torch.finfo(dtype).eps * (1 + margin.double()[:, None] ** 2)
    normal = expected > 1.01 * torch.finfo(dtype).tiny
    assert ((actual - expected).abs() <= rounding * expected)[normal].all()
    assert (actual[-1] == torch.tensor([1.0, 0.0], device=DEVICE)).all()
    assert (actual[~normal] <= 1.01 * torch.finfo(dtype).tiny).all()


@triton.jit
def _normal_tail_kernel(y_ptr, tail_ptr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(tail_ptr + index, normal_tail(tl.load(y_ptr + index)))


@pytest.mark.parametrize(("dtype", "largest", "tolerance"), [(torch.float32, 9.1, 1e-6), (torch.float64, 26.0, 1e-13)])
def test_normal_tail_is_relatively_accurate_until_it_underflows(
    dtype: torch.dtype, largest: float, tolerance: float
) -> None:
    y = torch.linspace(0, largest, 4096, dtype=dtype, device=DEVICE)
    tail = torch.empty_like(y)
    _normal_tail_kernel[(4,)](y, tail, BLOCK=1024)
    expected = torch.erfc(y.double()) / 2
    assert ((tail.double() - expected) / expected).abs().max() <= tolerance


@pytest.mark.parametrize("num_classes", [7, 41])
def test_excluded_classes_have_finite_gradients(num_classes: int) -> None:
    logits, gram, slots, grad_log_odds = make_samples(num_classes)
    logits[:, ::2] = -math.inf
    logits[1, :] = -math.inf
    logits[1, 1] = 0.0  # a single class is left: without any other, its log-odds are infinite
    rows = Rows(logits, gram, slots, STRENGTH)
    gradients = triton_impl.log_odds_backward(rows, triton_impl.log_odds(rows), grad_log_odds + 1, True, True)
    for gradient in gradients:
        assert gradient.isfinite().all()
    probabilities = triton_impl.probit_probabilities(rows, BETA)
    assert (probabilities[logits == -math.inf] == 0).all()
    assert probabilities.isfinite().all()


def test_rows_with_slot_out_of_range_are_nan() -> None:
    logits, gram, slots, grad_log_odds = make_samples(7)
    good = Rows(logits, guarded(gram), slots, STRENGTH)
    for wrong in (-1, 3, 2**40):
        bad = good._replace(slots=slots.clone())
        bad.slots[2] = wrong
        results = [triton_impl.log_odds(bad), triton_impl.probit_probabilities(bad, BETA)]
        expected = [triton_impl.log_odds(good), triton_impl.probit_probabilities(good, BETA)]
        results += [triton_impl.log_odds_backward(bad, results[0], grad_log_odds, True, True)[0]]
        expected += [triton_impl.log_odds_backward(good, expected[0], grad_log_odds, True, True)[0]]
        others = torch.tensor([0, 1, 3, 4], device=DEVICE)
        for found, truth in zip(results, expected, strict=True):
            assert found[2].isnan().all()
            assert torch.equal(found[others], truth[others])


# Empty batches


def test_empty_batches_return_empty_rows_and_zero_gram_gradients() -> None:
    _, gram, slots, _ = make_samples(7)
    none, slots = gram.new_zeros(0, 7), slots[:0]
    assert triton_impl.log_odds(Rows(none, gram, slots, STRENGTH)).shape == (0, 7)
    assert triton_impl.probit_probabilities(Rows(none, gram, slots, STRENGTH), BETA).shape == (0, 7)
    gradients = triton_impl.log_odds_backward(Rows(none, gram, slots, STRENGTH), none, none, True, True)
    assert gradients[0].shape == (0, 7)
    assert torch.equal(gradients[1], torch.zeros_like(gram))


@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_zero_slots_give_a_zero_weight_gradient(kind: str) -> None:
    weight, covariance, classes, grad_gram = make_classifier(7, 19, kind)
    gram, product = triton_impl.class_gram(weight, covariance, classes[:0], True)
    assert gram.shape == (0, 7, 7)
    assert product.shape == (0, 7, 19)
    grad_weight = triton_impl.class_gram_backward(grad_gram[:0], weight, covariance, classes[:0], product)
    assert torch.equal(grad_weight, torch.zeros_like(weight))


# Launching


def test_results_do_not_depend_on_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """At these sizes one tile usually suffices; the smallest tiles make every loop run several times."""
    *tensors, grad_log_odds = make_samples(41)
    rows = Rows(*tensors, STRENGTH)
    warps = {"num_warps": 1, "num_stages": 1}
    monkeypatch.setattr(tiles, "row_blocks", lambda num_classes: {"BLOCK_L": 16, **warps})
    monkeypatch.setattr(tiles, "pair_blocks", lambda num_classes, dtype: {"BLOCK_J": 8, "BLOCK_K": 8, **warps})
    monkeypatch.setattr(tiles, "pulled_blocks", lambda num_classes: {"BLOCK_J": 8, "BLOCK_K": 16, **warps})
    monkeypatch.setattr(tiles, "gram_gradient_blocks", lambda num_classes: {"BLOCK_N": 1, "BLOCK_L": 16, **warps})
    monkeypatch.setattr(tiles, "FUSED_GRAM_CLASSES", 0)
    monkeypatch.setattr(tiles, "matrix_tilings", lambda *_, **__: [SMALLEST_TILING])
    args = (rows, torch_impl.log_odds(rows), grad_log_odds, True, True)
    assert_same(triton_impl.log_odds_backward(*args), torch_impl.log_odds_backward(*args))
    labels = torch_impl.class_activation_labels(rows.logits, rows.logits > -3)
    assert torch.equal(triton_impl.class_activation_labels(rows.logits, rows.logits > -3), labels)
    weight, covariance, classes, _ = make_classifier(41, 19, "full")
    expected = torch_impl.class_gram(weight, covariance, classes, True)
    assert_same_gram(triton_impl.class_gram(weight, covariance, classes, True), expected)


def test_repeated_calls_give_the_same_bits() -> None:
    *tensors, grad_log_odds = make_samples(41).to(torch.float32)
    rows = Rows(*tensors, STRENGTH)
    weight, covariance, classes, grad_gram = make_classifier(41, 19, "full").to(torch.float32)

    def run() -> tuple[Tensor, ...]:
        gram_and_product = triton_impl.class_gram(weight, covariance, classes, True)
        return (
            *gram_and_product,
            triton_impl.class_gram_backward(grad_gram, weight, covariance, classes, gram_and_product[1]),
            *triton_impl.log_odds_backward(rows, triton_impl.log_odds(rows), grad_log_odds, True, True),
        )

    assert_same_bits(run(), run())


@pytest.mark.parametrize(
    ("target", "highest", "high"),
    [
        ("sm_80", "tf32x3", "tf32"),
        ("sm_90", "tf32x3", "tf32"),
        ("sm_100", "tf32x3", "tf32"),
        ("sm_86", "ieee", "tf32"),
        ("sm_120", "ieee", "tf32"),
        ("sm_75", "ieee", "ieee"),
        ("gfx942", "ieee", "ieee"),
    ],
)
def test_float32_products_follow_the_target_and_use_tf32_only_if_allowed(
    target: str, highest: str, high: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "target", lambda device: target)
    before = torch.get_float32_matmul_precision()
    try:
        for setting, expected in (("highest", highest), ("high", high)):
            torch.set_float32_matmul_precision(setting)
            assert tiles.dot_precision(torch.zeros(1)) == expected
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_each_warp_of_three_tf32_products_has_rows_of_its_own(
    target: str, square: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "target", lambda device: target)
    for size in (33, 41, 64, 100, 130, 1000):
        tilings = tiles.matrix_tilings(size, size, torch.zeros(1), square)
        assert all(blocks["BLOCK_M"] == blocks["BLOCK_N"] for blocks in tilings if square)
        if size <= tiles.FUSED_GRAM_CLASSES:
            tilings += tiles.gram_tilings(size, torch.zeros(1))
        assert all(blocks["BLOCK_M"] >= 16 * blocks["num_warps"] for blocks in tilings if blocks["BLOCK_M"] >= 64)
