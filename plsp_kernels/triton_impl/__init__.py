"""The closed form as Triton kernels, under the names of `plsp_kernels.torch_impl` and with the same results.

Every launcher allocates, chooses tiles by shape (`tiles.py`) and launches; none waits for the device, none uses
atomics, so equal inputs give equal bits. `docs/kernels.md` describes grids, tiles and memory traffic.
"""

from plsp_kernels.triton_impl.class_gram import class_gram, class_gram_backward
from plsp_kernels.triton_impl.log_odds import (
    log_odds,
    log_odds_backward,
    target_log_odds,
    target_log_odds_backward,
)
from plsp_kernels.triton_impl.probit import probit_probabilities
from plsp_kernels.triton_impl.upper_bound import upper_bound

__all__ = [
    "class_gram",
    "class_gram_backward",
    "log_odds",
    "log_odds_backward",
    "probit_probabilities",
    "target_log_odds",
    "target_log_odds_backward",
    "upper_bound",
]
