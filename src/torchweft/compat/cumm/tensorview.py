"""`from_numpy(array)`: a torch tensor on the array's memory, whose `.numpy()` goes back."""

from torch import from_numpy

__all__ = ["from_numpy"]
