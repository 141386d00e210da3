"""Dense conversion, pruning, unions, sums and stacks of tensors, with MinkowskiEngine's names."""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor as Dense
from torch import nn

from torchweft.compat.MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from torchweft.compat.MinkowskiEngine.MinkowskiCoordinateManager import CoordinateMapKey
from torchweft.compat.MinkowskiEngine.MinkowskiSparseTensor import (
    SparseTensor,
    TensorField,
    interpolated,
)
from torchweft.compat.MinkowskiEngine.MinkowskiTensor import Tensor
from torchweft.errors import DTypeError, ShapeError

__all__ = [
    "MinkowskiInterpolation",
    "MinkowskiLinear",
    "MinkowskiNetwork",
    "MinkowskiPruning",
    "MinkowskiStackCat",
    "MinkowskiStackMean",
    "MinkowskiStackSum",
    "MinkowskiStackVar",
    "MinkowskiToDenseTensor",
    "MinkowskiToFeature",
    "MinkowskiToSparseTensor",
    "MinkowskiUnion",
    "cat",
    "dense_coordinates",
    "mean",
    "sum",
    "to_sparse",
    "to_sparse_all",
    "var",
]


class MinkowskiNetwork(nn.Module, abc.ABC):
    """The base class of networks of D axes."""

    def __init__(self, D: int) -> None:  # noqa: N803 - the original's name
        super().__init__()
        self.D = D

    @abc.abstractmethod
    def forward(self, x: Any) -> Any:
        """Of the network."""


