"""The gate: no time of a result that is not right within its computed bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from weft.bench.case import Candidate
from weft.bench.phases import cotangents, prepare
from weft.testing.bounds import bound_ratio

__all__ = ["Exact", "exact_results", "worst_ratio"]


class Exact(NamedTuple):
    """What a phase must give: per result the value, S and K of `weft.testing.error_bound`."""

    values: tuple[Tensor, ...]
    magnitudes: tuple[Tensor, ...]
    counts: tuple[Tensor, ...]


def exact_results(phase: str, candidate: Candidate, scale: Tensor | None) -> Exact:
    """The oracle in float64: of the inputs, of their absolute values, and of ones.

    The operation is multilinear, so the oracle of ones counts the terms of each element.
    """
    weights = cotangents(candidate.function, candidate.inputs)

    def run(change: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        coefficients = None if scale is None else change(scale.double())

        def oracle(*inputs: Tensor) -> Tensor:
            return candidate.oracle(*inputs, scale=coefficients)

        inputs = [change(a.double()) for a in candidate.inputs]
        changed = weights.map(lambda w: change(w.double()))
        return tuple(t.detach() for t in prepare(phase, oracle, inputs, changed)())

    return Exact(run(lambda a: a), run(torch.abs), run(torch.ones_like))


def worst_ratio(phase: str, candidate: Candidate, exact: Exact) -> float:
    """The largest |error| / bound over all elements of all results of a phase; ≤ 1 is green."""
    weights = cotangents(candidate.function, candidate.inputs)
    results = prepare(phase, candidate.function, candidate.inputs, weights)()
    return max(
        float(bound_ratio(out.detach(), *parts).max()) if out.numel() else 0.0
        for out, *parts in zip(results, *exact, strict=True)
    )
