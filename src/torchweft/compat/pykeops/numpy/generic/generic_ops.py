"""The generic functions, for arrays of NumPy."""

from torchweft.reductions.numpy import (
    generic_argkmin,
    generic_argmin,
    generic_logsumexp,
    generic_sum,
)

__all__ = ["generic_argkmin", "generic_argmin", "generic_logsumexp", "generic_sum"]
