"""Fused kernels for the semantic-augmentation loss of PLSP (partial-label, semi-supervised perspective)."""

from plsp_kernels.functional import (
    class_activation_labels,
    pairwise_quadratic_form,
    probit_probabilities,
    semantic_cross_entropy,
    semantic_log_softmax,
    semantic_upper_bound_loss,
)
from plsp_kernels.modules import (
    CurriculumThreshold,
    SemanticCovariance,
    SemanticCrossEntropyLoss,
    SemanticUpperBoundLoss,
)
from plsp_kernels.semantic_loss import SemanticLoss
from plsp_kernels.version import __version__

__all__ = [
    "CurriculumThreshold",
    "SemanticCovariance",
    "SemanticCrossEntropyLoss",
    "SemanticLoss",
    "SemanticUpperBoundLoss",
    "__version__",
    "class_activation_labels",
    "pairwise_quadratic_form",
    "probit_probabilities",
    "semantic_cross_entropy",
    "semantic_log_softmax",
    "semantic_upper_bound_loss",
]
