"""Count the kernel launches of one training step, from tensors without memory: nothing runs on a GPU.

    python -m benchmarks.launches                                   # the cifar100 shape in float32
    python -m benchmarks.launches --shape fmnist --dtype bfloat16 --json

"loss" is the loss with the backward of its total. "step" adds the state of `SemanticUpperBoundLoss` in training mode:
class thresholds, covariance update and curriculum update. An ATen call counts as one launch, views and allocations as
none.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.gpu_static.ahead_of_time import recording
from benchmarks.gpu_static.calls import DTYPES, LOSS, call, training_step
from benchmarks.gpu_static.work import AtenCounter
from benchmarks.shapes import SHAPES, Shape


class Launches(NamedTuple):
    """Names of the kernels that a call launches, in order."""

    triton: list[str]
    aten: list[str]

    def counts(self) -> dict[str, int]:
        return {"triton": len(self.triton), "aten": len(self.aten), "total": len(self.triton) + len(self.aten)}


def record(run: Callable[[], None]) -> Launches:
    """Launches of a call on meta tensors. A read of a value, which would be a host sync, raises."""
    with AtenCounter() as counter, recording() as launches:
        run()
    return Launches([launch.name for launch in launches], [work.kernel for work in counter.work])


def launches_of(shape: Shape, dtype: str) -> dict[str, Launches]:
    """Launches of the loss alone and of the whole step, forward and backward."""
    return {
        "loss": record(partial(call, LOSS, shape, dtype, "triton")),
        "step": record(training_step(shape, dtype)),
    }


def table(found: dict[str, Launches]) -> str:
    """One row per kernel, one column per call."""
    counters = [Counter([*launches.triton, *launches.aten]) for launches in found.values()]
    counts = [launches.counts() for launches in found.values()]
    rows = [["kernel", *found]]
    for kernel in dict.fromkeys(kernel for counter in counters for kernel in counter):
        rows.append([kernel, *(str(counter[kernel]) for counter in counters)])
    for kind in ("triton", "aten", "total"):
        rows.append([f"all {kind}" if kind != "total" else kind, *(str(count[kind]) for count in counts)])
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{row[0]:{width}}" + "".join(f"{cell:>8}" for cell in row[1:]) for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, default="cifar100")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of logits, weight and features")
    parser.add_argument("--json", action="store_true", help="print only the counts, as JSON")
    options = parser.parse_args(arguments)
    found = launches_of(SHAPES[options.shape], options.dtype)
    if options.json:
        print(json.dumps({name: launches.counts() for name, launches in found.items()}))
    else:
        print(f"{options.shape}, {options.dtype}: launches, counted without a GPU\n\n{table(found)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
