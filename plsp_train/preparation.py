"""From the settings of a run to its data: which source, which split, which candidate sets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plsp_train.config import Config
from plsp_train.data import (
    DATASETS,
    RECIPES,
    ReadOptions,
    Source,
    Split,
    TrainTestData,
    check_source,
    draw_candidates,
    load_benchmark,
    published_statistics,
    read_source,
    split_source,
)
from plsp_train.data.candidate_sets import CandidateSets
from plsp_train.distributed import is_main
from plsp_train.rules import OWN_CANDIDATES
from plsp_train.runs import ambiguity_of


def load_source(given: Mapping[str, Any]) -> Source:
    """Load the data set that the given settings name: a benchmark, a file or folder, or `module:function`."""
    settings = {**_DEFAULTS, **given}
    name, root = settings["dataset"], Path(settings["data_root"]).expanduser()
    if "data_root" in given and (name == "digits" or name not in DATASETS) and given["data_root"] != Config.data_root:
        raise ValueError(
            f"--data-root has no effect on {name}: to train on your own data, pass the file or folder to --dataset"
        )
    path = Path(name).expanduser()
    if name in DATASETS:
        source = load_benchmark(name, root, download=settings["download"])
    elif path.exists():
        options = ReadOptions(
            annotators=None if settings["annotators"] == Config.annotators else settings["annotators"],
            image_size=settings["image_size"],
            workers=settings["workers"] or None,
            progress=is_main(),
        )
        source = read_source(path, options)
    elif ":" in name:
        source = DATASETS[name](root)
    else:
        raise ValueError(
            f"--dataset {name} is neither a benchmark set ({', '.join(DATASETS)}) nor an existing file or folder"
        )
    check_source(source)
    return source


_DEFAULTS = Config().to_json()


def prepare(config: Config, source: Source) -> tuple[TrainTestData, CandidateSets]:
    """Split and normalise the source; take its candidate sets, or draw them."""
    if config.candidates == OWN_CANDIDATES and source.candidates is None:
        raise ValueError(f"{source.name} has no candidate sets of its own: choose a generator with --candidates")
    if config.candidates != OWN_CANDIDATES and source.candidates is not None:
        raise ValueError(f"{source.name} comes with candidate sets: remove --candidates {config.candidates}")
    recipe = config.recipe if config.recipe in RECIPES else "paper"  # a recipe of a method does not concern the data
    data = split_source(
        source,
        Split(config.test_fraction, config.folds, config.fold, config.split_seed),
        normalise=config.normalise,
        statistics=published_statistics(config.dataset, recipe),
    )
    return data, draw_candidates(data, ambiguity_of(config), config.seed, recipe)


def unused_data_settings(config: Config, source: Source) -> set[str]:
    """Settings of the data that have no effect on this source."""
    is_folder = Path(config.dataset).is_dir()
    is_own = config.dataset not in DATASETS
    applies = {
        "normalise": not source.is_image,
        "horizontal_flip": source.is_image and is_own,
        "image_size": is_folder,
        "workers": is_folder,
        "split_seed": bool(config.folds or config.test_fraction),
        "annotators": is_own,
    }
    return {name for name, used in applies.items() if not used}
