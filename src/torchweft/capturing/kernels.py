"""The kernel that copies arguments into buffers and fills the padding.

A buffer is lines of words; in each line the rows of the argument come first, then padding.  Tensors
are reached by their addresses: numbers of each leaf in a table of the record (`leaves_ptr`), and
the addresses and lengths of a call (`given_ptr`).
"""

from __future__ import annotations

import triton
import triton.language as tl

WIDTH = tl.constexpr(12)
"""Numbers of a leaf in the table of the record."""

BEGIN, BUFFER, LINE, INNER, LENGTH, BYTES, ENTRY, KIND, VALUE, ROOM, TABLE = (
    tl.constexpr(n) for n in range(11)
)
"""The first program; the buffer's address; words of a line, and of a row; the place of the number
of rows; bytes of a word; words of an entry; what fills the padding, with its numbers."""

REPEATED, CONSTANT, NUMBERS = (tl.constexpr(n) for n in range(3))
"""Padding repeats the first rows, is a constant (VALUE, ROOM = 1, TABLE = 0), or numbers padding
rows of another size (VALUE: the place of its length, ROOM: its room, TABLE: the table's number)."""


@triton.jit
def _padding(leaf_ptr, given_ptr, kind, line, word):
    """Entry j of line l is first + (j + l + TABLE) mod count; `word` counts from entry 0."""
    row_words = tl.load(leaf_ptr + INNER).to(tl.int32)
    entry_words = tl.load(leaf_ptr + ENTRY).to(tl.int32)
    first, count = tl.load(leaf_ptr + VALUE), tl.load(leaf_ptr + ROOM)
    if kind == NUMBERS:
        first = tl.load(given_ptr + first)
        count -= first
    line_of_table = line * (row_words // entry_words) + word % row_words // entry_words
    row = word // row_words + line_of_table + tl.load(leaf_ptr + TABLE).to(tl.int32)
    return (first + row % count.to(tl.int32)) >> (word % entry_words * 32)


@triton.jit
def _write(leaf_ptr, given_ptr, source, block, WORD: tl.constexpr, BLOCK: tl.constexpr):
    """A block of a line."""
    line_words = tl.load(leaf_ptr + LINE).to(tl.int32)
    rows = tl.load(given_ptr + tl.load(leaf_ptr + LENGTH))
    known = (rows * tl.load(leaf_ptr + INNER)).to(tl.int32)  # words before the padding
    blocks = tl.cdiv(line_words, BLOCK)
    line, first = block // blocks, block % blocks * BLOCK
    source_ptr = source.to(tl.pointer_type(WORD)) + line.to(tl.int64) * known
    buffer_ptr = tl.load(leaf_ptr + BUFFER).to(tl.pointer_type(WORD))
    buffer_ptr += line.to(tl.int64) * line_words
    at, kind = first + tl.arange(0, BLOCK), tl.load(leaf_ptr + KIND)
    if first + BLOCK <= known:
        tl.store(buffer_ptr + at, tl.load(source_ptr + at))
    elif kind == REPEATED:
        inside = (at < line_words) & (known > 0)  # without rows, what was there stays
        word = tl.load(source_ptr + at % tl.maximum(known, 1), mask=inside)
        tl.store(buffer_ptr + at, word, mask=inside)
    else:
        word = tl.load(source_ptr + at, mask=at < known)
        padding = _padding(leaf_ptr, given_ptr, kind, line, tl.maximum(at - known, 0))
        word = tl.where(at < known, word, padding.to(WORD))
        tl.store(buffer_ptr + at, word, mask=at < line_words)


@triton.jit
def write_kernel(leaves_ptr, owners_ptr, given_ptr, BLOCK: tl.constexpr):
    """A block of a line of a leaf; `owners` has the leaf of each program."""
    leaf = tl.load(owners_ptr + tl.program_id(0))
    leaf_ptr = leaves_ptr + leaf * WIDTH
    block = tl.program_id(0) - tl.load(leaf_ptr + BEGIN).to(tl.int32)
    source, size = tl.load(given_ptr + leaf), tl.load(leaf_ptr + BYTES)
    if size == 4:
        _write(leaf_ptr, given_ptr, source, block, tl.int32, BLOCK)
    elif size == 2:
        _write(leaf_ptr, given_ptr, source, block, tl.int16, BLOCK)
    else:
        _write(leaf_ptr, given_ptr, source, block, tl.int8, BLOCK)
