"""Where the rows of reductions stand: all in this process, or spread over several.

Reductions, solvers and losses ask `whole()` for what depends on rows of other processes.  A `Whole`
is of one process; `torchweft.distributed.all_pairs` puts another in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from torchweft.core.operators.operator import compiling
from torchweft.core.operators.tensor_list import Rest, Tensors
from torchweft.reductions.call import Sizes
from torchweft.reductions.cluster.points import Ranges
from torchweft.reductions.cluster.sparsity import BlockSparsity, blocks_of
from torchweft.reductions.engine import operator
from torchweft.reductions.engine.found import values_at

if TYPE_CHECKING:
    from torchweft.reductions.engine.reduction import ReductionPlan

__all__ = ["Operators", "Whole", "current", "together", "using", "whole"]

F = TypeVar("F", bound=Callable[..., Any])


class Operators:
    """The operators of a reduction whose columns all stand here."""

    def sums(self, tensors: Tensors, rest: Rest) -> Tensor:
        """See `operator.sums`."""
        return operator.sums(tensors, rest)

    def shifted_sums(self, tensors: Tensors, rest: Rest) -> tuple[Tensor, Tensor]:
        """See `operator.shifted_sums`."""
        return operator.shifted_sums(tensors, rest)

    def smallest(self, tensors: Tensors, k: int, rest: Rest) -> Tensor:
        """See `operator.smallest`."""
        return operator.smallest(tensors, k, rest)

    def columns(self, sizes: Sizes) -> int:
        """How many columns there are."""
        return sizes.columns

    def at(self, text: str, tensors: Mapping[int, Tensor], index: Tensor, how: str) -> Tensor:
        """(B, M, k, D): a formula at the columns `index`, see `values_at`."""
        return values_at(text, tensors, index, how)


_HERE = Operators()


class Whole:
    """Rows of one process, which are all rows."""

    spread = False
    """Whether other processes have rows too."""

    def operators(
        self, plan: ReductionPlan, operands: Tensors, ranges: Ranges | BlockSparsity | None
    ) -> tuple[Operators, list[Tensor]]:
        """What reduces the operands of a call, and the tables of its mask."""
        return _HERE, [] if ranges is None else _tables(ranges, plan.axis)

    def nearest(
        self, search: Callable[[Tensor, Tensor, int], Tensor], x: Tensor, y: Tensor, k: int
    ) -> Tensor:
        """(M, k) int64, −1 for none: `search(x, y, k)` among all rows of y."""
        return search(x, y, k)

    def agree(self, name: str, describe: Callable[[], Mapping[str, Any]]) -> None:
        """Check arguments, by `describe`; what it returns must be equal in every process."""
        describe()

    def told(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The function's result; an error of one process is raised in all."""
        return function(*args, **options)

    def keeping(self, function: F) -> F:
        """The function, with `whole()` as it is now whenever it is called."""
        return function

    def total(self, x: Tensor) -> Tensor:
        """Σ over the processes of what each has for its rows, a copy in each."""
        return x

    def largest(self, x: Tensor) -> Tensor:
        """The maximum over the processes; a constant."""
        return x

    def number(self, count: int) -> int:
        """Σ over the processes of a number of rows."""
        return self.rows(count)[1]

    def rows(self, count: int) -> tuple[int, int]:
        """The number of this process's first row among those of all, and how many these are."""
        return 0, count


current = Whole()  # a global, on which torch.compile sets a guard


def whole() -> Whole:
    """Where the rows of a call stand."""
    return current


@contextmanager
def using(there: Whole) -> Iterator[None]:
    """Inside, `whole()` is `there`, in every thread."""
    global current
    before, current = current, there
    try:
        yield
    finally:
        current = before


def together(function: F) -> F:
    """The function as one that all processes call: an error of one is raised in all."""

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        return whole().told(function, *args, **options)

    return called  # type: ignore[return-value]


def _tables(ranges: Ranges | BlockSparsity, axis: int) -> list[Tensor]:
    """The blocks of the result's rows, then the blocks of its columns."""
    if compiling():
        arrays = ranges.ranges if isinstance(ranges, BlockSparsity) else ranges
        halves = (arrays[:3], arrays[3:]) if axis == 1 else (arrays[3:], arrays[:3])
        return [t for half in halves for t in torch.ops.torchweft.reductions_blocks(*half)]
    return [*blocks_of(ranges, axis), *blocks_of(ranges, 1 - axis)]
