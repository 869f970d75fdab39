"""Candidate sets: how other labels join the true one."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from plsp_train.data.candidate_sets import CHUNK, AnyCandidates, CandidateSets
from plsp_train.data.datasets import RECIPES
from plsp_train.data.splits import TrainTestData
from plsp_train.registry import Registry

BUILT_IN_GENERATORS = ("uss", "fps", "pair", "circulant", "hierarchical", "noisy")
GENERATORS: Registry[Callable[[Tensor, int, torch.Generator], Tensor]] = Registry(
    "candidate generator", BUILT_IN_GENERATORS
)
"""User generators by name: functions of true labels (n,), the number of classes and a random generator."""
_FLIPPING = ("fps", "pair", "hierarchical", "noisy")  # those that use flip_probability

# The circulant generator's probability of entering, by cyclic distance from the true label.
_CIRCULANT_PROBABILITIES = (1.0, 0.5, 0.3, 0.1)

# The five classes (in CIFAR-100's alphabetical numbering) of each of its twenty superclasses.
CIFAR100_SUPERCLASSES = (
    (4, 30, 55, 72, 95),  # aquatic mammals: beaver, dolphin, otter, seal, whale
    (1, 32, 67, 73, 91),  # fish: aquarium fish, flatfish, ray, shark, trout
    (54, 62, 70, 82, 92),  # flowers: orchid, poppy, rose, sunflower, tulip
    (9, 10, 16, 28, 61),  # food containers: bottle, bowl, can, cup, plate
    (0, 51, 53, 57, 83),  # fruit and vegetables: apple, mushroom, orange, pear, sweet pepper
    (22, 39, 40, 86, 87),  # household electrical devices: clock, keyboard, lamp, telephone, television
    (5, 20, 25, 84, 94),  # household furniture: bed, chair, couch, table, wardrobe
    (6, 7, 14, 18, 24),  # insects: bee, beetle, butterfly, caterpillar, cockroach
    (3, 42, 43, 88, 97),  # large carnivores: bear, leopard, lion, tiger, wolf
    (12, 17, 37, 68, 76),  # large man-made outdoor things: bridge, castle, house, road, skyscraper
    (23, 33, 49, 60, 71),  # large natural outdoor scenes: cloud, forest, mountain, plain, sea
    (15, 19, 21, 31, 38),  # large omnivores and herbivores: camel, cattle, chimpanzee, elephant, kangaroo
    (34, 63, 64, 66, 75),  # medium-sized mammals: fox, porcupine, possum, raccoon, skunk
    (26, 45, 77, 79, 99),  # non-insect invertebrates: crab, lobster, snail, spider, worm
    (2, 11, 35, 46, 98),  # people: baby, boy, girl, man, woman
    (27, 29, 44, 78, 93),  # reptiles: crocodile, dinosaur, lizard, snake, turtle
    (36, 50, 65, 74, 80),  # small mammals: hamster, mouse, rabbit, shrew, squirrel
    (47, 52, 56, 59, 96),  # trees: maple, oak, palm, pine, willow
    (8, 13, 48, 58, 90),  # vehicles 1: bicycle, bus, motorcycle, pickup truck, train
    (41, 69, 81, 85, 89),  # vehicles 2: lawn mower, rocket, streetcar, tank, tractor
)

# Above this probability of the full set, redrawing would take more than about a hundred attempts per instance.
_MAX_FULL_SET_PROBABILITY = 0.99


class Ambiguity(NamedTuple):
    """How candidate sets are generated: the name of the generator and its parameters; None: not used."""

    candidates: str | None
    flip_probability: float | None = None
    noise_rate: float | None = None

    def __str__(self) -> str:
        """fps0.3, uss, noisy0.3-noise0.1; empty for data with its own candidate sets."""
        noise = "" if self.noise_rate is None else f"-noise{self.noise_rate}"
        name = (self.candidates or "").replace(":", ".")  # it names directories, too
        return f"{name}{'' if self.flip_probability is None else self.flip_probability}{noise}"

    def used(self) -> "Ambiguity":
        """Without the parameters that the generator ignores."""
        flip_probability = self.flip_probability if self.candidates in _FLIPPING else None
        return Ambiguity(self.candidates, flip_probability, self.noise_rate if self.candidates == "noisy" else None)


def draw_candidates(data: TrainTestData, ambiguity: Ambiguity, seed: int, recipe: str = "paper") -> CandidateSets:
    """The data set's own candidate sets or, if it has none, generated ones that depend only on the seed."""
    if data.train_candidates is not None:
        return CandidateSets.pack(data.train_candidates)
    if data.train_labels is None:
        raise ValueError(f"{data.name} has neither candidate sets nor true labels to draw them from")
    generator = torch.Generator().manual_seed(seed)
    if ambiguity.candidates in BUILT_IN_GENERATORS:
        return CandidateSets.pack(
            generate_candidates(ambiguity, labels, data.num_classes, generator, recipe=recipe)
            for labels in data.train_labels.split(CHUNK)
        )
    drawn = GENERATORS[ambiguity.candidates or ""](data.train_labels, data.num_classes, generator)
    wanted = (len(data.train_labels), data.num_classes)
    if drawn.dtype != torch.bool or drawn.shape != wanted or not drawn.any(1).all():
        raise ValueError(
            f"candidate generator {ambiguity.candidates!r} must return a bool tensor of shape {wanted} without empty "
            f"rows, got {drawn.dtype} {tuple(drawn.shape)}"
        )
    return CandidateSets.pack(drawn)


