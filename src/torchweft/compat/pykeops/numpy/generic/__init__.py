"""Reductions of formula strings, for arrays of NumPy, by the paths of their modules."""

from torchweft.compat.pykeops.numpy.generic import generic_ops, generic_red

__all__ = ["generic_ops", "generic_red"]
