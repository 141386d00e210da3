"""What one kernel of a reduction computes, and what a call asks for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchweft.reductions.formula.node import Node
from torchweft.reductions.scalars.inner_sums import LONG, Inner

__all__ = ["Job", "Wanted"]


class Job(NamedTuple):
    """What one kernel computes.  Its source depends on all of it.

    Args:
        kind: "sums", "shifted" or "smallest".
        formula: what is summed, the exponent, or what is compared.
        weight: in shifted, what the exponential is multiplied by.
        first: the first of the result's components that it computes.
        last: the one behind the last.
        ranged: whether columns are lists of intervals.
        partial: whether the columns of a row are shared out among tasks.
        wide: whether the formula is in float64.
        accumulate: "auto", "kahan" (sums) or "float64".
        kept: in smallest, K.
        far: in smallest, whether indices need 64 bits.
        guarded: whether tensor cores may have done the work: a guard says so.
        inner: sums over components, whose numbers the formulas have.
        near: whether sums over points near each other may be computed by the tile's centre.
        ending: what becomes of m and s, "log" (m + log s) or "mean" (s over its last component),
            or which sign values have that are stored beside indices, "values" or "negated"; nothing
            of it where empty.
        blocked: the variables of which a program takes a block of components: a batch entry is then
            an entry of the data and a block.
    """

    kind: str
    formula: Node
    weight: Node | None
    first: int
    last: int
    ranged: bool = False
    partial: bool = False
    wide: bool = False
    accumulate: str = "auto"
    kept: int = 0
    far: bool = False
    guarded: bool = False
    inner: tuple[Inner, ...] = ()
    near: bool = False
    blocked: tuple[int, ...] = ()
    ending: str = ""

    @property
    def components(self) -> int:
        """Of the whole result."""
        return (self.weight or self.formula).dim - (self.ending == "mean")

    @property
    def sign(self) -> int:
        """Of the values that smallest stores; 0: it stores none."""
        return {"values": 1, "negated": -1}.get(self.ending, 0)

    @property
    def accumulator(self) -> str:
        """The dtype of sums."""
        return "float64" if self.wide or self.accumulate == "float64" else "float32"

    def apart(self, v: Node) -> bool:
        """Whether a variable is stored by component: (B, dim, pitch)."""
        return v.data[2] != 2 and (v.dim > LONG or v.data[0] in self.blocked)


class Wanted(NamedTuple):
    """What a call is asked for.

    Args:
        kind: "sums", "shifted" or "smallest".
        formulas: what is reduced, and its weight.
        k: in smallest, how many.
        ending: as that of a `Job`.
        results: shapes and dtypes, in any dimensions that lie as (B, M, ...); None for one that is
            not wanted.
    """

    kind: str
    formulas: tuple[Node, ...]
    k: int
    ending: str
    results: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]
