"""Pretrained weights from a local file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plsp_train.checkpoint import load_tensors
from plsp_train.models.base import Network
from plsp_train.models.wrapped import WrappedNetwork

_WRAPPERS = ("state_dict", "model")  # keys under which training scripts save the weights
_PARALLEL = "module."  # what torch.nn.DataParallel puts before every name
_BODY = "body."  # what a wrapped network puts before the names of its module
_SHOWN = 4  # names listed in a message


class Pretrained(NamedTuple):
    """What a file of weights gave a network. As a string, one sentence."""

    path: Path
    loaded: int
    """Tensors of the network that the file replaced."""
    kept: tuple[str, ...]
    """Tensors of the network that keep their initial values."""
    skipped: tuple[str, ...]
    """Tensors of the file without use, by the file's names, with both shapes where these differ."""

    def __str__(self) -> str:
        text = f"{self.path}: {self.loaded} of {self.loaded + len(self.kept)} tensors loaded"
        if self.kept:
            text += f"; keeping their initial values: {_listed(self.kept)}"
        if self.skipped:
            text += f"; skipped: {_listed(self.skipped)}"
        return text


@torch.no_grad()
def load_pretrained(network: Network, path: str | Path) -> Pretrained:
    """Load the weights that fit a network by name and shape, from a PyTorch file or a .safetensors file.

    A wrapped module's weights may have the names that the module itself gives them, so that files of torchvision and
    timm fit. The classifier is skipped if it has another number of classes.
    """
    path = Path(path).expanduser()
    given = _read(path)
    own = network.state_dict()
    names = _own_names(network, given)
    skipped: list[str] = []
    fitting: dict[str, Tensor] = {}
    for name, tensor in given.items():
        target = names.get(name)
        if target is None:
            skipped.append(name)
        elif own[target].shape != tensor.shape:
            skipped.append(f"{name} {tuple(tensor.shape)}, not {tuple(own[target].shape)}")
        else:
            fitting[target] = tensor
    # A bias or a counter may fit by chance.
    if not any(parameter.dim() > 1 and name in fitting for name, parameter in network.named_parameters()):
        raise ValueError(
            f"{path} has no weights of this network: it holds {_listed(skipped) or 'nothing'}, "
            f"and the network has {_listed(list(names))}"
        )
    for target, tensor in fitting.items():
        own[target].copy_(tensor)
    return Pretrained(path, len(fitting), tuple(name for name in own if name not in fitting), tuple(skipped))


def _own_names(network: Network, given: Mapping[str, Tensor]) -> dict[str, str]:
    """From the names in a file, which are the network's own or those of the module that it wraps, to its own names."""
    own = list(network.state_dict())
    if not isinstance(network, WrappedNetwork) or any(name.startswith(_BODY) for name in given):
        return {name: name for name in own}
    names = {name.removeprefix(_BODY): name for name in own if name.startswith(_BODY)}
    if network.classifier_name is not None:
        prefix = f"{network.classifier_name}." if network.classifier_name else ""
        names |= {prefix + name: f"classifier.{name}" for name in network.classifier.state_dict()}
    return names


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: give an existing file of pretrained weights")
    content: Any = _read_safetensors(path) if path.suffix == ".safetensors" else load_tensors(path, ours=False)
    for key in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(part, Tensor) for part in content.values()):
        raise ValueError(f"{path} must hold a state_dict: write it with torch.save(model.state_dict(), path)")
    parallel = all(name.startswith(_PARALLEL) for name in content)
    return {name.removeprefix(_PARALLEL) if parallel else name: tensor for name, tensor in content.items()}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ModuleNotFoundError as error:
        raise ImportError(f"{path} needs safetensors, which is not installed: pip install safetensors") from error
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable .safetensors file ({error})") from error


def _listed(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
