"""Spherical harmonics and radial functions: formulas, normalizations, programs, kernels."""
