"""The generic functions, for tensors of torch."""

from torchweft.reductions import (
    generic_argkmin,
    generic_argmin,
    generic_logsumexp,
    generic_sum,
)

__all__ = ["generic_argkmin", "generic_argmin", "generic_logsumexp", "generic_sum"]
