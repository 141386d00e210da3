"""The weights of a contraction's functions from those of its couplings, as programs.

made[element, p, c] = Σ_k T[p, k] w[element, k, c],    the couplings k of several parameters in turn

T follows from the basis, or from couplings that somebody took, so that its text is the program.
"""

from __future__ import annotations

import functools
import itertools
import json
import string
from collections.abc import Sequence

from torch import Tensor

from torchweft.core.expressions.expr import add, const
from torchweft.core.expressions.program import Operand, Output, Program, derive

__all__ = ["counts", "program", "text", "turned"]

AXES = ("row", "feature")


def text(table: Tensor, counts: Sequence[int]) -> str:
    """T (products, couplings) of parameters with so many couplings each."""
    places = table.nonzero().tolist()
    entries = [(p, k, float(table[p, k])) for p, k in places]
    return json.dumps((list(counts), table.shape[0], entries), separators=(",", ":"))


@functools.lru_cache(maxsize=256)
def counts(name: str) -> tuple[int, ...]:
    """Couplings of each parameter."""
    return tuple(json.loads(name)[0])


def turned(name: str) -> str:
    """The key of the gradients of all parameters."""
    return f"{name} | vjp {'1' * len(counts(name))} 1"


@functools.lru_cache(maxsize=256)
def program(name: str) -> Program:
    """The program with a text, of the parameters, or derived from it."""
    return derive(name, _root)


def _root(name: str) -> Program:
    sizes, products, entries = json.loads(name)
    letters = itertools.product(string.ascii_lowercase, repeat=2)
    inputs = tuple(
        Operand(f"w{''.join(pair)}", size, AXES) for size, pair in zip(sizes, letters, strict=False)
    )
    leaves = [leaf for operand in inputs for leaf in operand.leaves()]
    made = tuple(
        add(*(const(value) * leaves[k] for p, k, value in entries if p == product))
        for product in range(products)
    )
    return Program(name, inputs, (Output(Operand("made", products, AXES), made),))
