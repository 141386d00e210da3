"""The Triton path of the products: the recipe of a call, and its execution.

A sum over n against an operand that all n share is taken first: the product commutes with it, and
the batched operand is read once instead of once an entry.

A recipe says which launches serve a call: kernels, grids, tiles and workspaces.  It depends on
shapes, strides, dtypes and the plan, so it is made once and cached.  Two rules keep it short.  A
segment too long for one program is cut into pieces, and a sum over n into parts; both give partial
rows in fp32 (fp64 for fp64) that the rows kernel adds in order.  A vecmat puts entries that share a
matrix together; what they give is added by the rows kernel too.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.explain import recording
from torchweft.core.gpu.launcher import Launcher, Tile, current_device
from torchweft.core.tables.plan import Plan, Table
from torchweft.core.tables.segments import SLICE, Slices, cut
from torchweft.products import kernels, tiles
from torchweft.products.forms import PRODUCTS, accumulator, result_channels

__all__ = ["product"]

MOST_RECIPES = 256
"""Recipes that a plan keeps, one for each combination of shapes, strides and dtypes."""

INT32_MAX = 2**31 - 1
SPLIT_BLOCK = 1024  # numbers that one program splits


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
    if not accumulate:
        return _run(op, first, second, scale, plan, roles, False, first.dtype)
    dims = PRODUCTS[op].dims
    has_n = (first.dim() == dims[0] + 2, second is not None and second.dim() == dims[1] + 2)
    x = _sum_over_n(first) if has_n == (True, False) else first
    y = _sum_over_n(second) if has_n == (False, True) and second is not None else second
    return _run(op, x, y, scale, plan, roles, all(has_n), first.dtype)


def _sum_over_n(operand: Tensor) -> Tensor:
    """Σ_n of (N, rows, *dims), in the dtype of sums; a transposed matrix is read as it lies."""
    wide = accumulator(operand.dtype)
    if operand.dim() == 4:
        if operand.stride(2) == 1 != operand.stride(3):
            return _sum_over_n(operand.mT).mT
        rows = operand.flatten(1, 2)
    else:
        rows = operand if operand.dim() == 3 else operand.unsqueeze(1)
    plan = _identity(rows.shape[1], operand.device)
    return _run("scale", rows, None, None, plan, "x_z", True, wide).view(operand.shape[1:])


@functools.lru_cache(maxsize=256)
def _identity(rows: int, device: torch.device) -> Plan:
    """Row i to row i."""
    return Plan({"x": None, "z": None}, {"x": rows, "z": rows}, rows, device)


def _run(
    op: str,
    first: Tensor,
    second: Tensor | None,
    scale: Tensor | None,
    plan: Plan,
    roles: str,
    accumulate: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The product in a dtype, by a recipe that is made at the first call of its kind."""
    tf32 = op in ("vecmat", "outer") and torch.backends.cuda.matmul.fp32_precision == "tf32"
    key = (
        op,
        roles,
        accumulate,
        dtype,
        tf32,
        first.shape,
        first.stride(),
        first.dtype,
        None if second is None else (second.shape, second.stride(), second.dtype),
        None if scale is None else scale.dtype,
    )
    recipes: dict[Any, tuple[Step, ...]] = plan.derived("recipes", dict)
    steps = recipes.get(key)
    if steps is None:
        if len(recipes) >= MOST_RECIPES:
            recipes.clear()
        call = _describe(op, first, second, scale is not None, accumulate, dtype, tf32)
        steps = recipes[key] = recipe(call, plan, roles)
    if scale is not None:
        scale = scale.contiguous()  # kernels read it with stride 1
    with current_device(first):
        return _execute(steps, [first, second, scale])


