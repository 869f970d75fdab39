"""Tables of runs: their numbers, marks, rows and renderings."""

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_rel

from plsp_train.config import build_config
from plsp_train.data import Ambiguity
from plsp_train.table.cli import main
from plsp_train.table.comparison import compare
from plsp_train.table.finished import FinishedRun, read_runs
from plsp_train.table.published import published_numbers
from plsp_train.table.render import comma_separated, latex, markdown
from plsp_train.table.statistics import mean_and_std, significant_gain
from plsp_train.table.tables import Cell, Table, build_tables

BETTER = [0.90, 0.91, 0.92, 0.93, 0.94]
WORSE = [0.80, 0.812, 0.818, 0.83, 0.841]


def finished(score: float, seed: int = 0, criterion: float | None = None, **given: Any) -> FinishedRun:
    """A run of that micro-F1; its macro-F1 is 0.1 less, its last epoch 0.01 more, its selected epoch 0.02 more."""
    has_pretraining = given.get("method", "plsp") == "plsp"
    summary: dict[str, Any] = {
        "micro_f1": score + 0.01,
        "macro_f1": score - 0.09,
        "micro_f1_last10": score,
        "macro_f1_last10": score - 0.1,
        "seconds_at_end_of": {"pretrain": 2.0, "train": 12.5} if has_pretraining else {"train": 8},
    }
    if criterion is not None:
        selected = {"epoch": 3, "micro_f1": score + 0.02, "macro_f1": score - 0.08, "value": criterion}
        summary |= {"selected_by_covering_rate": selected, "selected_by_approximated_accuracy": selected}
    config = build_config({"seed": seed, **given})
    return FinishedRun(Path(f"runs/{config.method}-{seed}"), config, summary)


def series(scores: list[float], **given: Any) -> list[FinishedRun]:
    return [finished(score, seed, **given) for seed, score in enumerate(scores)]


def table(runs: list[FinishedRun], name: str, select: str = "last10", tune: bool = False) -> Table:
    (found,) = [table for table in build_tables(runs, select, tune) if table.name == name]
    return found


def cell(found: Table, row: str, column: str) -> Cell:
    return dict(found.rows)[row][found.columns.index(column)]


def write_run(directory: Path, run: FinishedRun) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(run.config.to_json()))
    (directory / "summary.json").write_text(json.dumps(run.summary))
    scores = [{"micro_f1": run.summary["micro_f1"] - 0.1 / epoch} for epoch in (1, 2, 3)]
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in scores))


# ---------------------------------------------------------------------------------------------------------- statistics


def test_mean_and_sample_std() -> None:
    mean, std = mean_and_std([1.0, 2.0, 6.0])
    assert mean == 3
    assert std == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert mean_and_std([0.5]) == (0.5, None)


def test_t_test_pairs_by_seed_and_gives_the_direction() -> None:
    ours, theirs = dict(enumerate(BETTER)), dict(enumerate(WORSE))
    assert ttest_rel(BETTER, WORSE).pvalue < 0.01
    assert significant_gain(ours, theirs) == 1
    assert significant_gain(theirs, ours) == -1
    assert significant_gain(ours, dict(reversed(theirs.items()))) == 1, "the order of the seeds is no matter"
    assert significant_gain(ours, {seed + 4: value for seed, value in theirs.items()}) == 0, "one common seed"


def test_t_test_is_two_sided_at_one_percent() -> None:
    theirs = [0.0, 0.0, 0.0, 0.0, 0.0]
    for ours, significant in (([1.0, 2.0, 3.0, 1.0, 2.0], True), ([1.0, 2.0, 4.0, 1.0, 2.0], False)):
        pvalue = ttest_rel(ours, theirs).pvalue
        assert 0.002 < pvalue < 0.03, "near the level"
        assert (pvalue < 0.01) == significant
        assert significant_gain(dict(enumerate(ours)), dict(enumerate(theirs))) == int(significant)


@pytest.mark.filterwarnings("error")
def test_constant_differences_are_significant_unless_zero() -> None:
    assert significant_gain({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}) == 0
    assert significant_gain({0: 1.5, 1: 2.5}, {0: 1.0, 1: 2.0}) == 1


# ------------------------------------------------------------------------------------------------------- rows and cells


