"""torch's batch norm on features whose last rows are padding, in a record with room.

Networks that were written for spconv call torch.nn.BatchNorm1d on features, which do not know their
voxels.  The levels of a record have different numbers of rows: these tell whose padding it is.  (In
a call without padding levels may have equal numbers, and all rows are real.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from torchweft.core.replaced import Replaced
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.norms.functions import batch_norm

__all__ = ["unpadded_norms"]


class _Norm(NamedTuple):
    """What torch.nn.functional.batch_norm is given of a module; its batches are counted."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor
    momentum: float
    eps: float
    training: bool = True
    track_running_stats: bool = True


def unpadded_norms(levels: Iterable[Coordinates]) -> Replaced:
    """Inside, torch's batch norms take statistics of the voxels without padding.

    Args:
        levels: the voxels of a tensor, and those that its maps lead to.
    """
    by_rows = {len(level): level for level in levels}

    def normalised(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        level = by_rows.get(input.shape[0]) if training and input.dim() == 2 else None
        if level is None:
            state = running_mean, running_var, weight, bias
            return functional.batch_norm(input, *state, training, momentum, eps)
        counted = input.new_zeros((), dtype=torch.int64)
        norm = _Norm(weight, bias, running_mean, running_var, counted, momentum, eps)
        return batch_norm(norm, input, valid=level.num_unpadded)

    return Replaced({functional.batch_norm: normalised})
