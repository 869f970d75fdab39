"""plsp::covariance_update, which updates the running statistics in place."""

from typing import Any

from plsp_kernels.ops.registration import define_operator


def _fake(*args: Any) -> None:
    return None


covariance_update = define_operator(
    "covariance_update(Tensor(a!) covariance, Tensor(b!) mean, Tensor(c!) count, Tensor(d!) skipped,"
    " Tensor features, Tensor labels, str impl) -> ()",
    _fake,
    {
        "covariance": "float l d d | l d",
        "mean": "float l d",
        "count": "int64 l",
        "skipped": "int64 l",
        "features": "float N d",
        "labels": "int64 N",
    },
)
