"""The operators of the family: sums, sums of shifted exponentials, and the smallest values.

    sums      z_i = Σ_j f(x_i, y_j, p)
    shifted   m_i = max_j f,  s_i = Σ_j exp(f − m_i) w
    smallest  the indices j of the k smallest f(x_i, y_j, p)

All reduce over j.  The gradient of a sum is a sum again, over the pairs of one row or of one
column: with e the cotangent, ∂/∂x_i = Σ_j e_i ∂f/∂x and ∂/∂y_j = Σ_i e_i ∂f/∂y.  So one operator
has every order.  The maximum is a constant of `shifted`: s is differentiated as the sum that it is,
and log s + m does not depend on m.

Tensors are values, (B or 1, M or N or 1, D) by the number of their variable, then either no tables
or the `Blocks` of rows and the `Blocks` of columns.  Formulas travel as a `Key`, which registered
ops take and torch.compile can fold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from torchweft.core.backend import choose
from torchweft.core.explain import record_cost, recording
from torchweft.core.operators.operator import LIBRARY, unwatched
from torchweft.core.operators.tensor_list import (
    CachedCall,
    Call,
    ListOperator,
    Rest,
    Results,
    Tensors,
)
from torchweft.core.private import any_autocast
from torchweft.errors import BackendError, ShapeError
from torchweft.reductions.call import Blocks, Options, ReductionData, Sizes
from torchweft.reductions.cluster.sparsity import blocks_of, pairs_of
from torchweft.reductions.engine import formula_keys as keys
from torchweft.reductions.engine.formula_keys import Key
from torchweft.reductions.formula.node import Node, reachable

__all__ = [
    "KERNELS",
    "TABLES",
    "ShiftedRule",
    "SumsRule",
    "arguments",
    "cached_arguments",
    "number_wanted",
    "opened",
    "reduced",
    "register_constant",
    "shifted_sums",
    "smallest",
    "sums",
]

TABLES = len(Blocks._fields)

EXECUTORS = {
    "torch": "torchweft.reductions.engine.torch_path",
    "numba": "torchweft.reductions.engine.numba_path",
    "triton": "torchweft.reductions.gpu.launch",
}
"""The modules that reduce: each has `sums(f, data)`, `shifted(f, w, data)`, `smallest(f, k, data)`
and `serves(f, w, k)`."""

KERNELS = EXECUTORS["triton"]

LEAST_PAIRS_OF_LOOPS = 2**19
"""Pairs from which on the CPU a loop is compiled for a formula: about a tenth of a second, once, as
long as torch takes for some tens of calls of so many pairs."""

FEW_BLOCKS = 16
"""Blocks of rows that torch takes one by one."""

Optionals = Sequence[Tensor | None]
Flags = Sequence[bool]


def arguments(key: Key, sizes: Sizes, how: str) -> Rest:
    """What operators take beside tensors: a key, sizes, "backend:precision:accumulation"."""
    return (key, *sizes, how)


def cached_arguments(key: Key, sizes: Sizes, how: str) -> CachedCall:
    """The same, for tensors that always have the same signature, and no tables."""
    return CachedCall(arguments(key, sizes, how), keys.count(key), _prepared)


def sums(tensors: Tensors, rest: Rest) -> Tensor:
    """(B, M, f.dim): Σ_j f."""
    return _sums(tensors, rest)[0]


def shifted_sums(tensors: Tensors, rest: Rest) -> tuple[Tensor, Tensor]:
    """(B, M, 1), (B, M, w.dim): max_j f and Σ_j exp(f − max) w; the key is that of (f, w)."""
    m, s = _shifted(tensors, rest)
    return m, s


def smallest(tensors: Tensors, k: int, rest: Rest) -> Tensor:
    """(B, M, k, f.dim) int64: the indices of the k smallest values, ascending; −1 for none.

    NaN counts as +∞.  k = 0 stands for the one value that torch.min takes: NaN comes before −∞.
    Equal values come in the order of their indices.
    """
    key, *others = rest
    tensors = [t.detach() for t in tensors]
    found: Tensor = torch.ops.torchweft.reductions_smallest(tensors, key, k, *others)
    return found


def number_wanted(kind: str, k: int) -> int:
    """k of `smallest` for a reduction of this name."""
    return k if "K" in kind else 0


def reduced(name: str, tensors: Tensors, rest: Rest, k: int = 1) -> list[Tensor]:
    """The results of an executor's function; autocast must not narrow products inside it."""
    if any_autocast():
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return reduced(name, tensors, rest, k)
    formulas, data, executor = opened(tensors, rest, k)
    given = (*formulas, k) if name == "smallest" else formulas
    found = getattr(executor, name)(*given, data)
    results = [found] if isinstance(found, Tensor) else list(found)
    if recording():
        _record_cost(formulas, data, results)
    return results


