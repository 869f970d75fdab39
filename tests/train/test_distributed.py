"""Two ranks compute what one does; they stop, fail and resume together."""

import copy
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import plsp_train.methods.task
from plsp_train import distributed, files
from plsp_train.cli import main
from plsp_train.data import TrainTestData, build_augmentation
from plsp_train.data.candidate_sets import CandidateSets
from plsp_train.distributed import agree, process_group
from plsp_train.engine import Engine
from plsp_train.methods import METHODS, Iteration, Method, Task, View
from plsp_train.metrics import own_logits, predictions
from plsp_train.models import Network, build_model
from plsp_train.sharding import parallel_step, synchronise_batch_norms
from small_runs import SMALL, metrics, run

RANKS = 2
# Batches that two ranks cannot halve. With this seed no instance is so close to a threshold that rounding decides.
UNEVEN = ["--labeled-batch", "17", "--pretrain-batch", "255", "--seed", "1"]
SHORT = ["--epochs", "2", "--batch-size", "255"]
ALL_RUNS = {"plsp": UNEVEN} | {
    method: ["--method", method, *SHORT]
    for method in ("cc", "rc", "proden", "lws", "cavl", "pico", "crdpll", "df", "supervised")
}
ALL_RUNS["released"] = [*UNEVEN, "--recipe", "released", "--epochs", "1"]
ALL_RUNS["robust"] = [*UNEVEN, "--recipe", "robust"]
ALL_RUNS["held-out"] = [*UNEVEN, "--validation-fraction", "0.1", "--epochs", "1"]
STOP_AT = ("train", 2, 3)


