"""The scikit-learn estimator: contract, forms of candidate sets, files, and agreement with the command line."""

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks
from torch import nn

from plsp_train import PartialLabelClassifier
from plsp_train.models import as_network

QUICK: dict[str, Any] = {"epochs": 3, "pretrain_epochs": 3, "random_state": 0}
NAMES = np.array(["ant", "bee", "cat"])


def blobs(count: int = 240) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three well separated classes, their true labels and candidate sets that contain them."""
    random = np.random.default_rng(0)
    truth = random.integers(0, 3, count)
    features = np.eye(3)[truth] * 3 + random.normal(0, 0.4, (count, 3))
    return features, truth, (random.random((count, 3)) < 0.4) | np.eye(3, dtype=bool)[truth]


@pytest.fixture(scope="module")
def fitted() -> PartialLabelClassifier:
    features, _, candidates = blobs()
    return PartialLabelClassifier(**QUICK).fit(features, candidates)


def test_it_learns_and_disambiguates(fitted: PartialLabelClassifier) -> None:
    features, truth, candidates = blobs()
    assert fitted.score(features, truth) > 0.95
    assert (fitted.labels_ == truth).mean() > 0.95
    assert candidates[np.arange(len(truth)), fitted.labels_].all(), "a label is one of the candidates"
    assert ((fitted.label_confidence_ > 0) & (fitted.label_confidence_ <= 1)).all()
    np.testing.assert_allclose(fitted.predict_proba(features).sum(1), 1)
    assert fitted.transform(features).shape == (len(features), 64)
    assert [line["stage"] for line in fitted.history_] == ["pretrain"] * 3 + ["train"] * 3
    assert fitted.score(features, candidates) >= fitted.score(features, truth), "covering rate of candidate sets"


@pytest.mark.parametrize("method", ["cc", "proden"])
def test_baselines_are_a_parameter_away(method: str) -> None:
    features, truth, candidates = blobs()
    classifier = PartialLabelClassifier(method, epochs=15, random_state=0).fit(features, candidates)
    assert classifier.score(features, truth) > 0.9


@pytest.mark.parametrize(
    "form",
    [
        lambda sets: sets,
        lambda sets: sets.astype(int),
        lambda sets: torch.from_numpy(sets),
        lambda sets: [np.flatnonzero(row).tolist() for row in sets],
        lambda sets: np.where(sets, np.arange(3), -1),
    ],
    ids=["bool", "0/1", "tensor", "lists of numbers", "annotators"],
)
def test_all_forms_of_candidate_sets_give_the_same_model(fitted: PartialLabelClassifier, form: Any) -> None:
    features, _, candidates = blobs()
    other = PartialLabelClassifier(**QUICK).fit(features, form(candidates))
    np.testing.assert_array_equal(other.predict_proba(features), fitted.predict_proba(features))


def test_names_are_predicted_as_names() -> None:
    features, truth, candidates = blobs()
    classifier = PartialLabelClassifier(**QUICK).fit(features, ["|".join(NAMES[row]) for row in candidates])
    assert classifier.classes_.tolist() == NAMES.tolist()
    assert classifier.score(features, NAMES[truth]) > 0.95
    numbered = PartialLabelClassifier(**QUICK, class_names=NAMES).fit(features, candidates)
    np.testing.assert_array_equal(numbered.predict(features), classifier.predict(features))


def test_the_same_seed_gives_the_same_model_and_leaves_the_global_generator_alone(
    fitted: PartialLabelClassifier,
) -> None:
    features, _, candidates = blobs()
    before = torch.get_rng_state()
    again = clone(fitted).fit(features, candidates)
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(again.predict_proba(features), fitted.predict_proba(features))
    other = clone(fitted).set_params(random_state=1).fit(features, candidates)
    assert not np.array_equal(other.predict_proba(features), fitted.predict_proba(features))


def test_images_are_classified_by_the_network_of_their_size() -> None:
    random = np.random.default_rng(0)
    truth = random.integers(0, 2, 60)
    images = np.full((60, 12, 12, 3), 30, dtype=np.uint8)
    images[truth == 1, :, :6] = 220
    sets = np.eye(2, dtype=bool)[truth] | (random.random((60, 2)) < 0.3)
    classifier = PartialLabelClassifier(**QUICK, settings={"horizontal_flip": False}).fit(images, sets)
    assert classifier.score(images, truth) == 1.0
    assert classifier.predict(images[:1]).shape == (1,)


def test_a_module_or_function_is_a_backbone(tmp_path) -> None:
    features, truth, candidates = blobs()

    def build(shape: tuple[int, ...], num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(shape[0], 16), nn.ReLU(), nn.Linear(16, num_classes))

    module = build((3,), 3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for backbone in (module, build):
        classifier = PartialLabelClassifier(backbone=backbone, **QUICK).fit(features, candidates)
        assert classifier.score(features, truth) > 0.9
        assert classifier.transform(features).shape[1] == 16
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items()), "it is copied"
    classifier.save(tmp_path / "model.pt")
    with pytest.raises(ValueError, match="network given in Python"):
        PartialLabelClassifier.load(tmp_path / "model.pt")
    loaded = PartialLabelClassifier.load(tmp_path / "model.pt", network=as_network(build((3,), 3), (3,), 3))
    np.testing.assert_array_equal(loaded.predict_proba(features), classifier.predict_proba(features))


def test_warm_start_continues_from_the_fitted_weights(fitted: PartialLabelClassifier) -> None:
    features, _, candidates = blobs()
    settings = {"epochs": 0, "pretrain_epochs": 1, "random_state": 0, "lr": 1e-12}
    classifier = PartialLabelClassifier(**QUICK, warm_start=True).fit(features, candidates)
    trained = classifier.transform(features)
    warm = classifier.set_params(**settings).fit(features, candidates).transform(features)
    cold = PartialLabelClassifier(**settings).fit(features, candidates).transform(features)
    assert np.abs(warm - trained).mean() < np.abs(cold - trained).mean() / 4


def test_models_are_saved_without_pickle(tmp_path, fitted: PartialLabelClassifier) -> None:
    features, *_ = blobs()
    fitted.save(tmp_path / "model.pt")
    torch.load(tmp_path / "model.pt", weights_only=True)
    loaded = PartialLabelClassifier.load(tmp_path / "model.pt")
    np.testing.assert_array_equal(loaded.predict_proba(features), fitted.predict_proba(features))
    np.testing.assert_array_equal(loaded.predict(features), fitted.predict(features))
    copied = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(copied.predict_proba(features), fitted.predict_proba(features))


def test_it_works_inside_scikit_learn() -> None:
    features, truth, candidates = blobs()
    pipeline = make_pipeline(StandardScaler(), PartialLabelClassifier(**QUICK))
    assert cross_val_score(pipeline, features, candidates, cv=3).min() > 0.9
    search = GridSearchCV(PartialLabelClassifier(**QUICK), {"backbone": ["mlp", "linear"]}, cv=2)
    assert search.fit(features, candidates).score(features, truth) > 0.9


def test_it_prints_nothing_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    features, _, candidates = blobs()
    PartialLabelClassifier(**QUICK).fit(features, candidates)
    assert capsys.readouterr() == ("", "")
    PartialLabelClassifier(**QUICK, verbose=1).fit(features, candidates)
    assert capsys.readouterr().out.count("epoch ") == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "mine"}, "unknown method 'mine'"),
        ({"settings": {"colour": 1}}, "unknown setting 'colour'"),
        ({"settings": {"lr": 0.1}, "lr": 0.2}, "settings gives lr, which are parameters of their own"),
        ({"epochs": -1}, "epochs must be at least 0"),
        ({"backbone": "lenet"}, "lenet"),
        ({"class_names": ["a", "b"]}, "with 2 columns"),
    ],
)
def test_wrong_parameters_are_named(change: dict[str, Any], message: str) -> None:
    features, _, candidates = blobs()
    with pytest.raises(ValueError, match=message):
        PartialLabelClassifier(**(QUICK | change)).fit(features, candidates)


def test_wrong_data_are_refused() -> None:
    features, _, candidates = blobs()
    with pytest.raises(ValueError, match="X has 240 instances but candidates has 239"):
        PartialLabelClassifier(**QUICK).fit(features, candidates[1:])
    candidates[7] = False
    with pytest.raises(ValueError, match="row 7"):
        PartialLabelClassifier(**QUICK).fit(features, candidates)
    features[3, 1] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        PartialLabelClassifier(**QUICK).fit(features, candidates)
    with pytest.raises(NotFittedError):
        PartialLabelClassifier().predict(features)


# Why the others do not apply.
EXPECTED = {
    "check_fit_score_takes_y": "the second argument of fit is named candidates: it is no vector of labels",
    "check_supervised_y_2d": "an (n, 1) integer matrix are the answers of one annotator, not a vector by mistake",
}


def test_scikit_learns_own_checks_pass() -> None:
    if not hasattr(estimator_checks, "estimator_checks_generator"):
        pytest.skip("this scikit-learn cannot report its checks one by one")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = estimator_checks.check_estimator(
            PartialLabelClassifier(epochs=2, pretrain_epochs=2, settings={"iterations": 10}), on_fail=None, on_skip=None
        )
    failed = {result["check_name"]: result["exception"] for result in results if result["status"] == "failed"}
    assert len(results) > 40
    assert failed.keys() == EXPECTED.keys(), {name: failed[name] for name in failed.keys() - EXPECTED.keys()}
