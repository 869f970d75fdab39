"""The trained network's logits of whole data sets, and F1 scores."""

from collections.abc import Iterator

import torch
from torch import Tensor

from plsp_train.data import Augmentation
from plsp_train.distributed import from_all_ranks, own_shard
from plsp_train.models import Network

EVAL_BATCH = 2048


@torch.no_grad()
def own_logits(model: Network, inputs: Tensor, augmentation: Augmentation) -> Iterator[tuple[slice, Tensor]]:
    """Logits of un-augmented inputs in evaluation mode, for this rank's share of them: rows and their logits, by batch.

    There is at least one batch; it is empty if there are fewer inputs than ranks.
    """
    model.eval()
    device, shard = model.classifier.weight.device, own_shard(len(inputs))
    for start in range(shard.start, max(shard.stop, shard.start + 1), EVAL_BATCH):
        rows = slice(start, min(start + EVAL_BATCH, shard.stop))
        yield rows, model(augmentation.plain(inputs[rows].to(device))).float()


def predictions(model: Network, inputs: Tensor, augmentation: Augmentation) -> Tensor:
    """The most probable class of every input, (n,)."""
    own = torch.cat([logits.argmax(1) for _, logits in own_logits(model, inputs, augmentation)])
    return from_all_ranks(own)[0]


def f1_scores(prediction: Tensor, labels: Tensor) -> dict[str, float]:
    from sklearn.metrics import f1_score

    found, truth = prediction.cpu().numpy(), labels.cpu().numpy()
    return {
        f"{average}_f1": float(f1_score(truth, found, average=average, zero_division=0))
        for average in ("micro", "macro")
    }
