"""Networks: sizes from the architectures' formulas, gradients everywhere, the same answer in eval mode."""

import pytest
import torch

from plsp_train.models import MODELS, Network, build_model

CASES = [
    ("lenet", (1, 28, 28), 10, 84),
    ("lenet", (1, 32, 32), 10, 84),
    ("lenet", (3, 32, 32), 10, 84),
    ("densenet", (3, 32, 32), 10, 69),
    ("densenet", (1, 28, 28), 10, 69),
    ("resnet18", (3, 32, 32), 100, 512),
    ("mlp", (1, 8, 8), 10, 64),
    ("mlp", (108,), 16, 64),
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
    ],
)
def test_parameter_counts(
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
    assert (features >= 0).all()
    assert 0.01 < features.square().mean().sqrt() < 10


def test_wrong_names_and_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="unknown model 'vgg': choose one of lenet, densenet, resnet18, mlp"):
        build_model("vgg", (3, 32, 32), 10)
    with pytest.raises(ValueError, match="lenet takes images of 28×28 or 32×32"):
        build_model("lenet", (1, 8, 8), 10)
    for name in sorted(MODELS.keys() - {"mlp"}):
        with pytest.raises(ValueError, match="try mlp"):
            build_model(name, (108,), 10)
