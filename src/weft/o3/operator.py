"""The operator of channelwise products: a call's results, closed under differentiation.

    weft::o3_contract(Tensor[] tensors, str structure, str call, …) -> Tensor[]

Tensors are those of the call, (rows, width) each, then the tables of the graph.  Gradients and
tangents are calls of the same operator, of every order.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core import autocast
from weft.core.backend import choose
from weft.core.explain import record_cost, recording
from weft.core.list_op import Call as Door
from weft.core.list_op import ListOperator, Rest, Results, Tensors
from weft.errors import BackendError, ShapeError
from weft.o3 import contraction
from weft.o3.contraction import Call, read_call
from weft.o3.graph import Tables, pack, repeated, unpack
from weft.o3.structure import Structure, read
from weft.o3.wigner import entries_3j

__all__ = ["contract"]

Run = Callable[[Structure, Call, Sequence[Tensor], Tables, bool], list[Tensor]]

LOOPS_FROM = 2**22
"""Operations from which on the CPU loops are compiled for a structure, which takes seconds."""


def contract(
    structure: str,
    call: str,
    tensors: Tensors,
    packed: Tensors,
    present: str,
    sizes: tuple[int, int, int],
    shared: bool,
    backend: str | None,
) -> Results:
    """The results of a call.

    Args:
        structure: its text.
        call: its text.
        tensors: (rows, width) for each of its slots, of one dtype on one device.
        packed: the tables of the graph, see `pack`.
        present: which of them there are.
        sizes: rows of x, rows of z, edges.
        shared: whether w has one row for all edges.
        backend: None for the fastest that can serve.
    """
    return _contract([*tensors, *packed], (structure, call, present, *sizes, shared, backend or ""))


class _Contract:
    """Results of derivatives of Q."""

    def body(
        self,
        tensors: Tensors,
        structure: str,
        call: str,
        present: str,
        num_x: int,
        num_z: int,
        num_edges: int,
        shared: bool,
        backend: str,
    ) -> list[Tensor]:
        what = read_call(call)
        count = len(what.slots)
        values = [t.contiguous() for t in tensors[:count]]
        tables = unpack(tensors[count:], present, num_x, num_z, num_edges)
        run = _runner(structure, call, values[0], num_edges, backend)
        if autocast.active():  # it must not narrow the products inside a body
            with torch.autocast(values[0].device.type, enabled=False):
                results = run(read(structure), what, values, tables, shared)
        else:
            results = run(read(structure), what, values, tables, shared)
        if recording():
            moved = sum(t.nbytes for t in (*tensors, *results))
            record_cost(moved, num_edges * _operations(structure, call))
        return results

    def fake(
        self,
        tensors: Tensors,
        structure: str,
        call: str,
        present: str,
        num_x: int,
        num_z: int,
        num_edges: int,
        shared: bool,
        backend: str,
    ) -> list[Tensor]:
        rows = {"x": num_x, "y": num_edges, "z": num_z, "w": 1 if shared else num_edges}
        width = read(structure).width
        return [
            tensors[0].new_empty(rows[result.slot], width(result.slot))
            for result in read_call(call).results
        ]

    def saved(self, results: Tensors) -> Tensors:
        return ()

    def gradients(
        self,
        call: Door,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        grads: Sequence[Tensor | None],
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        found: list[Tensor | None] = [None] * len(tensors)
        structure, text, *others = rest
        count = len(read_call(text).slots)
        given = tuple(g is not None for g in grads)
        turned = _gradient(text, tuple(needed[:count]), given)
        if turned.of:
            every = [*tensors[:count], *(g for g in grads if g is not None)]
            chosen = [every[t] for t in turned.used]
            results = call([*chosen, *tensors[count:]], (structure, turned.call, *others))
            for t, result in zip(turned.of, results, strict=True):
                found[t] = result
        return found

    def tangents(
        self,
        call: Door,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        directions: Sequence[Tensor | None],
    ) -> list[Tensor]:
        structure, text, *others = rest
        count = len(read_call(text).slots)
        directions = directions[:count]
        moved = _tangent(text, tuple(d is not None for d in directions))
        every = [*tensors[:count], *(d for d in directions if d is not None)]
        chosen = [every[t] for t in moved.used]
        return list(call([*chosen, *tensors[count:]], (structure, moved.call, *others)))

    def batch(
        self, call: Door, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        structure, text, present, num_x, num_z, num_edges, shared, backend = rest
        slots, results = read_call(text)
        count = len(slots)
        if any(dim is not None for dim in dims[count:]):
            raise ShapeError(
                "the edges of a graph were given to torch.vmap as a mapped argument: they must be "
                "the same for the whole map. Map features and weights only, or call once for each."
            )
        mapped = [
            t if dim is None else t.movedim(dim, 0)
            for t, dim in zip(tensors[:count], dims, strict=False)
        ]
        weights = [dim for slot, dim in zip(slots, dims, strict=False) if slot == "w"]
        if shared and (
            any(dim is not None for dim in weights) or any(r.slot == "w" for r in results)
        ):
            # one row of weights for all edges is then one for each sample: sample by sample
            each = [
                call(
                    [*_sample(mapped, dims, i), *tensors[count:]],
                    rest,
                )
                for i in range(size)
            ]
            return tuple(torch.stack(found) for found in zip(*each, strict=True))
        tables = repeated(unpack(tensors[count:], present, num_x, num_z, num_edges), size)
        rows = [
            t
            if shared and slot == "w"
            else (t.expand(size, *t.shape) if dim is None else t).flatten(0, 1)
            for t, slot, dim in zip(mapped, slots, dims, strict=False)
        ]
        packed, present = pack(tables)
        sizes = (size * num_x, size * num_z, size * num_edges)
        found = call([*rows, *packed], (structure, text, present, *sizes, shared, backend))
        return tuple(r.view(size, r.shape[0] // size, r.shape[1]) for r in found)


def _sample(tensors: Tensors, dims: Sequence[int | None], i: int) -> list[Tensor]:
    return [t if dim is None else t[i] for t, dim in zip(tensors, dims, strict=False)]


class _Derived(NamedTuple):
    """A call that was derived, the tensors it takes, and those whose gradients it gives."""

    call: str
    used: tuple[int, ...]
    of: tuple[int, ...] = ()


@functools.lru_cache(maxsize=4096)
def _gradient(text: str, needed: tuple[bool, ...], given: tuple[bool, ...]) -> _Derived:
    """The gradients in the needed tensors, of those that the given results depend on."""
    call = read_call(text)
    shown = [r for r, flag in zip(call.results, given, strict=True) if flag]
    named = {t for result in shown for term in result.terms for t in term}
    needed = tuple(flag and t in named for t, flag in enumerate(needed))
    derived, used = contraction.trimmed(contraction.gradient(call, needed, given))
    return _Derived(str(derived), used, tuple(t for t, flag in enumerate(needed) if flag))


@functools.lru_cache(maxsize=4096)
def _tangent(text: str, given: tuple[bool, ...]) -> _Derived:
    derived, used = contraction.trimmed(contraction.tangent(read_call(text), given))
    return _Derived(str(derived), used)


@functools.lru_cache(maxsize=4096)
def _operations(structure: str, call: str) -> int:
    """Of an edge: a product and a sum for each coefficient and channel, and one for each weight."""
    total = 0
    terms = sum(len(result.terms) for result in read_call(call).results)
    for product in read(structure).products:
        for path in product.paths:
            degrees = product.degrees(path)
            weights = 0 if path.w < 0 else 2 * degrees[2] + 1
            total += product.channels * (2 * len(entries_3j(*degrees)) + weights)
    return terms * total


def _runner(structure: str, call: str, like: Tensor, num_edges: int, backend: str) -> Run:
    """The executor of a call; where the backend was chosen by us, torch for what it lacks."""
    few = False
    if not backend and like.device.type == "cpu":
        few = num_edges * _operations(structure, call) < LOOPS_FROM
    return _chosen(structure, call, like.dtype, like.device.type, backend, few)


@functools.lru_cache(maxsize=4096)
def _chosen(
    structure: str, call: str, dtype: torch.dtype, device: str, backend: str, few: bool
) -> Run:
    name = "torch" if few else choose(backend or None, device)
    if name != "torch" and not _module(name).serves(read(structure), read_call(call), dtype):
        if backend:
            raise BackendError(
                f"backend={backend!r} was asked for more than its kernels hold: "
                f"{read(structure)!r} in the call {call!r}, {dtype}. "
                "Pass backend=None or 'torch'."
            )
        name = "torch"
    run: Run = _module(name).run
    return run


def _module(backend: str) -> Any:
    """The executor of a backend, imported when it first serves."""
    name = {"triton": "launch", "numba": "cpu", "torch": "blocked"}[backend]
    return importlib.import_module(f"weft.o3.{name}")


_contract = ListOperator(
    "o3_contract",
    "str structure, str call, str present, SymInt num_x, SymInt num_z, SymInt num_edges, "
    "bool shared, str backend",
    _Contract(),
)
