"""The operators of the family: sums, sums of shifted exponentials, and the smallest values.

    sums      z_i = Σ_j f(x_i, y_j, p)
    shifted   m_i = max_j f,  s_i = Σ_j exp(f − m_i) w
    smallest  the indices j of the k smallest f(x_i, y_j, p)

All reduce over j.  The gradient of a sum is a sum again, over the pairs of one row or of one
column: with e the cotangent, ∂/∂x_i = Σ_j e_i ∂f/∂x and ∂/∂y_j = Σ_i e_i ∂f/∂y.  So one operator
has every order.  The maximum is a constant of `shifted`: s is differentiated as the sum that it is,
and log s + m does not depend on m.

Tensors are values, (B or 1, M or N or 1, D) by the number of their variable, then either no tables
or the `Blocks` of rows and those of columns.  Formulas travel as a `Key`, which registered ops take
and torch.compile can fold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

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
from torchweft.reductions.call import Blocks, Options, Sizes
from torchweft.reductions.engine import formula_keys as keys
from torchweft.reductions.engine.formula_keys import Key
from torchweft.reductions.formula.node import Node, reachable

__all__ = ["KERNELS", "kept", "opened", "rest_of", "shifted_sums", "smallest", "sums"]

F = TypeVar("F", bound=Callable[..., Any])

TABLES = len(Blocks._fields)

KERNELS = "torchweft.reductions.gpu.launch"
"""The executor on a GPU."""

LOOPS_FROM = 2**22
"""Pairs from which on the CPU a loop is compiled for a formula, which takes a second or two."""

FEW_BLOCKS = 16
"""Blocks of rows that torch takes one by one."""


def rest_of(key: Key, sizes: Sizes, how: str) -> Rest:
    """What operators take beside tensors: a key, sizes, "backend:precision:accumulation"."""
    return (key, *sizes, how)


def kept(key: Key, sizes: Sizes, how: str) -> CachedCall:
    """The same, for tensors that are always of the same kinds, and no tables."""
    return CachedCall(rest_of(key, sizes, how), keys.count(key), _prepared)


def sums(tensors: Tensors, rest: Rest) -> Tensor:
    """(B, M, f.dim): Σ_j f."""
    return _sums(tensors, rest)[0]


def shifted_sums(tensors: Tensors, rest: Rest) -> tuple[Tensor, Tensor]:
    """(B, M, 1), (B, M, w.dim): max_j f and Σ_j exp(f − max) w; the key is that of (f, w)."""
    m, s = _shifted(tensors, rest)
    return m, s


def smallest(tensors: Tensors, k: int, rest: Rest) -> Tensor:
    """(B, M, k, f.dim) int64: the indices of the k smallest values, ascending; −1 for none."""
    key, *others = rest
    tensors = [t.detach() for t in tensors]
    found: Tensor = torch.ops.torchweft.reductions_smallest(tensors, key, k, *others)
    return found


def _exact(body: F) -> F:
    """Autocast must not narrow the products inside a body."""

    @functools.wraps(body)
    def run(*args: Any) -> Any:
        if not any_autocast():
            return body(*args)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return body(*args)

    return run  # type: ignore[return-value]


class _Sums:
    """z_i = Σ_j f."""

    predictable = False  # gradients of values that rows share are sums of results

    @_exact
    def body(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        (f,), values, tables, sizes, options, executor = opened(tensors, rest)
        out = executor.sums(f, values, sizes, tables, options)
        _record_cost((f,), values, sizes, tables, [out])
        return [out]

    def fake(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        key, batch, rows, *_ = rest
        (f,) = keys.formulas(key)
        return [tensors[0].new_empty(batch, rows, f.dim)]

    def saved(self, results: Tensors) -> Tensors:
        return ()

    def gradients(
        self,
        call: Call,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        grads: Sequence[Tensor | None],
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        return _gradients(call, tensors, rest, grads[0], needed)

    def tangents(
        self,
        call: Call,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        directions: Sequence[Tensor | None],
    ) -> list[Tensor]:
        return [_tangent(call, tensors, rest, directions)]

    def batch(
        self, call: Call, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        key, batch, *others = rest
        tensors = _mapped(size, dims, tensors, batch)
        results = call(tensors, (key, size * batch, *others))
        return tuple(r.view(size, batch, *r.shape[1:]) for r in results)


class _Shifted(_Sums):
    """m_i and s_i."""

    @_exact
    def body(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        (f, w), values, tables, sizes, options, executor = opened(tensors, rest)
        out = executor.shifted(f, w, values, sizes, tables, options)
        _record_cost((f, w), values, sizes, tables, out)
        return list(out)

    def fake(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        key, batch, rows, *_ = rest
        _, w = keys.formulas(key)
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        return [tensors[0].new_empty(batch, rows, d, dtype=dtype) for d in (1, w.dim)]

    def saved(self, results: Tensors) -> Tensors:
        return results[:1]  # the maximum

    def gradients(
        self,
        call: Call,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        grads: Sequence[Tensor | None],
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        tensors, rest, at = _with_maximum(tensors, rest, saved[0])
        more = [*needed[:at], False, *needed[at:]]
        found = _gradients(_door_of_sums(call), tensors, rest, grads[1], more)
        return found[:at] + found[at + 1 :]

    def tangents(
        self,
        call: Call,
        tensors: Tensors,
        rest: Rest,
        saved: Tensors,
        directions: Sequence[Tensor | None],
    ) -> list[Tensor]:
        tensors, rest, at = _with_maximum(tensors, rest, saved[0])
        more = [*directions[:at], None, *directions[at:]]
        tangent = _tangent(_door_of_sums(call), tensors, rest, more)
        return [torch.zeros_like(saved[0]), tangent.to(saved[0].dtype)]


def _with_maximum(tensors: Tensors, rest: Rest, m: Tensor) -> tuple[list[Tensor], Rest, int]:
    """The sum Σ_j exp(f − m) w with m as one more value, whose number is returned too."""
    key, *others = rest
    key, at = keys.shifted(key), keys.count(key)
    finite = torch.where(m.isfinite(), m, 0).detach().to(tensors[0].dtype)
    return [*tensors[:at], finite, *tensors[at:]], (key, *others), at


def _door_of_sums(call: Call) -> Call:
    """The operator of sums, by the door through which `call` is that of shifted sums."""
    doors: dict[Call, Call] = {
        _shifted.registered: _sums.registered,
        _shifted.mapped: _sums.mapped,
    }
    return doors.get(call, _sums)


def _gradients(
    call: Call, tensors: Tensors, rest: Rest, grad: Tensor | None, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of Σ_j f in the values that need one; those of one axis in one pass."""
    found: list[Tensor | None] = [None] * len(tensors)
    key, batch, rows, columns, how = rest
    count = keys.count(key)
    wanted = tuple(n for n in range(count) if needed[n])
    if grad is None or not wanted:
        return found
    values, tables = tensors[:count], list(tensors[count:])
    with_grad = [*values, grad.to(tensors[0].dtype)]
    derivatives = keys.gradients(key, wanted)
    both = [tables, tables[TABLES:] + tables[:TABLES]]
    if len(derivatives) > 1 and call is _sums and unwatched(grad):
        asked = [_asked(d, with_grad, both[d.turned], rest) for d in derivatives]
        _begin(tuple(asked), how, with_grad[0].dtype, with_grad[0].device)
    for derivative in derivatives:
        sizes = (columns, rows) if derivative.turned else (rows, columns)
        blocks = both[derivative.turned]
        used = [with_grad[n] for n in derivative.used]
        further = _followed(rest, derivative, (derivative.key, batch, *sizes, how))
        joined = call([*used, *blocks], further)[0]
        parts = torch.split(joined, [v.dim for v in derivative.of], -1)
        for v, part in zip(derivative.of, parts, strict=True):
            found[v.number] = _reduced_to(values[v.number], part, v.cat)
    return found


