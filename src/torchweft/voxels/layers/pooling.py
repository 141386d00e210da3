"""Pools over the active voxels of a window or of a sample, and nearest upsampling.

    max      y[o] = max_k x[in(o, k)]
    avg      y[o] = Σ_k x[in(o, k)] / (number of k whose in(o, k) is there)
    global   y[b] = max, mean or sum over the voxels of sample b
    up       y[q·s + j] = x[q],  0 ≤ j < s

Voxels that are not there take no part: a mean divides by the number that are.  Windows and outputs
are those of a strided convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.core.operators.operator import Call, Operator
from torchweft.errors import ShapeError
from torchweft.voxels.grid.geometry import Size
from torchweft.voxels.layers.module import SparseModule
from torchweft.voxels.layers.segments import (
    first_largest,
    fold_channels,
    lengths,
    register_selection,
    samples_of,
    together,
    unfold_channels,
    walks_rows,
)
from torchweft.voxels.maps.kernel_map import KernelMap
from torchweft.voxels.maps.tensor import SparseTensor, check_sparse, kernel_map

__all__ = [
    "GlobalPool",
    "SparseAvgPool",
    "SparseMaxPool",
    "SparseUpsample",
    "global_pool",
    "sparse_avg_pool",
    "sparse_max_pool",
    "sparse_upsample",
]


def sparse_max_pool(
    tensor: SparseTensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
) -> SparseTensor:
    """y[o] = max_k x[in(o, k)] over the voxels that are there.

    Args:
        tensor: the voxels and their features.
        kernel_size: one number for all axes, or one for each.
        stride: None is the kernel size.
        padding: as in torch.
        dilation: distance of neighbouring window places.

    Returns:
        Every output voxel whose window holds a voxel.  NaN is larger than every number.

    Gradient: to the largest; of equals, to the one at the first place of the window.
    """
    found = _windows(tensor, kernel_size, stride, padding, dilation)
    choice = torch.ops.torchweft.voxels_choice(tensor.feats.detach(), found.sources)
    y = _table_op(tensor.feats, found.sources, found.targets, choice, False)
    return SparseTensor.on(y, found.outputs, tensor.maps)


def sparse_avg_pool(
    tensor: SparseTensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
) -> SparseTensor:
    """y[o] = Σ_k x[in(o, k)] / (number of voxels in the window); see `sparse_max_pool`."""
    found = _windows(tensor, kernel_size, stride, padding, dilation)
    total = _table_op(_wide(tensor.feats), found.sources, found.targets, None, False)
    count = (found.sources >= 0).sum(0).unsqueeze(1)
    return SparseTensor.on((total / count).to(tensor.dtype), found.outputs, tensor.maps)


def sparse_upsample(tensor: SparseTensor, scale: Size) -> SparseTensor:
    """y[q·s + j] = x[q], 0 ≤ j < s: every voxel becomes a block of Π s voxels."""
    check_sparse(tensor)
    found = kernel_map(tensor, scale, scale, submanifold=False, transposed=True)
    source = found.sources.amax(0, keepdim=True)  # blocks do not overlap: one row each
    y = _table_op(tensor.feats, source, found.targets, None, False)
    return SparseTensor.on(y, found.outputs, tensor.maps)


def global_pool(tensor: SparseTensor, reduce: str = "mean") -> Tensor:
    """(batch, C): the largest, the mean or the sum over each sample's voxels; 0 for an empty one.

    Args:
        tensor: the voxels and their features.
        reduce: "max", "mean" or "sum".

    Gradient of the maximum: to the first largest in ascending order of the voxels.
    """
    _check_reduce(reduce)
    check_sparse(tensor)
    samples = samples_of(tensor)
    if reduce == "max":
        chosen = first_largest(tensor.feats, *samples)
        return together(torch.where(chosen, tensor.feats, 0), *samples)
    total = together(_wide(tensor.feats), *samples)
    if reduce == "mean":
        total = total / lengths(*samples).clamp(min=1).unsqueeze(1)
    return total.to(tensor.dtype)


class SparseMaxPool(SparseModule):
    """y[o] = max_k x[in(o, k)] over active voxels; see `sparse_max_pool` for the arguments.

    backend is "torch" or None, which are the same, as of all pools; another raises BackendError.
    """

    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self._use_torch(backend)
        self.kernel_size, self.stride = kernel_size, stride
        self.padding, self.dilation = padding, dilation

    def forward(self, tensor: SparseTensor) -> SparseTensor:
        """The pooled tensor."""
        self.check(tensor)
        return sparse_max_pool(tensor, self.kernel_size, self.stride, self.padding, self.dilation)

    def extra_repr(self) -> str:
        """The window."""
        stride = self.kernel_size if self.stride is None else self.stride
        return (
            f"kernel_size={self.kernel_size}, stride={stride}, padding={self.padding}, "
            f"dilation={self.dilation}"
        )


class SparseAvgPool(SparseMaxPool):
    """y[o] = Σ_k x[in(o, k)] / (active voxels in the window); see `sparse_avg_pool`."""

    def forward(self, tensor: SparseTensor) -> SparseTensor:
        """The pooled tensor."""
        self.check(tensor)
        return sparse_avg_pool(tensor, self.kernel_size, self.stride, self.padding, self.dilation)


class GlobalPool(SparseModule):
    """(batch, C): "max", "mean" or "sum" over each sample's voxels; see `global_pool`."""

    def __init__(self, reduce: str = "mean", *, backend: str | None = None) -> None:
        super().__init__()
        self._use_torch(backend)
        _check_reduce(reduce)
        self.reduce = reduce

    def forward(self, tensor: SparseTensor) -> Tensor:
        """A dense tensor, one row a sample."""
        self.check(tensor)
        return global_pool(tensor, self.reduce)

    def extra_repr(self) -> str:
        """What is taken over the voxels."""
        return f"reduce={self.reduce!r}"


