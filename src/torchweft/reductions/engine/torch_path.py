"""The executor in torch, for any device: over tiles of rows and columns.

A tile is as large as stays in cache; the matrix of the pairs is never stored.  Sums over a tile are
of the computation's dtype, the totals over tiles of float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.reductions.call import Blocks, Options, ReductionData
from torchweft.reductions.formula.evaluate import evaluate
from torchweft.reductions.formula.node import Node, reachable

__all__ = ["serves", "shifted", "smallest", "sums"]

NUMBERS_PER_TILE = 2**19
"""Numbers of the largest intermediate of a tile."""

ROWS_PER_STRIP = 512


def serves(f: Node, w: Node | None = None, k: int = 1) -> bool:
    """True: any formula, and any k."""
    return True


class _Strip(NamedTuple):
    """Rows begin to end, and the columns that they meet; None: all of them."""

    begin: int
    end: int
    columns: Tensor | None


def sums(f: Node, data: ReductionData) -> Tensor:
    """(B, M, f.dim): Σ_j f."""
    batch, rows, _ = data.sizes
    out = data.like.new_zeros(batch, rows, f.dim)
    factor, weight = _apart(f)
    for strip in _strips([f], data):
        total = out.new_zeros(batch, strip.end - strip.begin, f.dim, dtype=torch.float64)
        for tile, columns in _tiles([f], data, strip):
            if weight is None:
                total += _summed(_found(f, tile), columns.numel(), data.options)
            else:
                total += _weighted(_found(factor, tile), _found(weight, tile), data.options)
        out[:, strip.begin : strip.end] = total.to(out.dtype)
    return out


def shifted(f: Node, w: Node, data: ReductionData) -> tuple[Tensor, Tensor]:
    """(B, M, 1), (B, M, w.dim): m = max_j f and s = Σ_j exp(f − m) w."""
    like, (batch, rows, _) = data.like, data.sizes
    dtype = torch.promote_types(like.dtype, torch.float32)
    m = like.new_full((batch, rows, 1), -torch.inf, dtype=dtype)
    s = like.new_zeros(batch, rows, w.dim, dtype=torch.float64)
    for strip in _strips([f, w], data):
        here = slice(strip.begin, strip.end)
        for tile, columns in _tiles([f, w], data, strip):
            score = _found(f, tile).expand(-1, -1, columns.numel(), -1)
            top = torch.maximum(m[:, here], score.amax(2))
            shift = torch.where(top.isfinite(), top, 0)  # −inf: nothing yet
            s[:, here] *= (m[:, here] - shift).exp()
            exponentials = (score - shift[:, :, None]).exp()
            s[:, here] += _weighted(exponentials, _found(w, tile), data.options)
            m[:, here] = top
    return m, s.to(dtype)


def smallest(f: Node, k: int, data: ReductionData) -> Tensor:
    """Indices of the k smallest values, see `operator.smallest`."""
    batch, rows, _ = data.sizes
    first, k = k == 0, max(k, 1)
    out = torch.full((batch, rows, k, f.dim), -1, device=data.like.device)
    for strip in _strips([f], data):
        best = known = data.like.new_empty(0)
        for tile, columns in _tiles([f], data, strip):
            at = columns.expand(batch, strip.end - strip.begin, f.dim, -1)
            found = _found(f, tile).expand(-1, -1, columns.numel(), -1)
            found = found.transpose(2, 3).expand_as(at)
            if not first:  # an argmin takes the first NaN
                found = found.where(found == found, torch.inf)
            if best.numel():  # the earlier ones stand first, so ties go to them
                found, at = torch.cat([best, found], -1), torch.cat([known, at], -1)
            if k == 1:  # the first of equal values
                order = found.argmin(-1, keepdim=True)
            else:
                order = found.sort(stable=True, dim=-1).indices[..., :k]
            best, known = found.gather(-1, order), at.gather(-1, order)
        if known.numel():
            out[:, strip.begin : strip.end, : known.shape[-1]] = known.transpose(2, 3)
    return out


def _strips(formulas: Sequence[Node], data: ReductionData) -> Iterator[_Strip]:
    """Rows that meet the same columns, a few at a time."""
    (batch, rows, _), blocks = data.sizes, data.blocks
    numbers = max(batch * _width(formulas), 1)  # of a row and a column
    step = min(ROWS_PER_STRIP, max(1, NUMBERS_PER_TILE // numbers))
    if blocks is None:
        step = max(step, NUMBERS_PER_TILE // (numbers * max(data.sizes.columns, 1)))
        for begin in range(0, rows, step):
            yield _Strip(begin, min(begin + step, rows), None)
        return
    starts, ends, indptr = (t.tolist() for t in blocks[:3])
    for c, (first, last) in enumerate(zip(starts, ends, strict=True)):
        columns = _columns(blocks, indptr[c], indptr[c + 1])
        for begin in range(first, last, step):
            yield _Strip(begin, min(begin + step, last), columns)


def _columns(blocks: Blocks, first: int, last: int) -> Tensor:
    """The columns of some intervals, ascending, as often as they are listed."""
    starts, ends = blocks.j_starts[first:last], blocks.j_ends[first:last]
    lengths = ends - starts
    before = lengths.cumsum(0) - lengths
    inside = torch.arange(int(lengths.sum()), device=starts.device)
    return (inside + (starts - before).repeat_interleave(lengths)).sort().values


def _tiles(
    formulas: Sequence[Node], data: ReductionData, strip: _Strip
) -> Iterator[tuple[dict[int, Tensor], Tensor]]:
    """Values that broadcast as (B or 1, I or 1, J or 1, dim), and the numbers of their columns."""
    cats = {n.data[0]: n.data[2] for n in reachable(*formulas) if n.op == "var"}
    count = data.sizes.columns if strip.columns is None else strip.columns.numel()
    rows = data.sizes.batch * (strip.end - strip.begin)
    step = max(64, NUMBERS_PER_TILE // max(rows * _width(formulas), 1))
    device = next(iter(data.values.values())).device
    for begin in range(0, count, step):
        end = min(begin + step, count)
        tile = {}
        if strip.columns is None:
            columns = torch.arange(begin, end, device=device)
        else:
            columns = strip.columns[begin:end]
        for number, value in data.values.items():
            cat = cats.get(number, 2)
            if cat == 0:
                tile[number] = value[:, strip.begin : strip.end, None]
            elif cat == 2:
                tile[number] = value[:, :1, None]
            elif strip.columns is None:
                tile[number] = value[:, None, begin:end]
            else:
                tile[number] = value.index_select(1, columns)[:, None]
        yield tile, columns


def _found(f: Node, tile: Mapping[int, Tensor]) -> Tensor:
    """f, (B or 1, I or 1, J or 1, dim): of numbers alone it would be (dim,)."""
    found = evaluate(f, tile)
    return found if found.dim() > 1 else found.expand(1, 1, 1, -1)


def _width(formulas: Sequence[Node]) -> int:
    """Components of the widest value of a pair that is stored."""
    return max(n.dim for n in reachable(*formulas) if n in formulas or {0, 1} <= n.cats)


def _apart(f: Node) -> tuple[Node, Node | None]:
    """f = factor · weight: one number for each pair, and a vector for each j."""
    if f.op == "mul" and f.dim > 1:
        for factor, weight in (f.args, f.args[::-1]):
            of_columns = 1 in weight.cats and 0 not in weight.cats
            if factor.dim == 1 and {0, 1} <= factor.cats and of_columns:
                return factor, weight
    return f, None


def _summed(found: Tensor, width: int, options: Options) -> Tensor:
    """Σ over the columns of a tile; what does not vary with j counts for each."""
    if found.shape[2] == 1:
        return found[:, :, 0].double() * width
    dtype = found.dtype if options.accumulate == "auto" else torch.float64
    return found.sum(2, dtype=dtype)


def _weighted(factor: Tensor, weight: Tensor, options: Options) -> Tensor:
    """Σ_j factor_ij weight_j, (B, I, dim), of a factor (B, I, J, 1)."""
    if options.accumulate != "auto":
        factor, weight = factor.double(), weight.double()
    plain = factor.device.type == "cpu" or factor.dtype == torch.float64  # never TF32
    if plain and weight.dim() == 4 and weight.shape[1:3] == (1, factor.shape[2]):
        return factor[..., 0] @ weight[:, 0]
    return (factor * weight).sum(2)
