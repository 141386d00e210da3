"""The Triton path of the products: which kernel, grid and tile serve a call, and its workspaces.

Three rules keep it short.  A sum over n against an operand that all n share is taken first: the
product commutes with it.  A segment too long for one program is cut into pieces and a sum over n
into parts, and either gives partial rows in fp32 (fp64 for fp64) that the rows kernel adds in
order.  What a launch depends on is read from shapes, strides and the plan, never from the GPU.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.explain import Launch, record, recording
from weft.core.launcher import Tile, launch
from weft.core.plan import Plan, Table
from weft.core.segments import SLICE, Slices, cut
from weft.products import kernels, tiles
from weft.products.forms import PRODUCTS

__all__ = ["product"]

INT32_MAX = 2**31 - 1


class _Call(NamedTuple):
    """A product after validation."""

    op: str
    x: Tensor
    y: Tensor | None
    scale: Tensor | None
    batched: tuple[bool, bool]  # whether x and y have a leading N
    batch: int | None  # N; None where neither has one
    accumulate: bool  # sum over n: then both are batched, or x alone for "scale"
    channels: tuple[int, ...]  # of a result row
    dtype: torch.dtype  # of the result

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums and partial rows."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def empty(self, rows: int, dtype: torch.dtype, lead: int | None) -> Tensor:
        """An uninitialised result of (lead,) rows."""
        shape = (rows, *self.channels) if lead is None else (lead, rows, *self.channels)
        return torch.empty(shape, dtype=dtype, device=self.x.device)


def product(
    op: str,
    first: Tensor,
    second: Tensor | None,
    scale: Tensor | None,
    plan: Plan,
    roles: str,
    accumulate: bool,
) -> Tensor:
    """z[n,m] = Σ_{e ∈ segment m} s[t] · first[n,index1[e]] ∘ second[n,index2[e]], e in the table.

    Args:
        op: a key of `PRODUCTS`.
        first: (N, R1, *dims), or (R1, *dims) shared over N; any strides.
        second: likewise; None for "scale".
        scale: (T,), in the inputs' dtype or the one of the sums; None is 1.
        plan: who meets whom.
        roles: what first, second and the result are indexed by.
        accumulate: sum over n as well.

    Returns:
        (N, rows, *dims), without N where nothing has one or it is summed over.
    """
    call = _prepare(op, first, second, scale, accumulate)
    lead = call.batch if not accumulate else None
    inner = first.shape[-1] if op in ("inner", "vecmat") else 1
    if 0 in (plan.num_entries, call.batch, inner) or 0 in (*call.channels, plan.size(roles[2])):
        return call.empty(plan.size(roles[2]), call.dtype, lead).zero_()
    if accumulate and call.batch is not None:
        call = _sum_shared_first(call)
    if op == "vecmat" and min(call.y.shape[-2:]) >= tiles.LEAST_DOT:
        return _vecmat(call, plan, roles)
    table = plan.table(roles)
    if op == "outer" and min(call.channels) >= tiles.LEAST_DOT:
        items = table.longest * (call.batch if call.accumulate else 1)
        if items >= tiles.LEAST_DOT:
            return _outer(call, table, _pieces(plan, roles, call.batch))
    return _rows(call, table, _pieces(plan, roles, call.batch))


def _prepare(op: str, x: Tensor, y: Tensor | None, scale: Tensor | None, accumulate: bool) -> _Call:
    dims = PRODUCTS[op].dims
    batched = (x.dim() == dims[0] + 2, y is not None and y.dim() == dims[1] + 2)
    batch = x.shape[0] if batched[0] else y.shape[0] if batched[1] and y is not None else None
    channels: tuple[int, ...] = (x.shape[-1],)
    if op == "inner":
        channels = ()
    elif op == "vecmat" and y is not None:
        channels = (y.shape[-1],)
    elif op == "outer" and y is not None:
        channels = (x.shape[-1], y.shape[-1])
    return _Call(op, x, y, scale, batched, batch, accumulate and any(batched), channels, x.dtype)


def _sum_shared_first(call: _Call) -> _Call:
    """The same product with the one batched operand summed over n: Σ_n (x_n ∘ y) = (Σ_n x_n) ∘ y."""
    if all(call.batched):
        return call
    x, y = call.x, call.y
    if call.batched[0]:
        x = _sum_over_n(x, call.wide)
    elif y is not None:
        y = _sum_over_n(y, call.wide)
    return call._replace(x=x, y=y, batched=(False, False), batch=None, accumulate=False)


def _sum_over_n(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Σ_n of (N, R, *dims) in the dtype of sums; a transposed matrix is read as it lies."""
    if rows.dim() == 4 and rows.stride(2) == 1:
        return _sum_over_n(rows.mT, dtype).mT
    count = math.prod(rows.shape[1:])
    flat = rows.reshape(rows.shape[0], 1, count)
    call = _Call("scale", flat, None, None, (True, False), rows.shape[0], True, (count,), dtype)
    return _rows(call, _identity(1), None).view(rows.shape[1:])


