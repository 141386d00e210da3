"""Loops over voxels in ascending order, compiled by numba: merges in place of searches.

Between known voxels, those of one side are visited in ascending order, so the voxels that they meet
at one offset ascend too: a pointer into the keys of the other side only moves forward.  Where a map
finds its outputs, all pairs are sorted by the output.  Integers alone are written, each place by
one task, so the results do not depend on the number of threads.
"""

from __future__ import annotations

import numba
import numpy as np

__all__ = ["bounds", "enter", "keys_of", "lines_of", "meet", "reach", "rows_of", "sort", "squeeze"]

jit = numba.njit(cache=True, nogil=True, error_model="numpy")

BITS = 11
"""Bits of a digit of the sort: its counters fit in the first cache."""


@jit
def bounds(rows, low, high):  # type: ignore[no-untyped-def]
    """Fill in the bounds of the columns of one or more rows; whether each row is below the next."""
    low[:], high[:] = rows[0], rows[0]
    ascends = True
    for i in range(1, rows.shape[0]):
        order = 0
        for column in range(rows.shape[1]):
            value = rows[i, column]
            low[column] = min(low[column], value)
            high[column] = max(high[column], value)
            if order == 0:
                order = (value > rows[i - 1, column]) - (value < rows[i - 1, column])
        ascends &= order > 0
    return ascends


@jit
def keys_of(rows, lows, sizes, keys):  # type: ignore[no-untyped-def]
    """Fill in the keys of rows that lie in a box."""
    for i in range(rows.shape[0]):
        key = np.int64(0)
        for column in range(rows.shape[1]):
            key = key * sizes[column] + rows[i, column] - lows[column]
        keys[i] = key


@jit
def rows_of(keys, sizes, rows):  # type: ignore[no-untyped-def]
    """Fill in the rows of ascending keys in a box that begins at 0.

    A row is divided out of its key only where it leaves the line of the row before.
    """
    last = rows.shape[1] - 1
    for i in range(keys.shape[0]):
        if i and rows[i - 1, last] + (keys[i] - keys[i - 1]) < sizes[last]:
            for column in range(last):
                rows[i, column] = rows[i - 1, column]
            rows[i, last] = rows[i - 1, last] + (keys[i] - keys[i - 1])
        else:
            key = keys[i]
            for column in range(last + 1):
                rows[i, last - column] = key % sizes[last - column]
                key //= sizes[last - column]


@jit
def sort(keys, numbers, bits):  # type: ignore[no-untyped-def]
    """Keys ≥ 0 of so many bits ascending, and the number of each; equal keys keep their order.

    Numbers of length 0 stay so.
    """
    numbered = numbers.shape[0] > 0
    keys, numbers = keys.copy(), numbers.copy()
    other, other_numbers = np.empty_like(keys), np.empty_like(numbers)
    for shift in range(0, bits, BITS):
        begin = np.zeros((1 << BITS) + 1, np.int64)
        for key in keys:
            begin[((key >> shift) & ((1 << BITS) - 1)) + 1] += 1
        for digit in range(1 << BITS):
            begin[digit + 1] += begin[digit]
        for i in range(keys.shape[0]):
            digit = (keys[i] >> shift) & ((1 << BITS) - 1)
            other[begin[digit]] = keys[i]
            if numbered:
                other_numbers[begin[digit]] = numbers[i]
            begin[digit] += 1
        keys, other = other, keys
        numbers, other_numbers = other_numbers, numbers
    return keys, numbers


@jit
def squeeze(keys):  # type: ignore[no-untyped-def]
    """Move the distinct ones of ascending keys to the front; their number."""
    count = 0
    for key in keys:
        if count == 0 or keys[count - 1] != key:
            keys[count] = key
            count += 1
    return count


@jit
def reach(rows, kernel, steps, sizes, transposed, bits, keys, pairs):  # type: ignore[no-untyped-def]
    """Fill in what rows meet in a box that begins at 0, row by row; the number of these pairs.

    What a row meets are the products of what it meets along each axis; those of the axes before the
    last are kept for its line.

    Args:
        rows: (N, 1 + axes).
        kernel: (axes, 2) size and stride.
        steps: (axes, positions, 2) for `_along`.
        sizes: (1 + axes,) of the box.
        transposed: whether places are q stride + offset; else (q − offset) / stride.
        bits: of the number of an offset.
        keys: are filled, of the voxels that are met.
        pairs: are filled, (number of the row << bits) | number of the offset.
    """
    last = kernel.shape[0] - 1
    met_along = np.empty((last + 1, steps.shape[1] + 1, 2), np.int64)
    found = np.zeros(last, np.int64)
    kept = np.empty((np.prod(kernel[:last, 0]), 2), np.int64)
    met = count = 0
    for i in range(rows.shape[0]):
        follows = i > 0
        for column in range(last + 1):
            follows &= rows[i, column] == rows[i - 1, column]
        if not follows:
            met, kept[0, 0], kept[0, 1] = 1, rows[i, 0], 0
        for axis in range(0 if follows else last):
            size, length = sizes[1 + axis], kernel[axis, 0]
            if i == 0 or rows[i, 1 + axis] != rows[i - 1, 1 + axis]:
                q = np.int64(rows[i, 1 + axis])
                found[axis] = _along(q, axis, kernel, steps, size, transposed, met_along)
            here = found[axis]
            for m in range(1, met + 1):  # from the last to the first: in place
                prefix, offset = kept[met - m, 0] * size, kept[met - m, 1] * length
                for n in range(1, here + 1):
                    at = (met - m + 1) * here - n
                    kept[at, 0] = prefix + met_along[axis, here - n, 0]
                    kept[at, 1] = offset + met_along[axis, here - n, 1]
            met *= here
        q, size, length = np.int64(rows[i, 1 + last]), sizes[1 + last], kernel[last, 0]
        here = _along(q, last, kernel, steps, size, transposed, met_along)
        for m in range(met):
            for n in range(here):
                keys[count] = kept[m, 0] * size + met_along[last, n, 0]
                pairs[count] = (i << bits) | (kept[m, 1] * length + met_along[last, n, 1])
                count += 1
    return count