def _free_ports() -> Iterator[int]:
    """Below those that the system gives to outgoing connections, so that they stay free until they are used."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 10_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                yield port


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


class _Pairwise(Method):
    """Its loss compares instances with each other: no mean over instances that each rank could take for itself."""

    name, label, help = "pairwise", "pairwise", "for tests"

    def __init__(self, task: Task, count: int) -> None:
        super().__init__(task)
        self.count = count

    def step(self, stage: str, epoch: int) -> Iteration:
        batch = self.task.load(torch.arange(self.count).flip(0))
        views = batch.weak(), batch.plain(), batch.strong()
        features = self.task.features(*(View(view.inputs.double(), view.total) for view in views))
        logits = self.task.model.classifier(features)
        labels = torch.arange(len(features)) % logits.shape[1]
        loss = F.cross_entropy(logits, labels) + (features @ features.T).square().mean()
        return Iteration(loss, {"loss": loss}, len(features))

    stages = learning_rate = start_epoch = num_iterations = None  # type: ignore[assignment]
    state_dict = load_state_dict = None  # type: ignore[assignment]


def _task(network: Network, inputs: Tensor) -> Task:
    data = TrainTestData("test", ("a", "b", "c"), inputs, (0.1,) * inputs.shape[1], (0.4,) * inputs.shape[1])
    return Task(
        config=None,  # type: ignore[arg-type]
        model=network,
        inputs=inputs,
        candidates=CandidateSets.pack(torch.ones(len(inputs), 3, dtype=torch.bool)),
        true_labels=None,
        augmentation=build_augmentation(data),
        generator=torch.Generator().manual_seed(7),
    )


def _inputs(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    if len(shape) == 1:
        return torch.randn(9, *shape, generator=generator)
    return torch.randint(256, (9, *shape), generator=generator).to(torch.uint8)


def _check_gradients(build: Callable[[], Network], shape: tuple[int, ...], count: int) -> None:
    """Two steps of one rank on whole batches, and of all ranks on their shards."""
    networks, states = [], []
    for is_shared in (False, True):
        torch.manual_seed(0)
        network, inputs = build().double(), _inputs(shape)
        method = _Pairwise(_task(network, inputs), count)
        step = method.step
        if is_shared:
            synchronise_batch_norms(network)
            step = parallel_step(method, method.task.augmentation.plain(inputs[:2]).double())
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-2)
        with nullcontext() if is_shared else _alone():
            for _ in range(2):
                optimizer.zero_grad()
                step("train", 1).loss.backward()
                optimizer.step()
        networks.append(network)
        states.append(method.task.generator.get_state())
    assert torch.equal(*states), "as many random numbers were drawn"
    for (key, one), two in zip(networks[0].state_dict().items(), networks[1].state_dict().values(), strict=True):
        message = f"{type(network).__name__}, {count} instances, {key}: "
        torch.testing.assert_close(one, two, msg=lambda text, key=message: key + text)
    plain = method.task.augmentation.plain(inputs).double()
    torch.testing.assert_close(networks[0].eval()(plain), networks[1].eval()(plain))


@contextmanager
def _alone() -> Iterator[None]:
    """As if there were no other rank."""
    modules = (distributed, plsp_train.methods.task)
    with ExitStack() as patches:
        for module in modules:
            patches.enter_context(mock.patch.object(module, "num_ranks", return_value=1))
        yield


def _with_unused_layer() -> Network:
    network = build_model("mlp", (4,), 3)
    network.unused = torch.nn.Linear(4, 4)
    return network


def _with_bare_norm(**options: Any) -> Network:
    network = build_model("mlp", (4,), 3)
    network.hidden.append(torch.nn.BatchNorm1d(network.classifier.in_features, **options))
    return network


def _check_shards() -> None:
    network, inputs = build_model("mlp", (4,), 3).eval(), _inputs((4,))
    task, rows = _task(network, inputs), []
    clone = copy.deepcopy(network)
    for each in (network, clone):
        each.hidden.register_forward_hook(lambda module, arguments, result: rows.append(len(result)))
    view = task.load(torch.arange(5)).plain()
    assert len(view.inputs) == 2 + dist.get_rank(), "a rank loads its own rows"
    expected = task.augmentation.plain(inputs[:5])
    for each in (network, clone):
        torch.testing.assert_close(task.features(view, network=each), each.features(expected))
    assert rows == 2 * [2 + dist.get_rank(), 5]
    assert sum(logits.shape[0] for _, logits in own_logits(network, inputs, task.augmentation)) == 4 + dist.get_rank()
    expected = network(task.augmentation.plain(inputs)).argmax(1)
    assert torch.equal(predictions(network, inputs, task.augmentation), expected)
    assert predictions(network, inputs[:1], task.augmentation).shape == (1,), "one rank has no instance at all"


def _work(rank: int, directory: Path, ports: list[int]) -> None:
    """All that two ranks do in these tests, one after the other; exit codes go to a file per rank."""
    torch.set_num_threads(1)
    sys.stderr = sys.stdout = open(directory / f"rank{rank}.txt", "w")  # noqa: SIM115
    codes: dict[str, int] = {}

    _as_torchrun_does(rank, ports)
    with process_group(torch.device("cpu")):
        assert agree(rank, 5 - rank) == [1, 5]
        _check_gradients(partial(build_model, "mlp", (4,), 3), (4,), 7)
        _check_gradients(partial(build_model, "densenet", (3, 8, 8), 3), (3, 8, 8), 5)
        _check_gradients(partial(build_model, "lenet", (1, 28, 28), 3), (1, 28, 28), 1)  # one rank has no instance
        _check_gradients(_with_unused_layer, (4,), 6)
        _check_gradients(partial(_with_bare_norm, affine=False, momentum=None), (4,), 6)
        _check_gradients(partial(_with_bare_norm, track_running_stats=False), (4,), 6)
        _check_shards()

    def train(name: str, *arguments: str) -> None:
        _as_torchrun_does(rank, ports)
        codes[name] = run(directory / name, *arguments)
        (directory / f"rank{rank}.json").write_text(json.dumps(codes))

    for name, arguments in ALL_RUNS.items():
        train(name, *arguments)
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
    ports = list(itertools.islice(_free_ports(), len(ALL_RUNS) + 4))
    torch.multiprocessing.spawn(_work, args=(directory, ports), nprocs=RANKS)  # raises what a rank raised
    return directory


def _codes(directory: Path, name: str) -> list[int]:
    return [json.loads((directory / f"rank{rank}.json").read_text())[name] for rank in range(RANKS)]


def _assert_same_numbers(one: Path, two: Path) -> None:
    """Up to rounding, which may at most turn the choice of a few instances."""
    for line, other in zip(metrics(one), metrics(two), strict=True):
        assert line.pop("stage") == other.pop("stage")
        assert _numbers(line) == pytest.approx(_numbers(other), rel=1e-3, abs=3e-3)


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    """Metrics with a name for every number of a list; those that are undefined are -1.

    The sizes of ten classes become shares of all instances, as most metrics are.
    """
    flat = [
        (f"{name} {i}", number / 10 if number is not None and name == "relative_size_per_class" else number)
        for name, value in line.items()
        if name != "alarms"  # sentences about numbers that are compared
        for i, number in enumerate(value if isinstance(value, list) else [value])
    ]
    return {name: -1 if number is None else number for name, number in flat}


def test_every_method_is_run_on_two_ranks() -> None:
    assert set(METHODS) <= ALL_RUNS.keys()


@pytest.mark.parametrize("name", ALL_RUNS)
def test_two_ranks_reproduce_the_numbers_of_one(tmp_path, directory: Path, name: str) -> None:
    assert _codes(directory, name) == [0, 0]
    assert run(tmp_path / "one", *ALL_RUNS[name]) == 0
    _assert_same_numbers(tmp_path / "one", directory / name)
    assert json.loads((directory / name / "summary.json").read_text())["ranks"] == RANKS


def test_only_rank_0_prints(directory: Path) -> None:
    texts = [(directory / f"rank{rank}.txt").read_text() for rank in range(RANKS)]
    assert texts[0].count("the loss became") == 1
    assert "epoch 4/4" in texts[0]
    assert texts[1].splitlines()[:-1] == [], "all but the end of the last run, if rank 0 could not be asked"


def test_a_non_finite_loss_stops_both_ranks(directory: Path) -> None:
    assert _codes(directory, "diverging") == [1, 1]


def test_a_signal_to_one_rank_stops_both_at_the_same_step_and_one_rank_can_resume(tmp_path, directory: Path) -> None:
    assert _codes(directory, "stopped") == [143, 143]
    assert torch.load(directory / "stopped" / "checkpoint.pt", weights_only=True)["steps_done"] == STOP_AT[-1]
    assert main([*SMALL, *UNEVEN, "--resume", "--out", str(directory / "stopped")]) == 0
    _assert_same_numbers(directory / "stopped", directory / "plsp")


def test_an_error_on_one_rank_stops_both(directory: Path) -> None:
    assert _codes(directory, "full") == [2, 1]
    assert "No space left on device" in (directory / "rank0.txt").read_text()


# Standalone: a port of its own, so that two tests at once do not meet.
LAUNCHER = [sys.executable, "-m", "torch.distributed.run"]
TWO_RANKS = [*LAUNCHER, "--standalone", "--nproc-per-node", str(RANKS)]
TORCHRUN = [*TWO_RANKS, "-m", "plsp_train"]


def test_torchrun_starts_the_ranks(tmp_path) -> None:
    short = [*SMALL, "--pretrain-epochs", "1", "--epochs", "0"]
    done = subprocess.run([*TORCHRUN, *short], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 1/1") == 1
    assert "Warning" not in done.stderr
    (out,) = (tmp_path / "runs").iterdir()
    assert len(metrics(out)) == 1


NAMES_OF_THREADS_LEFT = """
import os
import sys
from pathlib import Path
from plsp_train.cli import main
code = main(sys.argv[1:])
threads = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
Path(f"threads{os.environ['RANK']}.txt").write_text("\\n".join(threads))
sys.exit(code)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have no names here")
def test_no_thread_of_the_process_group_outlives_the_run(tmp_path) -> None:
    """Such a thread aborts its process if it frees a tensor while the interpreter shuts down."""
    script = tmp_path / "script.py"
    script.write_text(NAMES_OF_THREADS_LEFT)
    short = [*SMALL, "--pretrain-epochs", "1", "--epochs", "0"]
    done = subprocess.run([*TWO_RANKS, str(script), *short], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for rank in range(RANKS):
        threads = (tmp_path / f"threads{rank}.txt").read_text().splitlines()
        assert threads
        assert not [name for name in threads if "gloo" in name]


KILLER = """
import os, signal
from plsp_train.engine import Engine

step = Engine._step

def killed_once(self, stage, epoch):
    here = (os.environ["RANK"], stage, epoch, self.steps_done + 1) == ("1", "train", 2, 3)
    if here and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, stage, epoch)

Engine._step = killed_once
"""


def test_run_restarts_after_a_worker_of_another_node_is_killed(tmp_path, directory: Path) -> None:
    """Two nodes on the loopback interface."""
    (tmp_path / "killer.py").write_text(KILLER)
    out = tmp_path / "out"
    elastic = [
        *("--nnodes", str(RANKS), "--nproc-per-node", "1", "--max-restarts", "3"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{next(_free_ports())}", "--rdzv-id", "test"),
    ]
    command = [*LAUNCHER, *elastic, "-m", "plsp_train", *SMALL, *UNEVEN, "--plugin", "killer", "--out", str(out)]
    # With a store that workers share with their agents, both nodes wait for ever after the restart.
    variables = {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    start = partial(subprocess.Popen, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    nodes = [start(command, cwd=tmp_path, env={**os.environ, **variables}) for _ in range(RANKS)]
    try:
        outputs = [node.communicate(timeout=240) for node in nodes]
    except subprocess.TimeoutExpired:
        for node in nodes:
            os.killpg(node.pid, signal.SIGKILL)
        raise
    assert [node.returncode for node in nodes] == [0, 0], outputs
    text = "".join(output + errors for output, errors in outputs)
    assert f"resuming {out} after 2 epochs and 0 steps" in text
    assert text.count("cannot reach the other ranks") <= 1
    assert metrics(out) == metrics(directory / "plsp")


def test_restarts_need_an_output_directory(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_MAX_RESTARTS": "3", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main([]) == 2
    assert "--max-restarts needs --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lr", "-1"], "lr must be positive, got -1.0"),
        (["--learning", "1"], "unrecognized arguments: --learning 1; --help lists the options"),
    ],
)
def test_error_that_all_ranks_meet_is_printed_once(tmp_path, options: list[str], message: str) -> None:
    done = subprocess.run([*TORCHRUN, *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.count(f"plsp_train: error: {message}") == 1
    assert "exitcode  : 2" in done.stderr, "torchrun reports the exit code of the error"
