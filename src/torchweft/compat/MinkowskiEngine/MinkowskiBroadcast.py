"""From one row per sample to all voxels of the sample, with MinkowskiEngine's names.

y[n] = g(x[n], z[sample of n]): the sum, the product, z alone, or both concatenated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchweft.compat.MinkowskiEngine.MinkowskiCommon import BroadcastMode, MinkowskiModuleBase
from torchweft.compat.MinkowskiEngine.MinkowskiSparseTensor import SparseTensor
from torchweft.voxels.layers.pooling import apart

__all__ = [
    "MinkowskiBroadcast",
    "MinkowskiBroadcastAddition",
    "MinkowskiBroadcastBase",
    "MinkowskiBroadcastConcatenation",
    "MinkowskiBroadcastMultiplication",
]


class MinkowskiBroadcastBase(MinkowskiModuleBase):
    """The sum or the product with the sample's row.

    Args:
        operation_type: a BroadcastMode.
    """

    def __init__(self, operation_type: int) -> None:
        super().__init__()
        self.operation_type = BroadcastMode(operation_type)

    def forward(self, input: SparseTensor, input_glob: SparseTensor) -> SparseTensor:
        """On the first tensor's voxels; the second is one row per sample, as a global pool's."""
        return input.with_features(self.joined(input.F, broadcast(input, input_glob)))

    def joined(self, features: Tensor, rows: Tensor) -> Tensor:
        """Features with those of their samples."""
        added = self.operation_type == BroadcastMode.ELEMENTWISE_ADDITON
        return features + rows if added else features * rows

    def __repr__(self) -> str:
        return type(self).__name__


def broadcast(input: SparseTensor, input_glob: SparseTensor) -> Tensor:
    """(N, C) the row of each voxel's sample."""
    input.check_manager(input_glob, "a broadcast")
    keys = input.coordinate_map_key, input_glob.coordinate_map_key
    samples = input.coordinate_manager.strided(*keys)
    return apart(input_glob.F, samples.owner, samples.order)


class MinkowskiBroadcastAddition(MinkowskiBroadcastBase):
    """y[n] = x[n] + z[sample of n]."""

    def __init__(self) -> None:
        super().__init__(BroadcastMode.ELEMENTWISE_ADDITON)


class MinkowskiBroadcastMultiplication(MinkowskiBroadcastBase):
    """y[n] = x[n] · z[sample of n]."""

    def __init__(self) -> None:
        super().__init__(BroadcastMode.ELEMENTWISE_MULTIPLICATION)


class MinkowskiBroadcast(MinkowskiModuleBase):
    """y[n] = z[sample of n]."""

    def forward(self, input: SparseTensor, input_glob: SparseTensor) -> SparseTensor:
        """On the first tensor's voxels, of which nothing else is read."""
        return input.with_features(broadcast(input, input_glob))

    def __repr__(self) -> str:
        return type(self).__name__


class MinkowskiBroadcastConcatenation(MinkowskiBroadcast):
    """y[n] = (x[n], z[sample of n])."""

    def forward(self, input: SparseTensor, input_glob: SparseTensor) -> SparseTensor:
        """On the first tensor's voxels."""
        return input.with_features(torch.cat((input.F, broadcast(input, input_glob)), 1))
