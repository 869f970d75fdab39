"""Feed broken, absurd and hostile files to everything that reads files.

    python tests/train/fuzz.py --inputs 20000

Files of every kind that the project reads are generated and then changed: bytes at random, or their structure behind
intact checksums (members of archives, headers, tables, JSON, tensors). A reader may return a result or raise an error
that the command line prints as one line: a ValueError or OSError whose message has one line and names the file.
Anything else, more than MEMORY bytes, more than SECONDS, or a trace of executed code is a finding. Its target, seed and
number reproduce it.
"""

import argparse
import contextlib
import faulthandler
import gzip
import io
import json
import os
import pickle
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy import io as scipy_io
from scipy import sparse

from plsp_train.checkpoint import save_tensors
from plsp_train.config import build_config, read_config_file
from plsp_train.console import SilentReporter
from plsp_train.data.datasets import load_benchmark, read_idx
from plsp_train.data.files import InputSpec, ReadOptions, read_inputs, read_source
from plsp_train.data.source import check_source
from plsp_train.disambiguate.cli import main as disambiguate
from plsp_train.engine import Engine
from plsp_train.model_file import load_model
from plsp_train.models import build_model, load_pretrained
from plsp_train.predict.cli import main as predict
from plsp_train.report.cli import main as report
from plsp_train.table.cli import main as table
from synthetic_runs import Synthetic, write_run

MEMORY = 2**31
SECONDS = 20

INTEGERS = (0, 1, -1, 2, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63))
TOKENS = (
    *("", "0", "-1", "1e999", "-inf", "nan", "9" * 40, "1e-400", "true", "null", "|", ",", '"', "\n", "\r\n", "\t"),
    *("\0", "\ufeff", "\u202e", "a|a", "cat|", "||", "../..", "/etc/passwd", "é" * 50, "label", "candidates", "split"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, -0.0, 2**70, 1e308, float("nan"), float("inf"), "", "x", "\0", "9" * 30),
    *([], {}, [[]], [None], {"": None}, ["a", 1], [float("nan")] * 3, {"a": {"b": {}}}),
)


class TooSlow(BaseException):
    """An input took more than SECONDS of processor time. Not an Exception, so that no reader catches it."""


class Payload:
    """A pickle of this leaves a file behind if it is ever loaded."""

    path = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


# ---------------------------------------------------------------------------------------------------- mutations


def mutated_bytes(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        size, kind = len(changed), rng.randrange(8)
        place = rng.randrange(size) if size else 0
        length = rng.choice((1, 2, 4, 16, 256))
        if kind == 0 and size:
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == 1 and size:
            changed[place] = rng.choice((0, 255, 127, 128, 10, 34))
        elif kind == 2:
            del changed[place:]
        elif kind == 3:
            del changed[place : place + length]
        elif kind == 4:
            changed[place:place] = changed[place : place + length]
        elif kind == 5:
            changed[place:place] = rng.randbytes(length)
        elif kind == 6:
            number = rng.choice(INTEGERS)
            width, order = rng.choice(((1, "<"), (2, "<"), (4, "<"), (8, "<"), (4, ">"), (8, ">")))
            changed[place : place + width] = struct.pack(f"{order}Q", number % 2**64)[:width]
        else:
            changed[place : place + length] = rng.choice(TOKENS).encode()
    return bytes(changed)


def mutated_value(value: Any, rng: random.Random) -> Any:
    """Replace, remove or add one node of a structure of lists and dictionaries."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        action = rng.randrange(8)
        if action == 0:
            return {name: entry for name, entry in value.items() if name != key}
        if action == 1:
            return {**value, rng.choice(TOKENS): rng.choice(VALUES)}
        return {**value, key: mutated_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:place]
        return [*value[:place], mutated_value(value[place], rng), *value[place + 1 :]]
    if isinstance(value, torch.Tensor) and value.dim() and rng.random() < 0.7:
        return rng.choice((value[:0], value.double(), value.reshape(-1), value * float("nan"), value[None], value != 0))
    return rng.choice(VALUES)


def odd_array(rng: random.Random) -> np.ndarray:
    shape = tuple(rng.choice((0, 1, 2, 3, 6, 7)) for _ in range(rng.randrange(5)))
    numbers = np.random.default_rng(rng.randrange(2**32)).integers(-3, 9, shape)
    kind = rng.choice(
        ("?", "u1", "i1", "i4", "i8", "u8", "f2", "f4", "f8", "c8", "U3", "S3", ">f4", "M8[s]", "V4", "O")
    )
    if kind == "V4":
        return np.zeros(shape, "V4")
    array = numbers.astype(kind)
    if array.dtype.kind == "f" and array.size and rng.random() < 0.5:
        array.flat[0] = rng.choice((np.nan, np.inf, np.finfo(array.dtype).max))
    if array.dtype.kind in "iu" and array.size and rng.random() < 0.3:
        array.flat[0] = np.iinfo(array.dtype).max
    return array


def npy(array: np.ndarray, rng: random.Random) -> bytes:
    """An array in NumPy's format, at times with a header that lies."""
    if array.dtype.kind == "O" and rng.random() < 0.5:
        array = np.array([Payload()], dtype=object)
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    if rng.random() < 0.7:
        return buffer.getvalue()
    shape = tuple(rng.choice((*INTEGERS, 3, 6)) for _ in range(rng.randrange(4)))
    description = rng.choice(("<f4", "|u1", "|O", "<U100000000", "[('a', '<f4')]", "nonsense", "<f99"))
    header = repr({"descr": description, "fortran_order": rng.random() < 0.5, "shape": shape})
    if rng.random() < 0.2:
        header = rng.choice(("{}", "(" * 500, "{'descr': ", header * 40))
    encoded = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(encoded) % 2**16) + encoded + rng.randbytes(24)


