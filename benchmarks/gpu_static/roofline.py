"""Roofline model: lower bounds on kernel times from vendor specifications, never measured."""

from typing import NamedTuple

from benchmarks.gpu_static.work import Work, count
from benchmarks.shapes import Shape
from plsp_kernels.triton_impl.tiles import float32_products


class GPU(NamedTuple):
    target: str
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes per second."""
    float32: float
    """Operations per second outside matrix units. The following are operations per second too."""
    float32_matrix: float
    """With IEEE float32 products, as torch multiplies float32 by default."""
    tf32_matrix: float
    """Dense TF32; not given for AMD, where the kernels multiply in IEEE float32."""
    float64: float
    float64_matrix: float
    source: str


GPUS = {
    "RTX 3090": GPU(
        *("sm_86", 24e9, 936e9, 35.6e12, 35.6e12, 35.6e12, 0.556e12, 0.556e12),
        source="NVIDIA Ampere GA102 GPU Architecture whitepaper",
    ),
    "A100": GPU(
        *("sm_80", 80e9, 2039e9, 19.5e12, 19.5e12, 156e12, 9.7e12, 19.5e12),
        source="NVIDIA A100 Tensor Core GPU data sheet, 80 GB SXM",
    ),
    "H100": GPU(
        *("sm_90", 80e9, 3350e9, 67e12, 67e12, 494.5e12, 34e12, 67e12),
        source="NVIDIA H100 Tensor Core GPU data sheet, SXM; TF32 without sparsity",
    ),
    "MI300X": GPU(
        *("gfx942", 192e9, 5300e9, 163.4e12, 163.4e12, 0.0, 81.7e12, 163.4e12),
        source="AMD Instinct MI300X data sheet",
    ),
}


IEEE_KERNELS = ("covariance_update",)
"""Kernels that multiply in IEEE float32 on every GPU."""


def seconds(work: Work, gpu: GPU, dtype: str, impl: str) -> float:
    """Maximum of memory time and arithmetic time; matrix and vector units run concurrently."""
    vector, matrix = (gpu.float64, gpu.float64_matrix) if dtype == "float64" else (gpu.float32, gpu.float32_matrix)
    three_products = float32_products(gpu.target).precision == "tf32x3"
    if impl == "triton" and dtype != "float64" and three_products and work.kernel not in IEEE_KERNELS:
        matrix = gpu.tf32_matrix / 3  # three TF32 products give float32 accuracy
    return max(work.bytes / gpu.bandwidth, work.matrix_operations / matrix, work.operations / vector)


Row = dict[str, str]
"""All launches of one kernel in one call; the columns are those of the CSV."""
COLUMNS = (
    *("function", "shape", "dtype", "implementation", "kernel", "launches", "bytes", "matrix operations"),
    *("other operations", "largest tensor bytes", *(f"{gpu} µs (computed)" for gpu in GPUS)),
)


def roofline(function: str, shape: Shape, dtype: str, impl: str) -> list[Row]:
    """Kernels of one call, forward and backward, in order of first launch."""
    launches: dict[str, list[Work]] = {}
    for work in count(function, shape, dtype, impl):
        launches.setdefault(work.kernel, []).append(work)
    return [
        {
            "function": function,
            "shape": shape.name,
            "dtype": dtype,
            "implementation": impl,
            "kernel": kernel,
            "launches": str(len(every)),
            "bytes": str(sum(work.bytes for work in every)),
            "matrix operations": str(sum(work.matrix_operations for work in every)),
            "other operations": str(sum(work.operations for work in every)),
            "largest tensor bytes": str(max(work.largest_bytes for work in every)),
        }
        | {
            f"{name} µs (computed)": f"{1e6 * sum(seconds(work, gpu, dtype, impl) for work in every):.4g}"
            for name, gpu in GPUS.items()
        }
        for kernel, every in launches.items()
    ]
