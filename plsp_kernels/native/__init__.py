"""Small steps in C, one call each: with few classes, operator overhead exceeds the arithmetic.

The extension is optional and serves float32 on the CPU. `step_refusal`, `batch_refusal`, `update_refusal` and
`labels_refusal` return why a call cannot be served, or None; `step_pays`, `batch_pays` and `update_pays` return whether
C is faster than ATen operators. C works on raw addresses: every tensor is validated before its address is taken, and C
checks the range of class numbers before it writes anything.
"""

import torch
from torch import Tensor

from plsp_kernels.batch import CrossEntropyResult, LabeledBatch
from plsp_kernels.step import Step, StepResult, num_samples, replace

try:
    from plsp_kernels.native import _kernels
except ImportError:
    _kernels = None  # type: ignore[assignment]

VERSIONS: tuple[str, ...] = () if _kernels is None else _kernels.VERSIONS
"""Compiled versions that this processor can run, fastest last; empty if the extension is not built. The last one is
used; tests shorten the tuple to select another."""

_CPU = torch.device("cpu")
MOST_CLASSES = 48
MOST_COLUMN_CLASSES = 128
"""Limit on the classes of a cross-entropy, which needs one column of class pairs only."""
MOST_PAIRS = 2**21
"""Limit on class pairs, summed over the rows of a step."""
MOST_PRODUCTS = 2**26
"""Limit on multiplications for the Gram matrices of a step, or for W Σ_y of a cross-entropy."""
MOST_DIAGONAL_PRODUCTS = 2**22
"""Limit on multiplications for the columns of a cross-entropy with diagonal covariances."""
MOST_LOGITS = 2**16
"""Limit on the logits of a cross-entropy."""
MOST_OUTER_PRODUCTS = 2**21
"""Limit on multiplications for the outer products of a covariance update."""


def step_refusal(step: Step) -> str | None:
    """Return why the step cannot be served, or None. Logits and weight may still be in half precision."""
    refusal = _refusal(step.weight, step.labeled_logits, step.weak_logits, step.strong_logits)
    if refusal is not None:
        return refusal
    num_classes = step.weight.shape[0]
    if num_classes > MOST_CLASSES:
        return f"more than {MOST_CLASSES} classes"
    # C has a slot for every class; the other implementations never have more slots than samples.
    return "fewer samples than classes" if num_classes > num_samples(step) else None


def step_pays(step: Step) -> bool:
    """Return whether the step is small enough to be faster in C than in ATen operators."""
    num_classes, num_features = step.weight.shape
    width = num_features if step.covariance.dim() == 3 else 1
    products = num_classes**2 * num_features * (2 * num_classes + width)
    return 2 * num_samples(step) * num_classes**2 <= MOST_PAIRS and products <= MOST_PRODUCTS


def batch_refusal(batch: LabeledBatch) -> str | None:
    """Return why the cross-entropy cannot be served, or None. Logits and weight may still be in half precision."""
    refusal = _refusal(batch.weight, batch.logits)
    if refusal is None and batch.weight.shape[0] > MOST_COLUMN_CLASSES:
        return f"more than {MOST_COLUMN_CLASSES} classes"
    return refusal


def batch_pays(batch: LabeledBatch) -> bool:
    """Return whether the cross-entropy is small enough to be faster in C than in ATen operators."""
    num_classes, num_features = batch.weight.shape
    if batch.logits.numel() > MOST_LOGITS:
        return False
    if batch.covariance.dim() == 2:
        return batch.logits.numel() * num_features <= MOST_DIAGONAL_PRODUCTS
    return num_classes**2 * num_features**2 <= MOST_PRODUCTS


def update_refusal(covariance: Tensor, mean: Tensor, count: Tensor, skipped: Tensor, features: Tensor) -> str | None:
    """Return why the update cannot be served, or None. Features may still have another floating-point dtype."""
    state = covariance, mean, count, skipped
    refusal = _refusal(*state)
    if refusal is None and not (covariance.dtype == mean.dtype == torch.float32):
        refusal = "statistics that are not float32"
    if refusal is None and not all(tensor.is_contiguous() for tensor in state):
        refusal = "statistics that are not contiguous"
    return refusal


def update_pays(covariance: Tensor, features: Tensor) -> bool:
    """Return whether the update is small enough to be faster in C than in ATen operators."""
    width = features.shape[1] if covariance.dim() == 3 else 1
    return features.numel() * width <= MOST_OUTER_PRODUCTS


def labels_refusal(logits: Tensor) -> str | None:
    """Return why class activation labels cannot be served, or None. Logits may still be in half precision."""
    return _refusal(logits)


_NOT_BUILT = "the C extension is not built; reinstall with a C compiler"


