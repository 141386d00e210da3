"""Kernels of kernel maps in boxes with few cells for each voxel: neighbours are read, not searched.

    words[w] = first · 2³² + bits                  bit b: a voxel has the key 32 w + b

    mark                      the words of keys that ascend
    take, count, number       the words of keys in any order
    arrange                   these keys ascending, and their order
    look    table[k, i]       the row whose key is keys[i] + step(k), −1 if none

Voxels of a word follow each other in the order of their keys, from place `first` on, so a voxel
stands at `first` plus the bits below its own: who knows the words needs no sort.  Axes, lines and
the parameters are those of `map_kernels`.

Results repeat bit for bit.  Where keys ascend, the first voxel of a word writes it; where they do
not, `take` joins bits by an atomic OR, which gives the same bits in whatever order voxels come.
"""
# ruff: noqa: N803, N806
# mypy: ignore-errors
# Parameters stand axis by axis:
# fmt: off

import triton
import triton.language as tl

from torchweft.voxels.grid.constants import count_bits
from torchweft.voxels.maps_gpu.kernels import column_of, row_at

__all__ = [
    "arrange_kernel",
    "count_kernel",
    "look_kernel",
    "mark_kernel",
    "number_kernel",
    "take_kernel",
]


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


@triton.jit(do_not_specialize=["N"])
def take_kernel(keys_ptr, bits_ptr, N: tl.int32, BLOCK: tl.constexpr):
    """Sets bit b of bits[w] for each key 32 w + b, in any order; a negative key has no cell."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + at, mask=at < N, other=-1)
    bit = (tl.zeros_like(at) + 1) << (key & 31).to(tl.int32)
    tl.atomic_or(bits_ptr + (key >> 5), bit, mask=key >= 0, sem="relaxed")


@triton.jit
def _bits_of(bits_ptr, BLOCK: tl.constexpr):
    """Those of a program's BLOCK words, and where they stand."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return at, tl.load(bits_ptr + at)


@triton.jit
def count_kernel(bits_ptr, counts_ptr, BLOCK: tl.constexpr):
    """counts[b]: the bits that are set in the b-th BLOCK of words."""
    _, bits = _bits_of(bits_ptr, BLOCK)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(count_bits(bits)))


@triton.jit
def number_kernel(bits_ptr, counts_ptr, words_ptr, total_ptr, BLOCK: tl.constexpr):
    """words[w] = first · 2³² + bits[w], first: the bits of the words before; total: all bits.

    A program owns BLOCK words, and adds up the counts of those before.
    """
    lane = tl.arange(0, BLOCK)
    block = tl.program_id(0)
    earlier = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, block, BLOCK):
        earlier += tl.load(counts_ptr + begin + lane, mask=begin + lane < block, other=0)
    at, bits = _bits_of(bits_ptr, BLOCK)
    upto = tl.sum(earlier) + tl.cumsum(count_bits(bits), 0)
    first = (upto - count_bits(bits)).to(tl.int64)
    tl.store(words_ptr + at, (first << 32) | (bits.to(tl.int64) & 0xFFFFFFFF))
    tl.store(total_ptr, tl.max(upto, 0), mask=block == tl.num_programs(0) - 1)


@triton.jit
def _taken(words_ptr, cell, mask, REACH: tl.constexpr):
    """(bit t: whether cell + t has a voxel, for t < REACH; how many voxels come before the cell).

    A cell may be before the first, and its reach end past the last, where one more word stands.
    Only words that have a voxel are known to have a place.
    """
    bit = (cell & 31).to(tl.int32)
    word_ptr = words_ptr + (cell >> 5)
    word = tl.load(word_ptr, mask=mask & (cell >= 0), other=0)
    low, first, taken = word.to(tl.int32), word, word & 0xFFFFFFFF
    if REACH > 1:
        following = tl.load(word_ptr + 1, mask=mask & (bit + REACH > 32), other=0)
        first = tl.where(low == 0, following, word)
        taken |= following << 32
    before = (first >> 32).to(tl.int32) + count_bits(low & ((1 << bit) - 1))
    return (taken >> bit.to(tl.int64)).to(tl.int32), before


