"""Augmentation: the same views, equally often, as the per-image pipeline of torchvision gives."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, chi2_contingency, chisquare, kstest
from torch import Tensor
from torch.nn.functional import pad

from plsp_train.data import (
    AugmentPolicy,
    ImageAugmentation,
    TrainTestData,
    VectorAugmentation,
    VectorAugmentPolicy,
    augment_policy,
    build_augmentation,
)
from plsp_train.data.augment import crop_and_flip, cutout
from plsp_train.data.autoaugment import (
    CIFAR10_POLICIES,
    OPERATIONS,
    Operation,
    apply_operation,
    apply_operations,
    auto_augment,
    draw_operations,
)
from plsp_train.torchvision_compat import import_torchvision
from small_runs import digits

import_torchvision()
from torchvision import transforms  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

P_VALUE = 1e-4
CIFAR10 = augment_policy("cifar10", (3, 32, 32))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_images(count: int, channels: int = 3, size: int = 32, seed: int = 0) -> Tensor:
    """Smooth colour gradients with noise: histograms, edges and contrasts that differ from image to image."""
    generator = seeded(seed)
    coarse = torch.rand(count, channels, 4, 4, generator=generator) * 200
    smooth = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")
    noise = torch.rand(count, channels, size, size, generator=generator) * 55
    return (smooth + noise).to(torch.uint8)


def unnormalised(policy: AugmentPolicy, channels: int = 1) -> ImageAugmentation:
    return ImageAugmentation(policy, (0.0,) * channels, (1.0 / 255,) * channels)


def codes(images: Tensor) -> list[str]:
    return [hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in images]


def assert_same_frequencies(first: Iterable[str], second: Iterable[str]) -> None:
    """Two-sample chi-square over outcomes; rare ones are taken together."""
    one, other = Counter(first), Counter(second)
    frequent = [code for code in one | other if one[code] + other[code] >= 20]
    table = [[counts[code] for code in frequent] for counts in (one, other)]
    for row, counts in zip(table, (one, other), strict=True):
        row.append(counts.total() - sum(row))
    table = [list(column) for column in zip(*table, strict=True) if sum(column) > 0]
    assert chi2_contingency(table).pvalue > P_VALUE


# --------------------------------------------------------------------------------------------- crop, flip, hole


@pytest.mark.parametrize(("size", "padding"), [((28, 28), 4), ((8, 8), 1), ((6, 9), 5)])
def test_crop_and_flip_equals_padding_slicing_and_mirroring(size: tuple[int, int], padding: int) -> None:
    height, width = size
    images = torch.randint(256, (40, 3, *size), dtype=torch.uint8, generator=seeded())
    top, left = torch.randint(2 * padding + 1, (2, 40), generator=seeded(1))
    flip = torch.rand(40, generator=seeded(2)) < 0.5
    views = crop_and_flip(images, top, left, flip, padding)
    padded = pad(images.float(), (padding,) * 4, mode="reflect").to(torch.uint8)
    for i in range(40):
        expected = padded[i, :, top[i] : top[i] + height, left[i] : left[i] + width]
        assert torch.equal(views[i], expected.flip(-1) if flip[i] else expected)


def test_padding_wider_than_the_image_is_refused() -> None:
    with pytest.raises(ValueError, match="padding must be smaller than the 4×4 images it reflects, got 4"):
        unnormalised(AugmentPolicy()).weak(random_images(2, 1, 4), seeded())


def test_weak_views_are_uniform_over_all_crops_and_flips() -> None:
    image, padding = random_images(1, 1, 12), 4
    offsets = torch.cartesian_prod(torch.arange(9), torch.arange(9), torch.arange(2))
    possible = crop_and_flip(image.expand(162, -1, -1, -1), *offsets[:, :2].T, offsets[:, 2].bool(), padding)
    number = {code: i for i, code in enumerate(codes(possible))}
    assert len(number) == 162
    augmentation = unnormalised(AugmentPolicy(padding=padding))
    views = augmentation.weak(image.expand(30_000, -1, -1, -1), seeded(3)).round().to(torch.uint8)
    drawn = torch.tensor([number[code] for code in codes(views)])
    assert chisquare(torch.bincount(drawn, minlength=162)).pvalue > P_VALUE


def test_weak_views_have_the_distribution_of_torchvision() -> None:
    image = random_images(1, 1, 12)
    pipeline = transforms.Compose(
        [transforms.RandomHorizontalFlip(), transforms.RandomCrop(12, padding=4, padding_mode="reflect")]
    )
    torch.manual_seed(0)
    reference = torch.cat([pipeline(image) for _ in range(6000)])
    views = unnormalised(AugmentPolicy()).weak(image.expand(6000, -1, -1, -1), seeded(4)).round().to(torch.uint8)
    assert_same_frequencies(codes(reference), codes(views))


@pytest.mark.parametrize("side", [3, 4, 16])
def test_cutout_is_one_hole_clipped_at_the_border(side: int) -> None:
    rows, columns = torch.cartesian_prod(torch.arange(8), torch.arange(10)).T
    images = cutout(torch.ones(80, 2, 8, 10), rows, columns, side)
    for image, row, column in zip(images, rows.tolist(), columns.tolist(), strict=True):
        expected = torch.ones(2, 8, 10)
        top, left = row - side // 2, column - side // 2
        expected[:, max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = 0
        assert torch.equal(image, expected)


def test_cutout_positions_are_uniform_and_the_hole_is_black() -> None:
    policy = AugmentPolicy(horizontal_flip=False, padding=0)
    augmentation = ImageAugmentation(policy, (0.2,), (0.5,))
    white = torch.full((20_000, 1, 28, 28), 255, dtype=torch.uint8)
    views = augmentation.strong(white, seeded(5))[:, 0]
    black = torch.tensor((0 - 0.2) / 0.5)
    hole = torch.isclose(views, black)
    assert torch.isclose(views[~hole], torch.tensor((1 - 0.2) / 0.5)).all()
    # Interval [centre - 8, centre + 8) clipped to 0..27: start and end tell the centre.
    for axis in (1, 2):
        covered = hole.any(dim=3 - axis)
        start = covered.int().argmax(1)
        centre = torch.where(start > 0, start + 8, covered.sum(1) - 8)
        assert chisquare(torch.bincount(centre, minlength=28)).pvalue > P_VALUE


def test_strong_view_without_autoaugment_is_a_crop_flip_with_a_hole() -> None:
    image = random_images(1, 1, 12).add(1)
    views = unnormalised(AugmentPolicy(cutout=6)).strong(image.expand(500, -1, -1, -1), seeded(6))
    offsets = torch.cartesian_prod(torch.arange(9), torch.arange(9), torch.arange(2))
    possible = crop_and_flip(image.expand(162, -1, -1, -1), *offsets[:, :2].T, offsets[:, 2].bool(), 4).float()
    for view in views:
        seen = view > 0.5
        assert ((possible - view).abs() < 0.5).logical_or(~seen).all(dim=(1, 2, 3)).sum() >= 1
        assert 9 <= (~seen).sum() <= 36


# ------------------------------------------------------------------------------------------------- normalisation


def test_views_are_normalised_as_torchvision_does() -> None:
    images, mean, std = random_images(5), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    expected = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])(images)
    actual = ImageAugmentation(AugmentPolicy(), mean, std).plain(images)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_views_are_float32_in_the_given_memory_format(memory_format: torch.memory_format) -> None:
    images = random_images(6)
    before = images.clone()
    augmentation = ImageAugmentation(CIFAR10, (0.5,) * 3, (0.25,) * 3, memory_format=memory_format)
    reference = ImageAugmentation(CIFAR10, (0.5,) * 3, (0.25,) * 3)
    for views, same in (
        (augmentation.plain(images), reference.plain(images)),
        (augmentation.weak(images, seeded()), reference.weak(images, seeded())),
        (augmentation.strong(images, seeded()), reference.strong(images, seeded())),
    ):
        assert views.dtype == torch.float32
        assert views.is_contiguous(memory_format=memory_format)
        assert torch.equal(views, same)
    assert torch.equal(images, before)


def test_seed_determines_the_views() -> None:
    images = random_images(64)
    augmentation = unnormalised(CIFAR10, 3)
    for view in (augmentation.weak, augmentation.strong):
        assert torch.equal(view(images, seeded(7)), view(images, seeded(7)))
        assert not torch.equal(view(images, seeded(7)), view(images, seeded(8)))
    generator = seeded(7)
    assert not torch.equal(augmentation.weak(images, generator), augmentation.weak(images, generator))


# --------------------------------------------------------------------------------------------------- AutoAugment


def test_policies_match_torchvision() -> None:
    published = transforms.AutoAugment(transforms.AutoAugmentPolicy.CIFAR10).policies
    assert list(CIFAR10_POLICIES) == published


@pytest.mark.parametrize("size", [32, 28, 8])
@pytest.mark.parametrize("operation", OPERATIONS[1:], ids=lambda o: f"{o.name}{o.level or ''}{'+-'[o.sign < 0]}")
def test_operation_on_a_batch_matches_torchvision_on_each_image(
    operation: Operation, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    transform = v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)
    # Only this operation, always; torchvision takes the negative sign where the random number is at most 0.5.
    transform._policies = [((operation.name, 1.0, operation.level), ("Invert", 0.0, None))]
    monkeypatch.setattr(torch, "rand", lambda *_: torch.tensor(0.25 if operation.sign < 0 else 0.75))
    for channels in (3, 1):
        images = random_images_without_rand(7, channels, size)
        images[0] = 77  # a constant image has no contrast to stretch
        expected = torch.stack([transform(image) for image in images])
        assert torch.equal(apply_operation(images, operation), expected)


def random_images_without_rand(count: int, channels: int, size: int) -> Tensor:
    values = np.random.default_rng(0).integers(0, 256, (count, channels, size, size), dtype=np.uint8)
    return torch.from_numpy(np.sort(values, axis=-1))


def test_every_image_gets_its_own_operation() -> None:
    images = random_images(3 * len(OPERATIONS))
    drawn = torch.randint(len(OPERATIONS), (len(images),), generator=seeded(9))
    views = apply_operations(images, drawn)
    for image, view, number in zip(images, views, drawn.tolist(), strict=True):
        assert torch.equal(view, apply_operation(image[None], OPERATIONS[number])[0])


def test_operations_are_drawn_with_the_exact_probabilities() -> None:
    expected: Counter[tuple[int, int]] = Counter()
    for first, second in CIFAR10_POLICIES:
        for one, p_one in outcomes(*first):
            for other, p_other in outcomes(*second):
                expected[one, other] += p_one * p_other / len(CIFAR10_POLICIES)  # type: ignore[assignment]
    assert sum(expected.values()) == pytest.approx(1)
    count = 200_000
    observed = Counter(map(tuple, draw_operations(count, seeded(10)).tolist()))
    assert observed.keys() <= {pair for pair, p in expected.items() if p > 0}
    pairs = [pair for pair, p in expected.items() if p > 0]
    assert min(expected[pair] for pair in pairs) * count > 5
    assert chisquare([observed[pair] for pair in pairs], [expected[pair] * count for pair in pairs]).pvalue > P_VALUE


def outcomes(name: str, probability: float, level: int | None) -> list[tuple[int, float]]:
    """The operation numbers a policy's entry can lead to, with their probabilities."""
    by_sign = [OPERATIONS.index(o) for o in OPERATIONS if (o.name, o.level) == (name, level)]
    return [(0, 1 - probability), *((number, probability / len(by_sign)) for number in by_sign)]


