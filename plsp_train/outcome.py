"""What a trained network says about its training instances, and what that says about the run."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plsp_train.alarms import Alarm, alarms_of
from plsp_train.data import Augmentation, TrainTestData
from plsp_train.data.candidate_sets import AnyCandidates
from plsp_train.data.mapped import Inputs
from plsp_train.distributed import from_all_ranks
from plsp_train.metrics import own_logits, predictions
from plsp_train.models import Network
from plsp_train.results import Columns, Results, disambiguate_batch, join
from plsp_train.review import review_order
from plsp_train.validation import CRITERIA, HeldOut, selected_epochs

LAST_EPOCHS = 10  # averaged in the summary
PICTURES_PER_KIND = 24  # most confident, most ambiguous, contradictory, first to review
SURE = 0.9  # probability from which a prediction outside the candidate set is called a contradiction
MANY_CONTRADICTIONS = 0.02
FEW_INSTANCES = 5  # contradictions that may be chance


class Outcome(NamedTuple):
    results: Results
    scores: dict[str, float]
    """For the summary."""


class Trained(NamedTuple):
    """A run at its end."""

    data: TrainTestData
    """Without the held-out instances."""
    candidates: AnyCandidates
    held_out: HeldOut | None
    labeled: Tensor | None
    """Indices of the labelled set in the training part."""
    changes: Tensor
    """Of labels between epochs, in the training part."""
    model: Network
    augmentation: Augmentation


def describe_instances(run: Trained) -> Outcome:
    """Disambiguate every instance of the source's training part, held-out ones included, in the order of the source."""
    data, held_out = run.data, run.held_out
    num_kept = len(data.train_inputs)
    rows = torch.arange(num_kept) if data.train_rows is None else data.train_rows
    parts = [(data.train_inputs, run.candidates)]
    if held_out is not None:
        rows = torch.cat([rows, held_out.rows])
        parts.append((held_out.inputs, held_out.candidates))
    found = join(_disambiguated(run, *part) for part in parts).disambiguation()
    labeled, changes, in_held_out = (np.zeros(len(rows), dtype) for dtype in (np.bool_, np.int32, np.bool_))
    changes[:num_kept] = run.changes.cpu().numpy()
    in_held_out[num_kept:] = True
    if run.labeled is not None:
        labeled[run.labeled.cpu().numpy()] = True
    results = Results(
        class_names=np.array(data.class_names, dtype=np.str_),
        row=(rows if data.file_rows is None else data.file_rows[rows]).numpy(),
        **found._asdict(),
        labeled=labeled,
        held_out=in_held_out,
        changes=changes,
        names=None if data.row_names is None else np.array(data.row_names, dtype=np.str_)[rows.numpy()],
        true_label=None if data.source_labels is None else data.source_labels[rows].numpy(),
        test_confusion=_confusion(run),
    )
    order = results.row.argsort(kind="stable")
    results = results.take(order)
    if data.is_image:
        results = _with_pictures(results, [inputs for inputs, _ in parts], order)
    return Outcome(results, _scores(results))


def _disambiguated(run: Trained, inputs: Inputs, candidates: AnyCandidates) -> Columns:
    """Every rank disambiguates its share; logits exist for one batch at a time."""
    own = join(
        disambiguate_batch(logits, candidates[rows]) for rows, logits in own_logits(run.model, inputs, run.augmentation)
    )
    return Columns(from_all_ranks(*own.by_instance), from_all_ranks(*own.by_candidate))


def _confusion(run: Trained) -> np.ndarray | None:
    """Counts by true and predicted class of the test set."""
    labels, num_classes = run.data.test_labels, run.data.num_classes
    if labels is None or run.data.test_inputs is None:
        return None
    prediction = predictions(run.model, run.data.test_inputs, run.augmentation).cpu()
    pairs = labels * num_classes + prediction
    return pairs.bincount(minlength=num_classes**2).view(num_classes, num_classes).numpy()


