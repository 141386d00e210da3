"""SparseTensor: features on distinct voxels, with the kernel maps of these voxels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from torchweft.core.operators.operands import check_tensors
from torchweft.core.operators.operator import compiling, outside_graphs
from torchweft.errors import DeviceError, DTypeError, ShapeError
from torchweft.voxels.grid import Size, axes_of, geometry
from torchweft.voxels.maps import operator as _operator  # noqa: F401 - registers the operators
from torchweft.voxels.maps.checks import check_same_device
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.maps.kernel_map import KernelMap, Maps, given_outputs, mode_of
from torchweft.voxels.maps.shards import refuse

__all__ = ["SparseTensor", "cat", "check_sparse", "kernel_map", "sparse_collate", "union"]


class SparseTensor:
    """Features of the active voxels of a batch of grids: feats[n] belongs to voxel coords[n].

    All other voxels are 0.  The spatial columns of coords, `spatial_shape` and the axes of kernels
    have the same order, so that `dense()` is (batch, C, *spatial_shape) and every layer is torch's
    convolution on it.  The order of the rows has no meaning.  `F` is feats, and `C` a copy of the
    coordinates, int32.

    Args:
        feats: (N, C) floating-point features.
        coords: (N, 1 + d) integers (batch, s0, s1, …), d = 1 to 4, distinct, on the device of
            feats. They are copied: later changes of coords have no effect on the tensor.
        spatial_shape: d lengths in voxels; None: the box [0, max + 1), computed when first needed.
            Submanifold layers and maps then accept negative coordinates.
        batch_size: number of samples; None: the largest batch number + 1.
        stride: the number of voxels of the finest level that one voxel spans.

    Raises:
        ShapeError, DTypeError, DeviceError: feats and coords that do not fit each other; a voxel
            that occurs twice, at the latest for the first map, `dense()` or `union`.
        IndexRangeError: a negative batch number, a voxel outside of spatial_shape.  On a GPU, with
            spatial_shape and batch_size given, it is raised by the first access to a map, `C` or
            `dense()`: the host does not wait before.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4], [1, 0, 0, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8, 8, 8))
        >>> x
        SparseTensor(3 voxels, 4 channels, d=3, torch.float32, on cpu)
        >>> x.dense().shape
        torch.Size([2, 4, 8, 8, 8])
    """

    def __init__(
        self,
        feats: Tensor,
        coords: Tensor,
        spatial_shape: Sequence[int] | None = None,
        batch_size: int | None = None,
        stride: int | Sequence[int] = 1,
    ) -> None:
        check_tensors(feats=feats, coords=coords)
        dim = coords.shape[-1] - 1 if coords.dim() else 0
        strides = axes_of("stride", stride, dim, least=1)
        if feats.device != coords.device:
            raise DeviceError(
                f"feats are on {feats.device}, coords on {coords.device}: both must be on one "
                "device. Move one of them with .to(device)."
            )
        self.coordinates = Coordinates(coords, spatial_shape, batch_size, strides)
        _check_feats(feats, self.coordinates)
        self.feats, self.maps = feats, Maps()

    @classmethod
    def on(cls, feats: Tensor, coordinates: Coordinates, maps: Maps) -> SparseTensor:
        """Features on given voxels, with the maps that tensors on them share."""
        _check_feats(feats, coordinates)
        found = cls.__new__(cls)
        found.feats, found.coordinates, found.maps = feats, coordinates, maps
        return found

    @classmethod
    def from_dense(cls, dense: Tensor) -> SparseTensor:
        """The voxels of a dense tensor where some channel is not 0; NaN counts as not 0.

        Args:
            dense: (batch, C, *spatial_shape), 1 to 4 spatial axes.

        Returns:
            A tensor with that spatial_shape and batch size.

        Raises:
            ShapeError: another number of dimensions.
        """
        check_tensors(dense=dense)
        if not 3 <= dense.dim() <= 6:
            raise ShapeError(
                f"dense is {tuple(dense.shape)}: it must be (batch, C, s0, …) with 1 to 4 axes. "
                "Add the missing dimensions with unsqueeze."
            )
        coords = (dense != 0).any(1).nonzero()
        feats = dense.movedim(1, -1)[tuple(coords.T)]
        return cls(feats, coords, tuple(dense.shape[2:]), dense.shape[0])

    @property
    def F(self) -> Tensor:  # noqa: N802 - the field's name
        """The features."""
        return self.feats

    @property
    def C(self) -> Tensor:  # noqa: N802 - the field's name
        """The coordinates, (N, 1 + d) int32, as a copy.

        The voxels of a tensor do not change.  Build another for other voxels: `c = x.C`, write to
        c, `SparseTensor(x.F, c)`.
        """
        return self.coordinates.rows.clone()

    @property
    def dim(self) -> int:
        """Number of spatial axes."""
        return self.coordinates.dim

    @property
    def spatial_shape(self) -> tuple[int, ...]:
        """The box of the voxels."""
        return self.coordinates.spatial_shape

    @property
    def batch_size(self) -> int:
        """Number of samples, including empty ones."""
        return self.coordinates.batch_size

    @property
    def stride(self) -> tuple[int, ...]:
        """Voxels of the finest level that one voxel spans, by axis."""
        return self.coordinates.stride

    @property
    def device(self) -> torch.device:
        """The device of features and coordinates."""
        return self.feats.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the features."""
        return self.feats.dtype

    def __len__(self) -> int:
        return len(self.coordinates)

    def __repr__(self) -> str:
        return (
            f"SparseTensor({len(self)} voxels, {self.feats.shape[1]} channels, d={self.dim}, "
            f"{self.dtype}, on {self.device})"
        )

    def replace(self, feats: Tensor) -> SparseTensor:
        """The same voxels with other features; coordinates and maps are shared.

        Args:
            feats: (N, C′), in the order of the rows.

        Returns:
            A SparseTensor.
        """
        return SparseTensor.on(feats, self.coordinates, self.maps)

    def to(self, *args: Any, **kwargs: Any) -> SparseTensor:
        """The tensor on another device, or with features of another dtype.

        Args:
            *args: as those of `torch.Tensor.to`.
            **kwargs: as those of `torch.Tensor.to`.

        Returns:
            A SparseTensor; on another device its maps are built anew.
        """
        feats = self.feats.to(*args, **kwargs)
        if feats.device == self.device:
            return self.replace(feats)
        return SparseTensor.on(feats, self.coordinates.to(feats.device), Maps())

    def cuda(self) -> SparseTensor:
        """On the current GPU."""
        return self.to("cuda")

    def cpu(self) -> SparseTensor:
        """On the CPU."""
        return self.to("cpu")

    def find(self, queries: Tensor) -> Tensor:
        """The row of each voxel of a list, −1 for a voxel that is not active here.

        The features of another tensor's voxels: `tensor.F[tensor.find(other.C)]` where all are
        active.

        Args:
            queries: (M, 1 + d) integers (batch, s0, …), on the tensor's device.

        Returns:
            (M,) int32.

        Raises:
            DTypeError, ShapeError, DeviceError: queries that are not so.
        """
        return self.coordinates.find(queries)

    def prune(self, mask: Tensor) -> SparseTensor:
        """The voxels where the mask is True, with their features, in the same order.

        >>> x = SparseTensor(torch.tensor([[1.0], [2.0]]), torch.tensor([[0, 4], [0, 7]]))
        >>> x.prune(x.F[:, 0] > 1).C.tolist()
        [[0, 7]]

        Box, batch size and stride stay; maps are built anew.  Gradients flow to the kept rows.

        Args:
            mask: (N,) bool, on the tensor's device.

        Raises:
            DTypeError, ShapeError, DeviceError: a mask that is not so.
        """
        check_tensors(mask=mask)
        if mask.dtype != torch.bool:
            raise DTypeError(
                f"mask is {mask.dtype}: it must be torch.bool, True where a voxel stays. Pass "
                "mask.bool(), or scores > 0."
            )
        if tuple(mask.shape) != (len(self),):
            raise ShapeError(
                f"mask is {tuple(mask.shape)} but there are {len(self)} voxels: it must be "
                f"({len(self)},). Pass one truth value a voxel, mask.squeeze(1) of a column."
            )
        check_same_device(self.device, "mask", mask.device)
        rows = mask.nonzero().squeeze(1)
        kept = self.coordinates.select(rows)
        return SparseTensor.on(self.feats.index_select(0, rows), kept, Maps())

    def dense(self) -> Tensor:
        """The dense tensor, 0 where there is no voxel; differentiable in the features.

        Returns:
            (batch, C, *spatial_shape), contiguous.

        Raises:
            IndexRangeError: no spatial_shape was given and a coordinate is negative.
            ShapeError: a voxel occurs twice, or voxels are spread over ranks.
        """
        remedy = "Take the rows of each rank, x.C and x.F."
        refuse(self.coordinates, "dense()", remedy)
        _check_distinct(self)
        grid = self.feats.new_zeros(self.batch_size, self.feats.shape[1], *self.spatial_shape)
        places = tuple(self.coordinates.rows.long().T)
        return grid.movedim(1, -1).index_put(places, self.feats).movedim(-1, 1).contiguous()

    def __add__(self, other: SparseTensor) -> SparseTensor:
        """Sums of features on the same voxels, in this tensor's order; see `cat`.

        `union` adds tensors on any voxels.
        """
        remedy = "Add tensors on different voxels with union([a, b])."
        return self.replace(self.feats + _feats_on(self, other, "+", remedy))


