"""Reductions of formula strings, for tensors that come later: `Genred`."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchweft.core.operators.call_cache import CallCache
from torchweft.core.operators.operator import compiling, constant_when_compiling
from torchweft.errors import BackendError, DeviceError, DTypeError, ShapeError
from torchweft.reductions.call import Options, Signature, kept, signature
from torchweft.reductions.cluster.sparsity import checked_ranges
from torchweft.reductions.engine import direct
from torchweft.reductions.engine.direct import Body
from torchweft.reductions.engine.reduction import EXPONENTIAL, KINDS, reduction_plan, run_plan
from torchweft.reductions.engine.whole import together, whole
from torchweft.reductions.formula.node import Node
from torchweft.reductions.formula.parse import parse_variable
from torchweft.reductions.keywords import accuracy
from torchweft.reductions.variables import (
    NO_EXTENT,
    Extent,
    Formula,
    agree,
    dimension,
    extent_of,
    parsed,
    require_declared,
    require_tensors,
    text,
    used,
    with_witness,
)

__all__ = [
    "Genred",
    "ReductionSpec",
    "directly",
    "reduction_spec",
    "run",
]

OTHER_NAMES = {
    "LogSumExpWeight": "LogSumExp",
    "SoftMax": "SumSoftMaxWeight",
    "Max_SumShiftExpWeight": "Max_SumShiftExp",
}
NEIGHBOUR_KINDS = ("KMin", "ArgKMin", "KMin_ArgKMin")
OWN_BACKENDS = ("torch", "numba", "triton")
GPU_BACKENDS = ("GPU", "GPU_1D", "GPU_2D")
BACKENDS = ("auto", "CPU", *GPU_BACKENDS, *OWN_BACKENDS)


class ReductionSpec(NamedTuple):
    """R_j f or R_i f.

    Args:
        kind: one of KINDS.
        formula: f.
        weight: of LogSumExp, SumSoftMaxWeight and Max_SumShiftExp, or None.
        k: K of KMin, ArgKMin and KMin_ArgKMin.
        axis: 1 reduces over j, 0 over i.
        options: how numbers are computed.
    """

    kind: str
    formula: Formula
    weight: Formula | None
    k: int
    axis: int
    options: Options


def reduction_spec(
    name: str, formula: Formula, weight: Formula | None, opt_arg: Any, axis: int, options: Options
) -> ReductionSpec:
    """The reduction with a name of pykeops; raises ShapeError where arguments do not fit it."""
    kind = OTHER_NAMES.get(name, name) if isinstance(name, str) else None
    if kind is None or kind not in KINDS:
        raise ShapeError(
            f"the reduction is {name!r}: it must be one of {', '.join((*KINDS, *OTHER_NAMES))}. "
            "Pass one of them as reduction_op."
        )
    if axis not in (0, 1):
        raise ShapeError(
            f"{name} is asked for axis {axis}: it must be 0 (reduces over i) or 1 (over j), "
            "counted after the batch dimensions. Pass one of them."
        )
    needs_weight = kind == "SumSoftMaxWeight" or name.endswith("ExpWeight")
    if needs_weight if weight is None else kind not in EXPONENTIAL:
        raise ShapeError(
            f"{name} is given {'no weight' if weight is None else 'a weight'}: "
            f"{', '.join(EXPONENTIAL)} take one, as formula2 or weight, SumSoftMaxWeight needs it. "
            f"{'Pass one' if weight is None else 'Leave it out, or multiply the formula by it'}."
        )
    return ReductionSpec(kind, formula, weight, _count(name, kind, opt_arg), axis, options)


def _count(name: str, kind: str, opt_arg: Any) -> int:
    if kind not in NEIGHBOUR_KINDS:
        return 1
    if isinstance(opt_arg, bool) or not hasattr(opt_arg, "__index__") or opt_arg < 1:
        raise ShapeError(
            f"{name} is given K = {opt_arg!r}: K must be an integer of 1 or more. Pass it as K, or "
            "as opt_arg."
        )
    return operator.index(opt_arg)


def run(
    spec: ReductionSpec,
    tensors: Sequence[Tensor],
    given: Signature,
    known: Extent,
    *,
    backend: str | None = "auto",
    device_id: int = -1,
    ranges: Any = None,
    out: Tensor | None = None,
) -> Any:
    """The reduction of the tensors, which are ordered by variable; `given` is their signature."""
    serves, moved = _placed(backend, device_id, known.device)
    spread = whole().spread
    if ranges is not None and not compiling() and not spread:
        sizes = (1 if n is None else n for n in (known.rows, known.columns))
        ranges = checked_ranges(ranges, *sizes)
    f, weight, lost = _witnessed(spec.formula, spec.weight, known, len(tensors), spread)
    if lost is not None:
        tensors = _with_witnesses(tensors, known, *lost)
        given = signature(tensors)
    plan = reduction_plan(spec.kind, f, weight, spec.axis, spec.k, serves, spec.options, given)
    if moved is not None:
        tensors = [t.to(moved) for t in tensors]
        if ranges is not None:
            to = getattr(ranges, "to", None)
            ranges = to(moved) if to else tuple(r.to(moved) for r in ranges)
    result = run_plan(plan, tensors, ranges)
    trailing = 3 if spec.kind in NEIGHBOUR_KINDS and dimension(spec.formula) > 1 else 2
    if isinstance(result, Tensor):
        result = _complete(result, known, trailing, moved)
        return result if out is None else _written(result, out, tensors)
    if out is not None:
        raise ShapeError(
            f"out is given to {spec.kind}, which returns {len(result)} tensors: out takes one. "
            "Leave it out, or ask for one of them."
        )
    return tuple(_complete(r, known, trailing, moved) for r in result)


def directly(
    spec: ReductionSpec,
    tensors: Sequence[Tensor],
    given: Signature,
    known: Extent,
    backend: str | None,
    device_id: int,
) -> direct.Body | Literal[False]:
    """The function that launches calls of this signature directly, or False; see `direct`."""
    serves, moved = _placed(backend, device_id, known.device)
    f, weight, lost = _witnessed(spec.formula, spec.weight, known, len(tensors))
    if moved is not None or (lost is not None and (lost[1] or not lost[0])):  # needs other tensors
        return False
    plan = reduction_plan(spec.kind, f, weight, spec.axis, spec.k, serves, spec.options, given)
    found = direct.body(plan, tensors) if plan.layout.batch == known.batch else None
    return found or False


_Lost = tuple[tuple[int, ...], tuple[int | None, ...]]


@kept
def _witnessed(
    f: Formula, weight: Formula | None, known: Extent, count: int, spread: bool = False
) -> tuple[str, str | None, _Lost | None]:
    """The texts of both, and the tensors that they take if these are not the `count` given ones.

    A formula that lost all variables of i or of j no longer gives their number: f gets further
    variables for these sizes, called witnesses, which are 0.  One row says nothing of how many
    there are where rows are spread over processes.

    Returns:
        The texts, and the numbers of the tensors that they take with the lengths of the witnesses,
        None for a parameter; or None for both if they take all tensors.
    """
    cats = dict(used(f, weight))
    here = set(cats.values())
    sizes = ((0, known.rows), (1, known.columns))
    lost = [
        (cat, n) for cat, n in sizes if cat not in here and n is not None and (spread or n != 1)
    ]
    other = None if weight is None else text(weight)
    if not lost and len(cats) == count > 0:
        return text(f), other, None
    if not cats and not lost:
        return text(with_witness(f, count, 2)), other, ((), (None,))
    for number, (cat, _) in enumerate(lost, count):
        f = with_witness(f, number, cat)
    return text(f), other, (tuple(cats), tuple([n for _, n in lost]))


def _with_witnesses(
    tensors: Sequence[Tensor], known: Extent, taken: Sequence[int], lengths: Sequence[int | None]
) -> list[Tensor]:
    """The tensors with zeros in place of those that are not taken, and the witnesses."""
    nothing = torch.zeros(1, dtype=known.dtype, device=known.device)
    found = [t if n in taken else nothing for n, t in enumerate(tensors)]
    return found + [nothing if n is None else nothing.expand(n, 1) for n in lengths]


def _complete(result: Tensor, known: Extent, trailing: int, moved: torch.device | None) -> Tensor:
    """The result with the batch dimensions of all variables, on their device."""
    if tuple(result.shape[:-trailing]) != known.batch:
        result = result.expand(*known.batch, *result.shape[-trailing:])
    return result if moved is None or known.device is None else result.to(known.device)


def _placed(
    backend: str | None, device_id: int, device: torch.device | None
) -> tuple[str | None, torch.device | None]:
    """Our backend of that name, and the device that tensors must be moved to, if any."""
    name = "auto" if backend is None else backend
    if name not in BACKENDS:
        raise BackendError(
            f"backend is {backend!r}: it must be one of {', '.join(BACKENDS)}. "
            "Leave it out to let torchweft choose."
        )
    here = device or torch.device("cpu")
    if name == "CPU" and here.type != "cpu":
        raise BackendError(
            f"backend is 'CPU' but the tensors are on {here}: they must be on the CPU. "
            "Move them with .cpu(), or leave out backend."
        )
    serves = name if name in OWN_BACKENDS else None
    if device_id < 0 and name not in GPU_BACKENDS:
        return serves, None
    if here.type != "cpu":
        if device_id not in (-1, here.index):
            raise DeviceError(
                f"device_id is {device_id} but the tensors are on {here}: they must be there or on "
                f"the CPU. Move them with .to('cuda:{device_id}'), or leave out device_id."
            )
        return serves, None
    if not torch.cuda.is_available():
        raise BackendError(
            f"backend is {name!r} with device_id={device_id}: that needs a GPU, and there is none "
            "here. Leave both out to compute on the CPU."
        )
    return serves, torch.device(
        "cuda", device_id if device_id >= 0 else torch.cuda.current_device()
    )


def _written(result: Tensor, out: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """`out`, with the result copied into it."""
    if out.shape != result.shape or not out.is_contiguous():
        layout = "" if out.is_contiguous() else ", not contiguous"
        raise ShapeError(
            f"out is {tuple(out.shape)}{layout}: it must be contiguous, of shape "
            f"{tuple(result.shape)}. Make it with torch.empty."
        )
    if out.dtype != result.dtype:
        raise DTypeError(
            f"out is {out.dtype} but the result {result.dtype}: they must be equal. Make it with "
            f"dtype={result.dtype}."
        )
    if out.device != result.device:
        raise DeviceError(
            f"out is on {out.device} but the result on {result.device}: they must be on "
            f"one device. Make it with device={str(result.device)!r}."
        )
    if not compiling() and any(_shared(out, t) for t in tensors):
        raise ShapeError(
            "out shares memory with an input: it must have memory of its own. Make it with "
            "torch.empty."
        )
    return out.copy_(result)


def _shared(a: Tensor, b: Tensor) -> bool:
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    (start, stop), (first, last) = _addresses(a), _addresses(b)
    return start < last and first < stop


def _addresses(t: Tensor) -> tuple[int, int]:
    """Addresses of the first byte of its elements and of the end of the last."""
    size = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
    return t.data_ptr(), t.data_ptr() + size * t.element_size()


class Genred:
    """R_j f(x_i, y_j, p), or over i, of a formula such as "Exp(-SqDist(x, y)) * b".

    Args:
        formula: a formula string, or a node.
        aliases: declarations of its variables, "x = Vi(3)", "x = Vi(0, 3)" or "Var(0, 3, 0)":
            position among the arguments, dimension, category.  The formula may also use
            Var(position, dim, category).
        reduction_op: Sum, LogSumExp, LogSumExpWeight, SumSoftMaxWeight, SoftMax, Min, Max, ArgMin,
            ArgMax, Min_ArgMin, Max_ArgMax, KMin, ArgKMin, KMin_ArgKMin, Max_SumShiftExp or
            Max_SumShiftExpWeight.
        axis: 0 reduces over i, 1 over j.
        dtype, cuda_type, enable_chunks, rec_multVar_highdim, use_fast_math: accepted, without
            effect.
        opt_arg: K of KMin, ArgKMin and KMin_ArgKMin.
        formula2: the weight of LogSumExp, SumSoftMaxWeight and Max_SumShiftExp.
        dtype_acc, use_double_acc: "float64" accumulates in float64.
        sum_scheme: "kahan_scheme" compensates; the others sum blocks.
        precision: of products on tensor cores, "ieee", "tf32x3", "tf32" or "bf16"; None uses
            tensor cores where a bound shows the error of float32.

    Raises:
        ShapeError: a formula that cannot be read, or whose dimensions do not fit; an unknown
            reduction or axis; a weight or K that is missing or not needed.
        DTypeError: formula or aliases are no text; an unknown value of dtype_acc, sum_scheme or
            precision.

    Error: that of the formula in plain PyTorch, and of sums u|z*| + 4√N·2⁻²⁴ Σ|f| (2⁻⁵³ for
    float64), u the dtype's unit round-off.  Differentiable to any order.

    Source: the names and formulas of pykeops.

    Example:
        >>> import torch
        >>> from torchweft.reductions import Genred
        >>> aliases = ["x = Vi(3)", "y = Vj(3)", "b = Vj(2)"]
        >>> gaussian_sum = Genred("Exp(-SqDist(x, y)) * b", aliases, axis=1)
        >>> gaussian_sum(torch.rand(5, 3), torch.rand(7, 3), torch.rand(7, 2)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        formula: str | Node,
        aliases: Sequence[str],
        reduction_op: str = "Sum",
        axis: int = 0,
        dtype: Any = None,
        opt_arg: int | None = None,
        formula2: str | None = None,
        cuda_type: Any = None,
        dtype_acc: str = "auto",
        use_double_acc: bool = False,
        sum_scheme: str = "auto",
        enable_chunks: bool = True,
        rec_multVar_highdim: Any = False,  # noqa: N803  # pykeops' name
        use_fast_math: bool = True,
        precision: str | None = None,
    ) -> None:
        given = _texts(formula, aliases)
        f = formula if isinstance(formula, Node) else parsed(formula, given)
        weight = None if formula2 is None else parsed(formula2, given)
        exact = accuracy(dtype_acc, use_double_acc, sum_scheme, precision)
        self._spec = reduction_spec(reduction_op, f, weight, opt_arg, axis, exact)
        self._direct: CallCache[Body | Literal[False]] = CallCache()
        texts = [f for f in (formula, formula2) if isinstance(f, str)]
        self._declared = _declared(tuple(texts), given)

    def __call__(
        self,
        *args: Tensor,
        backend: str | None = "auto",
        device_id: int = -1,
        ranges: Any = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The reduction of these tensors.

        Args:
            *args: one for each position: (..., M, D) for Vi(D), (..., N, D) for Vj(D), (..., D) for
                Pm(D); leading dimensions broadcast.
            backend: "auto", "CPU", "GPU", "GPU_1D" or "GPU_2D" of pykeops, or "torch", "numba",
                "triton".
            device_id: the GPU on which tensors of the CPU are computed.
            ranges: (ranges_i, slices_i, redranges_j, ranges_j, slices_j, redranges_i), or a
                `BlockSparsity`.
            out: contiguous memory for the result, of its shape and dtype.

        Returns:
            (..., M, E), or (..., N, E) over i, in the dtype of the arguments, indices int64.
            Min_ArgMin, Max_ArgMax, KMin_ArgKMin and Max_SumShiftExp return a pair, which type
            checkers take for one tensor and which is unpacked likewise.

        Raises:
            WeftError: arguments that do not fit their declarations or each other.

        Cost: M · N evaluations of the formula; memory for the arguments and the result alone.
        """
        tensors, at_once, key = self._tensor(args), None, None
        if ranges is None and out is None:
            key = direct.kinds(tensors, self._spec.kind, backend, device_id)
            at_once = None if key is None else self._direct.get(key)
            if at_once:
                done: Tensor = self._finished(at_once(tensors))
                return done
        key = None if at_once is False else key
        result: Tensor = self._called(tensors, key, backend, device_id, ranges, out)
        return result

    @together
    def _called(
        self,
        tensors: tuple[Any, ...],
        key: tuple[Any, ...] | None,
        backend: str | None,
        device_id: int,
        ranges: Any,
        out: Any,
    ) -> Any:
        """The reduction; with a key, of a signature that is not known to be launched directly."""
        require_tensors(tensors)
        given = signature(tensors)
        known = _known(type(self).__name__, self._declared, given)
        if key is not None:
            at_once = directly(self._spec, tensors, given, known, backend, device_id)
            self._direct.keep(key, at_once)
            if at_once:
                return self._finished(at_once(tensors))
        result = run(
            self._spec,
            tensors,
            given,
            known,
            backend=backend,
            device_id=device_id,
            ranges=self._tensor(ranges),
            out=None if out is None else self._tensor(out),
        )
        return self._finished(result) if out is None else out

    def _finished(self, result: Any) -> Any:
        """The result as arrays of the caller's library."""
        if isinstance(result, Tensor):
            return self._array(result)
        return tuple(self._array(r) for r in result)

    @staticmethod
    def _tensor(x: Any) -> Any:
        """The tensor of an array, or of each array of a tuple; anything else unchanged."""
        return x

    @staticmethod
    def _array(x: Any) -> Any:
        """The array of a tensor."""
        return x


_VARIABLE = re.compile(r"\b(?:Var|Vi|Vj|Pm)\(\s*\d+\s*,[\d\s,]+\)")

_Declared = tuple[int, str, int, int]
"""(position, name, dimension, category)."""


@constant_when_compiling
def _declared(texts: tuple[str, ...], aliases: tuple[str, ...]) -> tuple[_Declared, ...]:
    """The variables of aliases and of formulas, by position."""
    found: dict[int, _Declared] = {}
    inside = [declaration for f in texts for declaration in _VARIABLE.findall(f)]
    for place, alias in [*enumerate(aliases), *((0, declaration) for declaration in inside)]:
        v = parse_variable(alias)
        position = place if v.position is None else v.position
        name = f"argument {position}" if v.name is None else v.name
        found.setdefault(position, (position, name, v.dim, v.cat))
    return tuple(found[position] for position in sorted(found))


@kept
def _known(name: str, declared: tuple[_Declared, ...], given: Signature) -> Extent:
    """The extent of the arguments of a call; raises where they do not fit their declarations."""
    count = 1 + declared[-1][0] if declared else 0
    if len(given) != count:
        names = ", ".join(alias for _, alias, _, _ in declared)
        raise ShapeError(
            f"{name} is called with {len(given)} arguments: the formula has {count}, {names}. "
            "Pass one tensor for each, by position."
        )
    known = NO_EXTENT
    for position, alias, dim, cat in declared:
        shape, dtype, device = given[position]
        require_declared(alias, dim, cat, shape, dtype)
        known = agree(known, extent_of(cat, shape, dtype, device), _beside, name, alias, shape)
    return known


def _beside(name: str, alias: str, shape: Sequence[int]) -> str:
    return f"{name} is given {alias} of shape {tuple(shape)} beside the arguments before"


def _texts(formula: object, aliases: object) -> tuple[str, ...]:
    """The aliases; raises DTypeError unless they are texts, and the formula is one or a Node."""
    listed = aliases if isinstance(aliases, list | tuple) else [aliases]
    wrong = [x for x in (formula, *listed) if not isinstance(x, str | Node)]
    if wrong or listed is not aliases:
        raise DTypeError(
            f"formula is {formula!r} and aliases are {aliases!r}: they must be a text and a list "
            "of texts. Write, for example, Genred('x * y', ['x = Vi(3)', 'y = Vj(3)'])."
        )
    return tuple(listed)