def _with_pictures(results: Results, parts: list[Inputs], order: np.ndarray) -> Results:
    """Add the images that a report shows. Instance i of the results is number order[i] of the parts together."""
    contradicting = np.flatnonzero(results.contradictions())
    by_confidence = np.argsort(results.confidence, kind="stable")
    # An instance with a single candidate is confident by definition, and says nothing.
    ambiguous = by_confidence[np.diff(results.offsets)[by_confidence] > 1]
    surest = contradicting[np.argsort(-results.prediction_probability[contradicting], kind="stable")]
    review = review_order(results)[:PICTURES_PER_KIND]
    kinds = (ambiguous[-PICTURES_PER_KIND:], ambiguous[:PICTURES_PER_KIND], surest[:PICTURES_PER_KIND], review)
    index = np.unique(np.concatenate(kinds))
    pictures = np.empty((len(index), *parts[0].shape[1:]), np.uint8)
    start = 0
    for images in parts:
        position = order[index] - start
        here = (position >= 0) & (position < len(images))
        pictures[here] = images[torch.from_numpy(position[here])].cpu().numpy()
        start += len(images)
    return replace(results, picture_index=index, pictures=pictures)


def _scores(results: Results) -> dict[str, float]:
    sure = results.contradictions() & (results.prediction_probability >= SURE)
    scores = {"contradiction_share": float(sure.mean())}
    if results.held_out.any():
        scores["held_out_contradiction_share"] = float(sure[results.held_out].mean())
    if results.true_label is not None:
        scores["disambiguation_accuracy"] = float((results.label == results.true_label).mean())
    return scores


def summarise(outcome: Outcome, history: list[dict[str, Any]], class_names: tuple[str, ...]) -> dict[str, Any]:
    """The scores of a run and the signs of trouble."""
    last, recent = history[-1], history[-LAST_EPOCHS:]
    f1 = {}
    if "micro_f1" in last:
        f1 = {
            "micro_f1": last["micro_f1"],
            "macro_f1": last["macro_f1"],
            f"micro_f1_last{LAST_EPOCHS}": sum(line["micro_f1"] for line in recent) / len(recent),
            f"macro_f1_last{LAST_EPOCHS}": sum(line["macro_f1"] for line in recent) / len(recent),
            "micro_f1_best": max(line["micro_f1"] for line in history),
        }
    return {
        **f1,
        **outcome.scores,
        **{name: last[name] for name in (*CRITERIA, "label_agreement") if name in last},
        **selected_epochs(history),
        "warnings": [
            *_warnings(outcome, history, class_names),
            *_in_retrospect(alarms_of(history, class_names), last["epoch"]),
        ],
    }


def _in_retrospect(alarms: list[Alarm], last_epoch: int) -> list[str]:
    """Many classes recover in a longer run: their alarms need no line each."""
    over = [alarm for alarm in alarms if alarm.last_seen <= last_epoch - LAST_EPOCHS]
    sentences = [alarm.sentence for alarm in alarms if alarm not in over]
    if len(over) == 1:
        sentences.append(f"{over[0].sentence} (last seen in epoch {over[0].last_seen})")
    elif over:
        first, last = min(alarm.epoch for alarm in over), max(alarm.last_seen for alarm in over)
        when = f"between epochs {first} and {last} and not since"
        sentences.append(f"{len(over)} signs were seen {when}: see metrics.jsonl")
    return sentences


def _warnings(outcome: Outcome, history: list[dict[str, Any]], class_names: tuple[str, ...]) -> list[str]:
    """Signs of trouble that need no true labels, a sentence each."""
    warnings = []
    # Training suppresses labels outside the candidate sets, so held-out instances tell more where there are some.
    scores = outcome.scores
    results, held_out = outcome.results, "held_out_contradiction_share" in scores
    share = scores["held_out_contradiction_share" if held_out else "contradiction_share"]
    looked_at = results.held_out.sum() if held_out else len(results)
    if share >= MANY_CONTRADICTIONS and round(share * looked_at) >= FEW_INSTANCES:
        where = "held-out" if held_out else "training"
        warnings.append(
            f"for {share:.1%} of the {where} instances the network is sure of a label outside the candidate set: some "
            "sets may lack the true label; list them with python -m plsp_train.disambiguate RUN --review 50"
        )
    sizes = history[-1].get("labeled_per_class")
    if sizes is not None:
        lost = [name for name, size in zip(class_names, sizes, strict=True) if size == 0]
        if lost:
            warnings.append(f"no instance was selected as labelled for {_listed(lost)} in the last epoch")
    unused = np.setdiff1d(np.arange(len(class_names)), results.label)
    if len(unused):
        warnings.append(f"no training instance was given the label {_listed([class_names[i] for i in unused])}")
    return warnings


def _listed(names: list[str], most: int = 5) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
