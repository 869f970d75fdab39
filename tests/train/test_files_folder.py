"""Folders of images with a CSV, the cache of decoded images, and images to predict."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from plsp_train import image_file
from plsp_train.data.files import InputSpec, ReadOptions, cache, images, read_inputs, read_source
from plsp_train.data.source import Source

random = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLSP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def save(path: Path, pixels: np.ndarray, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)


def pixels(height: int = 32, width: int = 32, channels: int = 3) -> np.ndarray:
    return random.integers(0, 256, (height, width, channels), dtype=np.uint8).squeeze()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three training images and one for testing, of the size that is chosen for them."""
    place = tmp_path / "animals"
    for name in ("a.png", "sub/b.png", "c.bmp", "d.png"):
        save(place / name, pixels())
    write_labels(place, "file,candidates,label,split", "sub/b.png,dog,dog,train", *ROWS)
    return place


ROWS = ("a.png,cat|dog,cat,train", "d.png,,dog,test", "c.bmp,fox,fox,train")


def write_labels(place: Path, *lines: str, name: str = "labels.csv") -> None:
    (place / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def read(place: Path, **options: Any) -> Source:
    return read_source(place, ReadOptions(**options))


def on_disk(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)


def test_a_folder_with_everything(folder: Path) -> None:
    source = read(folder)
    assert (source.name, source.class_names, source.notes) == ("animals", ("cat", "dog", "fox"), ())
    assert source.row_names == ("sub/b.png", "a.png", "c.bmp")
    assert source.feature_names is None
    expected = torch.stack([on_disk(folder / name) for name in source.row_names])
    assert torch.equal(source.inputs, expected)
    assert source.candidates is not None
    assert source.candidates.int().tolist() == [[0, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert source.labels is not None
    assert source.labels.tolist() == [1, 0, 2]
    assert source.test_inputs is not None
    assert torch.equal(source.test_inputs[0], on_disk(folder / "d.png"))
    assert source.test_labels is not None
    assert source.test_labels.tolist() == [1]


def test_worker_processes_give_the_same_images(folder: Path) -> None:
    how = images.Decoding(workers=2)
    paths = images.image_files(folder)
    by_workers = images.decode_images(paths, how)
    here = images.decode_images(paths, images.Decoding(workers=0))
    np.testing.assert_array_equal(by_workers.images, here.images)
    (folder / "a.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"a\.png is not a readable image"):
        images.decode_images(paths, how)


def test_progress_is_shown_on_a_terminal_alone(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read(folder, progress=True)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    read(folder, progress=True, image_size=16)
    assert "decoding images:   0%" in capfd.readouterr().err  # so few images are done before the bar is drawn again


def test_labels_are_checked_before_images_are_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_file, "decode", lambda *_, **__: pytest.fail("an image was decoded"))
    write_labels(folder, "file,candidates", "a.png,cat|dog", "c.bmp,")
    with pytest.raises(ValueError, match="line 3 has no candidate"):
        read(folder)


def test_worker_processes_do_not_import_pytorch(folder: Path) -> None:
    with images._mapping([], workers=1) as mapped:
        assert len(list(mapped(image_file.read_header, images.image_files(folder)))) == 4
        assert list(mapped(eval, ["'torch' in __import__('sys').modules"])) == [False]  # type: ignore[list-item]


def test_a_killed_worker_is_one_line(folder: Path) -> None:
    with pytest.raises(ValueError, match="a process that decodes images was killed"), images._mapping([], 1) as mapped:
        list(mapped(eval, ["__import__('os')._exit(9)"]))  # type: ignore[list-item]


def test_processes_start_only_if_there_is_enough_to_decode(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(images, "ProcessPoolExecutor", lambda workers, *_, **__: started.append(workers) or 1 / 0)
    read(folder)
    assert not started
    monkeypatch.setattr(images, "_BYTES_WORTH_WORKERS", 10)
    with pytest.raises(ZeroDivisionError):
        read(folder, image_size=8)
    assert started == [os.cpu_count()]


@pytest.mark.parametrize(
    ("sizes", "side"),
    [
        ([(32, 32)], 32),
        ([(28, 28)], 32),
        ([(50, 50), (50, 60), (200, 300)], 56),
        ([(44, 44), (45, 45)], 48),
        ([(640, 480)], 128),
        ([(96, 96), (96, 96), (1000, 1000)], 96),
    ],
)
def test_the_side_is_the_median_within_limits(tmp_path: Path, sizes: list[tuple[int, int]], side: int) -> None:
    for number, (height, width) in enumerate(sizes):
        save(tmp_path / f"{number}.png", pixels(height, width))
    decoded = images.decode_images(images.image_files(tmp_path), images.Decoding())
    assert decoded.images.shape == (len(sizes), 3, side, side)
    resized = sum(size != (side, side) for size in sizes)
    expected = (f"{resized} of {len(sizes)} images were resized to {side}×{side} pixels.",) if resized else ()
    assert decoded.notes == expected


def test_image_size_is_an_option(folder: Path) -> None:
    source = read(folder, image_size=16)
    assert source.input_shape == (3, 16, 16)
    assert source.notes == ("4 of 4 images were resized to 16×16 pixels.",)


def test_resizing_keeps_the_whole_image(tmp_path: Path) -> None:
    halves = np.zeros((40, 80, 3), dtype=np.uint8)
    halves[:, 40:] = 200
    save(tmp_path / "a.png", halves)
    image = images.decode_images([tmp_path / "a.png"], images.Decoding((32, 32))).images[0]
    assert (image[:, :, :15] == 0).all()
    assert (image[:, :, 17:] == 200).all()


def test_large_jpegs_look_like_the_fully_decoded_ones(tmp_path: Path) -> None:
    slope = np.linspace(0, 255, 512, dtype=np.uint8)
    save(tmp_path / "a.jpg", np.stack([np.tile(slope, (512, 1))] * 3, axis=-1), quality=95)
    image = images.decode_images([tmp_path / "a.jpg"], images.Decoding((32, 32))).images[0]
    full = Image.open(tmp_path / "a.jpg").resize((32, 32), Image.Resampling.BILINEAR)
    assert np.abs(image.astype(int) - np.asarray(full).transpose(2, 0, 1)).max() <= 4


def test_grey_images_have_one_channel_unless_others_have_colour(tmp_path: Path) -> None:
    grey = pixels(channels=1)
    save(tmp_path / "a.png", grey)
    save(tmp_path / "b.png", grey > 127)
    decoded = images.decode_images(images.image_files(tmp_path), images.Decoding())
    assert decoded.images.shape == (2, 1, 32, 32)
    np.testing.assert_array_equal(decoded.images[0, 0], grey)
    save(tmp_path / "c.png", pixels())
    decoded = images.decode_images(images.image_files(tmp_path), images.Decoding())
    assert decoded.images.shape == (3, 3, 32, 32)
    np.testing.assert_array_equal(decoded.images[0], np.stack([grey] * 3))


def test_transparent_parts_become_white(tmp_path: Path) -> None:
    drawing = np.zeros((32, 32, 4), dtype=np.uint8)
    drawing[:16, :, 3] = 255
    save(tmp_path / "a.png", drawing)
    decoded = images.decode_images([tmp_path / "a.png"], images.Decoding())
    assert (decoded.images[0, :, :16] == 0).all()
    assert (decoded.images[0, :, 16:] == 255).all()
    assert decoded.notes == ("Transparent parts became white in 1 of 1 images.",)


def test_photographs_are_turned_upright(tmp_path: Path) -> None:
    left_white = np.zeros((32, 32, 3), dtype=np.uint8)
    left_white[:, :16] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90° clockwise
    save(tmp_path / "a.png", left_white, exif=exif)
    image = images.decode_images([tmp_path / "a.png"], images.Decoding()).images[0]
    assert (image[:, :16] == 255).all()
    assert (image[:, 16:] == 0).all()


def test_the_only_csv_of_a_folder_is_taken(folder: Path) -> None:
    (folder / "labels.csv").rename(folder / "answers.csv")
    assert read(folder).name == "animals"
    write_labels(folder, "a", name="other.csv")
    with pytest.raises(FileNotFoundError, match=r"labels\.csv with .* holds answers\.csv, other\.csv"):
        read(folder)


def test_images_without_a_row_are_counted(folder: Path) -> None:
    save(folder / "sub" / "y.png", pixels())
    save(folder / "z.png", pixels())
    save(folder / ".hidden.png", pixels())
    note = f"Images in {folder} that labels.csv does not name: 2, the first is sub/y.png."
    assert read(folder).notes == (note,)


def test_annotators_label_images(folder: Path) -> None:
    write_labels(
        folder, "file,annotator1,annotator2", "a.png,cat,dog", "c.bmp,fox,", "d.png,cat,cat", "sub/b.png,dog,dog"
    )
    source = read(folder, annotators="vote")
    assert source.candidates is not None
    assert source.candidates.int().tolist() == [[1, 1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]]
    assert source.notes[0].startswith("All annotators agree on 66.7% of the instances")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["file,candidates,colour", "a.png,cat,red"],
            "unknown column 'colour'; known are file, candidates",
        ),
        (["file,candidate", "a.png,cat"], "unknown column 'candidate'; known are"),
        (["file,candidate", "a.png,cat"], "did you mean 'candidates'?"),
        (["candidates", "cat"], "has no column 'file': its columns are candidates"),
        (["file,candidates", "a.png,cat", "a.png,dog"], "line 3: a.png is also in line 2: put all its candidates into"),
        (["file,candidates", "a.png,cat", "c.bmp,"], "line 3 has no candidate"),
        (["file", "a.png"], "has no column 'candidates'"),
        (["file,candidates"], "has no rows"),
    ],
)
def test_bad_labels_are_named(folder: Path, lines: list[str], message: str) -> None:
    write_labels(folder, *lines)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read(folder)
    assert str(error.value).startswith(str(folder / "labels.csv"))
    assert "\n" not in str(error.value)


def test_missing_files_are_named(folder: Path) -> None:
    write_labels(folder, "file,candidates", "a.png,cat", "e.png,dog")
    with pytest.raises(FileNotFoundError, match=r"labels\.csv: line 3: there is no image .*e\.png"):
        read(folder)
    (folder / "labels.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no .*labels\.csv .*; .*animals holds no \.csv file"):
        read(folder)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def deepen(path: Path) -> None:
    Image.fromarray(np.zeros((32, 32), dtype=np.uint16)).save(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "is not a readable image: "),
        (lambda path: path.write_bytes(b""), "is not a readable image: "),
        (lambda path: path.write_text("<svg></svg>"), "is not a readable image: "),
        (deepen, "is not a readable image: it has more than 8 bits per channel (mode I"),
    ],
    ids=["cut", "empty", "text", "16 bits"],
)
def test_unreadable_images_are_named(folder: Path, damage: Any, message: str) -> None:
    damage(folder / "a.png")
    with pytest.raises(ValueError, match=re.escape(f"{folder / 'a.png'} {message}")) as error:
        read(folder)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------------- cache


