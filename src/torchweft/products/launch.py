"""The Triton path of the products: the launches of a call, planned once and executed.

A sum over n against an operand that all n share is computed first: the product commutes with it,
and the batched operand is read once instead of once an entry.

The steps of a call are its launches: kernels, grids, tiles and workspaces.  They depend on shapes,
strides, dtypes and the plan, so they are made once and cached.  A segment too long for one program
is cut into pieces, and a sum over n into parts; both give partial rows in fp32 (fp64 for fp64) that
the rows kernel adds in order.  A vecmat groups entries that share a matrix; their results are added
by the rows kernel too.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.explain import recording
from torchweft.core.expressions.program import accumulator
from torchweft.core.gpu.launcher import Launcher, Tile, current_device
from torchweft.core.printing.modules import written
from torchweft.core.tables import SLICE, Plan, Slices, Table
from torchweft.products import tiles
from torchweft.products.forms import PRODUCTS, batch_of, result_channels

__all__ = ["INT32_MAX", "mean", "pieces_of", "product"]

CALLS_PER_PLAN = 256
"""Calls whose steps a plan caches, by shapes, strides and dtypes."""

INT32_MAX = 2**31 - 1
PRODUCT_KERNELS = "torchweft.products.kernels"
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
        plan: the entries.
        roles: the roles by which first, second and the result are indexed.
        accumulate: sum over n as well.

    Returns:
        (N, rows, *dims), without N where nothing has one or it is summed over.
    """
    if not accumulate:
        return _run(op, first, second, scale, plan, roles, False, first.dtype)
    has_n = (batch_of(op, first) is not None, batch_of(op, second, 1) is not None)
    x = _sum_over_n(first) if has_n == (True, False) else first
    y = _sum_over_n(second) if has_n == (False, True) and second is not None else second
    return _run(op, x, y, scale, plan, roles, all(has_n), first.dtype)


def mean(x: Tensor, plan: Plan, counts: Tensor) -> Tensor:
    """Means of the rows of x over the segments of a plan, in x's dtype.

    One launch, where no segment is cut; counts: (M, 1) of each segment, at least 1.
    """
    if pieces_of(plan, "x_z", None) is None:
        return _run("mean", x, None, None, plan, "x_z", False, x.dtype)
    total = _run("scale", x, None, None, plan, "x_z", False, accumulator(x.dtype))
    return (total / counts).to(x.dtype)


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
    """The product in a dtype, by steps that are cached by shapes, strides and dtypes."""
    tf32 = op in ("vecmat", "outer") and torch.backends.cuda.matmul.fp32_precision == "tf32"
    own = first.shape, first.stride(), first.dtype
    other = None if second is None else (second.shape, second.stride(), second.dtype)
    key = op, roles, accumulate, dtype, tf32, own, other, None if scale is None else scale.dtype
    cached: dict[Any, tuple[ProductStep, ...]] = plan.derived("steps", dict)
    steps = cached.get(key)
    if steps is None:
        if len(cached) >= CALLS_PER_PLAN:
            cached.clear()
        call = _describe(op, first, second, scale is not None, accumulate, dtype, tf32)
        steps = cached[key] = _steps(call, plan, roles)
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
) -> ProductCall:
    dims = PRODUCTS["scale" if op == "mean" else op].dims
    x = ProductOperand(0, first.shape, first.stride(), dims[0], first.dtype)
    y = None
    if second is not None:
        y = ProductOperand(1, second.shape, second.stride(), dims[1], second.dtype)
    batch = next((o.shape[0] for o in (x, y) if o is not None and o.batched), None)
    channels = result_channels(op, first, second)
    return ProductCall(op, x, y, scaled, batch, accumulate, channels, dtype, first.device, tf32)


def _execute(steps: tuple[ProductStep, ...], tensors: list[Tensor | None]) -> Tensor:
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


class ProductOperand(NamedTuple):
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
        """Strides of n, row, and the row's dimensions; 0 over n for an operand shared over n."""
        return self.stride if self.batched else (0, *self.stride)

    @property
    def span(self) -> int:
        """The largest offset."""
        return sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


