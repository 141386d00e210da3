"""Keys of voxels, and their look-up.  Keys are hashes, as there: 64 bits of FNV-1a."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweft.errors import DTypeError, ShapeError

__all__ = ["sphash", "sphashquery"]

BASIS, PRIME = 14695981039346656037 - 2**64, 1099511628211


def sphash(coords: Tensor, offsets: Tensor | None = None) -> Tensor:
    """(N,) int64 hashes, or (K, N) of the voxels at each offset from (x, y, z).

    The same numbers on every device: those of torchsparse 2.1 on a GPU.

    Args:
        coords: (N, 4) int32 (batch, x, y, z).
        offsets: (K, 3) int32.

    Raises:
        DTypeError, ShapeError: others.
    """
    for name, tensor, columns in (("coords", coords, 4), ("offsets", offsets, 3)):
        if tensor is None:
            continue
        if tensor.dtype != torch.int32:
            raise DTypeError(
                f"{name} are {tensor.dtype}: they must be torch.int32. Pass {name}.int()."
            )
        if tensor.ndim != 2 or tensor.shape[1] != columns:
            raise ShapeError(
                f"{name} are {tuple(tensor.shape)}: they must be (N, {columns}). Pass one row "
                "for each, the batch before x in coords."
            )
    if offsets is not None:
        coords = coords + torch.nn.functional.pad(offsets, (1, 0)).unsqueeze(1)
    found = torch.full_like(coords[..., 0], BASIS, dtype=torch.int64)
    for column in coords.long().unbind(-1):
        found = (found ^ (column & 0xFFFFFFFF)) * PRIME  # modulo 2⁶⁴
    return found


def sphashquery(queries: Tensor, references: Tensor) -> Tensor:
    """int64 in the shape of queries: the first place of each among the references, −1 for none.

    Args:
        queries: integers of any shape.
        references: (M,) integers.

    Cost: one sort of the references, and one search for each query.
    """
    if not references.numel():
        return torch.full_like(queries, -1, dtype=torch.int64)
    keys, order = torch.sort(references.flatten(), stable=True)
    place = torch.searchsorted(keys, queries.contiguous()).clamp(max=len(keys) - 1)
    return order[place].masked_fill(keys[place] != queries, -1)
