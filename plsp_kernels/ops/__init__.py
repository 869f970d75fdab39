"""torch.library operators of the namespace `plsp`, and the autograd functions around them."""

from plsp_kernels.ops.class_gram import ClassGram, PairQuadratic
from plsp_kernels.ops.covariance_update import covariance_update
from plsp_kernels.ops.log_odds import LogOdds, TargetLogOdds
from plsp_kernels.ops.probit import probit_probabilities
from plsp_kernels.ops.upper_bound import upper_bound

__all__ = [
    "ClassGram",
    "LogOdds",
    "PairQuadratic",
    "TargetLogOdds",
    "covariance_update",
    "probit_probabilities",
    "upper_bound",
]
