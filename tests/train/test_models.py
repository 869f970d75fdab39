"""Networks: sizes from the architectures' formulas, gradients everywhere, the same answer in eval mode."""

import pytest
import torch

from plsp_train.models import LeNet5, Network, build_model

CASES = [
    ("lenet", (1, 28, 28), 10, 84),
    ("lenet", (1, 32, 32), 10, 84),
    ("lenet", (3, 32, 32), 10, 84),
    ("densenet", (3, 32, 32), 10, 69),
    ("densenet", (1, 28, 28), 10, 69),
    ("resnet18", (3, 32, 32), 100, 512),
    ("mlp", (1, 8, 8), 10, 64),
    ("mlp", (108,), 16, 64),
    ("linear", (108,), 16, 108),
    ("linear", (3, 8, 8), 10, 192),
]


def conv(inputs: int, outputs: int, kernel: int, *, bias: bool = False) -> int:
    return outputs * (inputs * kernel**2 + bias)


def linear(inputs: int, outputs: int, *, bias: bool = True) -> int:
    return outputs * (inputs + bias)


def batch_norm(channels: int) -> int:
    return 2 * channels


def lenet_parameters(channels: int, classes: int) -> int:
    return (
        conv(channels, 6, 5, bias=True)
        + conv(6, 16, 5, bias=True)
        + linear(400, 120)
        + linear(120, 84)
        + linear(84, classes)
    )


def densenet_parameters(channels: int, classes: int) -> int:
    """Stem of 24; three stages of (22 - 4) / 6 = 3 layers that add 12 channels; halved in between."""
    total, width = conv(channels, 24, 3), 24
    for stage in range(3):
        if stage > 0:
            total += batch_norm(width) + conv(width, width // 2, 1)
            width //= 2
        for _ in range(3):
            total += batch_norm(width) + conv(width, 48, 1) + batch_norm(48) + conv(48, 12, 3)
            width += 12
    assert width == 69
    return total + batch_norm(width) + linear(width, classes)


def resnet18_parameters(channels: int, classes: int) -> int:
    total, width = conv(channels, 64, 3) + batch_norm(64), 64
    for out in (64, 128, 256, 512):
        total += conv(width, out, 3) + 3 * conv(out, out, 3) + 4 * batch_norm(out)
        total += conv(width, out, 1) + batch_norm(out) if width != out else 0
        width = out
    return total + linear(512, classes)


def mlp_parameters(inputs: int, classes: int) -> int:
    hidden = linear(inputs, 256, bias=False) + batch_norm(256)
    return hidden + linear(256, 64, bias=False) + batch_norm(64) + linear(64, classes)


@pytest.mark.parametrize(
    ("name", "input_shape", "num_classes", "by_formula", "published"),
    [
        ("lenet", (1, 28, 28), 10, lenet_parameters(1, 10), 61_706),
        ("densenet", (3, 32, 32), 10, densenet_parameters(3, 10), None),
        ("resnet18", (3, 32, 32), 10, resnet18_parameters(3, 10), 11_173_962),
        ("resnet18", (3, 32, 32), 100, resnet18_parameters(3, 100), 11_220_132),
        ("mlp", (1, 8, 8), 10, mlp_parameters(64, 10), None),
        ("mlp", (108,), 16, mlp_parameters(108, 16), None),
        ("linear", (108,), 16, linear(108, 16), None),
    ],
)
def test_networks_have_the_published_number_of_parameters(
    name: str, input_shape: tuple[int, ...], num_classes: int, by_formula: int, published: int | None
) -> None:
    count = sum(parameter.numel() for parameter in build_model(name, input_shape, num_classes).parameters())
    assert count == by_formula
    assert published in (None, count)


def seeded_model(name: str, input_shape: tuple[int, ...], num_classes: int) -> Network:
    torch.manual_seed(0)
    return build_model(name, input_shape, num_classes)


@pytest.mark.parametrize(("name", "input_shape", "num_classes", "num_features"), CASES)
def test_logits_are_the_linear_classifier_of_the_features(
    name: str, input_shape: tuple[int, ...], num_classes: int, num_features: int
) -> None:
    model = seeded_model(name, input_shape, num_classes).eval()
    inputs = torch.randn(3, *input_shape)
    with torch.no_grad():
        features, logits = model.features(inputs), model(inputs)
        assert features.shape == (3, num_features) == (3, model.num_features)
        assert logits.shape == (3, num_classes)
        assert isinstance(model.classifier, torch.nn.Linear)
        torch.testing.assert_close(logits, features @ model.classifier.weight.T + model.classifier.bias)
        assert torch.equal(logits, model(inputs))
        # In eval mode an instance's logits do not depend on the rest of its batch.
        torch.testing.assert_close(logits[:1], model(inputs[:1]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "input_shape", "num_classes", "num_features"), CASES)
def test_gradient_reaches_every_parameter(
    name: str, input_shape: tuple[int, ...], num_classes: int, num_features: int
) -> None:
    model = seeded_model(name, input_shape, num_classes)
    torch.nn.functional.cross_entropy(model(torch.randn(4, *input_shape)), torch.arange(4)).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.any(), parameter_name


@pytest.mark.parametrize("name", ["lenet", "densenet", "resnet18"])
def test_channels_last_gives_the_same_logits(name: str) -> None:
    model = seeded_model(name, (3, 32, 32), 10).eval()
    inputs = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(inputs)
        model = model.to(memory_format=torch.channels_last)
        actual = model(inputs.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "input_shape", "num_classes", "num_features"), CASES)