class ProductCall(NamedTuple):
    """A product to compute, and the shape of its result."""

    op: str
    x: ProductOperand
    y: ProductOperand | None
    scaled: bool
    batch: int | None  # N; None where no operand has one
    accumulate: bool  # sum over n; then every operand is batched
    channels: tuple[int, ...]  # of a result row
    dtype: torch.dtype  # of the result
    device: torch.device
    tf32: bool  # whether dots may cut fp32 factors off to TF32

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums and of partial rows."""
        return accumulator(self.dtype)

    @property
    def second(self) -> ProductOperand:
        """The second operand of a product that has one."""
        assert self.y is not None
        return self.y

    @property
    def inner(self) -> int:
        """Channels of x, over which inner and vecmat sum."""
        return self.x.shape[-1]

    @property
    def shares_matrices(self) -> bool:
        """Whether each matrix of a vecmat is multiplied by a batch of rows."""
        return self.x.batched and not self.second.batched and (self.batch or 0) >= tiles.LEAST_DOT


class ProductStep(NamedTuple):
    """One launch and the tensor that it fills."""

    launcher: Launcher | None  # None: the result is zero
    reads: tuple[int | None, ...]  # sources of its operands
    shape: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool  # whether the launch leaves some rows unwritten


def _steps(call: ProductCall, plan: Plan, roles: str) -> tuple[ProductStep, ...]:
    """The launches that serve a call; the last fills the result."""
    steps: list[ProductStep] = []
    rows = plan.size(roles[2])
    summed = call.inner if call.op in ("inner", "vecmat") else 1
    if 0 in (plan.num_entries, call.batch, rows, summed, *call.channels):
        lead = () if call.batch is None or call.accumulate else (call.batch,)
        return (ProductStep(None, (), (*lead, rows, *call.channels), call.dtype, True),)
    table = plan.table(roles)
    dots = False
    if call.op == "outer":
        items = plan.num_entries / rows * ((call.batch or 1) if call.accumulate else 1)
        dots = tiles.takes_dot(call.channels, items)  # items that a result row sums
    elif call.op == "vecmat":
        items = math.inf if call.shares_matrices else plan.num_entries / plan.size(roles[1])
        dots = tiles.takes_dot(call.second.shape[-2:], items)  # items that share a matrix
    if not dots:
        _rows(steps, call, table, pieces_of(plan, roles, call.batch))
    elif call.op == "outer":
        _outer(steps, call, plan, roles)
    elif call.shares_matrices:
        _vecmat_batch(steps, call, table)
    else:
        _vecmat_group(steps, call, plan, roles)
    return tuple(steps)


def pieces_of(plan: Plan, roles: str, batch: int | None, least: int = 256) -> Slices | None:
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
    return plan.derived((roles, "pieces", limit), lambda: plan.pieces(indptr, limit))


class _Split(NamedTuple):
    """The sums of one launch: segments or pieces of them, over one n or a part of the n's."""

    indptr: Tensor | None
    rows: int
    lead: int | None  # leading size of the result
    part: int  # n's in a part
    partial: bool  # whether a second launch adds the results up