def _describe(
    op: str,
    first: Tensor,
    second: Tensor | None,
    scaled: bool,
    accumulate: bool,
    dtype: torch.dtype,
    tf32: bool,
) -> Call:
    dims = PRODUCTS[op].dims
    x = Operand(0, first.shape, first.stride(), dims[0], first.dtype)
    y = None
    if second is not None:
        y = Operand(1, second.shape, second.stride(), dims[1], second.dtype)
    batched = x if x.batched else y
    batch = batched.shape[0] if batched is not None and batched.batched else None
    channels = result_channels(op, first, second)
    return Call(op, x, y, scaled, batch, accumulate, channels, dtype, first.device, tf32)


def _execute(steps: tuple[Step, ...], tensors: list[Tensor | None]) -> Tensor:
    """Allocate and fill one tensor after the other."""
    like, last = tensors[0], steps[-1]
    assert like is not None
    for step in steps:
        make = like.new_zeros if step.zeroed else like.new_empty
        out = make(step.shape, dtype=step.dtype)
        if step.launcher is not None:
            operands = [None if r is None else tensors[r] for r in step.reads]
            operands.append(out)
            step.launcher(operands, 0 if step is last or not recording() else out.nbytes)
        tensors.append(out)
    return out


class Operand(NamedTuple):
    """A tensor (N, rows, *dims) as a kernel reads it."""

    source: int  # 0 first, 1 second, 2 scale, 3 + s the result of step s
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dims: int  # how many dimensions a row has
    dtype: torch.dtype

    @property
    def batched(self) -> bool:
        """Whether it has a leading N."""
        return len(self.shape) == self.dims + 2

    @property
    def strides(self) -> tuple[int, ...]:
        """Of n, row, and the row's dimensions; what all n share stands still over n."""
        return self.stride if self.batched else (0, *self.stride)

    @property
    def span(self) -> int:
        """The largest offset."""
        return sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


