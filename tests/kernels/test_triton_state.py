"""Kernels that update the state: against `torch_impl`, on a GPU or, without one, in Triton's interpreter."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.5")

from triton.runtime import interpreter
from triton_cases import DEVICE, POISONED, fenced, guarded, scattered

from cases import KINDS, make_problem
from plsp_kernels import SemanticUpperBoundLoss, reference, torch_impl, triton_impl
from plsp_kernels.curriculum import CurriculumBatch
from plsp_kernels.triton_impl import tiles
from plsp_kernels.triton_impl.covariance_update import _mean_update_kernel

EPS = torch.finfo(torch.float32).eps
# (l, d, N): fewer and more samples than classes, one tile and several, ragged in every axis
SHAPES = ((5, 4, 9), (50, 9, 6), (7, 70, 3), (3, 40, 33), (2, 1, 1))

pytestmark = POISONED


def statistics(num_classes: int, num_features: int, kind: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    width = [num_features] if kind == "full" else []
    covariance = torch.zeros(num_classes, num_features, *width, dtype=dtype, device=DEVICE)
    mean = torch.zeros(num_classes, num_features, dtype=dtype, device=DEVICE)
    count = torch.zeros(num_classes, dtype=torch.int64, device=DEVICE)
    return [covariance, mean, count, count.clone()]


def batch(num_classes: int, num_features: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, num_features, generator=generator, dtype=torch.float64) + 2
    return features.to(DEVICE), torch.randint(num_classes, (count,), generator=generator).to(DEVICE)


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-13) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


# Covariance update


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_covariance_update_equals_the_closed_form_in_float64(shape: tuple[int, int, int], kind: str) -> None:
    expected = statistics(*shape[:2], kind)
    found = [guarded(tensor) for tensor in expected]
    for seed in range(3):
        features, labels = batch(*shape, seed)
        triton_impl.covariance_update(*found, guarded(features), guarded(labels))
        torch_impl.covariance_update(*expected, features, labels)
        assert_close(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_updates_follow_equation_17(kind: str) -> None:
    found, truth = statistics(2, 3, kind, torch.float32), statistics(2, 3, kind)
    for seed in range(1000):
        features, labels = batch(2, 3, 1, seed)
        triton_impl.covariance_update(*found, features.float(), labels)
        truth[:3] = reference.update_covariance(*truth[:3], features.float().double(), labels)
    assert_close(found, truth, 16 * EPS)  # the tolerance of the forms for CPUs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_features_of_any_dtype_give_the_bits_of_float32(kind: str, dtype: torch.dtype) -> None:
    found, expected = (statistics(5, 9, kind, torch.float32) for _ in range(2))
    features, labels = batch(5, 9, 7)
    features = features.bfloat16().to(dtype).half().to(dtype)  # exact in every dtype
    triton_impl.covariance_update(*found, features, labels)
    triton_impl.covariance_update(*expected, features.float(), labels)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", KINDS)
def test_strided_features_give_the_same_bits(kind: str) -> None:
    found, expected = (statistics(5, 9, kind, torch.float32) for _ in range(2))
    features, labels = batch(5, 9, 7)
    triton_impl.covariance_update(*found, scattered(features.float()), scattered(labels))
    triton_impl.covariance_update(*expected, features.float(), labels)
    assert all(map(torch.equal, found, expected))


def test_strided_statistics_are_an_error() -> None:
    covariance, mean, *counts = statistics(5, 9, "full")
    with pytest.raises(ValueError, match="must be contiguous"):
        triton_impl.covariance_update(covariance, scattered(mean), *counts, *batch(5, 9, 7))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [4, 9], ids=["fewer samples than classes", "more samples than classes"])
def test_labels_out_of_range_are_ignored(kind: str, count: int) -> None:
    features, labels = batch(5, 9, count)
    outside = torch.tensor([-1, 5, 2**40, -(2**40)], device=DEVICE)
    found = [guarded(tensor) for tensor in statistics(5, 9, kind)]
    mixed = torch.cat([outside[:2], labels, outside[2:]])
    rows = torch.cat([features[:2] * math.nan, features, features[:2] * math.inf])
    triton_impl.covariance_update(*found, guarded(rows), guarded(mixed))
    expected = statistics(5, 9, kind)
    torch_impl.covariance_update(*expected, features, labels)
    assert_close(found, expected)
    before = [tensor.clone() for tensor in found]
    triton_impl.covariance_update(*found, guarded(rows[:4]), guarded(outside))
    assert all(map(torch.equal, found, before))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("count", "dtype"), [(12, torch.float64), (4, torch.float32), (12, torch.float16)], ids=["many", "few", "half"]
)
def test_samples_that_are_not_finite_are_left_out_and_counted(kind: str, count: int, dtype: torch.dtype) -> None:
    """In every position of a row, in classes with and without finite samples."""
    state = torch.float64 if dtype == torch.float64 else torch.float32
    features, labels = batch(5, 9, count)
    labels[:2] = 3
    features = features.to(dtype)
    for row, column, value in ((0, 0, math.nan), (1, 8, math.inf), (3, 4, -math.inf)):
        features[row, column] = value
    found = [guarded(tensor) for tensor in statistics(5, 9, kind, state)]
    expected, closed = statistics(5, 9, kind, state), statistics(5, 9, kind, state)
    triton_impl.covariance_update(*found, guarded(features), guarded(labels))
    torch_impl.covariance_update(*closed, features, labels)
    finite = features.isfinite().all(1)
    torch_impl.covariance_update(*expected, features[finite], labels[finite])
    expected[3] += labels[~finite].bincount(minlength=5)
    assert_close(found, expected, 1e-13 if state == torch.float64 else 8 * EPS)
    assert_close(closed, expected, 1e-13 if state == torch.float64 else 8 * EPS)
    assert expected[3].sum() == 3


def test_covariance_stays_exactly_symmetric() -> None:
    found = statistics(3, 40, "full", torch.float32)
    for seed in range(3):
        features, labels = batch(3, 40, 5, seed)
        triton_impl.covariance_update(*found, features.float(), labels)
    assert found[0].any()
    assert torch.equal(found[0], found[0].mT)


@pytest.mark.parametrize("kind", KINDS)
def test_covariance_update_does_not_depend_on_the_tiles(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = {"BLOCK_N": 16, "BLOCK_D": 16, "num_warps": 1, "num_stages": 1}
    monkeypatch.setattr(tiles, "covariance_blocks", lambda num_features, dtype: blocks)
    monkeypatch.setattr(tiles, "mean_blocks", lambda num_features, device: blocks)
    found, expected = statistics(3, 40, kind), statistics(3, 40, kind)
    for seed in range(2):
        triton_impl.covariance_update(*found, *batch(3, 40, 33, seed))
        torch_impl.covariance_update(*expected, *batch(3, 40, 33, seed))
    assert_close(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_batch_changes_nothing(kind: str) -> None:
    found = statistics(3, 4, kind)
    triton_impl.covariance_update(*found, *batch(3, 4, 5))
    before = [tensor.clone() for tensor in found]
    triton_impl.covariance_update(*found, *batch(3, 4, 0))
    assert all(map(torch.equal, found, before))


def test_update_invalidates_tensors_saved_for_backward() -> None:
    covariance, *others = statistics(3, 4, "full")
    weight = torch.ones(4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    result = (covariance @ weight).sum()
    triton_impl.covariance_update(covariance, *others, *batch(3, 4, 5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(kind of access, address, bytes) of every element that the interpreter reads or writes, once per launch."""
    found: list[tuple[str, int, int]] = []
    builder, launch, seen = interpreter.InterpreterBuilder, tiles.launch, set[tuple[str, int, int]]()
    load, store = builder.create_masked_load, builder.create_masked_store

    def note(access: str, ptrs: Any, mask: Any) -> None:
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        seen.update((access, address, size) for address in ptrs.data[mask.data].ravel().tolist())

    def counted_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        note("read", ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def counted_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note("write", ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    def counted_launch(*args: Any, **options: Any) -> None:
        launch(*args, **options)
        found.extend(seen)
        seen.clear()

    monkeypatch.setattr(builder, "create_masked_load", counted_load)
    monkeypatch.setattr(builder, "create_masked_store", counted_store)
    monkeypatch.setattr(tiles, "launch", counted_launch)
    return found


@pytest.mark.skipif(
    not isinstance(_mean_update_kernel, interpreter.InterpretedFunction),
    reason="counts what Triton's interpreter reads and writes",
)
@pytest.mark.parametrize("shape", [(10, 84, 64), (40, 130, 4)], ids=["fmnist", "fewer samples than classes"])
def test_update_moves_little_more_than_the_covariances_of_the_batch(
    shape: tuple[int, int, int], traffic: list[tuple[str, int, int]]
) -> None:
    state = statistics(*shape[:2], "full", torch.float32)
    features, labels = batch(*shape)
    triton_impl.covariance_update(*state, features.float(), labels)
    touched = len(labels.unique()) * state[0][0].nbytes
    first, last = state[0].data_ptr(), state[0].data_ptr() + state[0].nbytes
    in_covariance = {
        access: [size for kind, address, size in traffic if kind == access and first <= address < last]
        for access in ("read", "write")
    }
    assert sum(in_covariance["write"]) == touched
    assert touched / 2 < sum(in_covariance["read"]) <= touched  # half of a symmetric matrix is enough
    assert sum(size for _, _, size in traffic) <= 1.1 * 2 * touched


# Curriculum


def curriculum_batch(count: int, seed: int, sets: bool = True, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Index, prediction, confidence, candidates and threshold for 20 instances of 6 classes."""
    generator = torch.Generator().manual_seed(seed)
    index, prediction = (torch.randint(limit, (count,), generator=generator) for limit in (20, 6))
    confidence = torch.rand(count, generator=generator).to(dtype)
    candidates = torch.rand(count, 6, generator=generator) < 0.7
    tensors = [tensor.to(DEVICE) for tensor in (index, prediction, confidence, candidates)]
    return [*tensors[:3], tensors[3] if sets else None, 0.4]


def curriculum_state() -> list[Tensor]:
    count = torch.zeros(7, dtype=torch.int64)
    count[6] = 20
    return [torch.full((20,), 6).to(DEVICE), count.to(DEVICE)]


@pytest.mark.parametrize("block", [4, 64])
@pytest.mark.parametrize("sets", [True, False], ids=["candidate sets", "any class"])
def test_curriculum_update_equals_the_closed_form(block: int, sets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random batches with repeated instances, within one program and across several."""
    monkeypatch.setattr(tiles, "assignment_blocks", lambda: {"BLOCK_N": block, "num_warps": 1, "num_stages": 1})
    expected = curriculum_state()
    found = [guarded(tensor) for tensor in expected]
    for seed in range(20):
        given = curriculum_batch(seed % 14, seed, sets)
        torch_impl.curriculum_update(CurriculumBatch(*expected, *given))
        moved = [*map(guarded, given[:3]), None if given[3] is None else fenced(given[3]), given[4]]
        triton_impl.curriculum_update(CurriculumBatch(*found, *moved))
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    assert found[1][6] < 20
    assert torch.equal(found[1], torch.bincount(found[0], minlength=7))


def test_a_bool_is_a_confidence_of_zero_or_one() -> None:
    found, expected = curriculum_state(), curriculum_state()
    index, prediction, confidence, _, threshold = curriculum_batch(13, 0)
    triton_impl.curriculum_update(CurriculumBatch(*found, index, prediction, confidence >= threshold, None, 1.0))
    torch_impl.curriculum_update(CurriculumBatch(*expected, index, prediction, confidence, None, threshold))
    assert all(map(torch.equal, found, expected))
    assert found[1][6] < 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_confidence_equal_to_the_threshold_counts(dtype: torch.dtype) -> None:
    """0.6 is no float32: the comparison is made in the dtype of the confidence, as in torch."""
    for impl in (triton_impl, torch_impl):
        state = curriculum_state()
        at_and_below = torch.tensor([0.6, 0.6 - 1e-7], dtype=dtype, device=DEVICE)
        number = torch.arange(2, device=DEVICE)
        impl.curriculum_update(CurriculumBatch(*state, number, number, at_and_below, None, 0.6))
        assert state[1].tolist() == [1, 0, 0, 0, 0, 0, 19], impl.__name__


@pytest.mark.parametrize("outside", [-1, 2**40, -(2**40)])
def test_entries_outside_the_state_are_ignored(outside: int) -> None:
    expected = curriculum_state()
    found = [guarded(tensor) for tensor in expected]
    index, prediction, confidence, candidates, threshold = curriculum_batch(9, 3)
    confidence = torch.ones_like(confidence)
    candidates = torch.ones_like(candidates)
    torch_impl.curriculum_update(
        CurriculumBatch(*expected, index[2:], prediction[2:], confidence[2:], candidates[2:], threshold)
    )
    index[0], prediction[1] = outside, outside
    inputs = guarded(index), guarded(prediction), guarded(confidence), fenced(candidates)
    triton_impl.curriculum_update(CurriculumBatch(*found, *inputs, threshold))
    assert all(map(torch.equal, found, expected))
    index[0], prediction[1] = 20, 6  # one past the end
    triton_impl.curriculum_update(CurriculumBatch(*found, index, prediction, confidence, candidates, threshold))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("outside", [-1, 7, 2**40])
def test_a_damaged_assignment_is_not_subtracted_from_any_count(outside: int) -> None:
    assigned, counts = (guarded(tensor) for tensor in curriculum_state())
    assigned[3], before = outside, counts.clone()
    one = torch.tensor([3], device=DEVICE)
    triton_impl.curriculum_update(CurriculumBatch(assigned, counts, one, one + 1, torch.ones_like(one) > 0, None, 1.0))
    before[4] += 1
    assert assigned[3] == 4
    assert torch.equal(counts, before)


@pytest.mark.parametrize("convex", [False, True], ids=["linear", "convex"])
def test_thresholds_have_the_bits_of_the_closed_form(convex: bool) -> None:
    for num_classes in (2, 41, 1500):
        count = torch.randint(1000, (num_classes + 1,), generator=torch.Generator().manual_seed(num_classes))
        for given in (count, torch.zeros_like(count)):
            given[-1] = 10**6  # instances without a class do not count
            found = triton_impl.curriculum_thresholds(guarded(given), 0.7, convex)
            assert torch.equal(found, torch_impl.curriculum_thresholds(given.to(DEVICE), 0.7, convex))


# The module


@pytest.mark.parametrize("kind", KINDS)
def test_loss_module_updates_its_state_with_kernels(kind: str) -> None:
    """Three steps with impl="triton" leave the state that the closed form leaves."""
    states = []
    for impl in ("triton", "torch"):
        criterion = SemanticUpperBoundLoss(30, 5, 4, covariance=kind, threshold=0.3, impl=impl).to(DEVICE)
        with mock.patch.object(tiles, "launch", wraps=tiles.launch) as launch:
            for seed in range(3):
                problem = make_problem(6, 9, 5, 4, dtype=torch.float32, seed=seed).map(lambda tensor: tensor.to(DEVICE))
                generator = torch.Generator().manual_seed(seed)
                criterion(
                    *(problem.labeled_logits, problem.weak_logits, problem.strong_logits, problem.weight),
                    *(problem.labels.to(DEVICE), problem.candidates.to(DEVICE)),
                    labeled_features=torch.randn(6, 4, generator=generator).to(DEVICE),
                    index=torch.randint(30, (9,), generator=generator).to(DEVICE),
                    strength=0.1,
                )
        names = {call.args[0].__name__ for call in launch.call_args_list}
        assert ("_curriculum_update_kernel" in names) == ("_mean_update_kernel" in names) == (impl == "triton")
        states.append(list(criterion.buffers()))
    for ours, theirs in zip(*states, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=16 * EPS, atol=16 * EPS)
    assert states[0][-1][:-1].any()
