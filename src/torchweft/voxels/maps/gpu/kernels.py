"""Triton kernels of coordinates and kernel maps.

Axes are numbered 0 to 3 and end with the last column of a row: with d < 4 axes the first 4 − d do
not exist and have size and kernel 1.  A line is all offsets of a kernel that differ in the last
axis alone: their keys are consecutive, so one search finds the first, and a walk the others.

In boxes with few cells per voxel, neighbours are looked up in words, not searched:

    words[w] = first · 2³² + bits                  bit b: a voxel has the key 32 w + b

`mark` writes the words of keys that ascend; `take`, `count` and `number` those of keys in any
order, which `arrange` then sorts.  The voxels of a word are consecutive in ascending order, from
place `first` on, so that the place of a voxel is `first` plus the number of bits below its own.

Results repeat bit for bit: `take` joins bits by an atomic OR, which no order of voxels changes.
"""
# mypy: ignore-errors
# Parameters are listed axis by axis:
# fmt: off

import triton
import triton.language as tl

from torchweft.voxels.maps.gpu.tile_kernels import count_bits, entries_of


@triton.jit
def column_of(rows_ptr, at, mask, AXIS: tl.constexpr, COLUMNS: tl.constexpr):
    """The column of an axis: −1 is the batch number, the column of a missing axis is 0."""
    if AXIS < 0:
        return tl.load(rows_ptr + at.to(tl.int64) * COLUMNS, mask=mask, other=0).to(tl.int64)
    if AXIS < 5 - COLUMNS:
        return tl.zeros_like(at).to(tl.int64)
    cell = at.to(tl.int64) * COLUMNS + (AXIS + COLUMNS - 4)
    return tl.load(rows_ptr + cell, mask=mask, other=0).to(tl.int64)