class MinkowskiLinear(nn.Module):
    """torch's Linear `linear` on features."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias)

    def forward(self, input: Tensor) -> Tensor:
        """On the same rows."""
        return input.with_features(self.linear(input.F))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.linear.extra_repr()})"


class MinkowskiPruning(MinkowskiModuleBase):
    """The voxels where a mask is True, with their features."""

    def forward(self, input: SparseTensor, mask: Dense) -> SparseTensor:
        """On fewer voxels of the same tensor stride, in the same order.

        Args:
            input: (N, C).
            mask: (N,) bool on the tensor's device.

        Raises:
            DTypeError, ShapeError: another mask.
        """
        if mask.dtype != torch.bool:
            raise DTypeError(
                f"mask is {mask.dtype}: it must be torch.bool, True where a voxel stays. Pass "
                "scores > 0, say."
            )
        if mask.numel() != len(input):
            raise ShapeError(
                f"mask is {tuple(mask.shape)} but the tensor has {len(input)} voxels: it must be "
                f"({len(input)},). Pass one truth value a voxel."
            )
        mask, manager = mask.flatten(), input.coordinate_manager
        key = manager.prune(input.coordinate_map_key, mask)
        features = input.F.index_select(0, mask.nonzero().squeeze(1))
        return SparseTensor(features, coordinate_map_key=key, coordinate_manager=manager)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class MinkowskiUnion(nn.Module):
    """The sum of tensors on every voxel that one of them has."""

    def forward(self, *inputs: SparseTensor) -> SparseTensor:
        """On the union of the voxels, at the least tensor stride.

        Raises:
            ShapeError: fewer than two tensors, or those of two managers.
        """
        if len(inputs) < 2:
            raise ShapeError(
                f"MinkowskiUnion was given {len(inputs)} tensors: it needs two or more. Pass "
                "union(a, b)."
            )
        first, key = inputs[0], CoordinateMapKey(1 + inputs[0].D)
        for other in inputs[1:]:
            first.check_manager(other, "MinkowskiUnion")
        manager = first.coordinate_manager
        maps = manager.union_map([t.coordinate_map_key for t in inputs], key)
        total = first.F.new_zeros(manager.size(key), first.shape[1])
        for tensor, (_, rows) in zip(inputs, maps, strict=True):
            total = total.index_add(0, rows, tensor.F)  # each voxel once
        return SparseTensor(total, coordinate_map_key=key, coordinate_manager=manager)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class MinkowskiInterpolation(MinkowskiModuleBase):
    """Features between voxels; see `SparseTensor.features_at_coordinates`.

    Args:
        return_kernel_map: whether the rows of voxels and points that meet are returned too.
        return_weights: whether their weights are.
    """

    def __init__(self, return_kernel_map: bool = False, return_weights: bool = False) -> None:
        super().__init__()
        self.return_kernel_map, self.return_weights = return_kernel_map, return_weights

    def forward(self, input: SparseTensor, tfield: Dense) -> Any:
        """(P, C) at the points (P, 1 + D), and what else was asked for."""
        key = input.coordinate_map_key
        found = input.coordinate_manager.interpolation_map_weight(key, tfield)
        results: list[Any] = [interpolated(input.F, *found, len(tfield))]
        results += [found[:2]] if self.return_kernel_map else []
        results += [found[2]] if self.return_weights else []
        return results[0] if len(results) == 1 else tuple(results)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _joined(tensors: tuple[Any, ...], name: str, join: Callable[[list[Dense]], Dense]) -> Any:
    """A function of the features of tensors with one key; they may be given as one list."""
    listed: Sequence[Tensor] = tensors[0] if len(tensors) == 1 else tensors
    if isinstance(listed, Tensor) or len(listed) < 2:
        raise ShapeError(
            f"{name} was given {1 if isinstance(listed, Tensor) else len(listed)} tensor: it needs "
            f"two or more. Pass {name}(a, b), or a list."
        )
    first = listed[0]
    return first.with_features(join([first.F, *(first._same_rows(t, name) for t in listed[1:])]))


def cat(*sparse_tensors: Any) -> Any:
    """The channels of tensors with one key, concatenated."""
    return _joined(sparse_tensors, "cat", functools.partial(torch.cat, dim=-1))


def sum(*sparse_tensors: Any) -> Any:
    """The sum of tensors with one key; others are added by `a + b` or MinkowskiUnion."""
    return _joined(sparse_tensors, "sum", functools.partial(functools.reduce, operator.add))


def mean(*sparse_tensors: Any) -> Any:
    """The mean of tensors with one key."""
    return _joined(sparse_tensors, "mean", lambda parts: torch.stack(parts).mean(0))


def var(*sparse_tensors: Any) -> Any:
    """The variance of tensors with one key: the mean of squares about the mean."""
    return _joined(sparse_tensors, "var", lambda p: torch.stack(p).var(0, correction=0))


def dense_coordinates(shape: Sequence[int]) -> Dense:
    """(N, 1 + D) int32: all places of (batch, C, *lengths), the last axis fastest."""
    if len(shape) < 3:
        raise ShapeError(
            f"shape is {tuple(shape)}: it must be (batch, C, x0, …). Pass dense.shape."
        )
    return torch.cartesian_prod(*(torch.arange(n) for n in (shape[0], *shape[2:]))).int()


def to_sparse(
    x: Dense,
    format: str | None = None,
    coordinates: Dense | None = None,
    device: torch.device | str | None = None,
) -> SparseTensor:
    """The voxels of a dense tensor where some channel is not 0.

    Args:
        x: (batch, C, *lengths), or as format says.
        format: the axes: B first, one C, and X for each length; None: BCX….
        coordinates: has no effect, as in the original.
        device: of the result.
    """
    axes = "BC" + "X" * (x.dim() - 2) if format is None else format
    if x.dim() < 3 or len(axes) != x.dim() or axes[0] != "B" or axes[1:].count("C") != 1:
        raise ShapeError(
            f"x is {tuple(x.shape)} and format {axes!r}: B first, one C, and an X for each other "
            "axis are needed. Pass format='BXXC' for images, say."
        )
    last = x.movedim(axes.index("C"), -1)
    places = (last != 0).any(-1).nonzero()
    return SparseTensor(last[tuple(places.T)], places.int(), device=device)


def to_sparse_all(dense_tensor: Dense, coordinates: Dense | None = None) -> SparseTensor:
    """All places of (batch, C, *lengths), zeros too; see `dense_coordinates`."""
    if coordinates is None:
        coordinates = dense_coordinates(dense_tensor.shape)
    features = dense_tensor.movedim(1, -1).flatten(0, -2)
    return SparseTensor(features, coordinates, device=dense_tensor.device)


class MinkowskiToSparseTensor(MinkowskiModuleBase):
    """`field.sparse()`, or a dense tensor (batch, C, *lengths) as a SparseTensor.

    Args:
        remove_zeros: with coordinates, only the places that are not 0; without, all places, as the
            original does.
        coordinates: of the places, computed once by `dense_coordinates`.
    """

    def __init__(self, remove_zeros: bool = True, coordinates: Dense | None = None) -> None:
        super().__init__()
        self.remove_zeros, self.coordinates = remove_zeros, coordinates

    def forward(self, input: TensorField | Dense) -> SparseTensor:
        """The sparse tensor."""
        if isinstance(input, TensorField):
            return input.sparse()
        if self.remove_zeros and self.coordinates is not None:
            return to_sparse(input)
        return to_sparse_all(input, self.coordinates)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class MinkowskiToDenseTensor(MinkowskiModuleBase):
    """(batch, C, *lengths); see `SparseTensor.dense`.

    Args:
        shape: of the result; None: what the voxels need.
    """

    def __init__(self, shape: torch.Size | None = None) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, input: SparseTensor) -> Dense:
        """The dense tensor."""
        return input.dense(self.shape)[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class MinkowskiToFeature(MinkowskiModuleBase):
    """The features, as torch's tensor."""

    def forward(self, x: Tensor) -> Dense:
        """(N, C)."""
        return x.F


class _Stack(nn.Sequential):
    join: Callable[..., Any]

    def forward(self, x: Tensor) -> Any:
        """The results of all modules on one input, joined."""
        return type(self).join([module(x) for module in self])


class MinkowskiStackCat(_Stack):
    """`cat` of the results of modules on one input."""

    join = staticmethod(cat)


class MinkowskiStackSum(_Stack):
    """`sum` of the results of modules on one input."""

    join = staticmethod(sum)


class MinkowskiStackMean(_Stack):
    """`mean` of the results of modules on one input."""

    join = staticmethod(mean)


class MinkowskiStackVar(_Stack):
    """`var` of the results of modules on one input."""

    join = staticmethod(var)