class SparseUpsample(SparseModule):
    """y[q·s + j] = x[q], 0 ≤ j < s: nearest upsampling; see `sparse_upsample`."""

    def __init__(self, scale: Size, *, backend: str | None = None) -> None:
        super().__init__()
        self._use_torch(backend)
        self.scale = scale

    def forward(self, tensor: SparseTensor) -> SparseTensor:
        """The tensor on the finer grid."""
        self.check(tensor)
        return sparse_upsample(tensor, self.scale)

    def extra_repr(self) -> str:
        """The scale."""
        return f"scale={self.scale}"


def _check_reduce(reduce: str) -> None:
    if reduce not in ("max", "mean", "sum"):
        raise ShapeError(
            f"reduce is {reduce!r}: a global pool takes the max, mean or sum of each sample. "
            'Pass reduce="mean".'
        )


def _wide(x: Tensor) -> Tensor:
    """In the dtype of sums, so that a mean is rounded once."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _windows(
    tensor: SparseTensor, kernel_size: Size, stride: Size | None, padding: Size, dilation: Size
) -> KernelMap:
    check_sparse(tensor)
    steps = kernel_size if stride is None else stride
    return kernel_map(tensor, kernel_size, steps, padding, dilation, submanifold=False)


def _choice(x: Tensor, sources: Tensor) -> Tensor:
    """(N_out, C): the first place of each window that is largest, NaN above all."""
    places, there = _places(sources), sources >= 0
    first = there.to(torch.int8).argmax(0, keepdim=True).to(places).T
    choice = first.repeat(1, x.shape[1])
    best = x.new_full(choice.shape, -torch.inf)
    padded = torch.cat([x, x.new_full((1, x.shape[1]), -torch.inf)])
    for k, rows in enumerate(sources):
        outs, ins = _met(rows, x.shape[0])
        value = padded.index_select(0, ins)
        before = best if outs is None else best.index_select(0, outs)
        larger = (value > before) | (value.isnan() & ~before.isnan())
        value = torch.where(larger, value, before)
        if outs is None:
            best, choice = value, torch.where(larger, k, choice)
        else:
            best.index_copy_(0, outs, value)
            choice.index_copy_(0, outs, torch.where(larger, k, choice.index_select(0, outs)))
    return choice


def _met(rows: Tensor, absent: int) -> tuple[Tensor | None, Tensor]:
    """The outputs that meet a row at one place, and these rows.

    A device that would have to be waited for takes all outputs (None), some with the row `absent`.
    """
    if not walks_rows(rows.device.type):
        return None, torch.where(rows < 0, absent, rows)
    outs = (rows >= 0).nonzero().squeeze(1)
    return outs, rows.index_select(0, outs)


def _places(sources: Tensor) -> torch.dtype:
    """Integers that count the places of a window."""
    return torch.int16 if sources.shape[0] < 2**15 else torch.int32


def _refuse_vmap(*_: object) -> None:
    raise ShapeError(
        "sparse_max_pool was given to torch.vmap: it takes one tensor a call, since who is largest "
        "differs between them. Put the mapped dimension into the channels, or loop."
    )


register_selection(
    "voxels_choice(Tensor x, Tensor sources) -> Tensor",
    _choice,
    lambda x, sources: x.new_empty(sources.shape[1], x.shape[1], dtype=_places(sources)),
    _refuse_vmap,
)


def _table_sum(
    x: Tensor, sources: Tensor, targets: Tensor, choice: Tensor | None, turned: bool
) -> Tensor:
    """y[o, c] = Σ_k x[sources[k, o], c]; with a choice only k = choice[o, c]; or its adjoint.

    The adjoint (turned) reads targets instead, and the choice of the row that it reads.  A sum runs
    over k in order, so its bits do not depend on the order of the rows.
    """
    if choice is not None and not turned:
        return x.gather(0, sources.T.gather(1, choice.long()).long())
    table = targets if turned else sources
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.new_zeros(table.shape[1], x.shape[1], dtype=wide)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 1))
    chosen = None if choice is None else torch.nn.functional.pad(choice, (0, 0, 0, 1))
    for k, rows in enumerate(table):
        outs, ins = _met(rows, x.shape[0])
        part = padded.index_select(0, ins)
        if chosen is not None:
            part = torch.where(chosen.index_select(0, ins) == k, part, 0)
        if outs is None:
            total += part
        else:
            total.index_add_(0, outs, part.to(wide))  # each output once
    return total.to(x.dtype)


def _table_fake(
    x: Tensor, sources: Tensor, targets: Tensor, choice: Tensor | None, turned: bool
) -> Tensor:
    return x.new_empty((targets if turned else sources).shape[1], x.shape[1])


def _table_gradients(
    call: Call, args: Sequence[Any], grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    _, sources, targets, choice, turned = args
    return (call(grad, sources, targets, choice, not turned),)


def _table_batch(
    call: Call, size: int, in_dims: Sequence[int | None], args: Sequence[Any]
) -> Tensor:
    x, sources, targets, choice, turned = args
    choice = None if choice is None else choice.repeat(1, size)
    folded = fold_channels(x, in_dims[0], size)
    return unfold_channels(call(folded, sources, targets, choice, turned), size)


_table_op = Operator(
    "voxels_table_sum",
    "Tensor x, Tensor sources, Tensor targets, Tensor? choice, bool turned",
    1,
    3,
    _table_sum,
    _table_fake,
    _table_gradients,
    _table_batch,
)
