"""Compile, cache and launch Triton kernels with little work on the host."""
