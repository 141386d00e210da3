"""Sums over pairs whose rows stand on several ranks of torch.distributed."""

from torchweft.distributed.halo import Halo

__all__ = ["Halo"]
