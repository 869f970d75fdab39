import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from plsp_train.cli import main
from plsp_train.config import Config
from small_runs import SMALL, metrics, run


def _error_of(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().err
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


def test_a_run_leaves_all_its_files(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert run(out, "--tensorboard") == 0
    names = {path.name for path in out.iterdir()}
    assert names >= {"config.json", "metrics.jsonl", "summary.json", "checkpoint.pt", "model.pt", "curves.png"}
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
    assert saved["num_classes"] == 10
    shown = capsys.readouterr().out
    assert "candidate sets of" in shown
    assert "micro_f1_last10" in shown


def test_a_saved_model_rebuilds_to_the_reported_score(tmp_path) -> None:
    from plsp_train.data import build_augmentation, load_dataset
    from plsp_train.metrics import f1_scores, predict
    from plsp_train.models import build_model

    out = tmp_path / "run"
    run(out)
    saved = torch.load(out / "model.pt", weights_only=True)
    model = build_model(saved["model"], tuple(saved["input_shape"]), saved["num_classes"])
    model.load_state_dict(saved["state_dict"])
    data = load_dataset("digits")
    scores = f1_scores(predict(model, data.test_inputs, build_augmentation(data)), data.test_labels)
    assert scores["micro_f1"] == json.loads((out / "summary.json").read_text())["micro_f1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "cifar10", "--data-root", "nowhere"], "nowhere"),
        (["--config", "missing.toml"], "missing.toml"),
        (["--device", "cuda:99"], "device"),
        (["--device", "toaster"], "device must be auto, cpu, cuda or cuda:i, got 'toaster'"),
        (["--resume"], "--resume needs --out"),
        (["--resume", "--out", "nowhere"], "holds no run to resume"),
        (["--flip-probability", "1.2"], "flip_probability"),
        (["--epochs", "0", "--pretrain-epochs", "0"], "nothing to train"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in _error_of(capsys)


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    run(out)
    before = (out / "checkpoint.pt").read_bytes()
    capsys.readouterr()
    assert run(out) == 2
    assert "already holds a run" in _error_of(capsys)
    assert (out / "checkpoint.pt").read_bytes() == before


def test_the_default_folder_is_a_fresh_one(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick = [*SMALL, "--epochs", "1", "--iterations", "1"]
    assert main(quick) == 0
    assert main(quick) == 0
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"digits-fps0.5-seed0", "digits-fps0.5-seed0-2"}


def test_a_file_in_the_way_of_the_folder_is_a_one_line_error(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").write_text("in the way")
    assert run(tmp_path / "run") == 2
    assert "run" in _error_of(capsys)


def test_module_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "plsp_train", "--print-config"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["dataset"] == "digits"


def test_without_the_trainers_packages_the_error_says_what_to_install() -> None:
    script = "import runpy, sys; sys.modules['sklearn'] = None; runpy.run_module('plsp_train', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'plsp[train]'" in done.stderr


def test_profile_writes_a_trace(tmp_path) -> None:
    out = tmp_path / "run"
    assert run(out, "--profile") == 0
    assert json.loads((out / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("option", [["--amp", "bf16"], ["--no-semantic"], ["--covariance", "diagonal"]])
def test_variants_train(tmp_path, option: list[str]) -> None:
    out = tmp_path / "run"
    assert run(out, *option) == 0
    assert metrics(out)[-1]["micro_f1"] > 0.3
