"""Training over several ranks started by torchrun: the forward pass is sharded, everything else is replicated.

Every rank holds all data, draws the same batches from the same generators and keeps the same method state. It runs the
network on its own rows of a batch (`sharding.py`). The features of all rows are then gathered, and every rank computes
the same logits, loss and state. Methods are unaware of ranks.

Gradients: every rank computes the loss of the whole batch, so the loss is also its own mean over ranks. Sums over ranks
propagate gradients to all ranks, hence the mean of the ranks' gradients is the gradient of the loss.

Without torchrun, or with one rank, there is no process group and every function here is the identity.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


class RankLost(Exception):
    """Another rank ended during the run; its own message says why."""


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this is rank 0, the only one that writes files and prints."""
    return num_ranks() == 1 or dist.get_rank() == 0


def pick_device(name: str) -> torch.device:
    """The device of this name; auto: a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:i, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name} is not available: torch finds no GPU; use --device cpu")
    return own_device(device)


def own_device(device: torch.device) -> torch.device:
    """The device of this rank: one GPU each."""
    if device.type != "cuda" or not _launched():
        return device
    if device.index is not None:
        raise ValueError(f"several ranks cannot share {device}: with torchrun use --device cuda or cpu")
    if _local_rank() >= torch.cuda.device_count():
        raise ValueError(
            f"rank {_local_rank()} of this machine finds only {torch.cuda.device_count()} GPUs: "
            "start one rank per GPU, or use --device cpu"
        )
    return torch.device("cuda", _local_rank())


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Connect the ranks that torchrun started."""
    if not _launched():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
    yield
    # The first rank to exit makes torchrun stop the others: wait until rank 0 has written everything. After an
    # exception no rank waits, which is how it stops all of them.
    agree(0)
    dist.destroy_process_group()


@contextmanager
def one_rank_first() -> Iterator[None]:
    """One rank of each machine goes first, so that the others find what it has downloaded."""
    waits = num_ranks() > 1 and _local_rank() > 0
    if waits:
        agree(0)
    yield
    if not waits:
        agree(0)


def agree(*values: int) -> list[int]:
    """The maximum over ranks of each value. Waits for all ranks, not for their GPUs."""
    if num_ranks() == 1:
        return list(values)
    largest = torch.tensor(values, dtype=torch.int64)
    all_reduce(largest, "MAX")
    return largest.tolist()


def average_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Replace gradients by their mean over ranks, in one message."""
    if num_ranks() == 1:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    mean = torch.cat([gradient.flatten() for gradient in gradients]).div_(num_ranks())
    all_reduce(mean)
    for gradient, part in zip(gradients, mean.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view(gradient.shape))


def all_reduce(tensor: Tensor, op: str = "SUM") -> None:
    """In place."""
    try:
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
    except RuntimeError as error:
        reason = str(error).split(". ")[0].splitlines()[0]
        raise RankLost(f"rank {dist.get_rank()} cannot reach the other ranks: {reason}") from None


def _launched() -> bool:
    """Whether torchrun started this process as one of several."""
    return dist.is_available() and dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1


def _local_rank() -> int:
    return int(os.environ["LOCAL_RANK"])