@numba.njit(inline="always", error_model="numpy")
def _along(q, axis, kernel, steps, size, transposed, met_along):  # type: ignore[no-untyped-def]
    """Fill in what a coordinate meets along an axis; the number of it.

    Each is a place from 0 to size − 1 and a position of the kernel.  A position is met where the
    rest of q is its rest, at a step from q's quotient: one division serves all.  Inlined: a call,
    which passes five values for each array, takes longer than this.
    """
    stride = kernel[axis, 1]
    quotient = q * stride if transposed else q // stride
    rest = 0 if transposed else q - quotient * stride
    found = 0
    for j in range(kernel[axis, 0]):  # without branches: they are as good as random
        place = quotient + steps[axis, j, 0]
        met_along[axis, found, 0], met_along[axis, found, 1] = place, j
        found += (rest == steps[axis, j, 1]) & (place >= 0) & (place < size)
    return found


@jit
def enter(keys, pairs, bits, owner, table, back):  # type: ignore[no-untyped-def]
    """Enter pairs in the tables of a map: table[k, m] = owner[i] and back[k, i] = m.

    Args:
        keys: of the voxels that are met, ascending; the m-th that differs is that of voxel m.
        pairs: as `reach` numbers them.
        bits: see `reach`.
        owner: (N,) the row of each number.
        table: (K, M) of −1.
        back: (K, N) of −1.
    """
    m = -1
    for t in range(keys.shape[0]):
        m += t == 0 or keys[t] != keys[t - 1]
        i, k = pairs[t] >> bits, pairs[t] & ((1 << bits) - 1)
        table[k, m], back[k, i] = owner[i], m


@jit
def lines_of(rows, lows, sizes, begin, keys):  # type: ignore[no-untyped-def]
    """The number of lines of ascending rows: those that differ in the last column only.

    Fill in where each begins, with the number of rows behind the last, and the keys of the columns
    before the last.
    """
    count, last = 0, rows.shape[1] - 1
    for i in range(rows.shape[0]):
        follows = i > 0
        for column in range(last):
            follows = follows and rows[i, column] == rows[i - 1, column]
        if not follows:
            key = np.int64(0)
            for column in range(last):
                key = key * sizes[column] + rows[i, column] - lows[column]
            begin[count], keys[count] = i, key
            count += 1
    begin[count] = rows.shape[0]
    return count


@jit
def meet(first, last, coarse, fine, box, stride, lines, along, mirror, table, back):  # type: ignore[no-untyped-def]
    """table[k, i] and back[k, t] of all offsets on lines first … last − 1 of the kernel.

    Args:
        first: number of the first line: offsets that differ along the last axis only are a line.
        last: number of the line behind the last.
        coarse: (M, 1 + d) rows, ascending; each meets the fine voxels at row · stride + offset.
            Their numbers (M,).  The lines of the rows: where each begins.
        fine: (F, 1 + d) rows, ascending; their numbers; where each line begins, and its key.
        box: (2, 1 + d) lowest values and sizes of the columns of the fine rows.
        stride: (d,).
        lines: (lines, d − 1) offsets of the axes before the last.
        along: offsets of the last axis, ascending.
        mirror: the two sides are one and offset K − 1 − k is the opposite of k: the table is its
            own `back`, the first half of the offsets is searched and the middle line up to its
            centre.
        table: (K, M) of −1.
        back: (K, F) of −1.
    """
    (rows, own, begin), (cells, owner, fine_begin, keys) = coarse, fine
    length, axes = along.shape[0], lines.shape[1]
    for line in range(first, last):
        found = length // 2 + 1 if mirror and line == lines.shape[0] // 2 else length
        other = 0
        for number in range(begin.shape[0] - 1):
            i = begin[number]
            key = np.int64(rows[i, 0]) - box[0, 0]
            inside = 0 <= key < box[1, 0]
            for axis in range(axes):
                value = rows[i, 1 + axis] * stride[axis] + lines[line, axis] - box[0, 1 + axis]
                inside &= 0 <= value < box[1, 1 + axis]
                key = key * box[1, 1 + axis] + value
            if not inside:
                continue
            while other < keys.shape[0] and keys[other] < key:
                other += 1
            if other == keys.shape[0]:
                break
            if keys[other] != key:
                continue
            at, end = fine_begin[other], fine_begin[other + 1]
            for i in range(begin[number], begin[number + 1]):
                middle = rows[i, -1] * stride[-1]
                while at < end and cells[at, -1] < middle + along[0]:
                    at += 1
                t = at
                for j in range(found):
                    while t < end and cells[t, -1] < middle + along[j]:
                        t += 1
                    if t == end:
                        break
                    if cells[t, -1] == middle + along[j]:
                        k = line * length + j
                        table[k, i] = owner[t]
                        back[lines.shape[0] * length - 1 - k if mirror else k, t] = own[i]
