"""The public functions with impl="triton": gradients, operators, compilation and memory.

Problems are as small as possible, because most tests run on a GPU or in Triton's interpreter.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", minversion="3.5")

from triton_cases import DEVICE, LOW_DTYPES, MARKS

import plsp_kernels
from benchmarks.gpu_static.ahead_of_time import recording
from benchmarks.gpu_static.calls import LOSS, call
from benchmarks.shapes import SHAPES
from cases import DIFFERENTIABLE, TERMS, Problem, make_problem
from plsp_kernels import SemanticLoss
from plsp_kernels.triton_impl import tiles

pytestmark = MARKS

MASKS = [
    [name for name, bit in zip(DIFFERENTIABLE, f"{mask:04b}", strict=True) if bit == "1"]
    for mask in (1, 2, 4, 8, 11, 15)
]


def problem_of(dtype: torch.dtype = torch.float64, **options: Any) -> Problem:
    """A step of three classes whose numbers are exact in every dtype."""
    problem = make_problem(2, 3, 3, 5, **options)
    return problem.map(lambda tensor: tensor.bfloat16().to(dtype).to(DEVICE)).map(
        lambda tensor: tensor.to(DEVICE), ("labels", "candidates", "pseudo_labels", "labeled_candidates")
    )


def weighted(loss: SemanticLoss) -> Tensor:
    """A scalar in which every value has a weight of its own."""
    return sum(weight * getattr(loss, name) for name, weight in zip(TERMS, (0.7, 0.3, -2.0, 5.0), strict=True))


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    for name, gradient in found.items():
        assert gradient.dtype == wanted[name].dtype
        torch.testing.assert_close(gradient, wanted[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scalar", [lambda loss: 3 * loss.total, weighted], ids=["total", "weighted"])
@pytest.mark.parametrize("names", MASKS, ids="-".join)
def test_gradients_equal_the_closed_form_for_any_inputs_that_need_them(
    names: list[str], scalar: Callable[[SemanticLoss], Tensor]
) -> None:
    problem = problem_of().leaves(names)
    found, wanted = (
        problem.gradients(scalar(problem.loss(impl=impl, thresholds=0.1, ss_weight=0.6)), names)
        for impl in ("triton", "torch")
    )
    assert_close(found, wanted, 1e-12)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_gradients_have_the_dtype_of_their_inputs(dtype: torch.dtype) -> None:
    problem = problem_of(dtype).leaves()
    found, wanted = (
        problem.gradients(problem.loss(impl=impl, thresholds=0.1, ss_weight=0.6).total) for impl in ("triton", "torch")
    )
    assert_close(found, wanted, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_cross_entropy_and_gradients_equal_the_closed_form(dtype: torch.dtype, reduction: str) -> None:
    problem = problem_of(dtype).leaves(("weak_logits", "weight"))

    def run(impl: str) -> dict[str, Tensor]:
        losses = plsp_kernels.semantic_cross_entropy(
            *(problem.weak_logits, problem.weight, problem.covariance, problem.pseudo_labels),
            strength=0.3,
            class_weight=problem.class_thresholds,
            label_smoothing=0.1,
            reduction=reduction,
            impl=impl,
        )
        weights = torch.arange(losses.numel(), device=DEVICE).view(losses.shape) - 2.5
        return problem.gradients((losses * weights).sum(), ("weak_logits", "weight")) | {"losses": losses.detach()}

    assert_close(run("triton"), run("torch"), 1e-12 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps)


# Operators and compilation


def test_opcheck_passes() -> None:
    problem = problem_of(torch.float32)
    numbers = torch.tensor(0.3), torch.tensor(0.7)
    gram, product = torch.ops.plsp.class_gram(problem.weight, problem.covariance, problem.labels, True, "torch")
    rows = problem.labeled_logits, gram, torch.arange(2, device=DEVICE), numbers[0]
    log_odds = torch.ops.plsp.log_odds(*rows, "torch")
    labeled = problem.labeled_logits, problem.weight, problem.covariance, problem.labels
    views = problem.labeled_logits, problem.weak_logits.half(), problem.strong_logits
    step = *views, problem.weight, problem.covariance, problem.labels, problem.candidates
    upstream = torch.tensor([0.5, 0.0, 2.0], device=DEVICE)
    statistics = problem.covariance, torch.zeros_like(problem.weight), *torch.zeros(2, 3, dtype=int, device=DEVICE)
    counts = torch.tensor([0, 0, 0, 9], device=DEVICE)
    unlabeled = torch.arange(3, device=DEVICE), problem.pseudo_labels, problem.weak_logits[:, 0]
    calls = {
        "class_activation_labels": (problem.weak_logits, problem.candidates),
        "class_gram": (problem.weight, problem.covariance, problem.labels, True),
        "class_gram_backward": (gram + gram.mT, problem.weight, problem.covariance, problem.labels, product),
        "log_odds": rows,
        "log_odds_backward": (*rows, log_odds, log_odds, True, True),
        "cross_entropy": (*labeled, problem.class_thresholds, numbers[0], 0.1, -100, "mean", None, True, True),
        "covariance_update": (*statistics, problem.weight[:2], problem.labels),
        "curriculum_thresholds": (counts, 0.7, True),
        "curriculum_update": (counts.new_full((9,), 3), counts, *unlabeled, problem.candidates, 0.5),
        "probit_probabilities": (*rows, 1.2),
        "upper_bound": (*step, None, None, problem.class_thresholds, *numbers, 1.2, True, upstream, True, True),
    }
    for name, args in calls.items():
        torch.library.opcheck(getattr(torch.ops.plsp, name).default, (*args, "triton"))


def test_compiled_step_equals_eager() -> None:
    def step(problem: Problem, strength: Tensor) -> Tensor:
        return problem.loss(impl="triton", strength=strength, thresholds=0.1, ss_weight=0.6).total

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    problem = problem_of().leaves()
    for value in (0.3, 0.5):  # the graph reads the tensor
        strength = torch.tensor(value, dtype=torch.float64, device=DEVICE)
        found, wanted = (problem.gradients(function(problem, strength)) for function in (compiled, step))
        assert_close(found, wanted, 0.0)


def test_compiled_functions_equal_eager() -> None:
    problem = problem_of()
    rows = problem.weak_logits, problem.weight, problem.covariance, problem.pseudo_labels
    for name in ("semantic_log_softmax", "semantic_cross_entropy", "probit_probabilities"):
        function = getattr(plsp_kernels, name)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(
            compiled(*rows, strength=0.3, impl="triton"), function(*rows, strength=0.3, impl="triton"), rtol=0, atol=0
        )


# Memory, computed on tensors without storage


class PeakMemory(TorchDispatchMode):
    """Records the largest number of bytes that tensors without storage would hold at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                storage = tensor.untyped_storage()
                self.live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


@pytest.mark.parametrize(
    ("function", "shape", "mebibytes"),
    [
        (LOSS, "cifar100", 64),
        (LOSS, "large", 512),
        (LOSS, "large-diagonal", 512),
        ("semantic_cross_entropy", "cifar100", 32),
        ("semantic_cross_entropy", "large", 64),
        ("semantic_cross_entropy", "large-diagonal", 96),
    ],
)
def test_extra_memory_stays_within_the_budget(function: str, shape: str, mebibytes: int) -> None:
    def launch(*args: Any, **options: Any) -> None:
        """Unlike the recorder, keep no reference to the arguments."""

    with PeakMemory() as memory, recording(), mock.patch.object(tiles, "launch", launch):
        call(function, SHAPES[shape], "float32", "triton")
    num_classes, num_features, kind = SHAPES[shape][3:]
    covariance = 4 * num_classes * num_features * (num_features if kind == "full" else 1)
    assert memory.peak - covariance <= mebibytes * 2**20
