"""SparseTensor and TensorField: features on voxels, and on points between them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor as Dense

from torchweft import voxels
from torchweft.compat.MinkowskiEngine.coordinate_maps import CoordinateMap
from torchweft.compat.MinkowskiEngine.MinkowskiCoordinateManager import (
    CoordinateManager,
    CoordinateMapKey,
)
from torchweft.compat.MinkowskiEngine.MinkowskiTensor import (
    SparseTensorQuantizationMode,
    Tensor,
    quantized,
)
from torchweft.compat.voxels import register_tree
from torchweft.core.tables import sort_rows
from torchweft.errors import DTypeError, IndexRangeError, ShapeError
from torchweft.voxels.layers.pooling import apart, together
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.maps.kernel_map import Maps

__all__ = ["SparseTensor", "TensorField", "out_key_of"]

Mode = SparseTensorQuantizationMode


class SparseTensor(Tensor):
    """features[n] is the row of the voxel coordinates[n] = (batch, x0, x1, …).

    Coordinates are counted in voxels of the finest level: those that layers make at tensor stride t
    are multiples of t.  The order of the rows of a layer's output has no meaning.

    Args:
        features: (N, C).
        coordinates: (N, 1 + D) integers, D = 1 to 4; numbers with fractions are rounded down.
        tensor_stride: voxels of the finest level that a voxel spans, by axis or for all.
        coordinate_map_key: of the voxels, in place of coordinates.
        coordinate_manager: that knows the key; None: a new one, or the shared one.
        quantization_mode: combines the features of rows with one voxel.
        allocator_type, minkowski_algorithm: have no effect.
        requires_grad: set on features if given.
        device: to move features and coordinates to.

    Attributes: unique_index (N,) and inverse_mapping, of a tensor built from coordinates: the first
    row of each voxel, and the voxel of each row.

    Raises:
        ShapeError, DTypeError, DeviceError: arguments that do not fit each other.
    """

    coordinate_map_key: CoordinateMapKey
    unique_index: Dense
    inverse_mapping: Dense

    def __init__(
        self,
        features: Dense,
        coordinates: Dense | None = None,
        tensor_stride: Any = 1,
        coordinate_map_key: CoordinateMapKey | None = None,
        coordinate_manager: CoordinateManager | None = None,
        quantization_mode: SparseTensorQuantizationMode = Mode.RANDOM_SUBSAMPLE,
        allocator_type: int | None = None,
        minkowski_algorithm: int | None = None,
        requires_grad: bool | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.quantization_mode, self._given_stride = Mode(quantization_mode), tensor_stride
        key, manager = coordinate_map_key, coordinate_manager
        super().__init__(features, coordinates, key, manager, requires_grad, device)

    def _quantize(self, features: Dense, coordinates: Dense) -> None:
        if coordinates.is_floating_point():
            warnings.warn(
                "coordinates are rounded down to integers: pass coordinates.floor().int() to say "
                "so, or build a TensorField.",
                stacklevel=4,
            )
            coordinates = coordinates.floor().int()
        key, maps = self._manager.insert_and_map(coordinates, self._given_stride)
        self.unique_index, self.inverse_mapping = maps
        if len(self.unique_index) < len(features):
            features = quantized(features, *maps, self.quantization_mode)
        self._hold(features, key)

    def _hold(self, features: Dense, key: CoordinateMapKey) -> None:
        size = self._manager.size(key)
        if len(features) != size:
            raise ShapeError(
                f"features are {tuple(features.shape)} but {key} has {size} voxels: they must be "
                f"({size}, C). Pass one feature row a voxel."
            )
        self._F, self.coordinate_map_key = features, key

    def _rows(self) -> Dense:
        return self._manager.get_coordinates(self.coordinate_map_key)

    def _samples(self) -> list[Dense]:
        return self._manager.origin_map(self.coordinate_map_key)[1]

    @property
    def coordinate_key(self) -> CoordinateMapKey:
        """The key of the voxels."""
        return self.coordinate_map_key

    def on(self, coordinates: Coordinates, maps: Maps | None = None) -> voxels.SparseTensor:
        """torchweft's tensor with these features on given voxels."""
        return voxels.SparseTensor.on(self._F, coordinates, maps or Maps())

    def __voxels__(self) -> voxels.SparseTensor:
        return self.on(self._manager.map_of(self.coordinate_map_key).level)

    def _combined(self, other: Any, function: Callable[[Any, Any], Dense]) -> SparseTensor:
        """On the union of the voxels; where one has none, this tensor's or function(0, other's)."""
        if not isinstance(other, Tensor) or self.coordinate_key == other.coordinate_key:
            return super()._combined(other, function)
        self.check_manager(other, "an operator")
        key = CoordinateMapKey(1 + self.D)
        own, others = self._manager.union_map([self.coordinate_key, other.coordinate_key], key)
        empty = self._F.new_zeros(self._manager.size(key), self._F.shape[1])
        total = empty.index_copy(0, own[1], self._F)
        met = function(total.index_select(0, others[1]), other.F)
        return SparseTensor(
            total.index_copy(0, others[1], met),
            coordinate_map_key=key,
            coordinate_manager=self._manager,
        )

    def sparse(
        self,
        min_coords: Dense | None = None,
        max_coords: Dense | None = None,
        contract_coords: bool = True,
    ) -> tuple[Dense, Dense, Dense]:
        """torch's sparse tensor (batch, *lengths, C), its first coordinate, and the tensor stride.

        Args:
            min_coords: (D,) multiples of the tensor stride, the first coordinate; None: the least.
            max_coords: (D,) the last coordinate; None: the largest.
            contract_coords: whether coordinates are divided by the tensor stride.
        """
        stride = torch.tensor(self.tensor_stride, dtype=torch.int32, device=self.device)
        places = self.C[:, 1:]
        low = places.amin(0) if min_coords is None else min_coords.to(self.device)
        high = places.amax(0) if max_coords is None else max_coords.to(self.device)
        step = stride if contract_coords else torch.ones_like(stride)
        low, high = _on_grid(low, stride, step), _on_grid(high, stride, step)
        rows = torch.cat((self.C[:, :1], places // step - low), 1).long().T
        batch = len(self.decomposition_permutations)
        size = (batch, *(high - low + 1).flatten().tolist(), self._F.shape[1])
        # torch 2.11 warns that checks are off even where its argument `check_invariants` is True
        with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
            found = torch.sparse_coo_tensor(rows, self._F, size)
        return found, low.view(1, -1), stride.cpu()

    def dense(
        self,
        shape: torch.Size | None = None,
        min_coordinate: Dense | None = None,
        contract_stride: bool = True,
    ) -> tuple[Dense, Dense, Dense]:
        """(batch, C, *lengths), its first coordinate, and the tensor stride.

        Args:
            shape: (batch, C, *lengths); None: what the voxels need from the first coordinate on.
            min_coordinate: (D,) multiples of the tensor stride; None: 0, and the least coordinate
                is returned, as in the original.
            contract_stride: whether coordinates are divided by the tensor stride.

        Raises:
            IndexRangeError: a voxel outside, also a negative one where no min_coordinate is given.
            ShapeError: an empty tensor without a shape.
        """
        stride = torch.tensor(self.tensor_stride, dtype=torch.int32, device=self.device)
        places = self.C[:, 1:]
        if not len(places) and shape is None:
            raise ShapeError(
                "dense() was called on a tensor without voxels: its shape is unknown. Pass "
                "shape=torch.Size((batch, C, …))."
            )
        if min_coordinate is None:
            low = places.amin(0, keepdim=True) if len(places) else stride.new_zeros(1, self.D)
        else:
            low = min_coordinate.to(self.device).view(1, -1)
            places = places - low
        _on_grid(low, stride, stride)
        places = places // stride if contract_stride else places
        if shape is None:
            lengths = (places.amax(0) + 1).tolist()
            shape = torch.Size([len(self.decomposition_permutations), self.shape[1], *lengths])
        limits = torch.tensor((shape[0], *shape[2:]), device=self.device)
        rows = torch.cat((self.C[:, :1], places), 1).long()
        if bool(((rows < 0) | (rows >= limits)).any()):
            raise IndexRangeError(
                f"voxels lie outside of the dense shape {tuple(shape)}: their coordinates less "
                "min_coordinate, in units of the tensor stride, must lie in it. Pass "
                "min_coordinate=x.C[:, 1:].amin(0).int(), or a larger shape."
            )
        grid = self._F.new_zeros(shape[0], *shape[2:], self.shape[1])
        found = grid.index_put(tuple(rows.T), self._F).movedim(-1, 1).contiguous()
        return found, low, stride.cpu()

    def slice(self, X: Tensor) -> TensorField:  # noqa: N803 - the original's name
        """The features of each point's voxel, or of each row that X was built from.

        Args:
            X: a TensorField, or a SparseTensor on the same voxels that was built from coordinates.
        """
        self.check_manager(X, "slice")
        if isinstance(X, TensorField):
            return X.with_features(self._F.index_select(0, X.inverse_mapping(self.coordinate_key)))
        self._same_rows(X, "slice")
        if not hasattr(X, "inverse_mapping"):
            raise ShapeError(
                "slice was given a SparseTensor on a coordinate map key: one is needed that was "
                "built from coordinates, and so has an inverse_mapping; what torchweft.capture "
                "gives a function has none. Keep that tensor, and slice outside of the function."
            )
        rows: Dense = X.inverse_mapping
        return TensorField(
            self._F.index_select(0, rows),
            coordinates=self.C.index_select(0, rows),
            coordinate_manager=self._manager,
        )

    def cat_slice(self, X: TensorField) -> TensorField:  # noqa: N803 - the original's name
        """`slice` and the field's own features, concatenated."""
        if not isinstance(X, TensorField):
            raise DTypeError(
                f"cat_slice was given a {type(X).__name__}: it takes a TensorField. Build the "
                "input with TensorField(…).sparse()."
            )
        return X.with_features(torch.cat((self.slice(X).F, X.F), 1))

    def interpolate(self, X: TensorField) -> TensorField:  # noqa: N803 - the original's name
        """Σ_v w_v x[v] at the points of a field; see `features_at_coordinates`."""
        return X.with_features(self.features_at_coordinates(X.C.to(self.dtype)))

    def features_at_coordinates(self, query_coordinates: Dense) -> Dense:
        """(P, C) Σ_v w_v x[v], w_v = Π (1 − distance / t), over the 2^D voxels around a point.

        Args:
            query_coordinates: (P, 1 + D) numbers in the features' dtype, the batch number first.

        A voxel that does not exist counts as 0.  The same bits at every call.
        """
        found = self._manager.interpolation_map_weight(self.coordinate_map_key, query_coordinates)
        return interpolated(self._F, *found, len(query_coordinates))


def _made(tensor: voxels.SparseTensor, level: tuple[Any, ...]) -> SparseTensor:
    pair, units, mode = level
    manager = CoordinateManager(D=tensor.dim)
    key = manager.adopt(pair, CoordinateMap(tensor.coordinates, pair[0], units))
    return SparseTensor(tensor.feats, None, 1, key, manager, mode)


def _level_of(tensor: SparseTensor) -> tuple[Any, ...]:
    key, manager = tensor.coordinate_map_key, tensor.coordinate_manager
    if not manager.is_first(key):
        raise ShapeError(
            f"a SparseTensor on {key} was passed to torchweft.capture, or is a result there, whose "
            f"coordinate manager had other voxels before it: a record takes tensors as they are "
            "before a network, and returns tensors on the same voxels, or features. Return x.F."
        )
    return key.pair, manager.map_of(key).units, tensor.quantization_mode


register_tree(SparseTensor, _made, _level_of)


def interpolated(
    features: Dense, sources: Dense, targets: Dense, weights: Dense, count: int
) -> Dense:
    """y[o] = Σ w x[i] over pairs (i, o): (count, C)."""
    terms = apart(features, sources, sort_rows(sources)) * weights.unsqueeze(1)
    return together(terms, targets, sort_rows(targets), count)


class TensorField(Tensor):
    """features[n] is the row of the point coordinates[n] = (batch, x0, x1, …), with fractions.

    Args:
        features: (N, C).
        coordinates: (N, 1 + D) numbers, in voxels of the finest level; kept as float32.
        tensor_stride: of the key.
        coordinate_field_map_key: of the points, in place of coordinates.
        coordinate_manager: that knows the key; None: a new one, or the shared one.
        quantization_mode: combines the features of points in one voxel.
        allocator_type, minkowski_algorithm: have no effect.
        requires_grad: set on features if given.
        device: to move features and coordinates to.

    Raises:
        ShapeError, DTypeError, DeviceError: arguments that do not fit each other.
    """

    coordinate_field_map_key: CoordinateMapKey

    def __init__(
        self,
        features: Dense,
        coordinates: Dense | None = None,
        tensor_stride: Any = 1,
        coordinate_field_map_key: CoordinateMapKey | None = None,
        coordinate_manager: CoordinateManager | None = None,
        quantization_mode: SparseTensorQuantizationMode = Mode.UNWEIGHTED_AVERAGE,
        allocator_type: int | None = None,
        minkowski_algorithm: int | None = None,
        requires_grad: bool | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.quantization_mode, self._given_stride = Mode(quantization_mode), tensor_stride
        key, manager = coordinate_field_map_key, coordinate_manager
        super().__init__(features, coordinates, key, manager, requires_grad, device)

    def _quantize(self, features: Dense, coordinates: Dense) -> None:
        self._hold(features, self._manager.insert_field(coordinates, self._given_stride))
        self._C = coordinates

    def _hold(self, features: Dense, key: CoordinateMapKey) -> None:
        self._F, self.coordinate_field_map_key = features, key

    def _rows(self) -> Dense:
        return self._manager.get_coordinate_field(self.coordinate_field_map_key)

    def _samples(self) -> list[Dense]:
        return self._manager.origin_field_map(self.coordinate_field_map_key)[1]

    @property
    def coordinate_key(self) -> CoordinateMapKey:
        """The key of the points."""
        return self.coordinate_field_map_key

    def sparse(
        self,
        tensor_stride: Any = 1,
        coordinate_map_key: CoordinateMapKey | None = None,
        quantization_mode: SparseTensorQuantizationMode | None = None,
    ) -> SparseTensor:
        """The voxels that hold a point, with the combined features of their points.

        Args:
            tensor_stride: voxels of the finest level that one spans.
            coordinate_map_key: of a map that has the voxel of every point, in place of new ones.
            quantization_mode: None: the field's.
        """
        mode = self.quantization_mode if quantization_mode is None else Mode(quantization_mode)
        key = coordinate_map_key
        if key is None:
            key, (unique, voxel) = self._manager.field_to_sparse_insert_and_map(
                self.coordinate_field_map_key, tensor_stride
            )
            features = quantized(self._F, unique, voxel, mode)
        else:
            features = self._onto(key, mode)
        manager = self._manager
        return SparseTensor(features, coordinate_map_key=key, coordinate_manager=manager)

    def _onto(self, key: CoordinateMapKey, mode: SparseTensorQuantizationMode) -> Dense:
        """The features of the voxels of a map; 0 where one has no point."""
        voxel = self.inverse_mapping(key)
        there, number = torch.unique(voxel, return_inverse=True)
        first = torch.full_like(there, len(voxel)).scatter_reduce(
            0, number, torch.arange(len(voxel), device=voxel.device), "amin"
        )
        found = quantized(self._F, first, number, mode)
        return found.new_zeros(self._manager.size(key), found.shape[1]).index_copy(0, there, found)

    def splat(self) -> SparseTensor:
        """x[v] = Σ_p w_v f[p] on the 2^D voxels around each point; `interpolate` reads it back."""
        rows = self.C.floor().int().unsqueeze(1)
        steps = torch.cartesian_prod(*[torch.arange(2)] * self.D).view(-1, self.D)
        corners = rows + torch.nn.functional.pad(steps, (1, 0)).to(rows)
        key, _ = self._manager.insert_and_map(corners.flatten(0, 1))
        found = self._manager.interpolation_map_weight(key, self.C.to(self.dtype))
        voxel, point, weights = found
        features = interpolated(self._F, point, voxel, weights, self._manager.size(key))
        manager = self._manager
        return SparseTensor(features, coordinate_map_key=key, coordinate_manager=manager)

    def inverse_mapping(self, sparse_tensor_map_key: CoordinateMapKey) -> Dense:
        """(N,) the voxel of each point in a map.

        Raises:
            ShapeError: a point whose voxel the map does not have.
        """
        key = sparse_tensor_map_key
        voxel, points = self._manager.field_to_sparse_map(self.coordinate_field_map_key, key)
        if len(points) < len(self):
            raise ShapeError(
                f"{len(self) - len(points)} of {len(self)} points have no voxel in {key}: each "
                "must have one. Pass the key of a tensor that was not pruned."
            )
        return voxel


def out_key_of(input: SparseTensor, coordinates: Any, tensor_stride: list[int]) -> CoordinateMapKey:
    """The key of a layer's given output: of a tensor, the key itself, or that of new rows.

    Raises:
        ShapeError: a tensor of another manager.
        DTypeError: something else.
    """
    if isinstance(coordinates, CoordinateMapKey):
        return coordinates
    if isinstance(coordinates, SparseTensor):
        input.check_manager(coordinates, "a layer")
        return coordinates.coordinate_map_key
    if not isinstance(coordinates, Dense):
        raise DTypeError(
            f"coordinates are a {type(coordinates).__name__}: they must be integers (N, 1 + D), a "
            "CoordinateMapKey or a SparseTensor. Pass tensor.C."
        )
    key, (unique, _) = input.coordinate_manager.insert_and_map(coordinates, tensor_stride)
    if len(unique) < len(coordinates):
        raise ShapeError(
            f"coordinates have {len(coordinates)} rows with {len(unique)} different voxels: an "
            "output has each voxel once. Pass torch.unique(coordinates, dim=0)."
        )
    return key


def _on_grid(places: Dense, stride: Dense, step: Dense) -> Dense:
    """Coordinates in steps, which must be multiples of the tensor stride."""
    if bool((places % stride.clamp(min=1)).any()):
        raise ShapeError(
            f"min_coordinate or max_coords is {places.flatten().tolist()}: it must hold multiples "
            f"of the tensor stride {stride.tolist()}. Round it down to one."
        )
    return places // step.clamp(min=1)