def _refusal(*tensors: Tensor) -> str | None:
    if not VERSIONS:
        return _NOT_BUILT
    for tensor in tensors:
        if tensor.device != _CPU:  # much cheaper than device.type
            return f"inputs on {tensor.device.type}"
        if tensor.dtype == torch.float64:
            return "float64 inputs"
    return None


def upper_bound(step: Step, upstream: Tensor | None, need_logits: bool, need_weight: bool) -> StepResult:
    """Compute the terms, and the gradients of their sum weighted by upstream (3,), by default those of the total."""
    num_classes, num_features = _sizes("weight", step.weight, 2)
    num_labeled, num_unlabeled = *_sizes("labels", step.labels, 1), _sizes("candidates", step.candidates, 2)[0]
    weight_shape, diagonal = (num_classes, num_features), step.covariance.dim() == 2
    labeled_shape, unlabeled_shape = (num_labeled, num_classes), (num_unlabeled, num_classes)
    expected = (  # dtype and shape of the fields of Step; see _dense
        (None, labeled_shape),
        (None, unlabeled_shape),
        (None, unlabeled_shape),
        (None, weight_shape),
        (None, weight_shape if diagonal else (*weight_shape, num_features)),
        (torch.int64, (num_labeled,)),
        (torch.bool, unlabeled_shape),
        (torch.int64, (num_unlabeled,)),
        (torch.bool, labeled_shape),
        (None, (num_classes,)),
    )
    if isinstance(step.thresholds, Tensor) and step.thresholds.dim() == 0:
        step = replace(step, thresholds=step.thresholds.expand(num_classes))
    inputs = [
        None if value is None and name in _OPTIONAL else _dense(name, value, *wanted)
        for name, value, wanted in zip(Step._fields, step, expected, strict=False)
    ]
    refusal = step_refusal(step)
    if refusal is not None:
        raise ValueError(f"impl='native' cannot serve this call: {refusal}")
    weight = _dense("weight", step.weight, None, weight_shape)
    result = StepResult(
        total=weight.new_empty(()),
        terms=weight.new_empty(3),
        grad_logits=weight.new_empty((num_labeled + 2 * num_unlabeled, num_classes) if need_logits else 0),
        grad_weight=weight.new_empty(weight_shape if need_weight else 0),
        pseudo_labels=step.labels.new_empty(num_unlabeled if step.pseudo_labels is None else 0),
        confidence=weight.new_empty(num_unlabeled),
        prediction=step.labels.new_empty(num_unlabeled),
        mask=step.candidates.new_empty(num_unlabeled),
    )
    strength, ss_weight = float(step.strength), float(step.ss_weight)
    weights = (ss_weight, ss_weight, 1.0) if upstream is None else upstream.tolist()
    _kernels.upper_bound(
        _fastest_version(),
        (num_labeled, num_unlabeled, num_classes, num_features),
        tuple(0 if tensor is None else tensor.data_ptr() for tensor in inputs),
        (strength, ss_weight, step.beta, *weights),
        (diagonal, step.argmax_in_candidates),
        tuple(tensor.data_ptr() for tensor in result),  # empty tensors have address 0
    )
    return result


def cross_entropy(
    batch: LabeledBatch, upstream: Tensor | None, need_logits: bool, need_weight: bool
) -> CrossEntropyResult:
    """Same as torch_impl.cross_entropy, for float32."""
    refusal = batch_refusal(batch)
    if refusal is not None:
        raise ValueError(f"impl='native' cannot serve this call: {refusal}")
    counted = batch.labels != batch.ignore_index
    if not counted.all():
        return _without_ignored(batch, counted, upstream, need_logits, need_weight)
    num_classes, num_features = weight_shape = _sizes("weight", batch.weight, 2)
    (num_samples,), diagonal = _sizes("labels", batch.labels, 1), batch.covariance.dim() == 2
    logits = _dense("logits", batch.logits, None, (num_samples, num_classes))
    labels = _dense("labels", batch.labels, torch.int64, (num_samples,))
    class_weight = None
    if batch.class_weight is not None:
        class_weight = _dense("class_weight", batch.class_weight, None, (num_classes,))
    factors = logits.new_ones(num_samples) if upstream is None else _dense("upstream", upstream, None, (num_samples,))
    if upstream is None and batch.reduction == "mean":
        total = num_samples if class_weight is None else float(class_weight[labels].sum())
        factors.fill_(1 / total if total > 0 else 0)
    losses, grad_logits = logits.new_empty(num_samples), logits.new_empty(logits.shape if need_logits else 0)
    grad_weight = logits.new_empty(weight_shape if need_weight else 0)
    inputs = (
        logits,
        _dense("weight", batch.weight, None, weight_shape),
        _dense("covariance", batch.covariance, None, weight_shape if diagonal else (*weight_shape, num_features)),
        labels,
        class_weight,
        factors,
    )
    _kernels.cross_entropy(
        _fastest_version(),
        (num_classes, num_features, num_samples),
        tuple(0 if tensor is None else tensor.data_ptr() for tensor in (*inputs, losses, grad_logits, grad_weight)),
        (float(batch.strength), batch.label_smoothing),
        diagonal,
    )
    loss = losses if batch.reduction == "none" else losses.dot(factors)
    return CrossEntropyResult(loss, grad_logits, grad_weight)


