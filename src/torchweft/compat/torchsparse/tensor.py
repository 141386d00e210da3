"""SparseTensor and PointTensor: features on voxels and on points, with torchsparse's attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft import voxels
from torchweft.compat.torchsparse.caches import TensorCache, new_tensor_cache
from torchweft.compat.torchsparse.sizes import make_ntuple
from torchweft.compat.voxels import register_tree, rows_of, same_rows, voxels_of
from torchweft.errors import ShapeError
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.maps.kernel_map import Maps

__all__ = [
    "PointTensor",
    "SparseTensor",
    "get_allow_negative_coordinates",
    "set_allow_negative_coordinates",
]


class _OnRows:
    """Members that stand for features and coordinates; they are changed in place, as there."""

    feats: Tensor
    coords: Tensor

    @property
    def F(self) -> Tensor:  # noqa: N802 - torchsparse's name
        """The features."""
        return self.feats

    @F.setter
    def F(self, feats: Tensor) -> None:  # noqa: N802
        self.feats = feats

    @property
    def C(self) -> Tensor:  # noqa: N802 - torchsparse's name
        """The coordinates."""
        return self.coords

    @C.setter
    def C(self, coords: Tensor) -> None:  # noqa: N802
        self.coords = coords

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Any:
        """This tensor, moved to a device."""
        self.coords = self.coords.to(device, non_blocking=non_blocking)
        self.feats = self.feats.to(device, non_blocking=non_blocking)
        return self

    def cuda(self) -> Any:
        """This tensor, moved to the current GPU."""
        return self.to("cuda")

    def cpu(self) -> Any:
        """This tensor, moved to the CPU."""
        return self.to("cpu")

    def detach(self) -> Any:
        """This tensor, without a graph of gradients."""
        self.coords, self.feats = self.coords.detach(), self.feats.detach()
        return self


class SparseTensor(_OnRows):
    """feats[n] is the row of the voxel coords[n] = (batch, x, y, z).

    Args:
        feats: (N, C).
        coords: (N, 4) int32; (N, 3) without the batch, until samples are collated.
        stride: voxels of the finest level that one voxel spans, for each axis.
        spatial_range: (batch, x, y, z), the number of samples and the box, and what a program adds
            behind them; None is that of the voxels.

    `to`, `cuda`, `cpu`, `half` and `detach` change the tensor and return it, as in torchsparse.
    What layers keep stands in `_caches`, which derived tensors share.
    """

    def __init__(
        self,
        feats: Tensor,
        coords: Tensor,
        stride: int | tuple[int, ...] = 1,
        spatial_range: Sequence[int] | None = None,
    ) -> None:
        self.feats, self.coords, self.s = feats, coords, stride
        self.spatial_range = None if spatial_range is None else tuple(int(n) for n in spatial_range)
        self._caches: TensorCache = new_tensor_cache()
        self.kept: Coordinates | None = None  # the voxels of coords, with their maps

    @property
    def s(self) -> tuple[int, ...]:
        """The stride."""
        return self.stride

    @s.setter
    def s(self, stride: int | tuple[int, ...]) -> None:
        self.stride = make_ntuple(stride, ndim=3)

    def half(self) -> SparseTensor:
        """This tensor, with features in float16."""
        self.feats = self.feats.half()
        return self

    def sparse(self) -> voxels.SparseTensor:
        """torchweft's tensor with these features and voxels; it shares the maps of the voxels.

        Raises:
            ShapeError: coords are not (N, 4), or feats have another number of rows.
            IndexRangeError: a voxel outside of the range.
        """
        coords, given = self.coords, self.spatial_range
        if coords.ndim != 2 or coords.shape[1] != 4 or (given is not None and len(given) < 4):
            raise ShapeError(
                f"coords are {tuple(coords.shape)} and spatial_range is {given}: (N, 4) with "
                "(batch, x, y, z) and 4 numbers are needed. Collate samples with sparse_collate, "
                "or put the batch number before x."
            )
        box = () if given is None else (given[0], given[1:4])
        self.kept = voxels_of(coords, *box)
        return voxels.SparseTensor.on(self.feats, self.kept, Maps())

    __voxels__ = sparse

    def dense(self) -> Tensor:
        """(batch, x, y, z, C), contiguous, 0 where there is no voxel.

        Raises:
            ShapeError: there is no spatial_range.
        """
        if self.spatial_range is None:
            raise ShapeError(
                "dense() was called without a spatial_range: it is needed for the shape. Pass "
                "SparseTensor(feats, coords, spatial_range=(batch, x, y, z))."
            )
        return self.sparse().dense().movedim(1, -1).contiguous()

    def derived(self, feats: Tensor) -> SparseTensor:
        """Other features on the same voxels, with the same maps."""
        found = SparseTensor(feats, self.coords, self.stride, self.spatial_range)
        found._caches, found.kept = self._caches, self.kept
        return found

    def __add__(self, other: SparseTensor) -> SparseTensor:
        """Sums of features, row by row; tensors with other voxels are refused."""
        check_same_voxels([self, other], "+")
        return self.derived(self.feats + other.feats)


class PointTensor(_OnRows):
    """feats[n] is the row of the point coords[n]; `F` and `C` as well.

    Args:
        feats: (N, C).
        coords: (N, 4).
        idx_query: what a program keeps for each stride; None is a new dictionary.
        weights: as idx_query.
    """

    def __init__(
        self,
        feats: Tensor,
        coords: Tensor,
        idx_query: dict[Any, Any] | None = None,
        weights: dict[Any, Any] | None = None,
    ) -> None:
        self.feats, self.coords = feats, coords
        self.idx_query = {} if idx_query is None else idx_query
        self.weights = {} if weights is None else weights
        self.additional_features: dict[str, dict[Any, Any]] = {"idx_query": {}, "counts": {}}

    def __add__(self, other: PointTensor) -> PointTensor:
        """Sums of features, row by row."""
        found = PointTensor(self.feats + other.feats, self.coords, self.idx_query, self.weights)
        found.additional_features = self.additional_features
        return found


def check_same_voxels(tensors: Sequence[SparseTensor], name: str) -> None:
    """Raise unless tensors have the same voxels in the same rows, at one stride."""
    first, *others = tensors
    for other in others:
        if first.stride != other.stride or not same_rows(first.coords, other.coords):
            raise ShapeError(
                f"{name} was given tensors of {len(first.coords)} and {len(other.coords)} voxels "
                f"at strides {first.stride} and {other.stride}: they must have the same voxels, "
                "row by row. Use torchsparse.generative_add for different voxels of one stride."
            )


def _made(tensor: voxels.SparseTensor, level: tuple[Any, Any]) -> SparseTensor:
    found = SparseTensor(tensor.feats, rows_of(tensor.coordinates), *level)
    found.kept = tensor.coordinates
    return found


register_tree(SparseTensor, _made, lambda tensor: (tensor.stride, tensor.spatial_range))


def get_allow_negative_coordinates() -> bool:
    """False: strided layers need coordinates that are 0 or more; others take any."""
    return False


def set_allow_negative_coordinates(allow_negative_coordinates: bool) -> None:
    """Only False.

    Raises:
        NotImplementedError: True.
    """
    if allow_negative_coordinates:
        raise NotImplementedError(
            "set_allow_negative_coordinates(True) was called: torchsparse 2.1 rounds the bounds of "
            "strided layers towards 0 there and loses voxels, so this stand-in lacks it. Add a "
            "multiple of the network's largest stride to the coordinates."
        )
