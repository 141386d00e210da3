"""What the kernels that prepare a sparse convolution and those that run it agree on.

Rows of equal masks (which of the K offsets have a voxel) stand together, so that a tile of rows
needs few offsets; pairs of an offset stand together in canonical order.  A panel is `PANEL` sorted
rows, `lists` (panels, K, PANEL) the input rows they read, −1 for none, defined for the offsets that
one of them needs.  Halves of panels have masks of their own: tiles are 64 or 128 rows.  Masks are
words of 32 bits.  Everything runs along grid axis 0.
"""
# ruff: noqa: N803, RET505
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "HALF",
    "PANEL",
    "UNIT",
    "count_bits",
    "entries_of",
    "lowest_bit",
    "pairs_before",
    "share_size",
]

PANEL = tl.constexpr(128)
HALF = tl.constexpr(64)
UNIT = tl.constexpr(64)
"""Pairs that are summed at once."""


@triton.jit
def entries_of(table_ptr, rest_ptr, k, offsets, N):
    """Row k of a table; with a rest, the rows past the centre are there."""
    if rest_ptr is None:
        return table_ptr + k * N
    else:
        kept = offsets // 2 + 1
        return tl.where(k < kept, table_ptr + k * N, rest_ptr + (k - kept) * N)


@triton.jit
def lowest_bit(word):
    """The number of the lowest bit that is set in an int64 below 2^32; 0 if there is none."""
    bit = (((word & -word).to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255) - 127
    return tl.where(word == 0, 0, bit)


@triton.jit
def count_bits(word):
    """How many bits are set in an int32, in the form that the compiler knows to be one POPC."""
    word = word.to(tl.uint32)
    pairs = word - ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return ((((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def pairs_before(totals_ptr, k, K: tl.constexpr, OFFSETS: tl.constexpr):
    """Pairs of the offsets below k."""
    other = tl.arange(0, OFFSETS)
    total = tl.load(totals_ptr + other, mask=(other < k) & (other < K), other=0)
    return tl.sum(total.to(tl.int64))


@triton.jit
def share_size(totals_ptr, shares, K: tl.constexpr, OFFSETS: tl.constexpr):
    """Pairs of a share, a multiple of UNIT."""
    size = tl.cdiv(tl.cdiv(pairs_before(totals_ptr, K, K, OFFSETS), shares), UNIT)
    return tl.maximum(size, 1) * UNIT
