"""Arguments of a reduction: signature, options, layout of its tensors, and the kernel it needs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchweft.core.operators.operator import compiling, watched
from torchweft.errors import DeviceError, DTypeError, ShapeError
from torchweft.reductions.formula.kernel_forms import LONG, Inner
from torchweft.reductions.formula.node import Node

__all__ = [
    "KEPT",
    "Blocks",
    "KernelSpec",
    "Kind",
    "Options",
    "ReductionData",
    "Signature",
    "Sizes",
    "TensorLayout",
    "Wanted",
    "kept",
    "laid_out",
    "signature",
]


class Sizes(NamedTuple):
    """B batch entries, M rows of the result, N columns that are reduced over."""

    batch: int
    rows: int
    columns: int


class Blocks(NamedTuple):
    """A mask of pairs: blocks of rows, each with its intervals of columns.

    Row block c is starts[c] ≤ i < ends[c]; it reduces over the intervals numbered indptr[c] to
    indptr[c + 1]; interval q is j_starts[q] ≤ j < j_ends[q].  All are int64.  Rows of no block have
    no pairs; a column in two intervals of a block counts twice.
    """

    starts: Tensor
    ends: Tensor
    indptr: Tensor
    j_starts: Tensor
    j_ends: Tensor


class Options(NamedTuple):
    """How numbers are computed.

    Args:
        precision: of products on tensor cores, "ieee", "tf32x3", "tf32" or "bf16"; None uses
            tensor cores only where a bound shows the error of float32.
        accumulate: "auto", "kahan" or "float64".
    """

    precision: str | None = None
    accumulate: str = "auto"


class ReductionData(NamedTuple):
    """What an executor takes beside formulas.

    Args:
        values: the variables by number, (B or 1, M or N or 1, D), contiguous.
        sizes: B, M and N.
        blocks: the pairs; None for all.
        options: how numbers are computed.
    """

    values: Mapping[int, Tensor]
    sizes: Sizes
    blocks: Blocks | None = None
    options: Options = Options()

    @property
    def like(self) -> Tensor:
        """The first variable, which has the dtype and the device of all."""
        return next(iter(self.values.values()))


F = TypeVar("F", bound=Callable[..., Any])

KEPT = 4096
"""Results that each function caches."""

Kind = tuple[torch.Size, torch.dtype, torch.device]
"""Shape, dtype and device of a tensor."""

Signature = tuple[Kind, ...]


def signature(tensors: Sequence[Tensor]) -> Signature:
    """Shape, dtype and device of each tensor."""
    return tuple([(t.shape, t.dtype, t.device) for t in tensors])


def kept(function: F) -> F:
    """Cache the results of a function of signatures.

    Not while torch traces, and not under its dispatch modes, where sizes may be symbols.
    """
    cached = functools.lru_cache(KEPT)(function)

    @functools.wraps(function)
    def ask(*given: Any) -> Any:
        return function(*given) if compiling() or watched() else cached(*given)

    return ask  # type: ignore[return-value]


class _View(NamedTuple):
    """How a variable becomes a tensor with one batch dimension.

    Args:
        number: number of the variable.
        broadcast: its shape with rows, and with all batch dimensions; None if it is not copied.
        shape: (B or 1, M or N or 1, D); None if a new first dimension gives that shape.
    """

    number: int
    broadcast: tuple[Sequence[int], Sequence[int]] | None
    shape: tuple[int, int, int] | None


class TensorLayout(NamedTuple):
    """The layout of a call's tensors, which follows from their shapes.

    Args:
        sizes: B entries of M × N pairs.
        batch: the batch dimensions, whose product is B.
        views: the views of the variables.
    """

    sizes: Sizes
    batch: tuple[int, ...]
    views: tuple[_View, ...]

    def seen(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """The variables by number, with one batch dimension."""
        found = {}
        for number, broadcast, shape in self.views:
            t = tensors[number]
            if broadcast is not None:
                t = t.reshape(broadcast[0]).expand(broadcast[1])
            found[number] = t[None] if shape is None else t.reshape(shape)
        return found


def laid_out(kind: str, cats: Sequence[tuple[int, int]], given: Signature) -> TensorLayout:
    """The layout of tensors that are (*batch, M, D), (*batch, N, D) or (*batch, D) by category.

    Args:
        kind: name of the reduction in errors.
        cats: (number, category) of the variables.
        given: signature of all tensors, by number.
    """
    _require_alike(kind, given)
    # (*batch, rows, D), with one row for a parameter
    shapes = {n: (*s[:-1], 1, s[-1]) if cat == 2 else s for n, cat in cats for s in [given[n][0]]}
    leading = [shape[:-2] for shape in shapes.values()]
    batch: tuple[int, ...] = ()
    if any(leading):  # torch.broadcast_shapes is slow
        batch = tuple(torch.broadcast_shapes(*leading))  # type: ignore[no-untyped-call]
    count = math.prod(batch)
    lengths: dict[int, int] = {}
    for n, cat in cats:
        length = shapes[n][-2]
        if cat != 2 and lengths.setdefault(cat, length) != length:
            raise ShapeError(
                f"variable {n} has {length} {'ij'[cat]} entries, an earlier one "
                f"{lengths[cat]}: variables of one category must have as many. Check which of "
                "them are Vi and which are Vj."
            )
    views = tuple([_view(n, given[n][0], shapes[n], batch, count) for n in shapes])
    return TensorLayout(Sizes(count, lengths.get(0, 1), lengths.get(1, 1)), batch, views)


def _view(
    n: int, own: Sequence[int], shape: Sequence[int], batch: tuple[int, ...], count: int
) -> _View:
    *leading, rows, dim = shape
    if count and all(size == 1 for size in leading):
        return _View(n, None, (1, rows, dim) if len(own) != 2 or leading else None)
    return _View(n, (shape, (*batch, rows, dim)), (count, rows, dim))


def _require_alike(kind: str, given: Signature) -> None:
    _, dtype, device = given[0]
    for n, (_, own, where) in enumerate(given):
        if not own.is_floating_point or own != dtype:
            raise DTypeError(
                f"{kind} is given variable 0 of {dtype} and variable {n} of {own}: all must be of "
                f"one real floating type. Convert them with .to({dtype})."
            )
        if where != device:
            raise DeviceError(
                f"{kind} is given variable 0 on {device} and variable {n} on {where}: all must be "
                f"on one device. Move them with .to({str(device)!r})."
            )


class KernelSpec(NamedTuple):
    """The specification of one kernel, which determines its source.

    Args:
        kind: "sums", "shifted" or "smallest".
        formula: the summand, the exponent, or the value that is compared.
        weight: in shifted, the factor of the exponential.
        first: first component of the result that it computes.
        last: end of these components, exclusive.
        ranged: whether columns are lists of intervals.
        partial: whether several tasks share the columns of a row.
        wide: whether the formula is in float64.
        accumulate: "auto", "kahan" (sums) or "float64".
        kept: in smallest, K.
        nan_first: in smallest, whether NaN comes before all numbers; else it counts as +∞.
        far: in smallest, whether indices need 64 bits.
        guarded: whether a guard in memory tells that tensor cores have done the work.
        inner: sums over components, by the numbers that the formulas use.
        near: whether sums over neighbouring points may be computed about the tile's centre.
        blocked: variables of which a program reads a block of components; a batch entry is then an
            entry of the data and a block.
        ending: how m and s are combined, "log" (m + log s) or "mean" (s over its last component),
            or the sign of the values that are stored beside indices, "values" or "negated"; "" for
            neither.
    """

    kind: str
    formula: Node
    weight: Node | None
    first: int
    last: int
    ranged: bool = False
    partial: bool = False
    wide: bool = False
    accumulate: str = "auto"
    kept: int = 0
    nan_first: bool = False
    far: bool = False
    guarded: bool = False
    inner: tuple[Inner, ...] = ()
    near: bool = False
    blocked: tuple[int, ...] = ()
    ending: str = ""

    @property
    def components(self) -> int:
        """Number of components of the whole result."""
        return (self.weight or self.formula).dim - (self.ending == "mean")

    @property
    def sign(self) -> int:
        """Sign of the values that smallest stores; 0 if it stores none."""
        return {"values": 1, "negated": -1}.get(self.ending, 0)

    @property
    def accumulator(self) -> str:
        """The dtype of sums."""
        return "float64" if self.wide or self.accumulate == "float64" else "float32"

    def apart(self, v: Node) -> bool:
        """Whether a variable is stored component by component: (B, dim, pitch)."""
        return v.data[2] != 2 and (v.dim > LONG or v.data[0] in self.blocked)


class Wanted(NamedTuple):
    """The reduction that a call needs.

    Args:
        kind: "sums", "shifted" or "smallest".
        formulas: the formula, and its weight if any.
        k: in smallest, the number of neighbours, or 0, see `operator.smallest`.
        ending: as in `KernelSpec`.
        results: shapes and dtypes, in any dimensions that lie as (B, M, ...); None for a result
            that is not needed.
    """

    kind: str
    formulas: tuple[Node, ...]
    k: int
    ending: str
    results: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]
