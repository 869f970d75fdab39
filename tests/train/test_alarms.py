"""Alarms about classes that a run is losing, raised without true labels."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from plsp_train.alarms import ClassWatch, alarms_of
from plsp_train.data.candidate_sets import CandidateSets
from plsp_train.methods import PLSP
from plsp_train.outcome import _in_retrospect
from small_runs import run

NAMES = ("shirt", "coat", "bag")


def _candidates(truth: Tensor, flip: float = 0.7, num_classes: int = 10) -> CandidateSets:
    generator = torch.Generator().manual_seed(0)
    sets = torch.rand(len(truth), num_classes, generator=generator) < flip
    return CandidateSets.pack(sets.scatter(1, truth[:, None], True))


def _truth(num_instances: int = 20_000) -> Tensor:
    return torch.randint(10, (num_instances,), generator=torch.Generator().manual_seed(1))


def _relabelled(truth: Tensor, source: int, target: int, share: float) -> Tensor:
    """The first instances of a class, as many as the share of the target class, get the label of another one."""
    moved = (truth == source).nonzero()[: int(share * (truth == target).sum()), 0]
    return truth.index_fill(0, moved, target)


def test_watch_estimates_the_share_that_has_come_from_another_class() -> None:
    truth = _truth()
    watch, none = ClassWatch(_candidates(truth)), torch.full_like(truth, -1)
    assert watch.observe(none, truth, None) == {}
    for _ in range(2):
        watch.observe(truth, truth, None)
    labels = _relabelled(truth, source=3, target=6, share=0.5)
    seen = watch.observe(truth, labels, None)
    assert seen["rival_per_class"][6] == 3
    # Half as many as the class had before are a third of what it has now.
    assert seen["rival_share_per_class"][6] == pytest.approx(1 / 3, abs=0.06)
    kept = (labels[truth == 3] == 3).float().mean().item()
    assert seen["label_agreement_per_class"][3] == pytest.approx(kept, abs=1e-4)
    others = [share for index, share in enumerate(seen["rival_share_per_class"]) if index != 6]
    assert others == [0.0] * 9


def test_watch_estimates_the_share_of_a_labelled_set_that_has_come_from_another_class() -> None:
    truth = _truth()
    watch, labels = ClassWatch(_candidates(truth)), _relabelled(truth, source=3, target=6, share=0.1)
    right = torch.cat([((truth == index) & (labels == index)).nonzero()[:200, 0] for index in range(10)])
    for _ in range(3):
        seen = watch.observe(truth, labels, right)
        assert seen["labeled_rival_share_per_class"] == [0.0] * 10
    wrong = (labels == 6) & (truth == 3)
    labeled = torch.cat([right[labels[right] != 6], wrong.nonzero()[:150, 0], right[labels[right] == 6][:50]])
    seen = watch.observe(labels, labels, labeled)
    assert seen["labeled_rival_per_class"][6] == 3
    assert seen["labeled_rival_share_per_class"].pop(6) == pytest.approx(0.75, abs=0.15)
    assert seen["labeled_rival_share_per_class"] == [0.0] * 9
    assert seen["rival_share_per_class"] == [0.0] * 10  # a tenth of all instances of a class passes for chance


def test_watch_does_not_take_chance_for_a_rival() -> None:
    truth = _truth()
    watch, before = ClassWatch(_candidates(truth)), truth
    for seed in range(20):  # in every epoch, a tenth of the instances has a random candidate as its label
        generator = torch.Generator().manual_seed(seed)
        noisy = torch.rand(len(truth), generator=generator) < 0.1
        labels = torch.where(noisy, torch.randint(10, truth.shape, generator=generator), truth)
        seen = watch.observe(before, labels, None)
        assert max(seen["rival_share_per_class"]) < 0.1
        before = labels


def test_watch_does_not_take_the_return_of_a_class_for_a_rival() -> None:
    truth = _truth()
    candidates = _candidates(truth)
    has_rival = candidates[torch.arange(len(truth))][:, 3]
    watch, few = ClassWatch(candidates), torch.where((truth == 6) & has_rival, 3, truth)
    for _ in range(3):  # 6 is chosen only where 3 is no candidate
        watch.observe(few, few, None)
    seen = watch.observe(few, truth, None)
    assert max(seen["rival_share_per_class"]) < 0.05


def test_watch_reports_how_much_of_a_labelled_set_moved(monkeypatch) -> None:
    monkeypatch.setattr("plsp_train.alarms.FEW", 1)
    truth = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    watch = ClassWatch(CandidateSets.pack(torch.ones(7, 3, dtype=torch.bool)))
    watch.observe(torch.full_like(truth, -1), truth, torch.tensor([0, 1, 2, 3, 4]))
    seen = watch.observe(truth, torch.tensor([0, 0, 0, 1, 1, 0, 2]), torch.tensor([0, 1]))
    assert seen["labeled_moved_per_class"] == [0.25, 0.0, None]
    assert seen["label_agreement_per_class"] == [0.75, 0.5, 1.0]
    seen = watch.observe(torch.tensor([0, 0, 0, 1, 1, 0, 2]), truth, None)
    assert seen["labeled_moved_per_class"] == [0.0, None, None]


def test_watch_says_nothing_about_few_instances() -> None:
    truth = torch.tensor([0] * 9 + [1] * 10)
    sets = torch.nn.functional.one_hot(truth, 3).bool()
    sets[18, 0] = sets[18, 2] = True
    watch = ClassWatch(CandidateSets.pack(sets))
    for _ in range(2):
        watch.observe(truth, truth, torch.arange(19))
    labels = truth.index_fill(0, torch.tensor([18]), 0)  # class 0 gets its first instance that may belong to 2
    seen = watch.observe(truth, labels, torch.arange(19))
    assert seen["label_agreement_per_class"] == [None, 0.9, None]
    assert seen["labeled_moved_per_class"] == [None, 0.1, None]
    seen = watch.observe(labels, labels, None)
    assert seen["rival_share_per_class"] == [0.0, 0.0, 0.0]


def test_watch_compares_the_size_of_a_class_with_a_random_choice_among_candidates() -> None:
    truth = _truth()
    watch = ClassWatch(_candidates(truth))
    labels = torch.where(truth == 4, 7, truth)
    sizes = watch.observe(truth, labels, None)["relative_size_per_class"]
    assert sizes[4] == 0.0
    assert sizes[7] == pytest.approx(2.0, rel=0.1)
    assert [size for index, size in enumerate(sizes) if index not in (4, 7)] == pytest.approx([1.0] * 8, rel=0.1)


def test_watch_expects_nothing_of_a_class_that_is_rarely_a_candidate() -> None:
    sets = torch.ones(19, 2, dtype=torch.bool)  # each class is expected to have 9.5 instances
    labels = torch.zeros(19, dtype=torch.int64)
    assert ClassWatch(CandidateSets.pack(sets)).observe(labels, labels, None)["relative_size_per_class"] == [None, None]


def test_watch_continues_from_its_state() -> None:
    truth = _truth(2000)
    candidates, moved = _candidates(truth), _relabelled(truth, source=1, target=2, share=0.9)
    watch, resumed = ClassWatch(candidates), ClassWatch(candidates)
    labeled = torch.arange(50)
    for _ in range(2):
        watch.observe(truth, truth, labeled)
    resumed.load_state_dict(watch.state_dict())
    assert resumed.observe(truth, moved, labeled) == watch.observe(truth, moved, labeled)


def _history(**columns: list[Any]) -> list[dict[str, Any]]:
    length = len(next(iter(columns.values())))
    agreement = [[0.9, 0.9, 0.9]] * length
    columns = {"label_agreement_per_class": agreement} | columns
    return [{"epoch": epoch + 1} | {name: values[epoch] for name, values in columns.items()} for epoch in range(length)]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            {"label_agreement_per_class": [[0.9] * 3, [0.9] * 3, [0.9, 0.4, 0.9], [0.9, 0.3, 0.9], [0.9, 0.2, 0.9]]},
            (4, "epoch 4, class coat: only 30% of its instances kept their label", 5),
        ),
        (
            {"labeled_moved_per_class": [[0.0] * 3, [0.0] * 3, [0.1, 0.1, 0.6], [0.0, 0.0, 0.7]]},
            (3, "epoch 3, class bag: 60% of its labelled set were given another label", 4),
        ),
        (
            {"labeled_per_class": [[200] * 3, [200] * 3, [90, 120, 200], [80, 120, 200]]},
            (3, "epoch 3, class shirt: its labelled set has shrunk from 200 to 90 instances", 4),
        ),
        (
            {
                "rival_share_per_class": [[0, 0, 0], [0.15, 0, 0], [0.25, 0, 0], [0.3, 0, 0], [0.4, 0, 0]],
                "rival_per_class": [[1, 0, 0]] * 5,
            },
            (4, "epoch 4, class shirt: about 30% of its instances seem to belong to coat", 5),
        ),
        (
            {
                "labeled_rival_share_per_class": [[0, 0, 0], [0, 0.15, 0], [0, 0.7, 0], [0, 0.8, 0], [0, 0.9, 0]],
                "labeled_rival_per_class": [[0, 2, 0]] * 5,
            },
            (4, "epoch 4, class coat: about 80% of its labelled instances seem to belong to bag", 5),
        ),
    ],
)  # fmt: skip
def test_each_kind_of_alarm_is_raised_once_per_class(
    columns: dict[str, list[list[Any]]], expected: tuple[int, str, int]
) -> None:
    (alarm,) = alarms_of(_history(**columns), NAMES)
    assert alarm == expected


def test_classes_that_trade_instances_raise_no_alarm() -> None:
    calm, stirred = [0.9, 0.9, 0.9], [0.4, 0.9, 0.4]
    agreement = [calm, calm, stirred, calm, stirred, calm]
    rivals = {
        "rival_share_per_class": [[0, 0, 0.3 * (epoch % 2)] for epoch in range(6)],
        "rival_per_class": [[1, 0, 0]] * 6,
    }
    assert alarms_of(_history(label_agreement_per_class=agreement, **rivals), NAMES) == []
    # A sign that lasts raises one for each class.
    lasting = _history(label_agreement_per_class=[*agreement[:4], stirred, stirred], **rivals)
    assert [alarm.sentence.split(":")[0] for alarm in alarms_of(lasting, NAMES)] == [
        "epoch 6, class shirt",
        "epoch 6, class bag",
    ]


def test_signs_that_were_not_seen_again_share_a_line() -> None:
    moved = [[0.0] * 3] * 2 + [[0.6, 0.6, 0.0], [0.0, 0.7, 0.0]] + [[0.0, 0.0, 0.0]] * 9
    alarms = alarms_of(_history(labeled_moved_per_class=moved), NAMES)
    assert [(alarm.epoch, alarm.last_seen) for alarm in alarms] == [(3, 3), (3, 4)]
    # Neither is as old as ten epochs at the end of 12; after 13, the first is.
    assert _in_retrospect(alarms, 12) == [alarm.sentence for alarm in alarms]
    assert _in_retrospect(alarms, 13) == [
        "epoch 3, class coat: 60% of its labelled set were given another label",
        "epoch 3, class shirt: 60% of its labelled set were given another label (last seen in epoch 3)",
    ]
    assert _in_retrospect(alarms, 14) == ["2 signs were seen between epochs 3 and 4 and not since: see metrics.jsonl"]


def test_classes_are_not_watched_before_their_labels_have_settled() -> None:
    unsettled = [[0.8, 0.9, None], [0.4, 0.9, 0.2], [0.8, 0.9, 0.9], [0.8, 0.9, 0.9]]
    history = _history(label_agreement_per_class=unsettled, labeled_moved_per_class=[[0.6, 0.0, None]] * 4)
    assert alarms_of(history, NAMES) == []
    assert [alarm.epoch for alarm in alarms_of([*history, history[0] | {"epoch": 5}], NAMES)] == [5]


def test_a_class_without_instances_is_missed_as_soon_as_most_labels_have_settled() -> None:
    agreement = [[None, 0.9, 0.9]] * 4  # nothing is known about the labels of the first class
    sizes = [[0.05, 1.0, None]] * 4
    history = _history(
        label_agreement_per_class=agreement, relative_size_per_class=sizes, label_agreement=[0.5, 0.8, 0.9, 0.9]
    )
    (alarm,) = alarms_of(history, NAMES)
    assert alarm.epoch == 3
    assert alarm.sentence.startswith("epoch 3, class shirt: it has 5.0% of the instances")


def test_a_run_reports_alarms_by_name_once(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("plsp_train.alarms.SETTLED", 0.0)
    monkeypatch.setattr("plsp_train.alarms.MOVED", -1.0)  # every labelled set is reported
    assert run(tmp_path / "run", "--epochs", "5") == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    alarms = [alarm for line in lines for alarm in line.get("alarms", [])]
    # Labels exist from epoch 2 on and have settled after epoch 4. A class of few instances may not be judged.
    reported = [alarm[: len("epoch 5, class 0:")] for alarm in alarms if "labelled set were given" in alarm]
    assert set(reported) <= {f"epoch 5, class {digit}:" for digit in range(10)}
    assert 8 <= len(reported) == len(set(reported))
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: epoch")]
    assert printed[: len(alarms)] == [f"warning: {alarm}" for alarm in alarms]
    assert set(alarms) <= set(json.loads((tmp_path / "run" / "summary.json").read_text())["warnings"])


@pytest.mark.parametrize("held_out", [[], ["--validation-fraction", "0.1"]], ids=["test set", "held-out sets"])
def test_a_network_that_ignores_its_input_is_reported(tmp_path, capsys, monkeypatch, held_out: list[str]) -> None:
    def die(method: PLSP, stage: str) -> None:
        if stage == "train":
            classifier = method.task.model.classifier
            classifier.weight.data.zero_()
            classifier.bias.data.copy_(torch.arange(10.0))

    assert run(tmp_path / "healthy", "--epochs", "5", *held_out) == 0
    monkeypatch.setattr(PLSP, "after_step", die)
    capsys.readouterr()
    assert run(tmp_path / "dead", "--epochs", "5", *held_out) == 0
    (printed,) = {line for line in capsys.readouterr().out.splitlines() if "predicts it for every instance" in line}
    # The network is dead at the end of epoch 2. Labels change once more in epoch 3 and are kept in 4 and 5.
    assert printed == "warning: epoch 5, class 9: the network predicts it for every instance; try a smaller --lr"
    healthy, dead = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("healthy", "dead"))
    assert printed.removeprefix("warning: ") in dead["warnings"]
    assert not any("predicts it for every instance" in warning for warning in healthy["warnings"])


def test_a_constant_prediction_is_no_sign_before_labels_have_settled() -> None:
    columns = {"only_prediction": [1] * 4, "label_agreement_per_class": [[0.6] * 3] * 4}
    assert alarms_of(_history(**columns, label_agreement=[0.6] * 4), NAMES) == []
    (alarm,) = alarms_of(_history(**columns, label_agreement=[0.6, 0.8, 0.9, 0.9]), NAMES)
    assert alarm[:1] + alarm[2:] == (3, 4)
    assert alarm.sentence == "epoch 3, class coat: the network predicts it for every instance; try a smaller --lr"
