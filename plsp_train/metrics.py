"""The trained network's logits of whole data sets, and F1 scores."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from plsp_train.data import Augmentation
from plsp_train.data.mapped import Inputs, batches_of
from plsp_train.data.transfer import to_device
from plsp_train.distributed import from_all_ranks, own_shard
from plsp_train.models import Network

EVAL_BATCH = 2048
_EVAL_NUMBERS = 2**23  # of the inputs of a batch: large images come in smaller batches


@torch.no_grad()
def own_logits(model: Network, inputs: Inputs, augmentation: Augmentation) -> Iterator[tuple[slice, Tensor]]:
    """Logits of un-augmented inputs in evaluation mode, for this rank's share of them: rows and their logits, by batch.

    There is at least one batch; it is empty if there are fewer inputs than ranks.
    """
    model.eval()
    device, shard = model.classifier.weight.device, own_shard(len(inputs))
    size = max(1, min(EVAL_BATCH, _EVAL_NUMBERS // math.prod(inputs.shape[1:])))
    starts = range(shard.start, max(shard.stop, shard.start + 1), size)
    parts = [slice(start, min(start + size, shard.stop)) for start in starts]
    for rows, batch in zip(parts, batches_of(inputs, parts), strict=True):
        yield rows, model(augmentation.plain(to_device(batch, device))).float()


def predictions(model: Network, inputs: Inputs, augmentation: Augmentation) -> Tensor:
    """The most probable class of every input, (n,)."""
    own = torch.cat([logits.argmax(1) for _, logits in own_logits(model, inputs, augmentation)])
    return from_all_ranks(own)[0]


def only_prediction(prediction: Tensor) -> dict[str, int]:
    """The class that is predicted for every instance, if it is a single one: such a network ignores its input."""
    lowest, highest = prediction.aminmax()
    return {"only_prediction": int(lowest)} if len(prediction) > 1 and lowest == highest else {}


def f1_scores(prediction: Tensor, labels: Tensor) -> dict[str, float]:
    from sklearn.metrics import f1_score

    found, truth = prediction.cpu().numpy(), labels.cpu().numpy()
    return {
        f"{average}_f1": float(f1_score(truth, found, average=average, zero_division=0))
        for average in ("micro", "macro")
    }
