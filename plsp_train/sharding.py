"""Networks over several ranks: each rank runs its own rows, and batch norms use the statistics of all of them.

Imported only if there are several ranks: keeping torch.compile out of the communication imports its machinery.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from plsp_train.distributed import all_reduce, num_ranks
from plsp_train.models import Network


def shard_features(network: Network) -> None:
    """Make `features` run on this rank's rows only and gather all rows; deep copies of the network do so too."""
    if network.classifier.weight.is_cuda:
        nn.SyncBatchNorm.convert_sync_batchnorm(network)
    else:
        for module in network.modules():
            if isinstance(module, _BatchNorm):
                module.forward = partial(_batch_norm, module)  # type: ignore[method-assign]
    # A partial, not a closure: deepcopy binds it to the copied network.
    network.features = partial(_sharded_features, network.features)  # type: ignore[method-assign]


def _sharded_features(features: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    count, rank = len(inputs), dist.get_rank()
    start, stop = (count * edge // num_ranks() for edge in (rank, rank + 1))
    # Zeros for the rows of other ranks: the sum puts all rows in place, however uneven the shards.
    return _sum_over_ranks(F.pad(features(inputs[start:stop]), (0, 0, start, count - stop)))


@torch.compiler.disable
def _batch_norm(module: _BatchNorm, inputs: Tensor) -> Tensor:
    """Batch normalisation over all ranks: torch.nn.SyncBatchNorm is for GPUs only."""
    if not module.training:
        return type(module).forward(module, inputs)
    channels, dtype = inputs.shape[1], module.weight.dtype
    dims, shape = [0, *range(2, inputs.dim())], [channels] + [1] * (inputs.dim() - 2)
    values = inputs.double()  # so that E[x²] - E[x]² is exact to float32
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
    """Every rank receives the sum, so the gradient of each summand is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        total = own.clone(memory_format=torch.contiguous_format)
        all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _SumOverRanks.apply(grad)


@torch.compiler.disable
def _sum_over_ranks(own: Tensor) -> Tensor:
    return _SumOverRanks.apply(own)
