"""Keys of reductions: their formulas as text, which registered ops take, and derivatives of these.

A key is "count#formula" or "count#formula|weight": variables are numbered 0 to count − 1, each the
place of its value.  A formula without variables keeps the first value, which has the dtype.
All functions here map text to text, so their results are cached, and torch.compile folds them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from torchweft.core.operators.operator import constant_when_compiling
from torchweft.reductions.formula import derivatives
from torchweft.reductions.formula.derivatives import simplify
from torchweft.reductions.formula.node import (
    Node,
    const,
    expand,
    node,
    read,
    substitute,
    swap,
    var,
    variables,
)

__all__ = [
    "KEPT",
    "Derivative",
    "Key",
    "count",
    "formulas",
    "gradients",
    "make",
    "shifted",
    "tangent",
]

Key = str

KEPT = 4096
"""Results that each function caches."""


class Derivative(NamedTuple):
    """The gradients of a sum in the variables of one axis, one after the other, as one sum.

    Args:
        key: of the sum.
        used: the values that it takes: by their number, the cotangent's is the count.
        of: the variables.
        turned: whether it goes over i: the key's i is then the j of the formula.
    """

    key: Key
    used: tuple[int, ...]
    of: tuple[Node, ...]
    turned: bool


@constant_when_compiling
def make(*texts: str) -> tuple[Key, tuple[int, ...]]:
    """The key of formulas given as canonical texts, and the variables that it takes."""
    return _made(texts)


@functools.lru_cache(KEPT)
def _made(texts: tuple[str, ...]) -> tuple[Key, tuple[int, ...]]:
    return _key([read(text) for text in texts])


@functools.lru_cache(KEPT)
def formulas(key: Key) -> tuple[Node, ...]:
    """The formulas of a key."""
    return tuple(read(text) for text in key.partition("#")[2].split("|"))


def count(key: Key) -> int:
    """How many values a key takes."""
    return int(key.partition("#")[0])


@functools.lru_cache(KEPT)
def shifted(key: Key) -> Key:
    """exp(f − m) w, where m is one more variable."""
    f, w = formulas(key)
    m = var(count(key), 1, 0)
    return f"{count(key) + 1}#{node('exp', f - m) * w}"


@functools.lru_cache(KEPT)
def gradients(key: Key, wanted: tuple[int, ...]) -> tuple[Derivative, ...]:
    """The gradients of a key's sum in some variables; the cotangent has the number after theirs."""
    (f,) = formulas(key)
    of = [v for v in variables(f) if v.data[0] in wanted]
    cotangent = var(count(key), f.dim, 0)
    parts = dict(zip(of, derivatives.gradients(f, of, cotangent), strict=True))
    rows = [v for v in of if v.data[2] != 1]
    columns = [v for v in of if v.data[2] == 1]
    return tuple(
        _derivative(members, [parts[v] for v in members], turned=members is columns)
        for members in (rows, columns)
        if members
    )


def _derivative(members: Sequence[Node], parts: Sequence[Node], *, turned: bool) -> Derivative:
    joined = node("concat", *parts) if len(parts) > 1 else parts[0]
    key, used = _key([swap(joined) if turned else joined])
    return Derivative(key, used, tuple(members), turned)


@functools.lru_cache(KEPT)
def tangent(key: Key, moved: tuple[int, ...]) -> tuple[Key, tuple[int, ...]]:
    """How f changes along directions of some variables, which are numbered on from the count."""
    (f,) = formulas(key)
    change: Node = const(0)
    for v in variables(f):
        if v.data[0] in moved:
            number = count(key) + moved.index(v.data[0])
            change = change + derivatives.diff(f, v, var(number, v.dim, v.data[2]))
    return _key([expand(change, f.dim)])


def _key(found: Sequence[Node]) -> tuple[Key, tuple[int, ...]]:
    """The key of formulas, and the numbers that their variables had."""
    found = [simplify(f) for f in found]
    used = sorted({v for f in found for v in variables(f)}, key=lambda v: v.data)
    new = {v: var(number, v.dim, v.data[2]) for number, v in enumerate(used)}
    texts = "|".join(str(substitute(f, new)) for f in found)
    numbers = tuple(v.data[0] for v in used) or (0,)
    return f"{len(numbers)}#{texts}", numbers
