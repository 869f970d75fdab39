"""The one place that imports torchvision, even beside a torch build that its compiled operators do not match."""

import importlib
from functools import cache
from types import ModuleType

import torch

# Dropping a Library undefines its operators.
_operator_definitions: list[torch.library.Library] = []


@cache
def import_torchvision() -> ModuleType:
    """Return the torchvision package; after this, its modules can be imported.

    A torchvision wheel built for CUDA cannot load its compiled operators beside a CPU-only torch, and then its
    import fails at a missing `nms`. Nothing here calls that operator, so declaring it is enough.
    """
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"this needs torchvision, but {error.name} is not installed: pip install torchvision"
        ) from error
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    _declare_missing_operators()
    return importlib.import_module("torchvision")


def _declare_missing_operators() -> None:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _operator_definitions.append(library)
