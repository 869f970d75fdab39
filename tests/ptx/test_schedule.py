"""Divergence, barriers and the order of warps."""

import numpy as np
import pytest

from emulator import schedule
from emulator.machine import Mode
from emulator.program import PtxError
from snippets import run, store


def test_threads_take_different_ways_and_meet_again() -> None:
    """Each thread adds up the numbers below its own, in a loop of its own length; then the warp shuffles."""
    arrays = {"target": np.zeros(64, np.uint32)}
    body = """
        mov.b32 %r1, 0;
        mov.b32 %r2, 0;
        loop:
        setp.ge.u32 %p1, %r2, %thread;
        @%p1 bra done;
        add.s32 %r1, %r1, %r2;
        add.s32 %r2, %r2, 1;
        bra.uni loop;
        done:
        shfl.sync.bfly.b32 %r3, %r1, 1, 31, -1;
    """
    run(body + store("%r3", "target", 4), arrays, num_warps=2)
    assert arrays["target"].tolist() == [sum(range(thread ^ 1)) for thread in range(64)]


def test_threads_that_have_ended_stay_out() -> None:
    arrays = {"target": np.zeros(32, np.uint32)}
    run("setp.lt.u32 %p1, %thread, 8; @%p1 ret; mov.b32 %r1, 1;" + store("%r1", "target", 4), arrays)
    assert arrays["target"].tolist() == [0] * 8 + [1] * 24


def test_warps_that_cannot_gather_are_reported() -> None:
    with pytest.raises(PtxError, match=r"shfl\.sync\.bfly.*do not all come here"):
        run("setp.lt.u32 %p1, %thread, 8; @%p1 ret; shfl.sync.bfly.b32 %r1, %thread, 1, 31, -1;", {})
    with pytest.raises(PtxError, match="the guard excludes threads of a warp"):
        run("setp.lt.u32 %p1, %thread, 8; @%p1 shfl.sync.bfly.b32 %r1, %thread, 1, 31, -1;", {})


def test_barriers_that_some_threads_miss_are_reported() -> None:
    with pytest.raises(PtxError, match="a barrier is reached by 56 of 64 threads"):
        run("setp.lt.u32 %p1, %thread, 8; @%p1 bra end; bar.sync 0; end:", {}, num_warps=2)


@pytest.mark.parametrize("portion", [32, 1 << 16])
def test_programs_know_their_place_in_the_grid(portion: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "MOST_THREADS", portion)
    arrays = {"target": np.zeros(5 * 32, np.uint32)}
    body = (
        "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x; mul.lo.s32 %r2, %r2, %r1; mad.lo.s32 %thread, %r1, 32, %thread;"
    )
    run(body + store("%r2", "target", 4), arrays, num_programs=5)
    assert arrays["target"].reshape(5, 32)[:, 0].tolist() == [0, 5, 10, 15, 20]
    assert (arrays["target"].reshape(5, 32) == arrays["target"].reshape(5, 32)[:, :1]).all()


# Every warp takes a ticket before and after a barrier.
TICKETS = """
    and.b32 %r9, %thread, 31;
    setp.eq.b32 %p1, %r9, 0;
    shr.u32 %thread, %thread, 5;
    @%p1 atom.global.add.u32 %r1, [%counter], 1;
    bar.sync 0;
    @%p1 atom.global.add.u32 %r2, [%counter], 1;
    @!%p1 ret;
"""


@pytest.mark.parametrize(("warps", "expected"), [("ascending", [0, 1, 2, 3]), ("descending", [3, 2, 1, 0])])
def test_warps_run_one_after_another_up_to_each_barrier(warps: str, expected: list[int]) -> None:
    arrays = {"counter": np.zeros(1, np.uint32), "before": np.zeros(4, np.uint32), "after": np.zeros(4, np.uint32)}
    body = TICKETS + store("%r1", "before", 4) + store("%r2", "after", 4)
    run(body, arrays, num_warps=4, mode=Mode(warps=warps))
    assert arrays["before"].tolist() == expected
    assert arrays["after"].tolist() == [4 + ticket for ticket in expected]
