"""Approximate memory of the subjects that do not bound theirs, to skip those that would not fit."""

from benchmarks.shapes import Shape
from benchmarks.subjects import COMPILED, COMPILED_GRAM_FORM, GRAM_FORM, ISDA_FORM, REFERENCE


def expected_elements(case: str, shape: Shape) -> dict[str, int]:
    """Elements that a forward and backward hold at once, by subject; the others are small."""
    reference, gram_form = _reference(case, shape), _gram_form(case, shape)
    pairs, differences = (
        shape.num_labeled * shape.num_classes**2,
        shape.num_labeled * shape.num_classes * shape.num_features,
    )
    return {
        REFERENCE: reference,
        COMPILED: reference,
        GRAM_FORM: gram_form,
        COMPILED_GRAM_FORM: gram_form,
        ISDA_FORM: 4 * differences + 2 * pairs,
    }


def _samples(case: str, shape: Shape) -> int:
    """Samples with an (l, l) matrix of their own in the eager forms."""
    return {
        "loss": shape.num_labeled + 2 * shape.num_unlabeled,
        "quadratic_form": _num_present(case, shape),
        "log_softmax": shape.num_unlabeled,
        "cross_entropy": shape.num_labeled,
        "probit": shape.num_unlabeled,
    }.get(case, 0)


def _num_present(case: str, shape: Shape) -> int:
    """Bound on the distinct classes of the samples."""
    num_samples = shape.num_labeled if case == "cross_entropy" else shape.num_labeled + shape.num_unlabeled
    return min(shape.num_classes, num_samples)


def _reference(case: str, shape: Shape) -> int:
    """Twice the class-pair differences of all samples."""
    num_classes, num_features = shape.num_classes, shape.num_features
    if case == "covariance_update":
        return 4 * num_classes * num_features * (num_features if shape.covariance == "full" else shape.num_labeled)
    if case == "class_gram":
        return 4 * num_classes * num_features * (num_features if shape.covariance == "full" else 1)
    return 2 * _samples(case, shape) * num_classes**2 * num_features


def _gram_form(case: str, shape: Shape) -> int:
    """Σ and T of the classes present and, unless only the column of the label is used, matrices of class pairs.

    The numbers of matrices are fitted to measured peaks between 100 and 400 classes.
    """
    num_classes, num_features = shape.num_classes, shape.num_features
    width = num_classes + (num_features if shape.covariance == "full" else 0)
    products = 2 * _num_present(case, shape) * num_features * width
    if case == "cross_entropy":
        return products if shape.covariance == "full" else 6 * shape.num_labeled * num_features
    samples = 0 if case == "quadratic_form" else shape.num_unlabeled
    return products + (4 * _num_present(case, shape) + 7 * samples) * num_classes**2
