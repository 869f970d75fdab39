"""Signs, found without true labels, that a run is losing a class or has stopped learning.

`ClassWatch` measures them after every epoch, for the metrics. `alarms_of` judges the metrics of a run so far: an alarm
is raised once for each class and kind. Labels change a lot while a network learns, so a class is watched as soon as
most of its instances have kept their label in two epochs in a row. Even then, classes that are hard to tell apart trade
instances from one epoch to the next; what this may cause is reported if it lasts for two epochs.

A group of wrong labels leaves a trace in the candidate sets, which hold the true label. If a share f of the instances
labelled i belongs to class j, then j is a candidate of a share f + (1 - f) q of them, where q is the share that has it
by chance. When instances of j move to label i, this share grows, and f follows from its growth. q is the smallest share
seen, but not less than the share of all instances of other classes that have j as a candidate. The labelled set of i is
judged alike: it may be lost while most instances of the class still have the right label.

A class can also be lost before it was ever watched. The candidate sets tell about how many instances it should have: as
many as would have it if every instance chose among its candidates at random.

After steps that are too large, a network may predict the same class for every input. Its labels no longer change, so
they look settled.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plsp_train.data.candidate_sets import CandidateSets

SETTLED = 0.75  # share of instances that keep their label, in two epochs, from which on a class is watched
UNSETTLED = 0.5  # share below which labels no longer agree between epochs
MOVED = 0.5  # share of a labelled set that gets another label within an epoch
SHRUNK = 0.5  # size of a labelled set relative to its largest
FOREIGN = 0.2  # share of a class, or of its labelled set, that has come from another one
MISSING = 0.1  # size of a class relative to the one that a random choice among the candidates would give it
CHANCE = 4.0  # standard deviations by which an estimate of that share may differ from zero by chance
FEW = 10  # instances whose shares say little
_LASTING = ("agreement", "overlap", "labelled overlap")  # signs that have to be seen in two epochs in a row
_OF_ALL_CLASSES = ("missing", "constant")  # signs that tell something as soon as most labels have settled
_ROWS = 4096  # candidate sets that are added up at a time


class ClassWatch:
    """Compares the labels of an epoch with those of the epoch before, and with the candidate sets."""

    def __init__(self, candidates: CandidateSets) -> None:
        self.candidates = candidates
        num_classes, device = candidates.shape[1], candidates.device
        self.labeled: Tensor | None = None
        self.calm = torch.zeros(num_classes, dtype=torch.bool, device=device)  # most labels were kept in the last epoch
        self.settled = torch.zeros_like(self.calm)
        # (l, l): of the instances labelled i, the smallest share in a watched epoch that had j as a candidate.
        self.lowest = torch.ones(num_classes, num_classes, device=device)
        self.expected = candidates.sizes_by_chance()
        # (l,): of the instances of other classes, the share that has this class as a candidate.
        others = len(candidates) - self.expected
        self.common = ((candidates.frequencies() - self.expected) / others).clamp_min(0)

    def observe(self, before: Tensor, labels: Tensor, labeled: Tensor | None) -> dict[str, list[Any]]:
        """Metrics of an epoch: its labels (n,) against those of the epoch before, and its labelled set.

        Labels are -1 as long as there are none. Shares of few instances are None.
        """
        former, self.labeled = self.labeled, None if labeled is None else labeled.to(labels.device)
        if bool((before < 0).all()):
            return {}
        num_classes, kept = self.candidates.shape[1], before == labels
        agreement = _shares(before, kept, num_classes)
        was_calm, self.calm = self.calm, agreement >= SETTLED
        self.settled = self.settled | (was_calm & self.calm)
        rivals, foreign = self._rivals(labels)
        metrics = {
            "label_agreement_per_class": _rounded(agreement),
            "rival_per_class": rivals.tolist(),
            "rival_share_per_class": _rounded(foreign),
            "relative_size_per_class": _rounded(self._relative_sizes(labels)),
        }
        if self.labeled is not None:
            rivals, foreign = self._labeled_rivals(labels, self.labeled)
            metrics["labeled_rival_per_class"] = rivals.tolist()
            metrics["labeled_rival_share_per_class"] = _rounded(foreign)
        if former is not None:
            metrics["labeled_moved_per_class"] = _rounded(_shares(before[former], ~kept[former], num_classes))
        return metrics

    def _rivals(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """For each class the one that most of its instances have come from, (l,), and the estimated share of them."""
        together = torch.zeros_like(self.lowest)
        for rows, candidates in self.candidates.chunks():
            for own, sets in zip(labels[rows].split(_ROWS), candidates.split(_ROWS), strict=True):
                together.index_add_(0, own.clamp_min(0), (sets & (own >= 0)[:, None]).float())
        count = labels[labels >= 0].bincount(minlength=len(together))[:, None]
        share = together / count  # NaN for a class without instances, which no comparison finds large
        self.lowest = torch.where(self.settled[:, None] & (count > 0), torch.minimum(self.lowest, share), self.lowest)
        return self._most_foreign(share, count)

    def _labeled_rivals(self, labels: Tensor, labeled: Tensor) -> tuple[Tensor, Tensor]:
        """The same for the labelled set."""
        own = labels[labeled]
        together = torch.zeros_like(self.lowest).index_add_(0, own, self.candidates[labeled].float())
        count = own.bincount(minlength=len(together))[:, None]
        return self._most_foreign(together / count, count)

    def _most_foreign(self, share: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """The same, from the share (l, l) of the `count` (l, 1) instances labelled i that has j as a candidate."""
        # While few instances have label i unless nothing else is possible, few of them have j as a candidate.
        usual = torch.maximum(self.lowest, self.common)
        # With two more instances on either side, a share that happens to be 0 or 1 has a deviation, too.
        chance = (usual * count + 2) / (count + 4)
        deviation = (chance * (1 - chance) / count).sqrt()
        growth = share - usual
        is_judged = self.settled[:, None] & (growth > CHANCE * deviation)
        most, rivals = torch.where(is_judged, growth / (1 - usual), 0).fill_diagonal_(0).max(1)
        return rivals, most

    def _relative_sizes(self, labels: Tensor) -> Tensor:
        count = labels[labels >= 0].bincount(minlength=len(self.expected))
        return (count / self.expected).where(self.expected >= FEW, torch.nan)

    def state_dict(self) -> dict[str, Any]:
        return {"labeled": self.labeled, "calm": self.calm, "settled": self.settled, "lowest": self.lowest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.labeled, self.calm = state["labeled"], state["calm"]
        self.settled, self.lowest = state["settled"], state["lowest"]


class Alarm(NamedTuple):
    epoch: int
    """The one that raised it."""
    sentence: str
    last_seen: int


def alarms_of(history: list[dict[str, Any]], class_names: tuple[str, ...]) -> list[Alarm]:
    """The alarms of a run from its metrics, in the order of epochs."""
    alarms: dict[tuple[str, int], Alarm] = {}
    calm: set[int] = set()
    settled: set[int] = set()
    is_calm = all_settled = False
    largest = [0] * len(class_names)
    signs: dict[tuple[str, int], str] = {}
    for metrics in history:
        was_calm, is_calm = is_calm, metrics.get("label_agreement", 0) >= SETTLED
        all_settled |= was_calm and is_calm
        before = signs
        signs = {
            (kind, index): sign
            for kind, index, sign in _signs(metrics, largest, class_names)
            if index in settled or (kind in _OF_ALL_CLASSES and all_settled)
        }
        for (kind, index), sign in signs.items():
            if kind not in _LASTING or (kind, index) in before:
                epoch = metrics["epoch"]
                alarm = Alarm(epoch, f"epoch {epoch}, class {class_names[index]}: {sign}", epoch)
                alarms[kind, index] = alarms.get((kind, index), alarm)._replace(last_seen=epoch)
        agreement = metrics.get("label_agreement_per_class", [])
        were_calm, calm = calm, {i for i, share in enumerate(agreement) if share is not None and share >= SETTLED}
        settled |= were_calm & calm
        largest = list(map(max, largest, metrics.get("labeled_per_class", largest)))
    return list(alarms.values())


def _signs(metrics: dict[str, Any], largest: list[int], class_names: tuple[str, ...]) -> Iterator[tuple[str, int, str]]:
    """Kind, class and wording of all that is suspicious in an epoch."""
    for index, share in enumerate(metrics.get("label_agreement_per_class", [])):
        if share is not None and share < UNSETTLED:
            yield "agreement", index, f"only {share:.0%} of its instances kept their label"
    for index, share in enumerate(metrics.get("labeled_moved_per_class", [])):
        if share is not None and share > MOVED:
            yield "labelled set", index, f"{share:.0%} of its labelled set were given another label"
    for index, size in enumerate(metrics.get("labeled_per_class", [])):
        if size < SHRUNK * largest[index]:
            yield "size", index, f"its labelled set has shrunk from {largest[index]} to {size} instances"
    for kind, prefix, part in (("overlap", "", "instances"), ("labelled overlap", "labeled_", "labelled instances")):
        for index, share in enumerate(metrics.get(f"{prefix}rival_share_per_class", [])):
            if share > FOREIGN:
                rival = class_names[metrics[f"{prefix}rival_per_class"][index]]
                yield kind, index, f"about {share:.0%} of its {part} seem to belong to {rival}"
    for index, size in enumerate(metrics.get("relative_size_per_class", [])):
        if size is not None and size < MISSING:
            sign = f"it has {size:.1%} of the instances that a random choice among candidates would give it"
            yield "missing", index, sign
    if "only_prediction" in metrics:
        sign = "the network predicts it for every instance; try a smaller --lr"
        yield "constant", metrics["only_prediction"], sign


def _shares(classes: Tensor, chosen: Tensor, num_classes: int) -> Tensor:
    """Of the instances of each class, the share that is chosen, (l,); NaN for few. Class -1 does not count."""
    is_known = classes >= 0
    total = classes[is_known].bincount(minlength=num_classes)
    shares = classes[is_known & chosen].bincount(minlength=num_classes) / total
    return shares.where(total >= FEW, torch.nan)


def _rounded(shares: Tensor) -> list[float | None]:
    return [round(share, 4) if share == share else None for share in shares.tolist()]
