"""Small steps in C, one function each: with few classes, operator calls cost more than what they compute.

The closed form takes them for float32 on a CPU. Where the extension could not be compiled, on other devices and for
larger steps, which fill the threads and matrix products of ATen, the operators of `torch_impl` serve.
"""

import torch
from torch import Tensor

try:
    from plsp_kernels.native import _kernels
except ImportError:
    _kernels = None  # type: ignore[assignment]

VERSIONS = () if _kernels is None else _kernels.VERSIONS
"""What it was compiled for and this processor can run, the fastest last; empty if it is not there at all."""

MOST_OUTER_PRODUCTS = 2**21
"""An update of class statistics with more multiplications for its outer products is left to the operators."""

MOST_CLASSES = 24
MOST_PAIRS = 2**20
MOST_PRODUCTS = 2**24
"""A step with more classes, more pairs of classes over its rows of logits, or more multiplications for its Gram
matrices is left to the operators."""


def takes(tensor: Tensor) -> bool:
    """Whether it is there for tensors like this one."""
    return len(VERSIONS) > 0 and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def serves(count: int, weight: Tensor, covariance: Tensor) -> bool:
    """Whether a step of this many samples is small enough, and has samples enough to give each class its own place."""
    num_classes, num_features = weight.shape
    products = num_classes**2 * num_features * (2 * num_classes + (num_features if covariance.dim() == 3 else 1))
    return (
        takes(weight)
        and num_classes <= min(MOST_CLASSES, count)
        and 2 * count * num_classes**2 <= MOST_PAIRS
        and products <= MOST_PRODUCTS
    )


def upper_bound(
    labeled: Tensor,
    strong: Tensor,
    weak: Tensor,
    weight: Tensor,
    covariance: Tensor,
    labels: Tensor,
    pseudo_labels: Tensor,
    candidates: Tensor,
    labeled_candidates: Tensor | None,
    thresholds: Tensor,
    strength: float,
    ss_weight: float,
    beta: float,
    argmax_in_candidates: bool,
    need_logits: bool,
    need_weight: bool,
) -> tuple[Tensor, ...]:
    """What the operator plsp::upper_bound returns."""
    (num_labeled, num_classes), num_unlabeled, num_features = labeled.shape, weak.shape[0], weight.shape[1]
    num_rows = num_labeled + 2 * num_unlabeled + (0 if labeled_candidates is None else num_labeled)
    diagonal = covariance.dim() == 2
    saves_product = need_weight and not diagonal
    classifier = weight, covariance.to(weight.dtype)
    sets = labels, pseudo_labels, candidates, labeled_candidates
    inputs = (labeled, strong, weak, *classifier, *sets, thresholds.to(weight.dtype))
    dense = [None if tensor is None else tensor.contiguous() for tensor in inputs]
    outputs = (
        weight.new_empty(4),
        weight.new_empty((num_rows, num_classes) if need_logits else 0),
        weight.new_empty(weight.shape if need_weight else 0),
        weight.new_empty(num_rows, num_classes),
        weight.new_empty(num_rows, num_classes),
        weight.new_empty(weight.shape),
        weight.new_empty(num_classes, num_classes, num_classes),
        weight.new_empty(num_classes if saves_product else 0, num_classes, num_features),
        weight.new_empty(num_unlabeled),
        labels.new_empty(num_unlabeled),
        candidates.new_empty(num_unlabeled),
    )
    _kernels.upper_bound(
        len(VERSIONS) - 1,
        (num_labeled, num_unlabeled, num_classes, num_features),
        tuple(0 if tensor is None else tensor.data_ptr() for tensor in dense),
        (strength, ss_weight, beta),
        diagonal,
        argmax_in_candidates,
        tuple(tensor.data_ptr() for tensor in outputs),  # 0 for those that are empty
    )
    return outputs


def serves_update(covariance: Tensor, mean: Tensor, count: Tensor, features: Tensor) -> bool:
    """Whether an update of these statistics is small enough; they are written where they lie."""
    in_place = covariance.is_contiguous() and mean.is_contiguous() and count.is_contiguous()
    products = features.numel() * (features.shape[1] if covariance.dim() == 3 else 1)
    return takes(covariance) and takes(mean) and in_place and products <= MOST_OUTER_PRODUCTS


def covariance_update(covariance: Tensor, mean: Tensor, count: Tensor, features: Tensor, labels: Tensor) -> None:
    """As torch_impl.covariance_update."""
    features, labels = features.contiguous(), labels.contiguous()
    tensors = covariance, mean, count, features, labels
    _kernels.covariance_update(
        len(VERSIONS) - 1,
        (*mean.shape, features.shape[0]),
        tuple(tensor.data_ptr() for tensor in tensors),
        covariance.dim() == 2,
    )
    # Autograd has not seen that they were written, and must know unless it never looks at them.
    torch.autograd.graph.increment_version([state for state in tensors[:3] if not state.is_inference()])


def class_activation_labels(logits: Tensor, candidates: Tensor) -> Tensor:
    """As the function of the reference, for float32 on a CPU."""
    labels = torch.empty(logits.shape[0], dtype=torch.int64)
    logits, candidates = logits.contiguous(), candidates.contiguous()
    count, num_classes = logits.shape
    _kernels.class_activation_labels(count, num_classes, logits.data_ptr(), candidates.data_ptr(), labels.data_ptr())
    return labels
