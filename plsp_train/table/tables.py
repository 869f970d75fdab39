"""From runs to tables: rows, columns and cells."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from plsp_train.data import Ambiguity
from plsp_train.methods import DF, METHODS, PLSP
from plsp_train.table.finished import SELECTIONS, FinishedRun, method_labels
from plsp_train.table.published import EPOCHS, SEEDS, published_numbers
from plsp_train.table.rows import Row, ambiguities_of, ambiguity_label, rows_of
from plsp_train.table.statistics import LEVEL, mean_and_std, significant_gain
from plsp_train.table.tuning import tuned

GAIN, LOSS = "‡", "◦"
_LEGEND = (
    f"{GAIN}: PLSP is significantly better, {LOSS}: significantly worse "
    f"(paired t-test over common seeds and folds, two-sided, level {LEVEL}; none where PLSP has several rows)."
)
_PAPER = " (paper)"
_ABLATION = (DF.label, *PLSP.ablations, PLSP.label)
_YARDSTICKS = {method.label for method in METHODS.values() if method.uses_true_labels}


class Cell(NamedTuple):
    """Empty without a mean."""

    mean: float | None = None
    std: float | None = None
    mark: str = ""
    best: bool = False


class Table(NamedTuple):
    name: str
    caption: str
    digits: int
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]


class Metric(NamedTuple):
    name: str
    label: str
    digits: int
    is_score: bool
    """Higher is better, and differences are tested."""
    value: Callable[[FinishedRun], float | None]


def build_tables(runs: Sequence[FinishedRun], select: str, tune: bool = False) -> list[Table]:
    """Scores, ablation and time of each data set, as far as there are runs."""
    datasets = dict.fromkeys(run.dataset for run in runs)
    return [table for dataset in datasets for table in _tables_of(dataset, runs, select, tune)]


def _tables_of(dataset: str, runs: Sequence[FinishedRun], select: str, tune: bool) -> Iterator[Table]:
    runs, chosen = [run for run in runs if run.dataset == dataset], ""
    if tune:
        runs, chosen = tuned(runs, select)
    labels = method_labels(runs)
    micro = Metric("micro_f1", "micro-F1", 3, True, lambda run: run.score("micro_f1", select))
    macro = Metric("macro_f1", "macro-F1", 3, True, lambda run: run.score("macro_f1", select))
    pretrain = Metric("pretrain_seconds", "pre-training", 1, False, lambda run: run.seconds("pretrain"))
    train = Metric("train_seconds", "training", 1, False, lambda run: run.seconds("train"))
    plan: list[tuple[str, str, list[Metric], Sequence[str]]] = [
        ("micro_f1", f"micro-F1 on {dataset}, {SELECTIONS[select]}", [micro], labels),
        ("macro_f1", f"macro-F1 on {dataset}, {SELECTIONS[select]}", [macro], labels),
        ("ablation", f"Ablation on {dataset}, {SELECTIONS[select]}", [macro, micro], _ABLATION),
        ("seconds", f"Seconds of pre-training and training on {dataset}", [pretrain, train], labels),
    ]
    for name, what, metrics, methods in plan:
        shown = [run for run in runs if run.method in methods]
        if name == "ablation" and not {PLSP.label} < {run.method for run in shown}:
            continue
        caption = f"{what}, mean ± std over {_num_seeds(shown)}.{chosen}"
        columns = _columns(dataset, shown, metrics, methods, tune)
        if metrics[0].is_score and any(label.endswith(_PAPER) for label in columns):
            caption += _short_of_paper(shown, tune)
        yield _arrange(f"{dataset}-{name}", caption, metrics[0], columns)


def _columns(
    dataset: str, runs: Sequence[FinishedRun], metrics: Sequence[Metric], methods: Sequence[str], one_row: bool
) -> dict[str, dict[Row, Cell]]:
    """Our columns, each followed by the paper's if it has one."""
    rows = rows_of(runs, one_row)
    first_rows = {row.method: row for row in reversed(rows)}
    columns: dict[str, dict[Row, Cell]] = {}
    for ambiguity in ambiguities_of(runs):
        for metric in metrics:
            label = ambiguity_label(ambiguity) + (f" {metric.label}" if len(metrics) > 1 else "")
            columns[label] = _our_cells(rows, ambiguity, metric)
            numbers = published_numbers(dataset, ambiguity, metric.name)
            paper = {
                first_rows.get(method, Row(method)): Cell(number.mean, number.std, GAIN if number.plsp_better else "")
                for method, number in numbers.items()
                if method in methods
            }
            if paper:
                columns[label + _PAPER] = _with_best(paper, metric)
    return columns