def kernel_map(
    tensor: SparseTensor,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    submanifold: bool = True,
    transposed: bool = False,
    *,
    outputs: str = "torch",
    coordinates: Tensor | Coordinates | None = None,
) -> KernelMap:
    """The pairs of input and output rows that meet in a layer; built once, cached with the voxels.

    Args:
        tensor: its voxels are the input.
        kernel_size: one number for all axes, or one for each; any sizes, also even ones.
        stride: 1 in a submanifold layer.
        padding: as in torch; a submanifold kernel is centred whatever it is.
        dilation: the distance of neighbouring kernel positions.
        submanifold: whether the outputs are the inputs; else every voxel that a pair reaches.
        transposed: whether the map is that of torch's transposed convolution.
        outputs: "torch" or "floor"; see `sparse_conv`.
        coordinates: the output's voxels; see `sparse_conv`.

    Returns:
        A `KernelMap`.

    Raises:
        ShapeError, DTypeError: arguments that define no layer, a voxel that occurs twice.

    Cost: one sort of the voxels, and ⌈K/2⌉ (submanifold, odd kernel) or K searches for each voxel.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> x = voxels.SparseTensor(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 4], [0, 7]]))
        >>> found = voxels.kernel_map(x, kernel_size=2, stride=2, submanifold=False)
        >>> found.outputs.rows  # the voxels that are written
        tensor([[0, 2],
                [0, 3]], dtype=torch.int32)
        >>> found.counts  # pairs of each kernel position
        tensor([1, 1])
    """
    check_sparse(tensor)
    mode = mode_of(submanifold, transposed, outputs)
    shape = geometry(tensor.dim, kernel_size, stride, padding, dilation, mode=mode)
    onto = given_outputs(tensor.coordinates, coordinates, shape)
    return tensor.maps.get(tensor.coordinates, shape, onto=onto)


