"""Triton kernels of maps between two levels.

Each fine voxel, and each input of a transposed layer, lists the voxels that it may meet, its
candidates.  Where outputs are all voxels that a pair reaches, the keys of candidates are sorted, so
that those of one output are consecutive, and counted.  Where they are known they are looked up.
Axes are those of `kernels`.
"""
# ruff: noqa: N803
# mypy: ignore-errors
# Parameters are listed axis by axis:
# fmt: off

import triton
import triton.language as tl

from torchweft.voxels.maps.gpu.kernels import _search, column_of, row_at


@triton.jit
def _meet(
    q, place, size, stride, padding, dilation, kernel, common, inverse, period,
    TRANSPOSED: tl.constexpr,
):
    """(the kernel position j, the output o, whether they exist) along an axis.

    Strided: q + p = o·s + j·dil.  With g = gcd(s, dil) this has solutions where g divides q + p:
    j = (q + p)/g · (dil/g)⁻¹ mod s/g, and then every s/g-th.
    """
    if TRANSPOSED:
        o = q * stride - padding + place * dilation
        return place + tl.zeros_like(q), o, (o >= 0) & (o < size)
    whole = q + padding
    j = ((whole // common) % period) * inverse % period + place * period
    o = (whole - j * dilation) // stride
    rest = whole - j * dilation
    return j, o, (whole % common == 0) & (j < kernel) & (rest >= 0) & (o < size)


@triton.jit
def _candidate(
    rows_ptr, own, mask, chance,
    size0, size1, size2, size3, stride0, stride1, stride2, stride3, pad0, pad1, pad2, pad3,
    dil0, dil1, dil2, dil3, kernel0, kernel1, kernel2, kernel3,
    common0, common1, common2, common3, inverse0, inverse1, inverse2, inverse3,
    period0, period1, period2, period3, places1, places2, places3,
    COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr,
):
    """(the chance-th candidate of rows by axis, the offset of the pair, whether it exists)."""
    m3, rest = chance % places3, chance // places3
    m2, rest = rest % places2, rest // places2
    m1, m0 = rest % places1, rest // places1

    q0 = column_of(rows_ptr, own, mask, 0, COLUMNS)
    j0, o0, met = _meet(
        q0, m0, size0, stride0, pad0, dil0, kernel0, common0, inverse0, period0, TRANSPOSED)
    q1 = column_of(rows_ptr, own, mask, 1, COLUMNS)
    j1, o1, met1 = _meet(
        q1, m1, size1, stride1, pad1, dil1, kernel1, common1, inverse1, period1, TRANSPOSED)
    q2 = column_of(rows_ptr, own, mask, 2, COLUMNS)
    j2, o2, met2 = _meet(
        q2, m2, size2, stride2, pad2, dil2, kernel2, common2, inverse2, period2, TRANSPOSED)
    q3 = column_of(rows_ptr, own, mask, 3, COLUMNS)
    j3, o3, met3 = _meet(
        q3, m3, size3, stride3, pad3, dil3, kernel3, common3, inverse3, period3, TRANSPOSED)
    offset = ((j0 * kernel1 + j1) * kernel2 + j2) * kernel3 + j3
    return o0, o1, o2, o3, offset, met & met1 & met2 & met3


@triton.jit(do_not_specialize=range(4, 40))
def candidates_kernel(
    rows_ptr, order_ptr, keys_ptr, offsets_ptr,
    N: tl.int64,
    size0: tl.int64, size1: tl.int64, size2: tl.int64, size3: tl.int64,
    stride0: tl.int64, stride1: tl.int64, stride2: tl.int64, stride3: tl.int64,
    pad0: tl.int64, pad1: tl.int64, pad2: tl.int64, pad3: tl.int64,
    dil0: tl.int64, dil1: tl.int64, dil2: tl.int64, dil3: tl.int64,
    kernel0: tl.int64, kernel1: tl.int64, kernel2: tl.int64, kernel3: tl.int64,
    common0: tl.int64, common1: tl.int64, common2: tl.int64, common3: tl.int64,
    inverse0: tl.int64, inverse1: tl.int64, inverse2: tl.int64, inverse3: tl.int64,
    period0: tl.int64, period1: tl.int64, period2: tl.int64, period3: tl.int64,
    places1: tl.int64, places2: tl.int64, places3: tl.int64,
    COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):
    """keys[m, i] = the m-th output that the i-th input in order may meet, MOST if it does not.

    offsets[m, i] is the offset k of that pair.  A row whose batch number is negative is no voxel.
    """
    blocks = tl.cdiv(N, BLOCK)
    chance = tl.program_id(0) // blocks
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    own = at if order_ptr is None else tl.load(order_ptr + at, mask=mask, other=0)
    o0, o1, o2, o3, offset, met = _candidate(
        rows_ptr, own, mask, chance.to(tl.int64),
        size0, size1, size2, size3, stride0, stride1, stride2, stride3, pad0, pad1, pad2, pad3,
        dil0, dil1, dil2, dil3, kernel0, kernel1, kernel2, kernel3,
        common0, common1, common2, common3, inverse0, inverse1, inverse2, inverse3,
        period0, period1, period2, period3, places1, places2, places3, COLUMNS, TRANSPOSED)
    key = column_of(rows_ptr, own, mask, -1, COLUMNS)
    met &= key >= 0
    key = (((key * size0 + o0) * size1 + o1) * size2 + o2) * size3 + o3
    key = tl.where(met, key, MOST)
    cell = chance * N + at
    tl.store(keys_ptr + cell, key.to(keys_ptr.dtype.element_ty), mask=mask)
    tl.store(offsets_ptr + cell, offset.to(tl.int32), mask=mask)


@triton.jit(do_not_specialize=["found"])
def fresh_kernel(keys_ptr, fresh_ptr, found: tl.int64, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """fresh[i]: whether the i-th of ascending keys is the first of its value, and not MOST."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < found
    key = tl.load(keys_ptr + at, mask=mask, other=MOST)
    before = tl.load(keys_ptr + at - 1, mask=mask & (at > 0), other=-1)
    tl.store(fresh_ptr + at, ((key != MOST) & (key != before)).to(tl.int32), mask=mask)


@triton.jit(do_not_specialize=range(5, 16))
def level_kernel(
    keys_ptr, counts_ptr, out_keys_ptr, out_rows_ptr, seen_ptr,
    found: tl.int64, room: tl.int64, place: tl.int64,
    low0: tl.int64, low1: tl.int64, low2: tl.int64, low3: tl.int64,
    size0: tl.int64, size1: tl.int64, size2: tl.int64, size3: tl.int64,
    COLUMNS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):
    """The keys and rows of the outputs that candidates in the order of their keys meet.

    Keys count the voxels of an axis from its lowest value, `low0` … `low3`.
    There is room for `room` outputs, at most as many as candidates.  Where there are fewer, rows
    with the batch number −1 follow.  `counts_ptr` is the number of different keys up to each
    candidate; seen[place], in host memory, becomes that of all.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < found
    key = tl.load(keys_ptr + at, mask=mask, other=MOST)
    before = tl.load(keys_ptr + at - 1, mask=mask & (at > 0), other=-1)
    o = tl.load(counts_ptr + at, mask=mask, other=1).to(tl.int64) - 1
    first = mask & (key != MOST) & (key != before) & (o < room)
    tl.store(out_keys_ptr + o, key, mask=first)
    row_ptr = out_rows_ptr + o * COLUMNS + (COLUMNS - 4)
    rest = key.to(tl.int64)
    tl.store(row_ptr + 3, (rest % size3 + low3).to(tl.int32), mask=first)
    rest = rest // size3
    if COLUMNS > 2:
        tl.store(row_ptr + 2, (rest % size2 + low2).to(tl.int32), mask=first)
        rest = rest // size2
    if COLUMNS > 3:
        tl.store(row_ptr + 1, (rest % size1 + low1).to(tl.int32), mask=first)
        rest = rest // size1
    if COLUMNS > 4:
        tl.store(row_ptr, (rest % size0 + low0).to(tl.int32), mask=first)
        rest = rest // size0
    tl.store(row_ptr + (4 - COLUMNS), rest.to(tl.int32), mask=first)

    total = tl.load(counts_ptr + found - 1)
    absent = (at >= total) & (at < room)
    for column in tl.static_range(COLUMNS):
        tl.store(out_rows_ptr + at * COLUMNS + column, -1, mask=absent)
    if seen_ptr is not None:
        tl.store(seen_ptr + place, total, mask=tl.program_id(0) == 0)


@triton.jit(do_not_specialize=range(7, 11))
def outputs_kernel(
    keys_ptr, source_ptr, counts_ptr, offsets_ptr, order_ptr, table_ptr, back_ptr,
    found: tl.int64, N: tl.int64, inputs: tl.int64, outputs: tl.int64,
    MOST: tl.constexpr, BLOCK: tl.constexpr,
):
    """table[k, o] = q, back[k, i] = o of candidates in the order of their keys.

    Input i in order is row q.  `source_ptr` is the position m·N + i of each candidate before the
    sort, where i < inputs ≤ N; `counts_ptr` the number of different keys up to it.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < found
    key = tl.load(keys_ptr + at, mask=mask, other=MOST)
    met = key != MOST
    source = tl.load(source_ptr + at, mask=met, other=0)
    k = tl.load(offsets_ptr + source, mask=met, other=0).to(tl.int64)
    o = tl.load(counts_ptr + at, mask=met, other=1) - 1
    i = source % N
    q = i.to(tl.int32) if order_ptr is None else tl.load(order_ptr + i, mask=met, other=0)
    tl.store(table_ptr + k * outputs + o, q, mask=met)
    tl.store(back_ptr + k * inputs + i, o, mask=met)


@triton.jit(do_not_specialize=range(6, 48))
def onto_kernel(
    rows_ptr, order_ptr, keys_ptr, coarse_order_ptr, table_ptr, back_ptr,
    N: tl.int64, outputs: tl.int64, low_b: tl.int64, size_b: tl.int64,
    low0: tl.int64, low1: tl.int64, low2: tl.int64, low3: tl.int64,
    size0: tl.int64, size1: tl.int64, size2: tl.int64, size3: tl.int64,
    stride0: tl.int64, stride1: tl.int64, stride2: tl.int64, stride3: tl.int64,
    pad0: tl.int64, pad1: tl.int64, pad2: tl.int64, pad3: tl.int64,
    dil0: tl.int64, dil1: tl.int64, dil2: tl.int64, dil3: tl.int64,
    kernel0: tl.int64, kernel1: tl.int64, kernel2: tl.int64, kernel3: tl.int64,
    common0: tl.int64, common1: tl.int64, common2: tl.int64, common3: tl.int64,
    inverse0: tl.int64, inverse1: tl.int64, inverse2: tl.int64, inverse3: tl.int64,
    period0: tl.int64, period1: tl.int64, period2: tl.int64, period3: tl.int64,
    places1: tl.int64, places2: tl.int64, places3: tl.int64,
    COLUMNS: tl.constexpr, MOST: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr,
):
    """table[k, o] = q, back[k, i] = o for the i-th fine voxel q in order and coarse voxels o.

    `keys_ptr` are the ascending keys of the coarse voxels in a box: the lowest value of each axis,
    counted as candidates are, and the number of its values.  A program owns BLOCK consecutive
    voxels and one candidate of each.  Bound: latency, log2 BLOCK steps of a search.
    """
    blocks = tl.cdiv(N, BLOCK)
    chance = tl.program_id(0) // blocks
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    own = at if order_ptr is None else tl.load(order_ptr + at, mask=mask, other=0)
    o0, o1, o2, o3, k, met = _candidate(
        rows_ptr, own, mask, chance.to(tl.int64),
        low0 + size0, low1 + size1, low2 + size2, low3 + size3,
        stride0, stride1, stride2, stride3, pad0, pad1, pad2, pad3,
        dil0, dil1, dil2, dil3, kernel0, kernel1, kernel2, kernel3,
        common0, common1, common2, common3, inverse0, inverse1, inverse2, inverse3,
        period0, period1, period2, period3, places1, places2, places3, COLUMNS, False)
    b = column_of(rows_ptr, own, mask, -1, COLUMNS) - low_b
    met &= mask & (b >= 0) & (b < size_b)
    met &= (o0 >= low0) & (o1 >= low1) & (o2 >= low2) & (o3 >= low3)
    key = ((b * size0 + o0 - low0) * size1 + o1 - low1) * size2 + o2 - low2
    key = tl.where(met, key * size3 + o3 - low3, 0).to(keys_ptr.dtype.element_ty)
    target, met = key[None, :], met[None, :]  # [1, BLOCK]
    place = _search(keys_ptr, target, met, outputs.to(tl.int32), MOST, PIVOTS)
    met &= tl.load(keys_ptr + place, mask=met & (place < outputs), other=MOST) == target
    k = k[None, :]
    tl.store(table_ptr + k * outputs + place, own[None, :].to(tl.int32), mask=met)
    tl.store(back_ptr + k * N + at[None, :], row_at(coarse_order_ptr, place, met), mask=met)