def test_autoaugment_has_the_distribution_of_torchvision_per_image() -> None:
    image, count = random_images(1), 3000
    transform = v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)
    torch.manual_seed(0)
    reference = torch.cat([transform(image) for _ in range(count)])
    views = auto_augment(image.expand(count, -1, -1, -1), seeded(11))
    assert_same_frequencies(codes(reference), codes(views))


def test_images_of_a_batch_draw_independently() -> None:
    """One policy per batch, as torchvision draws it, would make neighbours agree."""
    drawn = draw_operations(50_000, seeded(12))
    share = (drawn == drawn[0]).all(1).double().mean()
    assert share < 0.1
    same = int((drawn[1:] == drawn[:-1]).all(1).sum())
    frequencies = torch.bincount(drawn[:, 0] * len(OPERATIONS) + drawn[:, 1]).double() / len(drawn)
    assert binomtest(same, len(drawn) - 1, float(frequencies.square().sum())).pvalue > P_VALUE


# ------------------------------------------------------------------------------------------------- digits, vectors


def test_digits_are_never_mirrored_and_move_by_one_pixel_at_most() -> None:
    data = digits()
    augmentation = build_augmentation(data)
    image = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)
    views = augmentation.weak(image.expand(500, -1, -1, -1), seeded(13))
    offsets = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    possible = crop_and_flip(image.expand(9, -1, -1, -1), *offsets.T, torch.zeros(9, dtype=torch.bool), 1)
    assert set(codes(views)) == set(codes(augmentation.plain(possible)))
    white = torch.full_like(image, 255)
    holes = (augmentation.strong(white.expand(100, -1, -1, -1), seeded(14)) < augmentation.plain(white)).sum((1, 2, 3))
    assert holes.max() == 9
    assert holes.min() >= 4


