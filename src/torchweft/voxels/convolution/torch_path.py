"""The torch path of the sparse convolution: rows are gathered, multiplied and added, in chunks.

    y[o] = Σ_k x[sources[k,o]] @ weight[k]        dw[k] = Σ_o x[sources[k,o]]ᵀ g[o]

Rows are visited in canonical order, so a permutation of the rows changes no bit.  The rounding of a
matrix library depends on the sizes of a product and on where it divides the product among threads;
with sizes that are multiples of `VECTOR`, the latter has no effect.  Where matrices or clouds are
small, all offsets are one product (`_is_folded`).

Sums are in float32 (float64 for float64); 16-bit rows are widened chunk by chunk and the result is
rounded once.  What a call derives from its table is cached with the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchweft.core.operators.operands import without_autocast
from torchweft.core.tables import TensorCache
from torchweft.voxels.convolution.epilogue import NO_EPILOGUE, Epilogue
from torchweft.voxels.grid import whole

__all__ = ["convolve", "weight_gradient"]

VECTOR = 16
"""Rows, and channels above 16, are padded to multiples of this: 16 floats are 512 bits."""

PAIRS_PER_CHUNK = 2048
"""Pairs of an offset in a chunk, on average: the rows of a product stay in the L2 cache."""

MOST_ROWS_PER_CHUNK = 4 * PAIRS_PER_CHUNK
"""Longer sums of consecutive terms would be less accurate."""

ROWS_PER_PRODUCT = 512
"""Rows that one product sums over: a matrix library divides more among its threads, and the bits
would depend on their number (MKL with AVX-512: from 1024 on)."""

CHANNELS_PER_LARGER_CHUNK, MOST_LARGER = 128, 4
"""Chunks grow as rows get shorter than this, up to 4 times: dividing an addition by index among
threads takes longer than the addition."""

GATHERED = 2**18
"""Elements gathered at a time where all offsets are one product."""

NARROW_CHANNELS = 32
"""Up to this many channels, groups are one batched product."""

ChunkSums = Iterator[tuple[int, Tensor]]


def convolve(
    x: Tensor,
    weight: Tensor,
    table: Tensor,
    order: Tensor | None,
    *,
    groups: int = 1,
    precision: str = "ieee",
    after: Epilogue = NO_EPILOGUE,
    flip: bool = False,
) -> Tensor:
    """y[o] = Σ_k x[sources[k,o]] @ weight[k], as `launch.convolve`; of every precision, exact."""
    y = x.new_empty(table.shape[1], weight.shape[2])
    if len(table) != len(weight):
        table = whole(table, order, len(weight))
    weight = weight.flip(0) if flip else weight
    with without_autocast(x):
        data = _data_of(table)
        sums = _folded_sums if _is_folded(x, weight.shape, data, groups) else _sums
        if after.var is not None:  # folded once, not for each chunk
            channels = after._replace(residual=None).to(torch.promote_types(x.dtype, torch.float32))
            after = channels.folded()._replace(residual=after.residual)
        for begin, total in sums(x, weight, table, data, groups):
            if after is not NO_EPILOGUE:
                total = _finished(total, after, order, begin)
            if order is None:
                y[begin : begin + len(total)] = total
            else:
                y.index_copy_(0, order[begin : begin + len(total)].long(), total.to(y.dtype))
    return y


def weight_gradient(
    x: Tensor,
    g: Tensor,
    table: Tensor,
    order: Tensor | None,
    *,
    groups: int = 1,
    precision: str = "ieee",
    offsets: int | None = None,
    mirrored: bool = False,
) -> Tensor:
    """dw[k] = Σ_o x[sources[k,o]]ᵀ g[o], as `launch.weight_gradient`; `mirrored` saves nothing."""
    if offsets is not None and len(table) != offsets:
        table = whole(table, order, offsets)
    shape = (table.shape[0], x.shape[1] // groups, g.shape[1])
    with without_autocast(x):
        data = _data_of(table)
        gradient = _folded_gradient if _is_folded(x, shape, data, groups) else _gradient
        return gradient(x, g, table, data, order, groups).to(x.dtype)


class _OffsetPiece(NamedTuple):
    """The pairs of one offset in a chunk, in canonical order, padded to a multiple of VECTOR.

    Padding reads row 0 and is written to a row past the chunk's last.
    """

    offset: int
    pairs: int
    sources: Tensor  # input rows
    places: Tensor  # rows of the chunk, int64


class _RowChunk(NamedTuple):
    """Consecutive output rows in canonical order."""

    begin: int
    rows: int
    pieces: list[_OffsetPiece]


class _TableData(NamedTuple):
    """Data derived from a table.

    Args:
        entries: of the table.
        pairs: L, the pairs of the map.
        chunks: by their size relative to the chunks of sums over rows.
        by_row: (N_out, columns) in canonical order, both sides padded; by columns.
    """

    entries: int
    pairs: int
    chunks: dict[int, list[_RowChunk]]
    by_row: dict[int, Tensor]


_table_cache: TensorCache[_TableData] = TensorCache()


def _data_of(table: Tensor) -> _TableData:
    def build() -> _TableData:
        return _TableData(table.numel(), int((table >= 0).sum()), {}, {})

    return _table_cache.get((table,), None, build)


def _sums(x: Tensor, weight: Tensor, table: Tensor, data: _TableData, groups: int) -> ChunkSums:
    """(first row, sums of its chunk) in canonical order; a chunk is freed before the next one."""
    wide = _wide(x)
    matrices = _filled(_by_group(weight.to(wide), groups).transpose(1, 2))
    channels = max(x.shape[1], weight.shape[2], 1)
    larger = max(1, min(MOST_LARGER, CHANNELS_PER_LARGER_CHUNK // channels))
    for chunk in _chunks(table, data, larger):
        shape = (chunk.rows + VECTOR, groups, matrices.shape[3])
        total = torch.zeros(shape, dtype=wide, device=x.device)
        for piece in chunk.pieces:
            rows = _by_group(x.index_select(0, piece.sources).to(wide), groups)
            product = _multiplied(rows, matrices[piece.offset])
            if piece.pairs == chunk.rows:  # all rows, in order
                total[: len(product)] += product
            else:
                total.index_add_(0, piece.places, product)
        yield chunk.begin, total[: chunk.rows, :, : weight.shape[2] // groups].flatten(1)


def _multiplied(rows: Tensor, matrices: Tensor) -> Tensor:
    """(P, groups, C) by (groups, C, D) → (P, groups, D)"""
    groups, inner, outer = matrices.shape
    if groups > 1 and inner == outer == 1:
        return rows * matrices.squeeze(2)
    if groups > 1 and max(inner, outer) <= NARROW_CHANNELS:
        return torch.bmm(rows.transpose(0, 1), matrices).transpose(0, 1).contiguous()
    product = rows.new_empty(len(rows), groups, outer)
    for group in range(groups):
        torch.mm(rows[:, group], matrices[group], out=product[:, group])
    return product


def _gradient(
    x: Tensor, g: Tensor, table: Tensor, data: _TableData, order: Tensor | None, groups: int
) -> Tensor:
    """(K, C_in/groups, C_out): chunk by chunk, the pairs of an offset by one product."""
    wide = _wide(x)
    inner, outer = x.shape[1] // groups, g.shape[1] // groups
    sizes = (table.shape[0], groups, _lanes(inner), _lanes(outer))
    found = torch.zeros(sizes, dtype=wide, device=x.device)
    for chunk in _chunks(table, data):
        own = _by_group(_rows(g, order, chunk.begin, chunk.rows).to(wide), groups)
        own = pad(own, (0, sizes[3] - outer, 0, 0, 0, VECTOR))
        for piece in chunk.pieces:
            left = _filled(_by_group(x.index_select(0, piece.sources).to(wide), groups))
            left[piece.pairs :] = 0  # row 0 may hold an infinity
            full = piece.pairs == chunk.rows
            right = own[: len(left)] if full else own.index_select(0, piece.places)
            _add_outer(found[piece.offset], left, right)
    return found[:, :, :inner, :outer].transpose(1, 2).flatten(2)


def _add_outer(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total (groups, C, D) += Σ_p left (P, groups, C) right (P, groups, D)

    Libraries add the terms of small matrices one after the other: these are divided into VECTOR
    parts.
    """
    groups, inner, outer = total.shape
    if inner == outer == 1:
        total += (left * right).sum(0).unsqueeze(2)
    elif min(inner, outer) <= VECTOR:
        first, second = (a.view(VECTOR, -1, *a.shape[1:]) for a in (left, right))
        total += (first.permute(0, 2, 3, 1) @ second.transpose(1, 2)).sum(0)
    else:
        for group in range(groups):
            _add_product(total[group], left[:, group], right[:, group])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total (C, D) += Σ_p left (P, C) right (P, D), in blocks that no library divides."""
    for begin in range(0, len(left), ROWS_PER_PRODUCT):
        rows = slice(begin, begin + ROWS_PER_PRODUCT)
        total.addmm_(left[rows].T, right[rows])


def _chunks(table: Tensor, data: _TableData, larger: int = 1) -> list[_RowChunk]:
    """The chunks of a map, `larger` times the size of those in which sums over rows run."""
    if larger not in data.chunks:
        data.chunks[larger] = list(_cut(table, data, larger))
    return data.chunks[larger]


def _cut(table: Tensor, data: _TableData, larger: int) -> Iterator[_RowChunk]:
    num_offsets, num_rows = table.shape
    density = max(data.pairs, 1) / max(data.entries, 1)
    most = larger * min(PAIRS_PER_CHUNK / density, MOST_ROWS_PER_CHUNK)
    size = VECTOR * math.ceil(min(most, max(num_rows, 1)) / VECTOR)
    for begin in range(0, num_rows, size):
        part = table[:, begin : begin + size]
        offset, place = (part >= 0).nonzero().unbind(1)
        counts = torch.bincount(offset, minlength=num_offsets).tolist()
        met, places = (torch.split(t, counts) for t in (part[offset, place], place))
        rows = part.shape[1]
        pieces = []
        for k, n in enumerate(counts):
            if n:
                end = (0, -n % VECTOR)
                padded = pad(met[k], end), pad(places[k], end, value=rows)
                pieces.append(_OffsetPiece(k, n, *padded))
        yield _RowChunk(begin, rows, pieces)


def _is_folded(x: Tensor, shape: tuple[int, ...], data: _TableData, groups: int) -> bool:
    """Whether all offsets are one product, with zeros where a row meets none.

    Times are in nanoseconds of a core of 85 GFLOP/s: of a gathered row, of its elements, of a
    product.  Products by offset also pay for an addition per pair, and for calls per offset.
    """
    num_offsets, inner, outer = shape
    product = inner * outer / 42
    entry = 4 + inner / 3 + product
    pair = 8 + (inner + outer) / 2 + product
    return groups == 1 and entry * data.entries < pair * data.pairs + 8_000 * num_offsets


def _folded_sums(
    x: Tensor, weight: Tensor, table: Tensor, data: _TableData, groups: int
) -> ChunkSums:
    """(first row, sums): y[o] = (x[sources[0,o]], x[sources[1,o]], …) @ weight, one matrix."""
    wide = _wide(x)
    columns = _columns(table.shape[0], x.shape[1])
    matrix = _filled(weight.to(wide))
    matrix = pad(matrix, (0, 0, 0, 0, 0, columns - len(matrix))).flatten(0, 1)
    for begin, rows, neighbours in _folded(x.to(wide), table, data, columns):
        yield begin, (neighbours @ matrix)[:rows, : weight.shape[2]]


def _folded_gradient(
    x: Tensor, g: Tensor, table: Tensor, data: _TableData, order: Tensor | None, groups: int
) -> Tensor:
    wide = _wide(x)
    (num_offsets, _), inner, outer = table.shape, x.shape[1], g.shape[1]
    columns = _columns(num_offsets, inner)
    found = torch.zeros(columns * inner, _lanes(outer), dtype=wide, device=x.device)
    for begin, rows, neighbours in _folded(x.to(wide), table, data, columns):
        own = _rows(g, order, begin, rows).to(wide)
        own = pad(own, (0, found.shape[1] - outer, 0, len(neighbours) - rows))
        _add_product(found, neighbours, own)
    return found.view(columns, inner, -1)[:num_offsets, :, :outer]


def _folded(
    x: Tensor, table: Tensor, data: _TableData, columns: int
) -> Iterator[tuple[int, int, Tensor]]:
    """(first row, rows, (rows padded to VECTOR, columns · C_in) neighbours), chunk by chunk."""
    num_offsets, num_rows = table.shape
    if columns not in data.by_row:
        padding = (0, columns - num_offsets, 0, -num_rows % VECTOR)
        data.by_row[columns] = pad(table.T, padding, value=-1).contiguous()
    x = pad(x, (0, 0, 0, 1))  # −1 reads the zeros behind
    width = columns * x.shape[1]
    size = VECTOR * max(1, min(GATHERED // max(width, 1), PAIRS_PER_CHUNK) // VECTOR)
    for begin in range(0, num_rows, size):
        part = data.by_row[columns][begin : begin + size]
        part = torch.where(part < 0, len(x) - 1, part).flatten()
        neighbours = x.index_select(0, part).view(-1, width)
        yield begin, min(size, num_rows - begin), neighbours


def _columns(num_offsets: int, channels: int) -> int:
    """Offsets, padded so that their channels are a multiple of VECTOR."""
    unit = VECTOR // math.gcd(VECTOR, channels)
    return -(-num_offsets // unit) * unit


def _finished(total: Tensor, after: Epilogue, order: Tensor | None, begin: int) -> Tensor:
    """The epilogue of the sums of a chunk, in their dtype."""
    if after.residual is not None:
        after = after._replace(residual=_rows(after.residual, order, begin, len(total)))
    return after.to(total.dtype)(total)


def _rows(g: Tensor, order: Tensor | None, begin: int, count: int) -> Tensor:
    part = slice(begin, begin + count)
    return g[part] if order is None else g.index_select(0, order[part])


def _by_group(a: Tensor, groups: int) -> Tensor:
    """(…, C) → (…, groups, C/groups)"""
    return a.reshape(*a.shape[:-1], groups, a.shape[-1] // groups)


def _filled(a: Tensor) -> Tensor:
    """Padded with columns of zeros."""
    return pad(a, (0, _lanes(a.shape[-1]) - a.shape[-1]))


def _lanes(channels: int) -> int:
    return channels if channels <= VECTOR else channels + -channels % VECTOR


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
