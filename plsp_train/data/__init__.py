"""Data sets, candidate-set generators, augmentation and batches."""

from plsp_train.data.augment import (
    Augmentation,
    AugmentPolicy,
    ImageAugmentation,
    VectorAugmentation,
    VectorAugmentPolicy,
    augment_policy,
    build_augmentation,
)
from plsp_train.data.batches import IndexSampler
from plsp_train.data.candidates import (
    BUILT_IN_GENERATORS,
    GENERATORS,
    Ambiguity,
    AmbiguitySummary,
    ambiguity_summary,
    draw_candidates,
    generate_candidates,
)
from plsp_train.data.datasets import (
    DATASETS,
    REAL_PARTIAL_LABEL_SETS,
    RECIPES,
    load_benchmark,
    published_statistics,
)
from plsp_train.data.files import ReadOptions, read_source
from plsp_train.data.source import Source, check_source
from plsp_train.data.splits import NORMALISATIONS, Split, TrainTestData, split_source

__all__ = [
    "BUILT_IN_GENERATORS",
    "DATASETS",
    "GENERATORS",
    "NORMALISATIONS",
    "REAL_PARTIAL_LABEL_SETS",
    "RECIPES",
    "Ambiguity",
    "AmbiguitySummary",
    "AugmentPolicy",
    "Augmentation",
    "ImageAugmentation",
    "IndexSampler",
    "ReadOptions",
    "Source",
    "Split",
    "TrainTestData",
    "VectorAugmentPolicy",
    "VectorAugmentation",
    "ambiguity_summary",
    "augment_policy",
    "build_augmentation",
    "check_source",
    "draw_candidates",
    "generate_candidates",
    "load_benchmark",
    "published_statistics",
    "read_source",
    "split_source",
]
