"""Reductions over the rows of all ranks: `all_pairs`, and what depends on rows of other ranks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from torchweft.core import private
from torchweft.core.collectives import Group, exchange, largest, total, world
from torchweft.core.operators.operator import compiling
from torchweft.core.operators.tensor_list import Rest, Tensors
from torchweft.distributed.agreement import agree, numbers_of_ranks
from torchweft.distributed.directory import sent_to
from torchweft.distributed.pairs import ring
from torchweft.distributed.pairs.masks import split
from torchweft.errors import BackendError, ShapeError, WeftError
from torchweft.reductions.call import Sizes
from torchweft.reductions.cluster.points import Ranges
from torchweft.reductions.cluster.sparsity import BlockSparsity, checked_ranges
from torchweft.reductions.engine import whole as rows_of_one
from torchweft.reductions.engine.found import gathered, values_at
from torchweft.reductions.engine.reduction import ReductionPlan

__all__ = ["all_pairs"]

F = TypeVar("F", bound=Callable[..., Any])
Search = Callable[[Tensor, Tensor, int], Tensor]

GATHERED_BYTES = 2**30
"""Points that `nearest` gathers on each rank: the ranks times those of the rank that has most.

Each rank then looks in the cells of the whole cloud once, not in those of every rank in turn; the
cells take some ten times as much memory.  More points travel round the ring.
"""

_calls: dict[str, int] = {}
"""The number of the last call of a ring, by the name of its group."""


@contextmanager
def all_pairs(group: Group | None = None) -> Iterator[None]:
    """out_i = R_j f(x_i, y_j, p) over the columns j of all ranks, for this rank's rows i.

    Inside, the variables of every reduction are this rank's rows: LazyTensor, Genred, the generic
    functions, KernelSolve, `nearest` and SamplesLoss, with i and j exchanged for reductions over i.
    Columns travel round a ring of the ranks, the next block while one is worked on.  Results are
    those of one process that has the rows of all ranks in their order, to rounding; indices count
    in it.  They have the same bits at every call.

    - Gradients of any order arrive at the rank that owns a row.  Each rank calls backward inside,
      where it runs in the thread of the call, so that every rank sends in the same order.  Outside,
      gradients of one result without create_graph have that order too; others, on GPUs, only under
      `torch.autograd.set_multithreading_enabled(False)`.
    - A parameter (Pm), which every rank holds, gets this rank's part of its gradient.
    - A result without rows, such as a SamplesLoss or a sum over j of an expression in j only, has
      a copy on each rank; backward on the copies gives the gradient of the one value once.
    - `ranges` are of this rank's rows i and of all columns j, in the order of the ranks, over
      either axis.  A rank passes blocks on in which it has no pairs.
    - A rank may have no rows, i or j.  Variables of i and of j are given as Vi and Vj, or with an
      axis: a tensor (1, 1, D) is a parameter.  Batch dimensions are the same on each rank.

    Args:
        group: the ranks; None: all.

    Returns:
        A context manager.

    Raises:
        ShapeError, WeftError: on every rank, before rows are sent, where ranks make different
            calls, or a call raises an error on some rank; `all_pairs` can still be used.
        ShapeError: torchrun started several processes, which have not made a process group.
        BackendError: under torch.compile; for multiscale transport.

    Cost: M · N_all pairs on this rank for its M rows, memory for its rows and two blocks of
    columns, W − 1 messages of these for W ranks; gradients in columns send rows and cotangents.
    `nearest` gathers the points of all ranks on each up to 1 GiB, and searches its M rows in them.

    Example:
        >>> import torch, torchweft
        >>> from torchweft.reductions import Vi, Vj
        >>> x = torch.tensor([[0.0], [1.0]])
        >>> with torchweft.distributed.all_pairs():  # one rank: its rows are all
        ...     (Vi(x) - Vj(x)).abs().sum(1)
        tensor([[1.],
                [1.]])
    """
    if world(group)[1] == 1:
        _check_begun()
        yield
        return
    ranks = Ranks(group)
    # torch numbers the nodes of each thread apart: on GPUs their order would differ between ranks
    with torch.autograd.set_multithreading_enabled(False), rows_of_one.using(ranks):
        try:
            yield
        except WeftError as error:
            ranks.tell(error)
            raise
    ranks.agree("the end of all_pairs", dict)


def _check_begun() -> None:
    """Raise where torchrun started several processes, and this one would take itself for all."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    begun = not distributed.is_available() or distributed.is_initialized()
    if size > 1 and not begun and distributed.is_torchelastic_launched():
        raise ShapeError(
            f"torchrun started {size} processes and this one is in no process group: all_pairs "
            "would reduce over its rows alone. Call torch.distributed.init_process_group first."
        )


