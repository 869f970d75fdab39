"""Floating-point operations of one launch of each Triton kernel, the padding of its tiles included.

Products of matrices are exact. Of the rest only what is done per pair of classes (or per element of a row) counts,
which is nearly all; the numbers per pair are those of the kernels' inner loops, and a test holds them to what Triton's
interpreter executes. Comparisons and selections are no operations.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from triton import cdiv

from plsp_kernels.triton_impl.aot import Launch

ODDS_PAIR = 6  # exponent, running maximum and sum of log_odds
PROBIT_PAIR = {torch.float32: 65, torch.float64: 91}  # the tail is a polynomial, longer in float64
LOGITS_GRADIENT_PAIR = 6
GRAM_GRADIENT_PAIR = 12
ROW_LOSS_ELEMENT = {torch.float32: 36, torch.float64: 54}
TARGET_ELEMENT = 9

Arguments = dict[str, Any]


def launch_operations(launch: Launch) -> tuple[int, int]:
    """Operations in products of matrices, and all others."""
    return _COUNTS[launch.kernel.__name__](launch.arguments, launch.grid)


def _padded(size: int, block: int) -> int:
    return cdiv(size, block) * block


def _class_gram(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    columns, depth = _padded(a["num_features"], a["BLOCK_D"]), _padded(a["num_features"], a["BLOCK_K"])
    return 2 * prod(grid) * a["BLOCK_M"] * columns * (depth + a["BLOCK_L"]), 0


def _matrix_product(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    depth = _padded(a["num_features"], a["BLOCK_K"])
    scaled = prod(grid) * a["BLOCK_M"] * depth if a.get("DIAGONAL") else 0
    return 2 * prod(grid) * a["BLOCK_M"] * a["BLOCK_N"] * depth, scaled


def _class_gram_backward(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    depth, tiles = _padded(a["num_pairs"], a["BLOCK_K"]), prod(grid[1:])
    doubled = prod(grid) * a["BLOCK_M"] * a["BLOCK_N"]
    scaled = tiles * depth * a["BLOCK_N"] if a["DIAGONAL"] else 0
    return 2 * tiles * a["BLOCK_M"] * a["BLOCK_N"] * depth, doubled + scaled


def _pairs(a: Arguments, programs: int) -> int:
    """Class pairs of programs that each take a tile of one class and stream over the other."""
    outer, inner = ("BLOCK_K", "BLOCK_J") if "grad_logits_ptr" in a else ("BLOCK_J", "BLOCK_K")
    return programs * a[outer] * _padded(a["num_classes"], a[inner])


def _pair(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    both_views = 2 * ODDS_PAIR + PROBIT_PAIR[a["odds_ptr"].dtype]
    labeled = (grid[0] - a["num_unlabeled"]) * grid[1]
    return 0, _pairs(a, a["num_unlabeled"] * grid[1]) * both_views + _pairs(a, labeled) * ODDS_PAIR


def _gram_gradient(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    # Samples spread evenly over the slots; only tiles on and above the diagonal work.
    rows = grid[0] * _padded(cdiv(a["order_ptr"].shape[0], grid[0]), a["BLOCK_N"])
    return 0, rows * grid[1] * (grid[1] + 1) // 2 * a["BLOCK_L"] ** 2 * GRAM_GRADIENT_PAIR


def _row_loss(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    return 0, prod(grid) * _padded(a["num_classes"], a["BLOCK_L"]) * ROW_LOSS_ELEMENT[a["odds_ptr"].dtype]


def _terms(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    batches = a["num_labeled"], a["num_unlabeled"], a["num_rows"] - a["num_labeled"] - a["num_unlabeled"]
    return 0, sum(_padded(count, a["BLOCK_N"]) + a["BLOCK_N"] for count in batches)


def _target(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    return 0, grid[0] * _padded(a["num_classes"], a["BLOCK_L"]) * TARGET_ELEMENT


_COUNTS: dict[str, Callable[[Arguments, tuple[int, ...]], tuple[int, int]]] = {
    "_class_gram_kernel": _class_gram,
    "_product_kernel": _matrix_product,
    "_product_gram_kernel": _matrix_product,
    "_class_gram_backward_kernel": _class_gram_backward,
    "_pair_kernel": _pair,
    "_row_loss_kernel": _row_loss,
    "_terms_kernel": _terms,
    "_log_odds_kernel": lambda a, grid: (0, _pairs(a, prod(grid)) * ODDS_PAIR),
    "_logits_gradient_kernel": lambda a, grid: (0, _pairs(a, prod(grid)) * LOGITS_GRADIENT_PAIR),
    "_gram_gradient_kernel": _gram_gradient,
    "_probit_kernel": lambda a, grid: (0, _pairs(a, prod(grid)) * PROBIT_PAIR[a["probabilities_ptr"].dtype]),
    "_target_log_odds_kernel": _target,
    "_target_logits_gradient_kernel": _target,
    # Each sample is added once to the column of its target, then every column is scaled.
    "_target_pair_gradient_kernel": lambda a, grid: (
        0,
        (a["order_ptr"].shape[0] + grid[0]) * _padded(a["num_classes"], a["BLOCK_L"]),
    ),
}