def cat(tensors: Sequence[SparseTensor]) -> SparseTensor:
    """Concatenates the channels of tensors on the same voxels.

    Args:
        tensors: a list of SparseTensor on the same voxels, in any order of their rows.

    Returns:
        A tensor with (N, ΣC) features; rows, box and maps are those of the first tensor.

    Raises:
        ShapeError: tensors with other voxels, box, batch size or stride, or none.
        DTypeError: something else than SparseTensor in the list.

    Cost: tensors that come from the same layers or from `replace` share their coordinates; of
    others, the rows are matched by a search, for which the host waits.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> x = voxels.SparseTensor(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 4], [0, 7]]))
        >>> voxels.cat([x, x]).F
        tensor([[1., 1.],
                [3., 3.]])
    """
    _check_listed(tensors, "cat")
    first, *others = tensors
    remedy = "Put them on the same voxels first, with union."
    feats = [first.feats, *(_feats_on(first, other, "cat", remedy) for other in others)]
    return first.replace(torch.cat(feats, 1))


def union(tensors: Sequence[SparseTensor]) -> SparseTensor:
    """Adds tensors on any voxels: Σ of the features of each voxel that is active in one of them.

    Args:
        tensors: a list of SparseTensor of equal channels, axes and stride.

    Returns:
        A tensor whose voxels are in ascending order; box and batch size are the largest of the
        tensors'.  Sums run in the order of the list, in float32 or wider, and are rounded once.

    Raises:
        ShapeError: other channels, axes or stride, or a voxel that occurs twice in a tensor.
        DTypeError: something else than SparseTensor in the list.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> x = voxels.SparseTensor(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 4], [0, 7]]))
        >>> y = voxels.SparseTensor(torch.tensor([[10.0]]), torch.tensor([[0, 7]]))
        >>> voxels.union([x, y]).F.flatten()
        tensor([ 1., 13.])
    """
    first = _check_alike(tensors, "union", "tensors", "Resample one of them first.")
    for tensor in tensors:
        _check_distinct(tensor)
    every = torch.cat([t.coordinates.rows for t in tensors])
    rows, place = torch.unique(every, dim=0, return_inverse=True)
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    wide = torch.promote_types(dtype, torch.float32)
    total = torch.zeros(len(rows), first.feats.shape[1], dtype=wide, device=first.device)
    for tensor, own in zip(tensors, place.split([len(t) for t in tensors]), strict=True):
        total = total.index_add(0, own, tensor.feats.to(wide))  # each voxel once
    size = max(t.batch_size for t in tensors)
    if first.coordinates.shards is not None:
        return SparseTensor.on(total.to(dtype), _spread(tensors, rows.int(), size), Maps())
    return SparseTensor(total.to(dtype), rows, _largest_box(tensors), size, first.stride)


