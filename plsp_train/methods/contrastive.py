"""The pieces of PiCO: contrastive losses, moving class prototypes, a queue of keys. All embeddings are unit vectors."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

TEMPERATURE = 0.07
PROTOTYPE_MOMENTUM = 0.99


def own_key_contrast(pool: Tensor, num_queries: int) -> Tensor:
    """-log of the share of an instance's own key among that key and the queue, averaged over instances (InfoNCE).

    The pool is the queries, then their keys in the same order, then the queue.
    """
    queries, keys, queue = pool.split([num_queries, num_queries, len(pool) - 2 * num_queries])
    own = (queries * keys).sum(1, keepdim=True)
    similarity = torch.cat([own, queries @ queue.T], dim=1) / TEMPERATURE
    return (similarity.logsumexp(1) - similarity[:, 0]).mean()


def same_label_contrast(pool: Tensor, labels: Tensor, num_queries: int, num_classes: int) -> Tensor:
    """-log of the share of a positive among the pool, averaged over a query's positives, then over queries.

    Positives are the others of the pool that have the query's label: at least its own key. Label -1 is nobody's. Only
    queries get gradients.
    """
    queries, rest = pool[:num_queries], pool[num_queries:].detach()
    scaled = queries / TEMPERATURE
    among = scaled @ queries.T
    # Not -inf, which has no gradient where it is the only entry, in a batch of one.
    among.diagonal().fill_(torch.finfo(among.dtype).min)
    total = torch.logaddexp(among.logsumexp(1), _LogSumExp.apply(scaled, rest))
    # The mean similarity with the positives is that with their mean: no mask over all pairs is needed.
    member = F.one_hot(labels + 1, num_classes + 1)[:, 1:].to(pool.dtype)
    own = labels[:num_queries]
    positives = (member.T @ torch.cat([queries, rest]))[own] - queries
    return (total - (scaled * positives).sum(1) / (member.sum(0)[own] - 1)).mean()


class _LogSumExp(torch.autograd.Function):
    """log Σ_k exp(v·k) over constant keys k, for every vector v.

    Its gradient is the mean of the keys, weighted by their shares of the sum. Taken in the forward pass, it needs no
    second exponential and leaves nothing of the size of all pairs behind.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, keys: Tensor) -> Tensor:
        shares = vectors @ keys.T
        largest = shares.amax(1, keepdim=True)
        shares.sub_(largest).exp_()
        total = shares.sum(1, keepdim=True)
        ctx.save_for_backward(shares @ keys / total)
        return (largest + total.log()).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mean_key,) = ctx.saved_tensors
        return grad[:, None] * mean_key, None


def update_prototypes(prototypes: Tensor, embeddings: Tensor, labels: Tensor) -> Tensor:
    """M_y ← 0.99 M_y + 0.01 q for the samples of the batch one after the other, then normalised.

    After m samples of a class, sample r (from 0) has gone through m - 1 - r further averages.
    """
    member = F.one_hot(labels, len(prototypes)).to(embeddings.dtype)
    later = member.flip(0).cumsum(0).flip(0) - member
    weights = (1 - PROTOTYPE_MOMENTUM) * PROTOTYPE_MOMENTUM**later * member
    kept = PROTOTYPE_MOMENTUM ** member.sum(0)
    return F.normalize(kept[:, None] * prototypes + weights.T @ embeddings, dim=1)


class KeyQueue:
    """The keys and labels of the latest batches; at first, random keys with a label that no instance has."""

    def __init__(self, size: int, num_features: int, device: torch.device, generator: torch.Generator) -> None:
        self.keys = F.normalize(torch.randn(size, num_features, generator=generator), dim=1).to(device)
        self.labels = torch.full((size,), -1, dtype=torch.int64, device=device)
        self._position = 0

    def push(self, keys: Tensor, labels: Tensor) -> None:
        """Replace the oldest keys. The size is a multiple of the batch size, so a batch never wraps around."""
        part = slice(self._position, self._position + len(keys))
        self.keys[part], self.labels[part] = keys, labels
        self._position = part.stop % len(self.keys)

    def state_dict(self) -> dict[str, Any]:
        return {"keys": self.keys, "labels": self.labels, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.keys, self.labels, self._position = state["keys"], state["labels"], state["position"]