def _asked(
    derivative: keys.Derivative, values: Tensors, blocks: Tensors, rest: Rest
) -> tuple[Any, ...]:
    """What kernels of a derivative depend on: its key, batches, sizes, how many blocks."""
    _, batch, rows, columns, _ = rest
    sizes = Sizes(batch, *((columns, rows) if derivative.turned else (rows, columns)))
    tables = Blocks(*blocks[:TABLES]) if blocks else None
    counts = None if tables is None else (len(tables.starts), len(tables.j_starts))
    return derivative.key, tuple([values[n].shape[0] for n in derivative.used]), sizes, counts


@functools.lru_cache(keys.KEPT)
def _begin(
    asked: tuple[tuple[Any, ...], ...], how: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Have kernels of several derivatives compiled at once, the first time they are asked for."""
    plans = [_plan(key, how, device.type, 1) for key, *_ in asked]
    if any(plan[3].__name__ != KERNELS for plan in plans):
        return
    from torchweft.reductions.engine import prepared as ahead

    sums = [ahead.Asked(plan[0][0], *a[1:]) for plan, a in zip(plans, asked, strict=True)]
    ahead.begin(sums, dtype, device, plans[0][2])


def _followed(rest: Rest, derivative: keys.Derivative, further: Rest) -> Rest:
    """The rest of a derivative's call, known again where its operator's is kept."""
    if type(rest) is not CachedCall:
        return further
    found: Rest | None = rest.derived.get(derivative)
    if found is None:
        found = rest.derived[derivative] = CachedCall(further, len(derivative.used), _prepared)
    return found


def _tangent(
    call: Call, tensors: Tensors, rest: Rest, directions: Sequence[Tensor | None]
) -> Tensor:
    """How Σ_j f changes as its values move."""
    key, *others = rest
    count = keys.count(key)
    moved = tuple(n for n in range(count) if directions[n] is not None)
    key, used = keys.tangent(key, moved)
    values = [*tensors[:count], *(d for d in directions[:count] if d is not None)]
    return call([*(values[n] for n in used), *tensors[count:]], (key, *others))[0]


def _reduced_to(value: Tensor, gradient: Tensor, cat: int) -> Tensor:
    """The gradient summed along what the value was the same for: rows (a parameter), the batch."""
    if cat == 2:
        gradient = gradient.sum(-2, keepdim=True)
    if value.shape[0] != gradient.shape[0]:
        gradient = gradient.sum(0, keepdim=True)
    return gradient


def _mapped(size: int, dims: Sequence[int | None], tensors: Tensors, batch: int) -> list[Tensor]:
    """A mapped dimension becomes part of the batch; what is the same for all stays one."""
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


def opened(tensors: Tensors, rest: Rest, k: int = 1) -> tuple[Any, ...]:
    """Formulas, values, the blocks of rows, sizes, options and the executor of a call."""
    key, batch, rows, columns, how = rest
    formulas, count, options, executor, fewer = _plan(key, how, tensors[0].device.type, k)
    sizes = Sizes(batch, rows, columns)
    # memory of a negative view has the other sign
    values = {number: tensors[number].resolve_neg().contiguous() for number in range(count)}
    blocks = Blocks(*tensors[count : count + TABLES]) if len(tensors) > count else None
    chosen = fewer if fewer is not executor and _few(sizes, blocks) else executor
    return formulas, values, blocks, sizes, options, chosen


def _prepared(tensors: Tensors, rest: Rest) -> Callable[[Tensors], Results]:
    """The body for tensors of these kinds: launches that are settled, or what the rule does."""
    formulas, values, _, sizes, options, executor = opened(tensors, rest)
    kind, rule = ("sums", _sums.rule) if len(formulas) == 1 else ("shifted", _shifted.rule)
    run = None
    if executor.__name__ == KERNELS:
        from torchweft.reductions.engine import prepared as ahead

        wanted = ahead.plain(kind, formulas, tensors[0], sizes, options)
        run = ahead.prepared(wanted, values, sizes, options)
    if run is None:
        return lambda given: tuple(rule.body(given, *rest))
    return functools.partial(_again, run)


def _again(run: Callable[[Tensors], list[Any]], given: Tensors) -> Results:
    return tuple(run([t.resolve_neg().contiguous() for t in given]))


@functools.lru_cache(keys.KEPT)
def _plan(key: Key, how: str, device: str, k: int) -> tuple[Any, ...]:
    """Formulas, how many values, options, the executor, and that of few pairs."""
    formulas = keys.formulas(key)
    backend, precision, accumulate = how.split(":")
    name = choose(backend or None, device)
    executor = _executor(name, formulas, k, chosen=not backend)
    fewer = executor
    if not backend and name == "numba":
        fewer = _executor("torch", formulas, k, chosen=True)
    return formulas, keys.count(key), Options(precision or None, accumulate), executor, fewer


def _record_cost(
    formulas: Sequence[Node],
    values: Mapping[int, Tensor],
    sizes: Sizes,
    blocks: Blocks | None,
    results: Sequence[Tensor],
) -> None:
    """For `explain`: every value read and every result written once, each pair evaluated once."""
    if not recording():
        return
    pairs = sizes.batch * sizes.rows * sizes.columns
    if blocks is not None:
        lengths = (blocks.j_ends - blocks.j_starts).cumsum(0)
        before = torch.cat([lengths.new_zeros(1), lengths])
        columns = before[blocks.indptr[1:]] - before[blocks.indptr[:-1]]
        pairs = sizes.batch * int(((blocks.ends - blocks.starts) * columns).sum())
    of_pairs = [n for n in reachable(*formulas) if {0, 1} <= n.cats]
    components = sum(max(a.dim for a in (n, *n.args)) for n in of_pairs)
    added = sum(f.dim for f in formulas)
    record_cost(sum(t.nbytes for t in (*values.values(), *results)), pairs * (components + added))


def _few(sizes: Sizes, blocks: Blocks | None) -> bool:
    """Whether there are too few pairs to compile a loop for; torch takes block after block."""
    pairs = sizes.batch * sizes.rows * sizes.columns
    return pairs < LOOPS_FROM and (blocks is None or len(blocks.starts) <= FEW_BLOCKS)


def _executor(name: str, formulas: Sequence[Node], k: int, *, chosen: bool) -> Any:
    """The module that reduces; where the backend was chosen by us, torch for what it lacks."""
    from torchweft.reductions.engine import torch_path as blocked

    if name == "torch":
        return blocked
    f, w = (*formulas, None)[:2]
    module = _loops(name)
    if module.serves(f, w, k):
        return module
    if chosen:
        return blocked
    raise BackendError(
        f"backend={name!r} was asked for more than its kernels hold: a formula of "
        f"{len(str(formulas[0]))} characters as primitives, {formulas[0].dim} components, k = {k}. "
        "Pass backend=None or 'torch', or take the formula apart."
    )


def _loops(name: str) -> Any:
    if name == "triton":
        from torchweft.reductions.gpu import launch

        return launch
    from torchweft.reductions.cpu import run as cpu

    return cpu


_SCHEMA = "str formula, SymInt batch, SymInt rows, SymInt columns, str how"
_sums = ListOperator("reductions_sums", _SCHEMA, _Sums())
_shifted = ListOperator("reductions_shifted", _SCHEMA, _Shifted())


@_exact
def _smallest_body(tensors: Tensors, key: Key, k: int, *rest: Any) -> Tensor:
    (f,), values, tables, sizes, options, executor = opened(tensors, (key, *rest), k)
    found: Tensor = executor.smallest(f, k, values, sizes, tables, options)
    _record_cost((f,), values, sizes, tables, [found])
    return found


def _smallest_fake(tensors: Tensors, key: Key, k: int, batch: Any, rows: Any, *_: Any) -> Tensor:
    (f,) = keys.formulas(key)
    return tensors[0].new_empty(batch, rows, k, f.dim, dtype=torch.int64)


def _smallest_mapped(
    info: Any, dims: Any, tensors: Tensors, key: Key, k: int, batch: int, *rest: Any
) -> tuple[Tensor, int]:
    flat = _mapped(info.batch_size, dims[0], tensors, batch)
    found: Tensor = torch.ops.torchweft.reductions_smallest(
        flat, key, k, info.batch_size * batch, *rest
    )
    return found.view(info.batch_size, batch, *found.shape[1:]), 0


LIBRARY.define(
    "reductions_smallest(Tensor[] tensors, str formula, int k, SymInt batch, SymInt rows, "
    "SymInt columns, str how) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _device in ("CPU", "CUDA"):
    LIBRARY.impl("reductions_smallest", _smallest_body, _device)
torch.library.register_fake("torchweft::reductions_smallest", _smallest_fake, lib=LIBRARY)
torch.library.register_vmap("torchweft::reductions_smallest", _smallest_mapped, lib=LIBRARY)


def _blocks_body(rows: Tensor, slices: Tensor, intervals: Tensor) -> list[Tensor]:
    from torchweft.reductions.cluster.sparsity import blocks_of

    half = (rows, slices, intervals)
    return [t.clone() for t in blocks_of((*half, *half), 1)]


def _blocks_fake(rows: Tensor, slices: Tensor, intervals: Tensor) -> list[Tensor]:
    blocks, lists = rows.shape[0], intervals.shape[0]
    sizes = (blocks, blocks, blocks + 1, lists, lists)
    return [rows.new_empty(size, dtype=torch.int64) for size in sizes]


LIBRARY.define(
    "reductions_blocks(Tensor rows, Tensor slices, Tensor intervals) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _device in ("CPU", "CUDA"):
    LIBRARY.impl("reductions_blocks", _blocks_body, _device)
torch.library.register_fake("torchweft::reductions_blocks", _blocks_fake, lib=LIBRARY)
