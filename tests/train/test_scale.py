"""Sets larger than memory: packed candidate sets, images in a file, and passes over a set that stream."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from plsp_train import metrics as metrics_module
from plsp_train.cli import main
from plsp_train.config import build_config
from plsp_train.console import SilentReporter
from plsp_train.data import candidate_sets, splits
from plsp_train.data.batches import IndexSampler
from plsp_train.data.candidate_sets import CandidateSets
from plsp_train.data.mapped import MappedImages
from plsp_train.engine import Engine
from plsp_train.preparation import load_source, prepare
from small_runs import SMALL, metrics

# --------------------------------------------------------------------------------------------------- candidate sets


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(2, 41), st.integers(0, 2**31))
def test_packed_sets_unpack_to_the_same_sets(count: int, num_classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sets = torch.rand(count, num_classes, generator=generator) < 0.5
    packed = CandidateSets.pack(sets.split(13))
    index = torch.randint(count, (2 * count,), generator=generator)
    assert packed.shape == sets.shape
    assert packed.nbytes == count * -(-num_classes // 8)
    assert torch.equal(packed[:], sets)
    assert torch.equal(packed[index], sets[index])
    assert torch.equal(packed.take(index)[3:9], sets[index][3:9])


def test_a_million_sets_of_a_thousand_classes_take_150_megabytes() -> None:
    assert CandidateSets.pack(torch.ones(1200, 1000, dtype=torch.bool)).nbytes * 1000 == 150_000_000


# ----------------------------------------------------------------------------------------------------------- images


def _file(tmp_path: Path, *shape: int) -> tuple[Path, np.ndarray]:
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    return tmp_path / "images.npy", images


@pytest.mark.parametrize("shape", [(50, 6, 5), (50, 6, 5, 1), (50, 4, 5, 3)])
def test_images_in_a_file_equal_the_array(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path, images = _file(tmp_path, *shape)
    expected = torch.from_numpy(images if images.ndim == 4 else images[..., None]).permute(0, 3, 1, 2)
    mapped, index = MappedImages(path, workers=1), torch.tensor([49, 0, 7, 7])
    assert mapped.shape == tuple(expected.shape)
    assert torch.equal(mapped[index], expected[index])
    assert torch.equal(mapped[10:13], expected[10:13])
    part = mapped.take(torch.arange(20, 50))
    assert torch.equal(part[index[1:]], expected[20:][index[1:]])
    assert torch.equal(torch.cat(list(part.split(7))), expected[20:])
    assert torch.equal(mapped.sample(5)[:], expected[::10])
    for _ in range(40):  # more than are ever kept
        part.prefetch(torch.randint(30, (3,)))
    part.prefetch(index[1:])
    assert torch.equal(part[index[1:]], expected[20:][index[1:]])


def test_readers_end_with_the_last_part_of_the_images(tmp_path: Path) -> None:
    path, images = _file(tmp_path, 50, 6, 5)
    before = set(multiprocessing.active_children())
    mapped = MappedImages(path, workers=1)
    part = mapped.take(torch.arange(10, 20))
    mapped.prefetch(slice(0, 5))
    del mapped
    assert len(set(multiprocessing.active_children()) - before) == 1
    assert torch.equal(part[:][:, 0], torch.from_numpy(images[10:20]))
    del part
    gc.collect()
    assert set(multiprocessing.active_children()) <= before


def test_readers_end_with_their_process_even_if_it_is_killed(tmp_path: Path) -> None:
    path, _ = _file(tmp_path, 50, 6, 5)
    script = (
        "import os, signal, torch, multiprocessing\n"
        "from pathlib import Path\n"
        "from plsp_train.data.mapped import MappedImages\n"
        "if __name__ == '__main__':\n"
        f"    images = MappedImages(Path({str(path)!r}), workers=1)\n"
        "    images.prefetch(torch.arange(5))\n"
        "    images[torch.arange(5)]\n"
        "    print(*(child.pid for child in multiprocessing.active_children()), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "reads.py").write_text(script)
    # The pipe is closed only when the workers, which inherit it, have ended too.
    done = subprocess.run([sys.executable, "reads.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == -9
    assert len(done.stdout.split()) == 1


def test_images_are_read_without_readers_once_one_is_killed(tmp_path: Path, capsys: Any) -> None:
    path, images = _file(tmp_path, 50, 6, 5)
    mapped = MappedImages(path, workers=1)
    mapped.prefetch(slice(0, 5))
    mapped[:5]
    (reader,) = multiprocessing.active_children()
    mapped.prefetch(slice(5, 10))
    os.kill(reader.pid, signal.SIGKILL)
    reader.join()
    for part in (slice(5, 10), slice(10, 15), slice(0, 5)):
        mapped.prefetch(part)
        assert (mapped[part][:, 0].numpy() == images[part]).all()
    assert capsys.readouterr().err.count("a process that reads images ahead was killed") == 1


def test_upcoming_batches_are_the_batches_drawn_next() -> None:
    sampler = IndexSampler(torch.arange(10), 3, torch.Generator().manual_seed(0))
    assert sampler.upcoming(2) == [], "the next pass is not drawn yet"
    next(sampler)
    state = sampler._generator.get_state()
    ahead = sampler.upcoming(5)
    assert torch.equal(state, sampler._generator.get_state())
    assert len(ahead) == 2, "a batch at the end of a pass is filled up from the next"
    for batch in ahead:
        assert torch.equal(batch, next(sampler))


# ------------------------------------------------------------------------------------------------------------- runs


def _digits_folder(tmp_path: Path) -> tuple[Path, Path]:
    """The digits as an archive and as a folder of arrays."""
    digits = load_source({"dataset": "digits"})
    arrays = {
        "images": digits.inputs[:, 0].numpy(),
        "labels": digits.labels.numpy(),
        "candidates": (np.random.default_rng(0).random((1437, 10)) < 0.4) | np.eye(10, dtype=bool)[digits.labels],
        "test_images": digits.test_inputs[:, 0].numpy(),
        "test_labels": digits.test_labels.numpy(),
    }
    np.savez(tmp_path / "same.npz", **arrays)
    (tmp_path / "same").mkdir()
    for name, array in arrays.items():
        np.save(tmp_path / "same" / f"{name}.npy", array)
    return tmp_path / "same.npz", tmp_path / "same"


@pytest.mark.parametrize("options", [[], ["--method", "proden", "--validation-fraction", "0.2"]])
def test_run_on_a_folder_of_arrays_equals_the_run_on_the_archive(tmp_path: Path, options: list[str]) -> None:
    for data in _digits_folder(tmp_path):
        workers = ["--workers", "1"] if data.is_dir() else []
        out = str(tmp_path / f"run{data.suffix}")
        assert main(["--dataset", str(data), *SMALL, "--epochs", "2", "--out", out, *workers, *options]) == 0
    assert metrics(tmp_path / "run") == metrics(tmp_path / "run.npz")
    with np.load(tmp_path / "run" / "results.npz") as found, np.load(tmp_path / "run.npz" / "results.npz") as expected:
        for name in expected.files:
            np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("images", np.zeros((1437, 8, 8), np.float32), "images must be uint8"),
        ("candidates", np.zeros((1437, 10), bool), "candidates: row 0 has no candidate"),
        ("labels", np.zeros(1436, np.int64), "labels has 1436 rows, but images has 1437"),
        ("lables", np.zeros(1437, np.int64), "did you mean 'labels'?"),
        ("labels", np.array([{}] * 1437), "pickled objects"),
    ],
)
def test_wrong_arrays_are_named(tmp_path: Path, capsys: Any, name: str, array: np.ndarray, message: str) -> None:
    _, folder = _digits_folder(tmp_path)
    np.save(folder / f"{name}.npy", array)
    assert main(["--dataset", str(folder), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


class _LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor) and not function.is_view:
                self.bytes = max(self.bytes, value.nbytes)
        return result


def test_scoring_and_selection_never_hold_the_logits_of_all_instances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "EVAL_BATCH", 64)
    monkeypatch.setattr(candidate_sets, "CHUNK", 64)
    monkeypatch.setattr(splits, "_CHUNK", 64)
    _, folder = _digits_folder(tmp_path)
    given = {
        "dataset": str(folder),
        "model": "linear",
        "validation_fraction": 0.1,
        "workers": 1,
        "covariance": "diagonal",
    }
    source = load_source(given)
    config = build_config(given, source)
    with _LargestTensor() as reading:
        engine = Engine(config, *prepare(config, source), None, SilentReporter())
    with _LargestTensor() as passing:
        engine.method.start_epoch("train", 1)
        engine._test_scores()
        engine._criteria()
    count, per_instance = len(engine.task.inputs), 8  # bytes of an index
    assert passing.bytes <= max(count * per_instance, 64 * 64 * 4)
    assert reading.bytes < engine.task.inputs.shape[0] * 64, "the images were never in memory together"


LARGE = """
import multiprocessing, sys, threading, time

