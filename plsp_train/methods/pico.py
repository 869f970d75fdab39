"""PiCO (Wang et al. 2022): class prototypes of contrastive embeddings disambiguate the candidates."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from plsp_train.methods.base import Iteration
from plsp_train.methods.contrastive import KeyQueue, own_key_contrast, same_label_contrast, update_prototypes
from plsp_train.methods.schedules import cosine
from plsp_train.methods.single_stage import Disambiguation
from plsp_train.methods.task import Task, View
from plsp_train.models import Network

EMBEDDING = 128
QUEUE = 8192
KEY_MOMENTUM = 0.999
FIRST_CONFIDENCE_MOMENTUM, LAST_CONFIDENCE_MOMENTUM = 0.95, 0.8
CONTRAST_WEIGHT = 0.5
WARM_UP_EPOCHS = 1  # without labels: the prototypes are not yet reliable
FINAL_RATE = 1e-3  # relative to the initial learning rate


class Encoder(nn.Module):
    """The network and the projection of its features to a unit vector."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        width = network.num_features
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, EMBEDDING))

    def forward(self, task: Task, view: View) -> tuple[Tensor, Tensor]:
        """Features and embeddings of all rows of a view."""
        features = task.features(view, network=self.network)
        return features, F.normalize(self.head(features).float(), dim=1)


class PiCO(Disambiguation):
    """Confidences move towards the candidate whose prototype is nearest."""

    name, label = "pico", "PiCO"
    help = "contrastive embeddings with class prototypes (Wang et al. 2022)"
    defaults = {"lr": 0.1}

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        device, batch = task.device, self.sampler.batch_size
        self.encoder = Encoder(task.model).to(device)
        # Its batch norms stay in training mode: keys use the statistics of their batch.
        self.key_encoder = AveragedModel(self.encoder, multi_avg_fn=get_ema_multi_avg_fn(KEY_MOMENTUM))
        self.prototypes = torch.zeros(task.num_classes, EMBEDDING, device=device)
        size = max(1, min(QUEUE, len(task.inputs)) // batch) * batch
        self.queue = KeyQueue(size, EMBEDDING, device, task.generator)

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.encoder.head.parameters()

    def learning_rate(self, stage: str, epoch: int) -> float:
        """Cosine decay from the initial rate towards a thousandth of it."""
        config = self.task.config
        return cosine(config.lr, epoch, config.epochs, last=config.lr * FINAL_RATE)

    def confidence_momentum(self, epoch: int) -> float:
        """φ, linear over the epochs from the first one that updates confidences."""
        passed = (epoch - 1 - WARM_UP_EPOCHS) / self.task.config.epochs
        return FIRST_CONFIDENCE_MOMENTUM + passed * (LAST_CONFIDENCE_MOMENTUM - FIRST_CONFIDENCE_MOMENTUM)

    def step(self, stage: str, epoch: int) -> Iteration:
        task = self.task
        batch, weak = self.draw()
        index, strong = batch.index, batch.strong()
        features, queries = self.encoder(task, weak)
        logits = task.model.classifier(features).float()
        with torch.no_grad():
            self.key_encoder.update_parameters(self.encoder)
            _, keys = self.key_encoder(task, strong)
        with torch.autocast(queries.device.type, enabled=False):  # similarities are divided by a small temperature
            contrastive = self._contrast(queries, keys, logits.detach(), index, epoch)
        classification = self.loss(logits, index)
        self.record_labels(logits, index)
        loss = classification + CONTRAST_WEIGHT * contrastive
        terms = {"loss": loss, "classification": classification, "contrastive": contrastive}
        return Iteration(loss, terms, 2 * len(index))

    def _contrast(self, queries: Tensor, keys: Tensor, logits: Tensor, index: Tensor, epoch: int) -> Tensor:
        """The contrastive loss; also updates confidences, prototypes and queue with the batch."""
        outside = ~self.task.candidates[index]
        labels = logits.masked_fill(outside, -math.inf).argmax(1)
        pool = torch.cat([queries, keys, self.queue.keys])
        if epoch > WARM_UP_EPOCHS:
            nearest = (queries.detach() @ self.prototypes.T).masked_fill(outside, -math.inf).argmax(1)
            target = F.one_hot(nearest, self.task.num_classes).float()
            moved = torch.lerp(target, self.confidences[index], self.confidence_momentum(epoch))
            self.confidences.index_copy_(0, index, moved)
            pool_labels = torch.cat([labels, labels, self.queue.labels])
            loss = same_label_contrast(pool, pool_labels, len(queries), self.task.num_classes)
        else:
            loss = own_key_contrast(pool, len(queries))
        self.prototypes = update_prototypes(self.prototypes, queries.detach(), labels)
        self.queue.push(keys, labels)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "head": self.encoder.head.state_dict(),
            "key_encoder": self.key_encoder.state_dict(),
            "prototypes": self.prototypes,
            "queue": self.queue.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.encoder.head.load_state_dict(state["head"])
        self.key_encoder.load_state_dict(state["key_encoder"])
        self.prototypes = state["prototypes"]
        self.queue.load_state_dict(state["queue"])
