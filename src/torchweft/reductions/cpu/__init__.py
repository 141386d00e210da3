"""Reductions as numba loops."""