def test_decoded_images_are_cached_outside_the_folder(
    folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(folder.rglob("*"))
    save(folder / "a.png", pixels(48, 48))
    first = read(folder)
    assert sorted(folder.rglob("*")) == before
    assert len(list(own_cache.glob("*.npz"))) == 1
    monkeypatch.setattr(image_file, "decode", lambda *_, **__: pytest.fail("an image was decoded again"))
    again = read(folder)
    assert torch.equal(first.inputs, again.inputs)
    assert first.notes == again.notes == ("1 of 4 images were resized to 32×32 pixels.",)


@pytest.mark.parametrize("change", ["content", "time", "size", "rows"])
def test_a_change_is_decoded_again(folder: Path, own_cache: Path, change: str) -> None:
    first = read(folder)
    if change == "content":
        save(folder / "a.png", pixels())
    elif change == "time":
        os.utime(folder / "a.png", ns=(1, 1))
    elif change == "rows":
        write_labels(folder, "file,candidates,label,split", *ROWS, "sub/b.png,dog,dog,train")
    again = read(folder, image_size=40 if change == "size" else 0)
    assert len(list(own_cache.glob("*.npz"))) == 2
    assert again.row_names is not None
    if change != "size":
        assert torch.equal(again.inputs[again.row_names.index("a.png")], on_disk(folder / "a.png"))
    assert torch.equal(first.inputs, again.inputs) == (change == "time")


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    ],
    ids=["cut", "empty", "one bit"],
)
def test_a_damaged_cache_is_rebuilt(folder: Path, own_cache: Path, damage: Any) -> None:
    first = read(folder)
    (file,) = own_cache.glob("*.npz")
    content = file.read_bytes()
    file.write_bytes(damage(content))
    assert torch.equal(read(folder).inputs, first.inputs)
    assert list(own_cache.glob("*.npz")) == [file]
    assert cache._load(file, 4) is not None


