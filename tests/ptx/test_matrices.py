"""Matrix instructions against the tables of the PTX manual, element by element.

The functions below give row and column of an element of a fragment as the manual states them, for the group
(lane // 4), the thread in the group (lane % 4) and the number of the element in the thread.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from emulator.machine import Mode
from emulator.matrices import multiply
from emulator.program import PtxError
from snippets import DEFAULT, assert_same_bits, run

Place = Callable[[int, int, int], tuple[int, int]]

# m16n8k8 of .tf32
TF32 = (
    lambda g, t, i: (g + 8 * (i % 2), t + 4 * (i // 2)),
    lambda g, t, i: (t + 4 * i, g),
)
# m16n8k16 of .f16 and .bf16: two elements in each register
HALF = (
    lambda g, t, i: (g + 8 * (i // 2 % 2), 2 * t + i % 2 + 8 * (i // 4)),
    lambda g, t, i: (2 * t + i % 2 + 8 * (i // 2), g),
)
# m16n8k16 of .f64
DOUBLE = TF32
# m8n8k4 of .f64
SMALL_DOUBLE = (lambda g, t, i: (g, t), lambda g, t, i: (t, g))


def accumulator(g: int, t: int, i: int) -> tuple[int, int]:
    return g + 8 * (i // 2 % 2), 2 * t + i % 2 + 8 * (i // 4)


def fragment(matrix: np.ndarray, place: Place) -> np.ndarray:
    """Elements of each lane: (32, elements)."""
    count = matrix.size // 32
    return np.array([[matrix[place(lane // 4, lane % 4, i)] for i in range(count)] for lane in range(32)])


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def multiply_by(opcode: str, matrices: list[np.ndarray], places: list[Place], mode: Mode = DEFAULT) -> np.ndarray:
    """a·b + c of one warp, with the elements in the types of the matrices."""
    width = 8 if matrices[2].dtype == np.float64 else 4
    arrays, loads, groups, first = {}, [], [], 1
    for name, matrix, place in zip("abc", matrices, places, strict=True):
        lanes = np.ascontiguousarray(fragment(matrix, place)).view(np.dtype(f"u{width}"))
        arrays[name] = lanes.reshape(-1).copy()
        count, bank = lanes.shape[1], "%d" if width == 8 else "%r"
        names = [f"{bank}{first + i}" for i in range(count)]
        loads.append(f"mad.wide.u32 %where, %thread, {width * count}, %{name};")
        loads += [f"ld.global.b{8 * width} {register}, [%where+{width * i}];" for i, register in enumerate(names)]
        groups.append("{" + ", ".join(names) + "}")
        first += count
    arrays["d"] = np.zeros_like(arrays["c"])
    results = groups[2].strip("{}").split(", ")
    stores = [f"mad.wide.u32 %where, %thread, {width * len(results)}, %d;"]
    stores += [f"st.global.b{8 * width} [%where+{width * i}], {register};" for i, register in enumerate(results)]
    run(
        "\n".join([*loads, f"{opcode} {groups[2]}, {groups[0]}, {groups[1]}, {groups[2]};", *stores]), arrays, mode=mode
    )
    values = arrays["d"].view(matrices[2].dtype).reshape(32, -1)
    result = np.zeros_like(matrices[2])
    for lane in range(32):
        for i in range(values.shape[1]):
            result[places[2](lane // 4, lane % 4, i)] = values[lane, i]
    return result


def tf32(matrix: np.ndarray) -> np.ndarray:
    """Cut to ten bits of fraction."""
    return (matrix.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def test_tf32_fragments_and_product() -> None:
    a, b, c = (random(*shape).astype(np.float32) for shape in ((16, 8), (8, 8), (16, 8)))
    opcode = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
    actual = multiply_by(opcode, [a, b, c], [*TF32, accumulator])
    exact = tf32(a).astype(np.float64) @ tf32(b).astype(np.float64) + c
    assert_same_bits(actual, exact.astype(np.float32))


@pytest.mark.parametrize("type_", ["f16", "bf16"])
def test_half_fragments_and_product(type_: str) -> None:
    dtype = torch.float16 if type_ == "f16" else torch.bfloat16
    halves = [torch.from_numpy(random(*shape)).to(dtype) for shape in ((16, 16), (16, 8))]
    raw = [half.view(torch.int16).numpy().view(np.uint16) for half in halves]
    c = random(16, 8).astype(np.float32)
    opcode = f"mma.sync.aligned.m16n8k16.row.col.f32.{type_}.{type_}.f32"
    exact = (halves[0].double() @ halves[1].double()).numpy() + c
    assert_same_bits(multiply_by(opcode, [*raw, c], [*HALF, accumulator]), exact.astype(np.float32))


@pytest.mark.parametrize(("shape", "places"), [((16, 8, 16), DOUBLE), ((16, 8, 4), DOUBLE), ((8, 8, 4), SMALL_DOUBLE)])
def test_double_fragments_and_product(shape: tuple[int, int, int], places: tuple[Place, Place]) -> None:
    m, n, k = shape
    a, b, c = random(m, k), random(k, n), random(m, n)
    opcode = f"mma.sync.aligned.m{m}n{n}k{k}.row.col.f64.f64.f64.f64"
    actual = multiply_by(opcode, [a, b, c], [*places, accumulator])
    np.testing.assert_allclose(actual, a @ b + c, rtol=1e-14, atol=1e-14)


def test_pessimistic_products_truncate() -> None:
    a, b, c = (random(*shape).astype(np.float32) for shape in ((16, 8), (8, 8), (16, 8)))
    opcode = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
    actual = multiply_by(opcode, [a, b, c], [*TF32, accumulator], Mode(pessimistic=True))
    left, right = tf32(a).astype(np.float64), tf32(b).astype(np.float64)
    terms = np.concatenate([left[:, None, :] * right.T[None], c[:, :, None].astype(np.float64)], axis=2)
    error = np.abs(actual - terms.sum(2))
    unit = 2.0 ** (np.floor(np.log2(np.abs(terms).max(2))) + 1 - 24)
    assert (error <= 9.5 * unit + np.spacing(np.abs(actual))).all()  # each of nine terms loses less than a unit
    assert error.max() > unit.min()  # more than a rounding


def test_truncated_sums_by_hand() -> None:
    """Next to 1, a term of 2^-24 is cut off entirely, and negative terms are cut towards zero."""
    one = np.ones((1, 1), np.float32)
    for small, expected in ((2.0**-24, 1.0), (-(2.0**-24), 1.0), (1.5 * 2.0**-23, 1 + 2.0**-23)):
        c = np.array([[small]], np.float32)
        assert multiply(one, one, c, pessimistic=True)[0, 0] == np.float32(expected)


# Warp groups


def swizzled(matrix: np.ndarray, pitch: int) -> np.ndarray:
    """Rows of a K-major matrix in shared memory: groups of eight, 16-byte units exchanged by the row in the group."""
    rows = np.zeros((len(matrix), pitch // 4), matrix.dtype)
    rows[:, : matrix.shape[1]] = matrix
    flat = np.zeros(rows.size, matrix.dtype)
    for address in range(0, 4 * rows.size, 4):
        unit = address >> 7 & (pitch // 16 - 1)
        flat[(address ^ unit << 4) // 4] = rows.reshape(-1)[address // 4]
    return flat


GROUP = """
    shl.b32 %r1, %thread, 2;
    mov.u32 %r2, memory;
    add.s32 %r3, %r2, %r1;
    mad.wide.u32 %d1, %thread, 4, %b;
    mov.b32 %r9, 0;
    fill:
    ld.global.b32 %r4, [%d1];
    st.shared.b32 [%r3], %r4;
    add.s64 %d1, %d1, 512;
    add.s32 %r3, %r3, 512;
    add.s32 %r9, %r9, 512;
    setp.lt.u32 %p1, %r9, {size};
    @%p1 bra fill;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    mad.wide.u32 %d1, %thread, 16, %a;
    ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d1];
    mad.wide.u32 %d2, %thread, 32, %c;
    ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%d2];
    ld.global.v4.b32 {{%r24, %r25, %r26, %r27}}, [%d2+16];
    setp.ne.b32 %p2, %r2, {accumulate};
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n16k8.f32.tf32.tf32
        {{%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27}}, {{%r10, %r11, %r12, %r13}}, {descriptor}, %p2, 1, 1;
    wgmma.commit_group.sync.aligned;
    {wait}
    st.global.v4.b32 [%d2], {{%r20, %r21, %r22, %r23}};
    st.global.v4.b32 [%d2+16], {{%r24, %r25, %r26, %r27}};
