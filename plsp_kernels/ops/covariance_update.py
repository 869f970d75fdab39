"""plsp::covariance_update, which writes into the running statistics."""

import torch
from torch import Tensor

from plsp_kernels.ops.registration import LIBRARY, without_autocast
from plsp_kernels.torch_impl import covariance_update as _closed_form

LIBRARY.define(
    "covariance_update(Tensor(a!) covariance, Tensor(b!) mean, Tensor(c!) count, Tensor features, Tensor labels) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _kernel(covariance: Tensor, mean: Tensor, count: Tensor, features: Tensor, labels: Tensor) -> None:
    without_autocast(_closed_form, covariance, mean, count, features, labels)


def _fake(covariance: Tensor, mean: Tensor, count: Tensor, features: Tensor, labels: Tensor) -> None:
    return None


LIBRARY.impl("covariance_update", _kernel, "CompositeExplicitAutograd")
torch.library.register_fake("plsp::covariance_update", _fake, lib=LIBRARY)
covariance_update = torch.ops.plsp.covariance_update.default
