"""Training over several ranks started by torchrun: the network is shared out, everything behind it is replicated.

Every rank draws the same batches and random numbers from the same generators. It loads, augments and computes the
features of its own rows of a batch (`sharding.py`). The features of all rows are then gathered, and every rank computes
the same logits, loss and state. Losses need not be means over instances, and methods are unaware of ranks.

Gradients: every rank computes the loss of the whole batch, so the loss is also its own mean over ranks. Gathering
propagates gradients to all ranks, hence the mean of the ranks' gradients is the gradient of the loss. Computing it is
left to DistributedDataParallel.

Without torchrun, or with one rank, there is no process group and every function here is the identity.
"""

import importlib
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from plsp_kernels.gathering import gather_rows
from plsp_train.data.shard import Shard, shard_of


class RankLost(Exception):
    """Another rank ended during the run; its own message says why."""


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this is rank 0, the only one that writes files and prints."""
    return num_ranks() == 1 or dist.get_rank() == 0


def own_shard(total: int) -> Shard:
    """This rank's part of so many rows."""
    return Shard(0, total, total) if num_ranks() == 1 else shard_of(total, dist.get_rank(), num_ranks())


def pick_device(name: str) -> torch.device:
    """The device of this name; auto: a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", name):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:i, got {name!r}")
    device = torch.device(name)
    num_gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise ValueError(f"device {name} is not available: torch finds {num_gpus} GPUs; use --device cpu")
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
    """Connect the ranks that torchrun started. An error of communication becomes RankLost."""
    if not _launched():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # torch imports this module on demand, and its default arguments then keep the group. gloo's threads would outlive
    # destroy_process_group and abort the process if one of them frees a tensor while the interpreter shuts down.
    importlib.import_module("torch.distributed.nn")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=_store(), rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    try:
        yield
        # The first rank to exit makes torchrun stop the others: wait until rank 0 has written everything. After an
        # exception no rank waits, which is how it stops all of them. The tensor outlives the group: in PyTorch 2.6 the
        # group's destructor holds the GIL while it joins a thread, which needs the GIL to free the last tensor it sent.
        last = torch.zeros(1)
        dist.all_reduce(last)
    except RuntimeError as error:
        if not _is_communication_error(error):
            raise
        reason = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).split(". ")[0]  # without gloo's source line
        raise RankLost(f"rank {dist.get_rank()} cannot reach the other ranks: {reason}") from None
    dist.destroy_process_group()


def _is_communication_error(error: RuntimeError) -> bool:
    """gloo raises plain RuntimeErrors that name its source files."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


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
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def from_all_ranks(*columns: Tensor) -> list[Tensor]:
    """Tensors (N,) or (N, d) of this rank, concatenated with those of the other ranks in their order."""
    group = dist.group.WORLD if num_ranks() > 1 else None
    return list(columns) if group is None else gather_rows(group, *columns)


def launch_id() -> str:
    """Identifies a launch of torchrun that restarts failed workers, over all attempts; empty for any other process."""
    if not _by_torchrun() or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0:
        return ""
    run_id = os.environ["TORCHELASTIC_RUN_ID"]
    # Without an id of its own, torchrun keeps rank 0 below the same agent.
    return f"{socket.gethostname()} {os.getppid()}" if run_id == "none" else run_id


def print_error(text: str, *, is_consequence: bool = False) -> None:
    """Print an error once, however many ranks meet it. A consequence is printed only if no rank has named a cause."""
    if _is_first(text, is_consequence):
        print(text, file=sys.stderr)


def _is_first(text: str, is_consequence: bool) -> bool:
    if not _launched():
        return True
    try:
        store = _store()
        is_first_of_all = store.add("plsp/errors", 1) == 1
        return is_first_of_all if is_consequence else store.add(f"plsp/errors/{text}", 1) == 1
    except RuntimeError:  # the process that kept the store is gone
        return True


def _store() -> dist.Store:
    """Through which ranks communicate before and after their process group."""
    return _store_at(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])


@cache
def _store_at(address: str, port: str) -> dist.Store:
    store, _, _ = next(dist.rendezvous("env://"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    # torchrun's own store outlives an attempt, and holds the addresses of its workers.
    return dist.PrefixStore(f"attempt{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def _launched() -> bool:
    """Whether torchrun started this process as one of several."""
    return _by_torchrun() and int(os.environ["WORLD_SIZE"]) > 1


def _by_torchrun() -> bool:
    return dist.is_available() and dist.is_torchelastic_launched()


def _local_rank() -> int:
    return int(os.environ["LOCAL_RANK"])
