"""Train classifiers from partial labels: the PLSP pipeline on top of plsp_kernels."""
