"""The voxels of a tensor of indices: sorted once, found by the tensor's identity and version.

Programs assign `.indices` or `.coords` and write to them in place.  Voxels are therefore those of a
tensor object, and only while its version counter, which every write increments, stays the same.  A
tensor made in inference mode has no counter: its rows are compared.

What stands for a library's sparse tensor keeps voxels, and with these their maps; an `indices`
tensor does not: a program that collects the indices of many frames keeps no maps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchweft.core import private
from torchweft.errors import CaptureError
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.maps.tensor import HasVoxels, SparseTensor

__all__ = ["are_rows_of", "register_tree", "rows_of", "same_rows", "voxels_of"]

T = TypeVar("T", bound=HasVoxels)

Box = tuple[int | None, tuple[int, ...] | None]
"""The batch size and the spatial shape; None is that of the voxels."""


class _Kept(NamedTuple):
    """The voxels of a tensor at one version, in one box."""

    version: int | None
    box: Box
    weak: weakref.ref[Coordinates]

    def coordinates_for(self, indices: Tensor) -> Coordinates | None:
        """The voxels, if somebody keeps them and nothing was written to the tensor since."""
        found = self.weak()
        return found if found is not None and self.holds(found, indices) else None

    def holds(self, coordinates: Coordinates, indices: Tensor) -> bool:
        """Whether nothing was written to the tensor since."""
        if self.version is None:
            return same_rows(coordinates.rows, indices)
        return self.version == indices._version


class _RowsWithPadding(Tensor):
    """Indices of which the last are padding: their number is known, to read them is an error."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What does not depend on values.

        Raises:
            CaptureError: what does.
        """
        if func not in _WITHOUT_VALUES:
            raise CaptureError(
                "indices or coords are read in a function that is recorded with room for other "
                "voxels: padding would count as voxels. Layers, batch norms and what acts on each "
                "row of features can be recorded so; compute what needs them outside of the "
                "function."
            )
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


_WITHOUT_VALUES = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "_version")),
    *(Tensor.__len__, Tensor.size, Tensor.dim, Tensor.is_inference),
}

_kept = WeakTensorKeyDictionary()


def voxels_of(
    indices: Tensor, batch_size: int | None = None, spatial_shape: Sequence[int] | None = None
) -> Coordinates:
    """The voxels of (N, 1 + d) indices in a box; those of before while nothing was written."""
    box: Box = batch_size, None if spatial_shape is None else tuple(spatial_shape)
    kept = _kept_of(indices)
    known = None if kept is None or kept.box != box else kept.coordinates_for(indices)
    if known is not None:
        return known
    found = Coordinates(indices, spatial_shape, batch_size)
    _kept[indices] = _Kept(_version(indices), box, weakref.ref(found))
    return found


def rows_of(coordinates: Coordinates) -> Tensor:
    """A copy of the voxels as indices, whose `voxels_of` are these until they are written to.

    In a record with room for other voxels nobody may read them.
    """
    with torch.inference_mode(False):  # a tensor that counts its versions
        if coordinates.num_unpadded is None:
            indices = coordinates.rows.clone()
        else:
            indices = coordinates.stored_rows.as_subclass(_RowsWithPadding)
    box = coordinates.given_batch_size, coordinates.given_shape
    _kept[indices] = _Kept(_version(indices), box, weakref.ref(coordinates))
    return indices


def are_rows_of(coordinates: Coordinates, indices: Tensor) -> bool:
    """Whether indices are these voxels, row by row; the host waits unless it knows."""
    kept = _kept_of(indices)
    if kept is not None and kept.weak() is coordinates:
        return kept.holds(coordinates, indices)
    return same_rows(coordinates.rows, indices)


def same_rows(a: Tensor, b: Tensor) -> bool:
    """Whether tensors hold the same rows; the host waits unless they are one object."""
    return a is b or (a.shape == b.shape and a.device == b.device and bool((a == b).all()))


def register_tree(
    kind: type[T], made: Callable[[SparseTensor, Any], T], context: Callable[[T], Any]
) -> None:
    """Register tensors of a library as pytrees over the SparseTensor that shares their maps.

    `torchweft.capture` then takes them as arguments and results.

    Args:
        kind: their class.
        made: builds a tensor from a SparseTensor and a context.
        context: what else a tensor consists of; raises where it is more than can be made again.
    """

    def flatten(tensor: T) -> tuple[list[SparseTensor], Any]:
        return [tensor.__voxels__()], context(tensor)

    def flatten_with_keys(tensor: T) -> tuple[list[tuple[Any, Any]], Any]:
        (found,), rest = flatten(tensor)
        return [(private.GetAttrKey("sparse"), found)], rest

    def unflatten(children: Iterable[Any], rest: Any) -> T:
        (tensor,) = children
        return made(tensor, rest)

    name = f"{kind.__module__}.{kind.__qualname__}"
    private.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=name,
        flatten_with_keys_fn=flatten_with_keys,
    )


def _kept_of(indices: Tensor) -> _Kept | None:
    found: _Kept | None = _kept.get(indices)  # type: ignore[no-untyped-call]
    return found


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
