"""Count the binaries of each kernel of a step and of the cross-entropy over several batch sizes, as JSON.

Compiles nothing. A process of its own, because the tests decorate the kernels for the interpreter.
"""

import json

from benchmarks.gpu_static.ahead_of_time import recording, specialise
from benchmarks.gpu_static.calls import LOSS, STATE_UPDATES, call
from benchmarks.shapes import Shape

BATCHES = ((1, 1), (1, 16), (16, 1), (17, 33), (64, 256))

if __name__ == "__main__":
    binaries: dict[str, set[tuple[str, ...]]] = {}
    for batch in BATCHES:
        with recording() as launches:
            for function in (LOSS, "semantic_cross_entropy", *STATE_UPDATES):
                call(function, Shape("any", *batch, 10, 84), "float32", "triton")
        for launch in launches:
            binaries.setdefault(launch.name, set()).add(specialise(launch, "sm_80").key)
    print(json.dumps({name: len(keys) for name, keys in binaries.items()}))
