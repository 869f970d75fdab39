"""Train classifiers from partial labels: the PLSP pipeline on top of plsp_kernels."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plsp_train.estimator import PartialLabelClassifier

__all__ = ["PartialLabelClassifier"]


def __getattr__(name: str) -> Any:
    """Import the estimator on first use: the commands do not need scikit-learn's base classes."""
    if name == "PartialLabelClassifier":
        from plsp_train.estimator import PartialLabelClassifier

        return PartialLabelClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