def vector_augmentation(**changes: float) -> VectorAugmentation:
    return VectorAugmentation(VectorAugmentPolicy(**changes), mean=(1.0, -2.0, 0.0), std=(2.0, 0.5, 1.0))


def test_vectors_are_normalised_and_perturbed() -> None:
    vectors = torch.tensor([[3.0, -1.0, 4.0]]).expand(20_000, -1)
    augmentation = vector_augmentation()
    assert torch.equal(augmentation.plain(vectors[:1]), torch.tensor([[1.0, 2.0, 4.0]]))

    weak = augmentation.weak(vectors, seeded(15)) - torch.tensor([1.0, 2.0, 4.0])
    assert kstest(weak.flatten().numpy() / augmentation.policy.weak_noise, "norm").pvalue > P_VALUE

    strong = augmentation.strong(vectors, seeded(16))
    dropped = strong == 0
    assert binomtest(int(dropped.sum()), dropped.numel(), augmentation.policy.strong_dropout).pvalue > P_VALUE
    noise = (strong - torch.tensor([1.0, 2.0, 4.0]))[~dropped]
    assert kstest(noise.numpy() / augmentation.policy.strong_noise, "norm").pvalue > P_VALUE
    assert torch.equal(strong, augmentation.strong(vectors, seeded(16)))


