"""What every executor is told beside a formula: sizes, blocks of pairs, and how to add up."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Blocks", "Options", "Sizes"]


class Sizes(NamedTuple):
    """B entries of a batch, M rows of the result, N columns that are reduced over."""

    batch: int
    rows: int
    columns: int


class Blocks(NamedTuple):
    """Which pairs there are: blocks of rows, each with its intervals of columns.

    Row block c is starts[c] ≤ i < ends[c]; it reduces over the intervals of numbers indptr[c] to
    indptr[c + 1]; interval q is j_starts[q] ≤ j < j_ends[q].  All are int64.  Rows of no block have
    no pairs; a column that two intervals of a block hold counts twice.
    """

    starts: Tensor
    ends: Tensor
    indptr: Tensor
    j_starts: Tensor
    j_ends: Tensor


class Options(NamedTuple):
    """How numbers are computed.

    Args:
        precision: of products on tensor cores, "ieee", "tf32x3", "tf32" or "bf16"; None takes
            tensor cores only where a bound shows the error of float32.
        accumulate: "auto", "kahan" or "float64".
    """

    precision: str | None = None
    accumulate: str = "auto"
