"""What SparseTensor and TensorField share, and which coordinate manager a new tensor gets."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor as Dense

from torchweft.compat.MinkowskiEngine.MinkowskiCoordinateManager import (
    CoordinateManager,
    CoordinateMapKey,
)
from torchweft.core.tables import sort_rows
from torchweft.errors import DeviceError, DTypeError, ShapeError
from torchweft.voxels.layers.pooling import largest, lengths, together, wide

__all__ = [
    "OtherRowsError",
    "SparseTensorOperationMode",
    "SparseTensorQuantizationMode",
    "Tensor",
    "clear_global_coordinate_manager",
    "global_coordinate_manager",
    "quantized",
    "set_global_coordinate_manager",
    "set_sparse_tensor_operation_mode",
    "sparse_tensor_operation_mode",
]


class SparseTensorOperationMode(enum.Enum):
    """Whether new tensors share one coordinate manager."""

    SEPARATE_COORDINATE_MANAGER = 0
    SHARE_COORDINATE_MANAGER = 1


class SparseTensorQuantizationMode(enum.Enum):
    """How the features of rows with one voxel are combined; the first row is RANDOM_SUBSAMPLE's."""

    RANDOM_SUBSAMPLE = 0
    UNWEIGHTED_AVERAGE = 1
    UNWEIGHTED_SUM = 2
    NO_QUANTIZATION = 3
    MAX_POOL = 4
    SPLAT_LINEAR_INTERPOLATION = 5


class _Shared:
    """The mode, and the manager that tensors share in it."""

    mode = SparseTensorOperationMode.SEPARATE_COORDINATE_MANAGER
    manager: CoordinateManager | None = None


def set_sparse_tensor_operation_mode(operation_mode: SparseTensorOperationMode) -> None:
    """With SHARE_COORDINATE_MANAGER, new tensors get one manager until it is cleared."""
    _Shared.mode = SparseTensorOperationMode(operation_mode)


def sparse_tensor_operation_mode() -> SparseTensorOperationMode:
    """The mode that is set."""
    return _Shared.mode


def global_coordinate_manager() -> CoordinateManager | None:
    """The manager that new tensors share, None before the first."""
    return _Shared.manager


def set_global_coordinate_manager(coordinate_manager: CoordinateManager | None) -> None:
    """Let new tensors share this manager."""
    _Shared.manager = coordinate_manager


def clear_global_coordinate_manager() -> None:
    """Drop the shared manager: call it after each step, or maps of all clouds are kept."""
    _Shared.manager = None


class OtherRowsError(ShapeError, AssertionError):
    """Tensors of two coordinate managers or keys; the original asserts that they are of one."""


