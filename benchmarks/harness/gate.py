"""The gate: no time of a result that is not right within its computed bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.harness.case import Candidate, Workload
from benchmarks.harness.phases import cotangents, prepare
from torchweft.testing.bounds import accuracy_ratio, bound_ratio, plain_error

__all__ = [
    "Exact",
    "Noise",
    "Verdict",
    "exact_results",
    "expected_results",
    "judge",
    "worst_ratio",
]

Results = tuple[Tensor, ...]

NEAR = 2**-10
"""How far inputs near others are, as a part of them."""


class Verdict(NamedTuple):
    """The worst ratio of error to bound over all results, and the share of elements within it."""

    ratio: float
    right: float


class Exact(NamedTuple):
    """What a phase must give: per result the value, S and K of `torchweft.testing.error_bound`.

    tf32: whether factors of products may be cut off to TF32.
    """

    values: Results
    magnitudes: Results
    counts: Results
    tf32: bool

    def judge(self, results: Results) -> Verdict:
        """By |error| / bound of all elements of all results; integers must be equal."""
        parts = zip(results, *self[:3], strict=True)
        ratios = torch.cat([_ratios(*of_one, self.tf32).flatten() for of_one in parts])
        if not ratios.numel():
            return Verdict(0.0, 1.0)
        return Verdict(float(ratios.max()), _share(ratios <= 1))


class Noise(NamedTuple):
    """What a phase must give: per result the value, and errors of plain PyTorch, by draw."""

    values: Results
    errors: Results

    def judge(self, results: Results) -> Verdict:
        """By error / twice the noise of each result, see `torchweft.testing`.

        An element is right whose error is at most twice the largest of plain PyTorch.
        """
        parts = list(zip(results, *self, strict=True))
        right = torch.cat([_within(*of_one).flatten() for of_one in parts])
        return Verdict(max(accuracy_ratio(*of_one) for of_one in parts), _share(right))


def expected_results(
    phase: str, workload: Workload, candidate: Candidate, tf32: bool
) -> Exact | Noise:
    """What a candidate is held against: the computed bound, or plain PyTorch."""
    if workload.polynomial:
        return exact_results(phase, candidate, workload.scale, tf32)
    return _noise_of_plain(phase, candidate, workload.draws)


def exact_results(
    phase: str, candidate: Candidate, scale: Tensor | None, tf32: bool = False
) -> Exact:
    """The oracle in float64: of the inputs, of their absolute values, and of ones.

    The operation is a polynomial, so the oracle of ones counts the terms of each element.
    """
    changes = (torch.Tensor.double, lambda a: a.double().abs(), _ones)
    values, magnitudes, counts = (_oracle(phase, candidate, scale, c) for c in changes)
    return Exact(values, magnitudes, counts, tf32)


def _noise_of_plain(phase: str, candidate: Candidate, draws: int) -> Noise:
    """The oracle in float64, and its errors in the inputs' own dtype, at the inputs and near them.

    One error of a number says little of how large its errors are: results with few elements, such
    as energies, need several.
    """
    first, *others = (_with_errors(phase, near) for near in _near(candidate, draws))
    errors = zip(first[1], *(e for _, e in others), strict=True)
    return Noise(first[0], tuple(torch.stack(of_one) for of_one in errors))


def _near(candidate: Candidate, draws: int) -> Iterator[Candidate]:
    yield candidate
    generator = torch.Generator(candidate.inputs[0].device).manual_seed(2)
    for _ in range(draws - 1):
        factors = (
            1 + NEAR * torch.randn(a.shape, generator=generator, device=a.device, dtype=a.dtype)
            for a in candidate.inputs
        )
        inputs = (a * factor for a, factor in zip(candidate.inputs, factors, strict=True))
        yield candidate._replace(inputs=tuple(inputs))


def _with_errors(phase: str, candidate: Candidate) -> tuple[Results, Results]:
    dtype = candidate.inputs[0].dtype
    values = _oracle(phase, candidate, None, torch.Tensor.double)
    plain = _oracle(phase, candidate, None, torch.clone)
    errors = (plain_error(p, e, dtype) for p, e in zip(plain, values, strict=True))
    return values, tuple(errors)


def judge(phase: str, candidate: Candidate, expected: Exact | Noise) -> Verdict:
    """What a candidate's results of a phase are worth."""
    weights = cotangents(candidate.function, candidate.inputs)
    results = prepare(phase, candidate.function, candidate.inputs, weights)()
    return expected.judge(tuple(result.detach() for result in results))


def worst_ratio(phase: str, candidate: Candidate, expected: Exact | Noise) -> float:
    """The worst ratio of error to bound over all results of a phase; ≤ 1 is green."""
    return judge(phase, candidate, expected).ratio


def _ratios(out: Tensor, exact: Tensor, magnitude: Tensor, count: Tensor, tf32: bool) -> Tensor:
    if not out.is_floating_point():
        return torch.where(out == exact, 0.0, float("inf"))
    return bound_ratio(out, exact, magnitude, count, tf32=tf32)


def _within(out: Tensor, exact: Tensor, noise: Tensor) -> Tensor:
    if not out.numel():
        return torch.ones_like(out, dtype=torch.bool)
    rounding = torch.finfo(out.dtype).eps / 2 * exact.abs() + torch.finfo(out.dtype).tiny
    return (out.double() - exact).abs() <= rounding + 2 * noise.max()


def _share(right: Tensor) -> float:
    return float(right.double().mean()) if right.numel() else 1.0


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
