"""Reductions and linear systems of lazy tensors that wait for their symbolic variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torchweft.core.operators.call_cache import CallCache
from torchweft.errors import ShapeError
from torchweft.reductions.call.signature import signature
from torchweft.reductions.engine import direct
from torchweft.reductions.engine.direct import Body
from torchweft.reductions.front.reduced import (
    ACCURACY,
    KEYWORDS,
    PLAIN,
    Job,
    directly,
    job,
    require_keywords,
    run,
)
from torchweft.reductions.front.traced import Formula
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

__all__ = ["Reduced", "Solved", "direct_result"]


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
        what: Job,
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
