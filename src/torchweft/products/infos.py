"""Index tables of a product: as infos, which functions build, and as the plan of a call.

The roles of a product plan: `x` and `y` are rows of the two inputs, `z` rows of the output, `t` is
the term (the index of its scale), `k` the entry (the loop variable of a segment).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchweft.core import recorded
from torchweft.core.operators.operands import check_tensors
from torchweft.core.private import parse_to
from torchweft.core.table_copies import copies_of, is_constant, mark_constant, unreadable
from torchweft.core.tables import Plan, TensorCache, indptr_of, rows_of, sort_rows
from torchweft.errors import DTypeError, IndexRangeError, ShapeError

__all__ = [
    "SparseProductInfo",
    "SparseScaleInfo",
    "sparse_product_info",
    "sparse_product_infos",
    "sparse_scale_infos",
]

Index = Sequence[int] | range | np.ndarray[Any, Any] | Tensor
Scale = Sequence[float] | np.ndarray[Any, Any] | Tensor
Place = torch.device | torch.dtype | Tensor | str | int | bool | None

I = TypeVar("I", bound="Movable")  # noqa: E741 - an info


class Movable:
    """A NamedTuple of tensors that moves as a tensor does, and that `torch.load` takes."""

    def __init_subclass__(cls) -> None:
        torch.serialization.add_safe_globals([cls])  # torch.load(weights_only=True), its default

    def to(self: I, *args: Place, **kwargs: Place) -> I:
        """On another device, or with real numbers in another dtype; indices stay integer.

        Args:
            args: what `torch.Tensor.to` takes: a device, a dtype, both, or a tensor that has them.
            kwargs: likewise: device, dtype, non_blocking.

        Returns:
            The info of the moved tables.
        """
        device, dtype, non_blocking, _ = parse_to(*args, **kwargs)  # type: ignore[call-overload]
        return self._each(
            lambda t: t.to(device, dtype if t.is_floating_point() else None, non_blocking)
        )

    def cuda(
        self: I, device: int | str | torch.device | None = None, non_blocking: bool = False
    ) -> I:
        """On a GPU, the current one by default."""
        there = torch.device("cuda") if device is None else torch.device(device)
        return self.to(there, non_blocking=non_blocking)

    def cpu(self: I) -> I:
        """In host memory."""
        return self.to(torch.device("cpu"))

    def pin_memory(self: I) -> I:
        """In page-locked host memory, from where `cuda(non_blocking=True)` copies."""
        return self._each(Tensor.pin_memory)

    def _each(self: I, function: Callable[[Tensor], Tensor]) -> I:
        """The tensors' images; those of constant tables are constant."""
        fields = self._asdict()  # type: ignore[attr-defined]
        for name, value in fields.items():
            if isinstance(value, Tensor):
                fields[name] = function(value)
                if is_constant(value):
                    mark_constant(fields[name])
        return type(self)(**fields)


class _ProductFields(NamedTuple):
    scale: Tensor | None = None
    index1: Tensor | None = None
    index2: Tensor | None = None
    seg_out: Tensor | None = None
    gather_index: Tensor | None = None
    index_out: Tensor | None = None
    out_size: int | None = None


class SparseProductInfo(Movable, _ProductFields):
    """z[n,M] = Σ_{t ∈ segment M} scale[t] · x[n,index1[t]] ∘ y[n,index2[t]] as one value.

    The tables of an info that `sparse_product_info` builds are its own, and calls take them as they
    are.  Tables of an info built by hand are compared at each call with what its plan was made of,
    as all tables are.

    Args:
        scale: (T,) factors, in the dtype that sums are formed in, or cast at the call; None is 1.
        index1: (T,) rows of the first input, int32 or int64; None is the identity.
        index2: (T,) rows of the second input; None is the identity.
        seg_out: (M+1,) bounds of the terms of each output row; None: each term is a row.
        gather_index: entry k of a segment stands for term gather_index[k]; None is the identity.
        index_out: output row of each segment (or term); None is the identity.
        out_size: number of output rows.

    Example:
        >>> import torch
        >>> from torchweft import products
        >>> index, seg = torch.tensor([0, 2, 1]), torch.tensor([0, 2, 3])
        >>> info = products.SparseProductInfo(index1=index, seg_out=seg, out_size=2)
        >>> x, w = torch.tensor([[1.0], [2.0], [4.0]]), torch.ones(3)  # rows, and a weight a term
        >>> products.sparse_vecsca(x, w, info.to("cpu")).tolist()
        [[5.0], [2.0]]
    """

    __slots__ = ()


class _ScaleFields(NamedTuple):
    scale: Tensor | None = None
    index: Tensor | None = None  # type: ignore[assignment]  # the field hides tuple.index
    seg_out: Tensor | None = None
    index_out: Tensor | None = None
    out_size: int | None = None


