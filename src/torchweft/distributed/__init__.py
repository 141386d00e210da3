"""Sums over pairs whose rows stand on several ranks of torch.distributed."""

from torchweft.core.collectives import total
from torchweft.distributed.domains import Domains
from torchweft.distributed.dynamics import Atoms, VelocityVerlet, forces_of
from torchweft.distributed.faults import propagate_errors
from torchweft.distributed.graphs import Shard, ShardSize, shard
from torchweft.distributed.halo import Halo
from torchweft.distributed.neighbours import DistributedNeighbourList, Neighbours
from torchweft.distributed.owners import by_metis, by_position, round_robin
from torchweft.distributed.pairs import all_pairs
from torchweft.distributed.potentials import potential
from torchweft.distributed.scenes import shard_voxels

__all__ = [
    "Atoms",
    "DistributedNeighbourList",
    "Domains",
    "Halo",
    "Neighbours",
    "Shard",
    "ShardSize",
    "VelocityVerlet",
    "all_pairs",
    "by_metis",
    "by_position",
    "forces_of",
    "potential",
    "propagate_errors",
    "round_robin",
    "shard",
    "shard_voxels",
    "total",
]
