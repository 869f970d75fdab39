"""Several ranks, started by torchrun, train one network: they share out its forward pass and do all else alike.

Every rank holds all data, draws the same batches from the same generators and keeps the same state of the method. It
runs the network on its own rows of a batch; the features of all rows are gathered, and from there on every rank
computes the same: logits, loss, state. A method needs to know nothing of this.

Gradients: the loss of each rank is the loss of the whole batch, so it is the mean over ranks too. Sums over ranks pass
gradients back to all ranks, hence the mean of the ranks' gradients is the gradient of that mean.

Without torchrun, or with one rank, there is no process group and every function here is the identity.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from plsp_train.models import Network


class RankLost(Exception):
    """Another rank ended in the middle of the run; its own message says why."""


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_main() -> bool:
    """Rank 0, the only one that writes files and prints."""
    return num_ranks() == 1 or dist.get_rank() == 0


def own_device(device: torch.device) -> torch.device:
    """The device of this rank: each takes a GPU of its own."""
    if device.type != "cuda" or not _launched():
        return device
    if device.index is not None:
        raise ValueError(f"several ranks cannot share {device}: with torchrun use --device cuda or cpu")
    if _local_rank() >= torch.cuda.device_count():
        raise ValueError(
            f"rank {_local_rank()} of this machine finds {torch.cuda.device_count()} GPUs: "
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
    # The first rank to end makes torchrun end the others: wait until rank 0 has written and said everything. After an
    # exception nobody waits, and that is how it ends all ranks.
    agree(0)
    dist.destroy_process_group()


@contextmanager
def one_rank_first() -> Iterator[None]:
    """On each machine one rank goes ahead, so that the others find what it has downloaded."""
    waits = num_ranks() > 1 and _local_rank() > 0
    if waits:
        agree(0)
    yield
    if not waits:
        agree(0)


def agree(*values: int) -> list[int]:
    """The largest of the ranks' values, the same on every rank; waits for all ranks, not for their GPUs."""
    if num_ranks() == 1:
        return list(values)
    largest = torch.tensor(values, dtype=torch.int64)
    _all_reduce(largest, "MAX")
    return largest.tolist()


def share_out(network: Network) -> None:
    """Make `features` run on this rank's rows alone and gather those of all; a deep copy of the network does so too."""
    if num_ranks() == 1:
        return
    if network.classifier.weight.is_cuda:
        nn.SyncBatchNorm.convert_sync_batchnorm(network)
    else:
        for module in network.modules():
            if isinstance(module, _BatchNorm):
                module.forward = partial(_batch_norm, module)  # type: ignore[method-assign]
    # A partial, not a closure: deepcopy binds it to the copied network.
    network.features = partial(_shared_features, network.features)  # type: ignore[method-assign]


def average_gradients(optimizer: torch.optim.Optimizer) -> None:
    """The mean over ranks, in one message."""
    if num_ranks() == 1:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    mean = torch.cat([gradient.flatten() for gradient in gradients]).div_(num_ranks())
    _all_reduce(mean)
    for gradient, part in zip(gradients, mean.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view(gradient.shape))


def _shared_features(features: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    count, rank = len(inputs), dist.get_rank()
    start, stop = (count * edge // num_ranks() for edge in (rank, rank + 1))
    # Rows of zeros for those of the others: their sum puts all rows in place, however uneven the parts.
    return _sum_over_ranks(F.pad(features(inputs[start:stop]), (0, 0, start, count - stop)))


@torch.compiler.disable
def _batch_norm(module: _BatchNorm, inputs: Tensor) -> Tensor:
    """Batch normalisation by the statistics of all ranks, as torch.nn.SyncBatchNorm has it for GPUs alone."""
    if not module.training:
        return type(module).forward(module, inputs)
    channels, dtype = inputs.shape[1], module.weight.dtype
    dims, shape = [0, *range(2, inputs.dim())], [channels] + [1] * (inputs.dim() - 2)
    values = inputs.double()  # in which a mean of squares less the squared mean loses nothing that float32 would show
    own_count = values.new_tensor([values.numel() // channels])
    sums = _sum_over_ranks(torch.cat([values.sum(dims), values.square().sum(dims), own_count]))
    count = int(sums[-1])
    if count < 2:
        raise ValueError("batch normalisation needs more than one value per channel: use larger batches")
    mean, mean_square = (sums[:-1] / count).split(channels)
    variance = mean_square - mean.square()
    statistics = ((module.running_mean, mean), (module.running_var, variance * count / (count - 1)))
    for running, value in statistics:
        running.lerp_(value.detach().to(dtype), module.momentum)  # type: ignore[union-attr, arg-type]
    module.num_batches_tracked.add_(1)  # type: ignore[union-attr]
    scale = (variance + module.eps).rsqrt().to(dtype) * module.weight
    shift = module.bias - mean.to(dtype) * scale
    return (inputs.to(dtype) * scale.view(shape) + shift.view(shape)).to(inputs.dtype)


class _SumOverRanks(torch.autograd.Function):
    """Every rank receives the sum, so every rank's gradient is one of each summand: their sum again."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        total = own.clone(memory_format=torch.contiguous_format)
        _all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _SumOverRanks.apply(grad)


@torch.compiler.disable
def _sum_over_ranks(own: Tensor) -> Tensor:
    return _SumOverRanks.apply(own)


def _all_reduce(tensor: Tensor, op: str = "SUM") -> None:
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
