"""The stored runs of the results page, `benchmarks/results/fmnist`."""

import json
from pathlib import Path

import pytest

from plsp_train.table.finished import read_runs
from plsp_train.table.render import markdown
from plsp_train.table.tables import build_tables

ROOT = Path(__file__).parent.parent.parent
STORED = ROOT / "benchmarks" / "results" / "fmnist"
RUNS, UNFINISHED = read_runs([str(STORED)])


def test_results_page_shows_their_table() -> None:
    (table,) = (table for table in build_tables(RUNS, "last10") if table.name == "fmnist-micro_f1")
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert markdown(table).split("\n\n")[1] in page
    assert UNFINISHED == 0


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.directory.name)
def test_their_scores_are_those_of_their_last_ten_epochs(run) -> None:
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == run.summary["epochs"]
    for metric in ("micro_f1", "macro_f1"):
        mean = sum(line[metric] for line in lines[-10:]) / 10
        assert run.score(metric, "last10") == pytest.approx(mean, abs=1e-4)
