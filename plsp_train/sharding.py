"""What several ranks share out: the rows that the network computes, the statistics of its batch norms, the gradients.

Imported only if there are several ranks: keeping torch.compile out of the communication imports its machinery.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from plsp_train.data.shard import shard_of
from plsp_train.distributed import num_ranks
from plsp_train.models import Network

if TYPE_CHECKING:
    from plsp_train.methods import Iteration, Method


def parallel_step(method: "Method", example: Tensor) -> "Callable[[str, int], Iteration]":
    """`method.step`, such that the backward pass averages gradients over ranks. The example is a batch of inputs."""
    network = method.task.model
    return DistributedDataParallel(
        _Step(method, network),
        find_unused_parameters=_has_unused_parameters(network, example),
        gradient_as_bucket_view=True,
    )


class _Step(nn.Module):
    """The whole forward pass of a step: it uses all parameters, some of them behind the gathering.

    Only parameters are registered. Buffers are the same on all ranks without being broadcast.
    """

    def __init__(self, method: "Method", network: Network) -> None:
        super().__init__()
        self._step = method.step
        self.trained = nn.ParameterList([*network.parameters(), *method.parameters()])

    def forward(self, stage: str, epoch: int) -> "Iteration":
        return self._step(stage, epoch)


def _has_unused_parameters(network: Network, example: Tensor) -> bool:
    """Whether the output does not depend on some parameter: only then DistributedDataParallel searches every graph."""
    was_training = network.training
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    output = network.eval()(example).float().sum()
    network.train(was_training)
    return None in torch.autograd.grad(output, parameters, allow_unused=True)


# ---------------------------------------------------------------------------------------------------------- features


def gather_views(own: Tensor, totals: Sequence[int]) -> Tensor:
    """All rows of the views, from the rows that each rank has of each view.

    A rank holds its shard of the first view, then its shard of the second, and so on; `totals` are the sizes of the
    whole views. Every rank knows the sizes of all shards, so that only rows are exchanged.
    """
    sizes = [[_size(total, rank) for total in totals] for rank in range(num_ranks())]
    longest = max(map(sum, sizes))
    padded = torch.cat([own, own.new_zeros(longest - len(own), *own.shape[1:])])
    received = _AllGather.apply(padded)
    shards = [
        part.split([*size, longest - sum(size)])[: len(totals)] for part, size in zip(received, sizes, strict=True)
    ]
    return torch.cat([shard for view in zip(*shards, strict=True) for shard in view])


def _size(total: int, rank: int) -> int:
    shard = shard_of(total, rank, num_ranks())
    return shard.stop - shard.start


class _AllGather(torch.autograd.Function):
    """Every rank receives all parts, so the gradient of a part is the sum of the ranks' gradients.

    As torch.distributed.nn.functional.all_gather, which is deprecated without a public successor.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> tuple[Tensor, ...]:
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(num_ranks())]
        dist.all_gather(parts, own.contiguous())
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        totals = torch.stack(grads)
        dist.all_reduce(totals)  # not every backend can reduce and scatter
        return totals[dist.get_rank()]


# ------------------------------------------------------------------------------------------------------- batch norms


def synchronise_batch_norms(network: Network) -> None:
    """Make batch norms use the statistics of the rows of all ranks; those of deep copies of the network do so too."""
    if network.classifier.weight.is_cuda:
        nn.SyncBatchNorm.convert_sync_batchnorm(network)
        return
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            # A partial, not a closure: deepcopy binds it to the copied module.
            module.forward = partial(_batch_norm, module)  # type: ignore[method-assign]


@torch.compiler.disable
def _batch_norm(module: _BatchNorm, inputs: Tensor) -> Tensor:
    """Batch normalisation over all ranks: torch.nn.SyncBatchNorm is for GPUs only."""
    if not module.training:
        return type(module).forward(module, inputs)
    channels, dtype = inputs.shape[1], torch.promote_types(inputs.dtype, torch.float32)
    dims, shape = [0, *range(2, inputs.dim())], [channels] + [1] * (inputs.dim() - 2)
    values = inputs.double()  # so that E[x²] - E[x]² is exact to float32
    own_count = values.new_tensor([values.numel() // channels])
    sums = _AllReduce.apply(torch.cat([values.sum(dims), values.square().sum(dims), own_count]))
    count = int(sums[-1])
    if count < 2:
        raise ValueError("batch normalisation needs more than one value per channel: use larger batches")
    mean, mean_square = (sums[:-1] / count).split(channels)
    variance = mean_square - mean.square()
    if module.num_batches_tracked is not None:  # nor are there running statistics otherwise
        module.num_batches_tracked.add_(1)
        momentum = 1 / int(module.num_batches_tracked) if module.momentum is None else module.momentum
        statistics = ((module.running_mean, mean), (module.running_var, variance * count / (count - 1)))
        for running, value in statistics:
            running.lerp_(value.detach().to(dtype), momentum)  # type: ignore[union-attr]
    weight, bias = (module.weight, module.bias) if module.affine else (1, 0)
    scale = (variance + module.eps).rsqrt().to(dtype) * weight
    shift = bias - mean.to(dtype) * scale
    return (inputs.to(dtype) * scale.view(shape) + shift.view(shape)).to(inputs.dtype)


class _AllReduce(torch.autograd.Function):
    """Every rank receives the sum, so the gradient of each summand is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        total = own.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _AllReduce.apply(grad)
