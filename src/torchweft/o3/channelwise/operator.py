"""The operator of channelwise products: a call's results, closed under differentiation.

    torchweft::o3contraction(Tensor[] tensors, str structure, str call, …) -> Tensor[]

Tensors are those of the call, (rows, width) each, then the tables of the graph.  Gradients and
tangents of every order are calls of the same operator.  The non-tensor arguments (`Rest`) are the
texts of structure and call, which tables are present (see `pack`), rows of x, rows of z, edges,
whether w has one row for all edges, and the backend, "" for the fastest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.backend import choose
from torchweft.core.explain import record_cost, recording
from torchweft.core.operators.tensor_list import CachedCall, ListOperator, Rest, Results, Tensors
from torchweft.core.operators.tensor_list import Call as OperatorCall
from torchweft.core.private import any_autocast
from torchweft.errors import BackendError, ShapeError
from torchweft.o3.backends import executor
from torchweft.o3.channelwise.calls import Call, gradient, read_call, tangent, trimmed
from torchweft.o3.channelwise.structure import Structure, entry_counts, read
from torchweft.o3.graph import Tables, listed, pack, repeated, unpack

__all__ = ["ContractionRule", "cached_call", "contraction", "one_by_one"]

Run = Callable[[Structure, Call, Sequence[Tensor], Tables, bool], list[Tensor]]
"""`run` of each backend's module: the results of a call.

Takes the structure, the call, a contiguous tensor (rows, width) of one dtype for each of the call's
slots, the tables of the graph, and whether w has one row for all edges.
"""

Prepare = Callable[..., Callable[[Tensors], Results]]
"""`prepared` of some backends: `run` for tensors and tables of one signature, in any strides.

Takes the arguments of `run` and `listed`, which puts the tables and a None in the order of FLAT.
The function that it returns takes the tensors of the call and the packed tables.
"""

LOOPS_FROM = 2**13
"""Edges times channels from which on the CPU loops are compiled for a structure.

Compilation takes seconds.  Its time and the time saved by a call both grow with the number of
paths, which therefore does not matter.
"""

LOOP_PRODUCTS = 2**17
"""Products of a call from which on such loops serve; 16 times as many where all are of scalars.