class SumsRule:
    """z_i = Σ_j f."""

    predictable = False  # gradients of values that rows share are sums of results

    def body(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        """See `Rule`."""
        return reduced("sums", tensors, rest)

    def fake(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        """See `Rule`."""
        key, batch, rows, *_ = rest
        (f,) = keys.formulas(key)
        return [tensors[0].new_empty(batch, rows, f.dim)]

    def saved(self, results: Tensors) -> Tensors:
        """See `Rule`."""
        return ()

    def gradients(
        self,
        call: Call,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        grads: Optionals,
        needed: Flags,
    ) -> list[Tensor | None]:
        """The gradients of Σ_j f in the values that need one, in one pass for each axis."""
        found: list[Tensor | None] = [None] * len(tensors)
        key, batch, rows, columns, how, *more = rest
        count, grad = keys.count(key), grads[0]
        wanted = tuple(n for n in range(count) if needed[n])
        if grad is None or not wanted:
            return found
        values, tables = tensors[:count], list(tensors[count:])
        with_grad = [*values, grad.to(tensors[0].dtype)]
        derivatives = keys.gradients(key, wanted)
        sizes = [Sizes(batch, rows, columns), Sizes(batch, columns, rows)]
        half = len(tables) // 2
        both = [tables, tables[half:] + tables[:half]]
        if len(derivatives) > 1 and call is _sums and unwatched(grad):
            future = [_future(d, with_grad, sizes[d.turned], both[d.turned]) for d in derivatives]
            _begin(tuple(future), how, with_grad[0].dtype, with_grad[0].device)
        for derivative in derivatives:
            blocks = both[derivative.turned]
            used = [with_grad[n] for n in derivative.used]
            further = (derivative.key, *sizes[derivative.turned], how, *more)
            joined = call([*used, *blocks], _followed(rest, derivative, further))[0]
            variables = [v.data for v in derivative.of]
            parts = torch.split(joined, [dim for _, dim, _ in variables], -1)
            for (number, _, cat), part in zip(variables, parts, strict=True):
                found[number] = _reduced_to(values[number], part, cat)
        return found

    def tangents(
        self, call: Call, tensors: Tensors, rest: Rest, saved: Tensors, directions: Optionals
    ) -> list[Tensor]:
        """How Σ_j f changes as its values move."""
        key, *others = rest
        count = keys.count(key)
        moved = tuple(n for n in range(count) if directions[n] is not None)
        key, used = keys.tangent(key, moved)
        values = [*tensors[:count], *(d for d in directions[:count] if d is not None)]
        return [call([*(values[n] for n in used), *tensors[count:]], (key, *others))[0]]

    def batch(
        self, call: Call, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        """See `Rule`."""
        key, batch, *others = rest
        tensors = _mapped(size, dims, tensors, batch)
        results = call(tensors, (key, size * batch, *others))
        return tuple(r.view(size, batch, *r.shape[1:]) for r in results)


class ShiftedRule(SumsRule):
    """m_i and s_i, which is differentiated as the sum Σ_j exp(f − m) w with constant m."""

    def __init__(self, plain: ListOperator) -> None:
        self._plain = plain  # the operator of sums

    def _entry_of_sums(self, call: Call) -> Call:
        """The entry of the operator of sums that corresponds to an entry of this one."""
        name = getattr(call, "__name__", None)  # of the methods `registered` and `mapped`
        entry: Call = self._plain if name is None else getattr(self._plain, name)
        return entry

    def body(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        """See `Rule`."""
        return reduced("shifted", tensors, rest)

    def fake(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        """See `Rule`."""
        key, batch, rows, *_ = rest
        _, w = keys.formulas(key)
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        return [tensors[0].new_empty(batch, rows, d, dtype=dtype) for d in (1, w.dim)]

    def saved(self, results: Tensors) -> Tensors:
        """See `Rule`."""
        return results[:1]  # the maximum

    def gradients(
        self,
        call: Call,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        grads: Optionals,
        needed: Flags,
    ) -> list[Tensor | None]:
        """See `Rule`."""
        tensors, rest, at = _with_maximum(tensors, rest, saved[0])
        more = [*needed[:at], False, *needed[at:]]
        found = super().gradients(self._entry_of_sums(call), tensors, rest, (), grads[1:], more)
        return found[:at] + found[at + 1 :]

    def tangents(
        self, call: Call, tensors: Tensors, rest: Rest, saved: Tensors, directions: Optionals
    ) -> list[Tensor]:
        """See `Rule`."""
        tensors, rest, at = _with_maximum(tensors, rest, saved[0])
        more = [*directions[:at], None, *directions[at:]]
        (tangent,) = super().tangents(self._entry_of_sums(call), tensors, rest, (), more)
        return [torch.zeros_like(saved[0]), tangent.to(saved[0].dtype)]


def _with_maximum(tensors: Tensors, rest: Rest, m: Tensor) -> tuple[list[Tensor], Rest, int]:
    """The sum Σ_j exp(f − m) w with m as one more value, whose number is returned too."""
    key, *others = rest
    key, at = keys.shifted(key), keys.count(key)
    finite = torch.where(m.isfinite(), m, 0).detach().to(tensors[0].dtype)
    return [*tensors[:at], finite, *tensors[at:]], (key, *others), at


def _future(
    derivative: keys.Derivative, values: Tensors, sizes: Sizes, blocks: Tensors
) -> tuple[Any, ...]:
    """What kernels of a derivative depend on: its key, batches, sizes, numbers of blocks."""
    counts = None
    if blocks:
        tables = Blocks(*blocks[:TABLES])
        counts = len(tables.starts), len(tables.j_starts)
    return derivative.key, tuple([values[n].shape[0] for n in derivative.used]), sizes, counts


@functools.lru_cache(keys.KEPT)
def _begin(
    future: tuple[tuple[Any, ...], ...], how: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Compile the kernels of several derivatives at once, the first time they are needed."""
    plans = [_plan(key, how, device.type, 1) for key, *_ in future]
    if all(plan[3].__name__ == KERNELS for plan in plans):
        sums = [(plan[0][0], *more) for plan, (_, *more) in zip(plans, future, strict=True)]
        import_module(KERNELS).begin(sums, dtype, device, plans[0][2])


def _followed(rest: Rest, derivative: keys.Derivative, further: Rest) -> Rest:
    """Arguments of a derivative's call, cached with the arguments of its operator."""
    if type(rest) is not CachedCall:
        return further
    found: Rest | None = rest.derived.get(derivative)
    if found is None:
        found = rest.derived[derivative] = CachedCall(further, len(derivative.used), _prepared)
    return found


def _reduced_to(value: Tensor, gradient: Tensor, cat: int) -> Tensor:
    """The gradient summed over what shares the value: rows (of a parameter), the batch."""
    if cat == 2:
        gradient = gradient.sum(-2, keepdim=True)
    if value.shape[0] != gradient.shape[0]:
        gradient = gradient.sum(0, keepdim=True)
    return gradient


def _mapped(size: int, dims: Sequence[int | None], tensors: Tensors, batch: int) -> list[Tensor]:
    """Tensors whose mapped dimension is part of the batch; a batch of one stays one."""
    found = []
    for tensor, dim in zip(tensors, dims, strict=True):
        if dim is None:
            repeats = tensor.is_floating_point() and tensor.shape[0] > 1
            found.append(tensor.repeat(size, 1, 1) if repeats else tensor)
            continue
        if not tensor.is_floating_point():
            raise ShapeError(
                "ranges were given to torch.vmap as a mapped argument: they must be the same for "
                "the whole map. Pass in_dims=None for them, or call once for each."
            )
        found.append(tensor.movedim(dim, 0).expand(-1, batch, -1, -1).flatten(0, 1))
    return found


def opened(tensors: Tensors, rest: Rest, k: int = 1) -> tuple[tuple[Node, ...], ReductionData, Any]:
    """Formulas, data and the executor of a call."""
    key, batch, rows, columns, how = rest
    formulas, count, options, executor, fewer = _plan(key, how, tensors[0].device.type, k)
    # memory of a negative view has the other sign
    values = {number: tensors[number].resolve_neg().contiguous() for number in range(count)}
    blocks = Blocks(*tensors[count : count + TABLES]) if len(tensors) > count else None
    few = batch * rows * columns < LEAST_PAIRS_OF_LOOPS
    if fewer is not executor and few and (blocks is None or len(blocks.starts) <= FEW_BLOCKS):
        executor = fewer
    return formulas, ReductionData(values, Sizes(batch, rows, columns), blocks, options), executor


def _prepared(tensors: Tensors, rest: Rest) -> Callable[[Tensors], Results]:
    """The body for tensors of this signature: prepared launches, or the rule's."""
    formulas, data, executor = opened(tensors, rest)
    kind, rule = ("sums", _sums.rule) if len(formulas) == 1 else ("shifted", _shifted.rule)
    run = None
    if executor.__name__ == KERNELS:
        wanted = executor.plain(kind, formulas, data)
        run = executor.prepared(wanted, data)
    if run is None:
        return lambda given: tuple(rule.body(given, *rest))
    return functools.partial(_again, run)


def _again(run: Callable[[Tensors], list[Any]], given: Tensors) -> Results:
    return tuple(run([t.resolve_neg().contiguous() for t in given]))


@functools.lru_cache(keys.KEPT)
def _plan(key: Key, how: str, device: str, k: int) -> tuple[Any, ...]:
    """Formulas, number of values, options, the executor, and the executor of few pairs."""
    formulas = keys.formulas(key)
    backend, precision, accumulate = how.split(":")
    name = choose(backend or None, device)
    executor = fewer = import_module(EXECUTORS[name])
    if not executor.serves(*formulas, k=k):
        if backend:
            raise BackendError(
                f"backend={name!r} was asked for more than its kernels hold: a formula of "
                f"{len(str(formulas[0]))} characters as primitives, {formulas[0].dim} components, "
                f"k = {k}. Pass backend=None or 'torch', or take the formula apart."
            )
        executor = fewer = import_module(EXECUTORS["torch"])
    if not backend and name == "numba":
        fewer = import_module(EXECUTORS["torch"])
    return formulas, keys.count(key), Options(precision or None, accumulate), executor, fewer


def _record_cost(formulas: Sequence[Node], data: ReductionData, results: Tensors) -> None:
    """For `explain`: values are read once, results written once, pairs evaluated once."""
    batch, rows, columns = data.sizes
    pairs = batch * (rows * columns if data.blocks is None else pairs_of(data.blocks))
    of_pairs = [n for n in reachable(*formulas) if {0, 1} <= n.cats]
    components = sum(max(a.dim for a in (n, *n.args)) for n in of_pairs)
    added = sum(f.dim for f in formulas)
    moved = sum(t.nbytes for t in (*data.values.values(), *results))
    record_cost(moved, pairs * (components + added))


_SCHEMA = "str formula, SymInt batch, SymInt rows, SymInt columns, str how"
_sums = ListOperator("reductions_sums", _SCHEMA, SumsRule())
_shifted = ListOperator("reductions_shifted", _SCHEMA, ShiftedRule(_sums))


def register_constant(schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operator without gradients."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, body, device)
    torch.library.register_fake(f"torchweft::{name}", fake, lib=LIBRARY)


def _smallest_body(tensors: Tensors, key: Key, k: int, *rest: Any) -> Tensor:
    return reduced("smallest", tensors, (key, *rest), k)[0]


def _smallest_fake(tensors: Tensors, key: Key, k: int, batch: Any, rows: Any, *_: Any) -> Tensor:
    (f,) = keys.formulas(key)
    return tensors[0].new_empty(batch, rows, max(k, 1), f.dim, dtype=torch.int64)


def _smallest_mapped(
    info: Any, dims: Any, tensors: Tensors, key: Key, k: int, batch: int, *rest: Any
) -> tuple[Tensor, int]:
    flat = _mapped(info.batch_size, dims[0], tensors, batch)
    found = smallest(flat, k, (key, info.batch_size * batch, *rest))
    return found.view(info.batch_size, batch, *found.shape[1:]), 0


register_constant(
    "reductions_smallest(Tensor[] tensors, str formula, int k, SymInt batch, SymInt rows, "
    "SymInt columns, str how) -> Tensor",
    _smallest_body,
    _smallest_fake,
)
torch.library.register_vmap("torchweft::reductions_smallest", _smallest_mapped, lib=LIBRARY)


def _blocks_body(rows: Tensor, slices: Tensor, intervals: Tensor) -> list[Tensor]:
    half = (rows, slices, intervals)
    return [t.clone() for t in blocks_of((*half, *half), 1)]


def _blocks_fake(rows: Tensor, slices: Tensor, intervals: Tensor) -> list[Tensor]:
    blocks, lists = rows.shape[0], intervals.shape[0]
    sizes = (blocks, blocks, blocks + 1, lists, lists)
    return [rows.new_empty(size, dtype=torch.int64) for size in sizes]


register_constant(
    "reductions_blocks(Tensor rows, Tensor slices, Tensor intervals) -> Tensor[]",
    _blocks_body,
    _blocks_fake,
)
