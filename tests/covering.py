"""Pairwise covering: the short suite runs a part of each product of parameters.

A test with parameters a ∈ A, b ∈ B, c ∈ C has |A|·|B|·|C| items.  The short suite keeps few of
them, such that every pair of values that occurs together in some item still occurs in a kept one:
a bug that two parameters provoke together is still seen.  `MATRIX=full` keeps all.

The choice is greedy and depends on the items alone, so it is the same in every process.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Sequence

FULL = os.environ.get("MATRIX") == "full"

Item = Sequence[Hashable]
"""The values of an item, one for each parameter."""


def covering(items: Sequence[Item]) -> list[int]:
    """The places of items that hold every value and every pair of values of the given ones.

    Args:
        items: tuples of as many values each.

    Returns:
        Ascending places.  With one parameter, or none, those are all.
    """
    pairs = [_pairs(item) for item in items]
    left = set().union(*pairs) if pairs else set()
    kept: list[int] = []
    # largest gain first; a stale gain is an upper bound, so it is computed anew when it leads
    gains = [len(own) for own in pairs]
    waiting = set(range(len(items)))
    while left:
        best = max(waiting, key=lambda place: (gains[place], -place))
        gain = len(pairs[best] & left)
        if gain < gains[best]:
            gains[best] = gain
            continue
        kept.append(best)
        waiting.discard(best)
        left -= pairs[best]
    return sorted(kept)


def _pairs(item: Item) -> set[Hashable]:
    places = range(len(item))
    if len(item) < 2:
        return {(place, item[place]) for place in places} or {()}
    return {(a, item[a], b, item[b]) for a, b in itertools.combinations(places, 2)}
