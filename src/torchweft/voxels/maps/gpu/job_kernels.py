"""The kernels of tiles for several tables in one launch; see `tile_kernels` for what they compute.

A job is a table: a row of numbers and of addresses of its tensors, see `Job`.  The columns of all
jobs are laid out one after the other, each table's from the beginning of a block of 1,024.
"""
# ruff: noqa: N803, N806
# mypy: ignore-errors
# Parameters are in groups:
# fmt: off

from __future__ import annotations

import triton
import triton.language as tl

from torchweft.voxels.maps.gpu.tile_kernels import PANEL, _gray, _list, _mask, _pair, _scan, _turn

MOST_JOBS = tl.constexpr(8)
WIDTH = tl.constexpr(16)
"""Jobs of a launch, and numbers of a job; jobs that do not exist begin past all columns."""

BEGIN, COUNT, TABLE, REST, ORDER, PARTS_AT, MASKS, STARTS, TOTALS, SEEN, ROWS, LISTS, HALVES, \
    TURNS, LONG = (tl.constexpr(n) for n in range(15))
INPUTS, OUTPUTS = REST, PARTS_AT
"""Lists of pairs, which are made when nothing is left of the search."""


@triton.jit
def _job_at(jobs_ptr, block):
    """(the number of the job of a block, its numbers, the block's number in it)."""
    begin = tl.load(jobs_ptr + tl.arange(0, MOST_JOBS) * WIDTH + BEGIN)
    job = tl.sum((begin <= block).to(tl.int32)) - 1
    job_ptr = jobs_ptr + job * WIDTH
    return job, job_ptr, block - tl.load(job_ptr + BEGIN).to(tl.int32)


@triton.jit
def _table(job_ptr, FIELD: tl.constexpr, DTYPE: tl.constexpr = tl.int32):
    """The tensor in a field."""
    return tl.multiple_of(tl.load(job_ptr + FIELD), 16).to(tl.pointer_type(DTYPE))


@triton.jit
def _count(job_ptr):
    return tl.load(job_ptr + COUNT).to(tl.int32)


@triton.jit
def _panels(job_ptr):
    return tl.cdiv(_count(job_ptr), PANEL)


@triton.jit
def mask_kernel(jobs_ptr, K: tl.constexpr, HALVED: tl.constexpr, NEAR: tl.constexpr,
                BLOCK: tl.constexpr):
    """The masks of tables."""
    EACH: tl.constexpr = NEAR // BLOCK * ((K + 31) // 32)  # programs of a block
    program = tl.program_id(0)
    _, job_ptr, block = _job_at(jobs_ptr, program // EACH)
    rest_ptr = _table(job_ptr, REST) if HALVED else None
    _mask(block * EACH + program % EACH, _table(job_ptr, TABLE), rest_ptr, _table(job_ptr, MASKS),
          _count(job_ptr), K, BLOCK)


@triton.jit
def key_kernel(
    jobs_ptr, keys_ptr,
    K: tl.constexpr, PARTS: tl.constexpr, OFFSETS: tl.constexpr, SAMPLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The keys of all columns, below the number of their job; one past the last has the highest."""
    KEY: tl.constexpr = keys_ptr.dtype.element_ty
    lane = tl.arange(0, BLOCK)
    job, job_ptr, block = _job_at(jobs_ptr, tl.program_id(0))
    i, N = block * BLOCK + lane, _count(job_ptr)
    masks_ptr = _table(job_ptr, MASKS) if PARTS > 1 else None
    gray = _gray(
        block, i, _table(job_ptr, PARTS_AT), masks_ptr, _table(job_ptr, STARTS), N,
        _panels(job_ptr), KEY, K, PARTS, K, OFFSETS, SAMPLES, BLOCK)
    past = (tl.zeros((BLOCK,), KEY) + 1) << K
    key = (job.to(KEY) << (K + 1)) | tl.where(i < N, gray, past)
    tl.store(keys_ptr + tl.program_id(0) * BLOCK + lane, key)


@triton.jit
def scan_kernel(jobs_ptr, K: tl.constexpr, BLOCK: tl.constexpr):
    """The starts and totals of pairs."""
    job_ptr = jobs_ptr + tl.program_id(0) // K * WIDTH
    _scan(tl.program_id(0) % K, _table(job_ptr, STARTS), _table(job_ptr, TOTALS),
          _table(job_ptr, SEEN), _panels(job_ptr), BLOCK)


@triton.jit
def list_kernel(
    jobs_ptr, sorted_ptr, K: tl.constexpr, HALVED: tl.constexpr, ORDERED: tl.constexpr,
    NEAR: tl.constexpr,
):
    """The rows, the lists and the masks of the halves."""
    WORDS: tl.constexpr = (K + 31) // 32
    panel, word = tl.program_id(0) // WORDS, tl.program_id(0) % WORDS
    _, job_ptr, block = _job_at(jobs_ptr, panel // (NEAR // PANEL))
    first = panel // (NEAR // PANEL) - block  # of the job
    panel -= first * (NEAR // PANEL)
    N = _count(job_ptr)
    if panel * PANEL < N:
        slot = panel * PANEL + tl.arange(0, PANEL)
        place = tl.load(sorted_ptr + first * NEAR + slot, mask=slot < N, other=first * NEAR)
        rest_ptr = _table(job_ptr, REST) if HALVED else None
        order_ptr = _table(job_ptr, ORDER) if ORDERED else None
        _list(
            panel, word, slot, (place - first * NEAR).to(tl.int32), _table(job_ptr, TABLE),
            rest_ptr, _table(job_ptr, MASKS), order_ptr, _table(job_ptr, ROWS),
            _table(job_ptr, LISTS), _table(job_ptr, HALVES), N, K, tl.int32)


@triton.jit
def turn_kernel(jobs_ptr, K: tl.constexpr, BLOCK: tl.constexpr):
    """The turns of tiles, where a job has them."""
    EACH: tl.constexpr = 2 * (K + 1)
    job_ptr = jobs_ptr + tl.program_id(0) // EACH * WIDTH
    if tl.load(job_ptr + TURNS) != 0:
        _turn(tl.program_id(0) % EACH, _table(job_ptr, HALVES), _table(job_ptr, TURNS),
              _table(job_ptr, LONG), _panels(job_ptr), K, BLOCK)


@triton.jit
def pair_kernel(
    jobs_ptr, K: tl.constexpr, OFFSETS: tl.constexpr, ORDERED: tl.constexpr, SHORT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The pairs of tables' first K offsets, SHORT: in int16; panels are laid out, not blocks."""
    GROUPS: tl.constexpr = (K + 15) // 16
    ROW: tl.constexpr = tl.int16 if SHORT else tl.int32
    _, job_ptr, block = _job_at(jobs_ptr, tl.program_id(0) // GROUPS)
    order_ptr = _table(job_ptr, ORDER) if ORDERED else None
    _pair(
        block, tl.program_id(0) % GROUPS, _table(job_ptr, TABLE), _table(job_ptr, MASKS),
        order_ptr, _table(job_ptr, STARTS), _table(job_ptr, TOTALS),
        _table(job_ptr, INPUTS, ROW), _table(job_ptr, OUTPUTS, ROW), _count(job_ptr),
        _panels(job_ptr), K, OFFSETS, tl.int32, BLOCK)
