"""Candidate sets in little memory: a bit for every instance and class. 1.2 million sets of 1000 classes take 150 MB."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

CHUNK = 65536
"""Instances whose sets are unpacked at a time."""
_FLOAT_CHUNK = 4096  # the same where every bit becomes a number


class CandidateSets:
    """The candidate sets of n instances over l classes. Indexing unpacks the sets of some of them: bool (N, l)."""

    def __init__(self, bits: Tensor, num_classes: int) -> None:
        self._bits = bits  # uint8 (n, ⌈l / 8⌉), the first class in the lowest bit
        self._num_classes = num_classes
        self._masks = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=bits.device)

    @classmethod
    def pack(cls, sets: "Tensor | CandidateSets | Iterable[Tensor]") -> "CandidateSets":
        """From a bool tensor (n, l), or from parts of it one after the other."""
        if isinstance(sets, CandidateSets):
            return sets
        parts = list(map(_packed, sets.split(CHUNK) if isinstance(sets, Tensor) else sets))
        (num_classes,) = {num_classes for _, num_classes in parts}
        return cls(torch.cat([bits for bits, _ in parts]), num_classes)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self._bits), self._num_classes

    @property
    def device(self) -> torch.device:
        return self._bits.device

    @property
    def nbytes(self) -> int:
        return self._bits.nbytes

    def __len__(self) -> int:
        return len(self._bits)

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        bits = self._bits[rows][:, :, None]
        return (bits & self._masks).bool().flatten(1)[:, : self._num_classes]

    def take(self, rows: Tensor) -> "CandidateSets":
        """The sets of these instances, packed."""
        return CandidateSets(self._bits[rows], self._num_classes)

    def to(self, device: torch.device | str) -> "CandidateSets":
        return CandidateSets(self._bits.to(device), self._num_classes)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows and their sets, of bounded size each."""
        for start in range(0, len(self), CHUNK):
            rows = slice(start, min(start + CHUNK, len(self)))
            yield rows, self[rows]

    def frequencies(self) -> Tensor:
        """(l,): how many sets contain each class."""
        return torch.stack([sets.sum(0) for _, sets in self.chunks()]).sum(0)

    def sizes_by_chance(self) -> Tensor:
        """(l,): how many instances each class would have if every instance chose among its candidates at random."""
        sizes = torch.zeros(self._num_classes, device=self.device)
        for _, sets in self.chunks():
            for part in sets.split(_FLOAT_CHUNK):
                sizes += (part / part.sum(1, keepdim=True)).sum(0)
        return sizes

    def bytes_of_rows(self) -> Tensor:
        """uint8 (n, ⌈l / 8⌉): the packed sets, for a checksum."""
        return self._bits


AnyCandidates = Tensor | CandidateSets
"""A bool tensor (n, l), or the same packed."""


def _packed(sets: Tensor) -> tuple[Tensor, int]:
    bits = np.packbits(sets.cpu().numpy(), axis=1, bitorder="little")
    return torch.from_numpy(bits).to(sets.device), sets.shape[1]
