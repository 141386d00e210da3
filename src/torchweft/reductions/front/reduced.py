"""Reductions and linear systems of formulas, with pykeops' keywords, at once or when called."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchweft.core.operators.call_cache import CallCache
from torchweft.core.operators.operator import compiling
from torchweft.errors import BackendError, DeviceError, DTypeError, ShapeError
from torchweft.reductions.call.layout import Options, Signature, kept, signature
from torchweft.reductions.cluster.points import swap_axes
from torchweft.reductions.cluster.sparsity import check_ranges
from torchweft.reductions.engine import direct
from torchweft.reductions.engine.direct import Body
from torchweft.reductions.engine.reduction import EXPONENTIAL, KINDS, carried_out, settled
from torchweft.reductions.front.traced import Formula, dimension, text, used, with_witness
from torchweft.reductions.front.variables import (
    Extent,
    Variable,
    agree,
    argument,
    extent,
    numbers,
    places,
    require_tensors,
    values,
)

__all__ = [
    "ACCURACY",
    "KEYWORDS",
    "PLAIN",
    "Reduced",
    "ReductionSpec",
    "Solved",
    "accuracy",
    "direct_result",
    "directly",
    "job",
    "require_keywords",
    "run",
    "turned",
]

OTHER_NAMES = {
    "LogSumExpWeight": "LogSumExp",
    "SoftMax": "SumSoftMaxWeight",
    "Max_SumShiftExpWeight": "Max_SumShiftExp",
}
NEIGHBOURS = ("KMin", "ArgKMin", "KMin_ArgKMin")
PRECISIONS = (None, "ieee", "tf32x3", "tf32", "bf16")
SCHEMES = ("auto", "direct_sum", "block_sum", "kahan_scheme")
ACCUMULATORS = ("auto", "float16", "float32", "float64")
OURS = ("torch", "numba", "triton")
GPU = ("GPU", "GPU_1D", "GPU_2D")
BACKENDS = ("auto", "CPU", *GPU, *OURS)


class ReductionSpec(NamedTuple):
    """R_j f or R_i f.

    Args:
        kind: one of KINDS.
        formula: f.
        weight: of LogSumExp, SumSoftMaxWeight and Max_SumShiftExp, or None.
        k: how many of KMin, ArgKMin and KMin_ArgKMin.
        axis: 1 reduces over j, 0 over i.
        options: how numbers are computed.
    """

    kind: str
    formula: Formula
    weight: Formula | None
    k: int
    axis: int
    options: Options


def job(
    name: str, formula: Formula, weight: Formula | None, opt_arg: Any, axis: int, options: Options
) -> ReductionSpec:
    """The reduction that pykeops calls `name`."""
    kind = OTHER_NAMES.get(name, name)
    if kind not in KINDS:
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
    if kind not in NEIGHBOURS:
        return 1
    if isinstance(opt_arg, bool) or not hasattr(opt_arg, "__index__") or opt_arg < 1:
        raise ShapeError(
            f"{name} is given K = {opt_arg!r}: K must be an integer of 1 or more. Pass it as K, or "
            "as opt_arg."
        )
    return operator.index(opt_arg)


def accuracy(
    dtype: Any = None,
    cuda_type: Any = None,
    dtype_acc: str = "auto",
    use_double_acc: bool = False,
    sum_scheme: str = "auto",
    enable_chunks: bool = True,
    rec_multVar_highdim: Any = False,  # noqa: N803  # pykeops' name
    use_fast_math: bool = True,
    precision: str | None = None,
) -> Options:
    """The options that pykeops' keywords mean.

    `dtype`, `cuda_type`, `enable_chunks`, `rec_multVar_highdim` and `use_fast_math` change nothing
    here.  Sums are at least as exact as `dtype_acc` and `sum_scheme` ask.
    """
    for name, value, known in (
        ("dtype_acc", dtype_acc, ACCUMULATORS),
        ("sum_scheme", sum_scheme, SCHEMES),
        ("precision", precision, PRECISIONS),
    ):
        if value not in known:
            raise DTypeError(
                f"{name} is {value!r}: it must be one of {', '.join(map(repr, known))}. "
                "Pass one of them, or leave it out."
            )
    if use_double_acc and dtype_acc not in ("auto", "float64"):
        raise DTypeError(
            f"use_double_acc is given with dtype_acc={dtype_acc!r}: they must say the same. "
            "Leave one out."
        )
    if use_double_acc or dtype_acc == "float64":
        return Options(precision, "float64")
    return Options(precision, "kahan" if sum_scheme == "kahan_scheme" else "auto")


PLAIN = accuracy()
"""What they mean where nothing is said."""

ACCURACY = tuple(inspect.signature(accuracy).parameters)
"""The keywords of `accuracy`; the others are those of `run`."""


KEYWORDS = ("backend", "device_id", "ranges", "out")
"""Those of `run`."""


def require_keywords(name: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise if a keyword is none of those that are known."""
    for keyword in given:
        if keyword not in known:
            raise TypeError(
                f"{name} is given the keyword {keyword!r}: it takes {', '.join(known)}. Leave it "
                "out, or pass one of these."
            )