class Tensor:
    """Features on the rows of a coordinate map or field of a manager.

    Args:
        features: (N, C).
        coordinates: (N, 1 + D), the batch number first; None with a key.
        key: of the rows; None with coordinates.
        manager: that knows the key; None: a new one, or the shared one.
        requires_grad: set on features if given.
        device: to move features and coordinates to.

    Raises:
        ShapeError, DTypeError, DeviceError: arguments that do not fit each other.
    """

    _manager: CoordinateManager
    _F: Dense
    _C: Dense | None = None
    _batch_rows: list[Dense] | None = None
    quantization_mode: SparseTensorQuantizationMode

    def __init__(
        self,
        features: Dense,
        coordinates: Dense | None,
        key: CoordinateMapKey | None,
        manager: CoordinateManager | None,
        requires_grad: bool | None,
        device: torch.device | str | None,
    ) -> None:
        if device is not None:
            features = features.to(device)
            coordinates = None if coordinates is None else coordinates.to(device)
        _check(features, coordinates, key, manager)
        if manager is None:
            assert coordinates is not None  # checked
            manager = _manager_for(coordinates.shape[1] - 1)
        self._manager = manager
        if coordinates is None:
            assert key is not None  # checked
            self._hold(features, key)
        else:
            self._quantize(features, coordinates)
        if requires_grad is not None:
            self._F.requires_grad_(requires_grad)

    def _quantize(self, features: Dense, coordinates: Dense) -> None:
        raise NotImplementedError  # each kind of tensor has its own rows

    def _hold(self, features: Dense, key: CoordinateMapKey) -> None:
        raise NotImplementedError

    def _rows(self) -> Dense:
        raise NotImplementedError

    def _samples(self) -> list[Dense]:
        raise NotImplementedError

    @property
    def coordinate_key(self) -> CoordinateMapKey:
        """The key of the rows."""
        raise NotImplementedError

    def with_features(self, features: Dense) -> Self:
        """Other features on the same rows."""
        found = type(self).__new__(type(self))
        found._manager, found.quantization_mode = self._manager, self.quantization_mode
        found._hold(features, self.coordinate_key)
        found._C = self._C
        return found

    @property
    def coordinate_manager(self) -> CoordinateManager:
        """The manager of the rows, and of all levels made of them."""
        return self._manager

    @property
    def tensor_stride(self) -> list[int]:
        """Voxels of the finest level that one voxel spans, by axis."""
        return self.coordinate_key.get_tensor_stride()

    @property
    def coordinates(self) -> Dense:
        """(N, 1 + D), the batch number first."""
        if self._C is None:
            self._C = self._rows()
        return self._C

    @property
    def C(self) -> Dense:  # noqa: N802 - the original's name
        """The coordinates."""
        return self.coordinates

    @property
    def features(self) -> Dense:
        """(N, C)."""
        return self._F

    @property
    def F(self) -> Dense:  # noqa: N802 - the original's name
        """The features."""
        return self._F

    @property
    def D(self) -> int:  # noqa: N802 - the original's name
        """The number of axes."""
        return self._manager.D

    dimension = D

    @property
    def decomposition_permutations(self) -> list[Dense]:
        """The rows of each sample, by its number; empty for one without rows."""
        if self._batch_rows is None:
            self._batch_rows = self._samples()
        return self._batch_rows

    _batchwise_row_indices = decomposition_permutations

    @property
    def decomposed_coordinates(self) -> list[Dense]:
        """(N_b, D) the coordinates of each sample, without the batch number."""
        return [self.C[rows, 1:] for rows in self.decomposition_permutations]

    @property
    def decomposed_features(self) -> list[Dense]:
        """(N_b, C) the features of each sample."""
        return [self._F[rows] for rows in self.decomposition_permutations]

    @property
    def decomposed_coordinates_and_features(self) -> tuple[list[Dense], list[Dense]]:
        """Both."""
        return self.decomposed_coordinates, self.decomposed_features

    def coordinates_at(self, batch_index: int) -> Dense:
        """(N_b, D) the coordinates of one sample."""
        return self.C[self.decomposition_permutations[batch_index], 1:]

    def features_at(self, batch_index: int) -> Dense:
        """(N_b, C) the features of one sample."""
        return self._F[self.decomposition_permutations[batch_index]]

    def coordinates_and_features_at(self, batch_index: int) -> tuple[Dense, Dense]:
        """Both."""
        return self.coordinates_at(batch_index), self.features_at(batch_index)

    @property
    def requires_grad(self) -> bool:
        """Whether the features do."""
        return self._F.requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> None:
        """Set it on the features."""
        self._F.requires_grad_(requires_grad)

    @property
    def shape(self) -> torch.Size:
        """Of the features."""
        return self._F.shape

    def size(self) -> torch.Size:
        """Of the features."""
        return self._F.shape

    @property
    def device(self) -> torch.device:
        """Of the features."""
        return self._F.device

    def get_device(self) -> int:
        """Of the features, as a number."""
        return self._F.get_device()

    @property
    def dtype(self) -> torch.dtype:
        """Of the features."""
        return self._F.dtype

    def float(self) -> Self:
        """This tensor, from now on with float32 features."""
        self._F = self._F.float()
        return self

    def double(self) -> Self:
        """This tensor, from now on with float64 features."""
        self._F = self._F.double()
        return self

    def detach(self) -> Self:
        """This tensor, from now on with detached features, as in the original."""
        self._F = self._F.detach()
        return self

    def __len__(self) -> int:
        return len(self._F)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(\n  coordinates={self.C}\n  features={self._F}\n"
            f"  coordinate_map_key={self.coordinate_key}\n"
            f"  coordinate_manager={self._manager}  spatial dimension={self.D})"
        )

    def check_manager(self, other: Tensor, name: str) -> None:
        """Raise unless both tensors have one manager.

        Raises:
            OtherRowsError: they do not.
        """
        if self._manager is not other._manager:
            raise OtherRowsError(
                f"{name} was given tensors of two coordinate managers: they must have one, which "
                "knows the rows of both. Build the second with coordinate_manager="
                "first.coordinate_manager, or set SHARE_COORDINATE_MANAGER."
            )

    def _same_rows(self, other: Tensor, name: str) -> Dense:
        """The features of a tensor on the same rows."""
        self.check_manager(other, name)
        if self.coordinate_key != other.coordinate_key:
            raise OtherRowsError(
                f"{name} was given tensors on {self.coordinate_key} and {other.coordinate_key}: "
                "they must have one key. Add tensors on different voxels with a + b."
            )
        return other._F

    def _combined(self, other: Any, function: Callable[[Any, Any], Dense]) -> Self:
        if isinstance(other, Tensor):
            other = self._same_rows(other, "an operator")
        return self.with_features(function(self._F, other))

    def __add__(self, other: Any) -> Self:
        return self._combined(other, operator.add)

    def __sub__(self, other: Any) -> Self:
        return self._combined(other, operator.sub)

    def __mul__(self, other: Any) -> Self:
        return self._combined(other, operator.mul)

    def __truediv__(self, other: Any) -> Self:
        return self._combined(other, operator.truediv)

    def _changed(self, other: Any, function: Callable[[Any, Any], Dense]) -> Self:
        """This tensor with new features: other tensors with the old ones keep these."""
        other = self._same_rows(other, "an operator") if isinstance(other, Tensor) else other
        self._F = function(self._F, other)
        return self

    def __iadd__(self, other: Any) -> Self:
        return self._changed(other, operator.add)

    def __isub__(self, other: Any) -> Self:
        return self._changed(other, operator.sub)

    def __imul__(self, other: Any) -> Self:
        return self._changed(other, operator.mul)

    def __itruediv__(self, other: Any) -> Self:
        return self._changed(other, operator.truediv)


