"""The closed form as Triton kernels, with the function names of `plsp_kernels.torch_impl`.

Every launcher allocates, selects tiles by shape (`tiles.py`) and launches. There is no host sync, and equal inputs
give equal bits: the only atomics add integers. `docs/kernels.md` describes grids, tiles and memory traffic.
"""

from plsp_kernels.triton_impl.class_activation import class_activation_labels
from plsp_kernels.triton_impl.class_gram import class_gram
from plsp_kernels.triton_impl.class_gram_backward import class_gram_backward
from plsp_kernels.triton_impl.covariance_update import covariance_update
from plsp_kernels.triton_impl.cross_entropy import cross_entropy
from plsp_kernels.triton_impl.curriculum import curriculum_thresholds, curriculum_update
from plsp_kernels.triton_impl.log_odds import log_odds, log_odds_backward
from plsp_kernels.triton_impl.probit import probit_probabilities
from plsp_kernels.triton_impl.upper_bound import upper_bound

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
