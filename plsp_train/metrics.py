"""Predictions and their F1 scores."""

import torch
from torch import Tensor

from plsp_train.data import Augmentation
from plsp_train.models import Network

EVAL_BATCH = 2048


@torch.no_grad()
def predict(model: Network, inputs: Tensor, augmentation: Augmentation) -> Tensor:
    """Logits of un-augmented inputs in evaluation mode, (n, l)."""
    model.eval()
    device = model.classifier.weight.device
    parts = [model(augmentation.plain(part.to(device))) for part in inputs.split(EVAL_BATCH)]
    return torch.cat(parts).float()


def f1_scores(logits: Tensor, labels: Tensor) -> dict[str, float]:
    from sklearn.metrics import f1_score

    prediction, truth = logits.argmax(1).cpu().numpy(), labels.cpu().numpy()
    return {
        f"{average}_f1": float(f1_score(truth, prediction, average=average, zero_division=0))
        for average in ("micro", "macro")
    }
