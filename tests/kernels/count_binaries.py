"""Count the binaries of each kernel of each function over several batch sizes, as JSON.

Compiles nothing. A process of its own, because the tests decorate the kernels for the interpreter.
"""

import itertools
import json

from benchmarks.gpu_static.ahead_of_time import recording, specialise
from benchmarks.gpu_static.calls import FUNCTIONS, call
from benchmarks.shapes import Shape

BATCHES = ((1, 1), (1, 16), (16, 1), (17, 33), (64, 256))
KINDS = ("full", "diagonal")

if __name__ == "__main__":
    binaries: dict[str, set[tuple[str, ...]]] = {}
    for function, kind, batch in itertools.product(FUNCTIONS, KINDS, BATCHES):
        with recording() as launches:
            call(function, Shape("any", *batch, 10, 84, kind), "float32", "triton")
        for launch in launches:
            key = f"{function}, {kind}: {launch.name}"
            binaries.setdefault(key, set()).add(specialise(launch, "sm_80").key)
    print(json.dumps({name: len(keys) for name, keys in binaries.items()}))
