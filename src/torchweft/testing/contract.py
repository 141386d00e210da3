"""The contract of an operation: what every backend must give, for any case, dtype and device.

A `Case` is data: a public function, its oracle, inputs and tables.  Where the operation is a
polynomial of its inputs, everything a bound needs comes from the oracle without its constants'
signs: at absolute values it is the magnitude S, at ones it is the number of terms K, and its
derivatives have their own S and K.  Any other operation is held against its oracle in float32.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.testing.bounds import assert_as_accurate, assert_within_bound, plain_error

__all__ = [
    "BODY_CHECKS",
    "LAYOUTS",
    "Case",
    "Problem",
    "assert_contract",
    "assert_same_bits",
    "check_index_types",
    "check_layouts",
    "check_repeatable",
    "check_subsets",
    "check_values",
    "evaluate",
    "judge",
    "poisoned_memory",
    "pose",
]

Inputs = tuple[Tensor | None, ...]
Results = dict[str, Tensor]
Run = Callable[[Callable[..., Tensor], "Problem"], Results]
Judge = Callable[[str, Tensor], float]


NEIGHBOURS = 4
"""Samples of the error of plain PyTorch, see `_plain_judge`."""


@dataclass(frozen=True)
class Case:
    """One call of an operation, and what it must equal.

    Args:
        name: unique; it also seeds the directions of the derivatives.
        call: `call(*inputs, backend=..., **tables)`, the public function.
        oracle: `oracle(*inputs, **tables)`, plain torch, for any dtype, differentiable.
        inputs: the differentiable inputs, float64 on the CPU; None where left out.
        tables: index tensors and options.
        stored: results that are rounded and stored on the way to a gradient of a gradient.
        factors: results that are rounded to the inputs' dtype on the way to any result.
        magnitude: the oracle with the absolute values of its constants; by default it has no
            negative ones.
        polynomial: whether the operation is one in its inputs; if not, there is no magnitude.
        together: whether gradients that are wanted together are computed together, so that their
            last bits depend on which are.
        neighbours: most samples of the error of plain PyTorch: where a result is a few numbers,
            their error is a matter of luck.
    """

    name: str
    call: Callable[..., Tensor]
    oracle: Callable[..., Tensor]
    inputs: Inputs
    tables: Mapping[str, Any] = field(default_factory=dict)
    stored: int = 0
    factors: int = 0
    magnitude: Callable[..., Tensor] | None = None
    polynomial: bool = True
    together: bool = False
    neighbours: int = NEIGHBOURS


class Problem(NamedTuple):
    """A case on a device in a dtype: inputs, the cotangent of the value, a tangent per input."""

    inputs: Inputs
    cotangent: Tensor
    tangents: Inputs
    tables: dict[str, Any]

    def map(self, function: Callable[[Tensor], Tensor]) -> Problem:
        """The same problem with every real tensor replaced."""

        def each(tensors: Inputs) -> Inputs:
            return tuple(None if a is None else function(a.detach()) for a in tensors)

        cotangent = function(self.cotangent.detach())
        return Problem(each(self.inputs), cotangent, each(self.tangents), self.tables)


def _transposed(a: Tensor) -> Tensor:
    return a.movedim(0, -1).contiguous().movedim(-1, 0)


def _strided(a: Tensor) -> Tensor:
    return a.repeat_interleave(2, -1)[..., ::2] if a.dim() else a


def _expanded(a: Tensor) -> Tensor:
    return a[:1].expand_as(a) if a.dim() else a


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": _transposed,
    "strided": _strided,
    "expanded": _expanded,
}
"""Ways to store a tensor that is not contiguous: turned, with gaps, with stride 0."""


def pose(
    case: Case, *, device: str = "cpu", dtype: torch.dtype = torch.float64, layout: str = ""
) -> Problem:
    """The case on a device in a dtype, with random directions for its derivatives."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"directions of {case.name}".encode()))
    store = LAYOUTS.get(layout, torch.Tensor.contiguous)

    def random_like(a: Tensor) -> Tensor:
        return torch.randn(a.shape, dtype=torch.float64, generator=generator)

    with torch.no_grad():
        value = case.oracle(*case.inputs, **case.tables)
    tangents = tuple(None if a is None else random_like(a) for a in case.inputs)
    tables = {
        name: table.to(device) if isinstance(table, Tensor) else table
        for name, table in case.tables.items()
    }
    problem = Problem(case.inputs, random_like(value), tangents, tables)
    return problem.map(lambda a: store(a.to(device, dtype)))


