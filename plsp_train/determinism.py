"""The same bits in every run: `--deterministic`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Let torch use deterministic algorithms only, and refuse operators that have none.

    CPU runs are deterministic without it. The Triton kernels of `plsp_kernels` are deterministic always.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise ValueError(f"--deterministic: {str(error).splitlines()[0]}") from None
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
