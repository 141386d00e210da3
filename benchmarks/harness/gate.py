"""The gate: no time of a result that is not right within its computed bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.harness.case import Candidate, Workload
from benchmarks.harness.phases import cotangents, prepare
from torchweft.testing.bounds import accuracy_ratio, bound_ratio, plain_error

__all__ = ["Exact", "Noise", "exact_results", "expected_results", "worst_ratio"]

Results = tuple[Tensor, ...]


class Exact(NamedTuple):
    """What a phase must give: per result the value, S and K of `torchweft.testing.error_bound`.

    tf32: whether factors of products may be rounded to TF32.
    """

    values: Results
    magnitudes: Results
    counts: Results
    tf32: bool

    def ratio(self, results: Results) -> float:
        """The largest |error| / bound over all elements of all results; integers must be equal."""
        parts = zip(results, *self[:3], strict=True)
        return max(_ratio(*of_one, self.tf32) for of_one in parts)


class Noise(NamedTuple):
    """What a phase must give: per result the value, and the error of plain PyTorch."""

    values: Results
    errors: Results

    def ratio(self, results: Results) -> float:
        """The largest error / twice the noise over all results, see `torchweft.testing`."""
        return max(accuracy_ratio(*of_one) for of_one in zip(results, *self, strict=True))


def expected_results(
    phase: str, workload: Workload, candidate: Candidate, tf32: bool
) -> Exact | Noise:
    """What a candidate is held against: the computed bound, or plain PyTorch."""
    if workload.polynomial:
        return exact_results(phase, candidate, workload.scale, tf32)
    return _noise_of_plain(phase, candidate)


def exact_results(
    phase: str, candidate: Candidate, scale: Tensor | None, tf32: bool = False
) -> Exact:
    """The oracle in float64: of the inputs, of their absolute values, and of ones.

    The operation is a polynomial, so the oracle of ones counts the terms of each element.
    """
    changes = (torch.Tensor.double, lambda a: a.double().abs(), _ones)
    values, magnitudes, counts = (_oracle(phase, candidate, scale, c) for c in changes)
    return Exact(values, magnitudes, counts, tf32)


def _noise_of_plain(phase: str, candidate: Candidate) -> Noise:
    """The oracle in float64, and its error in the inputs' own dtype."""
    dtype = candidate.inputs[0].dtype
    values = _oracle(phase, candidate, None, torch.Tensor.double)
    plain = _oracle(phase, candidate, None, torch.clone)
    errors = (plain_error(p, e, dtype) for p, e in zip(plain, values, strict=True))
    return Noise(values, tuple(errors))


def worst_ratio(phase: str, candidate: Candidate, expected: Exact | Noise) -> float:
    """The worst ratio of error to bound over all results of a phase; ≤ 1 is green."""
    weights = cotangents(candidate.function, candidate.inputs)
    results = prepare(phase, candidate.function, candidate.inputs, weights)()
    return expected.ratio(tuple(result.detach() for result in results))


def _ratio(out: Tensor, exact: Tensor, magnitude: Tensor, count: Tensor, tf32: bool) -> float:
    if not out.numel():
        return 0.0
    if not out.is_floating_point():
        return float("inf") if bool((out != exact).any()) else 0.0
    return float(bound_ratio(out, exact, magnitude, count, tf32=tf32).max())


def _ones(a: Tensor) -> Tensor:
    return torch.ones_like(a, dtype=torch.float64)


def _oracle(
    phase: str, candidate: Candidate, scale: Tensor | None, change: Callable[[Tensor], Tensor]
) -> Results:
    """A phase of the oracle, everything that it takes changed before."""
    coefficients = None if scale is None else change(scale)

    def oracle(*inputs: Tensor) -> Tensor:
        return candidate.oracle(*inputs, scale=coefficients)

    inputs = [change(a) for a in candidate.inputs]
    weights = cotangents(candidate.function, candidate.inputs).map(change)
    return tuple(t.detach() for t in prepare(phase, oracle, inputs, weights)())
