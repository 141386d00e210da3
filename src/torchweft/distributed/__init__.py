"""Sums over pairs whose rows stand on several ranks of torch.distributed."""

from torchweft.core.collectives import total
from torchweft.distributed import cost
from torchweft.distributed.atoms.domains import Domains
from torchweft.distributed.atoms.dynamics import Atoms, VelocityVerlet, forces_of
from torchweft.distributed.atoms.neighbours import DistributedNeighbourList, Neighbours
from torchweft.distributed.atoms.potentials import potential
from torchweft.distributed.faults import propagate_errors
from torchweft.distributed.graphs import Shard, ShardSize, shard
from torchweft.distributed.halo import Halo
from torchweft.distributed.owners import by_metis, by_position, round_robin
from torchweft.distributed.pairs.functions import all_pairs
from torchweft.distributed.scenes.functions import shard_voxels

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
    "cost",
    "forces_of",
    "potential",
    "propagate_errors",
    "round_robin",
    "shard",
    "shard_voxels",
    "total",
]
