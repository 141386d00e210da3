"""Sums over pairs whose rows stand on several ranks of torch.distributed."""

from torchweft.distributed.domains import Domains
from torchweft.distributed.dynamics import Atoms, VelocityVerlet, forces_of
from torchweft.distributed.faults import propagate_errors
from torchweft.distributed.halo import Halo
from torchweft.distributed.neighbours import DistributedNeighbourList, Neighbours
from torchweft.distributed.scenes import shard_voxels

__all__ = [
    "Atoms",
    "DistributedNeighbourList",
    "Domains",
    "Halo",
    "Neighbours",
    "VelocityVerlet",
    "forces_of",
    "propagate_errors",
    "shard_voxels",
]
