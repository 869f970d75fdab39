"""Executes PTX on the CPU: what Triton's compiler makes of a kernel, without a GPU.

| module | what it holds |
|---|---|
| `program` | PTX text as instructions and operands |
| `machine` | threads, registers and both memories of a launch |
| `memory` | global and shared memory; accesses outside a tensor and races between warps raise |
| `operands` | typed access to operands |
| `forms` | the table from opcodes to what they do; opcodes it does not know raise |
| `integers`, `floats`, `conversions`, `movement`, `warps`, `matrices` | the instructions |
| `schedule` | divergence, barriers, the order of warps |
| `launch` | executes the launches of Triton kernels on CPU tensors |
| `plugin` | the same for a pytest run |

Threads are lanes of numpy arrays: one numpy call executes an instruction for all threads that have reached it. Numbers
are those of the instructions' definitions, not of a particular GPU; `docs/compiled-code.md` tells what this shows.
"""