Loops share the values that they read among paths, of which scalars have few.
"""


def cached_call(
    structure: str,
    call: str,
    present: str,
    sizes: tuple[int, int, int],
    shared: bool,
    backend: str | None,
) -> CachedCall:
    """Non-tensor arguments of `contraction` for tensors and tables of one signature."""
    rest = (structure, call, present, *sizes, shared, backend or "")
    return CachedCall(rest, len(read_call(call).slots), _prepared)


def _prepared(tensors: Tensors, rest: Rest) -> Callable[[Tensors], Results]:
    """The body for tensors of this signature."""
    structure, call, present, num_x, num_z, num_edges, shared, backend = rest
    executor = _executor(structure, call, tensors[0], num_edges, backend)
    if not hasattr(executor, "prepared"):
        return lambda given: tuple(contraction.rule.body(given, *rest))
    what = read_call(call)
    count = len(what.slots)
    tables = unpack(tensors[count:], present, num_x, num_z, num_edges)
    prepare: Prepare = executor.prepared
    return prepare(read(structure), what, tensors[:count], tables, shared, listed(present))


class ContractionRule:
    """Results, gradients, tangents and batches of a call."""

    predictable = True

    def body(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        """The results, as `core.operators.tensor_list.Rule` defines this and the other methods."""
        structure, call, present, num_x, num_z, num_edges, shared, backend = rest
        what = read_call(call)
        count = len(what.slots)
        values = [t.contiguous() for t in tensors[:count]]
        tables = unpack(tensors[count:], present, num_x, num_z, num_edges)
        run: Run = _executor(structure, call, values[0], num_edges, backend).run
        arguments = read(structure), what, values, tables, shared
        if any_autocast():  # must not narrow the products inside a body
            with torch.autocast(values[0].device.type, enabled=False):
                results = run(*arguments)
        else:
            results = run(*arguments)
        if recording():
            moved = sum(t.nbytes for t in (*tensors, *results))
            record_cost(moved, num_edges * _operations(structure, call))
        return results

    def fake(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        """Empty tensors of the results' shapes."""
        structure, call, _, num_x, num_z, num_edges, shared, _ = rest
        rows = {"x": num_x, "y": num_edges, "z": num_z, "w": 1 if shared else num_edges}
        width = read(structure).width
        slots = [result.slot for result in read_call(call).results]
        return [tensors[0].new_empty(rows[slot], width(slot)) for slot in slots]

    def saved(self, results: Tensors) -> Tensors:
        """Nothing: derivatives do not read results."""
        return ()

    def gradients(
        self,
        call: OperatorCall,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        grads: Sequence[Tensor | None],
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        """Gradients of the needed tensors, by a derived call."""
        found: list[Tensor | None] = [None] * len(tensors)
        count = len(read_call(rest[1]).slots)
        given = tuple([g is not None for g in grads])
        derived, further = _derived_call(rest, _gradient, tuple(needed[:count]), given)
        if derived.of:
            every = [*tensors[:count], *[g for g in grads if g is not None]]
            chosen = [every[t] for t in derived.used]
            results = call([*chosen, *tensors[count:]], further)
            for t, result in zip(derived.of, results, strict=True):
                found[t] = result
        return found

    def tangents(
        self,
        call: OperatorCall,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        directions: Sequence[Tensor | None],
    ) -> list[Tensor]:
        """Derivatives along the directions, by a derived call."""
        count = len(read_call(rest[1]).slots)
        directions = directions[:count]
        derived, further = _derived_call(rest, _tangent, tuple(d is not None for d in directions))
        every = [*tensors[:count], *(d for d in directions if d is not None)]
        chosen = [every[t] for t in derived.used]
        return list(call([*chosen, *tensors[count:]], further))

    def batch(
        self,
        call: OperatorCall,
        size: int,
        dims: Sequence[int | None],
        tensors: Tensors,
        rest: Rest,
    ) -> Results:
        """A mapped call, samples side by side or one by one."""
        self.refuse_mapped_graph(dims, rest)
        slots, results = read_call(rest[1])
        mapped = {slot for slot, dim in zip(slots, dims, strict=False) if dim is not None}
        shared = rest[6]
        # a row of weights that all edges share would be shared by all samples
        alone = shared and ("w" in mapped or any(result.slot == "w" for result in results))
        run = one_by_one if alone else _side_by_side
        return run(call, size, dims, tensors, rest)

    @staticmethod
    def refuse_mapped_graph(dims: Sequence[int | None], rest: Rest) -> None:
        """Raise ShapeError where tables are mapped."""
        if any(dim is not None for dim in dims[len(read_call(rest[1]).slots) :]):
            raise ShapeError(
                "the edges of a graph were given to torch.vmap as a mapped argument: they must be "
                "the same for the whole map. Map features and weights only, or call once for each."
            )


def one_by_one(
    call: OperatorCall, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
) -> Results:
    """A mapped call, sample by sample."""
    each = [
        call([t if d is None else t.select(d, i) for t, d in zip(tensors, dims, strict=True)], rest)
        for i in range(size)
    ]
    return tuple(torch.stack(found) for found in zip(*each, strict=True))


def _side_by_side(
    call: OperatorCall, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
) -> Results:
    """A mapped call on one disjoint copy of the graph for each sample."""
    structure, text, present, *sizes, shared, backend = rest
    slots = read_call(text).slots
    copies = repeated(unpack(tensors[len(slots) :], present, *sizes), size)
    packed, present = pack(copies)
    rows = []
    for slot, tensor, dim in zip(slots, tensors, dims, strict=False):
        if shared and slot == "w":
            rows.append(tensor)
        else:
            every = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            rows.append(every.flatten(0, 1))
    found = call([*rows, *packed], (structure, text, present, *copies[:3], shared, backend))
    return tuple(r.view(size, r.shape[0] // size, r.shape[1]) for r in found)


def _derived_call(
    rest: Rest, derive: Callable[..., _Derived], *flags: Any
) -> tuple[_Derived, Rest]:
    """A call derived from that of `rest`, and its own rest; cached where `rest` is a CachedCall."""
    if type(rest) is not CachedCall:
        structure, call, *others = rest
        derived = derive(call, *flags)
        return derived, (structure, derived.call, *others)
    if (derive, *flags) not in rest.derived:
        derived, further = _derived_call(tuple(rest), derive, *flags)
        rest.derived[derive, *flags] = derived, CachedCall(further, len(derived.used), _prepared)
    known: tuple[_Derived, Rest] = rest.derived[derive, *flags]
    return known


class _Derived(NamedTuple):
    """A derived call, the numbers of its tensors, and of those whose gradients are its results."""

    call: str
    used: tuple[int, ...]
    of: tuple[int, ...] = ()


@functools.lru_cache(maxsize=4096)
def _gradient(text: str, needed: tuple[bool, ...], given: tuple[bool, ...]) -> _Derived:
    """The gradients of the needed tensors that the given results depend on."""
    call = read_call(text)
    shown = [r for r, flag in zip(call.results, given, strict=True) if flag]
    named = {t for result in shown for term in result.terms for t in term}
    needed = tuple(flag and t in named for t, flag in enumerate(needed))
    derived, used = trimmed(gradient(call, needed, given))
    return _Derived(str(derived), used, tuple(t for t, flag in enumerate(needed) if flag))


@functools.lru_cache(maxsize=4096)
def _tangent(text: str, given: tuple[bool, ...]) -> _Derived:
    derived, used = trimmed(tangent(read_call(text), given))
    return _Derived(str(derived), used)


@functools.lru_cache(maxsize=4096)
def _operations(structure: str, call: str) -> int:
    """Floating-point operations of an edge: two for each coefficient and channel, and weights."""
    terms = sum(len(result.terms) for result in read_call(call).results)
    return terms * sum(c * (2 * n + weights) for c, n, weights in entry_counts(read(structure)))


def _executor(structure: str, call: str, like: Tensor, edges: int, backend: str) -> Any:
    """The module that computes a call.

    Few edges on the CPU are computed by one loop for all structures.  Their number alone decides,
    so that the bits of a result do not depend on which results are computed together.
    """
    device, few = "cuda" if like.is_cuda else like.device.type, False
    if like.is_cpu and not backend:
        channels, products, scalars = _counts(structure)
        least = 16 * LOOP_PRODUCTS if scalars else LOOP_PRODUCTS
        few = edges * channels < LOOPS_FROM or edges * products < least
    return _chosen(structure, call, like.dtype, device, backend, few)


@functools.lru_cache(maxsize=4096)
def _counts(structure: str) -> tuple[int, int, bool]:
    """Channels, products per edge, and whether all are of scalars."""
    found = read(structure)
    counts = entry_counts(found)
    products = sum(n * (channels + 1) for channels, n, _ in counts)
    scalars = not any(any(p.degrees(path)) for p in found.products for path in p.paths)
    return max((channels for channels, *_ in counts), default=0), products, scalars


@functools.lru_cache(maxsize=4096)
def _chosen(
    structure: str, call: str, dtype: torch.dtype, device: str, backend: str, few: bool
) -> Any:
    name = choose(backend or None, device)
    if name == "numba" and few:
        return executor("channelwise", "few")
    found = executor("channelwise", name)
    if name == "torch" or found.serves(read(structure), read_call(call), dtype):
        return found
    if backend:
        raise BackendError(
            f"backend={backend!r} was asked for {read(structure)!r} in the call {call!r}, {dtype}, "
            "for which it has no kernel. "
            "Pass backend=None or 'torch'."
        )
    return executor("channelwise", "torch")


contraction = ListOperator(
    "o3contraction",
    "str structure, str call, str present, SymInt num_x, SymInt num_z, SymInt num_edges, "
    "bool shared, str backend",
    ContractionRule(),
)