def test_one_row_per_method_and_one_column_per_ambiguity() -> None:
    runs = series(BETTER, flip_probability=0.3) + series(WORSE, candidates="uss") + series(WORSE, method="cc")
    micro = table(runs, "digits-micro_f1")
    assert micro.columns == ["USS", "FPS 0.3", "FPS 0.5"]
    assert [label for label, _ in micro.rows] == ["CC", "PLSP"]
    assert cell(micro, "PLSP", "FPS 0.3")[:2] == pytest.approx((0.92, math.sqrt(0.001 / 4)))
    assert cell(micro, "PLSP", "FPS 0.5") == Cell()
    assert cell(table(runs, "digits-macro_f1"), "PLSP", "FPS 0.3").mean == pytest.approx(0.82)


def test_marks_in_both_directions_and_the_best() -> None:
    runs = series(BETTER, method="rc") + series(WORSE, method="cc") + series([0.85, 0.861, 0.87, 0.879, 0.89])
    micro = table(runs, "digits-micro_f1")
    assert [cell(micro, row, "FPS 0.5").mark for row in ("CC", "RC", "PLSP")] == ["‡", "◦", ""]
    assert [cell(micro, row, "FPS 0.5").best for row in ("CC", "RC", "PLSP")] == [False, True, False]


def test_the_fully_supervised_row_is_neither_tested_nor_the_best() -> None:
    runs = [*series(BETTER, method="supervised"), *series(WORSE), *series(WORSE, method="cc")]
    micro = table(runs, "digits-micro_f1")
    assert [label for label, _ in micro.rows] == ["CC", "PLSP", "fully supervised"]
    supervised = cell(micro, "fully supervised", "FPS 0.5")
    assert (supervised.mark, supervised.best) == ("", False)
    assert cell(micro, "PLSP", "FPS 0.5").best
    (only,) = table(series(BETTER, method="supervised"), "digits-micro_f1").rows
    assert not only[1][0].best


def test_scores_equal_after_rounding_are_both_best() -> None:
    micro = table([finished(0.9001), finished(0.9004, method="cc"), finished(0.89, method="rc")], "digits-micro_f1")
    assert [cell(micro, row, "FPS 0.5").best for row in ("CC", "RC", "PLSP")] == [True, False, True]


def test_different_settings_are_separate_rows() -> None:
    runs = series(BETTER, k=20) + series(WORSE, k=50) + series(WORSE, method="cc")
    micro = table(runs, "digits-micro_f1")
    assert [label for label, _ in micro.rows] == ["CC", "PLSP (k 20)", "PLSP (k 50)"]
    assert cell(micro, "PLSP (k 20)", "FPS 0.5").mean == pytest.approx(0.92)
    assert not any(cell.mark for _, cells in micro.rows for cell in cells), "no single PLSP to test against"


def test_a_recipe_stands_for_its_settings() -> None:
    runs = [
        *series([0.8, 0.8]),
        *series([0.9, 0.9], recipe="robust"),
        *series([0.7, 0.7], schedule="cosine"),
        *series([0.6, 0.6], recipe="robust", average_epochs=1.0),
    ]
    assert [row for row, _ in table(runs, "digits-micro_f1").rows] == [
        "PLSP (recipe paper)",
        "PLSP (recipe paper, schedule cosine)",
        "PLSP (recipe robust)",
        "PLSP (recipe robust, average_epochs 1.0)",
    ]


def test_settings_without_effect_do_not_split_a_row() -> None:
    runs = [finished(0.7, 0, method="cc", k=20), finished(0.8, 1, method="cc", k=50, device="cpu")]
    assert cell(table(runs, "digits-micro_f1"), "CC", "FPS 0.5").mean == pytest.approx(0.75)


def test_ablation_needs_plsp_and_a_variant() -> None:
    runs = series(BETTER) + series(WORSE, semantic=False) + series(WORSE, method="df") + series(WORSE, method="cc")
    ablation = table(runs, "digits-ablation")
    assert [label for label, _ in ablation.rows] == ["DF", "PLSP w/o ST", "PLSP"]
    assert ablation.columns == ["FPS 0.5 macro-F1", "FPS 0.5 micro-F1"]
    assert cell(ablation, "PLSP w/o ST", "FPS 0.5 micro-F1").mark == "‡"
    for fewer in (series(BETTER) + series(WORSE, method="cc"), series(WORSE, method="df")):
        assert "digits-ablation" not in [table.name for table in build_tables(fewer, "last10")]


