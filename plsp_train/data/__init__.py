"""Data sets, candidate-set generators, augmentation and batches."""

from plsp_train.data.augment import (
    AUGMENT_POLICIES,
    Augmentation,
    AugmentPolicy,
    ImageAugmentation,
    VectorAugmentation,
    VectorAugmentPolicy,
    build_augmentation,
)
from plsp_train.data.batches import IndexSampler
from plsp_train.data.candidates import GENERATORS, AmbiguitySummary, ambiguity_summary, generate_candidates
from plsp_train.data.datasets import (
    DATASETS,
    REAL_PARTIAL_LABEL_SETS,
    RECIPES,
    TrainTestData,
    load_dataset,
    load_partial_label_mat,
)

__all__ = [
    "AUGMENT_POLICIES",
    "DATASETS",
    "GENERATORS",
    "REAL_PARTIAL_LABEL_SETS",
    "RECIPES",
    "AmbiguitySummary",
    "AugmentPolicy",
    "Augmentation",
    "ImageAugmentation",
    "IndexSampler",
    "TrainTestData",
    "VectorAugmentPolicy",
    "VectorAugmentation",
    "ambiguity_summary",
    "build_augmentation",
    "generate_candidates",
    "load_dataset",
    "load_partial_label_mat",
]
