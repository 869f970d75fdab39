"""The file of a trained model, `model.pt`: everything that a prediction needs, and no code.

It is read with weights_only=True, so it cannot execute anything. A network of the user's own is stored by its name
`module:attribute`. That module is imported only if the caller lists it as a plugin, never because a file names it.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plsp_train.checkpoint import load_tensors, save_tensors
from plsp_train.data.augment import (
    Augmentation,
    AugmentPolicy,
    ImageAugmentation,
    VectorAugmentation,
    VectorAugmentPolicy,
)
from plsp_train.models import MODELS, Network, as_network, build_model
from plsp_train.models.libraries import LIBRARIES
from plsp_train.registry import import_plugin

FORMAT = 2
BATCH_SIZE = 256  # small enough for large networks on large images
_SEQUENCES = {"input_shape": int, "class_names": str, "mean": float, "std": float, "feature_names": str}


@dataclass(frozen=True)
class ModelFile:
    """The content of model.pt."""

    model: str
    """The network as `--model` names it. Empty for an nn.Module given in Python, which the file cannot rebuild."""
    input_shape: tuple[int, ...]
    """(C, H, W) of an image, (d,) of a vector."""
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    """What the inputs are normalised by, like `std`: per channel of images scaled to 0..1, or per feature."""
    std: tuple[float, ...]
    state_dict: Mapping[str, Tensor]
    feature_names: tuple[str, ...] | None = None
    """The columns of the table that the features came from, in their order."""
    format: int = FORMAT

    def __post_init__(self) -> None:
        for name, kind in _SEQUENCES.items():
            values = getattr(self, name)
            if values is None and name == "feature_names":
                continue
            if not isinstance(values, tuple) or not values or not all(isinstance(value, kind) for value in values):
                raise ValueError(f"{name} must be a non-empty tuple of {kind.__name__}")
        if len(self.input_shape) not in (1, 3) or min(self.input_shape) < 1:
            raise ValueError(f"input_shape must be (C, H, W) or (d,), got {self.input_shape}")
        for name in ("mean", "std", "feature_names"):
            values = getattr(self, name)
            if values is not None and len(values) != self.input_shape[0]:
                raise ValueError(f"{name} must have {self.input_shape[0]} values, got {len(values)}")
        if not all(map(math.isfinite, self.mean)) or not all(0 < value < math.inf for value in self.std):
            raise ValueError("mean and std must be finite, and std positive")
        if not isinstance(self.model, str):
            raise ValueError(f"model must be the name of a network, got {self.model!r}")
        if not isinstance(self.state_dict, Mapping) or not all(map(torch.is_tensor, self.state_dict.values())):
            raise ValueError("state_dict must hold tensors by their names")

    @property
    def is_image(self) -> bool:
        return len(self.input_shape) == 3


class Outputs(NamedTuple):
    """What the network computes for a batch: float32, on the CPU."""

    features: Tensor
    logits: Tensor


class TrainedModel:
    """A network in evaluation mode with the class names and the normalisation that it was trained with."""

    def __init__(self, network: Network, model_file: ModelFile, device: torch.device | str = "cpu") -> None:
        self.class_names = model_file.class_names
        self.feature_names = model_file.feature_names
        self.input_shape = model_file.input_shape
        self.is_image = model_file.is_image
        self.device = torch.device(device)
        # As in training, so that results are the same to the last bit.
        memory_format = network.memory_format if self.is_image else torch.contiguous_format
        self.network: Network = network.to(self.device, memory_format=memory_format).eval()  # type: ignore[call-overload]
        self._augmentation = _augmentation(model_file, self.device, memory_format)

    def normalise(self, inputs: Tensor) -> Tensor:
        """What the network takes, from uint8 images (N, C, H, W) or float vectors (N, d) on its device."""
        return self._augmentation.plain(inputs)

    def outputs(self, inputs: Tensor, batch_size: int = BATCH_SIZE) -> Iterator[Outputs]:
        """Features and logits of raw inputs, batch by batch."""
        self._check(inputs)
        for part in inputs.split(batch_size):
            with torch.no_grad():
                features = self.network.features(self.normalise(part.to(self.device)))
                logits = self.network.classifier(features)
            yield Outputs(features.float().cpu(), logits.float().cpu())

    def logits(self, inputs: Tensor, batch_size: int = BATCH_SIZE) -> Tensor:
        """Logits (n, l) of raw inputs."""
        return torch.cat([part.logits for part in self.outputs(inputs, batch_size)])

    def features(self, inputs: Tensor, batch_size: int = BATCH_SIZE) -> Tensor:
        """Deep features (n, d) of raw inputs."""
        return torch.cat([part.features for part in self.outputs(inputs, batch_size)])

    def _check(self, inputs: Tensor) -> None:
        fits = inputs.dtype == torch.uint8 if self.is_image else inputs.is_floating_point()
        if not fits or tuple(inputs.shape[1:]) != self.input_shape:
            wanted = f"{'uint8' if self.is_image else 'float'} (n, {', '.join(map(str, self.input_shape))})"
            raise ValueError(f"inputs must be {wanted}, got {inputs.dtype} {tuple(inputs.shape)}")


def save_model(path: Path, model_file: ModelFile) -> None:
    """Write model.pt atomically."""
    content = {field.name: getattr(model_file, field.name) for field in fields(model_file)}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in content.items()}
    save_tensors(path, {**plain, "state_dict": dict(model_file.state_dict)})


def read_model_file(path: str | Path) -> ModelFile:
    """Read model.pt without building its network."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no model file {path}")
    try:
        content = load_tensors(path)
    except ValueError:
        raise ValueError(f"{path} is not a model file, or it is damaged") from None
    if not isinstance(content, dict) or "state_dict" not in content:
        raise ValueError(f"{path} is not a model file: it holds no state_dict")
    found = content.get("format", 1)
    if found != FORMAT:
        raise ValueError(f"{path} is a model file of format {found!r}, but this version reads {FORMAT}: train again")
    names = {field.name for field in fields(ModelFile)}
    if names != content.keys():
        different = ", ".join(sorted(map(repr, names ^ content.keys())))
        raise ValueError(f"{path} is not a complete model file: check {different}")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
    }
    try:
        return ModelFile(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def load_model(
    path: str | Path,
    *,
    plugins: Collection[str] = (),
    network: nn.Module | None = None,
    device: torch.device | str = "cpu",
) -> TrainedModel:
    """Rebuild a trained model.

    Parameters
    ----------
    path
        A model.pt.
    plugins
        Modules that may be imported to find the network: the names before the colon of `module:attribute`, or modules
        that register it.
    network
        The module to load the weights into, required if the network was given in Python and has no name.
    device
        Where to compute.
    """
    model_file = read_model_file(path)
    if network is None:
        rebuilt = _named_network(path, model_file, plugins)
    else:
        rebuilt = as_network(network, model_file.input_shape, len(model_file.class_names))
    try:
        rebuilt.load_state_dict(model_file.state_dict)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: its weights do not fit the network {model_file.model!r} ({reason})") from None
    return TrainedModel(rebuilt, model_file, device)


def _named_network(path: str | Path, model_file: ModelFile, plugins: Collection[str]) -> Network:
    name = model_file.model
    if not name:
        raise ValueError(f"{path} holds weights of a network given in Python: pass it as load_model(..., network=...)")
    for plugin in plugins:
        import_plugin(plugin)
    module, colon, _ = name.partition(":")
    if colon and module not in plugins and module not in LIBRARIES:
        raise ValueError(f"{path} was trained with the network {name!r}: allow its import with --plugin {module}")
    if not colon and name not in MODELS:
        raise ValueError(
            f"{path} was trained with the network {name!r}: name the module that registers it with --plugin"
        )
    return build_model(name, model_file.input_shape, len(model_file.class_names))


def _augmentation(model_file: ModelFile, device: torch.device, memory_format: torch.memory_format) -> Augmentation:
    """Only its un-augmented view is used, to which the policy does not matter."""
    mean, std = model_file.mean, model_file.std
    if not model_file.is_image:
        return VectorAugmentation(VectorAugmentPolicy(), mean, std, device=device)
    return ImageAugmentation(AugmentPolicy(), mean, std, device=device, memory_format=memory_format)
