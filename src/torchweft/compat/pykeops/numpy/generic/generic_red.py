"""`Genred`, for arrays of NumPy."""

from torchweft.reductions.numpy import Genred

__all__ = ["Genred"]