@triton.jit(do_not_specialize=["N"])
def survey_kernel(rows_ptr, found_ptr, N: tl.int64, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """For a block: ~lowest and highest of each column, and whether a row is not below the next.

    The maximum over all blocks is the result; ~v = −v − 1 never overflows.
    """
    program = tl.program_id(0)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    last = N - 1
    row, following = tl.minimum(at, last), tl.minimum(at + 1, last)
    out_ptr = found_ptr + program.to(tl.int64) * (2 * COLUMNS + 1)
    below = at >= last  # no row follows the last
    for i in tl.static_range(COLUMNS):
        column = COLUMNS - 1 - i
        value = tl.load(rows_ptr + row * COLUMNS + column).to(tl.int64)
        after = tl.load(rows_ptr + following * COLUMNS + column).to(tl.int64)
        tl.store(out_ptr + column, ~tl.min(value, 0))
        tl.store(out_ptr + COLUMNS + column, tl.max(value, 0))
        below = (value < after) | ((value == after) & below)
    tl.store(out_ptr + 2 * COLUMNS, 1 - tl.min(below.to(tl.int64), 0))


@triton.jit
def _raise(flag_ptr, truth):
    """Set a flag if an element is true; all programs write the same value."""
    tl.store(flag_ptr, 1, mask=tl.max(truth.to(tl.int32), 0) != 0)


@triton.jit
def _by_column(column, of_b, of0, of1, of2, of3, COLUMNS: tl.constexpr):
    """The number for the axis of each column, the batch first."""
    axis = column + (4 - COLUMNS)
    of = tl.where(axis == 0, of0, tl.where(axis == 1, of1, tl.where(axis == 2, of2, of3)))
    return tl.where(column == 0, of_b, of)


@triton.jit
def _packed(rows_ptr, at, mask, column, low, size, weight, COLUMNS: tl.constexpr):
    """The keys of rows, and which rows are outside of the box; reads whole rows."""
    cell = at[:, None] * COLUMNS + column[None, :]  # [BLOCK, columns]
    live = mask[:, None] & (column < COLUMNS)[None, :]
    digit = tl.load(rows_ptr + cell, mask=live, other=0).to(tl.int64) - low[None, :]
    outside = live & ((digit < 0) | (digit >= size[None, :]))
    key = tl.sum(tl.where(live, digit * weight[None, :], 0), 1)
    return key, tl.max(outside.to(tl.int32), 1) != 0


@triton.jit(do_not_specialize=range(3, 14))
def pack_kernel(
    rows_ptr, keys_ptr, flags_ptr,
    N: tl.int64,
    low_b: tl.int64, low0: tl.int64, low1: tl.int64, low2: tl.int64, low3: tl.int64,
    size_b: tl.int64, size0: tl.int64, size1: tl.int64, size2: tl.int64, size3: tl.int64,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):
    """keys[i] = ((b · R0 + s0) · R1 + s1) · R2 + … of columns less their lowest values.

    flags: a row is outside of the box, a row is not below the next.  With flags the key of a row
    outside is −1, which kernels skip that run before a flag is read.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, 2 if COLUMNS == 2 else 4 if COLUMNS < 5 else 8)
    low = _by_column(column, low_b, low0, low1, low2, low3, COLUMNS)
    size = _by_column(column, size_b, size0, size1, size2, size3, COLUMNS)
    line = size3.to(tl.int64)
    plane = line * size2
    weight = _by_column(column, plane * size1 * size0, plane * size1, plane, line, 1, COLUMNS)
    mask = at < N
    key, outside = _packed(rows_ptr, at, mask, column, low, size, weight, COLUMNS)
    value = key if flags_ptr is None else tl.where(outside, -1, key)
    tl.store(keys_ptr + at, value.to(keys_ptr.dtype.element_ty), mask=mask)
    if flags_ptr is not None:
        _raise(flags_ptr, outside)
        mask = at + 1 < N
        following, _ = _packed(rows_ptr, at + 1, mask, column, low, size, weight, COLUMNS)
        _raise(flags_ptr + 1, mask & (key >= following))


@triton.jit(do_not_specialize=["N"])
def settle_kernel(keys_ptr, places_ptr, order_ptr, flags_ptr, N: tl.int64, BLOCK: tl.constexpr):
    """order = places; the third flag: a sorted key equals the next."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    place = tl.load(places_ptr + at, mask=mask, other=0)
    tl.store(order_ptr + at, place.to(tl.int32), mask=mask)
    mask = at + 1 < N
    key = tl.load(keys_ptr + at, mask=mask, other=0)
    _raise(flags_ptr + 2, mask & (key == tl.load(keys_ptr + at + 1, mask=mask, other=0)))


@triton.jit
def _among_all(keys_ptr, target, N, PIVOTS: tl.constexpr):
    """How many of all keys are below each of a few targets, PIVOTS ways at a step.

    A step waits once for memory: 20 bits are 4 steps, where halving would wait 20 times.
    """
    begin = tl.zeros_like(target).to(tl.int32)
    width = tl.cdiv(N, PIVOTS)
    while width > 0:
        at = begin[:, None] + (tl.arange(0, PIVOTS) + 1)[None, :] * width - 1
        key = tl.load(keys_ptr + at, mask=at < N, other=0)
        below = (at < N) & (key < target[:, None])
        begin += tl.sum(below.to(tl.int32), 1) * width
        width = tl.where(width > 1, tl.cdiv(width, PIVOTS), 0)
    return begin


@triton.jit
def _search(keys_ptr, target, wanted, N, MOST: tl.constexpr, PIVOTS: tl.constexpr):
    """[LINES, BLOCK] how many keys are below each target; first for a line's lowest and highest.

    The targets of a block follow each other about as its keys do, so what is left between these
    two is about as long as the block: 8 halvings where log2 N would be 20.
    """
    highest = tl.max(tl.where(wanted, target, -1), 1)
    lowest = tl.minimum(tl.min(tl.where(wanted, target, MOST), 1), highest)
    ends = tl.join(lowest, highest)  # [LINES, 2]
    place = _among_all(keys_ptr, tl.reshape(ends, (2 * ends.shape[0],)), N, PIVOTS)
    begin, end = tl.split(tl.reshape(place, ends.shape))
    span = tl.max(end - begin, 0)
    step = tl.zeros_like(span) + 1
    while step <= span // 2:
        step = step * 2
    at, last = begin[:, None] + tl.zeros_like(target).to(tl.int32), end[:, None]
    while step > 0:
        fits = wanted & (step <= last - at)
        key = tl.load(keys_ptr + (at + step - 1), mask=fits, other=0)
        at = tl.where(fits & (key < target), at + step, at)
        step = step // 2
    return at


@triton.jit
def _keep(table_ptr, rest_ptr, k, num_offsets, N, at, value, mask, MIRRORED: tl.constexpr):
    """table[k, at] = value; MIRRORED: table[K − 1 − k, at].  Returns the bits of found rows."""
    if MIRRORED:
        k = num_offsets - 1 - k
    tl.store(entries_of(table_ptr, rest_ptr, k.to(tl.int64), num_offsets, N) + at, value, mask=mask)
    # bits have a meaning for up to 32 offsets; those of lines past the last are never set
    return (mask & (value >= 0)).to(tl.int32) << tl.minimum(tl.maximum(k, 0), 31)


@triton.jit
def row_at(order_ptr, place, hit):
    """The row at a place of the sorted keys; −1 where `hit` is false."""
    if order_ptr is not None:
        return tl.load(order_ptr + place, mask=hit, other=-1)
    return tl.where(hit, place, -1)


@triton.jit
def _centre(
    keys_ptr, order_ptr, table_ptr, rest_ptr,
    at, own, key, coordinate, size, mask, N, num_offsets,
    LAST: tl.constexpr, GAP: tl.constexpr, MOST: tl.constexpr, MIRRORED: tl.constexpr,
):
    """The centre line of a symmetric kernel: its voxels are next to the row itself."""
    k = tl.zeros_like(at) + num_offsets // 2
    bits = _keep(table_ptr, rest_ptr, k, num_offsets, N, at, own, mask, MIRRORED)
    for side in tl.static_range(-1, 2, 2):
        place = at + side
        here = tl.load(keys_ptr + place, mask=mask & (place >= 0) & (place < N), other=MOST)
        for t in tl.static_range(1, LAST // 2 + 1):
            target = key + (side * t * GAP)
            for _ in tl.static_range(GAP):
                short = (here < target) if side > 0 else (here > target)
                place = tl.where(short & (here != MOST), place + side, place)
                here = tl.load(keys_ptr + place, mask=mask & (place >= 0) & (place < N), other=MOST)
            moved = coordinate + (side * t * GAP)
            hit = mask & (here == target) & (moved >= 0) & (moved < size)
            value = row_at(order_ptr, place, hit)
            k_side = k + side * t
            bits |= _keep(table_ptr, rest_ptr, k_side, num_offsets, N, at, value, mask, MIRRORED)
    return bits


@triton.jit
def _within(rows_ptr, own, mask, inside, away, low, size, AXIS: tl.constexpr,
            COLUMNS: tl.constexpr):
    """Which of `inside` (lines, rows) are in the box along an axis."""
    if COLUMNS > 4 - AXIS:
        moved = (column_of(rows_ptr, own, mask, AXIS, COLUMNS) - low)[None, :] + away[:, None]
        inside &= (moved >= 0) & (moved < size)
    return inside


@triton.jit
def _away(number, dilation, begin):
    """The distance of an offset from a voxel along an axis."""
    return number.to(tl.int64) * dilation - begin


@triton.jit(do_not_specialize=range(5, 27))
def search_kernel(
    keys_ptr, order_ptr, rows_ptr, table_ptr, rest_ptr, parts_ptr,
    N: tl.int32, num_offsets: tl.int32, lines: tl.int32,
    low0: tl.int64, low1: tl.int64, low2: tl.int64, low3: tl.int64,
    size0: tl.int64, size1: tl.int64, size2: tl.int64, size3: tl.int64,
    kernel1: tl.int32, kernel2: tl.int32, kernel3: tl.int32,
    dil0: tl.int64, dil1: tl.int64, dil2: tl.int64, dil3: tl.int64,
    begin0: tl.int64, begin1: tl.int64, begin2: tl.int64, begin3: tl.int64,
    COLUMNS: tl.constexpr, SYMMETRIC: tl.constexpr, MIRRORED: tl.constexpr, LAST: tl.constexpr,
    GAP: tl.constexpr, MOST: tl.constexpr, HALF: tl.constexpr, PIVOTS: tl.constexpr,
    LINES: tl.constexpr, BLOCK: tl.constexpr,
):
    """table[k, i] = the row at offset k from the i-th in order, −1 for none; see `entries_of`.

    A program owns BLOCK consecutive rows in sorted order and LINES lines of the kernel.
    parts[tile, i]: the offsets that it found, as bits, for kernels of up to 32 offsets.
    HALF: only lines past the centre are searched: the row that finds another is what the other
    finds at the opposite offset, and is written there.  The lines before are filled with −1.
    `kernel1` … `kernel3` are the numbers of `lines` by axis, LAST the offsets of each.  MOST is the
    largest number of the keys' dtype.  Bytes: the table.  Bound: instructions, then memory.
    """
    blocks = tl.cdiv(N, BLOCK)
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    tile = tl.program_id(0) // blocks
    mask = at < N
    own = at if order_ptr is None else tl.load(order_ptr + at, mask=mask, other=0)
    key = tl.load(keys_ptr + at, mask=mask, other=0)
    last = column_of(rows_ptr, own, mask, 3, COLUMNS) - low3
    bits = tl.zeros((BLOCK,), tl.int32)

    line = tile * LINES + tl.arange(0, LINES)  # [LINES]
    if SYMMETRIC:
        if tile == 0:
            bits = _centre(
                keys_ptr, order_ptr, table_ptr, rest_ptr, at, own, key, last, size3, mask,
                N, num_offsets, LAST, GAP, MOST, MIRRORED)
        line += lines // 2 + 1 if HALF else (line >= lines // 2).to(tl.int32)
    away3 = _away(line % kernel3, dil3, begin3)
    away2 = _away(line // kernel3 % kernel2, dil2, begin2)
    outer = line // kernel3 // kernel2
    away1, away0 = _away(outer % kernel1, dil1, begin1), _away(outer // kernel1, dil0, begin0)
    step = ((away0 * size1 + away1) * size2 + away2) * size3

    inside = (line < lines)[:, None] & mask[None, :]  # [LINES, BLOCK]
    write = inside
    inside = _within(rows_ptr, own, mask, inside, away0, low0, size0, 0, COLUMNS)
    inside = _within(rows_ptr, own, mask, inside, away1, low1, size1, 1, COLUMNS)
    inside = _within(rows_ptr, own, mask, inside, away2, low2, size2, 2, COLUMNS)

    # a coordinate far outside is clamped near its line: nothing overflows, and it is no hit
    moved = last[None, :] + away3[:, None]
    near = tl.minimum(tl.maximum(moved, -LAST * GAP), size3 + LAST * GAP)
    target = ((key.to(tl.int64) - last)[None, :] + step[:, None] + near).to(key.dtype)
    place = _search(keys_ptr, target, inside, N, MOST, PIVOTS)
    here = tl.load(keys_ptr + place, mask=inside & (place < N), other=MOST)
    found = tl.zeros((LINES, BLOCK), tl.int32)
    for t in tl.static_range(LAST):
        for _ in tl.static_range(GAP if t > 0 else 0):
            place += (here < target).to(tl.int32)
            here = tl.load(keys_ptr + place, mask=inside & (place < N), other=MOST)
        hit = inside & (here == target) & (moved >= 0) & (moved < size3)
        value = row_at(order_ptr, place, hit)
        k = (line * LAST + t)[:, None]
        found |= _keep(table_ptr, rest_ptr, k, num_offsets, N, at[None, :], value, write, MIRRORED)
        if HALF:
            opposite = (num_offsets - 1 - k).to(tl.int64)
            opposite_ptr = entries_of(table_ptr, rest_ptr, opposite, num_offsets, N)
            tl.store(opposite_ptr + place, own[None, :], mask=hit)
        target += GAP
        moved += GAP
    if parts_ptr is not None:
        # no two lines share an offset, so that the sum of bits is their OR
        bits += tl.sum(found, 0)
        tl.store(parts_ptr + tile.to(tl.int64) * N + at, bits, mask=mask)


@triton.jit(do_not_specialize=["N"])
def mark_kernel(keys_ptr, words_ptr, N: tl.int32, BLOCK: tl.constexpr):
    """words[w] for each w with a voxel; keys ascend, a negative key has no cell."""
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
    """The positions of a program's BLOCK words, and their bits."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return at, tl.load(bits_ptr + at)


@triton.jit
def count_kernel(bits_ptr, counts_ptr, BLOCK: tl.constexpr):
    """counts[b]: the number of set bits in the b-th BLOCK of words."""
    _, bits = _bits_of(bits_ptr, BLOCK)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(count_bits(bits)))


@triton.jit
def number_kernel(bits_ptr, counts_ptr, words_ptr, total_ptr, BLOCK: tl.constexpr):
    """words[w] = first · 2³² + bits[w], first: the number of bits in the words before; total: all.

    A program owns BLOCK words, and adds up the counts of the blocks before.
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
    """(bit t: whether cell + t has a voxel, for t < REACH; the number of voxels before the cell).

    A cell may be before the first, and its reach may end past the last, where there is one more
    word.  Only words with a voxel have a valid place.
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
):
    """sorted[r] = keys[i] and order[r] = i, where r voxels are before the i-th.

    Where a voxel is repeated or outside of the box, there are fewer marked cells than voxels: the
    third flag.  Rows then keep their order, with keys −1, which kernels skip.
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

    With a rest, the table's rows past its centre are written to it.
    A program owns BLOCK consecutive rows in sorted order, and all lines.
    parts[i]: the offsets that it found, as bits, for unmirrored kernels of up to 32 offsets.
    A line is one or two words; its voxels are consecutive, so that one place determines all.
    Bytes: the table, and words that stay in L2.  Bound: instructions, for each entry.
    """
    REACH: tl.constexpr = (LAST - 1) * GAP + 1
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = at < N
    own = at if order_ptr is None else tl.load(order_ptr + at, mask=mask, other=0)
    key = tl.load(keys_ptr + at, mask=mask, other=0)
    c0 = _axis(rows_ptr, own, mask, low0, 0, COLUMNS)
    c0 = tl.where(mask & (key >= 0), c0, -(2**30))  # a row outside of the box meets none
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
