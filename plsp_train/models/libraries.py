"""Networks of torchvision and timm, with freshly initialised weights."""

import difflib
from collections.abc import Iterable

from torch import nn

from plsp_train.models.base import Builder
from plsp_train.torchvision_compat import import_torchvision

# Without the auxiliary classifiers, which would return a tuple in training mode.
_OPTIONS = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}


def torchvision_builder(name: str) -> Builder:
    """One of torchvision's image classifiers."""
    models = import_torchvision().models
    # Models for other tasks would download the weights of their backbones.
    _check_name("torchvision", name, models.list_models(module=models))

    def build(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        return models.get_model(name, num_classes=num_classes, **_OPTIONS.get(name, {}))

    return build


def timm_builder(name: str) -> Builder:
    """One of timm's models, which take any number of channels."""
    import_torchvision()  # timm imports it, too
    try:
        import timm
    except ModuleNotFoundError as error:
        raise ImportError(f"timm:{name} needs timm, but {error.name} is not installed: pip install timm") from error
    _check_name("timm", name, timm.list_models())

    def build(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        return timm.create_model(name, num_classes=num_classes, in_chans=input_shape[0])

    return build


def _check_name(library: str, name: str, known: Iterable[str]) -> None:
    known = list(known)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(known[:5])}, …"
        raise ValueError(f"unknown model {library}:{name}: {library} has no such network; {hint}")


LIBRARIES = {"torchvision": torchvision_builder, "timm": timm_builder}
