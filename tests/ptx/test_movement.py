"""Loads, stores, copies and atomics; faults of global memory, races in shared memory."""

import numpy as np
import pytest

from emulator.program import PtxError
from snippets import apply, assert_same_bits, load, run, store

UNITS = np.arange(32, dtype=np.uint32)


def test_moves_pack_and_unpack_lowest_bits_first() -> None:
    arrays = {"source": np.arange(32, dtype=np.uint64) * 0x100000003, "target": np.zeros(32, np.uint64)}
    body = load("%d1", "source", 8) + "mov.b64 {%r1, %r2}, %d1; mov.b64 %d2, {%r2, %r1};" + store("%d2", "target", 8)
    run(body, arrays)
    low, high = arrays["source"] & np.uint64(0xFFFFFFFF), arrays["source"] >> np.uint64(32)
    assert arrays["target"].tolist() == (low << np.uint64(32) | high).tolist()


def test_selection_follows_the_predicate() -> None:
    a, b, which = np.float32([1, 2]), np.float32([3, 4]), np.array([True, False])
    assert_same_bits(apply("selp.f32", [a, b, which], np.float32), np.float32([1, 4]))


def test_vectors_are_loaded_and_stored_whole() -> None:
    arrays = {"source": np.arange(128, dtype=np.float32), "target": np.zeros(128, np.float32)}
    body = """
        mad.wide.u32 %d1, %thread, 16, %source;
        mad.wide.u32 %d2, %thread, 16, %target;
        ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d1];
        st.global.v2.b32 [%d2], {%r4, %r3};
        st.global.v2.b32 [%d2+8], {%r2, %r1};
    """
    run(body, arrays)
    assert_same_bits(arrays["target"].reshape(-1, 4), arrays["source"].reshape(-1, 4)[:, ::-1].copy())


def test_narrow_loads_are_extended_by_their_type() -> None:
    arrays = {"source": np.arange(240, 272).astype(np.uint8), "target": np.zeros(32, np.int32)}
    body = "mad.wide.u32 %where, %thread, 1, %source; ld.global.s8 %r1, [%where];" + store("%r1", "target", 4)
    run(body, arrays)
    assert arrays["target"].tolist() == arrays["source"].view(np.int8).tolist()


def test_guards_exclude_threads() -> None:
    arrays = {"target": np.zeros(32, np.uint32)}
    run("setp.lt.u32 %p1, %thread, 5; mov.b32 %r1, 7; @%p1 bra end;" + store("%r1", "target", 4) + "end:", arrays)
    assert arrays["target"].tolist() == [0] * 5 + [7] * 27
    run("setp.lt.u32 %p1, %thread, 5; mov.b32 %r1, 9; @%p1 st.global.b32 [%target], %r1;", arrays)
    assert arrays["target"].tolist() == [9] + [0] * 4 + [7] * 27


@pytest.mark.parametrize(
    ("access", "message"),
    [
        ("ld.global.b32 %r1, [%where+4];", "4 bytes reaches 4 bytes past the end of inside"),
        ("st.global.b32 [%where+-4], %r1;", "4 bytes reaches 4 bytes before the storage of inside"),
        ("ld.global.b32 %r1, [%where+2];", "no multiple of 4"),
        ("mov.b64 %where, 0; ld.global.b32 %r1, [%where];", "before the storage of inside"),
    ],
)
def test_accesses_outside_a_tensor_name_it_and_the_instruction(access: str, message: str) -> None:
    buffer = np.zeros(96, np.uint32)
    with pytest.raises(PtxError, match=message) as error:
        run(f"mad.wide.u32 %where, %thread, 4, %inside; {access}", {"inside": buffer[32:64]})
    assert access.split(";")[-2].strip() in str(error.value)


def test_neighbouring_tensors_are_told_apart() -> None:
    """The emulator sees storages, not the pages they lie in: a tensor next to another is outside of it."""
    buffer = np.zeros(64, np.uint32)
    arrays = {"first": buffer[:31], "second": buffer[33:]}
    with pytest.raises(PtxError, match="past the end of first"):
        run(load("%r1", "first", 4), arrays)


