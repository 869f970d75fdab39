"""Host-to-device copies without synchronisation."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor; from the host to a GPU through pinned memory, so that the copy is asynchronous."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