class SparseScaleInfo(Movable, _ScaleFields):
    """z[n,M] = Σ_{t ∈ segment M} scale[t] · x[n,index[t]] as one value.

    Args:
        scale: (T,) factors, in the dtype that sums are formed in, or cast at the call; None is 1.
        index: (T,) rows of the input, int32 or int64; None is the identity.
        seg_out: (M+1,) bounds of the terms of each output row; None: each term is a row.
        index_out: output row of each segment (or term); None is the identity.
        out_size: number of output rows.

    Example:
        >>> import torch
        >>> from torchweft import products
        >>> info = products.SparseScaleInfo(index=torch.tensor([1, 0]), out_size=2)
        >>> products.sparse_scale(torch.tensor([[1.0], [2.0]]), info).tolist()
        [[2.0], [1.0]]
    """

    __slots__ = ()


def as_info(name: str, given: Any, kind: type[I]) -> I:
    """The info, or what a named tuple with the same fields holds, for example Equitorch's.

    Raises:
        DTypeError: it has other fields.
    """
    if isinstance(given, kind):
        return given
    fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    if getattr(given, "_fields", None) == fields:
        return kind(*given)
    raise DTypeError(
        f"{name} is a {type(given).__name__}: it must be a {kind.__name__}, or a named tuple of "
        f"its fields ({', '.join(fields)}). Build one with "
        f"torchweft.products.sparse_product_info or {kind.__name__}(...)."
    )


def sparse_product_info(
    index1: Index | None = None,
    index2: Index | None = None,
    index: Index | None = None,
    scale: Scale | None = None,
    out_size: int | None = None,
) -> SparseProductInfo:
    """Terms scale[t] · x[index1[t]] ∘ y[index2[t]] into row index[t], sorted by that row.

    Args:
        index1: (T,) rows of the first input; None is the identity.
        index2: (T,) rows of the second input; None is the identity.
        index: (T,) output rows; None is the identity.  At least one index must be given.
        scale: (T,) factors; Python numbers become float64 and are cast at the call.
        out_size: output rows; max(index) + 1 if left out.

    Returns:
        The info, its terms in a stable order of the output row, with `seg_out`.

    Raises:
        ShapeError: no index is given, or lengths differ.
        DTypeError: indices that are not integers.
        IndexRangeError: a negative index, or an out_size that is too small.

    Cost: one sort of T rows.

    Example:
        >>> from torchweft import products
        >>> info = products.sparse_product_info(index1=[0, 2, 1], index=[1, 0, 1])
        >>> info.index1.tolist(), info.seg_out.tolist(), info.out_size
        ([2, 0, 1], [0, 1, 3], 2)
    """
    given = {"index1": index1, "index2": index2, "index": index}
    tables = {name: _index(name, i) for name, i in given.items() if i is not None}
    if not tables:
        raise ShapeError(
            "index1, index2 and index are all missing: at least one must say how many terms there "
            "are. Pass one, e.g. index1=range(T)."
        )
    lengths = {name: i.numel() for name, i in tables.items()}
    factors = _scale(scale)
    if factors is not None:
        lengths["scale"] = factors.numel()
    terms = next(iter(lengths.values()))
    for name, length in lengths.items():
        if length != terms:
            raise ShapeError(
                f"{name} has {length} entries and {next(iter(lengths))} has {terms}: all tables "
                "must name the same terms. Pass tables of one length."
            )
    device = next(iter(tables.values())).device
    rows = tables.get("index")
    order = torch.arange(terms, device=device) if rows is None else sort_rows(rows)
    first, second = (
        order if name not in tables else tables[name][order] for name in ("index1", "index2")
    )
    if factors is not None:
        factors = factors.to(device)[order]
    if rows is None:
        size, seg = _out_size(out_size, terms), None
    else:
        size = _out_size(out_size, int(rows.max()) + 1 if terms else 0)
        seg = indptr_of(rows[order], size)
    mark_constant(factors, first, second, seg)
    return SparseProductInfo(factors, first, second, seg, out_size=size)


