"""The files that a finished run leaves in its directory."""

from pathlib import Path

# By the criterion that selected the epoch, as on the command line.
SELECTED_MODELS = {
    "covering-rate": "model_selected_by_covering_rate.pt",
    "approximated-accuracy": "model_selected_by_approximated_accuracy.pt",
}


def model_of(run: Path, selected: str | None = None) -> Path:
    """The trained model of a run, from its last epoch or the one that a criterion selected."""
    if selected is None:
        return _file_of(run, "model.pt", "it is written at the end of a run")
    return _file_of(run, SELECTED_MODELS[selected], "it is written by runs with --validation-fraction")


def results_of(run: Path) -> Path:
    """What a run has learned about its training instances."""
    return _file_of(run, "results.npz", "it is written at the end of a run")


def _file_of(run: Path, name: str, origin: str) -> Path:
    if not run.is_dir():
        raise FileNotFoundError(f"there is no run {run}: give the directory of a finished run")
    if (run / name).is_file():
        return run / name
    if (run / "folds.json").is_file():
        raise FileNotFoundError(f"{run} is a cross-validation: give one of its runs, such as {run / 'fold1'}")
    raise FileNotFoundError(f"{run} has no {name}: {origin}")