@triton.jit(do_not_specialize=["N"])
def arrange_kernel(
    keys_ptr, words_ptr, total_ptr, sorted_ptr, order_ptr, flags_ptr, N: tl.int32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """sorted[r] = keys[i] and order[r] = i, where r voxels come before the i-th.

    Where some stand twice or outside of the box, fewer cells are taken than there are voxels: the
    third flag.  Rows then stand as they are, without keys: kernels pass them over.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + at, mask=at < N, other=-1)
    _, place = _taken(words_ptr, key, key >= 0, 1)
    distinct = tl.load(total_ptr) == N
    place = tl.where(distinct, place, at)
    tl.store(sorted_ptr + place, tl.where(distinct, key, -1), mask=at < N)
    tl.store(order_ptr + place, at, mask=at < N)
    tl.store(flags_ptr + 2, 1, mask=(tl.program_id(0) == 0) & (distinct == 0))


@triton.jit
def _axis(rows_ptr, own, mask, low, AXIS: tl.constexpr, COLUMNS: tl.constexpr):
    return (column_of(rows_ptr, own, mask, AXIS, COLUMNS) - low).to(tl.int32)


@triton.jit
def _below(number, size):
    """0 ≤ number < size, in one comparison."""
    return number.to(tl.uint32, bitcast=True) < size.to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=range(6, 26))
def look_kernel(
    keys_ptr, order_ptr, rows_ptr, words_ptr, table_ptr, rest_ptr, parts_ptr,
    N: tl.int32, num_offsets: tl.int32,
    low0: tl.int64, low1: tl.int64, low2: tl.int64, low3: tl.int64,
    size0: tl.int32, size1: tl.int32, size2: tl.int32, size3: tl.int32,
    kernel1: tl.int32, kernel2: tl.int32, kernel3: tl.int32,
    dil0: tl.int32, dil1: tl.int32, dil2: tl.int32, dil3: tl.int32,
    begin0: tl.int32, begin1: tl.int32, begin2: tl.int32, begin3: tl.int32,
    COLUMNS: tl.constexpr, MIRRORED: tl.constexpr, LAST: tl.constexpr, GAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """table[k, i] = the row at offset k from the i-th in order, −1 for none.

    With a rest, the table's rows past its centre go there.
    A program owns BLOCK rows that follow each other in sorted order, and all lines.
    parts[i]: the offsets that it found, as bits, of a kernel of up to 32 that is not mirrored.
    A line is one or two words; its voxels stand one behind the other, so one place says all.
    Bytes: the table, and words that stay in L2.  Bound: instructions, for each entry.
    """
    REACH: tl.constexpr = (LAST - 1) * GAP + 1
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = at < N
    own = at if order_ptr is None else tl.load(order_ptr + at, mask=mask, other=0)
    key = tl.load(keys_ptr + at, mask=mask, other=0)
    c0 = _axis(rows_ptr, own, mask, low0, 0, COLUMNS)
    c0 = tl.where(mask & (key >= 0), c0, -(2**30))  # a row outside of the box meets nobody
    c1 = _axis(rows_ptr, own, mask, low1, 1, COLUMNS)
    c2 = _axis(rows_ptr, own, mask, low2, 2, COLUMNS)
    c3 = _axis(rows_ptr, own, mask, low3, 3, COLUMNS)
    jump = N.to(tl.int64)
    if MIRRORED:
        table_ptr, jump = table_ptr + (num_offsets - 1) * jump, -jump
    bits = tl.zeros((BLOCK,), tl.int32)
    k = 0
    away0 = -begin0
    while k < num_offsets:
        inside0 = _below(c0 + away0, size0)
        for j1 in range(kernel1):
            away1 = j1 * dil1 - begin1
            inside1 = inside0 & _below(c1 + away1, size1)
            for j2 in range(kernel2):
                away2 = j2 * dil2 - begin2
                inside2 = inside1 & _below(c2 + away2, size2)
                step = (away0.to(key.dtype) * size1 + away1) * size2 + away2
                for j3 in range(kernel3):
                    away3 = j3 * dil3 - begin3
                    cell = key + (step * size3 + away3)
                    moved = c3 + away3
                    near = inside2 & _below(moved + (REACH - 1), size3 + (REACH - 1))
                    taken, place = _taken(words_ptr, cell, near, REACH)
                    values = ()
                    for t in tl.static_range(LAST):
                        for _ in tl.static_range(GAP if t > 0 else 0):
                            place += taken & 1
                            taken >>= 1
                        hit = near & _below(moved + t * GAP, size3) & (taken & 1 != 0)
                        values += (row_at(order_ptr, place, hit),)
                        bits |= hit.to(tl.int32) << (k + t)
                    for t in tl.static_range(LAST):
                        tl.store(table_ptr + at, values[t], mask=mask)
                        table_ptr += jump
                        if rest_ptr is not None:
                            table_ptr = tl.where(k + t == num_offsets // 2, rest_ptr, table_ptr)
                    k += LAST
        away0 += dil0
    if parts_ptr is not None:
        tl.store(parts_ptr + at, bits, mask=mask)