def _spread(tensors: Sequence[SparseTensor], rows: Tensor, size: int) -> Coordinates:
    """The voxels of a union on this rank, in the bounds of all ranks."""
    first = tensors[0].coordinates
    lows, highs = zip(*(t.coordinates.grid[3] for t in tensors), strict=True)
    bounds = tuple(map(min, zip(*lows, strict=True))), tuple(map(max, zip(*highs, strict=True)))
    box = _largest_box(tensors)
    shape = None if box is None else tuple(box)
    found = Coordinates.of_ascending(rows, shape, size, first.stride, bounds)
    found.shards = first.shards
    return found


def sparse_collate(samples: Sequence[SparseTensor]) -> SparseTensor:
    """Concatenates samples to a batch: batch numbers continue from one tensor to the next.

    Args:
        samples: a list of SparseTensor of equal channels, axes and stride.

    Returns:
        A tensor with all rows; its box is the largest of the samples' boxes if each was given one.

    Raises:
        ShapeError: other channels, axes or stride, or an empty list.
        DTypeError: something else than SparseTensor in the list.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> x = voxels.SparseTensor(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 4], [0, 7]]))
        >>> voxels.sparse_collate([x, x]).C
        tensor([[0, 4],
                [0, 7],
                [1, 4],
                [1, 7]], dtype=torch.int32)
    """
    first = _check_alike(samples, "sparse_collate", "samples", "Collate them apart.")
    for sample in samples:
        refuse(sample.coordinates, "sparse_collate", "Collate samples first, then shard the batch.")
    rows, start = [], 0
    for sample in samples:
        rows.append(sample.C)
        rows[-1][:, 0] += start
        start += sample.batch_size
    feats = torch.cat([s.feats for s in samples])
    return SparseTensor(feats, torch.cat(rows), _largest_box(samples), start, first.stride)


def _largest_box(tensors: Sequence[SparseTensor]) -> list[int] | None:
    """The box that contains all given boxes; None where one was not given."""
    shapes = [t.coordinates.given_shape for t in tensors]
    given = [shape for shape in shapes if shape is not None]
    return [max(n) for n in zip(*given, strict=True)] if len(given) == len(shapes) else None


def _check_listed(tensors: Sequence[SparseTensor], name: str) -> None:
    listed = isinstance(tensors, (list, tuple))
    others = (
        [type(t).__name__ for t in tensors if not isinstance(t, SparseTensor)] if listed else []
    )
    if others or not listed:
        given = f"list with a {others[0]} in it" if others else type(tensors).__name__
        raise DTypeError(
            f"{name} was given a {given}: it takes a list of "
            "torchweft.voxels.SparseTensor. Pass [a, b]."
        )
    if not tensors:
        raise ShapeError(f"{name} was given no tensor: it needs at least one. Pass a list of them.")


def _check_alike(
    tensors: Sequence[SparseTensor], name: str, called: str, remedy: str
) -> SparseTensor:
    """The first tensor; raises unless all have its device, axes, stride and channels."""
    _check_listed(tensors, name)
    first, *others = tensors
    a = first.dim, first.stride, first.feats.shape[1]
    for other in others:
        if first.device != other.device:
            raise DeviceError(
                f"{name} was given {called} on {first.device} and {other.device}: all must be on "
                "one device. Move one of them with .to(device)."
            )
        b = other.dim, other.stride, other.feats.shape[1]
        if a != b:
            raise ShapeError(
                f"{name} was given {called} of {a[0]} axes at stride {a[1]} with {a[2]} channels, "
                f"and {b[0]} at {b[1]} with {b[2]}: all must agree. {remedy}"
            )
        _check_spread(first, other, name)
    return first


