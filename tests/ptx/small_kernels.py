"""Small Triton kernels as compiled PTX, against PyTorch. Only `make ptx` and test_compiled.py collect this file.

They cover what the kernels of this project build on: reductions and scans across warps, matrix products of every dtype,
loops whose length differs between programs, and tickets by which the last program is found.
"""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _rows_kernel(x_ptr, sum_ptr, argmax_ptr, running_ptr, num_columns, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < num_columns
    x = tl.load(x_ptr + row * num_columns + column, mask=inside, other=0.0)
    tl.store(sum_ptr + row, tl.sum(x, 0))
    tl.store(argmax_ptr + row, tl.argmax(tl.where(inside, x, float("-inf")), 0))
    tl.store(running_ptr + row * num_columns + column, tl.cumsum(x, 0), mask=inside)


@pytest.mark.parametrize("num_columns", [5, 200, 1000])
def test_reductions_and_scans_of_rows(num_columns: int) -> None:
    x = torch.randint(-50, 50, (3, num_columns), generator=torch.Generator().manual_seed(0)).float()
    total, largest, running = x.new_empty(3), torch.empty(3, dtype=torch.int32), torch.empty_like(x)
    block = triton.next_power_of_2(num_columns)
    _rows_kernel[(3,)](x, total, largest, running, num_columns, BLOCK=block, num_warps=4)
    assert torch.equal(total, x.sum(1))
    assert torch.equal(largest.long(), x.argmax(1))
    assert torch.equal(running, x.cumsum(1))


@triton.jit
def _small_product_kernel(
    a_ptr, b_ptr, c_ptr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, 16)
    total = tl.zeros((M, N), c_ptr.dtype.element_ty)
    for start in range(0, K, 16):
        a = tl.load(a_ptr + m[:, None] * K + start + k[None, :])
        b = tl.load(b_ptr + (start + k[:, None]) * N + n[None, :])
        total = tl.dot(a, b, total, input_precision=PRECISION, out_dtype=c_ptr.dtype.element_ty)
    tl.store(c_ptr + m[:, None] * N + n[None, :], total)


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.float64, "ieee"),
        (torch.float32, "ieee"),
        (torch.float32, "tf32x3"),
        (torch.bfloat16, "tf32"),
        (torch.float16, "tf32"),
    ],
)
def test_matrix_products(dtype: torch.dtype, precision: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((32, 64), (64, 32)))
    result = torch.empty(32, 32, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    _small_product_kernel[(1,)](a, b, result, PRECISION=precision, M=32, N=32, K=64, num_warps=4, num_stages=3)
    tolerance = 1e-13 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(result.double(), a.double() @ b.double(), rtol=0, atol=tolerance)


@triton.jit
def _halving_kernel(x_ptr, steps_ptr):
    program = tl.program_id(0)
    x = tl.load(x_ptr + program)
    steps = 0
    while x > 1:
        x = tl.where(x % 2 == 0, x // 2, 3 * x + 1)
        steps += 1
    tl.store(steps_ptr + program, steps)


def test_programs_loop_as_often_as_they_need() -> None:
    x, steps = torch.tensor([1, 7, 8, 27], dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    _halving_kernel[(4,)](x, steps)
    assert steps.tolist() == [0, 16, 3, 111]


@triton.jit
def _last_program_kernel(x_ptr, tickets_ptr, last_ptr):
    program = tl.program_id(0)
    tl.store(x_ptr + program, program)
    if tl.atomic_add(tickets_ptr, 1) == tl.num_programs(0) - 1:
        tl.store(last_ptr, program)


def test_one_program_is_the_last() -> None:
    x, tickets, last = (torch.full((count,), -1, dtype=torch.int32) for count in (5, 1, 1))
    tickets.zero_()
    _last_program_kernel[(5,)](x, tickets, last)
    assert x.tolist() == list(range(5))
    assert tickets.item() == 5
    assert last.item() in range(5)
