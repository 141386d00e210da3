"""Which rank owns a row, found without any rank knowing all of them.

Row i is entered at rank i mod W by its owner, and looked up there: each rank holds a Wth of the
directory, and two exchanges answer all its questions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.collectives import Group, exchange, world
from torchweft.errors import DTypeError, IndexRangeError, ShapeError

__all__ = ["Owners", "Sent", "find_owners", "row_numbers", "sent_to"]


class Owners(NamedTuple):
    """Owners of the rows that this rank asked for."""

    rank: Tensor
    """(h,) the owner, −1 where there is none."""
    row: Tensor
    """(h,) the row's place at its owner, −1 where there is none."""
    claimed_twice: int | None
    """A row with two owners, among those that this rank keeps the directory of."""


class Sent(NamedTuple):
    """Rows that arrived, and the numbers of rows sent to and received from each rank."""

    rows: Tensor
    send: list[int]
    receive: list[int]

    @property
    def sender(self) -> Tensor:
        """(m,) the rank that each row comes from."""
        counts = torch.tensor(self.receive, device=self.rows.device)
        return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)


def sent_to(rank: Tensor, rows: Tensor, group: Group | None = None) -> Sent:
    """Rows sent each to its rank.

    Args:
        rank: (n,) where each row goes, in ascending order.
        rows: (n, ...).
        group: the ranks; None: all.

    Returns:
        The rows that arrived, (m, ...), by the rank that sent them.
    """
    size = world(group)[1]
    counts = torch.bincount(rank, minlength=size)
    arriving = exchange(counts, [1] * size, [1] * size, group)
    send, receive = counts.tolist(), arriving.tolist()
    return Sent(exchange(rows, send, receive, group), send, receive)


def find_owners(own: Tensor, needed: Tensor, group: Group | None = None) -> Owners:
    """The owners of needed rows.

    Args:
        own: (n,) int64, numbers of this rank's rows.
        needed: (h,) int64, numbers of rows of others.
        group: the ranks; None: all.
    """
    size = world(group)[1]
    keys, entries, claimed_twice = _directory(own, group)
    where, order = (needed % size).sort(stable=True)
    asked = sent_to(where, needed[order], group)
    if len(keys):
        place = torch.searchsorted(keys, asked.rows).clamp_(max=len(keys) - 1)
        answer = torch.where((keys[place] == asked.rows)[:, None], entries[place], -1)
    else:
        answer = asked.rows.new_full((len(asked.rows), 2), -1)
    found = torch.empty(len(needed), 2, dtype=torch.int64, device=needed.device)
    found[order] = exchange(answer, asked.receive, asked.send, group)
    return Owners(found[:, 0], found[:, 1], claimed_twice)


def _directory(own: Tensor, group: Group | None) -> tuple[Tensor, Tensor, int | None]:
    """(rows in ascending order, owner and place of each, a row entered twice) of this rank."""
    size = world(group)[1]
    where, order = (own % size).sort(stable=True)
    entered = sent_to(where, torch.stack([own[order], order], 1), group)
    keys, order = entered.rows[:, 0].sort(stable=True)
    twice = keys[1:][keys[1:] == keys[:-1]]
    entries = torch.stack([entered.sender, entered.rows[:, 1]], 1)[order]
    return keys, entries, int(twice[0]) if len(twice) else None


def row_numbers(name: str, table: Tensor) -> Tensor:
    """A table of rows as int64, checked; `name` is for messages."""
    if table.dim() != 1:
        raise ShapeError(
            f"{name} is {tuple(table.shape)}: it must have one dimension. Flatten {name}."
        )
    if table.dtype not in (torch.int64, torch.int32) and table.numel():
        raise DTypeError(
            f"{name} holds {table.dtype} values: numbers of rows must be int32 or int64. "
            f"Convert {name} to integers."
        )
    if table.numel() and int(table.min()) < 0:
        raise IndexRangeError(
            f"{name} holds {int(table.min())}: numbers of rows must be 0 or more. Correct {name}."
        )
    return table.long()
