"""Rows of all ranks, so that every rank updates its state with the same whole batch."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:  # a build of PyTorch without distributed training lacks the class
    from torch.distributed import ProcessGroup


def gather_rows(group: "ProcessGroup", *columns: Tensor) -> list[Tensor]:
    """Concatenate each of the tensors over the ranks of the group, in their order and bit for bit.

    All columns of a rank have the same number of rows, which may differ between ranks and may be 0. The rows travel as
    bytes in one message, whatever their dtypes. Another message exchanges the numbers of rows; reading them is a host
    sync if the group communicates on GPUs only.
    """
    counts = _all_counts(columns[0], group)
    own = [_as_bytes(column) for column in columns]
    packed = torch.cat(own, dim=1)
    padded = packed.new_zeros(max(counts), packed.shape[1])
    padded[: len(packed)] = packed
    received = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(received, padded, group)
    whole = torch.cat([part[:count] for part, count in zip(received, counts, strict=True)])
    parts = whole.split([column.shape[1] for column in own], dim=1)
    return [_from_bytes(part, column) for part, column in zip(parts, columns, strict=True)]


def _all_counts(rows: Tensor, group: "ProcessGroup") -> list[int]:
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else rows.device
    own = torch.tensor([len(rows)], device=device)
    counts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, own, group)
    return torch.cat(counts).tolist()


def _as_bytes(column: Tensor) -> Tensor:
    """(N,) or (N, d) of any dtype as uint8 (N, bytes per row)."""
    table = column.detach()[:, None] if column.dim() == 1 else column.detach()
    return table.contiguous().view(torch.uint8)


def _from_bytes(rows: Tensor, like: Tensor) -> Tensor:
    return rows.contiguous().view(like.dtype).view(len(rows), *like.shape[1:])