class Call(NamedTuple):
    """A product: what to compute, and the shape of what it gives."""

    op: str
    x: Operand
    y: Operand | None
    scaled: bool
    batch: int | None  # N; None where no operand has one
    accumulate: bool  # sum over n; then every operand is batched
    channels: tuple[int, ...]  # of a result row
    dtype: torch.dtype  # of the result
    device: torch.device
    tf32: bool  # whether dots may round fp32 factors to TF32

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums and of partial rows."""
        return accumulator(self.dtype)


class Step(NamedTuple):
    """One launch and the tensor that it fills."""

    launcher: Launcher | None  # None: nothing to add up
    reads: tuple[int | None, ...]  # sources of its operands
    shape: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool  # whether the launch leaves some rows unwritten


def recipe(call: Call, plan: Plan, roles: str) -> tuple[Step, ...]:
    """The launches that serve a call; the last fills the result."""
    steps: list[Step] = []
    rows = plan.size(roles[2])
    summed = _inner(call) if call.op in ("inner", "vecmat") else 1
    if 0 in (plan.num_entries, call.batch, rows, summed, *call.channels):
        lead = () if call.batch is None or call.accumulate else (call.batch,)
        return (Step(None, (), (*lead, rows, *call.channels), call.dtype, True),)
    table = plan.table(roles)
    batch, items = call.batch or 1, math.inf
    if call.op == "outer":  # that a result row sums
        items = plan.num_entries / rows * (batch if call.accumulate else 1)
    elif call.op == "vecmat" and not _is_shared(call):  # that share a matrix
        items = plan.num_entries / plan.size(roles[1])
    if call.op not in ("outer", "vecmat") or not tiles.takes_dot(_matrix(call), items):
        _rows(steps, call, table, _pieces(plan, roles, call.batch))
    elif call.op == "outer":
        _outer(steps, call, plan, roles)
    elif _is_shared(call):
        _vecmat_batch(steps, call, table)
    else:
        _vecmat_group(steps, call, plan, roles)
    return tuple(steps)


def _matrix(call: Call) -> tuple[int, ...]:
    """Sides of the matrices of a product: those it reads, or for outer those it gives."""
    return call.channels if call.op == "outer" else _second(call).shape[-2:]


def _is_shared(call: Call) -> bool:
    """Whether each matrix of a vecmat meets a batch of rows."""
    return call.x.batched and not _second(call).batched and (call.batch or 0) >= tiles.LEAST_DOT


def _second(call: Call) -> Operand:
    assert call.y is not None
    return call.y


def _inner(call: Call) -> int:
    """Channels that a product sums over, or those of x where it sums over none."""
    return call.x.shape[-1]


def _pieces(plan: Plan, roles: str, batch: int | None, least: int = 256) -> Slices | None:
    """Long segments cut, so that no program walks many entries alone.

    A batch has other rows to fill the GPU with; without one pieces are finer, down to `least`.
    """
    table = plan.table(roles)
    if batch is not None or table.indptr is None:
        return table.slices
    limit = min(SLICE, max(least, tiles.power_of_two(table.num_entries // 1024)))
    if table.longest <= limit:
        return None
    indptr = table.indptr
    return plan.derived((roles, "pieces", limit), lambda: cut(indptr, limit))


class _Split(NamedTuple):
    """What one launch sums: segments or pieces of them, over one n or a part of them."""

    indptr: Tensor | None
    rows: int
    lead: int | None  # leading size of what it gives
    part: int  # n's in a part
    partial: bool  # whether a second launch adds up


def _split(call: Call, table: Table, pieces: Slices | None, programs: float) -> _Split:
    """`programs`: how many one row of the result takes."""
    indptr, rows = table.indptr, table.num_rows
    if pieces is not None:
        indptr, rows = pieces.indptr, pieces.num_pieces
    if not call.accumulate or call.batch is None:
        return _Split(indptr, rows, call.batch, 1, pieces is not None)
    parts = tiles.num_parts(call.batch, table.num_entries // rows, math.ceil(rows * programs))
    part = -(-call.batch // parts)
    if parts == 1 and pieces is None:
        return _Split(indptr, rows, None, part, False)
    return _Split(indptr, rows, parts, part, True)


def _add(
    steps: list[Step],
    call: Call,
    kernel: Any,
    programs: int,
    tables: tuple[Tensor | None, ...],
    numbers: tuple[int | None, ...],
    constants: tuple[Any, ...],
    tile: Tile,
    rows: int,
    lead: int | None,
    dtype: torch.dtype,
    zeroed: bool = False,
) -> Operand:
    """One more step that reads x, y and scale; what it gives, as an operand of the next."""
    reads = (call.x.source, None if call.y is None else call.y.source, 2 if call.scaled else None)
    shape = (*(() if lead is None else (lead,)), rows, *call.channels)
    launcher = Launcher(kernel, programs, tables, numbers, constants, tile)
    steps.append(Step(launcher, reads, shape, dtype, zeroed))
    flat = (*shape[: len(shape) - len(call.channels)], math.prod(call.channels))
    return Operand(len(steps) + 2, flat, _contiguous(flat), 1, dtype)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _sum_up(
    steps: list[Step], call: Call, partial: Operand, table: Table, pieces: Slices | None = None
) -> None:
    """The last step: rows of a workspace added as the table says."""
    second = call._replace(
        op="scale", x=partial, y=None, scaled=False, batch=None, accumulate=False
    )
    if partial.batched:
        second = second._replace(batch=partial.shape[0], accumulate=call.accumulate)
    _rows(steps, second, table, pieces)


def _owners(table: Table, pieces: Slices | None) -> Table:
    """Who adds up the partial rows of segments or of their pieces."""
    rows = table.num_rows
    if pieces is None:
        return Table(None, None, None, None, rows, rows, 1, None)
    count = pieces.num_pieces
    return Table(pieces.owner_indptr, None, None, None, rows, count, count - rows + 1, None)


def _rows(steps: list[Step], call: Call, table: Table, pieces: Slices | None) -> None:
    """Any product, each result row by itself."""
    x, y = call.x, call.y
    # outer runs over pairs of channels, inner over x's, vecmat over columns
    width = _inner(call) if call.op == "inner" else math.prod(call.channels)
    rows = table.num_rows if pieces is None else pieces.num_pieces
    items = -(-table.num_entries // rows) * ((call.batch or 1) if call.accumulate else 1)
    count = rows * (1 if call.accumulate else call.batch or 1)
    inner = _inner(call) if call.op == "vecmat" else 1
    tile = tiles.rows_tile(call.op, width, items, count, x.dtype.itemsize, inner)
    block_r, _, block_c = tile.blocks
    num_c = 1 if call.op == "inner" else -(-width // block_c)
    split = _split(call, table, pieces, num_c / block_r)
    lead = split.lead or 1
    along_n = not call.accumulate and lead >= block_r and table.longest > 1
    blocks = -(-lead // block_r) * rows if along_n else -(-lead * rows // block_r)
    y_strides = (0, 0) if y is None else y.strides
    y_strides = (*y_strides[:2], *(0,) * (4 - len(y_strides)), *y_strides[2:])
    partial = _add(
        steps,
        call,
        kernels.rows_kernel,
        blocks * num_c,
        (split.indptr, table.index1, table.index2, table.term),
        (call.batch or 1, lead, rows, split.part, width, *x.strides, *y_strides),
        (
            call.op,
            call.accumulate,
            along_n,
            _is_wide(call, table, lead * rows * width, inner),
            call.channels[-1] if call.op == "outer" else inner,
        ),
        tile,
        rows,
        split.lead,
        call.wide if split.partial else call.dtype,
    )
    if split.partial:
        _sum_up(steps, call, partial, _owners(table, pieces))


def _outer(steps: list[Step], call: Call, plan: Plan, roles: str) -> None:
    """Outer products with a tile of the result for each program.

    Summed over n, uneven segments are cut fine: each program then walks as many items.
    """
    table = plan.table(roles)
    pieces = _pieces(plan, roles, call.batch)
    if call.accumulate and call.batch is not None:
        pieces = _pieces(plan, roles, None, -(-256 // call.batch))
    c, d = call.channels
    y = _second(call)
    items = table.longest * ((call.batch or 1) if call.accumulate else 1)
    tile = tiles.outer_tile(c, d, items, call.x.dtype.itemsize, tiles.has_wgmma(call.device))
    _, block_c, block_d = tile.blocks
    programs = -(-c // block_c) * -(-d // block_d)
    split = _split(call, table, pieces, programs)
    lead = split.lead or 1
    partial = _add(
        steps,
        call,
        kernels.outer_kernel,
        lead * split.rows * programs,
        (split.indptr, table.index1, table.index2, table.term),
        (call.batch or 1, split.rows, split.part, c, d, *call.x.strides, *y.strides),
        (
            call.accumulate,
            _is_wide(call, table, lead * split.rows * c * d),
            _precision(call, scaled=call.scaled),
        ),
        tile,
        split.rows,
        split.lead,
        call.wide if split.partial else call.dtype,
    )
    if split.partial:
        _sum_up(steps, call, partial, _owners(table, pieces))


def _vecmat_batch(steps: list[Step], call: Call, table: Table) -> None:
    """Matrices that all n share: for each result row a matrix product over n."""
    assert call.batch is not None
    inner, columns = _second(call).shape[-2:]
    wgmma = tiles.has_wgmma(call.device)
    tile = tiles.batch_tile(call.batch, inner, columns, call.x.dtype.itemsize, wgmma)
    block_n, _, block_c = tile.blocks
    batch, precision = call.batch, _precision(call)
    wide = _is_wide(call, table, batch * table.num_rows * columns)
    kernel: Any = kernels.vecmat_batch_kernel
    constants: tuple[Any, ...] = (wide, precision)
    part: tuple[int, ...] = ()
    size = math.prod(_second(call).shape)
    if precision == "bf16x6" and 8 * size <= math.prod(call.x.shape):  # little beside x
        call = call._replace(y=_parts_of(steps, _second(call)))
        kernel, constants, part = kernels.vecmat_parts_kernel, (wide,), (size,)
    _add(
        steps,
        call,
        kernel,
        -(-batch // block_n) * table.num_rows * -(-columns // block_c),
        (table.indptr, table.index1, table.index2, table.term),
        (
            batch,
            table.num_rows,
            inner,
            columns,
            *call.x.strides,
            *_second(call).stride,
            *part,
        ),
        constants,
        tile,
        table.num_rows,
        batch,
        call.dtype,
    )


def _parts_of(steps: list[Step], y: Operand) -> Operand:
    """Matrices in the three parts that fp32 products on tensor cores are made of."""
    rows, inner, columns = y.shape
    programs = -(-rows * inner * columns // SPLIT_BLOCK)
    numbers = (rows, inner, columns, *y.stride)
    launcher = Launcher(kernels.split_kernel, programs, (), numbers, (), Tile((SPLIT_BLOCK,)))
    steps.append(Step(launcher, (y.source,), (3, rows, columns, inner), torch.bfloat16, False))
    stride = (inner * columns, 1, inner)
    return y._replace(source=len(steps) + 2, stride=stride, dtype=torch.bfloat16)


def _vecmat_group(steps: list[Step], call: Call, plan: Plan, roles: str) -> None:
    """Entries that share a matrix together: straight to z, or one row an entry, added later."""
    a, b, c = roles[0], roles[1], roles[2]
    result = plan.table(roles)
    direct = result.longest <= 1 and not call.accumulate
    table = plan.table(f"{a}{c}{b}" if direct else f"{a}k{b}")
    inner, columns = _second(call).shape[-2:]
    tile = tiles.group_tile(table.longest, inner, columns, call.x.dtype.itemsize)
    block_r, _, block_c = tile.blocks
    indptr, owner, num_tiles = table.indptr, None, table.num_rows
    if indptr is not None:
        bounds = indptr
        groups = plan.derived(
            (b, "groups", block_r), lambda: cut(bounds, block_r, keep_empty=False)
        )
        indptr, owner, num_tiles = groups.indptr, groups.owner, groups.num_pieces
    rows = result.num_rows if direct else plan.num_entries
    size = (call.batch or 1) * rows * columns
    entries = _add(
        steps,
        call,
        kernels.vecmat_group_kernel,
        (call.batch or 1) * num_tiles * -(-columns // block_c),
        (indptr, owner, table.index1, table.index2, table.term),
        (rows, num_tiles, inner, columns, *call.x.strides, *_second(call).strides),
        (_is_wide(call, table, size), _precision(call, inner)),
        tile,
        rows,
        call.batch,
        call.dtype if direct else call.wide,
        zeroed=result.indptr is not None,
    )
    if not direct:
        sums = plan.table(f"k_{c}")
        _sum_up(steps, call, entries, sums, _pieces(plan, f"k_{c}", call.batch))


def _is_wide(call: Call, table: Table, size: int, inner: int = 1) -> bool:
    """Whether an offset or a count of items may pass 2^31.

    `size`: numbers that are written; `inner`: items that an entry is.
    """
    spans = [operand.span for operand in (call.x, call.y) if operand is not None]
    return max(size, table.num_entries * (call.batch or 1) * inner, *spans) > INT32_MAX


def _precision(call: Call, inner: int = 1, scaled: bool = False) -> str:
    """Of a kernel's dots: 16-bit factors multiply exactly, unless one is widened before."""
    widened = scaled or call.x.dtype != _second(call).dtype
    dtype = call.wide if widened else call.x.dtype
    return tiles.precision(dtype, call.device, inner, call.tf32)
