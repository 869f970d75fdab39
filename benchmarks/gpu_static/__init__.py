"""Static analysis of the GPU kernels without a GPU: compiled ahead of time and counted, never measured."""
