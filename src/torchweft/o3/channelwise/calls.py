"""Calls: sums of derivatives of a structure's form Q, closed under differentiation.

    result = Σ_terms ∂Q/∂slot at the term's tensors

The forward pass is one result, ∂Q/∂z at (x, y, w).  Since Q is linear in each slot, the gradient of
Σ ⟨cotangent, result⟩ by a tensor is again a sum of derivatives of Q, with the cotangent in the
result's slot; so is the derivative along a tangent.  Derivatives of every order are calls, each
computed by fused kernels.

    "xyw|z:0,1,2"                          forward: tensors x, y, w; ∂Q/∂z at (0, 1, 2)
    "xywz|x:1,3,2 y:0,3,2 w:0,1,3"         gradients, the cotangent of z is tensor 3

Weights that are products h A (see radial_linear) make a form of five slots, linear in each: h is in
slot w, and A in slot a.

    "xywa|z:0,1,2,3"                       forward: ∂Q/∂z at (x, y, h A)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from torchweft.o3.channelwise.structure import SLOTS

__all__ = ["ROLES", "Call", "Result", "forward", "gradient", "read_call", "tangent", "trimmed"]

ROLES = SLOTS + "a"
"""Slots in the order of terms."""

Term = tuple[int, ...]
"""The tensor in each slot except the result's, in the order of ROLES; the last may be missing."""


class Result(NamedTuple):
    """Σ over the terms of ∂Q/∂slot; no terms: zero."""

    slot: str
    terms: tuple[Term, ...]


class Call(NamedTuple):
    """Results of tensors.

    Args:
        slots: the slot of each tensor.
        results: what is computed.
    """

    slots: str
    results: tuple[Result, ...]

    def __str__(self) -> str:
        """A text that `read_call` turns into the same call."""
        texts = (
            f"{slot}:" + "+".join(",".join(map(str, term)) for term in terms)
            for slot, terms in self.results
        )
        return f"{self.slots}|{' '.join(texts)}"


def forward(weighted: bool) -> Call:
    """The tensor product of x, y and, if weighted, w."""
    slots = "xyw" if weighted else "xy"
    return Call(slots, (Result("z", (tuple(range(len(slots))),)),))


def gradient(call: Call, needed: Sequence[bool], given: Sequence[bool]) -> Call:
    """The gradients of Σ ⟨cotangent, result⟩ by the tensors marked in `needed`.

    Its tensors are those of the call, then the cotangents of the results marked in `given`.
    """
    shown = [result for result, flag in zip(call.results, given, strict=True) if flag]
    slots = call.slots + "".join(result.slot for result in shown)
    monomials = [
        _monomial(result.slot, len(call.slots) + i, term)
        for i, result in enumerate(shown)
        for term in result.terms
    ]
    results = tuple(
        Result(call.slots[t], tuple(_without(m, t) for m in monomials if t in m.values()))
        for t, flag in enumerate(needed)
        if flag
    )
    return Call(slots, results)


def tangent(call: Call, given: Sequence[bool]) -> Call:
    """The derivative of every result along tangents of the tensors marked in `given`.

    Its tensors are those of the call, then the tangents.
    """
    marked = [t for t, flag in enumerate(given) if flag]
    moved = {t: len(call.slots) + i for i, t in enumerate(marked)}
    slots = call.slots + "".join(call.slots[t] for t in marked)
    results = tuple(
        Result(
            result.slot,
            tuple(
                tuple(moved[t] if t == chosen else t for t in term)
                for term in result.terms
                for chosen in term
                if chosen in moved
            ),
        )
        for result in call.results
    )
    return Call(slots, results)


def trimmed(call: Call) -> tuple[Call, tuple[int, ...]]:
    """The call with only the tensors that its terms use, and their numbers."""
    used = tuple(sorted({t for result in call.results for term in result.terms for t in term}))
    place = {t: i for i, t in enumerate(used)}
    results = tuple(
        Result(slot, tuple(tuple(place[t] for t in term) for term in terms))
        for slot, terms in call.results
    )
    return Call("".join(call.slots[t] for t in used), results), used


@functools.lru_cache(maxsize=4096)
def read_call(text: str) -> Call:
    """The call with a text."""
    slots, _, results = text.partition("|")
    return Call(slots, tuple(map(_result, results.split(" ") if results else ())))


def _result(text: str) -> Result:
    slot, _, terms = text.partition(":")
    return Result(
        slot, tuple(tuple(map(int, term.split(","))) for term in terms.split("+") if term)
    )


def _monomial(slot: str, tensor: int, term: Term) -> dict[str, int]:
    """The tensor in each slot of a term, the result's slot included."""
    others = [s for s in ROLES if s != slot][: len(term)]
    return dict(zip(others, term, strict=True)) | {slot: tensor}


def _without(monomial: dict[str, int], tensor: int) -> Term:
    return tuple(monomial[s] for s in ROLES if monomial.get(s, tensor) != tensor)
