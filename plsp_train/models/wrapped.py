"""Anyone's module as a network: its features and its classifier are found by a probe.

The probe runs the module on two dummy inputs. If a linear layer produces the output, that layer is the classifier and
its input the features. Otherwise the output itself, flattened, are the features, and a linear classifier is added.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from plsp_train.models.base import Network


class WrappedNetwork(Network):
    """A module without its last linear layer, and that layer as the classifier."""

    def __init__(self, body: nn.Module, classifier: nn.Linear, classifier_name: str | None) -> None:
        super().__init__()
        self.body = body
        self.classifier = classifier
        self.classifier_name = classifier_name
        """What the module itself calls its classifier; None if the classifier was added."""

    def features(self, inputs: Tensor) -> Tensor:
        if self.memory_format == torch.contiguous_format:
            # Images of one channel count as contiguous even with channels_last's strides, which convolutions follow.
            inputs = inputs.flatten().view(inputs.shape)
        return _as_tensor(self.body(inputs), self.body).flatten(1)


def as_network(module: nn.Module, input_shape: Sequence[int], num_classes: int) -> Network:
    """Find the features and the classifier of a module.

    Parameters
    ----------
    module : torch.nn.Module
        Maps inputs (N, \\*input_shape) to logits or features. It becomes part of the network: its last linear layer
        moves to `classifier`, and is new if it has another number of outputs. A `Network` is returned as it is.
    input_shape : sequence of int
        Of one input: (C, H, W) of an image, (d,) of a vector.
    num_classes : int
        Outputs of the classifier.

    Returns
    -------
    Network

    Raises
    ------
    ValueError
        If the module cannot take such inputs, or returns anything but one tensor with a row for every input.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"a network must be a torch.nn.Module, got {module!r}")
    inputs = _dummy_inputs(module, input_shape)
    with _probing(module):
        if isinstance(module, Network):
            network = _checked(module, inputs, num_classes)
        else:
            network = _wrapped(module, inputs, num_classes)
        if inputs.dim() == 4 and not _takes_channels_last(network, inputs):
            network.memory_format = torch.contiguous_format
    return network


def _dummy_inputs(module: nn.Module, input_shape: Sequence[int]) -> Tensor:
    """Two different inputs, the same in every call, where the module is."""
    if not input_shape or min(input_shape) < 1:
        raise ValueError(f"input_shape must be (C, H, W) or (d,) of positive sizes, got {tuple(input_shape)}")
    values = torch.linspace(-1, 1, 2 * math.prod(input_shape))
    return values.view(2, *input_shape).to(*_device_and_dtype(module))


def _device_and_dtype(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Of a module's parameters."""
    parameter = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), torch.empty(0))
    return parameter.device, parameter.dtype


