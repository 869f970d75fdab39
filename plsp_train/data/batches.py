"""Endless batches of indices: seeded, without replacement within a pass, and resumable."""

from typing import Any

import torch
from torch import Tensor


class IndexSampler:
    """Yield batches of `batch_size` of the given indices forever, in passes over a fresh permutation each.

    Within a pass every index occurs exactly once. A batch at the end of a pass is filled up from the next one, so all
    batches are full, however few indices there are. An epoch of I iterations is `zip(range(I), sampler)`.
    """

    def __init__(self, indices: Tensor, batch_size: int, generator: torch.Generator) -> None:
        if indices.dim() != 1 or len(indices) == 0:
            raise ValueError(f"indices must be of shape (n,) with n > 0, got {tuple(indices.shape)}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        self.batch_size = batch_size
        self._generator = generator
        self._order = indices
        self._position = len(indices)  # the first batch starts the first pass

    @property
    def indices(self) -> Tensor:
        """All indices, in the order of the present pass."""
        return self._order

    def __iter__(self) -> "IndexSampler":
        return self

    def __next__(self) -> Tensor:
        batch = self._order.new_empty(self.batch_size)  # fails at once if it is too large for the memory
        filled = 0
        while filled < self.batch_size:
            if self._position == len(self._order):
                self._shuffle()
            part = self._order[self._position : self._position + self.batch_size - filled]
            batch[filled : filled + len(part)] = part
            self._position += len(part)
            filled += len(part)
        return batch

    def upcoming(self, count: int) -> list[Tensor]:
        """At most so many of the next batches, as far as the present pass determines them. Draws no random numbers."""
        rest = self._order[self._position : self._position + count * self.batch_size]
        return [batch for batch in rest.split(self.batch_size) if len(batch) == self.batch_size]

    def _shuffle(self) -> None:
        device = self._generator.device
        permutation = torch.randperm(len(self._order), generator=self._generator, device=device)
        self._order = self._order[permutation.to(self._order.device)]
        self._position = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "order": self._order.clone(),
            "position": self._position,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. A shared generator is reset for its other users too."""
        self._order = state["order"].to(self._order.device, copy=True)
        self._position = int(state["position"])
        self._generator.set_state(state["generator"].cpu())
