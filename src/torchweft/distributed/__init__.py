"""Sums over pairs whose rows stand on several ranks of torch.distributed."""

from torchweft.distributed.domains import Domains
from torchweft.distributed.halo import Halo
from torchweft.distributed.neighbours import DistributedNeighbourList, Neighbours

__all__ = ["DistributedNeighbourList", "Domains", "Halo", "Neighbours"]
