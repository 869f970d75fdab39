"""Tiles chosen by timing. Without a GPU the times are invented, and the kernels run in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.5")

from triton.runtime.errors import OutOfResources
from triton_cases import DEVICE, POISONED, assert_same

from plsp_kernels import torch_impl, triton_impl
from plsp_kernels.triton_impl import tiles, tuning
from plsp_kernels.triton_impl.tiles import Blocks

pytestmark = POISONED

NAMES = ("_product_kernel", "_product_gram_kernel", "_class_gram_backward_kernel")


class Timer:
    """Takes the place of `tuning.milliseconds` and prefers tilings of most columns."""

    def __init__(self) -> None:
        self.timed: list[Blocks] = []

    def __call__(self, run: object, blocks: Blocks) -> float:
        self.timed.append(blocks)
        return 1.0 / blocks["BLOCK_N"]


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    timer = Timer()
    monkeypatch.setattr(tuning, "milliseconds", timer)
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "_can_time", lambda tensor: True)
    return timer


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """Tile of the last launch of each kernel."""
    found: dict[str, tuple[int, int]] = {}
    launch = tiles.launch

    def recorded(kernel: object, *args: object, **options: int) -> None:
        found[kernel.__name__] = options.get("BLOCK_M", 0), options.get("BLOCK_N", 0)  # type: ignore[attr-defined]
        launch(kernel, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tiles, "launch", recorded)
    return found


def gram_and_gradient(num_slots: int = 2) -> tuple[Tensor, ...]:
    """Results of the three kernels at 130 classes, checked against the closed form."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(130, 130, generator=generator).to(DEVICE)
    factor = torch.randn(130, 130, 5, generator=generator).to(DEVICE)
    covariance, classes = factor @ factor.mT, torch.arange(num_slots, device=DEVICE)
    gram, product = triton_impl.class_gram(weight, covariance, classes, True)
    gradient = triton_impl.class_gram_backward(gram + gram.mT, weight, covariance, classes, product)
    expected = torch_impl.class_gram(weight, covariance, classes, True)
    assert_same((gram, product), expected, 1e-5)
    assert_same(gradient, torch_impl.class_gram_backward(gram + gram.mT, weight, covariance, classes, product), 1e-5)
    return gram, product, gradient


def test_first_tiling_is_used_by_default(timer: Timer, used: dict[str, tuple[int, int]]) -> None:
    gradient = gram_and_gradient()[-1]
    assert timer.timed == []
    first = [tiles.matrix_tilings(130, 130, gradient, square=square)[0] for square in (False, True, False)]
    assert used == {name: (blocks["BLOCK_M"], blocks["BLOCK_N"]) for name, blocks in zip(NAMES, first, strict=True)}


def test_fastest_tiling_is_used_and_timed_once_per_shape(
    timer: Timer, used: dict[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "AUTOTUNE", True)
    gram_and_gradient()
    assert used == {NAMES[0]: (64, 128), NAMES[1]: (128, 128), NAMES[2]: (64, 128)}
    timed = len(timer.timed)
    assert timed == 9  # three tilings each
    gram_and_gradient()
    assert len(timer.timed) == timed
    gram_and_gradient(num_slots=1)
    assert len(timer.timed) == 2 * timed


@pytest.mark.parametrize("save_product", [True, False])
def test_fused_gram_kernel_gives_the_same_results_with_every_tiling(
    save_product: bool, timer: Timer, used: dict[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(41, 19, generator=generator).to(DEVICE)
    factor = torch.randn(41, 19, 5, generator=generator).to(DEVICE)
    covariance, classes = factor @ factor.mT, torch.arange(2, device=DEVICE)
    expected = torch_impl.class_gram(weight, covariance, classes, save_product)
    tilings = tiles.gram_tilings(41, weight)
    assert len(tilings) == 3
    monkeypatch.setattr(tuning, "AUTOTUNE", True)
    for wanted in tilings:
        monkeypatch.setattr(tuning, "_chosen", {})
        monkeypatch.setattr(tuning, "milliseconds", lambda run, blocks, wanted=wanted: float(blocks != wanted))
        assert_same(triton_impl.class_gram(weight, covariance, classes, save_product), expected, 1e-5)
        assert used["_class_gram_kernel"][0] == wanted["BLOCK_M"]


def test_nothing_is_timed_where_timing_is_impossible(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, while a graph is captured, and without programs."""
    monkeypatch.setattr(tuning, "AUTOTUNE", True)
    weight = torch.ones(130, 19, device=DEVICE)
    triton_impl.class_gram(weight, torch.ones(130, 19, 19, device=DEVICE), torch.arange(0, device=DEVICE), True)
    assert timer.timed == []
    monkeypatch.setattr(tuning, "_can_time", lambda tensor: False)
    gram_and_gradient()
    assert timer.timed == []


def test_tiling_that_does_not_fit_is_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    def do_bench(run: object, **options: object) -> float:
        raise OutOfResources(300_000, 100_000, "shared memory")

    monkeypatch.setattr(tuning.triton.testing, "do_bench", do_bench)
    assert tuning.milliseconds(lambda blocks: None, {}) == float("inf")


def test_float64_has_one_tiling() -> None:
    assert len(tiles.matrix_tilings(1000, 1000, torch.zeros(1, dtype=torch.float64))) == 1
    assert len(tiles.gram_tilings(100, torch.zeros(1, dtype=torch.float64))) == 1
