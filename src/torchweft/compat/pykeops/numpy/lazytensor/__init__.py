"""Lazy tensors, for arrays of NumPy, by the path of their module."""

from torchweft.compat.pykeops.numpy.lazytensor import LazyTensor

__all__ = ["LazyTensor"]
