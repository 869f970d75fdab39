"""The pair work of a small step as one C function: with few classes, operator calls cost more than what they compute.

The closed form of `torch_impl` takes it for float32 on a CPU. Where the extension could not be compiled, on other
devices and for larger steps, which fill the threads and matrix products of ATen, its operators serve.
"""

import torch
from torch import Tensor

try:
    from plsp_kernels.native import _kernels
except ImportError:
    _kernels = None  # type: ignore[assignment]

VERSIONS = () if _kernels is None else _kernels.VERSIONS
"""What it was compiled for and this processor can run, the fastest last; empty if it is not there at all."""
MOST_CLASSES = 24
MOST_PAIRS = 2**20
"""A step with more classes, or more pairs of classes over all its rows, is left to the operators."""


def serves(rows: Tensor) -> bool:
    """Whether a step with these rows of logits (N, l) is for the C function."""
    count, num_classes = rows.shape
    return (
        len(VERSIONS) > 0
        and rows.dtype == torch.float32
        and rows.device.type == "cpu"
        and num_classes <= MOST_CLASSES
        and count * num_classes**2 <= MOST_PAIRS
    )


def upper_bound(
    rows: Tensor,
    gram: Tensor,
    slots: Tensor,
    labels: Tensor,
    candidates: Tensor,
    labeled_candidates: Tensor | None,
    thresholds: Tensor,
    strength: float,
    ss_weight: float,
    beta: float,
    argmax_in_candidates: bool,
    need_rows: bool,
    need_gram: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As torch_impl.upper_bound."""
    num_labeled, (num_unlabeled, num_classes) = labels.shape[0], candidates.shape
    rows, gram, thresholds = rows.contiguous(), gram.contiguous(), thresholds.to(rows.dtype).contiguous()
    slots, labels, candidates = slots.contiguous(), labels.contiguous(), candidates.contiguous()
    if labeled_candidates is not None:
        labeled_candidates = labeled_candidates.contiguous()
    outputs = (
        rows.new_empty(4),
        torch.empty_like(rows),
        torch.empty_like(rows),
        torch.empty_like(rows) if need_rows else rows.new_empty(0),
        torch.empty_like(gram) if need_gram else gram.new_empty(0),
        rows.new_empty(num_unlabeled),
        labels.new_empty(num_unlabeled),
        candidates.new_empty(num_unlabeled),
    )
    inputs = (rows, gram, slots, labels, candidates, labeled_candidates, thresholds)
    _kernels.upper_bound(
        len(VERSIONS) - 1,
        (num_labeled, num_unlabeled, num_classes, gram.shape[0]),
        tuple(0 if tensor is None else tensor.data_ptr() for tensor in inputs),
        (strength, ss_weight, beta),
        argmax_in_candidates,
        tuple(tensor.data_ptr() for tensor in outputs),  # 0 for those that are empty
    )
    return outputs