@contextmanager
def _probing(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients: the probe changes no statistics. Afterwards every part is in its own mode."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes.items():
            part.training = training


# ------------------------------------------------------------------------------------------------------ the probe


class _Call(NamedTuple):
    """Of a linear layer. `version` counts how often its output had been changed in place when it returned."""

    layer: nn.Linear
    inputs: Tensor
    output: Tensor
    version: int


def _wrapped(module: nn.Module, inputs: Tensor, num_classes: int) -> WrappedNetwork:
    output, calls = _probe(module, inputs)  # initialises lazy layers, too
    unused = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if unused:
        raise ValueError(
            f"{_name(module)} never uses its lazy parameter {unused[0]}, so it has no shape: remove its layer"
        )
    layer = _last_layer(output, calls)
    if layer is None:
        _refuse_probabilities(module, output, num_classes)
        return WrappedNetwork(module, _new_classifier(module, output[0].numel(), num_classes), None)
    fits = layer.out_features == num_classes
    classifier = layer if fits else _new_classifier(module, layer.in_features, num_classes)
    body, name = _without(module, layer)
    if not _gives_features(body, inputs, layer.in_features):
        raise ValueError(
            f"{_name(module)} does not run without its last layer {name}: return the features, the input of that layer"
        )
    return WrappedNetwork(body, classifier, name)


def _probe(module: nn.Module, inputs: Tensor) -> tuple[Tensor, list[_Call]]:
    """The output and the calls of linear layers on the way to it."""
    calls: list[_Call] = []

    def record(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> None:
        assert isinstance(layer, nn.Linear)
        calls.append(_Call(layer, next(iter((*args, *kwargs.values()))), output, output._version))

    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    hooks = [layer.register_forward_hook(record, with_kwargs=True) for layer in layers]
    try:
        return _run(module, inputs), calls
    finally:
        for hook in hooks:
            hook.remove()


def _last_layer(output: Tensor, calls: list[_Call]) -> nn.Linear | None:
    """The layer that gives the module's output as W a + b: called once, and not changed in place afterwards."""
    for layer, features, logits, version in calls:
        if logits is output and version == output._version and output.dim() == 2:
            once = sum(call.layer is layer for call in calls) == 1
            expected = F.linear(features, layer.weight, layer.bias)  # a subclass may compute something else
            is_linear = expected.shape == logits.shape and torch.allclose(expected, logits, equal_nan=True)
            return layer if once and is_linear else None
    return None


def _without(module: nn.Module, layer: nn.Linear) -> tuple[nn.Module, str]:
    """The module with the identity in place of a layer, and the layer's name."""
    names = [name for name, part in module.named_modules(remove_duplicate=False) if part is layer]
    if module is layer:
        return nn.Identity(), ""
    for name in names:
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, nn.Identity())
    return module, names[0]


def _gives_features(body: nn.Module, inputs: Tensor, num_features: int) -> bool:
    try:
        return body(inputs).shape == (len(inputs), num_features)
    except Exception:  # such as an attribute of the layer that the identity lacks
        return False


def _new_classifier(module: nn.Module, num_features: int, num_classes: int) -> nn.Linear:
    device, dtype = _device_and_dtype(module)
    return nn.Linear(num_features, num_classes, device=device, dtype=dtype)


def _takes_channels_last(network: Network, inputs: Tensor) -> bool:
    """Whether the network computes in this layout: `view` fails on what a convolution returns in it."""
    try:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        network(inputs.clone(memory_format=torch.channels_last))  # contiguous() may keep the strides
    except RuntimeError:
        return False
    finally:
        network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return True


# --------------------------------------------------------------------------------------------------------- errors


def _run(module: nn.Module, inputs: Tensor) -> Tensor:
    try:
        output = module(inputs)
    except Exception as error:
        shape, reason = tuple(inputs.shape[1:]), " ".join(str(error).split())
        raise ValueError(
            f"{_name(module)} cannot take inputs of shape {shape} ({type(error).__name__}: {reason})"
        ) from error
    output = _as_tensor(output, module)
    if output.dim() < 2 or len(output) != len(inputs) or output.numel() == 0:
        raise ValueError(
            f"{_name(module)} must return logits or features (N, d), got {tuple(output.shape)} for {len(inputs)} inputs"
        )
    return output


def _as_tensor(output: object, module: nn.Module) -> Tensor:
    if not isinstance(output, Tensor):
        mode = "training" if module.training else "evaluation"
        raise ValueError(
            f"{_name(module)} returns a {type(output).__name__} in {mode} mode: return the logits or features alone"
        )
    return output


def _refuse_probabilities(module: nn.Module, output: Tensor, num_classes: int) -> None:
    """A softmax at the end would be taken for features."""
    rows = output.exp() if (output <= 0).all() else output
    sums = rows.flatten(1).sum(1)
    if output.shape[1:] == (num_classes,) and (rows >= 0).all() and torch.allclose(sums, torch.ones_like(sums)):
        raise ValueError(f"{_name(module)} returns probabilities: remove the softmax at its end and return logits")


def _checked(network: Network, inputs: Tensor, num_classes: int) -> Network:
    """The contract of a network: features (N, d), and a linear classifier of them."""
    classifier = getattr(network, "classifier", None)
    if not isinstance(classifier, nn.Linear) or classifier.out_features != num_classes:
        raise ValueError(
            f"{_name(network)}.classifier must be a torch.nn.Linear with {num_classes} outputs, got {classifier}"
        )
    _run(network, inputs)
    features = network.features(inputs)
    if features.shape != (len(inputs), network.num_features):
        raise ValueError(
            f"{_name(network)}.features must return (N, {network.num_features}), which its classifier takes, "
            f"got {tuple(features.shape)} for {len(inputs)} inputs"
        )
    return network


def _name(module: nn.Module) -> str:
    return type(module).__name__
