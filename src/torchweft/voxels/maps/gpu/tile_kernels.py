"""Triton kernels that build sorted tiles of rows and lists of pairs from a kernel map's table.

    table[k,i] = sources[k, order[i]]        whose columns i are in canonical order

Rows of equal masks (which of the K offsets have a source) are sorted together, so that a tile of
rows needs few offsets.  A panel is `PANEL` sorted rows, `lists` (panels, K, PANEL) are the input
rows that they read, −1 for none, defined for the offsets that one of them needs.  Halves of panels
have masks of their own, because tiles are 64 or 128 rows.  Masks are words of 32 bits.  The pairs
of an offset are listed together, in canonical order.

The helpers of this layout also serve the convolution's kernels.  Programs are along grid axis 0.
Rows are counted in int64 where K N may pass 2^31.
"""
# ruff: noqa: N803, N806, RET505
# mypy: ignore-errors
# Parameters are in groups:
# fmt: off

from __future__ import annotations

import triton
import triton.language as tl

PANEL = tl.constexpr(128)
HALF = tl.constexpr(64)
UNIT = tl.constexpr(64)
"""Pairs that the weight gradient sums at once."""


@triton.jit
def entries_of(table_ptr, rest_ptr, k, offsets, N):
    """Row k of a table; with a rest, the rows past the centre are in the rest."""
    if rest_ptr is None:
        return table_ptr + k * N
    else:
        kept = offsets // 2 + 1
        return tl.where(k < kept, table_ptr + k * N, rest_ptr + (k - kept) * N)