def zipped(members: dict[str, bytes], rng: random.Random) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names that occur twice
        with zipfile.ZipFile(buffer, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
                if rng.random() < 0.02:
                    archive.writestr(name, content)
    return buffer.getvalue()


def mutated_archive(content: bytes, rng: random.Random) -> bytes:
    """Change one member of an archive and give it a right checksum."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(list(members))
    if rng.random() < 0.1:
        del members[name]
    elif name.endswith(".npy") and rng.random() < 0.6:
        members[name] = npy(odd_array(rng), rng)
    else:
        members[name] = mutated_bytes(members[name], rng)
    if rng.random() < 0.1:
        members[rng.choice(("labels.npy", "../evil.npy", "x", "images.npy", "class_names.npy"))] = npy(
            odd_array(rng), rng
        )
    return zipped(members, rng)


def mutated_text(content: bytes, rng: random.Random) -> bytes:
    """Change cells of a table, or lines."""
    rows = [line.split(",") for line in content.decode().split("\n")]
    for _ in range(rng.choice((1, 1, 3))):
        row = rng.choice(rows)
        action = rng.randrange(5)
        if action < 3:
            row[rng.randrange(len(row))] = rng.choice(TOKENS)
        elif action == 3:
            row.append(rng.choice(TOKENS))
        else:
            rows.insert(rng.randrange(len(rows)), list(rng.choice(rows)))
    return "\n".join(",".join(row) for row in rows).encode()


def mutated_json(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.02:
        return rng.choice((b"[" * 200_000, b'{"a":' * 100_000, b"1" * 10_000, b"", b"null"))
    return json.dumps(mutated_value(json.loads(content), rng)).encode()


def mutated_lines(content: bytes, rng: random.Random) -> bytes:
    lines = content.split(b"\n")
    place = rng.randrange(len(lines) - 1)
    lines[place] = mutated_json(lines[place], rng)
    return b"\n".join(lines)


def bytes_or(structured: Callable[[bytes, random.Random], bytes]) -> Callable[[bytes, random.Random], bytes]:
    def mutate(content: bytes, rng: random.Random) -> bytes:
        return mutated_bytes(content, rng) if rng.random() < 0.4 else structured(content, rng)

    return mutate


# ------------------------------------------------------------------------------------------------------ targets


@dataclass(frozen=True)
class Target:
    """A kind of file: valid files by name, how to change one, and what reads it."""

    seeds: dict[str, bytes]
    mutate: Callable[[bytes, random.Random], bytes]
    read: Callable[[Path], object]
    others: dict[str, bytes] | None = None
    """Files beside it that stay as they are."""
    share: float = 1.0
    """Of the inputs, relative to other targets: slow readers get fewer."""
    names_file: bool = True
    """Whether errors must name the file; those of settings name the setting, which an option may have given too."""


def _read_training_data(path: Path) -> None:
    source = read_source(path, ReadOptions(workers=0))
    check_source(source)


def _arrays(rng: np.random.Generator, kind: str, **extra: np.ndarray) -> bytes:
    inputs = (
        rng.normal(size=(12, 5)).astype(np.float32)
        if kind == "features"
        else rng.integers(0, 255, (12, 6, 6), np.uint8)
    )
    buffer = io.BytesIO()
    np.savez(buffer, **{kind: inputs, **extra})
    return buffer.getvalue()


def npz_target() -> Target:
    rng = np.random.default_rng(0)
    sets = rng.random((12, 4)) < 0.5
    sets[:, 0] = True
    labels = rng.integers(0, 4, 12)
    names = np.array(["ant", "bee", "cat", "dog"])
    seeds = {
        "sets.npz": _arrays(rng, "features", candidates=sets, labels=labels, class_names=names),
        "images.npz": _arrays(rng, "images", candidates=sets, test_images=rng.integers(0, 255, (3, 6, 6), np.uint8)),
        "answers.npz": _arrays(rng, "features", annotations=rng.integers(-1, 4, (12, 3)), class_names=names),
        "not.npz": _arrays(rng, "features", complementary=labels, test_features=rng.normal(size=(3, 5))),
        "labels.npz": _arrays(rng, "images", labels=labels),
    }
    return Target(seeds, bytes_or(mutated_archive), _read_training_data)


def npz_inputs_target() -> Target:
    seeds = {name: content for name, content in npz_target().seeds.items() if name.startswith("sets")}
    return Target(seeds, bytes_or(mutated_archive), lambda path: read_inputs(path, InputSpec((5,))), share=0.3)


def benchmark_target() -> Target:
    rng, buffer = np.random.default_rng(0), io.BytesIO()
    part = {"images": (3, 1, 28, 28), "labels": (3,)}
    arrays = {
        f"{name}_{key}": rng.integers(0, 9, shape, np.uint8)
        for name in ("train", "test")
        for key, shape in part.items()
    }
    np.savez(buffer, **arrays)
    return Target(
        {"fmnist.npz": buffer.getvalue()}, bytes_or(mutated_archive), lambda path: load_benchmark("fmnist", path)
    )


def mat_target() -> Target:
    rng = np.random.default_rng(0)
    sets = (rng.random((4, 12)) < 0.5).astype(float)
    sets[0] = 1
    content = {"data": rng.normal(size=(12, 5)), "partial_target": sets, "target": np.eye(4)[rng.integers(0, 4, 12)].T}
    sparse_content = {**content, "partial_target": sparse.csc_matrix(sets), "names": np.array(["a", "b"], dtype=object)}
    seeds = {}
    for name, variables, compressed in (("dense", content, False), ("packed", sparse_content, True)):
        buffer = io.BytesIO()
        scipy_io.savemat(buffer, variables, do_compression=compressed)
        seeds[f"{name}.mat"] = buffer.getvalue()

    def rebuilt(_: bytes, rng: random.Random) -> bytes:
        array = odd_array(rng)
        if array.dtype.kind in "mMV" or array.dtype == np.float16:
            array = array.astype("f8") if array.dtype.kind == "f" else np.zeros(array.shape)
        changed: dict[str, Any] = {**content, rng.choice(tuple(content)): array}
        if rng.random() < 0.3:
            changed["data"] = rng.choice(
                ("text", {"field": 1}, np.array([[1], "a"], dtype=object), sparse.eye(12, format="csc"))
            )
        buffer = io.BytesIO()
        scipy_io.savemat(buffer, changed, do_compression=rng.random() < 0.5)
        return buffer.getvalue()

    return Target(seeds, bytes_or(rebuilt), _read_training_data)


def csv_target() -> Target:
    rows = "".join(f"{i / 7:.3f},{i},cat|dog{'|ant' if i % 3 else ''},{'cat' if i % 2 else 'dog'}\n" for i in range(12))
    answers = "".join(f"{i},{i % 5},cat,{'dog' if i % 2 else ''},{'test' if i > 9 else 'train'}\n" for i in range(12))
    seeds = {
        "sets.csv": f"width,height,candidates,label\n{rows}".encode(),
        "answers.csv": f"a,b,annotator_1,annotator_2,split\n{answers}".encode(),
    }
    return Target(seeds, bytes_or(mutated_text), _read_training_data)


def parquet_target() -> Target:
    import pyarrow
    import pyarrow.parquet

    def written(columns: dict[str, Any]) -> bytes:
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
        return buffer.getvalue()

    columns = {"width": [0.5, 1.5, 2.5], "height": [1, 2, 3], "candidates": ["cat|dog", "cat", "dog"]}

    def rebuilt(_: bytes, rng: random.Random) -> bytes:
        odd: Sequence[Any] = rng.choice(
            (
                ["a", "b", None],
                [None] * 3,
                [[1], [2], []],
                [{"a": 1}] * 3,
                [b"\xff"] * 3,
                [True, False, None],
                [1e308, 2.0, 3.0],
            )
        )
        return written({**columns, rng.choice(("width", "candidates", "label", "split", "annotator", "")): odd})

    return Target({"sets.parquet": written(columns)}, bytes_or(rebuilt), _read_training_data)


def idx_target() -> Target:
    content = b"\0\0\x08\x03" + struct.pack(">III", 3, 5, 4) + bytes(60)

    def gzipped(packed: bytes, rng: random.Random) -> bytes:
        if packed[:2] != b"\x1f\x8b":
            return mutated_bytes(packed, rng)
        return gzip.compress(mutated_bytes(gzip.decompress(packed), rng))

    seeds = {"images": content, "images.gz": gzip.compress(content)}
    return Target(seeds, bytes_or(gzipped), read_idx)


def cifar_target() -> Target:
    """No file has the official md5, so nothing may be unpickled, whatever it is."""
    batch = pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1], "payload": Payload()})
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]
    others = {f"cifar-10-batches-py/{name}": batch for name in names[1:]}
    seeds = {"cifar-10-batches-py/data_batch_1": batch}
    return Target(seeds, mutated_bytes, lambda path: load_benchmark("cifar10", path.parent.parent), others, share=0.3)


def _images() -> dict[str, bytes]:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (12, 10, 3), np.uint8))
    formats = {"png": "PNG", "jpg": "JPEG", "gif": "GIF", "bmp": "BMP", "tif": "TIFF", "webp": "WEBP", "ppm": "PPM"}
    files = {}
    for ending, name in formats.items():
        buffer = io.BytesIO()
        image.save(buffer, name)
        files[f"one.{ending}"] = buffer.getvalue()
    return files


def image_target() -> Target:
    return Target(_images(), mutated_bytes, lambda path: read_inputs(path, InputSpec((3, 8, 8), workers=0)))


def folder_target() -> Target:
    images = _images()
    labels = "file,candidates,label\n" + "".join(
        f"{name},cat|dog,{'cat' if i % 2 else 'dog'}\n" for i, name in enumerate(images)
    )
    return Target(
        {"labels.csv": labels.encode()},
        bytes_or(mutated_text),
        lambda path: _read_training_data(path.parent),
        images,
        share=0.5,
    )


def _model_content() -> dict[str, Any]:
    torch.manual_seed(0)
    network = build_model("linear", (5,), 3)
    return {
        "model": "linear",
        "input_shape": [5],
        "class_names": ["ant", "bee", "cat"],
        "mean": [0.0] * 5,
        "std": [1.0] * 5,
        "state_dict": network.state_dict(),
        "feature_names": None,
        "format": 2,
    }


def _sealed(content: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        save_tensors(Path(folder) / "x", content)
        return (Path(folder) / "x").read_bytes()


def _sealing(content: Any) -> Callable[[bytes, random.Random], bytes]:
    """Change values behind a right checksum, or put a pickle that executes code there."""

    def mutate(_: bytes, rng: random.Random) -> bytes:
        return _sealed({**content, "payload": Payload()} if rng.random() < 0.05 else mutated_value(content, rng))

    return mutate


def model_target() -> Target:
    content, inputs = _model_content(), torch.zeros(2, 5)
    seeds = {"model.pt": _sealed(content)}
    return Target(seeds, bytes_or(_sealing(content)), lambda path: load_model(path).logits(inputs))


def pretrained_target() -> Target:
    """Someone else's file, without a checksum of ours."""
    buffer, network = io.BytesIO(), build_model("linear", (5,), 3)
    torch.save(network.state_dict(), buffer)
    mutate = bytes_or(mutated_archive)
    return Target(
        {"weights.pt": buffer.getvalue()}, mutate, lambda path: load_pretrained(network, str(path)), share=0.5
    )


def checkpoint_target(folder: Path) -> Target:
    from small_runs import digits

    data = digits()
    data = replace(data, train_inputs=data.train_inputs[:40], train_labels=None, test_inputs=None, test_labels=None)
    config = build_config(
        {"epochs": 1, "iterations": 1, "pretrain_epochs": 0, "labeled_batch": 4, "unlabeled_batch": 4, "k": 2}
    )
    sets = torch.ones(40, 10, dtype=torch.bool)
    sets[torch.arange(40), torch.arange(40) % 10] = False
    engine = Engine(config, data, sets, folder, SilentReporter())
    engine.run()
    content = torch.load(folder / "checkpoint.pt", weights_only=True)

    def resume(path: Path) -> None:
        engine.out = path.parent
        engine.resume()

    seeds = {"checkpoint.pt": (folder / "checkpoint.pt").read_bytes()}
    return Target(seeds, bytes_or(_sealing(content)), resume, share=0.7)


def _read_settings(path: Path) -> None:
    build_config(read_config_file(str(path)))


def toml_target() -> Target:
    content = b'dataset = "digits"\nmethod = "plsp"\nlr = 0.1\nepochs = 3\nsemantic = true\nk = 7\n'

    def lines(text: bytes, rng: random.Random) -> bytes:
        name, token = (
            rng.choice((b"lr", b"epochs", b"method", b"model", b"seed", b"x")),
            rng.choice((*TOKENS, "[1]", "{}", "'a'")),
        )
        return rng.choice((text, b"")) + b"\n" + name + b" = " + token.encode() + b"\n"

    return Target({"a.toml": content}, bytes_or(lines), _read_settings, names_file=False)


def json_target() -> Target:
    content = json.dumps(build_config({}).to_json()).encode()
    return Target({"a.json": content}, bytes_or(mutated_json), _read_settings, names_file=False)


def run_targets(folder: Path) -> dict[str, Target]:
    """Directories of runs, as given to the commands that read them."""
    kind = Synthetic(num_instances=24, epochs=3, picture_shape=(1, 2, 2))
    directory = write_run(folder / "run", kind)
    save_tensors(directory / "model.pt", _model_content())
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    seconds = {"train": 7.5}
    summary = json.loads(files["summary.json"]) | {"seconds_at_end_of": seconds}
    files["summary.json"] = json.dumps(summary).encode()
    out = str(folder / "out")

    def command(main: Callable[[Sequence[str]], int], *arguments: str) -> Callable[[Path], None]:
        def call(path: Path) -> None:
            error = io.StringIO()
            with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
                code = main([argument.replace("RUN", str(path.parent)) for argument in arguments])
            if code:
                raise ValueError(error.getvalue().rstrip("\n"))

        return call

    def others(name: str) -> dict[str, bytes]:
        return {other: content for other, content in files.items() if other != name}

    def target(
        name: str, mutate: Callable[[bytes, random.Random], bytes], read: Callable[[Path], None], share: float
    ) -> Target:
        return Target({name: files[name]}, bytes_or(mutate), read, others(name), share)

    rows = b"1,2,3,4,5\n" * 3
    (folder / "new.csv").write_bytes(b"a,b,c,d,e\n" + rows)
    reported = command(report, "RUN", "-o", f"{out}.html")
    tabled = command(table, "RUN", "--out", out)
    labelled = command(disambiguate, "RUN", "-o", f"{out}.csv")
    predicted = command(predict, "RUN", str(folder / "new.csv"), "-o", f"{out}.csv", "--device", "cpu")
    return {
        "report-config": target("config.json", mutated_json, reported, 0.2),
        "report-summary": target("summary.json", mutated_json, reported, 0.3),
        "report-metrics": target("metrics.jsonl", mutated_lines, reported, 0.4),
        "report-ambiguity": target("ambiguity.json", mutated_json, reported, 0.2),
        "report-results": target("results.npz", mutated_archive, reported, 0.3),
        "table-config": target("config.json", mutated_json, tabled, 0.3),
        "table-summary": target("summary.json", mutated_json, tabled, 0.4),
        "disambiguate": target("results.npz", mutated_archive, labelled, 0.7),
        "predict": replace(
            target("model.pt", mutated_bytes, predicted, 0.4), mutate=bytes_or(_sealing(_model_content()))
        ),
    }


def bombs() -> dict[str, tuple[str, Callable[[], bytes], Callable[[Path], object]]]:
    """Small files that unpack to far more than MEMORY, or claim to."""
    size = 2 * MEMORY

    def packed(prefix: bytes, window: int) -> bytes:
        compressor = zlib.compressobj(9, zlib.DEFLATED, window)
        parts = [compressor.compress(prefix)] + [compressor.compress(bytes(2**24)) for _ in range(size // 2**24)]
        return b"".join([*parts, compressor.flush()])

    def npz() -> bytes:
        buffer, header = io.BytesIO(), io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": "|u1", "fortran_order": False, "shape": (size // 64, 8, 8)}
        )
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            with archive.open("images.npy", "w", force_zip64=True) as file:
                file.write(header.getvalue())
                for _ in range(size // 2**24):
                    file.write(bytes(2**24))
            archive.writestr("labels.npy", npy(np.zeros(size // 64, np.int8), random.Random(2)))
        return buffer.getvalue()

    def mat() -> bytes:
        """A compressed element that holds a matrix of doubles, as in MATLAB 5."""
        rows = size // 8 // 16
        flags = struct.pack("<IIII", 6, 8, 6, 0)
        dimensions = struct.pack("<IIii", 5, 8, rows, 16)
        name = struct.pack("<HH4s", 1, 4, b"data")
        body = flags + dimensions + name + struct.pack("<II", 9, size % 2**32)
        element = packed(struct.pack("<II", 14, (len(body) + size) % 2**32) + body, zlib.MAX_WBITS)
        return (
            b"MATLAB 5.0".ljust(124)
            + struct.pack("<H2s", 0x0100, b"IM")
            + struct.pack("<II", 15, len(element))
            + element
        )

    def picture() -> bytes:
        def chunk(kind: bytes, data: bytes) -> bytes:
            return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

        header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
        return (
            b"\x89PNG\r\n\x1a\n"
            + chunk(b"IHDR", header)
            + chunk(b"IDAT", zlib.compress(bytes(1000)))
            + chunk(b"IEND", b"")
        )

    header = b"\0\0\x08\x03" + struct.pack(">III", size // 64, 8, 8)
    short = b"\0\0\x08\x01" + struct.pack(">I", 7)
    return {
        "npz": ("bomb.npz", npz, _read_training_data),
        "mat": ("bomb.mat", mat, _read_training_data),
        "idx": ("bomb.gz", lambda: packed(header, 31), read_idx),
        "idx that claims to be short": ("bomb.gz", lambda: packed(short, 31), read_idx),
        "picture": ("bomb.png", picture, lambda path: read_inputs(path, InputSpec((3, 8, 8), workers=0))),
        "class number": (
            "bomb.npz",
            lambda: _arrays(np.random.default_rng(0), "features", labels=np.full(12, 2**40)),
            _read_training_data,
        ),
    }


# ------------------------------------------------------------------------------------------------------ running


def refusal_of(error: Exception, place: str) -> str | None:
    """Why an error is a finding; None if the command line would print it as one line that helps."""
    message = str(error)
    if not isinstance(error, ValueError | OSError | ImportError) or isinstance(error, UnicodeError):
        return "a traceback"
    if "\n" in message or not message:
        return f"a message of {message.count(chr(10)) + 1 if message else 0} lines"
    if place not in message:
        return "a message that does not name the file"
    return None


def attempt(read: Callable[[Path], object], path: Path, names_file: bool = True) -> str | None:
    """Read one file; returns what is wrong with the way it was read."""

    def too_slow(*_: object) -> None:
        raise TooSlow

    # Of processor time, which other programs do not stretch.
    signal.signal(signal.SIGPROF, too_slow)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        read(path)
    except TooSlow:
        return f"more than {SECONDS} s"
    except Exception as error:
        refusal = refusal_of(error, str(path.parent) if names_file else "")
        if refusal is not None:
            return (
                f"{refusal}: {type(error).__name__}: {error}\n{''.join(traceback.format_tb(error.__traceback__)[-3:])}"
            )
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return f"code was executed: {Payload.path} exists" if os.path.exists(Payload.path) else None


def limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def fuzz(name: str, target: Target, count: int, seed: int, folder: Path) -> list[str]:
    """Read this many changed files; returns the findings."""
    write(folder, target.others or {})
    findings: list[str] = []
    for valid, content in target.seeds.items():
        write(folder, {valid: content})
        problem = attempt(target.read, folder / valid, target.names_file)
        if problem is not None:
            return [f"{name}: the valid {valid} is refused: {problem}"]
        (folder / valid).unlink()
    for number in range(count):
        rng = random.Random(f"{name} {seed} {number}")
        chosen = rng.choice(list(target.seeds))
        write(folder, {chosen: target.mutate(target.seeds[chosen], rng)})
        problem = attempt(target.read, folder / chosen, target.names_file)
        if problem is not None:
            findings.append(f"{name} {seed} {number}: {problem}")
        (folder / chosen).unlink(missing_ok=True)
    return findings


def in_own_process(work: Callable[[], list[str]], what: str) -> list[str]:
    """The findings of a process that may crash and whose memory is limited."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            limit_memory()
            with os.fdopen(writing, "w") as file:
                json.dump(work(), file)
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as file:
        content = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return json.loads(content) if code == 0 else [f"{what}: the process ended with code {code}"]


def all_targets(folder: Path) -> dict[str, Target]:
    return {
        "npz": npz_target(),
        "npz-inputs": npz_inputs_target(),
        "benchmark-npz": benchmark_target(),
        "mat": mat_target(),
        "csv": csv_target(),
        "parquet": parquet_target(),
        "idx": idx_target(),
        "cifar": cifar_target(),
        "image": image_target(),
        "folder": folder_target(),
        "model": model_target(),
        "pretrained": pretrained_target(),
        "checkpoint": checkpoint_target(folder / "checkpoint"),
        "toml": toml_target(),
        "json": json_target(),
        **run_targets(folder),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=20_000, help="number of inputs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the changes (default: %(default)s)")
    parser.add_argument("--targets", default="", help="names, separated by commas (default: all)")
    parser.add_argument("--no-bombs", action="store_true", help="leave out files that unpack to gigabytes")
    options = parser.parse_args(argv)
    faulthandler.enable()
    warnings.simplefilter("ignore")
    start, findings, count = time.monotonic(), [], 0
    with tempfile.TemporaryDirectory(prefix="plsp-fuzz-") as temporary:
        folder = Path(temporary)
        os.environ["PLSP_CACHE"] = str(folder / "cache")
        Payload.path = str(folder / "executed")
        (folder / "checkpoint").mkdir()
        targets = all_targets(folder)
        wanted = options.targets.split(",") if options.targets else list(targets)
        shares = sum(targets[name].share for name in wanted)
        for name in wanted:
            place, number = folder / f"input-{name}", max(1, round(options.inputs * targets[name].share / shares))
            place.mkdir()
            findings += in_own_process(lambda: fuzz(name, targets[name], number, options.seed, place), name)  # noqa: B023
            count += number
        if not options.no_bombs:
            for name, (file, content, read) in bombs().items():
                place = folder / "bomb"
                write(place, {file: content()})
                problem = in_own_process(lambda: [attempt(read, place / file) or ""], f"bomb {name}")  # noqa: B023
                findings += [f"bomb {name}: {text}" for text in problem if text]
                count += 1
    for finding in findings:
        print(finding, file=sys.stderr)
    seconds = time.monotonic() - start
    print(f"{count} inputs of {len(wanted)} kinds in {seconds:.0f} s: findings {len(findings)}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
