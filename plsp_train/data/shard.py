"""The rows of a batch that one rank computes."""

from typing import NamedTuple


class Shard(NamedTuple):
    """Rows `start` to `stop` of a batch of `total`."""

    start: int
    stop: int
    total: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


def shard_of(total: int, rank: int, num_ranks: int) -> Shard:
    """The contiguous rows of a rank. Sizes differ by at most one; with fewer rows than ranks, some have none."""
    return Shard(total * rank // num_ranks, total * (rank + 1) // num_ranks, total)
