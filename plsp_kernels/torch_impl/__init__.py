"""The closed form in ATen operators: any device, computed in float32 or float64.

`plsp_kernels.triton_impl` provides functions of the same names. `docs/math.md` has the derivations.
"""

from plsp_kernels.torch_impl.class_activation import class_activation_labels
from plsp_kernels.torch_impl.class_gram import class_gram, class_gram_backward
from plsp_kernels.torch_impl.covariance_update import covariance_update
from plsp_kernels.torch_impl.cross_entropy import cross_entropy
from plsp_kernels.torch_impl.curriculum import curriculum_thresholds, curriculum_update
from plsp_kernels.torch_impl.log_odds import log_odds, log_odds_backward
from plsp_kernels.torch_impl.probit import probit_probabilities
from plsp_kernels.torch_impl.upper_bound import upper_bound

__all__ = [
    "class_activation_labels",
    "class_gram",
    "class_gram_backward",
    "covariance_update",
    "cross_entropy",
    "curriculum_thresholds",
    "curriculum_update",
    "log_odds",
    "log_odds_backward",
    "probit_probabilities",
    "upper_bound",
]
