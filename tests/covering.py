"""Which items of a parametrised test the short suite runs: pairwise covering of its parameters.

Most bugs show with one value of a parameter or with a pair of two (a dtype and a layout, a backend
and a shape), few need three at once.  So the short suite runs, of each test function, a set of its
items in which

- every argument that stands in some item stands in a chosen item (each case, dtype, check ...);
- every case stands in a chosen item with every backend, since backends share no code;
- every pair of features that stands in some item stands in a chosen item.

A feature is an argument, a field of a `Setting`, or a part of a case's name between commas: cases
are products themselves, and their names say of what.

`MATRIX=full` in the environment runs every item: before an issue is resolved, and on a GPU.  The
choice is greedy and depends on the items alone, so it is the same in every process.
"""

from __future__ import annotations

import heapq
import itertools
import os
import zlib
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch

from torchweft.testing.contract import Case, Setting

__all__ = ["FULL", "covering", "requirements"]

FULL = os.environ.get("MATRIX") == "full"
"""Whether every item runs."""


def features(name: str, argument: Any) -> list[Hashable]:
    """What is combined with what: the parts of one argument, each with its place."""
    if isinstance(argument, Case):
        return [(name, place, word) for place, word in enumerate(argument.name.split(", "))]
    if isinstance(argument, Setting):
        return [(field, str(value)) for field, value in argument._asdict().items()]
    plain = isinstance(argument, (str, int, float, tuple, frozenset, type(None), torch.dtype))
    return [(name, repr(argument) if plain else id(argument))]


def requirements(arguments: Mapping[str, Any], pairs: bool = True) -> frozenset[Hashable]:
    """What one item covers: its arguments, its case on its backend, its pairs of features.

    Args:
        arguments: of the item, by name.
        pairs: False leaves out pairs, for tests whose every item compiles for seconds.
    """
    parts = {name: features(name, argument) for name, argument in arguments.items()}
    every = [feature for of in parts.values() for feature in of]
    whole: list[Hashable] = [tuple(of) for of in parts.values()]
    backends = [feature for feature in every if feature[0] == "backend"]  # type: ignore[index]
    cases = [tuple(parts[n]) for n, argument in arguments.items() if isinstance(argument, Case)]
    whole += itertools.product(cases, backends)
    both = itertools.combinations(every, 2) if pairs else ()
    return frozenset(whole) | {frozenset(pair) for pair in both}


def covering(items: Sequence[Collection[Hashable]]) -> list[int]:
    """The places, ascending, of few items that cover together what all of them cover.

    Args:
        items: what each of them covers.
    """
    bits: dict[Hashable, int] = {}
    masks = [sum(1 << bits.setdefault(one, len(bits)) for one in set(item)) for item in items]
    chosen: list[int] = []
    covered = 0
    # what an item adds only falls: the best one is that whose last count still holds
    # equal ones in an order that favours no value
    heap = [(-mask.bit_count(), zlib.crc32(b"%d" % i), i) for i, mask in enumerate(masks)]
    heapq.heapify(heap)
    while heap:
        gain, tie, place = heapq.heappop(heap)
        adds = (masks[place] & ~covered).bit_count()
        if adds == -gain and adds:
            chosen.append(place)
            covered |= masks[place]
        elif adds:
            heapq.heappush(heap, (-adds, tie, place))
    return sorted(chosen)
