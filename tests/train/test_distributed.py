"""Two ranks compute what one does; they stop, fail and resume together."""

import copy
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from plsp_train import files
from plsp_train.cli import main
from plsp_train.distributed import agree, average_gradients, process_group
from plsp_train.engine import Engine
from plsp_train.models import Network, build_model
from plsp_train.sharding import shard_features
from small_runs import SMALL, metrics, run

RANKS = 2
UNEVEN = ["--labeled-batch", "17", "--pretrain-batch", "255"]  # batches that two ranks cannot halve
PICO = ["--method", "pico", "--epochs", "2"]
STOP_AT = ("train", 2, 3)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _as_torchrun_does(rank: int, ports: list[int]) -> None:
    """The next process group of this process is connected through the next port."""
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports.pop()),
    }


def _loss_of_the_whole_batch(network: Network, inputs: Tensor) -> Tensor:
    """Pairs of instances enter it: it is no mean over instances that each rank could take for itself."""
    features = network.features(inputs)
    labels = torch.arange(len(inputs)) % network.classifier.out_features
    return F.cross_entropy(network.classifier(features), labels) + (features @ features.T).square().mean()


def _check_gradients(name: str, shape: tuple[int, ...], count: int) -> None:
    torch.manual_seed(0)
    alone = build_model(name, shape, 3).double()
    shared = copy.deepcopy(alone)
    shard_features(shared)
    inputs = torch.randn(count, *shape, dtype=torch.float64)
    for network in (alone, shared):
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            _loss_of_the_whole_batch(network, inputs).backward()
            if network is shared:
                average_gradients(optimizer)
            optimizer.step()
    for (key, one), two in zip(alone.state_dict().items(), shared.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, msg=lambda text, key=key: f"{name}, {count} instances, {key}: {text}")
    torch.testing.assert_close(alone.eval().features(inputs), shared.eval().features(inputs))


def _check_copies() -> None:
    network = build_model("mlp", (4,), 3)
    shard_features(network)
    clone = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.zero_()
    inputs = torch.randn(5, 4)
    assert network.features(inputs).abs().sum() > 0
    assert clone.features(inputs).abs().sum() == 0, "the copy runs its own network"
    rows: list[int] = []
    clone.hidden.register_forward_hook(lambda module, arguments, result: rows.append(len(result)))
    assert clone.features(inputs).shape == (5, 64)
    assert rows == [2 + dist.get_rank()], "the copy is shared out too"


def _work(rank: int, directory: Path, ports: list[int]) -> None:
    """All that two ranks do in these tests, one after the other; exit codes go to a file per rank."""
    torch.set_num_threads(1)
    sys.stderr = sys.stdout = open(directory / f"rank{rank}.txt", "w")  # noqa: SIM115
    codes: dict[str, int] = {}

    _as_torchrun_does(rank, ports)
    with process_group(torch.device("cpu")):
        assert agree(rank, 5 - rank) == [1, 5]
        _check_gradients("mlp", (4,), 7)
        _check_gradients("densenet", (1, 8, 8), 5)
        _check_gradients("lenet", (1, 28, 28), 1)  # one rank has no instance at all
        _check_copies()

    def train(name: str, *arguments: str) -> None:
        _as_torchrun_does(rank, ports)
        codes[name] = run(directory / name, *arguments)
        (directory / f"rank{rank}.json").write_text(json.dumps(codes))

    train("whole", *UNEVEN)
    train("pico", *PICO)
    train("diverging", "--lr", "1e18")

    step = Engine._step

    def stop_rank_one(self: Engine, stage: str, epoch: int) -> Any:
        if rank == 1 and (stage, epoch, self.steps_done + 1) == STOP_AT:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, stage, epoch)

    Engine._step = stop_rank_one  # type: ignore[method-assign]
    train("stopped", *UNEVEN)
    Engine._step = step  # type: ignore[method-assign]

    def full(descriptor: int) -> None:
        raise OSError("No space left on device")

    if rank == 0:
        files.os.fsync = full  # type: ignore[attr-defined]
    train("full")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    ports = [_free_port() for _ in range(6)]
    torch.multiprocessing.spawn(_work, args=(directory, ports), nprocs=RANKS)  # raises what a rank raised
    return directory


def _codes(directory: Path, name: str) -> list[int]:
    return [json.loads((directory / f"rank{rank}.json").read_text())[name] for rank in range(RANKS)]


def _assert_same_numbers(one: Path, two: Path) -> None:
    """Up to rounding, which may at most turn the choice of a few instances."""
    for line, other in zip(metrics(one), metrics(two), strict=True):
        assert line.pop("stage") == other.pop("stage")
        assert line == {name: pytest.approx(value, rel=1e-3, abs=3e-3) for name, value in other.items()}


@pytest.mark.parametrize(("name", "arguments"), [("whole", UNEVEN), ("pico", PICO)])
def test_two_ranks_reproduce_the_numbers_of_one(tmp_path, directory: Path, name: str, arguments: list[str]) -> None:
    assert _codes(directory, name) == [0, 0]
    assert run(tmp_path / "one", *arguments) == 0
    _assert_same_numbers(tmp_path / "one", directory / name)
    assert json.loads((directory / name / "summary.json").read_text())["ranks"] == RANKS


def test_only_rank_0_prints(directory: Path) -> None:
    texts = [(directory / f"rank{rank}.txt").read_text() for rank in range(RANKS)]
    assert texts[0].count("the loss became") == 1
    assert "epoch 4/4" in texts[0]
    assert texts[1].splitlines()[:-1] == [], "all but the error of the last run"


def test_a_non_finite_loss_stops_both_ranks(directory: Path) -> None:
    assert _codes(directory, "diverging") == [1, 1]


def test_a_signal_to_one_rank_stops_both_at_the_same_step_and_one_rank_can_resume(tmp_path, directory: Path) -> None:
    assert _codes(directory, "stopped") == [143, 143]
    assert torch.load(directory / "stopped" / "checkpoint.pt", weights_only=True)["steps_done"] == STOP_AT[-1]
    assert main([*SMALL, *UNEVEN, "--resume", "--out", str(directory / "stopped")]) == 0
    _assert_same_numbers(directory / "stopped", directory / "whole")


def test_an_error_on_one_rank_stops_both(directory: Path) -> None:
    assert _codes(directory, "full") == [2, 1]
    assert "No space left on device" in (directory / "rank0.txt").read_text()
    assert "cannot reach the other ranks" in (directory / "rank1.txt").read_text()


def test_torchrun_starts_the_ranks(tmp_path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "-m", "plsp_train"]
    short = [*SMALL, "--pretrain-epochs", "1", "--epochs", "0"]
    done = subprocess.run([*command, *short], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.count("epoch 1/1") == 1
    (out,) = (tmp_path / "runs").iterdir()
    assert len(metrics(out)) == 1
