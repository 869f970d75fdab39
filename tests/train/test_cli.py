import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from plsp_train.cli import main
from plsp_train.config import Config
from small_runs import SMALL, digits, metrics, run


def _error_of(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("plsp_train: warning: "))
    assert text.startswith("plsp_train: error: ")
    assert text.count("\n") == 1, "errors are one line"
    return text


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for setting in dataclasses.fields(Config):
        assert "--" + setting.name.replace("_", "-") in text


def test_print_config_shows_preset_file_and_command_line(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text('dataset = "fmnist"\nk = 5\nseed = 3\n')
    assert main(["--config", str(tmp_path / "c.toml"), "--seed", "4", "--print-config"]) == 0
    config = json.loads(capsys.readouterr().out)
    assert (config["model"], config["k"], config["seed"]) == ("lenet", 5, 4)


def test_a_run_writes_all_its_files(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert run(out, "--tensorboard") == 0
    names = {path.name for path in out.iterdir()}
    assert names >= {"config.json", "metrics.jsonl", "summary.json", "checkpoint.pt", "model.pt", "results.npz"}
    assert "curves.png" in names
    assert not any(name.endswith(".new") for name in names)
    assert any((out / "tensorboard").iterdir())
    lines = metrics(out)
    assert [line["stage"] for line in lines] == ["pretrain", "train", "train", "train"]
    for name in ("loss", "supervised", "consistency", "complementary", "mask_rate", "labeled_purity", "thresholds"):
        assert name in lines[-1]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["micro_f1"] == lines[-1]["micro_f1"]
    assert summary["micro_f1_best"] == max(line["micro_f1"] for line in lines)
    assert summary["micro_f1_last10"] == pytest.approx(sum(line["micro_f1"] for line in lines) / 4)
    saved = torch.load(out / "model.pt", weights_only=True)
    assert saved["class_names"] == [str(digit) for digit in range(10)]
    shown = capsys.readouterr().out
    assert "candidate sets of" in shown
    assert "micro_f1_last10" in shown


def test_a_saved_model_rebuilds_to_the_reported_score(tmp_path) -> None:
    from plsp_train.metrics import f1_scores
    from plsp_train.model_file import load_model

    out = tmp_path / "run"
    run(out)
    data = digits()
    scores = f1_scores(load_model(out / "model.pt").logits(data.test_inputs).argmax(1), data.test_labels)
    assert scores["micro_f1"] == json.loads((out / "summary.json").read_text())["micro_f1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "cifar10", "--data-root", "nowhere"], "nowhere"),
        (["--config", "missing.toml"], "missing.toml"),
        (["--device", "cuda:99"], "device"),
        (["--device", "mps"], "device must be auto, cpu, cuda or cuda:i, got 'mps'"),
        (["--device", "toaster"], "device must be auto, cpu, cuda or cuda:i, got 'toaster'"),
        (["--resume"], "--resume needs --out"),
        (["--resume", "--out", "nowhere"], "holds no run to resume"),
        (["--flip-probability", "1.2"], "flip_probability"),
        (["--dataset", "mnist"], "--dataset mnist is neither a benchmark set (digits"),
        (["--data-root", "own.npz"], "--data-root has no effect on digits: to train on your own data"),
        (["--dataset", "nowhere:load"], "there is no module 'nowhere'"),
        (["--plugin", ".relative"], "plugin '.relative': give the full name of a module"),
        (["--plugin", "nowhere"], "plugin 'nowhere': there is no module"),
        (["--candidates", "own"], "digits has no candidate sets of its own"),
        (["--select", "colour"], "--select takes model"),
        (["--test-fraction", "0.2"], "digits has a test set of its own"),
        (["--download"], "--download cannot fetch digits"),
        (["--model", "lenet"], "lenet"),
        (["--epochs", "0", "--pretrain-epochs", "0"], "nothing to train"),
    ],
)
def test_invalid_input_is_a_one_line_error_with_exit_code_2(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in _error_of(capsys)


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        (["--method", "df", "--k", "9"], ["--k"]),
        (["--method", "df", "--pretrain-batch", "9", "--lws-leverage", "3"], ["--lws-leverage", "--pretrain-batch"]),
        (["--candidates", "uss", "--flip-probability", "0.3"], ["--flip-probability"]),
        (["--k", "9", "--candidates", "noisy", "--noise-rate", "0.2"], []),
    ],
)
def test_settings_without_effect_are_named_in_a_warning(
    tmp_path, capsys: pytest.CaptureFixture[str], arguments: list[str], warned: list[str]
) -> None:
    assert main([*arguments, "--epochs", "1", "--out", str(tmp_path / "run")]) == 0
    warnings = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in warnings] == warned


def test_own_candidate_sets_of_a_set_without_any_are_an_error_not_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--candidates", "own"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_existing_run_is_not_overwritten(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    run(out)
    before = (out / "checkpoint.pt").read_bytes()
    capsys.readouterr()
    assert run(out) == 2
    assert "already holds a run" in _error_of(capsys)
    assert (out / "checkpoint.pt").read_bytes() == before


def test_default_output_directory_is_new(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick = [*SMALL, "--epochs", "1", "--iterations", "1"]
    assert main(quick) == 0
    assert main(quick) == 0
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"digits-fps0.5-seed0", "digits-fps0.5-seed0-2"}


def test_a_file_at_the_path_of_the_directory_is_a_one_line_error(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").write_text("in the way")
    assert run(tmp_path / "run") == 2
    assert "run" in _error_of(capsys)


def test_module_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "plsp_train", "--print-config"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["dataset"] == "digits"


def test_missing_dependencies_are_reported_with_the_install_command() -> None:
    script = "import runpy, sys; sys.modules['sklearn'] = None; runpy.run_module('plsp_train', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'plsp[train]'" in done.stderr


def test_help_imports_only_what_it_needs() -> None:
    heavy = ("torch._dynamo", "sklearn", "torchvision", "matplotlib", "scipy", "PIL", "triton")
    script = f"import sys, plsp_train.cli; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_profile_writes_a_trace(tmp_path) -> None:
    out = tmp_path / "run"
    assert run(out, "--profile") == 0
    assert json.loads((out / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("option", [["--amp", "bf16"], ["--no-semantic"], ["--covariance", "diagonal"]])
def test_variants_train(tmp_path, option: list[str]) -> None:
    out = tmp_path / "run"
    assert run(out, *option) == 0
    assert metrics(out)[-1]["micro_f1"] > 0.3