def test_features_start_at_a_sensible_scale(
    name: str, input_shape: tuple[int, ...], num_classes: int, num_features: int
) -> None:
    features = seeded_model(name, input_shape, num_classes).features(torch.randn(16, *input_shape))
    assert 0.01 < features.square().mean().sqrt() < 10


def test_linear_model_has_the_inputs_as_features() -> None:
    inputs = torch.randn(2, 3, 4, 5)
    assert torch.equal(build_model("linear", (3, 4, 5), 7).features(inputs), inputs.flatten(1))


def test_building_a_network_leaves_it_in_training_mode_with_fresh_statistics() -> None:
    """The probe of its shapes is not seen by batch normalisation."""
    model = build_model("mlp", (6,), 3)
    assert all(module.training for module in model.modules())
    assert all(not buffer.any() for name, buffer in model.named_buffers() if "running_mean" in name or "num" in name)


def test_building_draws_nothing_but_the_weights() -> None:
    torch.manual_seed(0)
    LeNet5((1, 28, 28), 10)
    expected = torch.rand(())
    torch.manual_seed(0)
    build_model("lenet", (1, 28, 28), 10)
    assert torch.equal(torch.rand(()), expected)


def test_unknown_name_lists_the_networks() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'vgg': choose one of .*lenet.*, or name your own"):
        build_model("vgg", (3, 32, 32), 10)


@pytest.mark.parametrize("name", ["lenet", "densenet", "resnet18"])
def test_vectors_for_an_image_network_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} takes images, got vectors of 108 features: choose mlp or linear"):
        build_model(name, (108,), 10)


@pytest.mark.parametrize("name", ["lenet", "densenet", "resnet18"])
def test_missing_channel_axis_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=r"got input_shape \(28, 28\) without a channel axis: use \(1, 28, 28\)"):
        build_model(name, (28, 28), 10)


@pytest.mark.parametrize(
    ("name", "input_shape", "message"),
    [
        ("lenet", (1, 8, 8), "lenet takes images of 28×28 or 32×32, got 8×8: choose mlp or resnet18, or resize"),
        ("lenet", (1, 28, 32), "lenet takes images of 28×28 or 32×32, got 28×32"),
        ("densenet", (3, 32, 3), "densenet takes images of at least 4×4, got 32×3: choose mlp or linear, or enlarge"),
    ],
)
def test_impossible_image_sizes_are_refused(name: str, input_shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, input_shape, 10)


@pytest.mark.parametrize("input_shape", [(), (0,), (3, 0, 8)])
@pytest.mark.parametrize("name", ["mlp", "linear"])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_empty_inputs_are_refused(name: str, input_shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"model {name}: input_shape must be"):
        build_model(name, input_shape, 10)