def _without_ignored(
    batch: LabeledBatch, counted: Tensor, upstream: Tensor | None, need_logits: bool, need_weight: bool
) -> CrossEntropyResult:
    """The result for the rows that count, and zeros for the others."""
    some = batch._replace(logits=batch.logits[counted], labels=batch.labels[counted])
    found = cross_entropy(some, None if upstream is None else upstream[counted], need_logits, need_weight)
    loss, grad_logits = found.loss, found.grad_logits
    if batch.reduction == "none":
        loss = loss.new_zeros(batch.labels.shape).masked_scatter_(counted, loss)
    if need_logits:
        grad_logits = loss.new_zeros(batch.logits.shape).masked_scatter_(counted[:, None], grad_logits)
    return CrossEntropyResult(loss, grad_logits, found.grad_weight)


def covariance_update(
    covariance: Tensor, mean: Tensor, count: Tensor, skipped: Tensor, features: Tensor, labels: Tensor
) -> None:
    """Same as torch_impl.covariance_update. The statistics are updated in place and must be contiguous."""
    if (labels == -1).any():
        features, labels = features[labels != -1], labels[labels != -1]
    num_classes, num_features = _sizes("mean", mean, 2)
    num_samples, diagonal = _sizes("features", features, 2)[0], covariance.dim() == 2
    covariance_shape = (num_classes, num_features) if diagonal else (num_classes, num_features, num_features)
    tensors = (
        _dense("covariance", covariance, torch.float32, covariance_shape),
        _dense("mean", mean, torch.float32, (num_classes, num_features)),
        _dense("count", count, torch.int64, (num_classes,)),
        _dense("skipped", skipped, torch.int64, (num_classes,)),
        _dense("features", features, None, (num_samples, num_features)),
        _dense("labels", labels, torch.int64, (num_samples,)),
    )
    if any(dense is not given for dense, given in zip(tensors, (covariance, mean, count, skipped), strict=False)):
        raise ValueError("covariance, mean, count and skipped must be contiguous, because they are updated in place")
    sizes, addresses = (num_classes, num_features, num_samples), tuple(tensor.data_ptr() for tensor in tensors)
    _kernels.covariance_update(_fastest_version(), sizes, addresses, diagonal)
    # Autograd does not see writes from C: bump the version counters, which inference tensors do not have.
    torch.autograd.graph.increment_version([state for state in tensors[:4] if not state.is_inference()])


def class_activation_labels(logits: Tensor, candidates: Tensor) -> Tensor:
    """Same as reference.class_activation_labels, for float32."""
    count, num_classes = shape = _sizes("logits", logits, 2)
    logits = _dense("logits", logits, torch.float32, shape)
    candidates = _dense("candidates", candidates, torch.bool, shape)
    labels = torch.empty(count, dtype=torch.int64)
    _kernels.class_activation_labels(count, num_classes, logits.data_ptr(), candidates.data_ptr(), labels.data_ptr())
    return labels


def _fastest_version() -> int:
    if not VERSIONS:
        raise ValueError(_NOT_BUILT)
    return len(VERSIONS) - 1


_OPTIONAL = ("pseudo_labels", "labeled_candidates")


def _sizes(name: str, tensor: Tensor, num_dims: int) -> torch.Size:
    sizes = tensor.shape
    if len(sizes) != num_dims:
        raise ValueError(f"{name} must have {num_dims} dimension{'s' * (num_dims > 1)}, got shape {tuple(sizes)}")
    return sizes


def _dense(name: str, tensor: object, dtype: torch.dtype | None, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor as contiguous; raise unless it is on the CPU and has this dtype and shape.

    dtype None accepts any floating-point dtype and converts to float32.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if not tensor.is_cpu or tensor.layout != torch.strided:
        raise ValueError(f"{name} must be a strided CPU tensor, got {tensor.layout} on {tensor.device}")
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if dtype is None and tensor.is_floating_point():
        dtype, tensor = torch.float32, tensor if tensor.dtype == torch.float32 else tensor.to(torch.float32)
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be of {dtype or 'a floating-point dtype'}, got {tensor.dtype}")
    return tensor.contiguous()