def test_an_unwritable_cache_is_noted_and_does_not_stop_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PLSP_CACHE", str(tmp_path / "file" / "cache"))
    source = read(folder)
    assert len(source.inputs) == 3
    assert source.notes[0].startswith("The decoded images could not be cached:")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PLSP_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/plsp"),
        ({}, "/home/me/.cache/plsp"),
    ],
)
def test_the_cache_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("PLSP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache.cache_directory() == Path(expected)


# ------------------------------------------------------------------------------------------------- predictions


def test_predictions_take_all_images_of_a_folder_in_the_shape_of_the_network(folder: Path, own_cache: Path) -> None:
    found = read_inputs(folder, InputSpec((1, 24, 20)))
    assert found.inputs.shape == (4, 1, 24, 20)
    assert found.row_names == ("a.png", "c.bmp", "d.png", "sub/b.png")
    assert not own_cache.exists()


def test_predictions_take_one_image(folder: Path) -> None:
    found = read_inputs(folder / "a.png", InputSpec((3, 32, 32)))
    assert found.row_names == ("a.png",)
    assert torch.equal(found.inputs[0], on_disk(folder / "a.png"))


def test_predictions_take_an_archive(tmp_path: Path) -> None:
    np.savez(tmp_path / "new.npz", images=pixels()[None], labels=[0])
    found = read_inputs(tmp_path / "new.npz", InputSpec((3, 32, 32)))
    assert found.inputs.shape == (1, 3, 32, 32)
    assert found.row_names is None
    with pytest.raises(ValueError, match="trained on channels, height and width 3×28×28, got 3×32×32"):
        read_inputs(tmp_path / "new.npz", InputSpec((3, 28, 28)))
    with pytest.raises(ValueError, match="has no array 'features': it holds images, labels"):
        read_inputs(tmp_path / "new.npz", InputSpec((5,)))


def test_predictions_refuse_what_the_network_cannot_take(folder: Path) -> None:
    with pytest.raises(ValueError, match="holds images, but the network was trained on vectors"):
        read_inputs(folder, InputSpec((5,)))
    with pytest.raises(ValueError, match=r"images of 4 channels: give them as \.npz"):
        read_inputs(folder, InputSpec((4, 32, 32)))
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no image"):
        read_inputs(folder / "empty", InputSpec((3, 32, 32)))
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        read_inputs(folder / "nowhere", InputSpec((3, 32, 32)))
