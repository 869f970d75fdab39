"""plsp::covariance_update, which updates the running statistics in place."""

from typing import Any

from plsp_kernels.ops.registration import define_operator


def _fake(*args: Any) -> None:
    return None


covariance_update = define_operator(
    "covariance_update(Tensor(a!) covariance, Tensor(b!) mean, Tensor(c!) count, Tensor(d!) skipped,"
    " Tensor features, Tensor labels, str impl) -> ()",
    _fake,
)