@pytest.mark.parametrize("is_image", [True, False])
def test_weak_views_need_not_be_augmented(is_image: bool) -> None:
    own = TrainTestData("own", ("a", "b"), torch.rand(4, 3), (0.5,) * 3, (2.0,) * 3)
    data = digits() if is_image else own
    inputs, generator = data.train_inputs[:4], seeded(17)
    augmentation = build_augmentation(data, augment_weak=False)
    assert torch.equal(augmentation.weak(inputs, generator), augmentation.plain(inputs))
    assert torch.equal(augmentation.strong(inputs, generator), build_augmentation(data).strong(inputs, seeded(17)))


def test_data_set_determines_its_augmentation() -> None:
    vectors = TrainTestData("lost", ("a", "b"), torch.zeros(2, 3), (0.0,) * 3, (1.0,) * 3)
    assert isinstance(build_augmentation(vectors), VectorAugmentation)
    augmentation = build_augmentation(digits(), memory_format=torch.channels_last)
    assert isinstance(augmentation, ImageAugmentation)
    assert augmentation.policy == AugmentPolicy(horizontal_flip=False, padding=1, cutout=3)
    own = dataclasses.replace(digits(), name="own")
    assert build_augmentation(own, horizontal_flip=False).policy == AugmentPolicy(False, 1, 4)
    assert augment_policy("fmnist", (1, 28, 28)) == AugmentPolicy(True, 4, 16)
    assert augment_policy("cifar10", (3, 32, 32)) == AugmentPolicy(True, 4, 16, auto_augment=True)
    assert augment_policy("own", (3, 64, 96)) == AugmentPolicy(True, 8, 32, auto_augment=True)
