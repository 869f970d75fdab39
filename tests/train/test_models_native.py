"""LeNet-5's convolution stages in C, against PyTorch's operators in float64."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

from plsp_train.models import native
from plsp_train.models.lenet import LeNet5

BUILT = native.VERSIONS
EVERY_VERSION = pytest.mark.parametrize("version", range(len(BUILT)), ids=BUILT)
needs_extension = pytest.mark.skipif(not BUILT, reason="not built")


@contextmanager
def fastest(version: int | None) -> Iterator[None]:
    """Make this version the fastest one; None leaves PyTorch's operators alone."""
    native.VERSIONS = () if version is None else BUILT[: version + 1]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        native.VERSIONS = BUILT
        torch.set_num_threads(threads)


def make(num_images: int, channels: int = 1, side: int = 28, seed: int = 0) -> tuple[LeNet5, Tensor]:
    torch.manual_seed(seed)
    network = LeNet5((channels, side, side), 10).to(memory_format=torch.channels_last)
    return network, torch.randn(num_images, channels, side, side).contiguous(memory_format=torch.channels_last)


def results(network: LeNet5, images: Tensor, version: int | None) -> list[Tensor]:
    """Logits, and the gradients of a weighted sum of them."""
    network.zero_grad()
    with fastest(version):
        logits = network(images)
        (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)).sum().backward()
    return [logits.detach(), *(parameter.grad.clone() for parameter in network.parameters())]


def assert_close(found: list[Tensor], truth: list[Tensor], tolerance: float = 1e-5) -> None:
    for result, expected in zip(found, truth, strict=True):
        assert result.shape == expected.shape
        assert (result - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build it with")
def test_extension_is_built_if_there_is_a_compiler() -> None:
    assert BUILT[:1] == ("baseline",)


@needs_extension
@EVERY_VERSION
@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 28), (1, 32), (2, 32), (3, 32)])
@pytest.mark.parametrize("num_images", [1, 3, 4, 5, 16, 17, 41])
def test_logits_and_gradients_agree_with_float64(version: int, num_images: int, channels: int, side: int) -> None:
    network, images = make(num_images, channels, side)
    assert_close(results(network, images, version), results(network.double(), images.double(), None))


@needs_extension
@EVERY_VERSION
def test_empty_batches_have_no_features_and_zero_gradients(version: int) -> None:
    network, images = make(0)
    logits, *gradients = results(network, images, version)
    assert logits.shape == (0, 10)
    assert all(gradient.eq(0).all() for gradient in gradients)


@needs_extension
@EVERY_VERSION
def test_equal_pixels_tie_like_max_pooling(version: int) -> None:
    """Of equal maxima the first in its window gets the gradient: flat images would show any other choice."""
    network, images = make(9)
    flat = images[:, :, :1, :1].expand_as(images).contiguous()
    assert_close(results(network, flat, version), results(network.double(), flat.double(), None))


@needs_extension
@EVERY_VERSION
def test_images_of_a_batch_do_not_influence_each_other(version: int) -> None:
    network, images = make(19)
    with fastest(version), torch.no_grad():
        together = native.stages(images, network.conv1, network.conv2)
        assert torch.equal(native.stages(images[17:], network.conv1, network.conv2), together[17:])


@needs_extension
@EVERY_VERSION
def test_inference_has_the_same_bits_and_keeps_one_group(version: int) -> None:
    network, images = make(19)
    with fastest(version), mock.patch.object(native, "_forward", wraps=native._forward) as forward:
        training = network(images)
        assert forward.call_args.kwargs["num_groups"] > 1
        with torch.no_grad():
            assert torch.equal(network(images), training)
        assert forward.call_args.kwargs["num_groups"] == 1


@needs_extension
@EVERY_VERSION
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_invalid_pixels_reach_the_logits(version: int, value: float) -> None:
    network, images = make(9)
    images[4, 0, 14, 14] = value
    with fastest(version), torch.no_grad():
        valid = network(images).isfinite().all(1)
    assert not valid[4]
    assert valid.sum() == 8


@needs_extension
@EVERY_VERSION
def test_diverged_weights_reach_the_logits(version: int) -> None:
    network, images = make(5)
    with torch.no_grad():
        network.conv1.weight.fill_(float("nan"))
    with fastest(version), torch.no_grad():
        assert network(images).isnan().all()


@needs_extension
@EVERY_VERSION
def test_every_element_is_written_and_repeats_to_the_bit(version: int) -> None:
    network, images = make(21)
    first = results(network, images, version)
    torch.use_deterministic_algorithms(True)  # fills empty tensors with NaN
    try:
        second = results(network, images, version)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@needs_extension
@EVERY_VERSION
def test_upstream_gradients_may_be_strided(version: int) -> None:
    network, images = make(9)
    upstream = torch.randn(400, 9).T
    with fastest(version):
        features = native.stages(images, network.conv1, network.conv2)
        dense = torch.autograd.grad(features, network.conv2.weight, upstream.contiguous(), retain_graph=True)
        strided = torch.autograd.grad(features, network.conv2.weight, upstream)
    assert torch.equal(dense[0], strided[0])


@needs_extension
def test_frozen_layers_get_no_gradient() -> None:
    network, images = make(5)
    network.conv1.requires_grad_(False)
    with fastest(0):
        network(images).sum().backward()
    assert network.conv1.weight.grad is None
    assert network.conv2.weight.grad is not None


@needs_extension
def test_what_c_cannot_do_is_left_to_pytorch() -> None:
    network, images = make(2)
    weight = network.conv1.weight
    with fastest(0):
        assert native.serves(images, weight)
        assert not native.serves(images.double(), weight.double())
        assert not native.serves(images.to("meta"), weight)
        assert not native.serves(images.clone().requires_grad_(), weight)
        assert not native.serves(images.repeat(1, 4, 1, 1), weight)
        with torch.autocast("cpu", torch.bfloat16):
            assert not native.serves(images, weight)
        torch.set_num_threads(3)
        assert not native.serves(images, weight)
    with fastest(None):
        assert not native.serves(images, weight)


@needs_extension
def test_images_get_gradients_from_pytorch() -> None:
    network, images = make(2)
    with fastest(0):
        network(images.requires_grad_()).sum().backward()
    assert images.grad is not None


@needs_extension
def test_wrong_shapes_and_dtypes_are_refused_before_c_reads_them() -> None:
    network, images = make(2)
    conv1, conv2 = network.conv1, network.conv2
    with pytest.raises(ValueError, match="28×28 or 32×32"):
        native.stages(images[..., :27], conv1, conv2)
    with pytest.raises(ValueError, match="1 to 3 channels"):
        native.stages(images.repeat(1, 4, 1, 1), conv1, conv2)
    with pytest.raises(ValueError, match=r"expected float32 of shape \(16, 6, 5, 5\)"):
        native.stages(images, conv1, torch.nn.Conv2d(6, 15, 5))
    with pytest.raises(ValueError, match="float64"):
        native.stages(images, conv1, conv2.double())


@needs_extension
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_traced_and_exported_networks_use_pytorch() -> None:
    network, images = make(8)
    with fastest(0), torch.no_grad():
        expected = network(images)
        compiled = torch.compile(network, fullgraph=True, backend="eager")
        traced = torch.jit.trace(network, images)
        exported = torch.export.export(network, (images,)).module()
        for other in (compiled, traced, exported):
            torch.testing.assert_close(other(images), expected)
