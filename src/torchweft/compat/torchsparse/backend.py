"""The hash table that programs use; the rest of the compiled module is in the functions of nn."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweft.compat.lacking import lacking
from torchweft.compat.torchsparse.nn.utils import get_kernel_offsets
from torchweft.errors import ShapeError
from torchweft.voxels.maps.coordinates import Coordinates

__all__ = ["GPUHashTable", "GPUHashTable32"]

ROWS = 128
"""Results have rows of 0 up to a multiple of it, which programs cut off."""


class GPUHashTable:
    """Rows of voxels, looked up around others; on any device, exact, by sorted keys.

    Args:
        storage: a capacity, or tensors of keys and values; they have no effect.
    """

    def __init__(self, *storage: int | Tensor) -> None:
        self._voxels: Coordinates | None = None

    def insert_coords(self, coords: Tensor) -> None:
        """Keep distinct voxels.

        Args:
            coords: (N, 4) integers (x, y, z, batch), the order of the compiled module.
        """
        self._voxels = Coordinates(coords.roll(1, 1))

    def lookup_coords(
        self, coords: Tensor, kernel_sizes: Tensor, strides: Tensor, kernel_volume: int
    ) -> Tensor:
        """(N′, K) int32: 1 + the row of the voxel coords · stride + offset, 0 where none is.

        N′ is N rounded up to a multiple of 128, the last rows are 0.

        Args:
            coords: (N, 4) integers (x, y, z, batch).
            kernel_sizes: (3,) the kernel, whose offsets are those of `get_kernel_offsets`.
            strides: (3,) of x, y and z.
            kernel_volume: K.

        Raises:
            ShapeError: nothing was inserted.
        """
        if self._voxels is None:
            raise ShapeError(
                "lookup_coords was called on an empty table: it needs voxels. Call "
                "insert_coords(coords) first."
            )
        offsets = get_kernel_offsets(kernel_sizes, device=str(coords.device))
        around = (coords[:, :3] * strides).unsqueeze(1) + offsets
        batch = coords[:, None, 3:].expand(-1, int(kernel_volume), 1)
        found = self._voxels.find(torch.cat([batch, around], 2).flatten(0, 1)) + 1
        rows = found.view(len(coords), int(kernel_volume))
        return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % ROWS))


GPUHashTable32 = GPUHashTable

_LAYERS = "Call torchsparse.nn.functional.conv3d, or a layer."

__getattr__ = lacking(
    __name__,
    {
        **dict.fromkeys(("hash_cpu", "hash_cuda"), "Call torchsparse.nn.functional.sphash."),
        **dict.fromkeys(
            ("kernel_hash_cpu", "kernel_hash_cuda"),
            "Call torchsparse.nn.functional.sphash with offsets.",
        ),
        "hash_query_cpu": "Call torchsparse.nn.functional.sphashquery.",
        "hash_query_cuda": "Call torchsparse.nn.functional.sphashquery.",
        "build_kernel_map_subm_hashmap": _LAYERS,
        "build_kernel_map_downsample_hashmap": _LAYERS,
        "downsample_cuda": "Call torchsparse.nn.functional.spdownsample.",
    },
)
