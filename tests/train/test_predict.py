"""`python -m plsp_train.predict`: labels of new inputs, and exported networks."""

import csv
import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plsp_train.disambiguate.cli import main as disambiguate
from plsp_train.model_file import TrainedModel, load_model, save_model
from plsp_train.predict.cli import main
from plsp_train.results import load_results
from small_results import CLASS_NAMES, image_model, vector_model
from small_runs import run as run_training

HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
FEATURES = np.random.default_rng(0).normal(size=(11, 4)).astype(np.float32)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run on vectors, with the weights of a selected epoch that differ."""
    directory = tmp_path / "run"
    directory.mkdir()
    model_file = vector_model()
    save_model(directory / "model.pt", model_file)
    selected = {name: -value for name, value in model_file.state_dict.items()}
    save_model(directory / "model_selected_by_covering_rate.pt", replace(model_file, state_dict=selected))
    np.savez(tmp_path / "new.npz", features=FEATURES)
    return directory


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def probabilities_of(model: Path) -> np.ndarray:
    return load_model(model).logits(torch.from_numpy(FEATURES)).softmax(1).numpy()


def test_labels_and_probabilities_are_those_of_the_network(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, expected = tmp_path / "out.csv", probabilities_of(run / "model.pt")
    assert main([str(run), str(tmp_path / "new.npz"), "-o", str(out), "--probabilities", "--batch-size", "4"]) == 0
    assert capsys.readouterr().out.startswith(f"11 labels with a mean confidence of {expected.max(1).mean():.3f}")
    found = rows(out)
    assert list(found[0]) == ["row", "label", "confidence", *(f"probability_{name}" for name in CLASS_NAMES)]
    assert [row["row"] for row in found] == [str(i) for i in range(11)]
    assert [row["label"] for row in found] == [CLASS_NAMES[label] for label in expected.argmax(1)]
    np.testing.assert_allclose([float(row["confidence"]) for row in found], expected.max(1), rtol=1e-4)
    columns = [[float(row[f"probability_{name}"]) for row in found] for name in CLASS_NAMES]
    np.testing.assert_allclose(np.transpose(columns), expected, rtol=1e-4)


def test_arrays_hold_what_was_asked_for(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    assert main([str(run / "model.pt"), str(tmp_path / "new.npz"), "-o", str(out)]) == 0
    with np.load(out) as found:
        assert sorted(found.files) == ["class_names", "confidence", "label"]
        np.testing.assert_array_equal(found["label"], probabilities_of(run / "model.pt").argmax(1))
    assert main([str(run), str(tmp_path / "new.npz"), "-o", str(out), "--probabilities", "--features"]) == 0
    with np.load(out) as found:
        np.testing.assert_allclose(found["probabilities"], probabilities_of(run / "model.pt"), rtol=1e-5)
        expected = load_model(run / "model.pt").features(torch.from_numpy(FEATURES)).numpy()
        np.testing.assert_allclose(found["features"], expected, rtol=1e-5)


def test_features_become_columns_of_a_table(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    assert main([str(run), str(tmp_path / "new.npz"), "-o", str(out), "--features"]) == 0
    assert [name for name in rows(out)[0] if name.startswith("feature_")] == [f"feature_{i}" for i in range(64)]


def test_selected_epoch_has_its_own_weights(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    arguments = [str(run), str(tmp_path / "new.npz"), "-o", str(out), "--probabilities", "--selected", "covering-rate"]
    assert main(arguments) == 0
    expected = probabilities_of(run / "model_selected_by_covering_rate.pt")
    assert not np.allclose(expected, probabilities_of(run / "model.pt"))
    with np.load(out) as found:
        np.testing.assert_allclose(found["probabilities"], expected, rtol=1e-5)


def test_names_of_rows_and_classes_may_hold_anything(run: Path, tmp_path: Path) -> None:
    class_names = ('say "hi"', "a, b", "two\nlines")
    save_model(run / "model.pt", vector_model(class_names=class_names))
    table = tmp_path / "new.csv"
    with open(table, "w", newline="") as file:
        # Another order of columns than in training.
        csv.writer(file).writerows([["id", "d", "c", "b", "a"], ['x,"y"', 1, 2, 3, 4], ["z", 0, 0, 0, 0]])
    assert main([str(run), str(table), "-o", str(tmp_path / "out.csv")]) == 0
    found = rows(tmp_path / "out.csv")
    assert [row["name"] for row in found] == ['x,"y"', "z"]
    inputs = torch.tensor([[4.0, 3.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    expected = load_model(run / "model.pt").logits(inputs).argmax(1)
    assert [row["label"] for row in found] == [class_names[label] for label in expected]


def test_images_are_labelled(tmp_path: Path) -> None:
    save_model(tmp_path / "model.pt", image_model())
    images = np.random.default_rng(0).integers(256, size=(5, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "new.npz", images=images)
    assert main([str(tmp_path), str(tmp_path / "new.npz"), "-o", str(tmp_path / "out.npz")]) == 0
    expected = load_model(tmp_path / "model.pt").logits(torch.from_numpy(images[:, None])).argmax(1)
    with np.load(tmp_path / "out.npz") as found:
        np.testing.assert_array_equal(found["label"], expected)


# ------------------------------------------------------------------------------------------------------------- invalid


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}/missing", "{new}", "-o", "{out}.csv"], "there is no run"),
        (["{tmp}", "{new}", "-o", "{out}.csv"], "has no model.pt"),
        (["{run}", "{new}", "-o", "{out}.csv", "--selected", "approximated-accuracy"], "--validation-fraction"),
        (["{run}/model.pt", "{new}", "-o", "{out}.csv", "--selected", "covering-rate"], "directory of a run"),
        (["{run}", "{tmp}/none.npz", "-o", "{out}.csv"], "none.npz"),
        (["{run}", "{tmp}/wide.npz", "-o", "{out}.csv"], "wide.npz"),
        (["{run}", "-o", "{out}.csv"], "give the INPUT"),
        (["{run}", "{new}", "-o", "{out}.txt"], "must end in .csv or .npz"),
        (["{run}", "{new}", "-o", "{out}/no/out.csv"], "there is no directory"),
        (["{run}", "{new}", "-o", "{out}.csv", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["{run}", "{new}", "-o", "{out}.csv", "--device", "abacus"], "abacus"),
        (["{run}", "{new}", "-o", "{out}.csv", "--plugin", "no_such_module"], "no_such_module"),
        (["{run}", "{new}", "-o", "{out}.pt2", "--export", "torch"], "INPUT has no effect with --export"),
        (["{run}", "-o", "{out}.pt2", "--export", "torch", "--features"], "--features has no effect"),
        (["{run}", "-o", "{out}.onnx", "--export", "torch"], "must end in .pt2"),
    ],
)
def test_errors_are_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    np.savez(tmp_path / "wide.npz", features=np.zeros((2, 5), dtype=np.float32))
    places = {"run": run, "tmp": tmp_path, "new": tmp_path / "new.npz", "out": tmp_path / "out"}
    assert main([argument.format(**places) for argument in arguments]) == 2
    assert_one_line(capsys.readouterr().err, message)
    assert not list(tmp_path.glob("out*"))


def assert_one_line(error: str, message: str) -> None:
    assert error.startswith("plsp_train.predict: error: ")
    assert message in error
    assert error.count("\n") == 1


# -------------------------------------------------------------------------------------------------------------- export


def inputs_like(model: TrainedModel, count: int) -> torch.Tensor:
    shape = (count, *model.input_shape)
    return torch.randint(256, shape, dtype=torch.uint8) if model.is_image else 10 * torch.randn(shape)


@pytest.mark.parametrize("model_file", [vector_model(), image_model()], ids=["vectors", "images"])
def test_exported_program_takes_raw_inputs(tmp_path: Path, model_file: Any) -> None:
    save_model(tmp_path / "model.pt", model_file)
    assert main([str(tmp_path), "--export", "torch", "-o", str(tmp_path / "out.pt2")]) == 0
    extra = {"class_names": ""}
    program = torch.export.load(tmp_path / "out.pt2", extra_files=extra).module()
    assert json.loads(extra["class_names"]) == list(CLASS_NAMES)
    model = load_model(tmp_path / "model.pt")
    for count in (1, 3, 8):
        inputs = inputs_like(model, count)
        torch.testing.assert_close(program(inputs).detach(), model.logits(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not HAS_ONNX, reason="needs onnx, onnxscript and onnxruntime")
@pytest.mark.parametrize("model_file", [vector_model(), image_model()], ids=["vectors", "images"])
def test_exported_onnx_model_takes_raw_inputs(tmp_path: Path, model_file: Any) -> None:
    import onnxruntime

    save_model(tmp_path / "model.pt", model_file)
    assert main([str(tmp_path), "--export", "onnx", "-o", str(tmp_path / "out.onnx")]) == 0
    session = onnxruntime.InferenceSession(tmp_path / "out.onnx", providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["class_names"]) == list(CLASS_NAMES)
    model = load_model(tmp_path / "model.pt")
    for count in (1, 3, 8):
        inputs = inputs_like(model, count)
        found = torch.from_numpy(session.run(["logits"], {"inputs": inputs.numpy()})[0])
        torch.testing.assert_close(found, model.logits(inputs), rtol=1e-4, atol=1e-5)


def test_missing_onnx_packages_are_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main([str(run), "--export", "onnx", "-o", str(tmp_path / "out.onnx")]) == 2
    assert_one_line(capsys.readouterr().err, "pip install onnx onnxscript onnxruntime")


def test_export_that_differs_is_not_kept(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = TrainedModel.logits
    monkeypatch.setattr(TrainedModel, "logits", lambda self, inputs: logits(self, inputs) + 0.1)
    assert main([str(run), "--export", "torch", "-o", str(tmp_path / "out.pt2")]) == 2
    assert_one_line(capsys.readouterr().err, "differs from the trained one")
    assert not (tmp_path / "out.pt2").exists()


def test_network_that_cannot_be_exported_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unexportable.py").write_text(
        "from plsp_train.models import MLP\n\n"
        "class Branching(MLP):\n"
        "    def features(self, inputs):\n"
        "        return super().features(inputs if inputs.sum() > 0 else -inputs)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    save_model(tmp_path / "model.pt", vector_model(model="unexportable:Branching"))
    arguments = [str(tmp_path), "--export", "torch", "-o", str(tmp_path / "out.pt2")]
    assert main(arguments) == 2
    assert_one_line(capsys.readouterr().err, "allow its import with --plugin unexportable")
    assert main([*arguments, "--plugin", "unexportable"]) == 2
    assert_one_line(capsys.readouterr().err, "torch cannot export this network")


# ------------------------------------------------------------------------------------------------------------ start-up


def imported_by(command: str, arguments: list[str], *modules: str) -> str:
    """Which of the modules a command imports."""
    code = (
        "import contextlib, sys\n"
        f"from plsp_train.{command}.cli import main\n"
        "with contextlib.suppress(SystemExit):\n"
        f"    assert main({arguments!r}) == 0\n"
        f"print('imported', [name for name in {modules!r} if name in sys.modules])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return found.stdout.splitlines()[-1]


def test_ten_rows_are_labelled_without_heavy_imports(run: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "ten.npz", features=FEATURES[:10])
    arguments = [str(run), str(tmp_path / "ten.npz"), "-o", str(tmp_path / "out.csv")]
    heavy = ("torch._dynamo", "sklearn", "torchvision", "matplotlib", "scipy")
    assert imported_by("predict", arguments, *heavy) == "imported []"
    assert len(rows(tmp_path / "out.csv")) == 10


@pytest.mark.parametrize("command", ["predict", "disambiguate"])
def test_help_does_not_import_torch(command: str) -> None:
    assert imported_by(command, ["--help"], "torch") == "imported []"


# ---------------------------------------------------------------------------------------------------------- end to end


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a table and a short run on it: three well separated classes, two candidates each."""
    directory = tmp_path_factory.mktemp("trained")
    generator = np.random.default_rng(0)
    with open(directory / "data.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "width", "height", "candidates"])
        for number in range(120):
            label = number % 3
            features = 4 * np.eye(3)[label, :2] + 0.3 * generator.normal(size=2)
            other = (label + generator.integers(1, 3)) % 3
            names = "|".join(CLASS_NAMES[index] for index in sorted((label, other)))
            writer.writerow([f"item {number}", *features.round(4), names])
    data = ["--dataset", str(directory / "data.csv"), "--validation-fraction", "0.2"]
    assert run_training(directory / "run", *data) == 0
    return directory


def test_predictions_on_the_training_file_are_those_of_the_run(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    assert main([str(trained / "run"), str(trained / "data.csv"), "-o", str(out)]) == 0
    learned = load_results(trained / "run" / "results.npz")
    assert learned.held_out.sum() == 24
    with np.load(out) as found:
        np.testing.assert_array_equal(found["names"], learned.names)
        np.testing.assert_array_equal(found["label"], learned.prediction)
        np.testing.assert_allclose(found["confidence"], learned.prediction_probability, rtol=1e-5)


def test_disambiguated_labels_of_a_run_are_candidates(trained: Path, tmp_path: Path) -> None:
    assert disambiguate([str(trained / "run"), "-o", str(tmp_path / "labels.csv")]) == 0
    found, given = rows(tmp_path / "labels.csv"), rows(trained / "data.csv")
    assert [row["name"] for row in found] == [row["id"] for row in given]
    assert all(row["label"] in original["candidates"].split("|") for row, original in zip(found, given, strict=True))
    right = [row["label"] == CLASS_NAMES[number % 3] for number, row in enumerate(found)]
    assert np.mean(right) > 0.9


def test_selected_epochs_of_a_run_can_be_used(trained: Path, tmp_path: Path) -> None:
    for criterion in ("covering-rate", "approximated-accuracy"):
        out = tmp_path / f"{criterion}.csv"
        arguments = [str(trained / "run"), str(trained / "data.csv"), "-o", str(out), "--selected", criterion]
        assert main(arguments) == 0
        assert len(rows(out)) == 120
