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

import numpy as np
import torch
from torch import Tensor

from torchweft.core.cpu.machine_code import machine_code
from torchweft.core.explain import Launch, record, recording
from torchweft.core.printing.dialect import indented
from torchweft.o3.channelwise.calls import ROLES, Call, Term
from torchweft.o3.channelwise.structure import SLOTS, Path, Product, Structure
from torchweft.o3.graph import Tables, check_ranges
from torchweft.o3.irreps.wigner import entries_3j

__all__ = ["identity", "prepared", "run"]

UNIT_SLOT = len(SLOTS)
"""The slot of the number 1 that replaces a missing weight; its tensor follows those of a call."""

MOST_KEPT = 2**16
"""Rows up to which the table of their order is kept: of more, memory counts, and not the call."""

Array = np.ndarray[Any, Any]

_KINDS = (
    ("z[zp] += factor * a[ap] * b[bp] * c[cp]",),
    ("scale = factor * b[bp] * c[cp]", "for u in range(channels):", "    z[Z] += scale * a[A]"),
    ("scale = factor * c[cp]", "for u in range(channels):", "    z[Z] += scale * a[A] * b[B]"),
    ("for u in range(channels):", "    z[Z] += factor * a[A] * b[B] * c[C]"),
    ("total = 0.0", "for u in range(channels):", "    total += a[A] * b[B]",
     "z[zp] += factor * c[cp] * total"),
    ("total = 0.0", "for u in range(channels):", "    total += a[A] * b[B] * c[C]",
     "z[zp] += factor * total"),
)  # fmt: skip
"""Statements of a product by what has channels: nothing; the result and a, or a and b, or all
factors; a and b, or all factors.  Z, A, B and C are the places of channel u."""


def run(
    structure: Structure, call: Call, tensors: Sequence[Tensor], tables: Tables, shared: bool
) -> list[Tensor]:
    """The results of a call, see `operator.Run`."""
    if recording():
        products = len(_table(structure, call)[-1])
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
    widths = [0 if shared and s == "w" else structure.width(s) for s in SLOTS]
    strides = torch.tensor([*widths, 0], device="cpu")
    kinds, products, factors = map(torch.from_numpy, _table(structure, call))
    factors = factors.to(wide)
    of = next((t for t in (tables.src, tables.dst) if t is not None), None)
    index = torch.int64 if of is not None and of.dtype == torch.int64 else torch.int32
    identity_rows, one = identity(tables.num_edges, index), _one(wide)
    walk = machine_code(_source(wide, index))

    def again(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        values = [t.resolve_neg().contiguous() for t in given[:count]]
        if dtype != wide:
            values = [t.to(wide) for t in values]
        src, dst, *_ = listed((*given[count:], None))
        src, dst = (identity_rows if t is None else t for t in (src, dst))
        # separate memory, aligned: bits of matrix products depend on the alignment of operands
        results = [values[0].new_zeros(shape) for shape in shapes]
        tensors = _addresses((*values, one, *results))
        rows = (src, identity_rows, dst, identity_rows, identity_rows)
        rows_of = _addresses(rows)
        walk(tables.num_edges, kinds, products, factors, tensors, strides, rows_of)
        return tuple(results if dtype == wide else [t.to(dtype) for t in results])

    return again


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], device="cpu")


def identity(count: int, dtype: torch.dtype) -> Tensor:
    """0 .. count − 1: the table of rows that are read in their order; never written to."""
    make = _identity if count <= MOST_KEPT else _identity.__wrapped__
    return make(count, dtype)


@functools.lru_cache(maxsize=8)
def _identity(count: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(count, dtype=dtype, device="cpu")


@functools.cache
def _one(dtype: torch.dtype) -> Tensor:
    """The number 1, in place of factors that are absent."""
    return torch.ones(1, dtype=dtype, device="cpu")


@functools.lru_cache(maxsize=256)
def _table(structure: Structure, call: Call) -> tuple[Array, Array, Array]:
    """First product of each of `_KINDS`, and the end; the products, see `_source`; their factors.

    Products of a kind are in the order of the call.
    """
    found = [
        of_path
        for number, (slot, terms) in enumerate(call.results)
        for term in terms
        for product in structure.products
        for path in product.paths
        for of_path in _products(call, number, term, product, path)
    ]
    kinds = np.array([_kind(row) for row, _ in found], np.int64)
    order = kinds.argsort(kind="stable")
    table = np.array([row for row, _ in found], np.int32).reshape(-1, 17)[order]
    begins = np.searchsorted(kinds[order], np.arange(len(_KINDS) + 1))
    return begins, table, np.array([factor for _, factor in found], np.float64)[order]


def _kind(product: list[int]) -> int:
    """The number of a product's statements in `_KINDS`."""
    channels, steps = product[0], product[4::4]
    if channels == 1:
        return 0
    result, _, second, third = map(bool, steps)
    return 1 + second + third if result else 4 + third


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


@functools.cache
def _source(number: torch.dtype, index: torch.dtype) -> str:
    """The text of the loop that adds products to results, edge by edge.

    A product has the number of channels, then for the result and each of three factors: tensor,
    slot, place in a row, channel step.  Factors without a step come last.
    """
    lines = []
    for kind, statements in enumerate(_KINDS):
        given = ["channels = products[p, 0]", "factor = factors[p]"]
        edge = []
        for n, name in enumerate("zabc"):
            tensor, slot, place, step = (f"products[p, {4 * n + k}]" for k in (1, 2, 3, 4))
            given += [f"{name} = tensors[{tensor}]", f"{name}_rows = rows[{slot}]"]
            given += [f"{name}_width = strides[{slot}]", f"{name}_first = {place}"]
            given.append(f"{name}_step = {step}")
            edge.append(f"{name}p = {name}_first + {name}_rows[e] * {name}_width")
        for name in "zabc":
            statements = tuple(
                s.replace(f"{name}[{name.upper()}]", f"{name}[{name}p + u * {name}_step]")
                for s in statements
            )
        lines.append(f"for p in range(kinds[{kind}], kinds[{kind + 1}]):")
        inside = indented([*edge, *statements], 1)
        lines += indented([*given, "for e in range(0, num_edges):", *inside], 1)
    arguments = [
        "num_edges: int64", "kinds: int64[:]", "products: int32[:, :]", f"factors: {number}[:]",
        f"tensors: {number}[:][:]", "strides: int64[:]", f"rows: {index}[:][:]",
    ]  # fmt: skip
    text = "\n".join([f"def walk({', '.join(arguments)}):", *indented(lines, 1)])
    return text.replace("torch.", "")
