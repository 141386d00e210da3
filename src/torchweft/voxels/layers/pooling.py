"""Pools over the active voxels of a window or of a sample, and nearest upsampling.

    max      y[o] = max_k x[in(o, k)]
    avg      y[o] = Σ_k x[in(o, k)] / (number of k whose in(o, k) exists)
    global   y[b] = max, mean or sum over the voxels of sample b
    up       y[q·s + j] = x[q],  0 ≤ j < s

Only existing voxels count: a mean divides by their number.  Windows and outputs are those of a
strided convolution.

Pools of samples, norms and voxelization use sums over segments of rows:

    together   y[m] = Σ_(r: owner[r] = m) x[r]        apart   y[r] = x[owner[r]]

Each is the gradient of the other, so gradients of any order exist.  Rows are summed in a given
order, in pieces of at most ROWS_PER_PIECE, then pieces of pieces: no atomics, and no program walks
a long segment.  Sizes follow from the numbers of rows and segments, so that the host never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchweft.core import collectives
from torchweft.core.operators.operator import LIBRARY, Call, Operator
from torchweft.core.tables import indptr_of
from torchweft.errors import ShapeError
from torchweft.voxels.grid import Size
from torchweft.voxels.layers.module import SparseModule
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

ROWS_PER_PIECE = 64
"""Most consecutive rows that one program adds."""


def sparse_max_pool(
    tensor: SparseTensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    *,
    outputs: str = "torch",
) -> SparseTensor:
    """y[o] = max_k x[in(o, k)] over the active voxels of each window.

    Args:
        tensor: the voxels and their features.
        kernel_size: one number for all axes, or one for each.
        stride: None: the kernel size.
        padding: as in torch.
        dilation: the distance of neighbouring window positions.
        outputs: "torch" writes every voxel whose window contains a voxel; "floor" ⌊c / stride⌋ of
            every voxel c, with centred windows, see `sparse_conv`.

    Returns:
        The output voxels; 0 where a "floor" window contains no voxel.  NaN is larger than every
        number.

    Raises:
        ShapeError, DTypeError: arguments that define no window.

    Gradient: to the largest; of equals, to the one at the first position of the window.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> x = voxels.SparseTensor(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 4], [0, 7]]))
        >>> voxels.sparse_max_pool(x, kernel_size=4).F  # windows 4 to 7
        tensor([[3.]])
    """
    found = _windows(tensor, kernel_size, stride, padding, dilation, outputs)
    y = max_over(found.rows(tensor.feats), found.sources, found.targets)
    return SparseTensor.on(y, found.outputs, tensor.maps)


def sparse_avg_pool(
    tensor: SparseTensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    *,
    outputs: str = "torch",
) -> SparseTensor:
    """y[o] = Σ_k x[in(o, k)] / (number of active voxels in the window).

    Args:
        tensor: the voxels and their features.
        kernel_size: one number for all axes, or one for each.
        stride: None: the kernel size.
        padding: as in torch.
        dilation: the distance of neighbouring window positions.
        outputs: "torch" or "floor", see `sparse_max_pool`.

    Returns:
        The output voxels; 0 where a "floor" window contains no voxel.

    Raises:
        ShapeError, DTypeError: arguments that define no window.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> x = voxels.SparseTensor(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 4], [0, 7]]))
        >>> voxels.sparse_avg_pool(x, kernel_size=4).F  # windows 4 to 7
        tensor([[2.]])
    """
    found = _windows(tensor, kernel_size, stride, padding, dilation, outputs)
    total = sum_over(wide(found.rows(tensor.feats)), found.sources, found.targets)
    count = (found.sources >= 0).sum(0).clamp(min=1).unsqueeze(1)  # a window may be empty
    return SparseTensor.on((total / count).to(tensor.dtype), found.outputs, tensor.maps)


def sparse_upsample(tensor: SparseTensor, scale: Size) -> SparseTensor:
    """y[q·s + j] = x[q], 0 ≤ j < s: nearest upsampling, every voxel becomes a block of Π s voxels.

    Args:
        tensor: the voxels and their features.
        scale: s, one number for all axes, or one for each.

    Returns:
        The voxels of the blocks, ascending.

    Raises:
        ShapeError, DTypeError: a scale that is no positive integer.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> x = voxels.SparseTensor(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 4], [0, 7]]))
        >>> voxels.sparse_upsample(x, 2).C[:, 1]
        tensor([ 8,  9, 14, 15], dtype=torch.int32)
    """
    check_sparse(tensor)
    found = kernel_map(tensor, scale, scale, submanifold=False, transposed=True)
    source = found.sources.amax(0, keepdim=True)  # blocks do not overlap: one row each
    y = sum_over(found.rows(tensor.feats), source, found.targets)
    return SparseTensor.on(y, found.outputs, tensor.maps)


def global_pool(tensor: SparseTensor, reduce: str = "mean") -> Tensor:
    """Maximum, mean or sum over the voxels of each sample; 0 for a sample without voxels.

    Args:
        tensor: the voxels and their features.
        reduce: "max", "mean" or "sum".

    Returns:
        (batch, C) in the tensor's dtype.  Of voxels that are spread over ranks, every rank has a
        copy of the result of all.  A loss of the copies is one value: where every rank calls
        backward on it, each voxel gets its gradient once, and parameters behind the pool get their
        whole gradient on every rank, so do not add these up.  Where copies go into features of
        voxels again, as in squeeze-and-excitation, each rank has a part of their gradient:
        `pooled.register_hook(torchweft.distributed.total)` adds them, for first gradients.

    Raises:
        ShapeError: another reduce.
        DTypeError: an argument that is no SparseTensor.

    Gradient of the maximum: to the first largest in ascending order of the voxels.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> x = voxels.SparseTensor(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 4], [0, 7]]))
        >>> voxels.global_pool(x, "sum")
        tensor([[4.]])
    """
    _check_reduce(reduce)
    check_sparse(tensor)
    samples, shards = samples_of(tensor), tensor.coordinates.shards
    if reduce == "max":
        return largest(tensor.feats, *samples) if shards is None else _largest_of_ranks(tensor)
    rows = together(wide(tensor.feats), *samples)
    count = lengths(*samples)
    if shards is not None:
        rows, count = (collectives.total(t, shards.group) for t in (rows, count))
    if reduce == "mean":
        rows = rows / count.clamp(min=1).unsqueeze(1)
    return rows.to(tensor.dtype)


def _largest_of_ranks(tensor: SparseTensor) -> Tensor:
    """(batch, C): the maxima of the samples over all ranks, a copy on each."""
    x, (owner, order, size) = tensor.feats, samples_of(tensor)
    chosen = first_largest(x, owner, order, size)
    row, channel = chosen.nonzero().unbind(1)
    sample = owner.long()[row]
    found = x.new_full((size, x.shape[1], tensor.dim + 2), torch.inf, dtype=torch.float64)
    found[..., 0] = -torch.inf  # of a sample without voxels here
    found[sample, channel, 0] = x.detach()[row, channel].double()
    found[sample, channel, 1:] = tensor.coordinates.rows[row].double()
    assert tensor.coordinates.shards is not None
    group = tensor.coordinates.shards.group
    rank, ranks = collectives.world(group)
    every = collectives.exchange(found.repeat(ranks, 1, 1), [size] * ranks, [size] * ranks, group)
    best = _first_of(every.view(ranks, *found.shape)) == rank
    own = together(torch.where(chosen, x, 0), owner, order, size)
    return collectives.total(torch.where(best, own, 0), group)


def _first_of(every: Tensor) -> Tensor:
    """(batch, C): the rank with the largest value, of equals the one whose voxel is first.

    Args:
        every: (ranks, batch, C, 1 + columns): a value, and where it stands.
    """
    value, where = every[..., :1], every[..., 1:]
    numbers = value.nan_to_num(0.0, torch.inf, -torch.inf)
    keys = torch.cat([~value.isnan(), -numbers, where], -1)
    best, found = keys[0], torch.zeros(keys.shape[1:-1], dtype=torch.int64, device=keys.device)
    for rank, other in enumerate(keys[1:], 1):
        place = (other != best).int().argmax(-1, keepdim=True)  # the first key that differs
        before = (other < best).gather(-1, place)
        best = torch.where(before, other, best)
        found = torch.where(before.squeeze(-1), rank, found)
    return found


class SparseMaxPool(SparseModule):
    """y[o] = max_k x[in(o, k)] over the active voxels of a window: `sparse_max_pool` as a module.

    Args:
        kernel_size: one number for all axes, or one for each.
        stride: None: the kernel size.
        padding: as in torch.
        dilation: the distance of neighbouring window positions.
        outputs: "torch" or "floor", see `sparse_max_pool`.
        backend: "torch" or None, which are the same; another raises BackendError.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> x = voxels.SparseTensor(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 4], [0, 7]]))
        >>> voxels.SparseMaxPool(4)(x).F
        tensor([[3.]])
    """

    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        *,
        outputs: str = "torch",
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self._use_torch(backend)
        self.kernel_size, self.stride = kernel_size, stride
        self.padding, self.dilation, self.outputs = padding, dilation, outputs

    def forward(self, tensor: SparseTensor) -> SparseTensor:
        """The pooled tensor."""
        self.check(tensor)
        return sparse_max_pool(tensor, *self._window(), outputs=self.outputs)

    def _window(self) -> tuple[Size, Size | None, Size, Size]:
        return self.kernel_size, self.stride, self.padding, self.dilation

    def extra_repr(self) -> str:
        """The window."""
        stride = self.kernel_size if self.stride is None else self.stride
        rule = f", outputs={self.outputs!r}" if self.outputs != "torch" else ""
        return (
            f"kernel_size={self.kernel_size}, stride={stride}, padding={self.padding}, "
            f"dilation={self.dilation}{rule}"
        )


class SparseAvgPool(SparseMaxPool):
    """y[o] = Σ_k x[in(o, k)] / (active voxels in the window): `sparse_avg_pool` as a module.

    Args:
        kernel_size: one number for all axes, or one for each.
        stride: None: the kernel size.
        padding: as in torch.
        dilation: the distance of neighbouring window positions.
        outputs: "torch" or "floor", see `sparse_max_pool`.
        backend: "torch" or None, which are the same; another raises BackendError.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> x = voxels.SparseTensor(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 4], [0, 7]]))
        >>> voxels.SparseAvgPool(4)(x).F
        tensor([[2.]])
    """

    def forward(self, tensor: SparseTensor) -> SparseTensor:
        """The pooled tensor."""
        self.check(tensor)
        return sparse_avg_pool(tensor, *self._window(), outputs=self.outputs)


class GlobalPool(SparseModule):
    """Maximum, mean or sum over the voxels of each sample, (batch, C): `global_pool` as a module.

    Args:
        reduce: "max", "mean" or "sum".
        backend: "torch" or None, which are the same; another raises BackendError.

    Raises:
        ShapeError: another reduce.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> x = voxels.SparseTensor(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 4], [0, 7]]))
        >>> voxels.GlobalPool("max")(x)
        tensor([[3.]])
    """

    def __init__(self, reduce: str = "mean", *, backend: str | None = None) -> None:
        super().__init__()
        self._use_torch(backend)
        _check_reduce(reduce)
        self.reduce = reduce

    def forward(self, tensor: SparseTensor) -> Tensor:
        """A dense tensor, one row per sample."""
        self.check(tensor)
        return global_pool(tensor, self.reduce)

    def extra_repr(self) -> str:
        """The reduction."""
        return f"reduce={self.reduce!r}"


class SparseUpsample(SparseModule):
    """y[q·s + j] = x[q], 0 ≤ j < s: nearest upsampling, `sparse_upsample` as a module.

    Args:
        scale: s, one number for all axes, or one for each.
        backend: "torch" or None, which are the same; another raises BackendError.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> x = voxels.SparseTensor(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 4], [0, 7]]))
        >>> len(voxels.SparseUpsample(2)(x))
        4
    """

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


def wide(x: Tensor) -> Tensor:
    """In the dtype of sums, so that a mean is rounded once."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _windows(
    tensor: SparseTensor,
    kernel_size: Size,
    stride: Size | None,
    padding: Size,
    dilation: Size,
    outputs: str,
) -> KernelMap:
    check_sparse(tensor)
    window = kernel_size, kernel_size if stride is None else stride, padding, dilation
    return kernel_map(tensor, *window, submanifold=False, outputs=outputs)


