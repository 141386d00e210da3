"""Kernels of kernel maps in boxes with few cells for each voxel: neighbours are read, not searched.

    mark    words[w] = first · 2³² + bits            bit b: a voxel has the key 32 w + b
    look    table[k, i] = the row whose key is keys[i] + step(k), −1 if none

Voxels of a word follow each other in the order of their keys, from place `first` on, so a voxel
stands at `first` plus the bits below its own.  Axes, lines, `keep` and the parameters are those of
`map_kernels`.  No atomics: the first voxel of a word writes it.
"""
# ruff: noqa: N803
# mypy: ignore-errors
# Parameters stand axis by axis:
# fmt: off

import triton
import triton.language as tl

from weft.voxels.layout import count_bits
from weft.voxels.map_kernels import column_of, keep, row_at

__all__ = ["look_kernel", "mark_kernel"]


@triton.jit(do_not_specialize=["N"])
def mark_kernel(keys_ptr, words_ptr, N: tl.int32, BLOCK: tl.constexpr):
    """words[w] for each w of which a voxel has a key; keys ascend, a negative one has no cell."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    key = tl.load(keys_ptr + at, mask=mask, other=-1)
    word = key >> 5
    first = (key >= 0) & (word != tl.load(keys_ptr + at - 1, mask=mask & (at > 0), other=-1) >> 5)
    bits = tl.zeros((BLOCK,), tl.int32)
    place, here, more = at, key, first
    while tl.max(more.to(tl.int32), 0) != 0:
        bits |= tl.where(more, 1 << (here & 31).to(tl.int32), 0)
        place += 1
        here = tl.load(keys_ptr + place, mask=more & (place < N), other=-1)
        more = more & (here >> 5 == word)
    value = (at.to(tl.int64) << 32) | (bits.to(tl.int64) & 0xFFFFFFFF)
    tl.store(words_ptr + word, value, mask=first)


@triton.jit
def _axis(rows_ptr, own, mask, low, AXIS: tl.constexpr, COLUMNS: tl.constexpr):
    return (column_of(rows_ptr, own, mask, AXIS, COLUMNS) - low).to(tl.int32)


@triton.jit
def _inside(mask, coordinate, away, size):
    moved = coordinate + away
    return mask & (moved >= 0) & (moved < size)


@triton.jit(do_not_specialize=range(6, 27))
def look_kernel(
    keys_ptr, order_ptr, rows_ptr, words_ptr, table_ptr, parts_ptr,
    N: tl.int32, num_offsets: tl.int32, lines: tl.int32,
    low0: tl.int64, low1: tl.int64, low2: tl.int64, low3: tl.int64,
    size0: tl.int32, size1: tl.int32, size2: tl.int32, size3: tl.int32,
    kernel1: tl.int32, kernel2: tl.int32, kernel3: tl.int32,
    dil0: tl.int32, dil1: tl.int32, dil2: tl.int32, dil3: tl.int32,
    begin0: tl.int32, begin1: tl.int32, begin2: tl.int32, begin3: tl.int32,
    COLUMNS: tl.constexpr, MIRRORED: tl.constexpr, LAST: tl.constexpr, GAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """table[k, i] = the row at offset k from the i-th in order, −1 for none.

    A program owns BLOCK rows that follow each other in sorted order, and all lines.
    parts[i]: the offsets that it found, as bits, of a kernel of up to 32.
    Bytes: the table, and words that stay in L2.  Bound: instructions, for each entry.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = at < N
    own = at if order_ptr is None else tl.load(order_ptr + at, mask=mask, other=0)
    key = tl.load(keys_ptr + at, mask=mask, other=0)
    whole = mask & (key >= 0)  # a row outside of the box has no cell
    whole = mask & (key >= 0)  # a row outside of the box has no cell
    c0 = _axis(rows_ptr, own, mask, low0, 0, COLUMNS)
    c1 = _axis(rows_ptr, own, mask, low1, 1, COLUMNS)
    c2 = _axis(rows_ptr, own, mask, low2, 2, COLUMNS)
    c3 = _axis(rows_ptr, own, mask, low3, 3, COLUMNS)
    bits = tl.zeros((BLOCK,), tl.int32)
    k = 0
    for j0 in range(lines // (kernel1 * kernel2 * kernel3)):
        away0 = j0 * dil0 - begin0
        inside0 = _inside(whole, c0, away0, size0)
        for j1 in range(kernel1):
            away1 = j1 * dil1 - begin1
            inside1 = _inside(inside0, c1, away1, size1)
            for j2 in range(kernel2):
                away2 = j2 * dil2 - begin2
                inside2 = _inside(inside1, c2, away2, size2)
                step = (away0.to(key.dtype) * size1 + away1) * size2 + away2
                for j3 in range(kernel3):
                    away3 = j3 * dil3 - begin3
                    cell = key + (step * size3 + away3)
                    for t in tl.static_range(LAST):
                        there = _inside(inside2, c3, away3 + t * GAP, size3)
                        word = tl.load(words_ptr + (cell >> 5), mask=there, other=0)
                        bit = (cell & 31).to(tl.int32)
                        low = word.to(tl.int32)
                        place = (word >> 32).to(tl.int32) + count_bits(low & ((1 << bit) - 1))
                        value = row_at(order_ptr, place, (low >> bit) & 1 != 0)
                        bits |= keep(table_ptr, k, num_offsets, N, at, value, mask, MIRRORED)
                        k += 1
                        cell += GAP
    if parts_ptr is not None:
        tl.store(parts_ptr + at, bits, mask=mask)
