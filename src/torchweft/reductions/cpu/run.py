"""Reductions over j on the CPU, by printed loops that numba compiles.

Rows are shared among threads in tasks of fixed size, so bits do not depend on their number.
Numbers of 16 bits are computed in float32.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchweft.core.cpu.loops import share
from torchweft.core.explain import Launch, record, recording
from torchweft.core.printing.modules import load
from torchweft.reductions.call import Blocks, Options, Sizes
from torchweft.reductions.cpu.source import WIDTH, Loop, printed
from torchweft.reductions.formula.lowering import count
from torchweft.reductions.formula.node import Node

__all__ = ["serves", "shifted", "smallest", "sums"]

MOST = 512
"""Scalar terms of a formula that compile in a second or so."""

SERIAL = 100_000
"""Pairs below which one thread is faster."""

ROWS = 64
"""Rows of a task."""

Values = Mapping[int, Tensor]


def serves(f: Node, w: Node | None = None, _k: int = 1) -> bool:
    """Whether loops of these formulas compile in reasonable time; any k is served."""
    return count(f) + (count(w) if w is not None else 0) <= MOST


def sums(f: Node, values: Values, sizes: Sizes, blocks: Blocks | None, options: Options) -> Tensor:
    """Σ_j f, (B, M, f.dim); 0 where there is nothing."""
    like = next(iter(values.values()))
    out = _wide(like).new_zeros(sizes.batch, sizes.rows, f.dim)
    _run(("sums", f, None), 0, values, [out], sizes, blocks, options)
    return out.to(like.dtype)


def shifted(
    f: Node, w: Node, values: Values, sizes: Sizes, blocks: Blocks | None, options: Options
) -> tuple[Tensor, Tensor]:
    """m = max_j f and Σ_j exp(f − m) w, (B, M, 1) and (B, M, w.dim); −∞ and 0 for nothing."""
    like = _wide(next(iter(values.values())))
    top = like.new_full((sizes.batch, sizes.rows, 1), float("-inf"))
    dtype = torch.float64 if options.accumulate == "float64" else like.dtype
    out = like.new_zeros(sizes.batch, sizes.rows, w.dim, dtype=dtype)
    _run(("shifted", f, w), 0, values, [top, out], sizes, blocks, options)
    return top.to(dtype), out


def smallest(
    f: Node, k: int, values: Values, sizes: Sizes, blocks: Blocks | None, options: Options
) -> Tensor:
    """Indices of the k smallest values, (B, M, k, f.dim), ascending; −1 where there are fewer."""
    like = _wide(next(iter(values.values())))
    shape = (sizes.batch, sizes.rows, k)
    last = torch.iinfo(torch.int64).max
    found = []
    for component in range(f.dim):
        best = like.new_full(shape, float("inf"))
        index = torch.full(shape, last)
        _run(("smallest", f, None), component, values, [best, index], sizes, blocks, options)
        found.append(index.masked_fill_(index == last, -1))
    return torch.stack(found, 3)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@functools.cache
def _parts_version() -> str:
    """Of the functions that a loop calls: its compiled form on disk holds theirs."""
    text = pathlib.Path(__file__).with_name("parts.py").read_bytes()
    return hashlib.sha256(text).hexdigest()[:16]


@functools.lru_cache(maxsize=256)
def _loop(
    kind: str, f: Node, w: Node | None, component: int, dtype: str, exact: bool
) -> tuple[Loop, Any]:
    """A printed loop and its module."""
    wide = "float64" if exact else dtype
    found = printed(kind, f, w, dtype, wide, component, _parts_version())
    return found, load(f"reductions_{kind}_loop", found.source)


def _run(
    what: tuple[str, Node, Node | None],
    component: int,
    values: Values,
    results: Sequence[Tensor],
    sizes: Sizes,
    blocks: Blocks | None,
    options: Options,
) -> None:
    """Fill results in; where there is nothing they stay as they are."""
    tasks, intervals = _tasks(sizes, blocks)
    if not len(tasks) or not sizes.columns or not results[0].numel():
        return
    dtype = str(results[0].dtype).removeprefix("torch.")
    loop, module = _loop(*what, component, dtype, options.accumulate != "auto")
    arrays = {n: _wide(t.detach()).contiguous().numpy() for n, t in values.items()}
    given = [arrays[v.data[0]] for v in loop.columns]
    batch = max((len(a) for a in given), default=1)
    columns = np.empty((batch, loop.width, sizes.columns), results[0].numpy().dtype)
    if loop.width:
        module.columns_of(0, sizes.columns, *given, columns)
    rows = [arrays[v.data[0]] for v in loop.rows]
    outputs = [r.numpy() for r in results]

    def run(first: int, last: int) -> None:
        module.kernel(first, last, tasks, intervals, columns, *rows, *outputs)

    pairs = sizes.batch * sizes.rows * sizes.columns
    share(run, len(tasks), 1 if pairs < SERIAL else torch.get_num_threads())
    if recording():
        tile: dict[str, int | str] = {"rows": ROWS, "columns": WIDTH}
        record(Launch("numba", what[0], tile, len(tasks), columns.nbytes))


def _tasks(sizes: Sizes, blocks: Blocks | None) -> tuple[Any, Any]:
    """(batch entry, first and last row, first and last interval), and intervals of columns."""
    if blocks is None:
        found = list(_cut(0, sizes.rows, 0, 1))
        intervals = np.array([[0, sizes.columns]])
    else:
        starts, ends, indptr = (t.tolist() for t in blocks[:3])
        cut = (
            _cut(start, end, indptr[c], indptr[c + 1])
            for c, (start, end) in enumerate(zip(starts, ends, strict=True))
        )
        found = [task for some in cut for task in some]
        intervals = torch.stack((blocks.j_starts, blocks.j_ends), 1).numpy()
    each = np.array(found, np.int64).reshape(-1, 4)
    entries = np.repeat(np.arange(sizes.batch), len(each))[:, None]
    return np.hstack((entries, np.tile(each, (sizes.batch, 1)))), np.ascontiguousarray(intervals)


def _cut(start: int, end: int, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
    for row in range(start, end, ROWS):
        yield row, min(row + ROWS, end), first, last