def test_the_time_of_a_stage_excludes_earlier_stages() -> None:
    seconds = table([finished(0.9), finished(0.8, method="cc")], "digits-seconds")
    assert cell(seconds, "PLSP", "FPS 0.5 pre-training") == Cell(2.0)
    assert cell(seconds, "PLSP", "FPS 0.5 training") == Cell(10.5)
    assert cell(seconds, "CC", "FPS 0.5 pre-training") == Cell()
    assert cell(seconds, "CC", "FPS 0.5 training") == Cell(8)


def test_caption_states_the_number_of_seeds() -> None:
    assert "over 5 seeds." in table(series(BETTER), "digits-micro_f1").caption
    assert "over 1 to 5 seeds." in table([*series(BETTER), finished(0.8, method="cc")], "digits-micro_f1").caption


# ------------------------------------------------------------------------------------------------ selection and tuning


@pytest.mark.parametrize(
    ("select", "score"), [("last10", 0.9), ("last", 0.91), ("covering-rate", 0.92), ("approximated-accuracy", 0.92)]
)
def test_scores_are_those_of_the_selected_epoch(select: str, score: float) -> None:
    found = table([finished(0.9, criterion=0.5)], "digits-micro_f1", select)
    assert cell(found, "PLSP", "FPS 0.5").mean == pytest.approx(score)


def test_tuning_uses_the_criterion_and_not_the_scores() -> None:
    runs = [finished(0.7, seed, criterion=0.9, lr=0.1) for seed in (0, 1)]
    runs += [finished(0.8, seed, criterion=0.6, lr=0.5) for seed in (0, 1)]
    runs += [finished(0.9, criterion=0.99, lr=0.01)]  # of fewer seeds than the others
    micro = table(runs, "digits-micro_f1", "covering-rate", tune=True)
    assert micro.rows == [("PLSP", [Cell(pytest.approx(0.72), 0.0, "", True)])]
    assert "Settings chosen by covering rate: PLSP at FPS 0.5: lr 0.1." in micro.caption


# ---------------------------------------------------------------------------------------------------- published numbers


@pytest.mark.parametrize(
    ("dataset", "candidates", "flip", "metric", "method", "numbers"),
    [
        ("fmnist", "uss", None, "micro_f1", "PiCO", (0.907, 0.001, False)),
        ("fmnist", "fps", 0.3, "micro_f1", "CC", (0.883, 0.003, False)),
        ("fmnist", "fps", 0.3, "macro_f1", "CC", (0.883, 0.003, True)),
        ("fmnist", "fps", 0.7, "macro_f1", "CAVL", (0.863, 0.002, True)),
        ("cifar10", "fps", 0.5, "micro_f1", "LWS", (0.795, 0.002, True)),
        ("cifar10", "fps", 0.7, "micro_f1", "PLSP", (0.870, 0.006, False)),
        ("cifar10", "fps", 0.7, "macro_f1", "PLSP w/o ST", (0.858, 0.008, False)),
        ("cifar10", "fps", 0.7, "micro_f1", "DF", (0.418, 0.012, False)),
        ("cifar100", "fps", 0.05, "macro_f1", "RC", (0.461, 0.007, True)),
        ("cifar100", "fps", 0.2, "micro_f1", "PRODEN", (0.496, 0.007, True)),
        ("cifar100", "uss", None, "train_seconds", "PLSP", (44000, None, False)),
    ],
)
def test_published_numbers(dataset, candidates, flip, metric, method, numbers) -> None:
    assert published_numbers(dataset, Ambiguity(candidates, flip, None), metric)[method] == numbers


def test_published_numbers_are_complete() -> None:
    ambiguities = [Ambiguity("uss", None, None), *(Ambiguity("fps", flip, None) for flip in (0.3, 0.5, 0.7))]
    wanted = [(dataset, ambiguity) for dataset in ("fmnist", "cifar10") for ambiguity in ambiguities]
    wanted += [("cifar100", Ambiguity("fps", flip, None)) for flip in (0.05, 0.1, 0.2)]
    for dataset, ambiguity in wanted:
        for metric in ("micro_f1", "macro_f1"):
            methods = set(published_numbers(dataset, ambiguity, metric)) - {"DF", "PLSP w/o ST"}
            assert methods == {"CC", "RC", "PRODEN", "LWS", "CAVL", "PiCO", "PLSP"}


