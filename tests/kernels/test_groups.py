"""State updates over two ranks: every rank holds what one process would hold that was given all their rows."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from plsp_kernels import CurriculumThreshold, SemanticCovariance, SemanticCrossEntropyLoss, SemanticUpperBoundLoss

RANKS, CLASSES, FEATURES, INSTANCES = 2, 5, 7, 40
UNEVEN = ((9, 4), (1, 8), (0, 6), (3, 0))  # rows of the two ranks, batch by batch


def _mine(rank: int, counts: tuple[int, ...]) -> slice:
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def _covariances(rank: int, kind: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shared, alone = (SemanticCovariance(CLASSES, FEATURES, kind) for _ in range(2))
    for counts in UNEVEN:
        features = torch.randn(sum(counts), FEATURES, generator=generator).to(dtype) * 100
        labels = torch.randint(CLASSES, (sum(counts),), generator=generator)
        mine = _mine(rank, counts)
        shared.update(features[mine], labels[mine], group=dist.group.WORLD)
        alone.update(features, labels)
    return list(shared.buffers()), list(alone.buffers())


def _curricula(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    shared, alone = (CurriculumThreshold(INSTANCES, CLASSES) for _ in range(2))
    for counts in UNEVEN:
        total = sum(counts)
        index = torch.randint(INSTANCES // 4, (total,), generator=generator)  # repeated, also on different ranks
        prediction = torch.randint(CLASSES, (total,), generator=generator)
        selected = torch.rand(total, generator=generator) < 0.7
        mine = _mine(rank, counts)
        shared.update(index[mine], prediction[mine], selected[mine], group=dist.group.WORLD)
        alone.update(index, prediction, selected)
    return list(shared.buffers()), list(alone.buffers())


def _cross_entropies(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """Statistics, and the losses of the rows of this rank."""
    generator = torch.Generator().manual_seed(5)
    shared, alone = (SemanticCrossEntropyLoss(CLASSES, FEATURES, reduction="none") for _ in range(2))
    weight = torch.randn(CLASSES, FEATURES, generator=generator)
    losses: list[tuple[Tensor, Tensor]] = []
    for counts in UNEVEN:
        features = torch.randn(sum(counts), FEATURES, generator=generator)
        labels = torch.randint(CLASSES, (sum(counts),), generator=generator)
        labels[::5] = shared.ignore_index
        logits, mine = features @ weight.T, _mine(rank, counts)
        own = shared(logits[mine], weight, labels[mine], features=features[mine], strength=0.5, group=dist.group.WORLD)
        whole = alone(logits, weight, labels, features=features, strength=0.5)
        losses.append((own, whole[mine]))
    found, wanted = (torch.cat(parts) for parts in zip(*losses, strict=True))
    return [*shared.buffers(), found], [*alone.buffers(), wanted]


class _Loop:
    """A loop of PLSP's loss on random features."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.network = nn.Sequential(nn.Linear(4, FEATURES), nn.Tanh())
        self.classifier = nn.Linear(FEATURES, CLASSES)
        self.criterion = SemanticUpperBoundLoss(INSTANCES, CLASSES, FEATURES, threshold=0.3)

    def step(self, forward: Callable[[Tensor], Any], batch: dict[str, Tensor], group: Any) -> Tensor:
        views = [batch["labeled"], batch["weak"], batch["strong"]]
        features, logits = forward(torch.cat(views))
        return self.criterion(
            *logits.split([len(view) for view in views]),
            self.classifier.weight,
            batch["labels"],
            batch["candidates"],
            labeled_features=features[: len(views[0])],
            index=batch["index"],
            strength=0.5,
            group=group,
        ).total


class _Both(nn.Module):
    def __init__(self, loop: _Loop) -> None:
        super().__init__()
        self.network, self.classifier = loop.network, loop.classifier

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.network(inputs)
        return features, self.classifier(features)


def _batch(generator: torch.Generator) -> dict[str, Tensor]:
    inputs = {name: torch.randn(6, 4, generator=generator) for name in ("labeled", "weak", "strong")}
    labels, own = (torch.randint(CLASSES, (6,), generator=generator) for _ in range(2))
    candidates = (torch.rand(6, CLASSES, generator=generator) < 0.5).scatter(1, own[:, None], True)
    index = torch.randint(INSTANCES, (6,), generator=generator)
    return {**inputs, "labels": labels, "candidates": candidates, "index": index}


def _loops(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(4)
    shared, alone = _Loop(), _Loop()
    parallel, whole = DistributedDataParallel(_Both(shared)), _Both(alone)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (parallel, whole)]
    for _ in range(5):
        batch = _batch(generator)
        mine = {name: value[3 * rank : 3 * rank + 3] for name, value in batch.items()}
        shared.step(parallel, mine, dist.group.WORLD).backward()
        alone.step(whole, batch, None).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [
        [*parallel.parameters(), *shared.criterion.buffers()],
        [*whole.parameters(), *alone.criterion.buffers()],
    ]


def _work(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    found = {
        "full float32": _covariances(rank, "full", torch.float32),
        "full bfloat16": _covariances(rank, "full", torch.bfloat16),
        "diagonal float64": _covariances(rank, "diagonal", torch.float64),
        "curriculum": _curricula(rank),
        "cross-entropy": _cross_entropies(rank),
        "loop": _loops(rank),
    }
    torch.save(copy.deepcopy(found), directory / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank, the state of each case and that of one process which had all rows."""
    directory = tmp_path_factory.mktemp("groups")
    torch.multiprocessing.spawn(_work, args=(directory,), nprocs=RANKS)
    return [torch.load(directory / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("case", ["full float32", "full bfloat16", "diagonal float64", "curriculum", "cross-entropy"])
def test_every_rank_holds_the_state_of_one_process_bit_for_bit(found: list[dict[str, Any]], case: str) -> None:
    for rank in range(RANKS):
        shared, alone = found[rank][case]
        for one, other in zip(shared, alone, strict=True):
            assert torch.equal(one, other)
        assert any(tensor.any() for tensor in shared)


def test_ddp_loop_reproduces_the_loop_of_one_process(found: list[dict[str, Any]]) -> None:
    for rank in range(RANKS):
        shared, alone = found[rank]["loop"]
        for one, other in zip(shared, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_state_of_a_ddp_loop_is_the_same_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for one, other in zip(found[0]["loop"][0], found[1]["loop"][0], strict=True):
        assert torch.equal(one, other)
