"""Results and models of a run, made by hand."""

from typing import Any

import numpy as np
import torch

from plsp_train.model_file import ModelFile
from plsp_train.models import build_model
from plsp_train.results import Results, disambiguate

CLASS_NAMES = ("cat", "dog", "owl")


def results(logits: list[list[float]], candidates: list[list[int]], **given: Any) -> Results:
    """The results of a network with these logits; 0 and 1 mark the candidates."""
    found = disambiguate(torch.tensor(logits), torch.tensor(candidates, dtype=torch.bool))
    count = len(logits)
    arrays: dict[str, Any] = {
        "class_names": np.array(CLASS_NAMES),
        "row": np.arange(count),
        "labeled": np.zeros(count, dtype=np.bool_),
        "held_out": np.zeros(count, dtype=np.bool_),
        "changes": np.zeros(count, dtype=np.int32),
        **found._asdict(),
    }
    return Results(**arrays | given)


def vector_model(**given: Any) -> ModelFile:
    """An untrained network on four features."""
    torch.manual_seed(0)
    content: dict[str, Any] = {
        "model": "mlp",
        "input_shape": (4,),
        "class_names": CLASS_NAMES,
        "mean": (0.0, 1.0, 2.0, 3.0),
        "std": (1.0, 2.0, 1.0, 0.5),
        "state_dict": build_model("mlp", (4,), 3).state_dict(),
        "feature_names": ("a", "b", "c", "d"),
    }
    return ModelFile(**content | given)


def image_model() -> ModelFile:
    """An untrained network on 28×28 images."""
    torch.manual_seed(0)
    state = build_model("lenet", (1, 28, 28), 3).state_dict()
    return ModelFile("lenet", (1, 28, 28), CLASS_NAMES, (0.25,), (0.5,), state)
