"""Small calls on the CPU, by one loop over a table of the call's products.

    result[row, at] += c · first[row, at] · second[row, at] · third[row, at]

for the entries of 3j symbols on the paths of a call, its edges and channels.  The loop is compiled
once for all structures; edges are added in the order of their numbers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from torch import Tensor

from torchweft.core.explain import Launch, record, recording
from torchweft.core.private_compilers import cgutils
from torchweft.o3.channelwise.calls import ROLES, Call, Term
from torchweft.o3.channelwise.structure import SLOTS, Path, Product, Structure
from torchweft.o3.graph import Tables, check_ranges
from torchweft.o3.irreps.wigner import entries_3j

__all__ = ["prepared", "run"]

UNIT_SLOT = len(SLOTS)
"""The slot of the number 1 that replaces a missing weight; its tensor follows those of a call."""

Array = np.ndarray[Any, Any]

jit: Any = numba.njit(
    cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}
)


def run(
    structure: Structure, call: Call, tensors: Sequence[Tensor], tables: Tables, shared: bool
) -> list[Tensor]:
    """The results of a call, see `operator.Run`."""
    if recording():
        products = len(_table(structure, call)[1])
        for result in call.results:
            record(Launch("numba", f"few_{result.slot}", {"products": products}, 1))
    src, dst = tables.src, tables.dst
    if src is not None and dst is not None and src.dtype == torch.int64:
        # tables of a traced graph, which are not checked yet
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
    """`run` for tensors and tables of this signature, see `operator.Prepare`."""
    count, dtype = len(tensors), tensors[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    rows = {"x": tables.num_x, "y": tables.num_edges, "z": tables.num_z, "w": tables.num_edges}
    if shared:
        rows["w"] = 1
    shapes = [(rows[result.slot], structure.width(result.slot)) for result in call.results]
    # a row that all edges share has a stride of 0
    strides = np.array([0 if shared and s == "w" else structure.width(s) for s in SLOTS] + [0])
    products, factors = _table(structure, call)
    factors = torch.from_numpy(factors).to(wide).numpy()
    of = next((t for t in (tables.src, tables.dst) if t is not None), None)
    index = np.int64 if of is not None and of.dtype == torch.int64 else np.int32
    identity = np.arange(tables.num_edges, dtype=index)
    one = torch.ones(1, dtype=wide)

    def again(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        values = [t.resolve_neg().contiguous() for t in given[:count]]
        if dtype != wide:
            values = [t.to(wide) for t in values]
        src, dst, *_ = listed((*given[count:], None))
        ends = [identity if t is None else t.numpy() for t in (src, dst)]
        # separate memory, aligned: bits of matrix products depend on the alignment of operands
        results = [torch.zeros(shape, dtype=wide) for shape in shapes]
        addresses = np.array([t.data_ptr() for t in (*values, one, *results)])
        _walk(products, factors, addresses, strides, *ends, identity)
        return tuple(results if dtype == wide else [t.to(dtype) for t in results])

    return again


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
    """The products of a path in a term of a result."""
    result = call.results[number].slot
    others = (slot for slot in ROLES if slot != result)
    # results follow the tensors and the number 1
    starts = dict(zip(others, term, strict=False)) | {result: len(call.slots) + 1 + number}
    degrees = product.degrees(path)
    for a, b, m, value in entries_3j(*degrees):
        components = {"x": a, "y": b, "z": m, "w": 0}
        places = {slot: (len(call.slots), UNIT_SLOT, 0, 0) for slot in SLOTS}
        for slot in SLOTS:
            if (number_of_block := getattr(path, slot)) >= 0:
                block = product.blocks(slot)[number_of_block]
                at = block.offset + components[slot] * block.step
                places[slot] = starts[slot], SLOTS.index(slot), at, block.channel_step
        first = places.pop(result)
        factors = sorted(places.values(), key=lambda place: place[3] == 0)
        yield [product.channels, *itertools.chain(first, *factors)], path.factor * value


@intrinsic
def _pointer(context, address):  # type: ignore[no-untyped-def]
    """The pointer to an address."""

    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), build


@jit
def _at(address, like):  # type: ignore[no-untyped-def]
    """The array at an address, of the dtype of `like`."""
    return carray(_pointer(address), 1, like.dtype)  # type: ignore[call-arg]


@jit
def _operand(product, k, addresses, strides, rows, size):  # type: ignore[no-untyped-def]
    """Address, bytes per row, rows of edges, and channel step of the result or of a factor.

    Steps are unsigned: the compiler then tests once per edge whether they are 1, and vectorizes.
    """
    slot = product[4 * k + 2]
    begin = addresses[product[4 * k + 1]] + product[4 * k + 3] * size
    return begin, strides[slot] * size, rows[slot], np.uint64(product[4 * k + 4])


@jit
def _walk(products, factors, addresses, strides, src, dst, identity):  # type: ignore[no-untyped-def]
    """Add products to results, edge by edge.

    A product has the number of channels, then for the result and each of three factors: tensor,
    slot, place in a row, channel step.  Factors without a step come last.
    """
    rows, size = (src, identity, dst, identity, identity), factors.itemsize
    for p in range(products.shape[0]):
        z0, sz, rz, dz = _operand(products[p], 0, addresses, strides, rows, size)
        a0, sa, ra, da = _operand(products[p], 1, addresses, strides, rows, size)
        b0, sb, rb, db = _operand(products[p], 2, addresses, strides, rows, size)
        c0, sc, rc, dc = _operand(products[p], 3, addresses, strides, rows, size)
        channels, factor = np.uint64(products[p, 0]), factors[p]
        if channels == 1:
            for e in range(identity.shape[0]):
                z, a = _at(z0 + rz[e] * sz, factors), _at(a0 + ra[e] * sa, factors)
                b, c = _at(b0 + rb[e] * sb, factors), _at(c0 + rc[e] * sc, factors)
                z[0] += factor * a[0] * b[0] * c[0]
            continue
        for e in range(identity.shape[0]):
            z, a = _at(z0 + rz[e] * sz, factors), _at(a0 + ra[e] * sa, factors)
            b, c = _at(b0 + rb[e] * sb, factors), _at(c0 + rc[e] * sc, factors)
            if dz and not db:
                scale = factor * b[0] * c[0]
                for u in range(channels):
                    z[u * dz] += scale * a[u * da]
            elif dz and not dc:
                scale = factor * c[0]
                for u in range(channels):
                    z[u * dz] += scale * a[u * da] * b[u * db]
            elif dz:
                for u in range(channels):
                    z[u * dz] += factor * a[u * da] * b[u * db] * c[u * dc]
            elif not dc:
                total = factors.dtype.type(0)
                for u in range(channels):
                    total += a[u * da] * b[u * db]
                z[0] += factor * c[0] * total
            else:
                total = factors.dtype.type(0)
                for u in range(channels):
                    total += a[u * da] * b[u * db] * c[u * dc]
                z[0] += factor * total