def run(
    what: ReductionSpec,
    tensors: Sequence[Tensor],
    given: Signature,
    known: Extent,
    *,
    backend: str | None = "auto",
    device_id: int = -1,
    ranges: Any = None,
    out: Tensor | None = None,
) -> Any:
    """The reduction of the tensors, by number of the variable; `given` is their signature."""
    serves, moved = _placed(backend, device_id, known.device)
    if ranges is not None and not compiling():
        check_ranges(ranges, _size(known.rows), _size(known.columns))
    f, weight, lost = _witnessed(what.formula, what.weight, known, len(tensors))
    if lost is not None:
        tensors = _with_witnesses(tensors, known, *lost)
        given = signature(tensors)
    plan = settled(what.kind, f, weight, what.axis, what.k, serves, what.options, given)
    if moved is not None:
        tensors = [t.to(moved) for t in tensors]
        ranges = _moved(ranges, moved)
    result = carried_out(plan, tensors, ranges)
    trailing = 3 if what.kind in NEIGHBOURS and dimension(what.formula) > 1 else 2
    if isinstance(result, Tensor):
        result = _complete(result, known, trailing, moved)
        return result if out is None else _written(result, out, tensors)
    if out is not None:
        raise ShapeError(
            f"out is given to {what.kind}, which returns {len(result)} tensors: out takes one. "
            "Leave it out, or ask for one of them."
        )
    return tuple(_complete(r, known, trailing, moved) for r in result)


def directly(
    what: ReductionSpec,
    tensors: Sequence[Tensor],
    given: Signature,
    known: Extent,
    backend: str | None,
    device_id: int,
) -> direct.Body | Literal[False]:
    """The reduction of tensors of these kinds without doors, as `direct` says; False: not so."""
    serves, moved = _placed(backend, device_id, known.device)
    f, weight, lost = _witnessed(what.formula, what.weight, known, len(tensors))
    if moved is not None or (lost is not None and (lost[1] or not lost[0])):  # it needs witnesses
        return False
    plan = settled(what.kind, f, weight, what.axis, what.k, serves, what.options, given)
    found = direct.body(plan, tensors) if plan.layout.batch == known.batch else None
    return found or False


_Lost = tuple[tuple[int, ...], tuple[int | None, ...]]


@kept
def _witnessed(
    f: Formula, weight: Formula | None, known: Extent, count: int
) -> tuple[str, str | None, _Lost | None]:
    """Both as texts, f with variables that are 0 and witness the sizes that it lost.

    The last is None where `count` tensors are what the texts take: else the numbers of those that
    they take, and the lengths of the witnesses, None of a parameter.
    """
    cats = dict(used(f, weight))
    here = set(cats.values())
    sizes = ((0, known.rows), (1, known.columns))
    lost = [(cat, n) for cat, n in sizes if cat not in here and n is not None and n != 1]
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
    """The tensors that count, zeros in the place of others, and the witnesses."""
    nothing = torch.zeros(1, dtype=known.dtype, device=known.device)
    found = [t if n in taken else nothing for n, t in enumerate(tensors)]
    return found + [nothing if n is None else nothing.expand(n, 1) for n in lengths]


def _size(given: int | None) -> int:
    return 1 if given is None else given


def turned(ranges: Any) -> Any:
    """The ranges of the pairs with i and j exchanged."""
    return ranges.t() if hasattr(ranges, "t") else swap_axes(ranges)


def _moved(ranges: Any, device: torch.device) -> Any:
    if ranges is None or hasattr(ranges, "to"):
        return ranges if ranges is None else ranges.to(device)
    return tuple(r.to(device) for r in ranges)


def _complete(result: Tensor, known: Extent, trailing: int, moved: torch.device | None) -> Tensor:
    """With all batch dimensions, also those of variables that the formula lost; moved back."""
    if tuple(result.shape[:-trailing]) != known.batch:
        result = result.expand(*known.batch, *result.shape[-trailing:])
    return result if moved is None or known.device is None else result.to(known.device)