def generate_candidates(
    ambiguity: Ambiguity, labels: Tensor, num_classes: int, generator: torch.Generator, *, recipe: str = "paper"
) -> Tensor:
    """Draw a candidate set for every true label: bool (n, l), on the generator's device.

    uss           uniform over all sets that contain the true label, except the full set
    fps           every other label enters with probability `flip_probability`
    pair          label y+1 (cyclic) enters with probability `flip_probability`
    circulant     the cyclic neighbours y±1, y±2, y±3 enter with probability 0.5, 0.3, 0.1
    hierarchical  fps among the five classes of the true label's CIFAR-100 superclass
    noisy         fps, then the true label leaves with probability `noise_rate`; a set is never empty

    The paper's fps (and what builds on it) forces one random label in where none entered and redraws the full set;
    recipe "released" does neither. Parameters that a generator does not use are ignored.
    """
    name = ambiguity.candidates or ""
    _check_arguments(name, labels, num_classes, recipe)
    may_enter = _may_enter(name, num_classes)
    entry = _entry_probabilities(name, may_enter, ambiguity.flip_probability)
    labels, may_enter, entry = (tensor.to(generator.device) for tensor in (labels, may_enter, entry))
    follows_paper_fps = name in ("fps", "hierarchical", "noisy") and recipe == "paper"

    candidates = _draw_sets(labels, entry, generator)
    if follows_paper_fps or name == "uss":
        _redraw_full_sets(candidates, labels, entry, generator)
    if follows_paper_fps:
        # With three classes or more, one forced label cannot make a full set.
        _force_other_label(candidates, labels, may_enter, generator)
    if name == "noisy":
        _drop_true_labels(candidates, labels, may_enter, _probability("noise_rate", ambiguity.noise_rate), generator)
    return candidates


def _check_arguments(name: str, labels: Tensor, num_classes: int, recipe: str) -> None:
    if name not in BUILT_IN_GENERATORS:
        raise ValueError(f"unknown candidate generator {name!r}: choose one of {', '.join(BUILT_IN_GENERATORS)}")
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}: choose one of {', '.join(RECIPES)}")
    if labels.dim() != 1 or labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64 of shape (n,), got {labels.dtype} {tuple(labels.shape)}")
    if len(labels) > 0 and (labels.min() < 0 or labels.max() >= num_classes):
        raise ValueError(
            f"labels must lie in 0..{num_classes - 1}, got {int(labels.min())}..{int(labels.max())}: check num_classes"
        )
    # With fewer classes, no set that follows the generator's rule differs from the full set.
    fewest = {"uss": 2, "circulant": 2 * len(_CIRCULANT_PROBABILITIES)}.get(name, 3)
    if num_classes < fewest:
        raise ValueError(f"{name} needs at least {fewest} classes, got num_classes = {num_classes}")
    if name == "hierarchical" and num_classes != 100:
        raise ValueError(f"hierarchical follows CIFAR-100's superclasses and needs 100 classes, got {num_classes}")


def _probability(argument: str, value: float | None) -> float:
    if value is None or not 0 <= value < 1:
        raise ValueError(f"{argument} must lie in [0, 1) for this candidate generator, got {value}")
    return value


