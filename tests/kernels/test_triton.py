"""Every launcher against `torch_impl`, on a GPU or, without one, in Triton's interpreter.

The shapes are odd on purpose: 2 and 7 classes fit one tile, 41 leaves one ragged, 130 needs several and leaves the
fused Gram kernel. Interpreted programs take a millisecond each, so batches are small. All allocations are poisoned:
an element that a kernel forgets to write is a NaN, or an absurd integer, in every test of this file.
"""

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from plsp_kernels import torch_impl, triton_impl  # noqa: E402
from plsp_kernels.triton_impl import tiles  # noqa: E402
from plsp_kernels.triton_impl.probit import normal_tail  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STRENGTH, SS_WEIGHT, BETA = 0.7, 0.6, math.pi**2 / 8
CLASS_COUNTS = (2, 7, 41, 130)
GRAM_SHAPES = ((2, 1), (7, 130), (41, 84), (130, 19))
LOW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU, or TRITON_INTERPRET=1"
    ),
    # numpy, which executes interpreted kernels, warns where infinities are meant
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def poison(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


@pytest.fixture(autouse=True)
def _poisoned_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: poison(allocate(*args, **kwargs))

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


def guarded(tensor: Tensor) -> Tensor:
    """The same values, contiguous, between stretches of poison."""
    buffer = poison(torch.empty(tensor.numel() + 128, dtype=tensor.dtype, device=tensor.device))
    return buffer[64 : 64 + tensor.numel()].view(tensor.shape).copy_(tensor)


def fenced(tensor: Tensor) -> Tensor:
    """The same values as a view into a larger buffer of poison: every row ends in it."""
    buffer = poison(torch.empty([size + 6 for size in tensor.shape], dtype=tensor.dtype, device=tensor.device))
    return buffer[tuple(slice(3, 3 + size) for size in tensor.shape)].copy_(tensor)


class Samples(NamedTuple):
    """What the functions of class pairs take, in float64."""

    logits: Tensor
    gram: Tensor
    slots: Tensor
    targets: Tensor
    grad_odds: Tensor

    def to(self, dtype: torch.dtype) -> "Samples":
        """Logits in this dtype, the rest in the dtype of the computation."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return self._replace(logits=self.logits.to(dtype), gram=self.gram.to(wide), grad_odds=self.grad_odds.to(wide))


def make_samples(num_classes: int, count: int = 5, num_slots: int = 3, seed: int = 0) -> Samples:
    """Samples of slots 1 and 2 in alternation; slot 0 stays without samples."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    factor = normal(num_slots, num_classes, 6) / 2
    grad_odds = normal(count, num_classes)
    grad_odds[1] = 0  # a row that no loss looks at
    grad_odds[2, num_classes // 2 :] = 0
    return Samples(
        logits=(3 * normal(count, num_classes)).bfloat16().double().to(DEVICE),  # the same number in every dtype
        gram=(factor @ factor.mT).to(DEVICE),
        slots=(1 + torch.arange(count) % 2).to(DEVICE),
        targets=torch.randint(num_classes, (count,), generator=generator).to(DEVICE),
        grad_odds=grad_odds.to(DEVICE),
    )


class Classifier(NamedTuple):
    """What the Gram matrices are made of, in float64."""

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


class Step(NamedTuple):
    """The tensors of one training step, in float64."""

    rows: Tensor
    gram: Tensor
    slots: Tensor
    labels: Tensor
    candidates: Tensor
    labeled_candidates: Tensor | None
    thresholds: Tensor

    def to(self, dtype: torch.dtype) -> "Step":
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return self._replace(rows=self.rows.to(dtype), gram=self.gram.to(wide), thresholds=self.thresholds.to(wide))


def make_step(
    num_classes: int, num_labeled: int = 2, num_unlabeled: int = 4, repeat_labeled: bool = False, seed: int = 0
) -> Step:
    num_rows = num_labeled * (2 if repeat_labeled else 1) + 2 * num_unlabeled
    samples = make_samples(num_classes, max(num_rows, 3), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.rand(num_labeled + num_unlabeled, num_classes, generator=generator) < 0.4
    candidates[torch.arange(len(candidates)), torch.arange(len(candidates)) % num_classes] = True
    labeled_slots, unlabeled_slots = samples.slots[:num_labeled], samples.slots[:num_unlabeled]
    slots = [labeled_slots, unlabeled_slots, unlabeled_slots] + [labeled_slots] * repeat_labeled
    return Step(
        rows=samples.logits[:num_rows],
        gram=samples.gram,
        slots=torch.cat(slots),
        labels=samples.targets[:num_labeled] if num_labeled <= 3 else samples.targets[:1].expand(num_labeled),
        candidates=candidates[num_labeled:].to(DEVICE),
        labeled_candidates=candidates[:num_labeled].to(DEVICE) if repeat_labeled else None,
        thresholds=torch.linspace(0.2, 0.6, num_classes, dtype=torch.float64, device=DEVICE),
    )


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Shapes, dtypes and values, these relative to the largest of the tensor."""
    for ours, theirs in zip(as_tuple(actual), as_tuple(expected), strict=True):
        scale = float(theirs.abs().max()) if theirs.is_floating_point() and theirs.numel() else 0.0
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * scale)


def assert_as_accurate(actual: Any, plain: Any, truth: Any) -> None:
    """float32 results no farther from the float64 truth than plain PyTorch's, but for a few roundings."""
    for ours, theirs, exact in zip(as_tuple(actual), as_tuple(plain), as_tuple(truth), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        if not ours.is_floating_point() or not ours.numel():
            assert torch.equal(ours, theirs)
            continue
        slack = 8 * torch.finfo(torch.float32).eps * float(exact.abs().max())
        assert float((ours - exact).abs().max()) <= float((theirs - exact).abs().max()) + slack


# Class Gram matrices


@pytest.mark.parametrize("kind", ["full", "diagonal"])
@pytest.mark.parametrize("shape", GRAM_SHAPES)
def test_class_gram_and_its_gradient_equal_the_closed_form_in_float64(shape: tuple[int, int], kind: str) -> None:
    weight, covariance, classes, grad_gram = make_classifier(*shape, kind)
    expected = torch_impl.class_gram(weight, covariance, classes, True)
    assert_same(triton_impl.class_gram(fenced(weight), fenced(covariance), guarded(classes), True), expected)
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
    assert_as_accurate(actual, plain, truth)
    assert_as_accurate(
        triton_impl.class_gram_backward(grad_gram, weight, covariance, classes, plain[1]),
        torch_impl.class_gram_backward(grad_gram, weight.float(), covariance.float(), classes, plain[1]),
        torch_impl.class_gram_backward(case.grad_gram, case.weight, case.covariance, classes, truth[1]),
    )


@pytest.mark.parametrize("num_classes", [7, 130])
def test_product_is_empty_and_gram_the_same_when_it_is_not_to_be_saved(num_classes: int) -> None:
    weight, covariance, classes, _ = make_classifier(num_classes, 19, "full")
    gram, product = triton_impl.class_gram(weight, covariance, classes, False)
    assert product.shape == (0, num_classes, 19)
    assert torch.equal(gram, triton_impl.class_gram(weight, covariance, classes, True)[0])


def test_covariance_may_have_another_dtype_than_the_weight() -> None:
    weight, covariance, classes, _ = make_classifier(7, 19, "full")
    actual = triton_impl.class_gram(weight, covariance.bfloat16(), classes, True)
    assert_same(actual, torch_impl.class_gram(weight, covariance, classes, True))


@pytest.mark.parametrize("num_slots", [1, 3, 11])
def test_weight_gradient_does_not_depend_on_how_the_sum_is_split(
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
    logits, gram, slots, _, grad_odds = make_samples(num_classes)
    odds = torch_impl.log_odds(logits, gram, slots, STRENGTH)
    assert_same(triton_impl.log_odds(fenced(logits), guarded(gram), guarded(slots), STRENGTH), odds)
    gradients = triton_impl.log_odds_backward(
        fenced(grad_odds), fenced(logits), fenced(odds), guarded(gram), guarded(slots), STRENGTH, True, True
    )
    assert_same(gradients, torch_impl.log_odds_backward(grad_odds, logits, odds, gram, slots, STRENGTH, True, True))


@pytest.mark.parametrize("num_classes", CLASS_COUNTS)
def test_target_log_odds_and_gradients_equal_the_closed_form_in_float64(num_classes: int) -> None:
    logits, gram, slots, targets, grad_odds = make_samples(num_classes)
    grad = grad_odds[:, 0].contiguous()
    odds = torch_impl.target_log_odds(logits, gram, slots, targets, STRENGTH)
    actual = triton_impl.target_log_odds(fenced(logits), guarded(gram), guarded(slots), guarded(targets), STRENGTH)
    assert_same(actual, odds)
    samples = (guarded(odds), guarded(gram), guarded(slots), guarded(targets))
    gradients = triton_impl.target_log_odds_backward(guarded(grad), fenced(logits), *samples, STRENGTH, True, True)
    args = (grad, logits, odds, gram, slots, targets, STRENGTH, True, True)
    assert_same(gradients, torch_impl.target_log_odds_backward(*args))


@pytest.mark.parametrize("num_classes", CLASS_COUNTS)
def test_probit_probabilities_equal_the_closed_form_in_float64(num_classes: int) -> None:
    logits, gram, slots, _, _ = make_samples(num_classes)
    actual = triton_impl.probit_probabilities(fenced(logits), guarded(gram), guarded(slots), STRENGTH, BETA)
    expected = torch_impl.probit_probabilities(logits, gram, slots, STRENGTH, BETA)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=0)  # small probabilities are as accurate as large


@pytest.mark.parametrize("num_classes", [7, 41])
@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_pair_functions_are_as_accurate_as_plain_float32(dtype: torch.dtype, num_classes: int) -> None:
    exact = make_samples(num_classes)
    low, plain = exact.to(dtype), exact.to(torch.float32)
    slots, targets = exact.slots, exact.targets

    def run(impl: Any, samples: Samples) -> list[Tensor]:
        logits, gram, _, _, grad = samples
        odds = impl.log_odds(logits, gram, slots, STRENGTH)
        target_odds = impl.target_log_odds(logits, gram, slots, targets, STRENGTH)
        return [
            odds,
            *impl.log_odds_backward(grad, logits, odds, gram, slots, STRENGTH, True, True),
            target_odds,
            *impl.target_log_odds_backward(
                grad[:, 0].contiguous(), logits, target_odds, gram, slots, targets, STRENGTH, True, True
            ),
            impl.probit_probabilities(logits, gram, slots, STRENGTH, BETA),
        ]

    for results in zip(run(triton_impl, low), run(torch_impl, plain), run(torch_impl, exact), strict=True):
        assert_as_accurate(*results)


@pytest.mark.parametrize("name", ["log_odds_backward", "target_log_odds_backward"])
def test_unneeded_gradients_are_empty_and_needed_ones_unchanged(name: str) -> None:
    logits, gram, slots, targets, grad_odds = make_samples(7)
    if name == "log_odds_backward":
        args = (grad_odds, logits, triton_impl.log_odds(logits, gram, slots, STRENGTH), gram, slots, STRENGTH)
    else:
        odds = triton_impl.target_log_odds(logits, gram, slots, targets, STRENGTH)
        args = (grad_odds[:, 0].contiguous(), logits, odds, gram, slots, targets, STRENGTH)
    backward = getattr(triton_impl, name)
    both = backward(*args, True, True)
    for need in ((True, False), (False, True), (False, False)):
        for gradient, needed, expected in zip(backward(*args, *need), need, both, strict=True):
            assert torch.equal(gradient, expected) if needed else gradient.shape == (0,)


@pytest.mark.parametrize("num_classes", [7, 41])
def test_all_samples_in_one_class_leave_the_gradient_of_every_other_slot_zero(num_classes: int) -> None:
    logits, gram, slots, _, grad_odds = make_samples(num_classes, count=11)
    slots = torch.ones_like(slots)
    odds = triton_impl.log_odds(logits, gram, slots, STRENGTH)
    args = (grad_odds, logits, odds, gram, slots, STRENGTH, False, True)
    grad_gram = triton_impl.log_odds_backward(*args)[1]
    assert_same(grad_gram, torch_impl.log_odds_backward(*args)[1])
    assert not grad_gram[0].any()
    assert not grad_gram[2].any()
    assert grad_gram[1].any()


def test_gram_gradient_is_symmetric_with_rows_that_sum_to_zero() -> None:
    logits, gram, slots, _, grad_odds = make_samples(41)
    odds = triton_impl.log_odds(logits, gram, slots, STRENGTH)
    grad_gram = triton_impl.log_odds_backward(grad_odds, logits, odds, gram, slots, STRENGTH, False, True)[1]
    assert torch.equal(grad_gram, grad_gram.mT)
    torch.testing.assert_close(grad_gram.sum(-1), torch.zeros_like(grad_gram[0, :1]).expand(3, 41), rtol=0, atol=1e-13)


def test_inputs_that_are_not_contiguous_give_the_same_bits() -> None:
    def scattered(tensor: Tensor) -> Tensor:
        """The same values with a last axis that is not dense."""
        return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor.repeat_interleave(2)[::2]

    logits, gram, slots, targets, grad_odds = make_samples(7)
    weight, covariance, classes, grad_gram = make_classifier(7, 19, "full")
    odds = triton_impl.log_odds(logits, gram, slots, STRENGTH)
    gradient = grad_odds[:, 0].contiguous()
    variances, no_product = covariance[:, 0].contiguous(), weight.new_empty(0, 7, 19)
    step = make_step(7, repeat_labeled=True)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("class_gram", (weight, covariance, classes, True)),
        ("class_gram", (weight, variances, classes, True)),
        ("class_gram_backward", (grad_gram, weight, covariance, classes, grad_gram.new_ones(3, 7, 19))),
        (
            "class_gram_backward",
            (grad_gram, weight, variances, classes, no_product),
        ),
        ("log_odds", (logits, gram, slots, STRENGTH)),
        ("log_odds_backward", (grad_odds, logits, odds, gram, slots, STRENGTH, True, True)),
        ("target_log_odds", (logits, gram, slots, targets, STRENGTH)),
        (
            "target_log_odds_backward",
            (gradient, logits, odds[:, 0].contiguous(), gram, slots, targets, STRENGTH, True, True),
        ),
        ("probit_probabilities", (logits, gram, slots, STRENGTH, BETA)),
        ("upper_bound", (*step, STRENGTH, SS_WEIGHT, BETA, True, True, True)),
    ]
    for name, args in calls:
        moved = [scattered(arg) if isinstance(arg, Tensor) and arg.numel() else arg for arg in args]
        launcher = getattr(triton_impl, name)
        for ours, theirs in zip(as_tuple(launcher(*moved)), as_tuple(launcher(*args)), strict=True):
            assert torch.equal(ours, theirs), name


def test_an_expanded_upstream_gradient_is_read_correctly() -> None:
    logits, gram, slots, _, _ = make_samples(7)
    odds = triton_impl.log_odds(logits, gram, slots, STRENGTH)
    ones = torch.ones((), dtype=torch.float64, device=DEVICE)
    args = (logits, odds, gram, slots, STRENGTH, True, True)
    actual = triton_impl.log_odds_backward(ones.expand(5, 7), *args)
    assert_same(actual, torch_impl.log_odds_backward(torch.ones_like(logits), *args))


# Extremes


@pytest.mark.parametrize("num_classes", [2, 41])
def test_extreme_logits_and_quadratic_forms_stay_exact(num_classes: int) -> None:
    logits, gram, slots, targets, grad_odds = make_samples(num_classes)
    logits = torch.where(logits > 0, 1e4, -1e4) + logits
    gram = gram * (200 / float(gram.max()))
    for strength in (1.0, 0.0):
        odds = torch_impl.log_odds(logits, gram, slots, strength)
        assert_same(triton_impl.log_odds(logits, gram, slots, strength), odds)
        args = (grad_odds, logits, odds, gram, slots, strength, True, True)
        assert_same(triton_impl.log_odds_backward(*args), torch_impl.log_odds_backward(*args), 1e-10)
        target_odds = torch_impl.target_log_odds(logits, gram, slots, targets, strength)
        assert_same(triton_impl.target_log_odds(logits, gram, slots, targets, strength), target_odds)


def test_excluded_classes_that_fill_a_tile_leave_the_odds_of_the_others_exact() -> None:
    logits, gram, slots, _, _ = make_samples(130)
    logits[:, :70] = -math.inf
    actual = triton_impl.log_odds(logits, gram, slots, STRENGTH)
    assert_same(actual[:, 70:], torch_impl.log_odds(logits[:, 70:], gram[:, 70:, 70:], slots, STRENGTH))


@pytest.mark.parametrize("num_classes", [2, 41])
def test_extreme_logits_give_finite_losses_and_gradients_in_float32(num_classes: int) -> None:
    step = make_step(num_classes).to(torch.float32)
    rows = torch.where(step.rows > 0, 1e4, -1e4) + step.rows
    gram = step.gram * (200 / float(step.gram.max()))
    *floats, _, _ = triton_impl.upper_bound(rows, gram, *step[2:], 1.0, SS_WEIGHT, BETA, False, True, True)
    for result in floats:
        assert result.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probit_of_arguments_up_to_forty_is_accurate_and_never_nan(dtype: torch.dtype) -> None:
    margin = torch.tensor([0.0, 0.1, 1.0, 3.0, 6.0, 9.0, 12.0, 20.0, 37.0, 40.0, 1e4], dtype=dtype, device=DEVICE)
    logits = torch.stack([margin, torch.zeros_like(margin)], 1)  # x = ±margin for β = 1 and λ = 0
    gram = torch.zeros(1, 2, 2, dtype=dtype, device=DEVICE)
    slots = torch.zeros(len(margin), dtype=torch.int64, device=DEVICE)
    actual = triton_impl.probit_probabilities(logits, gram, slots, 0.0, 1.0)
    tail = torch.erfc(margin.double() / math.sqrt(2)) / 2
    expected = torch.stack([1 - tail, tail], 1)
    # β/√2 is rounded to the dtype, which a tail at x magnifies x² times
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


# The loss of one step


@pytest.mark.parametrize("repeat_labeled", [False, True])
@pytest.mark.parametrize("num_classes", CLASS_COUNTS)
def test_upper_bound_equals_the_closed_form_in_float64(num_classes: int, repeat_labeled: bool) -> None:
    step = make_step(num_classes, repeat_labeled=repeat_labeled)
    rows, gram, slots, labels, candidates, *rest = step
    for argmax_in_candidates in (True, False):
        arguments = (STRENGTH, SS_WEIGHT, BETA, argmax_in_candidates, True, True)
        expected = torch_impl.upper_bound(*step, *arguments)
        moved = (fenced(rows), guarded(gram), guarded(slots), guarded(labels), fenced(candidates), *rest)
        assert_same(triton_impl.upper_bound(*moved, *arguments), expected, 1e-11)
    assert expected[7].any()  # the consistency term is at work


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_upper_bound_is_as_accurate_as_plain_float32(dtype: torch.dtype) -> None:
    step = make_step(41, repeat_labeled=True)
    arguments = (STRENGTH, SS_WEIGHT, BETA, False, True, True)
    assert_as_accurate(
        triton_impl.upper_bound(*step.to(dtype), *arguments),
        torch_impl.upper_bound(*step.to(torch.float32), *arguments),
        torch_impl.upper_bound(*step, *arguments),
    )


@pytest.mark.parametrize("block", [16, 64])
def test_predictions_take_the_lowest_index_among_ties(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = {"BLOCK_L": block, "num_warps": 1, "num_stages": 1}
    monkeypatch.setattr(tiles, "row_blocks", lambda num_classes: blocks)  # ties within a tile and across tiles
    step = make_step(41)
    rows = torch.zeros_like(step.rows)
    rows[:, [3, 4, 20]] = 1.0
    gram = torch.zeros_like(step.gram)
    results = triton_impl.upper_bound(rows, gram, *step[2:], STRENGTH, SS_WEIGHT, BETA, True, True, True)
    assert results[6].tolist() == [3] * 4


def test_targets_fall_back_to_the_candidate_softmax_where_every_candidate_underflows() -> None:
    step = make_step(7)
    rows = step.rows.clone()
    weak = rows[6:]
    weak[:, :] = 100.0
    weak[:, :2] = torch.tensor([0.5, -0.5], dtype=torch.float64)
    candidates = torch.zeros_like(step.candidates)
    candidates[:, :2] = True
    step = step._replace(rows=rows, candidates=candidates, thresholds=torch.zeros_like(step.thresholds))
    results = triton_impl.upper_bound(*step, STRENGTH, SS_WEIGHT, BETA, False, True, True)
    assert_same(results, torch_impl.upper_bound(*step, STRENGTH, SS_WEIGHT, BETA, False, True, True))
    odds, grad_odds = results[1][2:6, :2], results[2][2:6, :2]
    expected = torch.tensor([0.5, -0.5], dtype=torch.float64, device=DEVICE).softmax(0)
    assert_same(-grad_odds * 4 / torch.sigmoid(-odds), expected.expand(4, 2))


@pytest.mark.parametrize(("num_labeled", "num_unlabeled"), [(0, 4), (2, 0), (0, 0)])
@pytest.mark.parametrize("repeat_labeled", [False, True])
def test_empty_batches_contribute_zero(num_labeled: int, num_unlabeled: int, repeat_labeled: bool) -> None:
    step = make_step(7, num_labeled, num_unlabeled, repeat_labeled)
    results = triton_impl.upper_bound(*step, STRENGTH, SS_WEIGHT, BETA, True, True, True)
    assert_same(results, torch_impl.upper_bound(*step, STRENGTH, SS_WEIGHT, BETA, True, True, True))
    if num_labeled == 0:
        assert results[0][1] == 0
    if num_unlabeled == 0:
        assert results[0][2] == 0


def test_functions_of_no_samples_return_empty_rows_and_zero_gram_gradients() -> None:
    _, gram, slots, _, _ = make_samples(7)
    none, slots = gram.new_zeros(0, 7), slots[:0]
    assert triton_impl.log_odds(none, gram, slots, STRENGTH).shape == (0, 7)
    assert triton_impl.probit_probabilities(none, gram, slots, STRENGTH, BETA).shape == (0, 7)
    assert triton_impl.target_log_odds(none, gram, slots, slots, STRENGTH).shape == (0,)
    gradients = triton_impl.log_odds_backward(none, none, none, gram, slots, STRENGTH, True, True)
    assert gradients[0].shape == (0, 7)
    assert torch.equal(gradients[1], torch.zeros_like(gram))
    gradients = triton_impl.target_log_odds_backward(
        none[:, 0], none, none[:, 0], gram, slots, slots, STRENGTH, True, True
    )
    assert gradients[0].shape == (0, 7)
    assert torch.equal(gradients[1], torch.zeros_like(gram))


@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_no_slots_give_no_gram_matrices_and_a_zero_weight_gradient(kind: str) -> None:
    weight, covariance, classes, grad_gram = make_classifier(7, 19, kind)
    gram, product = triton_impl.class_gram(weight, covariance, classes[:0], True)
    assert gram.shape == (0, 7, 7)
    assert product.shape == (0, 7, 19)
    grad_weight = triton_impl.class_gram_backward(grad_gram[:0], weight, covariance, classes[:0], product)
    assert torch.equal(grad_weight, torch.zeros_like(weight))


# Launching


def test_results_do_not_depend_on_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and sums normally fit one tile at these sizes; with the smallest tiles every loop runs several times."""
    step = make_step(41, repeat_labeled=True)
    logits, gram, slots, targets, grad_odds = make_samples(41)
    warps = {"num_warps": 1, "num_stages": 1}
    monkeypatch.setattr(tiles, "row_blocks", lambda num_classes: {"BLOCK_L": 16, **warps})
    monkeypatch.setattr(tiles, "sum_blocks", lambda: {"BLOCK_N": 2, **warps})
    monkeypatch.setattr(tiles, "pair_blocks", lambda num_classes, dtype: {"BLOCK_J": 8, "BLOCK_K": 8, **warps})
    monkeypatch.setattr(tiles, "pulled_blocks", lambda num_classes: {"BLOCK_J": 8, "BLOCK_K": 16, **warps})
    monkeypatch.setattr(tiles, "gram_gradient_blocks", lambda num_classes: {"BLOCK_N": 1, "BLOCK_L": 16, **warps})
    monkeypatch.setattr(tiles, "FUSED_GRAM_CLASSES", 0)
    arguments = (STRENGTH, SS_WEIGHT, BETA, False, True, True)
    assert_same(triton_impl.upper_bound(*step, *arguments), torch_impl.upper_bound(*step, *arguments), 1e-11)
    odds = torch_impl.log_odds(logits, gram, slots, STRENGTH)
    args = (grad_odds, logits, odds, gram, slots, STRENGTH, True, True)
    assert_same(triton_impl.log_odds_backward(*args), torch_impl.log_odds_backward(*args))
    odds = torch_impl.target_log_odds(logits, gram, slots, targets, STRENGTH)
    assert_same(triton_impl.target_log_odds(logits, gram, slots, targets, STRENGTH), odds)
    args = (grad_odds[:, 0].contiguous(), logits, odds, gram, slots, targets, STRENGTH, True, True)
    assert_same(triton_impl.target_log_odds_backward(*args), torch_impl.target_log_odds_backward(*args))
    weight, covariance, classes, _ = make_classifier(41, 19, "full")
    expected = torch_impl.class_gram(weight, covariance, classes, True)
    assert_same(triton_impl.class_gram(weight, covariance, classes, True), expected)


def test_repeated_calls_give_the_same_bits() -> None:
    step = make_step(41).to(torch.float32)
    logits, gram, slots, _, grad_odds = make_samples(41).to(torch.float32)
    weight, covariance, classes, grad_gram = make_classifier(41, 19, "full").to(torch.float32)

    def run() -> list[Tensor]:
        gram_and_product = triton_impl.class_gram(weight, covariance, classes, True)
        odds = triton_impl.log_odds(logits, gram, slots, STRENGTH)
        return [
            *gram_and_product,
            triton_impl.class_gram_backward(grad_gram, weight, covariance, classes, gram_and_product[1]),
            *triton_impl.log_odds_backward(grad_odds, logits, odds, gram, slots, STRENGTH, True, True),
            *triton_impl.upper_bound(*step, STRENGTH, SS_WEIGHT, BETA, True, True, True),
        ]

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


def test_float32_products_use_tf32_only_where_the_user_allows_it() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert tiles.dot_precision("cuda") == "tf32x3"
        torch.set_float32_matmul_precision("high")
        assert tiles.dot_precision("cuda") == "tf32"
        assert tiles.dot_precision("hip") == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)