def sparse_product_infos(
    index1: Index | None = None,
    index2: Index | None = None,
    index: Index | None = None,
    scale: Scale | None = None,
    out_size: int | None = None,
    in1_size: int | None = None,
    in2_size: int | None = None,
) -> tuple[SparseProductInfo, SparseProductInfo, SparseProductInfo]:
    """The info of a product and of its two gradients: (1, 2, out), (2, out, 1), (out, 1, 2).

    Args:
        index1: (T,) rows of the first input; None is the identity.
        index2: (T,) rows of the second input; None is the identity.
        index: (T,) output rows; None is the identity.  At least one index must be given.
        scale: (T,) factors; Python numbers become float64 and are cast at the call.
        out_size: output rows; max(index) + 1 if left out.
        in1_size: rows of the first input; max(index1) + 1 if left out.
        in2_size: rows of the second input; max(index2) + 1 if left out.

    Returns:
        info_fwd, info_bwd1 and info_bwd2 of `sparse_{op}`, which needs the first alone.

    Raises:
        WeftError: see `sparse_product_info`.

    Cost: three sorts of T rows.

    Example:
        >>> import torch
        >>> from torchweft import products
        >>> infos = products.sparse_product_infos([0, 1, 1], [2, 0, 1], [0, 0, 1])
        >>> products.sparse_mul(torch.ones(2, 4), torch.ones(3, 4), *infos).shape
        torch.Size([2, 4])
    """
    return (
        sparse_product_info(index1, index2, index, scale, out_size),
        sparse_product_info(index2, index, index1, scale, in1_size),
        sparse_product_info(index, index1, index2, scale, in2_size),
    )


def sparse_scale_infos(
    index: Index | None = None,
    index_out: Index | None = None,
    scale: Scale | None = None,
    out_size: int | None = None,
    in_size: int | None = None,
) -> tuple[SparseScaleInfo, SparseScaleInfo]:
    """The infos of z[n,M] = Σ_{t: index_out[t] = M} scale[t] · x[n,index[t]] and of its gradient.

    Args:
        index: (T,) rows of the input; None is the identity.
        index_out: (T,) output rows; None is the identity.  At least one index must be given.
        scale: (T,) factors; Python numbers become float64 and are cast at the call.
        out_size: output rows; max(index_out) + 1 if left out.
        in_size: rows of the input; max(index) + 1 if left out.

    Returns:
        info_fwd and info_bwd of `sparse_scale`, which needs the first alone.

    Raises:
        WeftError: see `sparse_product_info`.

    Cost: two sorts of T rows.

    Example:
        >>> from torchweft import products
        >>> forward, backward = products.sparse_scale_infos([0, 2, 2], [0, 0, 1], [1.0, 2.0, 3.0])
        >>> forward.out_size, backward.out_size
        (2, 3)
    """
    forward = sparse_product_info(index, None, index_out, scale, out_size)
    backward = sparse_product_info(index_out, None, index, scale, in_size)
    return tuple(  # type: ignore[return-value]
        SparseScaleInfo(info.scale, info.index1, info.seg_out, None, info.out_size)
        for info in (forward, backward)
    )


def _index(name: str, index: Index) -> Tensor:
    table = _tensor(name, list(index) if isinstance(index, range) else index)
    if not table.numel():
        table = table.long()
    if table.dtype not in (torch.int64, torch.int32):
        raise DTypeError(
            f"{name} holds {table.dtype} values: indices must be int32 or int64. "
            f"Convert {name} to integers."
        )
    if table.dim() != 1:
        raise ShapeError(
            f"{name} is {tuple(table.shape)}: it must have one dimension. Flatten {name}."
        )
    if table.device.type == "cpu" and table.numel() and int(table.min()) < 0:
        where = int(table.argmin())
        raise IndexRangeError(
            f"{name}[{where}] is {int(table[where])}: indices must be 0 or more. Correct {name}."
        )
    return table


def _scale(scale: Scale | None) -> Tensor | None:
    """(T,) factors; Python numbers and float64 arrays stay float64."""
    if scale is None:
        return None
    factors = _tensor("scale", scale if isinstance(scale, Tensor) else np.asarray(scale))
    if factors.dim() != 1 or factors.is_complex():
        raise ShapeError(
            f"scale is {tuple(factors.shape)} of {factors.dtype}: it must be (T,) real numbers, "
            "one for each term. Pass such factors."
        )
    return factors


def _tensor(name: str, given: Any) -> Tensor:
    """A strided tensor of what was given."""
    try:
        table = given if isinstance(given, Tensor) else torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise DTypeError(
            f"{name} is {given!r:.50}: it must be a tensor, an array or a list of numbers. "
            f"Convert {name}."
        ) from None
    check_tensors(**{name: table})
    return table


def _out_size(given: int | None, needed: int) -> int:
    if given is not None and not hasattr(given, "__index__"):
        raise DTypeError(
            f"out_size (or in1_size, in2_size) is {given!r}: it must be an integer. Pass the "
            "number of rows."
        )
    if given is not None and given < needed:
        raise IndexRangeError(
            f"out_size (or in1_size, in2_size) is {given} but the largest output row is "
            f"{needed - 1}: there must be at least {needed} rows. Pass {needed} or more."
        )
    return needed if given is None else given