@runtime_checkable
class HasVoxels(Protocol):
    """A tensor of another library's names, which keeps its voxels and so their maps."""

    def __voxels__(self) -> SparseTensor:
        """The SparseTensor that shares features, voxels and maps."""


def sparse_of(tensor: SparseTensor | HasVoxels) -> SparseTensor:
    """A SparseTensor as it is, or that of a tensor which keeps its voxels.

    Raises:
        DTypeError: it is something else.
    """
    found = tensor.__voxels__() if isinstance(tensor, HasVoxels) else tensor
    check_sparse(found)
    return found


def check_sparse(tensor: object) -> None:
    """Raise unless it is a SparseTensor.

    Raises:
        DTypeError: it is something else.
    """
    if not isinstance(tensor, SparseTensor):
        raise DTypeError(
            f"tensor is a {type(tensor).__name__}: it must be a torchweft.voxels.SparseTensor. "
            "Build SparseTensor(feats, coords), or SparseTensor.from_dense(x)."
        )


def _feats_on(first: SparseTensor, other: object, name: str, remedy: str) -> Tensor:
    """The features of a tensor on the same voxels, in the order of the first tensor's rows."""
    if not isinstance(other, SparseTensor):
        raise DTypeError(
            f"{name} was given a {type(other).__name__}: it takes a torchweft.voxels.SparseTensor. "
            "Use tensor.replace(tensor.F + other) for features alone."
        )
    if other.coordinates is first.coordinates:
        return other.feats
    _check_grids(first, other, name)
    rows = _matched(first.coordinates, other.coordinates)
    if rows is None:
        raise ShapeError(
            f"{name} was given tensors on different voxels ({len(first)} and {len(other)}): they "
            f"must have the same voxels, in any order. {remedy}"
        )
    return other.feats.index_select(0, rows)


@outside_graphs
def _matched(first: Coordinates, other: Coordinates) -> Tensor | None:
    """(N,) the row of each voxel among other coordinates; None if they are not the same voxels."""
    if len(first) != len(other):
        return None
    first.valid(first.unchecked)  # raises if a voxel occurs twice
    rows = other.find(first.rows)
    return None if bool((rows < 0).any()) else rows


def _check_grids(first: SparseTensor, other: SparseTensor, name: str) -> None:
    """Raise unless tensors are on one device and their voxels on one grid."""
    if first.device != other.device:
        raise DeviceError(
            f"{name} was given tensors on {first.device} and {other.device}: both must be on one "
            "device. Move one of them with .to(device)."
        )
    _check_spread(first, other, name)
    a, b = first.coordinates, other.coordinates
    grids = {
        "stride": (a.stride, b.stride),
        "spatial_shape": (a.given_shape, b.given_shape),
        "batch_size": (a.given_batch_size, b.given_batch_size),
    }
    for what, (one, another) in grids.items():
        if one != another and None not in (one, another):
            raise ShapeError(
                f"{name} was given tensors with {what} {one} and {another}: both must be on one "
                f"grid. Build them with the same {what}."
            )


def _check_spread(first: SparseTensor, other: SparseTensor, name: str) -> None:
    """Raise unless voxels that are spread over ranks are spread alike."""
    if first.coordinates.shards is not other.coordinates.shards:
        raise ShapeError(
            f"{name} was given tensors that are not spread over ranks alike: all must come from "
            "one call of shard_voxels. Join the tensors first, then shard the result."
        )


def _check_distinct(tensor: SparseTensor) -> None:
    """Raise if a voxel occurs twice, which is unknown while compiling."""
    if not compiling():
        tensor.coordinates.valid(tensor.coordinates.unchecked)


def _check_feats(feats: Tensor, coordinates: Coordinates) -> None:
    check_tensors(feats=feats)
    if compiling():  # a length would become a constant of an exported graph
        return
    count = len(coordinates)
    if feats.dim() != 2 or feats.shape[0] != count:
        raise ShapeError(
            f"feats are {tuple(feats.shape)} but there are {count} voxels: feats must be "
            f"({count}, C). Pass one feature row a voxel, feats[:, None] for a single channel."
        )
    if not feats.is_floating_point():
        raise DTypeError(
            f"feats are {feats.dtype}: they must be floating-point. Pass feats.float()."
        )