def test_caption_names_rows_with_fewer_seeds_or_epochs_than_the_paper() -> None:
    runs = [*series(BETTER, dataset="fmnist"), *series(WORSE[:2], dataset="fmnist", method="cc", epochs=40)]
    caption = table(runs, "fmnist-micro_f1").caption
    assert "The paper's scores are of 5 seeds × 250 epochs; rows with fewer: CC 2 × 40." in caption
    assert "rows with fewer" not in table(series(BETTER, dataset="fmnist"), "fmnist-micro_f1").caption
    assert "The paper's" not in table(series(BETTER[:2]), "digits-micro_f1").caption, "which the paper does not have"


def test_published_numbers_are_shown_even_for_methods_without_runs() -> None:
    micro = table(series(BETTER, dataset="fmnist", candidates="uss"), "fmnist-micro_f1")
    assert micro.columns == ["USS", "USS (paper)"]
    assert cell(micro, "PLSP", "USS (paper)") == Cell(0.897, 0.002)
    assert cell(micro, "CC", "USS (paper)") == Cell(0.880, 0.001, "‡")
    assert cell(micro, "PiCO", "USS (paper)") == Cell(0.907, 0.001, best=True)
    assert cell(micro, "PiCO", "USS") == Cell()


# ------------------------------------------------------------------------------------------------------------ rendering

EXAMPLE = Table("t", "50 % of a_b", 3, ["FPS 0.3"], [("A", [Cell(0.5, 0.01, "‡")]), ("B", [Cell(0.625, best=True)])])


def test_markdown() -> None:
    assert markdown(EXAMPLE).splitlines() == [
        "50 % of a_b",
        "",
        "|  | FPS 0.3 |",
        "| --- | --- |",
        "| A | 0.500 ± 0.010‡ |",
        "| B | **0.625 ± -** |",
    ]


def test_comma_separated_values_are_not_rounded() -> None:
    rows = list(csv.reader(comma_separated(EXAMPLE).splitlines()))
    assert rows == [
        ["method", "FPS 0.3", "FPS 0.3 std", "FPS 0.3 mark"],
        ["A", "0.5", "0.01", "‡"],
        ["B", "0.625", "", ""],
    ]


def test_latex() -> None:
    lines = [line.strip() for line in latex(EXAMPLE).splitlines()]
    assert r"\caption{50 \% of a\_b}" in lines
    assert r"\begin{tabular}{lc}" in lines
    assert r"A & 0.500 $\pm$ 0.010$^{\ddagger}$ \\" in lines
    assert r"B & \textbf{0.625 $\pm$ -} \\" in lines
    assert [line for line in lines if "rule" in line] == [r"\toprule", r"\midrule", r"\bottomrule"]


# ---------------------------------------------------------------------------------------------------------- comparison


def test_comparison_says_which_row_is_better_and_by_how_much() -> None:
    runs = [*series(BETTER), *series(WORSE, method="cc")]
    micro, macro = compare(runs, "PLSP", "CC", select="last10")
    interval = ttest_rel(BETTER, WORSE).confidence_interval()
    assert micro.startswith("digits, FPS 0.5, micro-F1: PLSP is better than CC by 0.100 (")
    assert f"({interval.low:.3f} to {interval.high:.3f} at 95 %; 5 common seeds" in micro
    assert "macro-F1: PLSP is better" in macro
    assert compare(runs, "CC", "PLSP", select="last10")[0] == micro, "the order of the rows is no matter"


def test_comparison_of_noise_names_no_winner() -> None:
    runs = [*series(BETTER), *series([*BETTER[1:], BETTER[0]], method="cc")]
    assert "no significant difference at level 0.01" in compare(runs, "PLSP", "CC", select="last10")[0]