ROLES = "xyztk"


class Tables(NamedTuple):
    """The index tensors of a call, as the caller gave them; None is the identity."""

    index1: Tensor | None = None
    index2: Tensor | None = None
    seg: Tensor | None = None
    gather_index: Tensor | None = None
    index_out: Tensor | None = None


class Sizes(NamedTuple):
    """Rows of each role, in the order of `ROLES`."""

    x: int
    y: int
    z: int
    t: int
    k: int


_plans: TensorCache[Plan] = TensorCache()
_maxima: TensorCache[int] = TensorCache()


def product_plan(
    tables: tuple[Tensor | None, ...], sizes: tuple[int, ...], device: torch.device
) -> Plan:
    """The plan of `Tables` and `Sizes`: checked, built and cached for private copies of them.

    Raises:
        IndexRangeError: a value points outside its rows (checked on the CPU always, on a GPU
            where the environment has TORCHWEFT_CHECK=1).
    """
    copies = copies_of(tables)

    def build() -> Plan:
        return _build(Tables(*copies), Sizes(*sizes), device)

    if (run := recorded.Current.run) is not None and unreadable(*copies):
        return run.value(copies, (sizes, device), build)
    return _plans.get(copies, (sizes, device), build)


def largest(index_out: Tensor) -> int:
    """max(index_out) of a constant, -1 if empty; cached, so that it synchronises once."""
    return _maxima.get(
        (index_out,), "max", lambda: int(index_out.max()) if index_out.numel() else -1
    )


def _build(tables: Tables, sizes: Sizes, device: torch.device) -> Plan:
    if device.type == "cpu" or os.environ.get("TORCHWEFT_CHECK") == "1":
        _check(tables, sizes)
    index1, index2, seg, gather, index_out = tables
    rows = {
        "x": _through(index1, gather),
        "y": _through(index2, gather),
        "z": index_out,
        "t": gather,
        "k": None,
    }
    sorted_by = partial = None
    unread = unreadable(*tables)
    if seg is not None:
        owner = rows_of(seg.contiguous(), sizes.k)
        if unread or int(seg[-1]) - int(seg[0]) < sizes.k:
            partial = "z"
        if index_out is None:
            rows["z"] = owner
            num_more = sizes.z - (seg.numel() - 1)
            sorted_by = ("z", torch.cat([seg, seg[-1:].expand(num_more)]))
            owner[owner == seg.numel() - 1] = sizes.z
        else:
            rows["z"] = torch.cat([index_out, index_out.new_full((1,), sizes.z)])[owner]
    return Plan(rows, sizes._asdict(), sizes.k, device, sorted_by, partial, unread)


def _through(index: Tensor | None, gather: Tensor | None) -> Tensor | None:
    """Rows read at entry k, for t = gather[k]."""
    if index is None or gather is None:
        return gather if index is None else index
    return index[gather.long()]


def _check(tables: Tables, sizes: Sizes) -> None:
    if tables.seg is not None:
        _check_segments(tables.seg, sizes.k, tables.gather_index is not None)
    limits = {
        "index1": (sizes.x, "rows of input1"),
        "index2": (sizes.y, "rows of input2"),
        "gather_index": (sizes.t, "terms"),
        "index_out": (sizes.z, "output rows (out_size)"),
    }
    for name, (limit, what) in limits.items():
        index = getattr(tables, name)
        if index is None or not index.numel():
            continue
        low, high = (int(v) for v in index.aminmax())
        if low < 0 or high >= limit:
            value = low if low < 0 else high
            where = int((index == value).nonzero()[0, 0])
            raise IndexRangeError(
                f"{name}[{where}] is {value} but there are {limit} {what}: every value must lie "
                f"in 0..{limit - 1}. Correct {name}, or pass "
                + ("a larger out_size." if name == "index_out" else "an input with more rows.")
            )


def _check_segments(seg: Tensor, num_entries: int, gathered: bool) -> None:
    what = "entries of gather_index" if gathered else "terms"
    fault = (seg.diff() < 0).nonzero()
    if fault.numel():
        m = int(fault[0, 0])
        raise IndexRangeError(
            f"seg decreases from seg[{m}] = {int(seg[m])} to seg[{m + 1}] = {int(seg[m + 1])}: "
            "segment bounds must not decrease. Sort the terms by output row and pass the running "
            "count, or use sparse_product_info, which does both."
        )
    for m in (0, seg.numel() - 1):
        value = int(seg[m])
        if not 0 <= value <= num_entries:
            raise IndexRangeError(
                f"seg[{m}] is {value} but there are {num_entries} {what}: bounds must lie in "
                f"0..{num_entries}. Pass bounds that end at {num_entries} or before."
            )
