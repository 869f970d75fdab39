"""Floating-point operations of one launch of each Triton kernel, including tile padding.

Counts for matrix products are exact. Other counts include only the work per class pair (or per element of a row), which
is nearly all of it; counts per pair come from the inner loops of the kernels, and a test compares them with what
Triton's interpreter executes. Comparisons and selections are not counted.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from triton import cdiv

from benchmarks.gpu_static.ahead_of_time import Launch

LOG_ODDS_PAIR = 6  # exponent, running maximum and sum of log_odds
PROBIT_PAIR = {torch.float32: 65, torch.float64: 91}  # the tail is a polynomial, longer in float64
LOGITS_GRADIENT_PAIR = 6
GRAM_GRADIENT_PAIR = 12
ROW_LOSS_ELEMENT = {torch.float32: 36, torch.float64: 54}
LABEL_ROW_ELEMENT = 6  # exponent, running maximum and sum; as many again for the gradient
COLUMN_GRADIENT_ELEMENT = 5
ACTIVATION_ELEMENT = 3
COVARIANCE_ELEMENT = 6  # outer product of the shifts, then the update
MEAN_ELEMENT, VARIANCE_ELEMENT = 5, 12
VARIANCE_SAMPLE = 4  # sum, centring, square and its sum
THRESHOLD_ELEMENT = 2

Arguments = dict[str, Any]


def launch_operations(launch: Launch) -> tuple[int, int]:
    """Return the operations in matrix products, and all others."""
    return _COUNTS[launch.kernel.__name__](launch.arguments, launch.grid)


def _padded(size: int, block: int) -> int:
    return cdiv(size, block) * block


def _class_gram(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    columns, depth = _padded(a["num_features"], a["BLOCK_D"]), _padded(a["num_features"], a["BLOCK_K"])
    return 2 * prod(grid) * a["BLOCK_M"] * columns * (depth + a["BLOCK_L"]), 0


def _product(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    return 2 * prod(grid) * a["BLOCK_M"] * a["BLOCK_N"] * _padded(a["num_features"], a["BLOCK_K"]), 0


def _product_gram(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    # Only tiles on and above the diagonal are computed.
    num_tiles, depth = grid[2] * grid[1] * (grid[1] + 1) // 2, _padded(a["num_features"], a["BLOCK_K"])
    scaled = num_tiles * a["BLOCK_M"] * depth if a["DIAGONAL"] else 0
    return 2 * num_tiles * a["BLOCK_M"] * a["BLOCK_N"] * depth, scaled


def _class_gram_backward(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    depth, tiles = _padded(a["num_slots"] * a["num_classes"], a["BLOCK_K"]), prod(grid[:2])
    doubled = prod(grid) * a["BLOCK_M"] * a["BLOCK_N"]
    scaled = tiles * depth * a["BLOCK_N"] if a["DIAGONAL"] else 0
    return 2 * tiles * a["BLOCK_M"] * a["BLOCK_N"] * depth, doubled + scaled


def _pairs(a: Arguments, programs: int) -> int:
    """Class pairs of programs that each handle a tile along one axis and stream over the other."""
    outer, inner = ("BLOCK_K", "BLOCK_J") if "grad_logits_ptr" in a else ("BLOCK_J", "BLOCK_K")
    return programs * a[outer] * _padded(a["num_classes"], a[inner])


def _pair(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    both_views = 2 * LOG_ODDS_PAIR + PROBIT_PAIR[a["log_odds_ptr"].dtype]
    labeled = (grid[0] - a["num_unlabeled"]) * grid[1]
    return 0, _pairs(a, a["num_unlabeled"] * grid[1]) * both_views + _pairs(a, labeled) * LOG_ODDS_PAIR


def _rows(a: Arguments) -> int:
    """Rows of logits: one of each labelled sample, two of each unlabelled one."""
    return a["num_labeled"] + 2 * a["num_unlabeled"]


def _gram_gradient(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    # Samples are spread evenly over the slots; only tiles on and above the diagonal are computed.
    rows = grid[2] * _padded(cdiv(_rows(a), grid[2]), a["BLOCK_N"])
    return 0, rows * grid[1] * (grid[1] + 1) // 2 * a["BLOCK_L"] ** 2 * GRAM_GRADIENT_PAIR


def _preparation(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    # Every element of the weight is added to a mean, which is then subtracted from it.
    return 0, 2 * (grid[0] - 1) * a["BLOCK_D"] * _padded(a["num_classes"], a["BLOCK_L"])


def _row_loss(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    return 0, prod(grid) * _padded(a["num_classes"], a["BLOCK_L"]) * ROW_LOSS_ELEMENT[a["slopes_ptr"].dtype]


def _totals(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    batches = a["num_labeled"], a["num_unlabeled"], a["num_losses"] - a["num_labeled"] - a["num_unlabeled"]
    losses = sum(_padded(count, a["BLOCK_N"]) + a["BLOCK_N"] for count in batches)
    return 0, losses + a["num_partials"] * (grid[0] - 1) * a["BLOCK_N"]


def _full_columns(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    columns, depth = _padded(a["num_features"], a["BLOCK_N"]), _padded(a["num_features"], a["BLOCK_K"])
    rows = prod(grid) * a["BLOCK_M"]
    # Rows are subtracted for every block of the product, and once more for the quadratic form, multiplied and added.
    return 2 * rows * columns * depth, rows * (columns // a["BLOCK_N"] * depth + 3 * columns)


def _diagonal_columns(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    # A difference, its weighted square and the sum.
    return 0, 4 * prod(grid) * a["BLOCK_U"] * a["BLOCK_L"] * _padded(a["num_features"], a["BLOCK_D"])


def _label_rows(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    passes = 1 if a["grad_logits_ptr"] is None else 2
    return 0, passes * grid[0] * _padded(a["num_classes"], a["BLOCK_L"]) * LABEL_ROW_ELEMENT


def _label_column_gradient(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    # Samples are spread evenly over the slots.
    rows = grid[1] * _padded(cdiv(a["order_ptr"].shape[0], grid[1]), a["BLOCK_N"])
    return 0, rows * grid[0] * a["BLOCK_L"] * COLUMN_GRADIENT_ELEMENT


def _label_weight_gradient(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    elements = a["num_slots"] * prod(grid[:2]) * a["BLOCK_M"] * a["BLOCK_N"]
    if a["DIAGONAL"]:
        return 0, 5 * elements  # a difference, two products and two sums
    if a["product_ptr"] is not None:
        return 0, 3 * elements
    depth = _padded(a["num_features"], a["BLOCK_K"])
    return 2 * elements * depth, 3 * elements + elements // a["BLOCK_N"] * depth


def _cross_entropy_totals(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    # The own gradients are those of as many rows as there are slots.
    losses, columns = _padded(a["num_losses"], a["BLOCK_N"]) + a["BLOCK_N"], grid[0] * a["BLOCK_N"]
    return 0, losses + columns * ((grid[1] - 1) * a["num_partials"] + a["num_slots"] * a["num_tiles"])


def _activation(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    return 0, grid[0] * _padded(a["num_classes"], a["BLOCK_L"]) * ACTIVATION_ELEMENT


def _covariance_update(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    # Members are spread evenly over the slots, each in a block of its own while there are enough; only tiles on and
    # above the diagonal are computed.
    num_tiles, blocks = grid[0] * grid[1] * (grid[1] + 1) // 2, cdiv(a["num_samples"], a["BLOCK_N"])
    used = min(blocks, cdiv(a["num_samples"], grid[0]))
    rows = used * a["BLOCK_N"]
    product = 2 * a["BLOCK_D"] ** 2 * rows
    return num_tiles * product, num_tiles * a["BLOCK_D"] * (2 * rows + COVARIANCE_ELEMENT * a["BLOCK_D"])


def _mean_update(a: Arguments, grid: tuple[int, ...]) -> tuple[int, int]:
    per_sample, per_feature = (VARIANCE_SAMPLE, VARIANCE_ELEMENT) if a["DIAGONAL"] else (1, MEAN_ELEMENT)
    samples = _padded(a["num_samples"], a["BLOCK_N"])
    # Two more for every value that is first looked at for not being finite.
    return 0, grid[0] * _padded(a["num_features"], a["BLOCK_D"]) * ((2 + per_sample) * samples + per_feature)


_COUNTS: dict[str, Callable[[Arguments, tuple[int, ...]], tuple[int, int]]] = {
    "_class_activation_kernel": _activation,
    "_covariance_update_kernel": _covariance_update,
    "_mean_update_kernel": _mean_update,
    "_curriculum_update_kernel": lambda a, grid: (0, 0),  # integers only
    "_curriculum_thresholds_kernel": lambda a, grid: (0, _padded(a["num_classes"], a["BLOCK_L"]) * THRESHOLD_ELEMENT),
    "_preparation_kernel": _preparation,
    "_class_gram_kernel": _class_gram,
    "_product_kernel": _product,
    "_product_gram_kernel": _product_gram,
    "_class_gram_backward_kernel": _class_gram_backward,
    "_pair_kernel": _pair,
    "_row_loss_kernel": _row_loss,
    "_totals_kernel": _totals,
    "_log_odds_kernel": lambda a, grid: (0, _pairs(a, prod(grid)) * LOG_ODDS_PAIR),
    "_logits_gradient_kernel": lambda a, grid: (0, _pairs(a, _rows(a) * grid[1]) * LOGITS_GRADIENT_PAIR),
    "_gram_gradient_kernel": _gram_gradient,
    "_probit_kernel": lambda a, grid: (0, _pairs(a, prod(grid)) * PROBIT_PAIR[a["probabilities_ptr"].dtype]),
    "_label_groups_kernel": lambda a, grid: (0, _padded(a["num_samples"], a["BLOCK_N"]) + a["BLOCK_N"]),
    "_full_columns_kernel": _full_columns,
    "_diagonal_columns_kernel": _diagonal_columns,
    "_label_rows_kernel": _label_rows,
    "_label_column_gradient_kernel": _label_column_gradient,
    "_label_weight_gradient_kernel": _label_weight_gradient,
    "_cross_entropy_totals_kernel": _cross_entropy_totals,
}
