"""`PartialLabelClassifier`: the trainer as a scikit-learn estimator."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted
from torch import Tensor, nn

from plsp_train.config import Config, build_config
from plsp_train.console import Reporter, SilentReporter
from plsp_train.data import Source, check_source
from plsp_train.data.annotations import candidate_matrix
from plsp_train.data.files.checks import image_tensor
from plsp_train.divergence import NonFiniteLoss
from plsp_train.engine import Engine
from plsp_train.model_file import TrainedModel, load_model, read_model_file, save_model
from plsp_train.models import Network, as_network
from plsp_train.preparation import prepare
from plsp_train.validation import criteria

_MAX_SEED = 2**31 - 1


class PartialLabelClassifier(ClassifierMixin, TransformerMixin, BaseEstimator):
    """A classifier that learns from sets of candidate labels, one of which is the true one.

    Settings left at None follow from the size and kind of the data.

    Parameters
    ----------
    method : str
        Learning method: "plsp" or one of the baselines, as `python -m plsp_train --method`.
    backbone : str, nn.Module or callable, optional
        Network: a name as `--model` takes it, a module (copied, and given a linear classifier if it has none), or a
        function of the input shape and the number of classes that returns one.
    epochs, pretrain_epochs, batch_size, lr, weight_decay, k : optional
        As the options of the same name. `batch_size` is that of every stage.
    normalise : {"feature", "global", "none"}, optional
        How feature vectors are scaled.
    validation_fraction : float
        Fraction of the instances held out, to be scored by their candidate sets in `history_`.
    settings : dict, optional
        Further settings by the names of `python -m plsp_train --print-config`.
    class_names : sequence of str, optional
        Names of the classes, if `candidates` are given by numbers.
    device : str
        "auto", "cpu", "cuda" or "cuda:i".
    random_state : int, RandomState or None
        Seed of initial weights, batches and augmentation. The same seed gives the same model on a CPU.
    verbose : int
        0 prints nothing, 1 a line per epoch.
    warm_start : bool
        Whether `fit` starts from the weights of the previous fit.

    Attributes
    ----------
    classes_ : ndarray of shape (l,)
        Classes, as `predict` returns them.
    labels_ : ndarray of shape (n,)
        Disambiguated labels of the training instances.
    label_confidence_ : ndarray of shape (n,)
        Probability of each label among the candidates of its instance.
    history_ : list of dict
        Metrics of every epoch.
    results_ : Results
        All that the run learned about its training instances.
    n_features_in_ : int
        Number of features, for vectors.

    Examples
    --------
    >>> import numpy as np
    >>> from plsp_train import PartialLabelClassifier
    >>> random = np.random.default_rng(0)
    >>> truth = random.integers(0, 3, 300)
    >>> X = np.eye(3)[truth] + random.normal(0, 0.3, (300, 3))
    >>> candidates = (random.random((300, 3)) < 0.4) | np.eye(3, dtype=bool)[truth]
    >>> classifier = PartialLabelClassifier(epochs=5, random_state=0).fit(X, candidates)
    >>> bool((classifier.predict(X) == truth).mean() > 0.9)
    True
    """

    def __init__(
        self,
        method: str = "plsp",
        backbone: "str | nn.Module | Callable[[tuple[int, ...], int], nn.Module] | None" = None,
        *,
        epochs: int | None = None,
        pretrain_epochs: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        weight_decay: float | None = None,
        k: int | None = None,
        normalise: str | None = None,
        validation_fraction: float = 0.0,
        settings: dict[str, Any] | None = None,
        class_names: Any = None,
        device: str = "auto",
        random_state: Any = None,
        verbose: int = 0,
        warm_start: bool = False,
    ) -> None:
        self.method = method
        self.backbone = backbone
        self.epochs = epochs
        self.pretrain_epochs = pretrain_epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.k = k
        self.normalise = normalise
        self.validation_fraction = validation_fraction
        self.settings = settings
        self.class_names = class_names
        self.device = device
        self.random_state = random_state
        self.verbose = verbose
        self.warm_start = warm_start

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = []  # features are float32
        return tags

    # ------------------------------------------------------------------------------------------------ training

    def fit(self, X: Any, candidates: Any) -> "PartialLabelClassifier":
        """Train on instances and their candidate sets.

        Parameters
        ----------
        X : array of shape (n, d), or uint8 of shape (n, h, w) or (n, h, w, c)
            Feature vectors or images.
        candidates : array or sequence of length n
            A boolean matrix (n, l); an integer matrix of annotators' answers with -1 for missing ones; a list of
            collections of class names or numbers; or an ordinary vector of labels, sets of one candidate each.
        """
        inputs = self._inputs(X, reset=True)
        matrix, classes = _candidate_sets(candidates, self.class_names)
        if len(matrix) != len(inputs):
            raise ValueError(f"X has {len(inputs)} instances but candidates has {len(matrix)}")
        source = Source("data", inputs, tuple(map(str, classes.tolist())), candidates=matrix)
        check_source(source)
        config = self._config(source)
        with torch.random.fork_rng(devices=[]):  # the caller's generator is left alone
            engine = Engine(
                config,
                *prepare(config, source),
                None,
                Reporter(None) if self.verbose else SilentReporter(),
                self._network(config, source),
            )
            try:
                engine.run()
            except NonFiniteLoss as error:
                raise ValueError(str(error)) from None
        self.classes_ = classes
        is_named = self.backbone is None or isinstance(self.backbone, str)
        self._content = replace(engine.model_file(), model=config.model if is_named else "")
        self.model_ = TrainedModel(engine.method.network, self._content, engine.device)
        self.results_ = engine.describe().results
        self.labels_, self.label_confidence_ = classes[self.results_.label], self.results_.confidence
        self.history_ = engine.history
        return self

    def _config(self, source: Source) -> Config:
        seed = int(check_random_state(self.random_state).randint(_MAX_SEED))
        batch = self.batch_size
        given = {
            "dataset": "data",
            "method": self.method,
            "model": self.backbone if isinstance(self.backbone, str) else None,
            "epochs": self.epochs,
            "pretrain_epochs": self.pretrain_epochs,
            "batch_size": batch,
            "pretrain_batch": batch,
            "unlabeled_batch": batch,
            "labeled_batch": None if batch is None else max(1, batch // 4),
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "k": self.k,
            "normalise": self.normalise,
            "validation_fraction": self.validation_fraction,
            "device": self.device,
            "seed": seed,
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        twice = sorted(chosen.keys() & (self.settings or {}).keys())
        if twice:
            raise ValueError(f"settings gives {', '.join(twice)}, which are parameters of their own")
        return build_config({**chosen, **(self.settings or {})}, source)

    def _network(self, config: Config, source: Source) -> Network | None:
        """None to build the one that the settings name."""
        if self.warm_start and hasattr(self, "model_"):
            fitted = self.model_
            if fitted.input_shape != source.input_shape or len(fitted.class_names) != source.num_classes:
                raise ValueError("warm_start needs inputs of the same shape and as many classes as before")
            return copy.deepcopy(fitted.network)
        if self.backbone is None or isinstance(self.backbone, str):
            return None
        torch.manual_seed(config.seed)
        shape, num_classes = source.input_shape, source.num_classes
        module = copy.deepcopy(self.backbone) if isinstance(self.backbone, nn.Module) else None
        return as_network(module or self.backbone(shape, num_classes), shape, num_classes)

    # --------------------------------------------------------------------------------------------- predictions

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each instance."""
        logits = self._logits(X)  # checks that the classifier is fitted
        return self.classes_[logits.argmax(1).numpy()]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities (n, l) of the classes in `classes_`."""
        return self._logits(X).double().softmax(1).numpy()

    def transform(self, X: Any) -> np.ndarray:
        """Deep features (n, d) of the trained network."""
        check_is_fitted(self, "model_")
        return self.model_.features(self._inputs(X)).numpy()

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy against true labels (n,) or, against candidate sets, the share of predictions inside the set."""
        check_is_fitted(self, "model_")
        if _is_vector_of_labels(y):
            return super().score(X, y, sample_weight)
        matrix, _ = candidate_matrix(y, [str(name) for name in self.classes_.tolist()])
        return criteria(self._logits(X), matrix)["covering_rate"]

    def _logits(self, X: Any) -> Tensor:
        check_is_fitted(self, "model_")
        return self.model_.logits(self._inputs(X))

    def _inputs(self, X: Any, reset: bool = False) -> Tensor:
        """uint8 images (n, C, H, W) or float32 vectors (n, d)."""
        images = X.numpy(force=True) if isinstance(X, Tensor) else X
        if isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.ndim in (3, 4):
            return image_tensor(images)
        vectors = check_array(X, dtype=np.float32, ensure_min_samples=2 if reset else 1, estimator=self)
        if reset:
            self.n_features_in_ = vectors.shape[1]
        elif vectors.shape[1] != self.n_features_in_:
            name, wanted = type(self).__name__, self.n_features_in_
            raise ValueError(f"X has {vectors.shape[1]} features, but {name} is expecting {wanted} features as input")
        return torch.from_numpy(np.ascontiguousarray(vectors))

    # -------------------------------------------------------------------------------------------------- files

    def save(self, path: str | Path) -> None:
        """Write the model without pickle: the file that a run calls model.pt."""
        check_is_fitted(self, "model_")
        save_model(Path(path), self._content)

    @classmethod
    def load(cls, path: str | Path, *, network: Network | None = None, device: str = "cpu") -> "PartialLabelClassifier":
        """A classifier that predicts, from `save` or from the model.pt of a run.

        A network that was given as a module cannot be rebuilt from the file: pass one of the same kind.
        """
        content = read_model_file(Path(path))
        self = cls(backbone=content.model or network, device=device)
        self._content = content
        self.model_ = load_model(Path(path), network=network, device=device)
        self.classes_ = _as_numbers(np.array(content.class_names))
        if not content.is_image:
            self.n_features_in_ = content.input_shape[0]
        return self


