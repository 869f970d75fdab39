"""Directories of runs that never took place: every file of a run, with numbers drawn at random."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from plsp_train.results import Results, save_results

CLASS_NAMES = ("airplane", "bird", "cat", "deer")


@dataclass(frozen=True)
class Synthetic:
    """What a synthetic run has."""

    class_names: tuple[str, ...] = CLASS_NAMES
    num_instances: int = 60
    epochs: int = 6
    method: str = "plsp"
    picture_shape: tuple[int, ...] | None = (3, 8, 8)
    true_labels: bool = True
    test_set: bool = True
    validation: bool = True
    names: tuple[str, ...] | None = None
    seed: int = 0
    config: tuple[tuple[str, Any], ...] = ()


def write_run(directory: Path, kind: Synthetic | None = None) -> Path:
    """A finished run."""
    kind = kind or Synthetic()
    directory.mkdir(parents=True)
    config = {"dataset": "birds.npz", "method": kind.method, "model": "mlp", "epochs": kind.epochs, "seed": kind.seed}
    results = make_results(kind)
    history = make_history(kind)
    size = np.diff(results.offsets)
    ambiguity = {"mean_size": float(size.mean()), "singleton_share": float((size == 1).mean())}
    write_json(directory / "config.json", config | dict(kind.config))
    write_json(directory / "ambiguity.json", ambiguity)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in history))
    write_json(directory / "summary.json", make_summary(history[-1], results))
    save_results(directory / "results.npz", results)
    return directory


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def make_results(kind: Synthetic) -> Results:
    random = np.random.default_rng(kind.seed)
    n, classes = kind.num_instances, len(kind.class_names)
    true = random.integers(classes, size=n)
    logits = random.normal(size=(n, classes)) + 4 * np.eye(classes)[true]
    candidates = (random.random((n, classes)) < min(0.4, 3 / classes)) | (np.eye(classes)[true] == 1)
    candidates[::40] &= np.eye(classes)[true[::40]] == 0  # some miss the true label
    candidates[candidates.sum(1) == 0, 0] = True
    all_probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    among = np.where(candidates, all_probabilities, 0)
    among /= among.sum(1, keepdims=True)
    label = among.argmax(1)
    results = Results(
        class_names=np.array(kind.class_names),
        row=np.arange(n),
        label=label,
        confidence=among.max(1).astype(np.float32),
        offsets=np.concatenate([[0], candidates.sum(1).cumsum()]),
        classes=candidates.nonzero()[1].astype(np.int32),
        probabilities=among[candidates].astype(np.float32),
        prediction=all_probabilities.argmax(1),
        prediction_probability=all_probabilities.max(1).astype(np.float32),
        labeled=(among.max(1) > 0.9) & (kind.method == "plsp"),
        held_out=(random.random(n) < 0.1) & kind.validation,
        changes=random.poisson(0.5, n).astype(np.int32),
        names=None if kind.names is None else np.array(kind.names),
        true_label=true if kind.true_labels else None,
    )
    if kind.test_set:
        confusion = random.poisson(1, (classes, classes)) + np.diag(random.poisson(40, classes))
        results = replace(results, test_confusion=confusion)
    if kind.picture_shape is not None:
        contradicts, ambiguous = results.contradictions(), np.diff(results.offsets) > 1
        by_confidence = np.argsort(results.confidence, kind="stable")
        by_confidence = by_confidence[ambiguous[by_confidence]]
        surest = np.argsort(-results.prediction_probability, kind="stable")
        surest = surest[contradicts[surest]]
        index = np.unique(np.concatenate([by_confidence[:24], by_confidence[-24:], surest[:24]]))
        pictures = random.integers(256, size=(len(index), *kind.picture_shape)).astype(np.uint8)
        results = replace(results, picture_index=index, pictures=pictures)
    return results


def make_history(kind: Synthetic) -> list[dict[str, Any]]:
    random = np.random.default_rng(kind.seed + 1)
    classes, history = len(kind.class_names), []
    for epoch in range(1, kind.epochs + 1):
        progress = 1 - 0.6 * np.exp(-4 * epoch / kind.epochs) + random.normal() * 0.004
        pretraining = kind.method == "plsp" and epoch <= kind.epochs // 4
        line: dict[str, Any] = {"epoch": epoch, "stage": "pretrain" if pretraining else "train", "loss": 2.5 - progress}
        line["label_agreement"] = progress - 0.02 if epoch > 1 else None
        if kind.method == "plsp" and not pretraining:
            sizes = random.poisson(5, classes) + 1
            line |= {"supervised": 1.1 - progress, "consistency": 0.4 * progress, "complementary": 1.3 - progress}
            line |= {"mask_rate": progress - 0.1, "num_labeled": int(sizes.sum()), "labeled_per_class": sizes.tolist()}
            line["thresholds"] = (0.75 * progress * np.linspace(0.6, 1, classes)).round(6).tolist()
            if kind.true_labels:
                purity = np.minimum(1, progress + 0.02 * random.normal(size=classes))
                line |= {"labeled_purity": purity.mean(), "pseudo_label_purity": progress - 0.05}
                line["labeled_purity_per_class"] = purity.tolist()
        if kind.test_set:
            line |= {"micro_f1": progress - 0.08, "macro_f1": progress - 0.1}
        if kind.validation:
            line |= {"covering_rate": progress - 0.02, "approximated_accuracy": progress - 0.06}
        history.append(line | {"lr": 0.1, "seconds": 2.5 * epoch, "images_per_second": 1000.0})
    return history


def make_summary(last: dict[str, Any], results: Results) -> dict[str, Any]:
    names = ("micro_f1", "macro_f1", "label_agreement", "covering_rate", "approximated_accuracy")
    summary: dict[str, Any] = {name: last[name] for name in names if name in last}
    if "micro_f1" in last:
        summary |= {"micro_f1_last10": last["micro_f1"], "macro_f1_last10": last["macro_f1"]}
    if results.true_label is not None:
        summary["disambiguation_accuracy"] = float((results.label == results.true_label).mean())
    summary["contradiction_share"] = float(results.contradictions().mean())
    return summary | {
        "warnings": [],
        "epochs": last["epoch"],
        "seconds": last["seconds"],
        "device": "cpu",
        "versions": {"plsp": "0.0"},
    }
