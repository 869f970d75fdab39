"""What can be said about the kernels on GPUs without a GPU: compiled ahead of time and counted, never measured."""