def _placed(
    backend: str | None, device_id: int, device: torch.device | None
) -> tuple[str | None, torch.device | None]:
    """Which of our backends is asked for, and where the tensors must go to first, if anywhere."""
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
    serves = name if name in OURS else None
    if device_id < 0 and name not in GPU:
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
    """The result in `out`."""
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
    """From the first byte of its elements to behind the last."""
    size = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
    return t.data_ptr(), t.data_ptr() + size * t.element_size()


_direct: CallCache[Body | Literal[False]] = CallCache()


def direct_result(
    asked: tuple[str, Formula, Formula | None, Any, int],
    variables: Sequence[Variable],
    known: Extent,
    backend: str | None,
) -> Any:
    """The result of a call that needs no door, see `direct`; None where it does.

    Args:
        asked: a reduction's name, formula, weight, K and axis.
        variables: those of the formulas.
        known: what they agree on.
        backend: None chooses.
    """
    name, *_, count, _ = asked
    if count is not None and type(count) is not int:
        return None
    tensors: list[Any] = [
        numbers(v.value, known) if type(v.value) is tuple else v.value for v in variables
    ]
    key = direct.kinds(tensors, name, backend, -1)
    if key is None:
        return None
    key = (*asked, known, *key)
    at_once = _direct.get(key)
    if at_once is None:
        given = signature(tensors)
        at_once = directly(job(*asked, PLAIN), tensors, given, known, backend, -1)
        _direct.keep(key, at_once)
    return at_once(tensors) if at_once else None


class Reduced:
    """A reduction that waits for its arguments: one for each symbolic variable, by its index.

    Its call takes those and the keywords `backend`, `device_id`, `ranges` and `out`.
    """

    def __init__(
        self,
        what: ReductionSpec,
        variables: tuple[Variable, ...],
        known: Extent,
        options: dict[str, Any],
        origin: Any,
    ) -> None:
        self._job, self._variables, self._known = what, variables, known
        self._options, self._origin = options, origin
        self.places = places(variables)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The result, of these arguments."""
        if len(args) != self.places:
            raise ShapeError(
                f"the reduction is called with {len(args)} arguments: it has {self.places} "
                "symbolic variables. Pass one tensor for each, by its index."
            )
        require_keywords(self._job.kind, options, KEYWORDS)
        origin, known = self._origin, self._known
        given = [origin._tensor(a) for a in args]
        require_tensors(given)
        for v in self._variables if given else ():
            if v.place is not None:
                x = given[v.place]
                found = argument(v, x, f"argument {v.place}")
                known = agree(known, extent(found), _called, v.place, x)
        options = self._options | options
        out = options.pop("out", None)
        ranges = origin._tensor(options.pop("ranges", None))
        tensors = values(self._variables, known, given)
        target = None if out is None else origin._target(out)
        kinds = signature(tensors)
        result = run(self._job, tensors, kinds, known, ranges=ranges, out=target, **options)
        return origin._finished(result) if out is None else out


class Solved:
    """A linear system that waits for its arguments: one for each symbolic variable, by its index.

    The right-hand side stands at the index of the unknown, unless it was given before.
    """

    def __init__(
        self,
        linear: Any,
        unknown: Variable,
        rhs: Variable,
        axis: int,
        options: dict[str, Any],
    ) -> None:
        self._linear, self._unknown, self._rhs = linear, unknown, rhs
        self._axis, self._options = axis, options
        asked = [v for v in linear._variables if rhs.place is not None or v.place != unknown.place]
        self.places = places(asked)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The solution, of these arguments."""
        if len(args) != self.places:
            raise ShapeError(
                f"the system is called with {len(args)} arguments: it has {self.places} symbolic "
                "variables. Pass one tensor for each, by its index."
            )
        from torchweft.reductions.front.solve import KernelSolve

        origin, variables = self._linear, self._linear._variables
        number = next(n for n, v in enumerate(variables) if v.place == self._unknown.place)
        exact = self._options | options
        settings = {key: exact.pop(key) for key in ACCURACY if key in exact}
        given = [origin._tensor(a) for a in args]
        bound = [
            self._rhs if n == number and self._rhs.place is None else v
            for n, v in enumerate(variables)
        ]
        system = KernelSolve(
            origin._formula,
            [f"Var({n},{v.dim},{v.cat})" for n, v in enumerate(variables)],
            f"Var({number},{self._unknown.dim},{self._unknown.cat})",
            self._axis,
            **settings,
        )
        exact["ranges"] = origin._tensor(exact["ranges"])
        known = extent(self._rhs) if self._rhs.place is None else origin._extent
        return origin._array(system(*values(bound, known, given), **exact))


def _called(place: int, x: Any) -> str:
    return (
        f"the reduction is called with argument {place} of shape {tuple(x.shape)} beside the others"
    )