def evaluate(
    function: Callable[..., Tensor],
    problem: Problem,
    wanted: Collection[int] | None = None,
    order: int = 2,
) -> Results:
    """The value, its gradients, and the gradients of each gradient, by name.

    With w the cotangent and v_i the tangents: g_i = ∂⟨z, w⟩/∂x_i, then ∂⟨g_i, v_i⟩/∂x_j and
    ∂⟨g_i, v_i⟩/∂w, each one by itself, so that each is one sum and has one rounding.

    Args:
        function: of the inputs, the tables as keywords.
        problem: where to evaluate it.
        wanted: the inputs that require a gradient; None is all of them.
        order: 0 the value alone, 1 its gradients too, 2 their gradients too.
    """
    leaves = [None if a is None else a.detach() for a in problem.inputs]
    over = [i for i, leaf in enumerate(leaves) if leaf is not None]
    over = over if wanted is None else [i for i in over if i in wanted]
    for i in over:
        leaves[i].requires_grad_()  # type: ignore[union-attr]
    cotangent = problem.cotangent.detach().requires_grad_()
    value = function(*leaves, **problem.tables)
    results = {"value": value.detach()}
    if not over or not order:
        return results
    gradients = torch.autograd.grad(value, [leaves[i] for i in over], cotangent, create_graph=True)  # type: ignore[arg-type]
    for i, gradient in zip(over, gradients, strict=True):
        results[f"gradient {i + 1}"] = gradient.detach()
        if order < 2:
            continue
        variables = {f"input {j + 1}": leaves[j] for j in over}
        variables["cotangent"] = cotangent
        seconds = torch.autograd.grad(
            gradient,
            list(variables.values()),  # type: ignore[arg-type]
            problem.tangents[i],
            retain_graph=True,
            materialize_grads=True,
        )
        for name, second in zip(variables, seconds, strict=True):
            results[f"gradient {i + 1} by {name}"] = second
    return results


class Setting(NamedTuple):
    """Where a case runs, and up to which order of derivatives."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    backend: str | None = None
    order: int = 2

    def run(self, case: Case, problem: Problem, wanted: Collection[int] | None = None) -> Results:
        """What the public function of the case gives on this backend, which keeps no input."""
        leaves = list[weakref.ref[Tensor]]()

        def call(*inputs: Tensor | None, **tables: Any) -> Tensor:
            leaves.extend(weakref.ref(a) for a in inputs if a is not None)
            return case.call(*inputs, backend=self.backend, **tables)

        results = evaluate(call, problem, wanted, self.order)
        kept = _still_alive(leaves)
        if kept:  # by a result with a history, perhaps
            raise AssertionError(f"{case.name}, {_words(self)}: inputs {kept} are kept by a call")
        return results

    def pose(self, case: Case, layout: str = "") -> Problem:
        """The case here."""
        return pose(case, device=self.device, dtype=self.dtype, layout=layout)


def _still_alive(leaves: Sequence[weakref.ref[Tensor]]) -> list[int]:
    """Numbers of those that are alive, once torch's threads of gradients have let go of theirs."""
    for _ in range(100):
        kept = [n + 1 for n, leaf in enumerate(leaves) if leaf() is not None]
        if not kept:
            break
        time.sleep(0.01)
    return kept


def check_values(case: Case, setting: Setting, layout: str = "") -> dict[str, float]:
    """Value, gradients and second gradients are within their bounds; unwritten memory shows.

    Returns:
        The worst ratio of error to bound of each.
    """
    problem = setting.pose(case, layout)
    with poisoned_memory():
        found = setting.run(case, problem)
    evaluated = functools.partial(evaluate, order=setting.order)
    where = _words(setting, layout)
    ratios = judge(case, problem, evaluated, found, where)
    if not found["value"].is_contiguous():
        raise AssertionError(f"{case.name}, {where}: the value is not contiguous")
    return ratios


def judge(
    case: Case,
    problem: Problem,
    run: Run,
    found: Results,
    where: str,
) -> dict[str, float]:
    """Each result is within its bound of what the oracle gives.

    Args:
        case: whose oracle.
        problem: what was computed.
        run: how the results follow from a function and a problem, here from the oracle.
        found: the results under test, by name.
        where: words for the error.

    Returns:
        The worst ratio of error to bound of each.
    """
    expected = (_polynomial_judge if case.polynomial else _plain_judge)(case, problem, run)
    ratios = {}
    for name, out in found.items():
        try:
            if out.dtype != problem.cotangent.dtype:
                raise AssertionError(f"{out.dtype} must be {problem.cotangent.dtype}")
            ratios[name] = expected(name, out)
        except AssertionError as error:
            raise AssertionError(f"{case.name}, {where}, {name}: {error}") from None
    return ratios


def _polynomial_judge(case: Case, problem: Problem, run: Run) -> Judge:
    """By the computed bound."""
    wide = problem.map(torch.Tensor.double)
    magnitude = case.magnitude or case.oracle
    exact = run(case.oracle, wide)
    sizes, terms = (run(magnitude, wide.map(at)) for at in (torch.abs, torch.ones_like))

    def within_bound(name: str, out: Tensor) -> float:
        stored = case.factors + (case.stored if " by " in name else 0)
        return assert_within_bound(out, exact[name], sizes[name], terms[name], stored=stored)

    return within_bound