class Ranks(rows_of_one.Whole):
    """Rows that are spread over the ranks of a group."""

    spread = True

    def __init__(self, group: Group | None) -> None:
        self.group = group
        self._told: WeftError | None = None

    def agree(self, name: str, describe: Callable[[], Mapping[str, Any]]) -> None:
        """Facts that are the same on every rank; an error of one is raised on all."""
        if compiling():
            raise BackendError(
                f"{name} is compiled inside all_pairs: reductions over ranks run eagerly. Call it "
                "without torch.compile, or compile what is around it."
            )
        try:
            agree(name, describe, self.group)
        except WeftError as error:
            self._told = error
            raise

    def tell(self, error: WeftError) -> None:
        """Raise this rank's error on all ranks, unless it came from there."""
        if error is not self._told:
            self.agree("an error", functools.partial(_raise, error))

    def told(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The function's result; an error of one rank is raised on all."""
        try:
            return function(*args, **options)
        except WeftError as error:
            self.tell(error)
            raise

    def keeping(self, function: F) -> F:
        """The function, over these ranks wherever it is called."""

        @functools.wraps(function)
        def called(*args: Any, **options: Any) -> Any:
            with rows_of_one.using(self):
                return function(*args, **options)

        return called  # type: ignore[return-value]

    def total(self, x: Tensor) -> Tensor:
        """See `core.collectives.total`."""
        return total(x, self.group)

    def largest(self, x: Tensor) -> Tensor:
        """See `core.collectives.largest`."""
        return largest(x, self.group)

    def rows(self, count: int) -> tuple[int, int]:
        """See `Whole`."""
        counts = [of for (of,) in numbers_of_ranks([count], self.group)]
        return sum(counts[: world(self.group)[0]]), sum(counts)

    def operators(
        self, plan: ReductionPlan, operands: Tensors, ranges: Ranges | BlockSparsity | None
    ) -> tuple[rows_of_one.Operators, list[Tensor]]:
        """A ring where there are rows and columns, else a total, else nothing of other ranks."""
        rows, columns = (any(cat == axis for _, cat in plan.cats) for axis in (0, 1))
        _, count_rows, count_columns = plan.layout.sizes

        def describe() -> Mapping[str, Any]:
            _check_mask(ranges, rows and columns)
            return _facts(plan, operands) | {"ranges": ranges is not None}

        self.agree(f"{plan.kind} over axis {plan.axis} in all_pairs", describe)
        if not columns:
            return rows_of_one.Operators(), []
        name = private.group_name(self.group)
        numbers = [count_rows, count_columns, _calls.get(name, 0) + 1]
        counts = numbers_of_ranks(numbers, self.group)
        of_columns = [count for _, count, _ in counts]
        # the largest: a rank that raised an error between may have made fewer calls
        call = _calls[name] = max(number for *_, number in counts)
        if not rows:
            return _SharedRow(self.group, of_columns, call), []
        tables = [] if ranges is None else self._tables(ranges, plan.axis, counts)
        return _Ring(self.group, of_columns, call), tables

    def _tables(
        self, ranges: Ranges | BlockSparsity, axis: int, counts: list[list[int]]
    ) -> list[Tensor]:
        """The tables of a ring's operator: `ranges` are of rows i, counts of the result's rows."""
        of_i, of_j = ([c[n] for c in counts] for n in ((0, 1) if axis == 1 else (1, 0)))
        checked: list[Ranges | BlockSparsity] = []

        def describe() -> Mapping[str, Any]:
            checked.append(checked_ranges(ranges, of_i[world(self.group)[0]], sum(of_j)))
            return {}

        self.agree("ranges in all_pairs", describe)
        halves = split(checked[0], of_j, self.group)
        first, second = halves if axis == 1 else halves[::-1]
        return [t for blocks in (*first, *second) for t in blocks]

    def nearest(self, search: Search, x: Tensor, y: Tensor, k: int) -> Tensor:
        """Among gathered points of all ranks, or block by block, see GATHERED_BYTES."""
        facts = {"dimensions": x.shape[1], "dtype": x.dtype, "device": x.device.type, "k": k}
        self.agree("nearest in all_pairs", lambda: facts)
        counts = [count for (count,) in numbers_of_ranks([len(y)], self.group)]
        size = len(counts)
        with rows_of_one.using(rows_of_one.Whole()):
            if size * max(counts) * x.shape[1] * x.element_size() > GATHERED_BYTES:
                return self._nearest_by_block(search, x, y, k, counts)
            every = exchange(y.repeat(size, 1), [len(y)] * size, counts, self.group)
            return search(x, every, k)

    def _nearest_by_block(
        self, search: Search, x: Tensor, y: Tensor, k: int, counts: list[int]
    ) -> Tensor:
        """The nearest in each rank's block of points, merged."""
        best = ring.Candidates((1, len(x), 1), k, x)
        for source, (block,) in ring.hops([y[None]], counts, self.group):
            if len(x) and counts[source]:
                index = search(x, block[0], k)
                near = block[0][index.clamp(min=0)]
                square = x.new_zeros(index.shape)
                for of_x, of_y in zip(x.unbind(1), near.unbind(2), strict=True):
                    square += (of_x.unsqueeze(1) - of_y).square()
                at = torch.where(index < 0, -1, index + sum(counts[:source]))
                best.add(square[None, ..., None], at[None, ..., None])
        return best.index()[0, ..., 0]


def _raise(error: WeftError) -> Mapping[str, Any]:
    raise error


def _check_mask(ranges: Ranges | BlockSparsity | None, of_pairs: bool) -> None:
    if ranges is None:
        return
    if not of_pairs:
        raise ShapeError(
            "ranges are given in all_pairs to a formula that varies with i or with j alone: masks "
            "over ranks are of rows and columns. Multiply it by a variable of the other axis."
        )
    if isinstance(ranges, BlockSparsity) and ranges.batch is not None:
        raise ShapeError(
            f"the mask has {ranges.batch[0]} entries: in all_pairs all entries of a batch share "
            "one. Call the reduction for each entry."
        )


def _facts(plan: ReductionPlan, operands: Tensors) -> dict[str, Any]:
    recording = torch.is_grad_enabled()
    return {
        "formula": plan.key,
        "k": plan.k,
        "accuracy": plan.how,
        "dtype": plan.dtype,
        "device": operands[0].device.type,
        "batch": plan.layout.batch,
        "dimensions": [(len(t), t.shape[2]) for t in operands],
        "requires_grad": [recording and t.requires_grad for t in operands],
    }


class _Ring(rows_of_one.Operators):
    """The operators over columns of all ranks."""

    def __init__(self, group: Group | None, counts: list[int], call: int) -> None:
        self._group, self._counts, self._call = group, counts, call

    def _spread(self, rest: Rest) -> Rest:
        return (*rest, private.group_name(self._group), self._call)

    def sums(self, tensors: Tensors, rest: Rest) -> Tensor:
        return ring.sums(tensors, self._spread(rest))

    def shifted_sums(self, tensors: Tensors, rest: Rest) -> tuple[Tensor, Tensor]:
        return ring.shifted_sums(tensors, self._spread(rest))

    def smallest(self, tensors: Tensors, k: int, rest: Rest) -> Tensor:
        return ring.smallest(tensors, k, self._spread(rest))

    def columns(self, sizes: Sizes) -> int:
        return sum(self._counts)

    def at(self, text: str, tensors: Mapping[int, Tensor], index: Tensor, how: str) -> Tensor:
        """The formula of this rank's rows, with columns fetched from their owners."""
        return values_at(text, tensors, index, how, self._fetched)

    def _fetched(self, value: Tensor, index: Tensor) -> Tensor:
        """Rows of all ranks at global columns: each is sent once, and its gradient back."""
        rank, batch = world(self._group)[0], len(value)
        ends = torch.tensor(self._counts, device=index.device).cumsum(0)
        columns, before = sum(self._counts), sum(self._counts[:rank])
        if batch > 1:
            index = index + torch.arange(batch, device=index.device)[:, None] * columns
        wanted, place = torch.unique(index, return_inverse=True)
        owner, order = torch.searchsorted(ends, wanted % columns, right=True).sort(stable=True)
        asked = sent_to(owner, wanted[order], self._group)
        rows = asked.rows // columns * self._counts[rank] + asked.rows % columns - before
        flat = value.flatten(0, 1)
        found = exchange(flat[rows], asked.receive, asked.send, self._group)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return found[back[place]]


class _SharedRow(_Ring):
    """The operators of one row that all ranks have a copy of: totals of their columns."""

    def sums(self, tensors: Tensors, rest: Rest) -> Tensor:
        return total(rows_of_one.Operators().sums(tensors, rest), self._group)

    def shifted_sums(self, tensors: Tensors, rest: Rest) -> tuple[Tensor, Tensor]:
        m, s = rows_of_one.Operators().shifted_sums(tensors, rest)
        top = largest(m, self._group)
        shift = torch.where(top.isfinite(), top, 0)
        return top, total(s * (m.detach() - shift).exp(), self._group)

    def at(self, text: str, tensors: Mapping[int, Tensor], index: Tensor, how: str) -> Tensor:
        """The formula at the columns of each rank, and zeros for those of others, added."""
        rank = world(self._group)[0]
        here, local = self._counts[rank], index - sum(self._counts[:rank])
        own = (local >= 0) & (local < here)

        def chosen(value: Tensor, columns: Tensor) -> Tensor:
            padded = torch.nn.functional.pad(value, (0, 0, 0, 1))  # for ranks without columns
            return gathered(padded, columns)

        found = values_at(text, tensors, local.where(own, here), how, chosen)
        return total(found.where(own, 0), self._group)
