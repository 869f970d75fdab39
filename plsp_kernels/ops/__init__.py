"""Operators of the `torch.library` namespace `plsp`, and the autograd functions that wrap them."""

from plsp_kernels.ops.class_activation import class_activation_labels
from plsp_kernels.ops.class_gram import ClassGram, PairQuadratic
from plsp_kernels.ops.covariance_update import covariance_update
from plsp_kernels.ops.cross_entropy import cross_entropy
from plsp_kernels.ops.curriculum import curriculum_thresholds, curriculum_update
from plsp_kernels.ops.log_odds import LogOdds
from plsp_kernels.ops.probit import probit_probabilities
from plsp_kernels.ops.upper_bound import upper_bound

__all__ = [
    "ClassGram",
    "LogOdds",
    "PairQuadratic",
    "class_activation_labels",
    "covariance_update",
    "cross_entropy",
    "curriculum_thresholds",
    "curriculum_update",
    "probit_probabilities",
    "upper_bound",
]