def _our_cells(rows: Mapping[Row, Sequence[FinishedRun]], ambiguity: Ambiguity, metric: Metric) -> dict[Row, Cell]:
    values: dict[Row, dict[tuple[int, int], float]] = {}
    for row, runs in rows.items():
        for run in runs:
            value = metric.value(run) if run.ambiguity == ambiguity else None
            if value is not None:
                values.setdefault(row, {})[run.repetition] = value
    plsp = [repeated for row, repeated in values.items() if row.method == PLSP.label]
    cells = {}
    for row, repeated in values.items():
        tested = metric.is_score and row.method not in {PLSP.label, *_YARDSTICKS} and len(plsp) == 1
        gain = significant_gain(plsp[0], repeated) if tested else 0
        cells[row] = Cell(*mean_and_std([*repeated.values()]), {1: GAIN, -1: LOSS, 0: ""}[gain])
    return _with_best(cells, metric)


def _with_best(cells: dict[Row, Cell], metric: Metric) -> dict[Row, Cell]:
    """Means that are equal after rounding are equally good."""
    if not metric.is_score or not cells:
        return cells
    rounded = {
        row: round(cell.mean, metric.digits)
        for row, cell in cells.items()
        if cell.mean is not None and row.method not in _YARDSTICKS
    }
    best = max(rounded.values(), default=None)
    return {row: cell._replace(best=row in rounded and rounded[row] == best) for row, cell in cells.items()}


def _arrange(name: str, caption: str, metric: Metric, columns: dict[str, dict[Row, Cell]]) -> Table:
    used = {row for cells in columns.values() for row in cells}
    known = {label: place for place, label in enumerate(method_labels(()))}
    rows = sorted(used, key=lambda row: (known.get(row.method, len(known)), row.method, row.settings))
    return Table(
        name,
        f"{caption} {_LEGEND}" if metric.is_score else caption,
        metric.digits,
        list(columns),
        [(str(row), [cells.get(row, Cell()) for cells in columns.values()]) for row in rows],
    )


def _num_seeds(runs: Sequence[FinishedRun]) -> str:
    settings = [(run.method, run.settings, run.ambiguity) for run in runs]
    counts = {settings.count(setting) for setting in settings}
    fewest, most = min(counts), max(counts)
    what = "fold" if any(run.config.fold for run in runs) else "seed"
    return f"{most} {what}{'s' if most > 1 else ''}" if fewest == most else f"{fewest} to {most} {what}s"


def _short_of_paper(runs: Sequence[FinishedRun], one_row: bool) -> str:
    """Names the rows that rest on fewer seeds or epochs than the paper's scores."""
    short = []
    for row, group in rows_of(runs, one_row).items():
        ambiguities = [run.ambiguity for run in group]
        seeds = min(ambiguities.count(ambiguity) for ambiguity in ambiguities)
        epochs = min(run.config.epochs for run in group)
        if seeds < SEEDS or epochs < EPOCHS:
            short.append(f"{row} {seeds} × {epochs}")
    if not short:
        return ""
    return f" The paper's scores are of {SEEDS} seeds × {EPOCHS} epochs; rows with fewer: {', '.join(short)}."
