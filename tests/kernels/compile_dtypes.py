"""Compile the products of a weight and a covariance of different dtypes for one GPU target, named on the command line.

The stored results of `benchmarks.gpu_static` cover a weight and a covariance of the same dtype, and with them float32
products of half-precision covariances. What remains are the pairs with float64.
"""

import sys

import torch

from benchmarks.gpu_static.ahead_of_time import compile_kernel, recording, specialise
from plsp_kernels import triton_impl

PAIRS = ((torch.float64, torch.bfloat16), (torch.float64, torch.float16), (torch.float32, torch.float64))

if __name__ == "__main__":
    compiled = set()
    for weight_dtype, covariance_dtype in PAIRS:
        weight = torch.empty(7, 16, dtype=weight_dtype, device="meta")
        classes = torch.empty(5, dtype=torch.int32, device="meta")
        with recording(sys.argv[1]) as launches:
            for size in ((7, 16, 16), (7, 16)):
                covariance = torch.empty(size, dtype=covariance_dtype, device="meta")
                gram, product = triton_impl.class_gram(weight, covariance, classes, True)
                if len(size) == 2:
                    triton_impl.class_gram_backward(gram, weight, covariance, classes, product)
        for launch in launches:
            kernel = specialise(launch, sys.argv[1])
            if kernel.key not in compiled:
                compile_kernel(kernel)
                compiled.add(kernel.key)
    print(len(compiled))
