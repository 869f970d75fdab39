"""The loop of digits.py on several processes, with DistributedDataParallel.

Every process trains on batches of its own. Two things make it one run: DistributedDataParallel averages the gradients,
and `group` makes every process take in the labelled features and confident instances of all, so that class covariances
and thresholds are the same everywhere. With batches of equal sizes, a step is that of one process on all the batches.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import digits
import torch
import torch.distributed as dist
import torch.distributed.nn  # imported once a process group exists, it keeps the group and its threads to the very end
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from plsp_kernels import SemanticUpperBoundLoss


class Process(NamedTuple):
    """This process among those that train together."""

    rank: int
    ranks: int
    device: torch.device
    group: Any  # torch.distributed.ProcessGroup; None for a single process


class Network(nn.Module):
    """Returns features and logits in one forward pass, as DistributedDataParallel wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, digits.NUM_FEATURES), nn.ReLU())
        self.classifier = nn.Linear(digits.NUM_FEATURES, digits.NUM_CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(x)
        return features, self.classifier(features)


def train(
    model: nn.Module,
    network: Network,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[Tensor], Any],
    process: Process,
) -> None:
    """Pre-train, then train with the semantic upper bound. `model` is the network, wrapped for several processes."""
    rank, ranks, device, group = process
    torch.manual_seed(0)  # the same candidate sets everywhere
    train_x, train_y, test_x, test_y = (part.to(device) for part in digits.load())
    candidates = digits.ambiguous(train_y.cpu(), flip_probability=0.5).to(device)
    semantic_loss = SemanticUpperBoundLoss(len(train_x), digits.NUM_CLASSES, digits.NUM_FEATURES).to(device)
    num_labeled, num_unlabeled = digits.LABELED_BATCH // ranks, digits.UNLABELED_BATCH // ranks

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()

    for epoch in range(digits.PRETRAIN_EPOCHS):
        order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(epoch))
        own = order[: len(order) // ranks * ranks][rank::ranks]  # as many steps on every process
        for index in own.split(128 // ranks):
            _, logits = model(digits.augment(train_x[index], 0.1))
            inside = candidates[index].float()
            step(-(F.log_softmax(logits, dim=1) * inside).sum(1).div(inside.sum(1)).mean())

    torch.manual_seed(1 + rank)  # batches and noise of this process
    for epoch in range(1, digits.EPOCHS + 1):
        with torch.no_grad():
            labeled, labels = digits.select_labeled(network(train_x)[1], candidates)
        rest = torch.ones(len(train_x), dtype=torch.bool, device=device).index_fill(0, labeled, False).nonzero()[:, 0]
        for _ in range(digits.ITERATIONS):
            x_l = labeled[torch.randint(len(labeled), (num_labeled,))]
            x_u = rest[torch.randint(len(rest), (num_unlabeled,))]
            views = [(x_l, 0.1), (x_u, 0.1), (x_u, 0.3)]
            features, logits = model(torch.cat([digits.augment(train_x[index], noise) for index, noise in views]))
            loss = semantic_loss(
                *logits.split([num_labeled, num_unlabeled, num_unlabeled]),
                network.classifier.weight,
                labels[x_l],
                candidates[x_u],
                labeled_features=features[:num_labeled],
                index=x_u,
                strength=0.01 * epoch / digits.EPOCHS,
                ss_weight=epoch / digits.EPOCHS,
                group=group,
            )
            step(loss.total)
        if epoch % 10 == 0 and rank == 0:
            with torch.no_grad():
                accuracy = (network(test_x)[1].argmax(1) == test_y).float().mean()
            print(f"epoch {epoch:2d}: micro-F1 {accuracy:.3f}\n", end="", flush=True)

    # The same line from every process: what they know is the same, and comes from the batches of all.
    statistics, threshold = semantic_loss.covariance, semantic_loss.curriculum.thresholds.mean()
    trace, size = statistics.covariance.diagonal(dim1=1, dim2=2).sum(), statistics.count.sum()
    print(f"covariances of {size} features, trace {trace:.6f}; mean threshold {threshold:.6f}\n", end="", flush=True)


def main() -> None:
    use_gpu = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
    network = Network().to(device)  # DistributedDataParallel starts all processes from the weights of the first
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    process = Process(dist.get_rank(), dist.get_world_size(), device, dist.group.WORLD)
    train(model, network, optimizer, Tensor.backward, process)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