def _candidate_sets(candidates: Any, class_names: Any) -> tuple[Tensor, np.ndarray]:
    """The boolean matrix, and the classes as the user knows them."""
    if candidates is None:
        raise ValueError("PartialLabelClassifier requires y to be passed, but the target y is None")
    if _is_vector_of_labels(candidates) and class_names is None:
        check_classification_targets(candidates)
        classes, label = np.unique(np.asarray(candidates), return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"candidates must have at least two classes, got one class: {classes.tolist()}")
        return torch.nn.functional.one_hot(torch.from_numpy(label.reshape(-1)), len(classes)).bool(), classes
    matrix, names = candidate_matrix(candidates, class_names)
    return matrix, _as_numbers(np.array(names))


def _is_vector_of_labels(y: Any) -> bool:
    """Whether y is one label per instance: a vector of numbers or of names without a separator."""
    values = np.asarray(y) if not isinstance(y, list) or not y or np.isscalar(y[0]) else None
    if values is None or values.ndim != 1:
        return False
    return values.dtype.kind in "biuf" or (
        values.dtype.kind in "UO" and all(isinstance(value, str) and "|" not in value for value in values)
    )


def _as_numbers(names: np.ndarray) -> np.ndarray:
    """Class names that are the numbers 0..l-1 become those numbers."""
    numbers = np.arange(len(names))
    return numbers if names.tolist() == [str(number) for number in numbers] else names