def _plain_judge(case: Case, problem: Problem, run: Run) -> Judge:
    """By the error of the oracle in float32; where factors are rounded, in the inputs' dtype.

    How large its error is at these very numbers is a matter of luck.  So it sees each number moved
    to one beside it, several times.
    """
    dtype = problem.cotangent.dtype
    plain_dtype = dtype if case.factors and dtype != torch.float64 else torch.float32
    narrow = problem.map(lambda a: a.to(plain_dtype))
    exact = run(case.oracle, problem.map(torch.Tensor.double))

    @functools.cache
    def plain(seed: int) -> Results:
        return run(case.oracle, _neighbour(narrow, seed))

    def as_accurate(name: str, out: Tensor) -> float:
        samples = NEIGHBOURS
        while True:
            noise = [plain_error(plain(n)[name], exact[name], dtype) for n in range(samples)]
            try:
                return assert_as_accurate(out, exact[name], torch.stack(noise))
            except AssertionError:
                if samples >= case.neighbours:
                    raise
                samples *= 4

    return as_accurate


def _neighbour(problem: Problem, seed: int) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def moved(a: Tensor) -> Tensor:
        sign = 2 * torch.randint(0, 2, a.shape, generator=generator) - 1
        return a * (1 + torch.finfo(a.dtype).eps * sign.to(a))

    return problem.map(moved)


def check_layouts(case: Case, setting: Setting) -> dict[str, float]:
    """Inputs, cotangents and tangents that are not contiguous are served as well."""
    ratios: dict[str, float] = {}
    for layout in LAYOUTS:
        for name, ratio in check_values(case, setting, layout).items():
            ratios[name] = max(ratios.get(name, 0.0), ratio)
    return ratios


def check_repeatable(case: Case, setting: Setting) -> dict[str, float]:
    """A second run gives the same bits."""
    problem = setting.pose(case)
    once, again = (setting.run(case, problem) for _ in range(2))
    for name in once:
        assert_same_bits(again[name], once[name], f"{case.name}, {_words(setting)}, {name}, again")
    return {}


def check_subsets(case: Case, setting: Setting) -> dict[str, float]:
    """Freezing inputs changes nothing about the gradients of the others.

    Not a bit, or, where gradients are computed together, nothing beyond their bounds.
    """
    problem = setting.pose(case)
    everything = setting.run(case, problem)
    for wanted in _subsets(case):
        found = setting.run(case, problem, wanted)
        where = f"{_words(setting)}, with inputs {wanted} requiring grad"
        if case.together:
            run = functools.partial(evaluate, wanted=wanted, order=setting.order)
            judge(case, problem, run, found, where)
            continue
        for name, result in found.items():
            assert_same_bits(result, everything[name], f"{case.name}, {where}, {name}")
    return {}


def check_index_types(case: Case, setting: Setting) -> dict[str, float]:
    """int32 and int64 tables give the same bits."""
    problem = setting.pose(case)
    found = [
        setting.run(case, problem._replace(tables=_with_tables(problem.tables, dtype)))
        for dtype in (torch.int32, torch.int64)
    ]
    narrow, wide = found
    for name in wide:
        what = f"{case.name}, {_words(setting)}, {name}, int32 against int64"
        assert_same_bits(narrow[name], wide[name], what)
    return {}


BODY_CHECKS: tuple[Callable[[Case, Setting], dict[str, float]], ...] = (
    check_values,
    check_layouts,
    check_repeatable,
    check_subsets,
    check_index_types,
)
"""The promises that depend on the body of a backend."""


def assert_contract(
    case: Case,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
) -> dict[str, float]:
    """Every promise that depends on the backend's body, for one case.

    Returns:
        The worst ratio of error to bound of the value and of each derivative.
    """
    setting = Setting(device, dtype, backend)
    worst: dict[str, float] = {}
    for check in BODY_CHECKS:
        for name, ratio in check(case, setting).items():
            worst[name] = max(worst.get(name, 0.0), ratio)
    return worst


def assert_same_bits(out: Tensor, expected: Tensor, what: str) -> None:
    """Two results are equal to the last bit, or AssertionError names the first that differs."""
    if out.shape != expected.shape or out.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: {out.dtype} {tuple(out.shape)} is not {expected.dtype} "
            f"{tuple(expected.shape)}"
        )
    differ = (out != expected) & ~(out.isnan() & expected.isnan())
    if differ.any():
        at = tuple(int(i) for i in differ.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.numel()} elements differ, element {at} is "
            f"{float(out[at])!r}, not {float(expected[at])!r}"
        )


def _words(setting: Setting, layout: str = "") -> str:
    dtype = str(setting.dtype).removeprefix("torch.")
    return " ".join(filter(None, (setting.backend or "default", setting.device, dtype, layout)))


def _subsets(case: Case) -> Iterator[tuple[int, ...]]:
    """The proper subsets of the inputs, the empty one too."""
    given = [i for i, a in enumerate(case.inputs) if a is not None]
    for size in range(len(given)):
        yield from itertools.combinations(given, size)


def _with_tables(tables: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: table.to(dtype) if isinstance(table, Tensor) else table
        for name, table in tables.items()
    }


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new uninitialised tensors with NaN (integers: their largest value).

    An output element, or an element of a workspace, that no program writes becomes NaN in the
    result instead of a zero that happened to be there.
    """
    memory: Any = torch.utils.deterministic  # its attribute is set up where mypy does not look
    was_on = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            # only the filling is wanted: oracles may use operations that are not deterministic
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=was_warn_only)
        memory.fill_uninitialized_memory = was_filled
