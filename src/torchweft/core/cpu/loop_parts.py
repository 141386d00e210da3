"""Functions that every printed loop calls: compiled once for all programs, and cached on disk.

A tile's values lie in slots of `TILE` numbers.  `span` is a row of a loop's layout.  Integers come
from tables, since numba compiles a function anew for every literal argument.
"""

from __future__ import annotations

import numba

__all__ = ["TILE", "add", "clear", "finish", "load", "store", "totals", "walk"]

TILE = 256
"""Positions of a tile: long enough for vector lanes; two dozen slots fit in the first cache."""

jit = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
"""Products stay in the order in which a program multiplies, so that none leaves the range."""

jit_sums = numba.njit(
    cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}
)


@jit
def load(block, span, x, row, at, rows, width):  # type: ignore[no-untyped-def]
    """The components of an operand at some rows and features; span: slot, components, strides."""
    stride = span[4]
    for c in range(span[1]):
        begin = c * span[2] + row * span[3] + at * stride
        merged = rows == 1 or span[3] == width * stride
        for r in range(1 if merged else rows):
            start = (span[0] + c) * TILE + r * width
            count = rows * width if merged else width
            values = block[start : start + count]
            first = begin + r * span[3]
            if stride == 1:
                given = x[first : first + count]
                for q in range(count):
                    values[q] = given[q]
            else:
                for q in range(count):
                    values[q] = x[first + q * stride]


@jit
def store(block, places, span, z, row, at, rows, width):  # type: ignore[no-untyped-def]
    """The components of a result; span: first of its places, components, strides.

    A place of -1 is zero.
    """
    stride = span[4]
    for c in range(span[1]):
        place = places[span[0] + c]
        begin = c * span[2] + row * span[3] + at * stride
        merged = rows == 1 or span[3] == width * stride
        for r in range(1 if merged else rows):
            count = rows * width if merged else width
            first = begin + r * span[3]
            if place < 0:
                for q in range(count):
                    z[first + q * stride] = 0
                continue
            start = place * TILE + r * width
            values = block[start : start + count]
            if stride == 1:
                taken = z[first : first + count]
                for q in range(count):
                    taken[q] = values[q]
            else:
                for q in range(count):
                    z[first + q * stride] = values[q]


@jit
def clear(block, span):  # type: ignore[no-untyped-def]
    """Zeros in consecutive slots; span: the first slot, number of slots."""
    block[span[0] * TILE : (span[0] + span[1]) * TILE] = 0


@jit
def add(block, places, span, count):  # type: ignore[no-untyped-def]
    """A tile's terms of a sum over rows; span: first place, components, first slot of the sum."""
    for c in range(span[1]):
        place = places[span[0] + c]
        if place >= 0:
            values = block[(span[2] + c) * TILE : (span[2] + c) * TILE + count]
            given = block[place * TILE : place * TILE + count]
            for q in range(count):
                values[q] += given[q]


@jit
def finish(block, span, z, part, at, features, height, width):  # type: ignore[no-untyped-def]
    """A part's sum over rows: a tile's rows added in order; span as for `add`."""
    for c in range(span[1]):
        begin = (part * span[1] + c) * features + at
        for q in range(width):
            start = (span[2] + c) * TILE + q
            found = block[start]
            for k in range(1, height):
                found += block[start + k * width]
            z[begin + q] = found


@jit
def walk(block, terms, coefficients, span, count):  # type: ignore[no-untyped-def]
    """target += c · a · b · w for the terms span[2] … span[3], into cleared slots."""
    clear(block, span)
    for n in range(span[2], span[3]):
        c = coefficients[n]
        a = block[terms[n, 0] * TILE : terms[n, 0] * TILE + count]
        b = block[terms[n, 1] * TILE : terms[n, 1] * TILE + count]
        values = block[terms[n, 3] * TILE : terms[n, 3] * TILE + count]
        if terms[n, 2] < 0:
            for q in range(count):
                values[q] += c * (a[q] * b[q])
        else:
            w = block[terms[n, 2] * TILE : terms[n, 2] * TILE + count]
            for q in range(count):
                values[q] += c * w[q] * (a[q] * b[q])


@jit_sums
def totals(tile, size, blocks, pairs, span, rows, features):  # type: ignore[no-untyped-def]
    """Sums over the features of each row, at each of its positions; span: first, last pair."""
    for n in range(span[0], span[1]):
        source, target = pairs[n, 0] * TILE, pairs[n, 1] * TILE
        for r in range(rows):
            found = tile[0] * 0
            for b in range(blocks):
                width = min(TILE, features - b * TILE)
                begin = b * size + r * width
                values = tile[begin + source : begin + source + width]
                for q in range(width):
                    found += values[q]
            for b in range(blocks):
                width = min(TILE, features - b * TILE)
                begin = b * size + r * width + target
                tile[begin : begin + width] = found
