"""The operator of channelwise products: a call's results, closed under differentiation.

    torchweft::o3contraction(Tensor[] tensors, str structure, str call, …) -> Tensor[]

Tensors are those of the call, (rows, width) each, then the tables of the graph.  Gradients and
tangents are calls of the same operator, of every order.
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
from torchweft.core.operators.tensor_list import Call as Door
from torchweft.core.private import any_autocast
from torchweft.errors import BackendError, ShapeError
from torchweft.o3.backends import executor
from torchweft.o3.channelwise.calls import Call, gradient, read_call, tangent, trimmed
from torchweft.o3.channelwise.structure import Structure, read
from torchweft.o3.edges.graph import Tables, listed, pack, repeated, unpack
from torchweft.o3.irreps.wigner import entries_3j

__all__ = ["Contraction", "contract", "contraction", "kept", "one_by_one"]

Run = Callable[[Structure, Call, Sequence[Tensor], Tables, bool], list[Tensor]]

LOOPS_FROM = 2**13
"""Channels of edges from which on the CPU loops are compiled for a structure.

That takes seconds.  They and the time saved at a call both grow with the paths, so that these do
not count.
"""

FEW = 2**17
"""Products of a call from which on such loops then serve; of scalars alone 16 times as many.

Their loops share what they read among paths, and have none to share it among with scalars.
"""


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
    return contraction(
        [*tensors, *packed], (structure, call, present, *sizes, shared, backend or "")
    )


def kept(
    structure: str,
    call: str,
    present: str,
    sizes: tuple[int, int, int],
    shared: bool,
    backend: str | None,
) -> CachedCall:
    """What `contraction` takes beside tensors and tables of certain kinds; see `contract`."""
    rest = (structure, call, present, *sizes, shared, backend or "")
    return CachedCall(rest, len(read_call(call).slots), _prepared)


def _prepared(tensors: Tensors, rest: Rest) -> Callable[[Tensors], Results]:
    """The body for tensors of these kinds: launches of kernels, or what `body` does."""
    structure, call, present, num_x, num_z, num_edges, shared, backend = rest
    executor = _executor(structure, call, tensors[0], num_edges, backend)
    if not hasattr(executor, "prepared"):
        return lambda given: tuple(contraction.rule.body(given, *rest))
    what = read_call(call)
    count = len(what.slots)
    tables = unpack(tensors[count:], present, num_x, num_z, num_edges)
    prepared: Callable[..., Callable[[Tensors], Results]] = executor.prepared
    return prepared(read(structure), what, tensors[:count], tables, shared, listed(present))


class Contraction:
    """Results of derivatives of Q."""

    predictable = True

    def body(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        """The results on real tensors."""
        structure, call, present, num_x, num_z, num_edges, shared, backend = rest
        what = read_call(call)
        count = len(what.slots)
        values = [t.contiguous() for t in tensors[:count]]
        tables = unpack(tensors[count:], present, num_x, num_z, num_edges)
        run: Run = _executor(structure, call, values[0], num_edges, backend).run
        if any_autocast():  # it must not narrow the products inside a body
            with torch.autocast(values[0].device.type, enabled=False):
                results = run(read(structure), what, values, tables, shared)
        else:
            results = run(read(structure), what, values, tables, shared)
        if recording():
            moved = sum(t.nbytes for t in (*tensors, *results))
            record_cost(moved, num_edges * _operations(structure, call))
        return results

    def fake(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        """Empty tensors of their shapes."""
        structure, call, _, num_x, num_z, num_edges, shared, _ = rest
        rows = {"x": num_x, "y": num_edges, "z": num_z, "w": 1 if shared else num_edges}
        width = read(structure).width
        slots = [result.slot for result in read_call(call).results]
        return [tensors[0].new_empty(rows[slot], width(slot)) for slot in slots]

    def saved(self, results: Tensors) -> Tensors:
        """Nothing: derivatives need no results."""
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
        """Of the tensors that need one: a call again."""
        found: list[Tensor | None] = [None] * len(tensors)
        count = len(read_call(rest[1]).slots)
        given = tuple([g is not None for g in grads])
        turned, further = _followed(rest, _gradient, tuple(needed[:count]), given)
        if turned.of:
            every = [*tensors[:count], *[g for g in grads if g is not None]]
            chosen = [every[t] for t in turned.used]
            results = call([*chosen, *tensors[count:]], further)
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
        """Along the directions: a call again."""
        count = len(read_call(rest[1]).slots)
        directions = directions[:count]
        moved, further = _followed(rest, _tangent, tuple(d is not None for d in directions))
        every = [*tensors[:count], *(d for d in directions if d is not None)]
        chosen = [every[t] for t in moved.used]
        return list(call([*chosen, *tensors[count:]], further))

    def batch(
        self, call: Door, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        """Of a mapped call, samples side by side or one by one."""
        self.refuse_mapped_graph(dims, rest)
        slots, results = read_call(rest[1])
        mapped = {slot for slot, dim in zip(slots, dims, strict=False) if dim is not None}
        shared = rest[6]
        # one row of weights for all edges would be one for all samples too
        alone = shared and ("w" in mapped or any(result.slot == "w" for result in results))
        run = one_by_one if alone else _side_by_side
        return run(call, size, dims, tensors, rest)

    @staticmethod
    def refuse_mapped_graph(dims: Sequence[int | None], rest: Rest) -> None:
        """Raises where tables are mapped."""
        if any(dim is not None for dim in dims[len(read_call(rest[1]).slots) :]):
            raise ShapeError(
                "the edges of a graph were given to torch.vmap as a mapped argument: they must be "
                "the same for the whole map. Map features and weights only, or call once for each."
            )


def one_by_one(
    call: Door, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
) -> Results:
    """A mapped call, sample after sample."""
    each = [
        call([t if d is None else t.select(d, i) for t, d in zip(tensors, dims, strict=True)], rest)
        for i in range(size)
    ]
    return tuple(torch.stack(found) for found in zip(*each, strict=True))


def _side_by_side(
    call: Door, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
) -> Results:
    """The samples as copies of the graph, none connected with another."""
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


def _followed(rest: Rest, derive: Callable[..., _Derived], *flags: Any) -> tuple[_Derived, Rest]:
    """A call derived from one with this rest, and its own rest; known again where that is kept."""
    if type(rest) is not CachedCall:
        structure, call, *others = rest
        derived = derive(call, *flags)
        return derived, (structure, derived.call, *others)
    if (derive, *flags) not in rest.derived:
        derived, further = _followed(tuple(rest), derive, *flags)
        rest.derived[derive, *flags] = derived, CachedCall(further, len(derived.used), _prepared)
    known: tuple[_Derived, Rest] = rest.derived[derive, *flags]
    return known


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
    derived, used = trimmed(gradient(call, needed, given))
    return _Derived(str(derived), used, tuple(t for t, flag in enumerate(needed) if flag))


@functools.lru_cache(maxsize=4096)
def _tangent(text: str, given: tuple[bool, ...]) -> _Derived:
    derived, used = trimmed(tangent(read_call(text), given))
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


def _executor(structure: str, call: str, like: Tensor, edges: int, backend: str) -> Any:
    """The module that serves; where the backend was chosen by us, one that does."""
    device = "cuda" if like.is_cuda else like.device.type
    size = "many" if backend or not like.is_cpu else _size(structure, edges)
    return _chosen(structure, call, like.dtype, device, backend, size)


def _size(structure: str, edges: int) -> str:
    """On the CPU: few for one loop for all structures, many for loops of its own.

    The same for all results: which ones are asked for together must not change their bits.
    """
    channels, products, scalars = _counts(structure)
    most = 16 * FEW if scalars else FEW
    return "few" if edges * channels < LOOPS_FROM or edges * products < most else "many"


@functools.lru_cache(maxsize=4096)
def _counts(structure: str) -> tuple[int, int, bool]:
    """Channels, products of an edge, and whether all are of scalars."""
    of = [(product, path) for product in read(structure).products for path in product.paths]
    products = sum(len(entries_3j(*p.degrees(path))) * (p.channels + 1) for p, path in of)
    channels = max((product.channels for product, _ in of), default=0)
    return channels, products, not any(any(p.degrees(path)) for p, path in of)


@functools.lru_cache(maxsize=4096)
def _chosen(
    structure: str, call: str, dtype: torch.dtype, device: str, backend: str, size: str
) -> Any:
    name = choose(backend or None, device)
    if name == "numba" and not backend and size == "few":
        return executor("channelwise", "few")
    found = executor("channelwise", name)
    if name == "torch" or found.serves(read(structure), read_call(call), dtype):
        return found
    if backend:
        raise BackendError(
            f"backend={backend!r} was asked for more than its kernels hold: "
            f"{read(structure)!r} in the call {call!r}, {dtype}. "
            "Pass backend=None or 'torch'."
        )
    return executor("channelwise", "torch")


contraction = ListOperator(
    "o3contraction",
    "str structure, str call, str present, SymInt num_x, SymInt num_z, SymInt num_edges, "
    "bool shared, str backend",
    Contraction(),
)
