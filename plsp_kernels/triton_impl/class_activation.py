"""The candidate with the highest class activation value: argmax_{j∈C_i} z_ij |z_ij - 1|. Ties: lowest class."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from plsp_kernels.triton_impl import tiles


@triton.jit
def _class_activation_kernel(
    logits_ptr,  # (N, l)
    candidates_ptr,  # (N, l) uint8
    labels_ptr,  # (N,)
    num_classes,
    stride_logits,
    stride_candidates,
    LOWEST: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    candidates_ptr += row * stride_candidates
    DTYPE: tl.constexpr = tl.float64 if logits_ptr.dtype.element_ty == tl.float64 else tl.float32
    highest = tl.full((), float("-inf"), DTYPE)
    label = tl.full((), 0, tl.int32)
    for start in range(0, num_classes, BLOCK_L):
        j = start + tl.arange(0, BLOCK_L)
        candidate = tl.load(candidates_ptr + j, mask=j < num_classes, other=0) != 0
        z = tl.load(logits_ptr + j, mask=j < num_classes, other=0.0).to(DTYPE)
        # Bounded, so that a candidate of any value stays above the non-candidates.
        activation = tl.where(candidate, tl.maximum(z * tl.abs(z - 1.0), LOWEST), float("-inf"))
        tile_highest = tl.max(activation, 0)
        label = tl.where(tile_highest > highest, start + tl.argmax(activation, 0), label)
        highest = tl.maximum(highest, tile_highest)
    tl.store(labels_ptr + row, label.to(tl.int64))


def class_activation_labels(logits: Tensor, candidates: Tensor) -> Tensor:
    """Labels (N,) int64 from logits (N, l) and candidates (N, l)."""
    logits, candidates = tiles.dense_rows(logits), tiles.dense_rows(candidates).view(torch.uint8)
    labels = candidates.new_empty(logits.shape[0], dtype=torch.int64)
    tiles.launch(
        _class_activation_kernel,
        labels.shape,
        logits,
        candidates,
        labels,
        logits.shape[1],
        logits.stride(0),
        candidates.stride(0),
        LOWEST=torch.finfo(tiles.compute_dtype(logits)).min,
        **tiles.row_blocks(logits.shape[1]),
    )
    return labels
