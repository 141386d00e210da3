"""Sums over pairs whose rows stand on several ranks of torch.distributed."""

from torchweft.core.collectives import total
from torchweft.distributed.graphs import Shard, ShardSize, shard
from torchweft.distributed.halo import Halo
from torchweft.distributed.owners import by_metis, by_position, round_robin

__all__ = [
    "Halo",
    "Shard",
    "ShardSize",
    "by_metis",
    "by_position",
    "round_robin",
    "shard",
    "total",
]