@triton.jit
def lowest_bit(word):
    """The lowest set bit of an int64 below 2^32; 0 if there is none."""
    bit = (((word & -word).to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255) - 127
    return tl.where(word == 0, 0, bit)


@triton.jit
def count_bits(word):
    """The number of set bits of an int32, in a form that compiles to one POPC."""
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
def units_before(totals_ptr, k, K: tl.constexpr, OFFSETS: tl.constexpr):
    """Units of UNIT pairs of the offsets below k; the last of an offset may not be full."""
    other = tl.arange(0, OFFSETS)
    total = tl.load(totals_ptr + other, mask=(other < k) & (other < K), other=0)
    return tl.sum(tl.cdiv(total, UNIT))


@triton.jit
def share_size(totals_ptr, shares, K: tl.constexpr, OFFSETS: tl.constexpr):
    """Units of pairs per share."""
    return tl.maximum(tl.cdiv(units_before(totals_ptr, K, K, OFFSETS), shares), 1)


@triton.jit
def _row_of(order_ptr, i, live):
    """The row at place i of the canonical order."""
    if order_ptr is None:
        return i.to(tl.int64)
    else:
        return tl.load(order_ptr + i, mask=live, other=0).to(tl.int64)


@triton.jit(do_not_specialize=["N"])
def rest_kernel(
    table_ptr, order_ptr, place_ptr, rest_ptr, N, HALF: tl.constexpr, BLOCK: tl.constexpr,
):
    """rest[HALF − 1 − k, place[table[k,i]]] = order[i]: rows of a mirrored table past its centre.

    If row order[i] reads row r at offset k, row r reads order[i] at offset K − 1 − k.  place is the
    inverse of order.  The caller fills rest with −1.  A program reads one offset of BLOCK
    consecutive columns.  Bound: memory, 8 HALF N bytes.
    """
    k, N = tl.program_id(0) % HALF, N.to(tl.int64)
    i = tl.program_id(0).to(tl.int64) // HALF * BLOCK + tl.arange(0, BLOCK)
    live = i < N
    read = tl.load(table_ptr + k * N + i, mask=live, other=-1)
    there = read >= 0
    own = _row_of(order_ptr, i, live).to(tl.int32)
    tl.store(rest_ptr + (HALF - 1 - k) * N + _row_of(place_ptr, read, there), own, mask=there)


@triton.jit(do_not_specialize=["N"])
def mask_kernel(table_ptr, rest_ptr, masks_ptr, N, K: tl.constexpr, BLOCK: tl.constexpr):
    """masks[w,i]: bit b says whether column i of a table has a row at offset 32 w + b.

    A program reads 32 offsets of BLOCK consecutive columns.  Bound: memory, 4 K N bytes.
    """
    _mask(tl.program_id(0), table_ptr, rest_ptr, masks_ptr, N, K, BLOCK)


@triton.jit
def _mask(program, table_ptr, rest_ptr, masks_ptr, N, K: tl.constexpr, BLOCK: tl.constexpr):
    WORDS: tl.constexpr = (K + 31) // 32
    bit = tl.arange(0, 32)[:, None]
    k = program % WORDS * 32 + bit  # [32, 1]
    i = program.to(tl.int64) // WORDS * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    at = entries_of(table_ptr, rest_ptr, k, K, N.to(tl.int64)) + i[None, :]
    source = tl.load(at, mask=(k < K) & (i < N)[None, :], other=-1)
    mask = tl.sum((source >= 0).to(tl.int32) << bit, axis=0)
    tl.store(masks_ptr + program % WORDS * N.to(tl.int64) + i, mask, mask=i < N)


@triton.jit
def _mask_of(parts_ptr, word, i, live, N, PARTS: tl.constexpr):
    """Word `word` of the masks of columns, from its parts."""
    mask = tl.zeros(i.shape, tl.int32)
    for part in tl.static_range(PARTS):
        at = (word * PARTS + part) * N.to(tl.int64) + i
        mask |= tl.load(parts_ptr + at, mask=live, other=0)
    return mask


@triton.jit
def _often(
    parts_ptr, word, N,
    K: tl.constexpr, PARTS: tl.constexpr, OFFSETS: tl.constexpr, SAMPLES: tl.constexpr,
):
    """Columns of a sample that have a row at each offset: for the offsets of one word, and for all.

    The sample takes eight consecutive columns at a time, for coalesced reads.
    """
    lane = tl.arange(0, SAMPLES)
    sample = (lane // 8).to(tl.int64) * N // (SAMPLES // 8) // 8 * 8 + lane % 8
    live = sample < N
    bit = tl.arange(0, 32)[None, :]
    mask = _mask_of(parts_ptr, word, sample, live, N, PARTS)
    count = tl.sum((mask[:, None] >> bit) & 1, axis=0)  # [32]
    if K <= 32:
        return count, count
    else:
        k = tl.arange(0, OFFSETS)[None, :]
        at = k // 32 * N.to(tl.int64) + sample[:, None]
        masks = tl.load(parts_ptr + at, mask=live[:, None] & (k < K), other=0)
        return count, tl.sum((masks >> k % 32) & 1, axis=0)


@triton.jit(do_not_specialize=["N", "blocks"])
def key_kernel(
    parts_ptr, masks_ptr, keys_ptr, counts_ptr, N, blocks,
    K: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, OFFSETS: tl.constexpr,
    SAMPLES: tl.constexpr, NEAR: tl.constexpr, BLOCK: tl.constexpr,
):
    """keys[i]: column i's mask as a Gray code, below the number of its block of NEAR columns.

    The rarer an offset in a sample of columns, the higher its bit; neighbours in a Gray code
    differ in one offset.  Writes also the masks, and counts[k,b], the pairs of the b-th PANEL of
    columns.  A program owns BLOCK columns.
    """
    KEY: tl.constexpr = keys_ptr.dtype.element_ty
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    gray = _gray(
        block, i, parts_ptr, masks_ptr, counts_ptr, N, blocks,
        KEY, K, PARTS, BITS, OFFSETS, SAMPLES, BLOCK)
    tl.store(keys_ptr + i, ((i // NEAR).to(KEY) << BITS) | gray, mask=i < N)


@triton.jit
def _gray(
    block, i, parts_ptr, masks_ptr, counts_ptr, N, blocks, KEY: tl.constexpr,
    K: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, OFFSETS: tl.constexpr,
    SAMPLES: tl.constexpr, BLOCK: tl.constexpr,
):
    """The Gray codes of a block of columns, see `key_kernel`; writes their masks and counts."""
    part = block * (BLOCK // PANEL) + tl.arange(0, BLOCK // PANEL)
    bit = tl.arange(0, 32)
    other = tl.arange(0, OFFSETS)[None, :]
    gray = tl.zeros((BLOCK,), KEY)
    for word in tl.static_range((K + 31) // 32):
        mask = _mask_of(parts_ptr, word, i, i < N, N, PARTS)
        if masks_ptr is not None:
            tl.store(masks_ptr + word * N.to(tl.int64) + i, mask, mask=i < N)
        k = word * 32 + bit
        own, all = _often(parts_ptr, word, N, K, PARTS, OFFSETS, SAMPLES)
        rarer = (all[None, :] < own[:, None]) | (
            (all[None, :] == own[:, None]) & (other < k[:, None])
        )
        place = BITS - 1 - tl.sum((rarer & (other < K)).to(tl.int32), axis=1)
        top = (tl.zeros((32,), KEY) + 1) << tl.maximum(place, 0).to(KEY)
        # a bit of a Gray code flips all digits up to its place
        flips = tl.where(place >= 0, top | (top - 1), 0)
        for b in range(min(32, K - word * 32)):
            there = (mask >> b) & 1
            gray ^= tl.where(there != 0, tl.sum(tl.where(bit == b, flips, 0)), 0).to(KEY)
            count = tl.sum(tl.reshape(there, (BLOCK // PANEL, PANEL)), axis=1)
            tl.store(counts_ptr + (word * 32 + b) * blocks + part, count, mask=part < blocks)
    return gray


@triton.jit(do_not_specialize=["N"])
def rank_kernel(
    keys_ptr, sorted_ptr, N, MOST: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """sorted[r] = i where key i is the r-th: a stable sort of few keys.

    A program owns BLOCK keys and counts the keys before each of them; BLOCK divides CHUNK.  MOST is
    not below any key, and keys are not negative, so that differences do not overflow.  Bound:
    instructions, two for each of N² pairs.
    """
    SIGN: tl.constexpr = keys_ptr.dtype.element_ty.primitive_bitwidth - 1
    begin = tl.program_id(0) * BLOCK
    i = begin + tl.arange(0, BLOCK)[:, None]
    lane = tl.arange(0, CHUNK)[None, :]
    key = tl.load(keys_ptr + i, mask=i < N, other=0)
    minus = tl.zeros((BLOCK, CHUNK), tl.int32)
    ahead = tl.load(keys_ptr + lane, mask=lane < N, other=MOST)
    for first in range(0, N, CHUNK):
        # equal keys of earlier chunks come before
        other = ahead - (first + CHUNK <= begin).to(tl.int32)
        following = first + CHUNK + lane
        ahead = tl.load(keys_ptr + following, mask=following < N, other=MOST)
        # −1 by the sign of a difference needs half the instructions of a comparison
        minus += ((other - key) >> SIGN).to(tl.int32)
    j = begin // CHUNK * CHUNK + lane
    other = tl.load(keys_ptr + j, mask=j < N, other=MOST)
    before = ((other == key) & (j < i)).to(tl.int32) - minus
    rank = tl.sum(before, axis=1, keep_dims=True)
    tl.store(sorted_ptr + rank, i, mask=i < N)


@triton.jit
def _joined(a, b):
    return a | b


@triton.jit(do_not_specialize=["N"])
def list_kernel(
    table_ptr, rest_ptr, masks_ptr, order_ptr, sorted_ptr, rows_ptr, lists_ptr, halves_ptr, N,
    K: tl.constexpr, WIDE: tl.constexpr,
):
    """The rows, the lists and the masks of the halves, for one panel and 32 offsets.

    Walks the offsets that a row needs; entries are prefetched by one step, as nothing else hides
    their latency.  Bound: memory, a sector for each entry that exists.
    """
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    WORDS: tl.constexpr = (K + 31) // 32
    panel = tl.program_id(0).to(INT) // WORDS
    slot = panel * PANEL + tl.arange(0, PANEL)  # [PANEL]
    i = tl.load(sorted_ptr + slot, mask=slot < N, other=0).to(INT)
    _list(
        panel, tl.program_id(0) % WORDS, slot, i, table_ptr, rest_ptr, masks_ptr, order_ptr,
        rows_ptr, lists_ptr, halves_ptr, N, K, INT)


@triton.jit
def _list(
    panel, word, slot, i, table_ptr, rest_ptr, masks_ptr, order_ptr, rows_ptr, lists_ptr,
    halves_ptr, N, K: tl.constexpr, INT: tl.constexpr,
):
    WORDS: tl.constexpr = (K + 31) // 32
    live = slot < N
    mask = tl.load(masks_ptr + word * N.to(tl.int64) + i, mask=live, other=0)
    if word == 0:
        row = _row_of(order_ptr, i, live)
        tl.store(rows_ptr + slot, tl.where(live, row, -1).to(tl.int32))
    halves = tl.reduce(tl.reshape(mask, (2, HALF)), 1, _joined)
    tl.store(halves_ptr + (2 * panel + tl.arange(0, 2)) * WORDS + word, halves)
    rest = tl.reduce(halves, 0, _joined).to(tl.int64) & 0xFFFFFFFF
    lists_ptr += (panel * K + word * 32) * PANEL + tl.arange(0, PANEL)
    k = lowest_bit(rest)
    entry_ptr = entries_of(table_ptr, rest_ptr, word * 32 + k, K, N.to(INT)) + i
    source = tl.load(entry_ptr, mask=((mask >> k) & 1) != 0, other=-1)
    for _ in range(count_bits(rest.to(tl.int32))):
        rest &= rest - 1
        following = lowest_bit(rest)
        there = (rest != 0) & (((mask >> following) & 1) != 0)
        entry_ptr = entries_of(table_ptr, rest_ptr, word * 32 + following, K, N.to(INT)) + i
        ahead = tl.load(entry_ptr, mask=there, other=-1)
        tl.store(lists_ptr + k * PANEL, source)
        k, source = following, ahead


@triton.jit
def _offsets_of(halves_ptr, tile, live, parts, WORDS: tl.constexpr):
    """Offsets that each tile of one or two halves needs; −1 where there is no tile."""
    count = tl.zeros(tile.shape, tl.int32)
    first_ptr = halves_ptr + tile * parts * WORDS
    for word in range(WORDS):
        mask = tl.load(first_ptr + word, mask=live, other=0)
        mask |= tl.load(first_ptr + (parts - 1) * WORDS + word, mask=live, other=0)
        count += count_bits(mask)
    return tl.where(live, count, -1)


@triton.jit
def _turns(
    halves_ptr, turns_ptr, tiles, parts, needed, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    longer = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, tiles, BLOCK):
        count = _offsets_of(halves_ptr, first + lane, first + lane < tiles, parts, WORDS)
        longer += (count > needed).to(tl.int32)
    turn = tl.sum(longer)
    for first in range(0, tiles, BLOCK):
        count = _offsets_of(halves_ptr, first + lane, first + lane < tiles, parts, WORDS)
        mine = (count == needed).to(tl.int32)
        tl.store(turns_ptr + turn + tl.cumsum(mine, 0) - mine, first + lane, mask=mine != 0)
        turn += tl.sum(mine)


@triton.jit(do_not_specialize=["blocks"])
def scan_kernel(starts_ptr, totals_ptr, seen_ptr, blocks, BLOCK: tl.constexpr):
    """starts[k,b]: the pairs of offset k in earlier panels, in place of those in b; totals[k]: all.

    seen: the totals in host memory.  A program owns an offset.
    """
    _scan(tl.program_id(0), starts_ptr, totals_ptr, seen_ptr, blocks, BLOCK)


@triton.jit
def _scan(k, starts_ptr, totals_ptr, seen_ptr, blocks, BLOCK: tl.constexpr):
    total = 0
    for first in range(0, blocks, BLOCK):
        b = first + tl.arange(0, BLOCK)
        count = tl.load(starts_ptr + k * blocks + b, mask=b < blocks, other=0)
        start = total + tl.cumsum(count, 0) - count
        tl.store(starts_ptr + k * blocks + b, start, mask=b < blocks)
        total += tl.sum(count)
    tl.store(totals_ptr + k, total)
    tl.store(seen_ptr + k, total)


@triton.jit(do_not_specialize=["panels"])
def turn_kernel(
    halves_ptr, turns_ptr, long_ptr, panels, K: tl.constexpr, BLOCK: tl.constexpr
):
    """turns: tiles of 64 rows, long: of 128 rows, by the number of offsets they need, descending.

    A program owns one such number for one size of tiles.
    """
    _turn(tl.program_id(0), halves_ptr, turns_ptr, long_ptr, panels, K, BLOCK)


@triton.jit
def _turn(needed, halves_ptr, turns_ptr, long_ptr, panels, K: tl.constexpr, BLOCK: tl.constexpr):
    WORDS: tl.constexpr = (K + 31) // 32
    parts = 1 + needed // (K + 1)
    if parts == 2:
        turns_ptr = long_ptr
    tiles = 2 * panels // parts
    _turns(halves_ptr, turns_ptr, tiles, parts, needed % (K + 1), WORDS, BLOCK)


@triton.jit(do_not_specialize=["N", "blocks"])
def pair_kernel(
    table_ptr, masks_ptr, order_ptr, starts_ptr, totals_ptr, in_ptr, out_ptr, N, blocks,
    K: tl.constexpr, OFFSETS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):
    """The pairs (in, out) of a table's first K offsets, each in canonical order of the output rows.

    A program owns 16 offsets of one block.  Bound: instructions, for each of K N entries.
    """
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    GROUPS: tl.constexpr = (K + 15) // 16
    _pair(
        tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS, table_ptr, masks_ptr, order_ptr,
        starts_ptr, totals_ptr, in_ptr, out_ptr, N, blocks, K, OFFSETS, INT, BLOCK)


@triton.jit
def _pair(
    block, group, table_ptr, masks_ptr, order_ptr, starts_ptr, totals_ptr, in_ptr, out_ptr, N,
    blocks, K: tl.constexpr, OFFSETS: tl.constexpr, INT: tl.constexpr, BLOCK: tl.constexpr,
):
    i = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    row = _row_of(order_ptr, i, i < N).to(tl.int32)
    mask = tl.load(masks_ptr + group // 2 * N.to(tl.int64) + i, mask=i < N, other=0)
    base = pairs_before(totals_ptr, group * 16, K, OFFSETS).to(INT)
    for j in range(0, tl.minimum(16, K - group * 16), 4):
        # four counts in one word, as a block has fewer than 2^8 rows
        four = mask >> (group % 2 * 16 + j)
        all = (four & 1) | ((four & 2) << 7) | ((four & 4) << 14) | ((four & 8) << 21)
        before = tl.cumsum(all, 0) - all
        sources, places, live = (), (), ()
        for c in tl.static_range(4):
            k = group * 16 + j + c
            at = base + tl.load(starts_ptr + k * blocks + block, mask=k < K, other=0)
            places += (at + ((before >> 8 * c) & 0xFF),)
            source = table_ptr + (k * N.to(INT) + i)
            live += (((four >> c) & 1 != 0) & (k < K),)
            sources += (tl.load(source, mask=live[c], other=-1),)
            base += tl.load(totals_ptr + k, mask=k < K, other=0)
        for c in tl.static_range(4):
            tl.store(in_ptr + places[c], sources[c], mask=live[c])
            tl.store(out_ptr + places[c], row, mask=live[c])
