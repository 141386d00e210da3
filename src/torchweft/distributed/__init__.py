"""Sums over pairs whose rows stand on several ranks of torch.distributed."""

from torchweft.distributed.halo import Halo
from torchweft.distributed.scenes import shard_voxels

__all__ = ["Halo", "shard_voxels"]