"""


def group_product(swizzle: int, accumulate: bool, wait: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A (64, 8), B (8, 16), C and what is in the place of C afterwards, for four warps."""
    pitch = 256 >> swizzle
    a, b, c = (random(*shape).astype(np.float32) for shape in ((64, 8), (8, 16), (64, 16)))
    rows_of_warps = np.concatenate([fragment(a[16 * w : 16 * w + 16], TF32[0]) for w in range(4)])
    added = np.concatenate([fragment(c[16 * w : 16 * w + 16], accumulator) for w in range(4)])
    arrays = {"a": rows_of_warps, "b": swizzled(b.T.copy(), pitch), "c": added}
    descriptor = (8 * pitch // 16) << 32 | swizzle << 62
    body = GROUP.format(
        size=16 * pitch, accumulate=0 if not accumulate else 1, descriptor=f"{descriptor:#x}", wait=wait
    )
    run(body, arrays, 16 * pitch, num_warps=4)
    result = np.zeros_like(c)
    for thread in range(128):
        for i in range(8):
            row, column = accumulator(thread % 32 // 4, thread % 4, i)
            result[16 * (thread // 32) + row, column] = arrays["c"][thread, i]
    return a, b, c, result


@pytest.mark.parametrize("swizzle", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [False, True])
def test_warp_groups_multiply_by_a_swizzled_matrix(swizzle: int, accumulate: bool) -> None:
    a, b, c, result = group_product(swizzle, accumulate, "wgmma.wait_group.sync.aligned 0;")
    exact = tf32(a).astype(np.float64) @ tf32(b).astype(np.float64) + (c if accumulate else 0)
    assert_same_bits(result, exact.astype(np.float32))


def test_products_of_warp_groups_are_missing_until_waited_for() -> None:
    _, _, c, result = group_product(1, True, "wgmma.wait_group.sync.aligned 1;")
    assert_same_bits(result, c)


def test_descriptors_without_swizzling_are_refused() -> None:
    with pytest.raises(PtxError, match="unsupported layout"):
        group_product(0, True, "wgmma.wait_group.sync.aligned 0;")


# ldmatrix and stmatrix

MATRICES = """
    shl.b32 %r1, %thread, 4;
    mov.u32 %r2, memory;
    add.s32 %r3, %r2, %r1;
    mad.wide.u32 %d1, %thread, 16, %source;
    mad.wide.u32 %d2, %thread, 16, %target;
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%d1];
"""


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_are_loaded_into_fragments(trans: str) -> None:
    source = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8)
    arrays = {"source": source.reshape(-1), "target": np.zeros(4 * 64, np.uint16)}
    body = (
        MATRICES
        + f"""
        st.shared.v4.b32 [%r3], {{%r10, %r11, %r12, %r13}};
        bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r3];
        st.global.v4.b32 [%d2], {{%r20, %r21, %r22, %r23}};
    """
    )
    run(body, arrays, 512)
    actual = arrays["target"].reshape(32, 4, 2)  # lane, matrix, element
    for lane in range(32):
        row, column = lane // 4, 2 * (lane % 4)
        for matrix in range(4):
            loaded = source[matrix].T if trans else source[matrix]
            assert actual[lane, matrix].tolist() == loaded[row, column : column + 2].tolist()


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_are_stored_as_they_were_loaded(trans: str) -> None:
    arrays = {"source": np.arange(4 * 64, dtype=np.uint16), "target": np.zeros(4 * 64, np.uint16)}
    body = (
        MATRICES
        + f"""
        stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r3], {{%r10, %r11, %r12, %r13}};
        bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r3];
        st.global.v4.b32 [%d2], {{%r20, %r21, %r22, %r23}};
    """
    )
    run(body, arrays, 512)
    assert arrays["target"].tolist() == arrays["source"].tolist()