def _identity(rows: int) -> Table:
    return Table(None, None, None, None, rows, rows, 1, None)


def _pieces(plan: Plan, roles: str, batch: int | None) -> Slices | None:
    """Long segments cut, so that no program walks many entries alone.

    A batch has other rows to fill the GPU with; without one pieces are finer, down to 256.
    """
    table = plan.table(roles)
    if batch is not None or table.indptr is None:
        return table.slices
    limit = min(SLICE, max(256, tiles.power_of_two(table.num_entries // 1024)))
    if table.longest <= limit:
        return None
    indptr = table.indptr
    return plan.derived((roles, "pieces", limit), lambda: cut(indptr, limit))


class _Split(NamedTuple):
    """What one pass sums: segments or pieces of them, n's or parts of them."""

    indptr: Tensor | None
    rows: int
    lead: int | None  # leading size of what the pass gives
    part: int  # n's in a part
    partial: bool  # whether a second pass follows


def _split(call: _Call, table: Table, pieces: Slices | None, programs: int) -> _Split:
    """`programs`: how many one row of results takes."""
    indptr, rows = table.indptr, table.num_rows
    if pieces is not None:
        indptr, rows = pieces.indptr, pieces.num_pieces
    if not call.accumulate or call.batch is None:
        return _Split(indptr, rows, call.batch, 1, pieces is not None)
    items = table.num_entries // rows
    parts = tiles.num_parts(call.batch, items, max(1, rows * programs))
    part = -(-call.batch // parts)
    return _Split(indptr, rows, parts, part, parts > 1 or pieces is not None)


def _finish(call: _Call, z: Tensor, split: _Split, table: Table, pieces: Slices | None) -> Tensor:
    """Partial rows (lead, rows, ...) added to the result; or the result itself, if none are."""
    if not split.partial:
        return z[0] if call.accumulate else z
    owners = _identity(table.num_rows)
    if pieces is not None:
        longest = -(-table.longest // SLICE)
        owners = Table(
            pieces.owner_indptr, None, None, None, table.num_rows, pieces.num_pieces, longest, None
        )
    width = math.prod(call.channels)
    flat = z.view(*z.shape[: z.dim() - len(call.channels)], width)
    second = call._replace(
        op="scale",
        x=flat,
        y=None,
        scale=None,
        batched=(split.lead is not None, False),
        batch=split.lead,
        channels=(width,),
    )
    out = _rows(second, owners, None)
    return out.view(*out.shape[:-1], *call.channels)


def _rows(call: _Call, table: Table, pieces: Slices | None) -> Tensor:
    """The rows kernel: any product, each result row by itself."""
    columns = call.channels[-1] if call.op == "outer" else call.x.shape[-1]
    width = call.x.shape[-1] if call.op == "inner" else math.prod(call.channels)
    rows = table.num_rows if pieces is None else pieces.num_pieces
    items = -(-table.num_entries // rows)
    if call.accumulate and call.batch is not None:
        items *= call.batch
    tile = tiles.rows_tile(width, items, rows * (call.batch or 1), call.x.element_size())
    block_r, _, block_c = tile.blocks
    num_c = 1 if call.op == "inner" else -(-width // block_c)
    split = _split(call, table, pieces, -(-num_c // block_r))
    z = call.empty(split.rows, call.wide if split.partial else call.dtype, split.lead)
    lead = split.lead or 1
    along_n = not call.accumulate and lead >= block_r and table.longest > 1
    blocks = -(-lead // block_r) * split.rows if along_n else -(-lead * split.rows // block_r)
    x_strides, y_strides = _strides(call.x, call.batched[0]), (0, 0, 0, 0)
    if call.y is not None:
        own = _strides(call.y, call.batched[1])
        y_strides = (*own[:2], *(0,) * (4 - len(own)), *own[2:])
    _run(
        kernels.rows_kernel,
        blocks * num_c,
        (call.x, call.y, call.scale, z, split.indptr, table.index1, table.index2, table.term),
        (call.batch or 1, lead, split.rows, split.part, columns, width),
        (*x_strides, *y_strides),
        (call.op, call.accumulate, along_n, _is_wide(call, table, z)),
        tile,
        z if split.partial else None,
    )
    return _finish(call, z, split, table, pieces)


def _outer(call: _Call, table: Table, pieces: Slices | None) -> Tensor:
    """Outer products summed over many items: the matrix kernel."""
    assert call.y is not None
    c, d = call.channels
    tile = tiles.outer_tile(c, d, call.x.element_size())
    _, block_c, block_d = tile.blocks
    programs = -(-c // block_c) * -(-d // block_d)
    split = _split(call, table, pieces, programs)
    z = call.empty(split.rows, call.wide if split.partial else call.dtype, split.lead)
    _run(
        kernels.outer_kernel,
        (split.lead or 1) * split.rows * programs,
        (call.x, call.y, call.scale, z, split.indptr, table.index1, table.index2, table.term),
        (call.batch or 1, split.rows, split.part),
        (c, d, *_strides(call.x, call.batched[0]), *_strides(call.y, call.batched[1])),
        (call.accumulate, _is_wide(call, table, z), _precision(call, tiles.LEAST_DOT * 2)),
        tile,
        z if split.partial else None,
    )
    return _finish(call, z, split, table, pieces)


def _vecmat(call: _Call, plan: Plan, roles: str) -> Tensor:
    """Vectors times matrices of at least LEAST_DOT a side."""
    batch = call.batch or 1
    if call.batched == (True, False) and batch >= tiles.LEAST_DOT:
        return _vecmat_batch(call, plan.table(roles))
    return _vecmat_group(call, plan, roles)


def _vecmat_batch(call: _Call, table: Table) -> Tensor:
    """Matrices that all n share: a matrix product over n for each result row."""
    assert call.y is not None and call.batch is not None
    inner, columns = call.y.shape[-2:]
    tile = tiles.batch_tile(call.batch, inner, columns, call.x.element_size())
    block_n, _, block_c = tile.blocks
    z = call.empty(table.num_rows, call.dtype, call.batch)
    _run(
        kernels.vecmat_batch_kernel,
        -(-call.batch // block_n) * table.num_rows * -(-columns // block_c),
        (call.x, call.y, call.scale, z, table.indptr, table.index1, table.index2, table.term),
        (call.batch, table.num_rows),
        (inner, columns, *call.x.stride(), *call.y.stride()),
        (_is_wide(call, table, z), _precision(call, inner)),
        tile,
        None,
    )
    return z


def _vecmat_group(call: _Call, plan: Plan, roles: str) -> Tensor:
    """Entries that share a matrix together: straight to z, or one row an entry, added afterwards."""
    assert call.y is not None
    a, b, c = roles
    result = plan.table(roles)
    direct = result.longest <= 1 and not call.accumulate
    table = plan.table(f"{a}{c}{b}" if direct else f"{a}k{b}")
    inner, columns = call.y.shape[-2:]
    tile = tiles.group_tile(table.longest, inner, columns, call.x.element_size())
    block_r, _, block_c = tile.blocks
    indptr, owner, num_tiles = table.indptr, None, table.num_rows
    if indptr is not None:
        groups = plan.derived(
            (b, "groups", block_r), lambda: cut(indptr, block_r, keep_empty=False)
        )
        indptr, owner, num_tiles = groups.indptr, groups.owner, groups.num_pieces
    rows = result.num_rows if direct else plan.num_entries
    z = call.empty(rows, call.dtype if direct else call.wide, call.batch)
    if direct and result.indptr is not None:
        z.zero_()  # some rows have no entry
    _run(
        kernels.vecmat_group_kernel,
        (call.batch or 1) * num_tiles * -(-columns // block_c),
        (call.x, call.y, call.scale, z, indptr, owner, table.index1, table.index2, table.term),
        (rows, num_tiles),
        (
            inner,
            columns,
            *_strides(call.x, call.batched[0]),
            *_strides(call.y, call.batched[1]),
        ),
        (_is_wide(call, table, z), _precision(call, inner)),
        tile,
        None if direct else z,
    )
    if direct:
        return z
    second = call._replace(
        op="scale", x=z, y=None, scale=None, batched=(call.batch is not None, False)
    )
    sums = plan.table(f"k_{c}")
    return _rows(second, sums, _pieces(plan, f"k_{c}", call.batch))


def _strides(operand: Tensor, batched: bool) -> tuple[int, ...]:
    """Strides of n, row and channels; an operand that all n share stands still over n."""
    return operand.stride() if batched else (0, *operand.stride())


def _is_wide(call: _Call, table: Table, z: Tensor) -> bool:
    """Whether an offset or a count of items may pass 2^31."""
    most = max(z.numel(), table.num_entries * (call.batch or 1))
    for operand in (call.x, call.y):
        if operand is not None:
            spans = zip(operand.shape, operand.stride(), strict=True)
            most = max(most, sum((size - 1) * stride for size, stride in spans))
    return most > INT32_MAX


def _precision(call: _Call, inner: int) -> str:
    """Of the kernel's dots: 16-bit factors multiply exactly, unless one had to be widened."""
    assert call.y is not None
    widened = call.x.dtype != call.y.dtype or (call.op == "outer" and call.scale is not None)
    dtype = call.wide if widened else call.x.dtype
    return tiles.precision(dtype, call.x.device, inner)


def _run(
    kernel: Any,
    programs: int,
    tensors: tuple[Tensor | None, ...],
    counts: tuple[int, ...],
    strides: tuple[int, ...],
    constants: tuple[Any, ...],
    tile: Tile,
    workspace: Tensor | None,
) -> None:
    if recording():
        names = kernel.arg_names[-len(tile.blocks) - len(constants) :]
        shown: dict[str, int | str] = dict(
            zip(names, map(_plain, (*constants, *tile.blocks)), strict=True)
        )
        shown |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        room = 0 if workspace is None else workspace.nbytes
        record(Launch("triton", kernel.__name__, shown, programs, room))
    launch(kernel, programs, tensors, counts, strides, constants, tile)


def _plain(value: Any) -> int | str:
    return value if isinstance(value, str) else int(value)
