"""Edges taken in rounds, so that what they add to other rows needs little memory of its own.

A kernel that takes edges by their row of z stores, for each, what it adds to its row of x.  Such
parts live from one kernel to the next, which adds them up; and the gradient of weights, longer
still, is written edge after edge.  So the parts of a round lie in those rows of it that later
rounds will write.  The rows that are left shrink by the same factor each round; the last edges'
parts have memory of their own.

    E edges, w and x numbers each:   round 1 takes E · w / (w + x), round 2 this part of the rest …
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Round", "rounds"]

SPARE = 2**29
"""Bytes of parts that may have memory of their own.

Each round ends with processors that wait, and reads and writes all rows of x again.
"""

LEAST = 0.3
"""Of the edges that are left, in a round: where parts are longer, there would be many rounds."""

ALIGNED = 4
"""Numbers from one address that kernels read fast to the next."""


class Round(NamedTuple):
    """Edges begin .. end − 1.

    Args:
        begin: the first.
        end: one more than the last.
        places: where in the gradient of weights the parts of each result begin; None: in memory of
            their own.
    """

    begin: int
    end: int
    places: tuple[int, ...] | None


def rounds(edges: int, weights: int, parts: tuple[int, ...], size: int) -> list[Round]:
    """The rounds of a call; one, if that is best.

    Args:
        edges: E.
        weights: numbers of an edge in the gradient of weights.
        parts: numbers of an edge in the parts of each result.
        size: bytes of a number.
    """
    each, slack = sum(parts), ALIGNED * len(parts)
    few = weights < LEAST * (weights + each)
    spare = edges if few else SPARE // (size * each)
    found: list[Round] = []
    begin = 0
    while edges - begin > spare:
        count = ((edges - begin) * weights - slack) // (weights + each)
        if count < 1:
            break
        end = begin + count
        found.append(Round(begin, end, _places(end, count, weights, parts)))
        begin = end
    return [*found, Round(begin, edges, None)]


def _places(end: int, count: int, weights: int, parts: tuple[int, ...]) -> tuple[int, ...]:
    places = []
    at = end * weights
    for part in parts:
        at = -(-at // ALIGNED) * ALIGNED
        places.append(at)
        at += count * part
    return tuple(places)
