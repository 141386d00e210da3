"""Reductions as Triton kernels: tiles, printed loops, Gaussians on tensor cores, neighbours."""