def _split(call: ProductCall, table: Table, pieces: Slices | None, programs: float) -> _Split:
    """The sums of a launch that takes `programs` programs for one row of the result."""
    indptr, rows = table.indptr, table.num_rows
    if pieces is not None:
        indptr, rows = pieces.indptr, pieces.num_pieces
    if not call.accumulate or call.batch is None:
        return _Split(indptr, rows, call.batch, 1, pieces is not None)
    parts = tiles.num_parts(call.batch, table.num_entries // rows, math.ceil(rows * programs))
    partial = parts > 1 or pieces is not None
    return _Split(indptr, rows, parts if partial else None, -(-call.batch // parts), partial)


def _add(
    steps: list[ProductStep],
    call: ProductCall,
    launcher: Launcher,
    rows: int,
    lead: int | None,
    dtype: torch.dtype,
    zeroed: bool = False,
) -> ProductOperand:
    """Add a step that reads x, y and scale; returns its result as an operand of the next step."""
    reads = (call.x.source, None if call.y is None else call.y.source, 2 if call.scaled else None)
    batch = () if lead is None else (lead,)
    steps.append(ProductStep(launcher, reads, (*batch, rows, *call.channels), dtype, zeroed))
    width = math.prod(call.channels)
    strides = (*(rows * width for _ in batch), width, 1)
    return ProductOperand(len(steps) + 2, (*batch, rows, width), strides, 1, dtype)


def _add_split(
    steps: list[ProductStep],
    call: ProductCall,
    launcher: Launcher,
    split: _Split,
    table: Table,
    pieces: Slices | None,
) -> None:
    """Add a step, and where its results are partial one that adds them up."""
    dtype = call.wide if split.partial else call.dtype
    partial = _add(steps, call, launcher, split.rows, split.lead, dtype)
    if not split.partial:
        return
    rows, indptr, count = table.num_rows, None, table.num_rows
    if pieces is not None:
        indptr, count = pieces.owner_indptr, pieces.num_pieces
    owners = Table(indptr, None, None, None, rows, count, count - rows + 1, None)
    _sum_up(steps, call, partial, owners)


def _sum_up(
    steps: list[ProductStep],
    call: ProductCall,
    partial: ProductOperand,
    table: Table,
    pieces: Slices | None = None,
) -> None:
    """Add the last step: the sums of rows of a workspace over the segments of a table."""
    second = call._replace(
        op="scale", x=partial, y=None, scaled=False, batch=None, accumulate=False
    )
    if partial.batched:
        second = second._replace(batch=partial.shape[0], accumulate=call.accumulate)
    _rows(steps, second, table, pieces)


def _rows(steps: list[ProductStep], call: ProductCall, table: Table, pieces: Slices | None) -> None:
    """Any product, each result row by itself."""
    x, y, outer = call.x, call.y, call.op == "outer"
    # outer runs over pairs of channels, inner over x's, vecmat over columns
    width = call.inner if call.op == "inner" else math.prod(call.channels)
    rows = table.num_rows if pieces is None else pieces.num_pieces
    items = -(-table.num_entries // rows) * ((call.batch or 1) if call.accumulate else 1)
    count = rows * (1 if call.accumulate else call.batch or 1)
    inner = call.inner if call.op == "vecmat" else 1
    tile = tiles.rows_tile(call.op, width, items, count, x.dtype.itemsize, inner)
    block_r, _, block_c = tile.blocks
    num_c = 1 if call.op == "inner" else -(-width // block_c)
    split = _split(call, table, pieces, num_c / block_r)
    lead = split.lead or 1
    along_n = not call.accumulate and lead >= block_r and table.longest > 1
    blocks = -(-lead // block_r) * rows if along_n else -(-lead * rows // block_r)
    y_strides = (0, 0) if y is None else y.strides
    y_strides = (*y_strides[:2], *(0,) * (4 - len(y_strides)), *y_strides[2:])
    wide = _is_wide(call, table, lead * rows * width, inner)
    launcher = Launcher(
        written(PRODUCT_KERNELS, "rows_kernel"),
        blocks * num_c,
        (split.indptr, table.index1, table.index2, table.term),
        (call.batch or 1, lead, rows, split.part, width, *x.strides, *y_strides),
        (call.op, call.accumulate, along_n, wide, call.channels[-1] if outer else inner),
        tile,
    )
    _add_split(steps, call, launcher, split, table, pieces)


def _outer(steps: list[ProductStep], call: ProductCall, plan: Plan, roles: str) -> None:
    """Outer products with a tile of the result for each program.

    Summed over n, uneven segments are cut fine: each program then walks as many items.
    """
    table = plan.table(roles)
    pieces = pieces_of(plan, roles, call.batch)
    if call.accumulate and call.batch is not None:
        pieces = pieces_of(plan, roles, None, -(-256 // call.batch))
    c, d = call.channels
    y = call.second
    items = table.longest * ((call.batch or 1) if call.accumulate else 1)
    tile = tiles.outer_tile(c, d, items, call.x.dtype.itemsize, tiles.has_wgmma(call.device))
    _, block_c, block_d = tile.blocks
    programs = -(-c // block_c) * -(-d // block_d)
    split = _split(call, table, pieces, programs)
    lead = split.lead or 1
    wide = _is_wide(call, table, lead * split.rows * c * d)
    launcher = Launcher(
        written(PRODUCT_KERNELS, "outer_kernel"),
        lead * split.rows * programs,
        (split.indptr, table.index1, table.index2, table.term),
        (call.batch or 1, split.rows, split.part, c, d, *call.x.strides, *y.strides),
        (call.accumulate, wide, _precision(call, scaled=call.scaled)),
        tile,
    )
    _add_split(steps, call, launcher, split, table, pieces)


def _vecmat_batch(steps: list[ProductStep], call: ProductCall, table: Table) -> None:
    """Matrices that all n share: for each result row a matrix product over n."""
    assert call.batch is not None
    inner, columns = call.second.shape[-2:]
    wgmma = tiles.has_wgmma(call.device)
    tile = tiles.batch_tile(call.batch, inner, columns, call.x.dtype.itemsize, wgmma)
    block_n, _, block_c = tile.blocks
    batch, precision = call.batch, _precision(call)
    wide = _is_wide(call, table, batch * table.num_rows * columns)
    kernel: Any = written(PRODUCT_KERNELS, "vecmat_batch_kernel")
    constants: tuple[Any, ...] = (wide, precision)
    part: tuple[int, ...] = ()
    size = math.prod(call.second.shape)
    if precision == "bf16x6" and 8 * size <= math.prod(call.x.shape):  # little beside x
        call = call._replace(y=_parts_of(steps, call.second))
        kernel, constants, part = written(PRODUCT_KERNELS, "vecmat_parts_kernel"), (wide,), (size,)
    launcher = Launcher(
        kernel,
        -(-batch // block_n) * table.num_rows * -(-columns // block_c),
        (table.indptr, table.index1, table.index2, table.term),
        (batch, table.num_rows, inner, columns, *call.x.strides, *call.second.stride, *part),
        constants,
        tile,
    )
    _add(steps, call, launcher, table.num_rows, batch, call.dtype)


def _parts_of(steps: list[ProductStep], y: ProductOperand) -> ProductOperand:
    """Matrices as the three parts of which fp32 products on tensor cores are formed."""
    rows, inner, columns = y.shape
    programs = -(-rows * inner * columns // SPLIT_BLOCK)
    numbers = (rows, inner, columns, *y.stride)
    kernel = written(PRODUCT_KERNELS, "split_kernel")
    launcher = Launcher(kernel, programs, (), numbers, (), Tile((SPLIT_BLOCK,)))
    steps.append(
        ProductStep(launcher, (y.source,), (3, rows, columns, inner), torch.bfloat16, False)
    )
    stride = (inner * columns, 1, inner)
    return y._replace(source=len(steps) + 2, stride=stride, dtype=torch.bfloat16)


def _vecmat_group(steps: list[ProductStep], call: ProductCall, plan: Plan, roles: str) -> None:
    """Entries grouped by matrix: written to z, or to one row an entry, added up later."""
    a, b, c = roles[0], roles[1], roles[2]
    result = plan.table(roles)
    direct = result.longest <= 1 and not call.accumulate
    table = plan.table(f"{a}{c}{b}" if direct else f"{a}k{b}")
    inner, columns = call.second.shape[-2:]
    tile = tiles.group_tile(table.longest, inner, columns, call.x.dtype.itemsize)
    block_r, _, block_c = tile.blocks
    indptr, owner, num_tiles = table.indptr, None, table.num_rows
    if indptr is not None:
        bounds = indptr
        groups = plan.derived(
            (b, "groups", block_r), lambda: plan.pieces(bounds, block_r, keep_empty=False)
        )
        indptr, owner, num_tiles = groups.indptr, groups.owner, groups.num_pieces
    rows = result.num_rows if direct else plan.num_entries
    size = (call.batch or 1) * rows * columns
    launcher = Launcher(
        written(PRODUCT_KERNELS, "vecmat_group_kernel"),
        (call.batch or 1) * num_tiles * -(-columns // block_c),
        (indptr, owner, table.index1, table.index2, table.term),
        (rows, num_tiles, inner, columns, *call.x.strides, *call.second.strides),
        (_is_wide(call, table, size), _precision(call, inner)),
        tile,
    )
    dtype, zeroed = call.dtype if direct else call.wide, result.indptr is not None
    entries = _add(steps, call, launcher, rows, call.batch, dtype, zeroed)
    if not direct:
        sums = plan.table(f"k_{c}")
        _sum_up(steps, call, entries, sums, pieces_of(plan, f"k_{c}", call.batch))


def _is_wide(call: ProductCall, table: Table, size: int, inner: int = 1) -> bool:
    """Whether an offset or a count of items may pass 2^31.

    `size`: numbers that are written; `inner`: items of an entry.
    """
    spans = [operand.span for operand in (call.x, call.y) if operand is not None]
    return max(size, table.num_entries * (call.batch or 1) * inner, *spans) > INT32_MAX


def _precision(call: ProductCall, inner: int = 1, scaled: bool = False) -> str:
    """Precision of a kernel's dots: 16-bit factors multiply exactly, unless one is widened."""
    widened = scaled or call.x.dtype != call.second.dtype
    dtype = call.wide if widened else call.x.dtype
    return tiles.precision(dtype, call.device, inner, call.tf32)
