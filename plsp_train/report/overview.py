"""What a run learned, in sentences and key figures."""

from pathlib import Path

from plsp_train.report.markup import Html, element, fragment
from plsp_train.report.run import CrossValidation, Run
from plsp_train.report.wording import MEASURES, NO_BREAK_SPACE, Measure, count, duration, number, percent, score
from plsp_train.table.statistics import mean_and_std


def sentences(run: Run) -> str:
    """A paragraph in plain English, of what is known."""
    parts = [_training(run), _ambiguity(run), *_scores(run)]
    return " ".join(part for part in parts if part)


def fold_sentences(validation: CrossValidation) -> str:
    finished, total = sum(fold.summary is not None for fold in validation.folds), validation.num_folds
    text = f"{_subject(validation.folds[0])} was cross-validated on {_data(validation.folds[0])} with {total} folds."
    if finished < total:
        text += f" Finished so far: {finished}."
    return f"{text} The figures are means over the finished folds ± their standard deviation."


def _subject(run: Run) -> str:
    return f"{run.method} with the network {run.config.model}"


def _data(run: Run) -> str:
    return Path(run.config.dataset).name


def _training(run: Run) -> str:
    results = run.results
    text = f"{_subject(run)} was trained for {count(len(run.history), 'epoch')} on {_data(run)}"
    if results is None:
        return text + "."
    kind = "image" if results.pictures is not None else "instance"
    held_out = int(results.held_out.sum())
    text += f": {count(len(results), kind)} in {count(len(results.class_names), 'class')}"
    return text + (f", {count(held_out)} of them held out for validation." if held_out else ".")


def _ambiguity(run: Run) -> str:
    size, single = run.ambiguity.get("mean_size"), run.ambiguity.get("singleton_share")
    if size is None:
        return ""
    text = f"A candidate set has {size:.2f} labels on average"
    if single:
        text += f"; {percent(single)} of the instances have a single candidate"
    return text + "."


def _scores(run: Run) -> list[str]:
    parts = []
    micro, macro, average = (run.measure(name) for name in ("micro_f1", "macro_f1", "micro_f1_last10"))
    if micro is not None and macro is not None:
        last = min(10, len(run.history))
        recent = f" (mean of the last {last} epochs: {score(average)})" if average is not None else ""
        parts.append(f"On {_test_set(run)} it reaches micro-F1 {score(micro)}{recent} and macro-F1 {score(macro)}.")
    right = run.measure("disambiguation_accuracy")
    if right is not None:
        parts.append(f"{percent(right)} of the labels that it chose for the training instances are correct.")
    covering, approximated = run.measure("covering_rate"), run.measure("approximated_accuracy")
    if covering is not None and approximated is not None:
        parts.append(
            f"For {percent(covering)} of the held-out instances the predicted class is a candidate; "
            f"the approximated accuracy is {percent(approximated)}."
        )
    if micro is None and right is None:
        parts.append("True labels are not known, so all figures below are signs that need none.")
    return parts


def _test_set(run: Run) -> str:
    if run.results is None or run.results.test_confusion is None:
        return "the test set"
    return count(int(run.results.test_confusion.sum()), "test instance")


def key_figures(run: Run) -> Html | None:
    tiles = []
    for measure in MEASURES:
        value = run.measure(measure.name)
        if value is not None:
            tiles.append(_tile(measure, number(value, measure.unit)))
    if run.summary is not None and run.summary.get("seconds") is not None:
        hardware = run.summary.get("device", "")
        time = Measure("seconds", "training time", f"On {hardware}." if hardware else "")
        tiles.append(_tile(time, duration(run.summary["seconds"])))
    return element("dl", tiles, class_="tiles") if tiles else None


def mean_figures(validation: CrossValidation) -> Html | None:
    """Mean and standard deviation over the finished folds."""
    tiles = []
    for measure in MEASURES:
        found = measure_over_folds(validation, measure)
        if found is not None:
            mean, spread = found
            tiles.append(_tile(measure, mean, spread))
    return element("dl", tiles, class_="tiles") if tiles else None


def measure_over_folds(validation: CrossValidation, measure: Measure) -> tuple[str, str] | None:
    """Mean and spread, such as 0.782 and ± 0.041; None if no finished fold has the measure."""
    values = [fold.measure(measure.name) for fold in validation.folds if fold.summary is not None]
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean, std = mean_and_std(known)
    return number(mean, measure.unit), "" if std is None else f"±{NO_BREAK_SPACE}{number(std, measure.unit)}"


def _tile(measure: Measure, value: str, spread: str = "") -> Html:
    figure = element("dd", value, fragment(" ", element("small", spread)) if spread else None)
    return element("div", element("dt", measure.label), figure, element("dd", measure.meaning, class_="note"))