def quantized(
    features: Dense, unique: Dense, voxel: Dense, mode: SparseTensorQuantizationMode
) -> Dense:
    """The features of voxels from those of rows.

    Args:
        features: (N, C) of the rows.
        unique: (M,) the first row of each voxel.
        voxel: (N,) the voxel of each row.
        mode: how they are combined.

    Raises:
        ShapeError: a mode that combines nothing.
    """
    modes = SparseTensorQuantizationMode
    segments = voxel, sort_rows(voxel), len(unique)
    if mode == modes.RANDOM_SUBSAMPLE:
        return features.index_select(0, unique)
    if mode == modes.MAX_POOL:
        return largest(features, *segments)
    if mode not in (modes.UNWEIGHTED_AVERAGE, modes.UNWEIGHTED_SUM):
        raise ShapeError(
            f"quantization_mode is {mode.name} but {len(voxel)} rows lie in {len(unique)} voxels: "
            "a mode that combines them is needed. Pass UNWEIGHTED_AVERAGE, say, or use "
            "TensorField.splat()."
        )
    total = together(wide(features), *segments)
    if mode == modes.UNWEIGHTED_AVERAGE:
        total = total / lengths(*segments).unsqueeze(1)
    return total.to(features.dtype)


def _manager_for(dim: int) -> CoordinateManager:
    if _Shared.mode == SparseTensorOperationMode.SEPARATE_COORDINATE_MANAGER:
        return CoordinateManager(D=dim)
    if _Shared.manager is None:
        _Shared.manager = CoordinateManager(D=dim)
    return _Shared.manager


def _check(
    features: object, coordinates: object, key: object, manager: CoordinateManager | None
) -> None:
    """Raise unless features have the rows of coordinates, or a key and its manager."""
    if not isinstance(features, Dense) or features.dim() != 2:
        given = tuple(features.shape) if isinstance(features, Dense) else type(features).__name__
        raise ShapeError(
            f"features are {given}: they must be a tensor (N, C). Pass features[:, None] for a "
            "single channel."
        )
    if isinstance(coordinates, Dense) == (key is not None) or (key is not None and manager is None):
        raise ShapeError(
            f"coordinates are {type(coordinates).__name__}, the key is {key} and the manager "
            f"{type(manager).__name__}: coordinates alone are needed, or the key of a map with its "
            "manager. Pass coordinate_map_key=x.coordinate_map_key, "
            "coordinate_manager=x.coordinate_manager."
        )
    if not isinstance(coordinates, Dense):
        return
    if coordinates.dim() != 2 or len(coordinates) != len(features):
        raise ShapeError(
            f"features are {tuple(features.shape)} and coordinates {tuple(coordinates.shape)}: "
            "(N, C) and (N, 1 + D) are needed. Pass one row of coordinates a feature row."
        )
    if manager is not None and coordinates.shape[1] != 1 + manager.D:
        raise ShapeError(
            f"coordinates are {tuple(coordinates.shape)} but the coordinate manager has "
            f"{manager.D} axes: they must be (N, {1 + manager.D}). Use another manager."
        )
    if features.device != coordinates.device:
        raise DeviceError(
            f"features are on {features.device}, coordinates on {coordinates.device}: both must be "
            "on one device. Pass device=…, or move one of them."
        )
    if coordinates.dtype == torch.bool or coordinates.is_complex():
        raise DTypeError(
            f"coordinates are {coordinates.dtype}: they must be numbers. Pass coordinates.int()."
        )