def test_registers_and_shared_memory_start_poisoned() -> None:
    arrays = {"a": np.zeros(32, np.float32), "b": np.zeros(32, np.float32)}
    run(store("%r5", "a", 4) + "ld.shared.b32 %r1, [memory];" + store("%r1", "b", 4), arrays, shared=4)
    assert np.isnan(arrays["a"]).all()
    assert np.isnan(arrays["b"]).all()


EXCHANGE = """
    shl.b32 %r1, %thread, 2;
    mov.u32 %r2, memory;
    add.s32 %r3, %r2, %r1;
    st.shared.b32 [%r3], %thread;
    {barrier}
    xor.b32 %r4, %r1, {distance};
    add.s32 %r4, %r4, %r2;
    ld.shared.b32 %r5, [%r4];
"""


def test_warps_exchange_data_across_a_barrier() -> None:
    arrays = {"target": np.zeros(64, np.uint32)}
    run(EXCHANGE.format(barrier="bar.sync 0;", distance=128) + store("%r5", "target", 4), arrays, 256, num_warps=2)
    assert arrays["target"].tolist() == (np.arange(64) ^ 32).tolist()


def test_reading_what_another_warp_wrote_without_a_barrier_is_a_race() -> None:
    with pytest.raises(PtxError, match="a warp reads what another wrote"):
        run(EXCHANGE.format(barrier="", distance=128), {}, 256, num_warps=2)
    run(EXCHANGE.format(barrier="", distance=4), {}, 256, num_warps=2)  # inside a warp there is none


def test_overwriting_what_another_warp_reads_is_a_race() -> None:
    body = EXCHANGE.format(barrier="bar.sync 0;", distance=128)
    with pytest.raises(PtxError, match="a warp overwrites what another reads"):
        run(body + "st.shared.b32 [%r3], %r5;", {}, 256, num_warps=2)
    run(body + "bar.sync 0; st.shared.b32 [%r3], %r5;", {}, 256, num_warps=2)


def test_shared_memory_has_an_end() -> None:
    with pytest.raises(PtxError, match="4 bytes at 256 of 256 bytes"):
        run("ld.shared.b32 %r1, [memory+256];", {}, 256)


COPY = """
    mad.wide.u32 %d1, %thread, 4, %source;
    shl.b32 %r1, %thread, 2;
    mov.u32 %r2, memory;
    add.s32 %r3, %r2, %r1;
    setp.lt.u32 %p1, %thread, 16;
    selp.b32 %r4, 4, 0, %p1;
    cp.async.ca.shared.global [%r3], [%d1], 4, %r4;
    cp.async.commit_group;
    {wait}
    ld.shared.b32 %r5, [%r3];
"""


@pytest.mark.parametrize(
    ("wait", "arrives"),
    [("cp.async.wait_group 0;", True), ("cp.async.wait_all;", True), ("cp.async.wait_group 1;", False), ("", False)],
)
def test_asynchronous_copies_arrive_when_waited_for(wait: str, arrives: bool) -> None:
    arrays = {"source": UNITS[:16].copy(), "target": np.zeros(32, np.uint32)}
    run(COPY.format(wait=wait) + store("%r5", "target", 4), arrays, 128)
    copied = [*range(16), *[0] * 16]  # a copy of no bytes reads nothing and writes zeros
    assert arrays["target"].tolist() == (copied if arrives else [2**32 - 1] * 32)


def test_atomics_return_a_different_old_value_to_each_thread() -> None:
    arrays = {"counter": np.array([5], np.uint32), "target": np.zeros(96, np.uint32)}
    body = """
        atom.global.gpu.relaxed.add.u32 %r1, [%counter], 2;
        mov.u32 %r2, %ctaid.x;
        mad.lo.s32 %thread, %r2, 32, %thread;
    """
    run(body + store("%r1", "target", 4), arrays, num_programs=3)
    assert sorted(arrays["target"].tolist()) == list(range(5, 5 + 2 * 96, 2))
    assert arrays["counter"].tolist() == [5 + 2 * 96]