def _may_enter(name: str, num_classes: int) -> Tensor:
    """(l, l) bool: row y marks the other labels that can join the candidate set of an instance of class y."""
    classes = torch.arange(num_classes)
    if name == "pair":
        return (classes - classes[:, None]) % num_classes == 1
    if name == "hierarchical":
        superclass = torch.tensor(CIFAR100_SUPERCLASSES).flatten().argsort() // len(CIFAR100_SUPERCLASSES[0])
        return (superclass == superclass[:, None]) & (classes != classes[:, None])
    return classes != classes[:, None]


def _entry_probabilities(name: str, may_enter: Tensor, flip_probability: float | None) -> Tensor:
    """(l, l): row y holds every label's probability of entering the candidate set of an instance of class y."""
    if name == "circulant":
        classes = torch.arange(len(may_enter))
        clockwise = (classes - classes[:, None]) % len(classes)
        distance = torch.minimum(clockwise, len(classes) - clockwise)
        by_distance = torch.zeros(len(classes))
        by_distance[: len(_CIRCULANT_PROBABILITIES)] = torch.tensor(_CIRCULANT_PROBABILITIES)
        return by_distance[distance]
    # USS: a fair coin per label makes all sets equally likely, at any number of classes.
    probability = 0.5 if name == "uss" else _probability("flip_probability", flip_probability)
    return (may_enter * probability).fill_diagonal_(1.0)


def _draw_sets(labels: Tensor, entry: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(len(labels), len(entry), generator=generator, device=generator.device) < entry[labels]


def _redraw_full_sets(candidates: Tensor, labels: Tensor, entry: Tensor, generator: torch.Generator) -> None:
    full_probability = float(entry.prod(dim=1).max())
    if full_probability > _MAX_FULL_SET_PROBABILITY:
        raise ValueError(
            f"flip_probability is too close to 1: the full set, which is not a candidate set, would be drawn with "
            f"probability {full_probability:.4f}; choose a smaller one"
        )
    rows = candidates.all(dim=1).nonzero().squeeze(1)
    while len(rows) > 0:
        candidates[rows] = _draw_sets(labels[rows], entry, generator)
        rows = rows[candidates[rows].all(dim=1)]


def _force_other_label(candidates: Tensor, labels: Tensor, may_enter: Tensor, generator: torch.Generator) -> None:
    """Where no label but the true one is in, add one of the labels that may enter, uniformly."""
    other = candidates.scatter(1, labels[:, None], False)
    rows = (~other.any(dim=1)).nonzero().squeeze(1)
    if len(rows) > 0:
        forced = torch.multinomial(may_enter[labels[rows]].float(), 1, generator=generator).squeeze(1)
        candidates[rows, forced] = True


def _drop_true_labels(
    candidates: Tensor, labels: Tensor, may_enter: Tensor, noise_rate: float, generator: torch.Generator
) -> None:
    dropped = (torch.rand(len(labels), generator=generator, device=generator.device) < noise_rate).nonzero().squeeze(1)
    remaining = candidates[dropped].scatter(1, labels[dropped, None], False)
    _force_other_label(remaining, labels[dropped], may_enter, generator)
    candidates[dropped] = remaining


class AmbiguitySummary(NamedTuple):
    """How ambiguous a training set is."""

    mean_size: float
    min_size: int
    max_size: int
    singleton_share: float
    true_label_share: float | None
    """None if the true labels are unknown."""


def ambiguity_summary(candidates: AnyCandidates, labels: Tensor | None) -> AmbiguitySummary:
    """Sizes of the candidate sets, the share with a single label, the share with the true label."""
    sets = CandidateSets.pack(candidates)
    sizes = torch.cat([part.sum(dim=1) for _, part in sets.chunks()])
    holds_true = None
    if labels is not None:
        labels = labels.to(sets.device)
        holds_true = torch.cat([part.gather(1, labels[rows, None]) for rows, part in sets.chunks()])
    return AmbiguitySummary(
        mean_size=float(sizes.double().mean()),
        min_size=int(sizes.min()),
        max_size=int(sizes.max()),
        singleton_share=float((sizes == 1).double().mean()),
        true_label_share=None if holds_true is None else float(holds_true.double().mean()),
    )