def max_over(x: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
    """y[o] = max_k x[sources[k, o]], 0 where there is none: (N_out, C); see `sum_over`."""
    choice = torch.ops.torchweft.voxels_choice(x.detach(), sources)
    return _table_op(x, sources, targets, choice, False)


def sum_over(x: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
    """y[o] = Σ_k x[sources[k, o]], in x's dtype, summed in float32 or wider: (N_out, C).

    Args:
        x: (N_in, C).
        sources: (K, N_out) int32, the input row of each output row, −1 for none.
        targets: (K, N_in) int32, the output row of each input row, −1 for none.
    """
    return _table_op(x, sources, targets, None, False)


def together(x: Tensor, owner: Tensor, order: Tensor | None, count: int) -> Tensor:
    """y[m] = Σ_(r: owner[r] = m) x[r], (count, C) in x's dtype, summed in float32 or wider.

    Args:
        x: (R, C).
        owner: (R,) integers below count, the segment of each row.
        order: (R,) the rows sorted by owner, in the order of the sums; None: rows are sorted.
        count: M, the number of segments; one without rows is 0.
    """
    return _segment_op(x, owner, order, count, True)


def apart(x: Tensor, owner: Tensor, order: Tensor | None) -> Tensor:
    """y[r] = x[owner[r]]; order is that of the gradient's sums, see `together`."""
    return _segment_op(x, owner, order, x.shape[0], False)


def largest(x: Tensor, owner: Tensor, order: Tensor | None, count: int) -> Tensor:
    """The maxima (count, C) of segments; see `together`."""
    chosen = first_largest(x, owner, order, count)
    return together(torch.where(chosen, x, 0), owner, order, count)


def first_largest(x: Tensor, owner: Tensor, order: Tensor | None, count: int) -> Tensor:
    """(R, C) bool: in each segment and channel, the first row in order that is largest.

    NaN is larger than every number.
    """
    found: Tensor = torch.ops.torchweft.voxels_first_largest(x.detach(), owner, order, count)
    return found


def lengths(owner: Tensor, order: Tensor | None, count: int) -> Tensor:
    """(M,) the number of rows of each segment."""
    owner = owner if order is None else owner.index_select(0, order)
    return indptr_of(owner.contiguous(), count).diff()


def samples_of(tensor: SparseTensor) -> tuple[Tensor, Tensor | None, int]:
    """(owner, order, count): the samples of a batch as segments, voxels ascending in each."""
    coordinates = tensor.coordinates
    return coordinates.rows[:, 0], coordinates.order, coordinates.batch_size


def walks_rows(device: str) -> bool:
    """Whether index_add_ on a device adds rows in order; it is then the faster way to sum."""
    return device == "cpu"


def _fold_channels(x: Tensor, in_dim: int | None, size: int) -> Tensor:
    """A mapped (…, R, C) as (R, size · C), for operations that treat all channels alike."""
    return x.repeat(1, size) if in_dim is None else x.movedim(in_dim, 1).flatten(1)


def _unfold_channels(x: Tensor, size: int) -> Tensor:
    """(R, size · C) as (size, R, C)."""
    return x.view(x.shape[0], size, x.shape[1] // size).movedim(1, 0)


def _batch(call: Call, size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> Tensor:
    x, *rest = args
    return _unfold_channels(call(_fold_channels(x, in_dims[0], size), *rest), size)


def _adjoint(
    call: Call, args: Sequence[Any], grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradient of a linear operation whose last argument selects it or its adjoint."""
    _, *tables, turned = args
    return (call(grad, *tables, not turned),)


def _register_selection(
    schema: str, body: Callable[..., Tensor], fake: Callable[..., Tensor], batch: Callable[..., Any]
) -> None:
    """Register an operation that selects entries, and has no gradient.

    Args:
        schema: in torch's notation, with the operation's name.
        body: computes it on every device.
        fake: an empty result.
        batch: torch's rule of vmap.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, body, device)
    torch.library.register_fake(f"torchweft::{name}", fake, lib=LIBRARY)
    torch.library.register_vmap(f"torchweft::{name}", batch, lib=LIBRARY)


def _choice(x: Tensor, sources: Tensor) -> Tensor:
    """(N_out, C): the first position in each window that is largest, NaN above all."""
    positions, there = _position_dtype(sources), sources >= 0
    first = there.to(torch.int8).argmax(0, keepdim=True).to(positions).T
    choice = first.repeat(1, x.shape[1])
    best = x.new_full(choice.shape, -torch.inf)
    padded = pad(x, (0, 0, 0, 1), value=-torch.inf)
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
    """The outputs that meet a row at one position, and these rows.

    On a GPU, where the host would wait for their number, all outputs (None), with the row `absent`
    for those that meet none.
    """
    if not walks_rows(rows.device.type):
        return None, torch.where(rows < 0, absent, rows)
    outs = (rows >= 0).nonzero().squeeze(1)
    return outs, rows.index_select(0, outs)


def _position_dtype(sources: Tensor) -> torch.dtype:
    """Integers that count the positions of a window."""
    return torch.int16 if sources.shape[0] < 2**15 else torch.int32


def _refuse_vmap(*_: object) -> None:
    raise ShapeError(
        "sparse_max_pool was given to torch.vmap: it takes one tensor a call, since who is largest "
        "differs between them. Put the mapped dimension into the channels, or loop."
    )


_register_selection(
    "voxels_choice(Tensor x, Tensor sources) -> Tensor",
    _choice,
    lambda x, sources: x.new_empty(sources.shape[1], x.shape[1], dtype=_position_dtype(sources)),
    _refuse_vmap,
)


def _table_sum(
    x: Tensor, sources: Tensor, targets: Tensor, choice: Tensor | None, turned: bool
) -> Tensor:
    """y[o, c] = Σ_k x[sources[k, o], c]; with a choice only k = choice[o, c]; or its adjoint.

    The adjoint (turned) reads targets, and the choice of the row that it reads.  A sum runs over k
    in order, so its bits do not depend on the order of the rows.
    """
    if choice is not None and not turned:
        rows = sources.T.gather(1, choice.long()).long()
        return x.gather(0, rows.clamp(min=0)).masked_fill_(rows < 0, 0)  # a window may be empty
    table = targets if turned else sources
    total = wide(x.new_zeros(table.shape[1], x.shape[1]))
    padded = pad(x, (0, 0, 0, 1))
    chosen = None if choice is None else pad(choice, (0, 0, 0, 1))
    for k, rows in enumerate(table):
        outs, ins = _met(rows, x.shape[0])
        part = padded.index_select(0, ins)
        if chosen is not None:
            part = torch.where(chosen.index_select(0, ins) == k, part, 0)
        if outs is None:
            total += part
        else:
            total.index_add_(0, outs, wide(part))  # each output once
    return total.to(x.dtype)


def _table_fake(x: Tensor, sources: Tensor, targets: Tensor, _: Any, turned: bool) -> Tensor:
    return x.new_empty((targets if turned else sources).shape[1], x.shape[1])


def _table_batch(
    call: Call, size: int, in_dims: Sequence[int | None], args: Sequence[Any]
) -> Tensor:
    *tables, choice, turned = args
    choice = None if choice is None else choice.repeat(1, size)
    return _batch(call, size, in_dims, (*tables, choice, turned))


_table_op = Operator(
    "voxels_table_sum",
    "Tensor x, Tensor sources, Tensor targets, Tensor? choice, bool turned",
    1,
    3,
    _table_sum,
    _table_fake,
    _adjoint,
    _table_batch,
)


def _sort(x: Tensor, owner: Tensor, order: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """The rows by segment, and where each segment begins."""
    if order is not None:
        x, owner = x.index_select(0, order), owner.index_select(0, order)
    return x.contiguous(), indptr_of(owner.contiguous(), count)


def _reduce(x: Tensor, bounds: Tensor, reduce: str) -> Tensor:
    """Sums or maxima of the rows between bounds, long segments in pieces of pieces."""
    count = bounds.numel() - 1
    while -(-x.shape[0] // ROWS_PER_PIECE) + count < x.shape[0] // 2:
        edges, bounds = _pieces(bounds, x.shape[0])
        x = _segment_reduce(x, edges, reduce)
    return _segment_reduce(x, bounds, reduce)


def _pieces(bounds: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Where pieces of at most ROWS_PER_PIECE rows begin, and the first piece of each segment.

    A segment is divided from its own first row on, so that its sum does not depend on where it
    begins.  There are as many pieces as any lengths may need; those past the last are empty.
    """
    needed = (bounds.diff() + ROWS_PER_PIECE - 1) // ROWS_PER_PIECE
    first = pad(needed.cumsum(0), (1, 0))
    most = -(-rows // ROWS_PER_PIECE) + needed.numel()
    piece = torch.arange(most + 1, device=bounds.device)
    segment = torch.searchsorted(first, piece, right=True) - 1
    skipped = (piece - first.index_select(0, segment)) * ROWS_PER_PIECE
    begin = bounds.index_select(0, segment) + skipped
    return begin.clamp(max=rows), first


def _segment_reduce(x: Tensor, bounds: Tensor, reduce: str) -> Tensor:
    initial = 0 if reduce == "sum" else -torch.inf
    if x.numel() and not walks_rows(x.device.type):
        return torch.segment_reduce(x, reduce, offsets=bounds, axis=0, unsafe=True, initial=initial)
    result = x.new_full((bounds.numel() - 1, x.shape[1]), initial)
    if not x.numel():
        return result
    owner = torch.repeat_interleave(bounds.diff())
    x = x[: len(owner)]  # pieces past the last belong to no segment
    if reduce == "sum":
        return result.index_add_(0, owner, x)
    return result.scatter_reduce_(0, owner.unsqueeze(1).expand_as(x), x, "amax")


def _segment_sum(
    x: Tensor, owner: Tensor, order: Tensor | None, count: int, summed: bool
) -> Tensor:
    if not summed:
        return x.index_select(0, owner)
    return _reduce(*_sort(wide(x), owner, order, count), "sum").to(x.dtype)


_segment_op = Operator(
    "voxels_segment_sum",
    "Tensor x, Tensor owner, Tensor? order, SymInt count, bool summed",
    1,
    2,
    _segment_sum,
    lambda x, owner, _, count, summed: x.new_empty(count if summed else owner.shape[0], x.shape[1]),
    _adjoint,
    _batch,
)


def _first_largest(x: Tensor, owner: Tensor, order: Tensor | None, count: int) -> Tensor:
    rows, bounds = _sort(x, owner, order, count)
    segment = owner if order is None else owner.index_select(0, order)
    maxima = _reduce(rows, bounds, "max").index_select(0, segment)
    equal = (rows == maxima) | (rows.isnan() & maxima.isnan())
    place = torch.arange(len(rows), dtype=torch.float64, device=x.device).unsqueeze(1)
    nearest = _reduce(torch.where(equal, -place, -torch.inf), bounds, "max")
    first = nearest.index_select(0, segment) == -place
    return first if order is None else torch.empty_like(first).index_copy_(0, order.long(), first)


def _first_largest_batch(
    info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[Tensor, int]:
    return _batch(_first_largest, info.batch_size, in_dims, args), 0


_register_selection(
    "voxels_first_largest(Tensor x, Tensor owner, Tensor? order, SymInt count) -> Tensor",
    _first_largest,
    lambda x, owner, order, count: torch.empty_like(x, dtype=torch.bool),
    _first_largest_batch,
)
