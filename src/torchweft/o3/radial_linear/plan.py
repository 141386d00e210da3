"""A call with weights w = h A, taken apart: matrix products, and a call whose weights are formed.

    w_k  = Σ_(h, A) h A                      what terms with the same x, y and z share is one sum
    gw_k = Σ_terms ∂Q/∂w
    h:   Σ gw A^T          A:   Σ_e h^T gw

Between them stands a call of the form without A, of slots x, y, z and w.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from torchweft.o3.channelwise.calls import ROLES, Call, Result, Term

__all__ = ["Plan", "Sum", "plan_of"]

Sum = tuple[tuple[int, int], ...]
"""Pairs of numbers whose products are added."""


class Plan(NamedTuple):
    """How to compute a call on edges whose weights are formed.

    Args:
        inner: its tensors are those of `given`, then the formed weights.
        given: the numbers of the call's tensors in slots x, y and z that it reads.
        formed: for each formed weight the pairs (h, A) of tensors.
        results: for each result of the call: a number of a result of `inner`, or pairs.  For h,
            pairs (result of `inner`, A); for A, pairs (h, result of `inner`).
    """

    inner: Call
    given: tuple[int, ...]
    formed: tuple[Sum, ...]
    results: tuple[int | Sum, ...]


@functools.lru_cache(maxsize=4096)
def plan_of(call: Call) -> Plan:
    """How to compute a call."""
    given = tuple(t for t, slot in enumerate(call.slots) if slot in "xyz")
    place = {t: i for i, t in enumerate(given)}
    formed: dict[Sum, int] = {}
    inner: dict[Result, int] = {}
    results: list[int | Sum] = []

    def number(result: Result) -> int:
        return inner.setdefault(result, len(inner))

    for slot, terms in call.results:
        if slot in "wa":
            pairs = []
            for factor, rest in _by_factor(slot, terms):
                summed = tuple(tuple(place[t] for t in term) for term in rest)
                gw = number(Result("w", summed))
                pairs.append((gw, factor) if slot == "w" else (factor, gw))
            results.append(tuple(pairs))
            continue
        found = []
        for (first, second), sums in _by_others(terms):
            k = formed.setdefault(sums, len(formed))
            found.append((place[first], place[second], len(given) + k))
        results.append(number(Result(slot, tuple(found))))
    slots = "".join(call.slots[t] for t in given) + "w" * len(formed)
    return Plan(Call(slots, tuple(inner)), given, tuple(formed), tuple(results))


def _by_factor(slot: str, terms: Iterable[Term]) -> list[tuple[int, list[Term]]]:
    """Terms of a result h or A by the other of these, which stands last."""
    assert ROLES[-2:] == "wa"
    assert slot in "wa"
    groups: dict[int, list[Term]] = {}
    for *others, factor in terms:
        groups.setdefault(factor, []).append(tuple(others))
    return list(groups.items())


def _by_others(terms: Iterable[Term]) -> list[tuple[tuple[int, int], Sum]]:
    """Terms of a result x, y or z by their other two; h and A stand last."""
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for first, second, h, a in terms:
        groups.setdefault((first, second), []).append((h, a))
    return [(others, tuple(pairs)) for others, pairs in groups.items()]
