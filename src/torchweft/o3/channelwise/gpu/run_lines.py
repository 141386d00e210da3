"""Runs beside each other: each warp of a program takes one, and its edges one after the other.

All warps take as many steps as the longest run has edges; one whose run is shorter takes its last
edge again, loads nothing and stores nothing.  The number of the next edge is read a step before it
is used, since what is asked for ahead waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["begun", "stepped"]


def begun(count: int) -> Iterator[str]:
    """Lines before the loop: the runs of a program, their rows, the most edges, the first two."""
    yield "item = lane * EDGES + tl.arange(0, EDGES)[:, None]"
    yield "first = tl.load(indptr_ptr + item)"
    yield "last = tl.load(indptr_ptr + item + 1)"
    yield "row = tl.cast(tl.load(owner_ptr + item), tl.int64)"
    yield "ends_ptr = indptr_ptr + lane * EDGES"
    for n in range(count):
        length = f"tl.load(ends_ptr + {n + 1}) - tl.load(ends_ptr + {n})"
        yield f"steps = {f'tl.maximum(steps, {length})' if n else length}"
    for n in range(2):
        yield from _read(n, f"first + {n}")


def stepped(asked: Iterator[str]) -> Iterator[str]:
    """Lines of a step before its arithmetic: e, its row of the other slot, what is asked ahead."""
    yield "p = first + step"
    yield "present = p < last"
    yield "e = tl.cast(edge0, tl.int64)"
    yield "other = tl.cast(index0, tl.int64)"
    yield "edge0 = edge1"
    yield "index0 = index1"
    yield from asked
    yield from _read(1, "p + 2")


def _read(n: int, place: str) -> Iterator[str]:
    yield f"place{n} = tl.minimum({place}, last - 1)"
    yield f"edge{n} = tl.load(edges_ptr + place{n})"
    yield f"index{n} = tl.load(index_ptr + place{n})"