# Of the address space: what getrusage tells of children includes the moment between fork and exec.
def peak(process):
    with open(f"/proc/{process}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

def watch(peaks):
    while True:
        for child in multiprocessing.active_children():
            try:
                peaks.append(peak(child.pid))
            except OSError:  # it has just ended
                pass
        time.sleep(0.05)

if __name__ == "__main__":  # as in plsp_train/__main__.py, so that workers do not import torch
    from plsp_train.cli import main

    workers = [0]
    threading.Thread(target=watch, args=(workers,), daemon=True).start()
    code = main(sys.argv[1:])
    print("peak", peak("self"), max(workers))
    sys.exit(code)
"""


@pytest.mark.skipif(not os.environ.get("PLSP_TEST_SCALE"), reason="takes a minute: make scale")
def test_peak_memory_of_a_run_stays_far_below_its_set(tmp_path: Path) -> None:
    """A set of 2.6 GB, sparse on the disk."""
    folder, side, count = tmp_path / "large", 128, 160_000
    folder.mkdir()
    images = np.lib.format.open_memmap(folder / "images.npy", mode="w+", dtype=np.uint8, shape=(count, side, side))
    random = np.random.default_rng(0)
    images[::100] = random.integers(0, 256, (len(images[::100]), side, side))
    size = images.nbytes
    del images
    np.save(folder / "candidates.npy", random.random((count, 20)) < 0.5 + np.eye(20)[random.integers(0, 20, count)])
    (tmp_path / "large.py").write_text(LARGE)
    options = [*SMALL, "--pretrain-epochs", "0", "--epochs", "1", "--validation-fraction", "0"]
    options += ["--model", "linear", "--covariance", "diagonal"]
    done = subprocess.run(
        [sys.executable, "large.py", "--dataset", "large", *options, "--workers", "1", "--out", "run"],
        **{"cwd": tmp_path, "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True},
    )
    assert done.returncode == 0, done.stderr
    own, workers = (1024 * int(number) for number in done.stdout.splitlines()[-1].split()[1:])
    print(f"set {size / 1e6:.0f} MB; peak of the process {own / 1e6:.0f} MB, of its worker {workers / 1e6:.0f} MB")
    assert own < size / 3
    assert 0 < workers < size / 10
