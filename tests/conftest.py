"""Settings that must be made before any test module is imported."""

import os

import hypothesis
import torch

# Some virtual machines advertise half-precision instructions that they cannot execute.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

# Triton reads this once, at import: without a GPU, kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")
