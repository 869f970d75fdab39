"""Exchanges inside a warp against their definition, lane by lane."""

import numpy as np
import pytest

from emulator.program import PtxError
from snippets import load, run, store

LANES = np.arange(64)


def shuffled(mode: str, operands: str) -> tuple[list[int], list[int]]:
    """Values received by each thread of two warps, and whether their source was valid."""
    arrays = {"target": np.zeros(64, np.uint32), "valid": np.zeros(64, np.uint32)}
    body = f"shfl.sync.{mode}.b32 %r1|%p1, %thread, {operands}, -1; selp.b32 %r2, 1, 0, %p1;"
    run(body + store("%r1", "target", 4) + store("%r2", "valid", 4), arrays, num_warps=2)
    return arrays["target"].tolist(), arrays["valid"].tolist()


def test_butterfly_exchanges_lanes() -> None:
    values, valid = shuffled("bfly", "5, 31")
    assert values == (LANES ^ 5).tolist()
    assert all(valid)


def test_index_reads_one_lane() -> None:
    assert shuffled("idx", "3, 31")[0] == [3] * 32 + [35] * 32


def test_up_and_down_stop_at_the_ends_of_the_warp() -> None:
    values, valid = shuffled("up", "2, 0")
    assert values == [lane if lane % 32 < 2 else lane - 2 for lane in range(64)]
    assert valid == [int(lane % 32 >= 2) for lane in range(64)]
    values, valid = shuffled("down", "2, 31")
    assert values == [lane if lane % 32 >= 30 else lane + 2 for lane in range(64)]
    assert valid == [int(lane % 32 < 30) for lane in range(64)]


def test_segments_of_a_warp_are_closed() -> None:
    # Segments of 8 lanes: mask 0x18 in bits 8 to 12, clamp 7 within a segment.
    values, _ = shuffled("down", "1, 0x1807")
    assert values == [lane if lane % 8 == 7 else lane + 1 for lane in range(64)]


@pytest.mark.parametrize(
    ("name", "expected"), [("add", [496, 1520]), ("max", [31, 63]), ("min", [0, 32]), ("or", [31, 63]), ("xor", [0, 0])]
)
def test_reductions_are_of_a_warp(name: str, expected: list[int]) -> None:
    arrays = {"target": np.zeros(64, np.uint32)}
    type_ = "b32" if name in ("or", "xor") else "u32"
    run(
        f"mov.b32 %r2, -1; redux.sync.{name}.{type_} %r1, %thread, %r2;" + store("%r1", "target", 4),
        arrays,
        num_warps=2,
    )
    assert arrays["target"].tolist() == [expected[0]] * 32 + [expected[1]] * 32


def test_votes_are_of_a_warp() -> None:
    arrays = {name: np.zeros(64, np.uint32) for name in ("ballot", "any", "all")}
    body = "setp.gt.u32 %p1, %thread, 30; vote.sync.ballot.b32 %r1, %p1, -1;" + store("%r1", "ballot", 4)
    for name in ("any", "all"):
        body += f"vote.sync.{name}.pred %p2, %p1, -1; selp.b32 %r2, 1, 0, %p2;" + store("%r2", name, 4)
    run(body, arrays, num_warps=2)
    assert arrays["ballot"].tolist() == [1 << 31] * 32 + [2**32 - 1] * 32
    assert arrays["any"].tolist() == [1] * 64
    assert arrays["all"].tolist() == [0] * 32 + [1] * 32


def test_partial_masks_are_refused() -> None:
    with pytest.raises(PtxError, match="masks of all threads"):
        run("shfl.sync.bfly.b32 %r1, %thread, 1, 31, 255;", {})


def test_loads_differ_between_lanes() -> None:
    """The helper itself: the element of the thread."""
    arrays = {"source": np.arange(64, dtype=np.uint32)[::-1].copy(), "target": np.zeros(64, np.uint32)}
    run(load("%r1", "source", 4) + store("%r1", "target", 4), arrays, num_warps=2)
    assert arrays["target"].tolist() == arrays["source"].tolist()