def test_comparison_of_single_runs_says_that_nothing_is_known() -> None:
    runs = [finished(0.9), finished(0.8, method="cc"), finished(0.8, method="rc", seed=1)]
    assert "PLSP scores 0.100 more than CC on one common seed" in compare(runs, "CC", "PLSP", select="last10")[0]
    assert "no seed in common" in compare(runs, "PLSP", "RC", select="last10")[0]


def test_comparison_takes_the_rows_of_the_tables() -> None:
    runs = [*series(BETTER, k=50), *series(WORSE, k=20)]
    assert "PLSP (k 50) is better than PLSP (k 20)" in compare(runs, "PLSP (k 20)", "PLSP (k 50)", select="last10")[0]
    with pytest.raises(ValueError, match=r"no row 'PLSP'; there are 'PLSP \(k 20\)', 'PLSP \(k 50\)'"):
        compare(runs, "PLSP", "PLSP (k 20)", select="last10")
    with pytest.raises(ValueError, match="no data set and ambiguity in common"):
        compare([*series(BETTER), *series(WORSE, method="cc", candidates="uss")], "PLSP", "CC", select="last10")


# ----------------------------------------------------------------------------------------------------- the command line


def test_the_command_writes_every_format_and_prints_markdown(tmp_path, capsys) -> None:
    for k in (20, 50):
        for run in series(BETTER[:2], k=k):
            write_run(tmp_path / "runs" / f"k{k}" / str(run.config.seed), run)
    write_run(tmp_path / "runs" / "begun", finished(0.9, seed=9))
    (tmp_path / "runs" / "begun" / "summary.json").unlink()
    out = tmp_path / "tables"
    assert main([str(tmp_path / "runs"), str(tmp_path / "runs" / "k20"), "--out", str(out)]) == 0
    names = {"digits-micro_f1", "digits-macro_f1", "digits-seconds"}
    assert {path.name for path in out.iterdir()} == {
        *(f"{name}.{ending}" for name in names for ending in ("md", "csv", "tex")),
        "digits-sensitivity-k.png",
        "digits-fps0.5-curves.png",
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.glob("*.png"))
    captured = capsys.readouterr()
    assert (out / "digits-micro_f1.md").read_text() in captured.out
    assert f"read 4 runs; wrote to {out}: 3 tables, 2 figures" in captured.out
    assert captured.err == "unfinished runs skipped: 1\n"


def test_a_reader_who_leaves_early_is_no_error(tmp_path) -> None:
    write_run(tmp_path / "run", finished(0.9))
    command = [sys.executable, "-m", "plsp_train.table", str(tmp_path / "run"), "--out", str(tmp_path / "tables")]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        found = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (found.returncode, found.stderr) == (0, "")
    assert (tmp_path / "tables" / "digits-micro_f1.md").exists()


def test_runs_without_a_stored_method_are_plsp(tmp_path) -> None:
    write_run(tmp_path / "run", finished(0.9))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    del config["method"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    ((run,), _) = read_runs([str(tmp_path)])
    assert run.method == "PLSP"


def _without(name: str):  # type: ignore[no-untyped-def]
    return lambda directory: (directory / name).unlink()


def _with(name: str, text: str):  # type: ignore[no-untyped-def]
    return lambda directory: (directory / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "options", "message"),
    [
        (_without("config.json"), [], "run is not the directory of a run: it has no config.json"),
        (_without("summary.json"), [], "no finished run (summary.json)"),
        (_with("summary.json", '{"micro_f1": 0.'), [], "cannot read"),
        (_with("summary.json", "[]"), [], "it must hold a table"),
        (_with("summary.json", "{}"), [], "has no micro_f1_last10"),
        (_with("config.json", '{"colour": "red"}'), [], "unknown setting 'colour'"),
        (lambda directory: write_run(directory.parent / "twin", finished(0.8)), [], "are the same run"),
        (lambda directory: None, ["--select", "covering-rate"], "was trained without a validation split"),
        (lambda directory: None, ["--tune"], "--tune needs a criterion without clean labels"),
    ],
)
def test_invalid_input_is_a_one_line_error_and_writes_no_tables(tmp_path, capsys, damage, options, message) -> None:
    write_run(tmp_path / "runs" / "run", finished(0.9))
    damage(tmp_path / "runs" / "run")
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "tables"), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("plsp_train.table: error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "tables").exists()


def test_a_missing_directory_is_an_error(tmp_path, capsys) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err
