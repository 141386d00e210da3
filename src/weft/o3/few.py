"""Calls of few numbers on the CPU, by one loop that walks a table of the call's products.

    result[row, at] += c · first[row, at] · second[row, at] · third[row, at]

for the entries of 3j symbols on the paths of a call, its edges and channels.  Compiled once for all
structures; edges add in the order of their numbers, in float64.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from weft.core.explain import Launch, record, recording
from weft.o3.contraction import ROLES, Call, Term
from weft.o3.graph import Tables, check_ranges
from weft.o3.structure import SLOTS, Path, Product, Structure
from weft.o3.wigner import entries_3j

__all__ = ["prepared", "run"]

NOTHING = len(SLOTS)
"""The slot of a number 1 behind all tensors, the weight where there is none."""

Array = np.ndarray[Any, Any]

jit: Any = numba.njit(
    cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}
)


def run(
    structure: Structure, call: Call, tensors: Sequence[Tensor], tables: Tables, shared: bool
) -> list[Tensor]:
    """The results of a call.

    Args:
        structure: blocks and paths.
        call: what is computed.
        tensors: (rows, width) for each of its slots, of one dtype.
        tables: the graph.
        shared: whether w has one row for all edges.
    """
    if recording():
        products = len(_table(structure, call)[1])
        for result in call.results:
            record(Launch("numba", f"few_{result.slot}", {"products": products}, 1))
    src, dst = tables.src, tables.dst
    if src is not None and dst is not None and src.dtype == torch.int64:
        # traced: nobody has looked at them yet
        check_ranges(src, dst, tables.num_x, tables.num_z)
    return list(prepared(structure, call, tensors, tables, shared, lambda _: (src, dst))(tensors))


def prepared(
    structure: Structure,
    call: Call,
    tensors: Sequence[Tensor],
    tables: Tables,
    shared: bool,
    listed: Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]],
) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    """`run` for such tensors and tables.

    Args:
        structure: as in `run`, also those that follow.
        call: what is computed.
        tensors: those of the call, in any strides.
        tables: the edges.
        shared: whether w has one row for all edges.
        listed: takes the tables behind the tensors, and a None, to the order of FLAT.
    """
    count, dtype = len(tensors), tensors[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    rows = {"x": tables.num_x, "y": tables.num_edges, "z": tables.num_z, "w": tables.num_edges}
    if shared:
        rows["w"] = 1
    shapes = [(rows[result.slot], structure.width(result.slot)) for result in call.results]
    bounds = _bounds(rows * width for rows, width in shapes)
    parts = list(zip(itertools.starmap(slice, itertools.pairwise(bounds)), shapes, strict=True))
    end = bounds[-1]
    # one of the rows that all edges share is no step from the next
    strides = np.array([0 if shared and s == "w" else structure.width(s) for s in SLOTS] + [0])
    starts = np.array([*_bounds(t.numel() for t in tensors), *bounds])
    products, factors = _table(structure, call)
    of = next((t for t in (tables.src, tables.dst) if t is not None), None)
    index = np.int64 if of is not None and of.dtype == torch.int64 else np.int32
    identity = np.arange(tables.num_edges, dtype=index)
    one = torch.ones(1, dtype=wide)

    def again(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        values = [t.reshape(-1) for t in given[:count]]
        if dtype != wide:
            values = [t.to(wide) for t in values]
        src, dst, *_ = listed((*given[count:], None))
        ends = [identity if t is None else t.numpy() for t in (src, dst)]
        sums = np.zeros(end)
        flat = torch.cat([*values, one]).detach().numpy()
        _walk(products, factors, starts, strides, *ends, flat, sums)
        # memory of their own: products of matrices differ in bits with where their operands begin
        found = torch.from_numpy(sums)
        return tuple([found[part].view(shape).to(dtype, copy=True) for part, shape in parts])

    return again


def _bounds(sizes: Iterator[int]) -> list[int]:
    """Where parts of these sizes begin, and the end."""
    return list(itertools.accumulate(sizes, initial=0))


@functools.lru_cache(maxsize=256)
def _table(structure: Structure, call: Call) -> tuple[Array, Array]:
    """The products of a call, see `_walk`, and their factors."""
    found = [
        of_path
        for number, (slot, terms) in enumerate(call.results)
        for term in terms
        for product in structure.products
        for path in product.paths
        for of_path in _products(call, number, term, product, path)
    ]
    table = np.array([row for row, _ in found], np.int32).reshape(-1, 17)
    return table, np.array([factor for _, factor in found], np.float64)


def _products(
    call: Call, number: int, term: Term, product: Product, path: Path
) -> Iterator[tuple[list[int], float]]:
    """Those of a path in a term of a result."""
    result = call.results[number].slot
    others = (slot for slot in ROLES if slot != result)
    # behind the tensors and their 1 begin the results
    starts = dict(zip(others, term, strict=False)) | {result: len(call.slots) + 1 + number}
    degrees = product.degrees(path)
    order = result + "".join(s for s in SLOTS if s != result)
    for a, b, m, value in entries_3j(*degrees):
        components = {"x": a, "y": b, "z": m, "w": 0}
        row = [product.channels]
        for slot in order:
            place = getattr(path, slot)
            if place < 0:
                row += len(call.slots), NOTHING, 0, 0
                continue
            block = product.blocks(slot)[place]
            at = block.offset + components[slot] * block.step
            row += starts[slot], SLOTS.index(slot), at, block.channel_step
        yield row, path.factor * value


@jit
def _walk(products, factors, starts, strides, src, dst, given, sums):  # type: ignore[no-untyped-def]
    """Add products to results, edge after edge.

    A product is channels, then of the result and of three factors: tensor, slot, place in a row,
    step from a channel to the next.
    """
    edges = src.shape[0]
    places = np.empty((4, edges), np.int64)
    for p in range(products.shape[0]):
        for k in range(4):
            slot, stride = products[p, 4 * k + 2], strides[products[p, 4 * k + 2]]
            begin = starts[products[p, 4 * k + 1]] + products[p, 4 * k + 3]
            for e in range(edges):
                row = src[e] if slot == 0 else dst[e] if slot == 2 else e
                places[k, e] = begin + row * stride
        channels, factor = products[p, 0], factors[p]
        dz, da, db, dc = products[p, 4], products[p, 8], products[p, 12], products[p, 16]
        for e in range(edges):
            z, a, b, c = places[0, e], places[1, e], places[2, e], places[3, e]
            if dz:
                for u in range(channels):
                    term = factor * given[a + u * da] * given[b + u * db] * given[c + u * dc]
                    sums[z + u * dz] += term
            else:
                total = sums[z]
                for u in range(channels):
                    total += factor * given[a + u * da] * given[b + u * db] * given[c + u * dc]
                sums[z] = total
