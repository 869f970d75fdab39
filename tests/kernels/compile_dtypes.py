"""Compile the matrix products of every pair of dtypes for one GPU target, named on the command line.

Kernels without a matrix product widen each element on load, so mixed dtypes add nothing to them. Prints the number of
binaries.
"""

import itertools
import sys

import torch
import triton
from torch import Tensor

import plsp_kernels
from benchmarks.gpu_static.ahead_of_time import TARGETS, recording, specialise
from benchmarks.gpu_static.calls import DTYPES
from plsp_kernels import triton_impl
from plsp_kernels.triton_impl import tiles

PRODUCTS = {
    "class_gram",
    "product",
    "product_gram diagonal",
    "class_gram_backward diagonal",
    "full_columns",
    "label_weight_gradient",
    "covariance_update",
}
"""Kernels with a matrix product that reads an argument of the caller. The others read what these compute."""


def floats(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def numbers(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int64, device="meta")


def call_products(weight_dtype: torch.dtype, covariance_dtype: torch.dtype) -> None:
    """Everything that multiplies a weight and a covariance, or the features and statistics of a covariance update."""
    compute_dtype = torch.promote_types(weight_dtype, torch.float32)  # the loss centres the weight
    for num_classes, *size in ((7, 16, 16), (7, 16), (130, 16, 16)):
        covariance, weight = floats(covariance_dtype, num_classes, *size), floats(compute_dtype, num_classes, 16)
        gram, product = triton_impl.class_gram(weight, covariance, numbers(5), True)
        triton_impl.class_gram_backward(gram, weight, covariance, numbers(5), product)
    covariance = floats(covariance_dtype, 7, 16, 16)
    for logits_dtype in (weight_dtype, torch.float64):
        weight = floats(weight_dtype, 7, 16).requires_grad_()
        plsp_kernels.semantic_cross_entropy(
            floats(logits_dtype, 5, 7), weight, covariance, numbers(5), strength=0.1, impl="triton"
        ).backward()
    if covariance_dtype in (torch.float32, torch.float64):  # those of statistics
        state = covariance, floats(covariance_dtype, 7, 16), numbers(7), numbers(7)
        triton_impl.covariance_update(*state, floats(weight_dtype, 5, 16), numbers(5))


if __name__ == "__main__":
    target = sys.argv[1]
    tiles.CHUNK_BYTES = 0  # label_weight_gradient reads no saved products but multiplies again
    with recording(target) as launches:
        for dtypes in itertools.product(DTYPES.values(), repeat=2):
            call_products(*dtypes)
    binaries = {}
    for launch in launches:
        if launch.name in PRODUCTS:
            kernel = specialise(launch, target)
            binaries[kernel.key] = kernel
    for kernel in binaries.values():
        triton.compile(kernel.source, target=TARGETS[target], options=kernel.options)
    print(len(binaries))
