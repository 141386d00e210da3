"""What ranks must agree on, compared before anything is sent; an error of one is raised on all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed

from torchweft.core.collectives import Group, host_device, world
from torchweft.errors import ShapeError, WeftError

__all__ = ["Calls", "Made", "agree", "numbers_of_ranks"]

Facts = Mapping[str, Any]

MOST_CALLS = 10_000
"""Calls that are kept: of a scene on which a network is trained for long there are ever more."""


class _Said(NamedTuple):
    """What this rank says of a call."""

    name: str
    facts: Facts
    error: WeftError | None

    @property
    def described(self) -> dict[str, str]:
        return {key: repr(value) for key, value in self.facts.items()}


def _said(name: str, describe: Callable[[], Facts]) -> _Said:
    try:
        return _Said(name, describe(), None)
    except WeftError as raised:
        return _Said(name, {}, raised)


def agree(name: str, describe: Callable[[], Facts], group: Group | None = None) -> Facts:
    """Facts that are the same on every rank.  Every rank of the group must call it.

    Args:
        name: of the call, for messages.
        describe: checks this rank's arguments and returns what must be equal on every rank, by
            name; values are compared by their `repr`.
        group: the ranks; None: all.

    Returns:
        What `describe` returned.

    Raises:
        WeftError: on every rank, if `describe` raised one on some rank (its kind, and which
            rank), or if ranks differ (a ShapeError).  Nothing was sent, and the group stays usable.

    Cost: one all_reduce of two numbers between the hosts, and nothing with one rank.  A group that
    has NCCL alone sends them between GPUs, for which the host waits: that of "cpu:gloo,cuda:nccl"
    has gloo for host memory too.
    """
    said = _said(name, describe)
    _Comparison(said, None, group).wait()
    return said.facts


class _Comparison:
    """What ranks say, on its way to the others.  Every rank makes it, and waits for it.

    Args:
        said: what must be the same, without an error.
        beside: what may differ.
        group: the ranks; None: all.
    """

    def __init__(self, said: _Said, beside: object, group: Group | None) -> None:
        self._said, self._group = said, group
        rank, self._size = world(group)
        self._same: bool | None = None
        if self._size > 1:
            every = said.name, said.described, said.error and rank, beside
            digest = hashlib.blake2b(repr(every).encode(), digest_size=7).digest()
            number = int.from_bytes(digest, "big")
            self._extremes = torch.tensor([number, -number], device=host_device(group))
            largest = distributed.ReduceOp.MAX
            self._work = distributed.all_reduce(self._extremes, largest, group, async_op=True)

    def wait(self) -> bool:
        """Whether all said the same, `beside` included; raises where `said` differs or failed."""
        if self._same is None:
            self._same = False  # a comparison that raised returns this from then on
            self._same = self._compared()
        return self._same

    def _compared(self) -> bool:
        said = self._said
        if self._size == 1:
            if said.error is not None:
                raise said.error
            return True
        self._work.wait()
        del self._work  # which nobody can copy
        highest, lowest = self._extremes.tolist()
        if highest == -lowest:
            return True
        told: list[Any] = [None] * self._size
        own = None if said.error is None else (type(said.error), str(said.error))
        distributed.all_gather_object(told, (own, said.name, said.described), self._group)
        if own is None and all(others == told[0] for others in told):
            return False
        raise _told(said.name, told) from said.error


class Made(NamedTuple):
    """A call that was made, and its text, which is made once for calls that are repeated."""

    name: str
    facts: Facts
    text: str


class Calls:
    """Calls inside one call of all ranks: of a halo inside a model's, of layers on one scene.

    Each is compared, as by `agree`, unless every rank has made the same calls in such a call
    before: then one comparison at the start stands for all, and the host waits for it when the
    first of them is made.  Where a rank makes another call than before, it is compared, and so are
    those behind it.

    Args:
        name: of the whole call, for messages.
        describe: of the whole call, as in `agree`.
        group: the ranks; None: all.
        before: `made` of an earlier call of this kind, if there was one.  Ranks may differ.

    Raises:
        WeftError: on this rank, as in `agree`, if its arguments do not fit.  On the others `wait`
            raises it, or the first call inside.
    """

    def __init__(
        self,
        name: str,
        describe: Callable[[], Facts],
        group: Group | None = None,
        before: Sequence[Made] = (),
    ) -> None:
        said = _said(name, describe)
        self.made: list[Made] = []
        self._group, self._before = group, tuple(before)
        self._whole = _Comparison(said, [made.text for made in self._before], group)
        self._as_before = True
        if said.error is not None:
            self.wait()

    def wait(self) -> None:
        """Wait for the others, who also began the whole call."""
        self._as_before = self._whole.wait() and self._as_before

    @property
    def foreseen(self) -> bool:
        """Whether every rank has made the same calls before, and this one makes them again."""
        self.wait()
        return self._as_before

    def compare(self, name: str, describe: Callable[[], Facts], always: bool = False) -> None:
        """Compare the next call inside, unless every rank is known to make it.

        Args:
            name: of the call.
            describe: of the call, as in `agree`.
            always: whether to compare it all the same.
        """
        self.wait()
        said, place = _said(name, describe), len(self.made)
        before = self._before[place] if place < len(self._before) else None
        if before is not None and said.error is None and before[:2] == said[:2]:
            made = before
        else:
            made, self._as_before = Made(name, said.facts, repr((name, said.described))), False
        if place < MOST_CALLS:
            self.made.append(made)
        if always or not self._as_before:
            expected, self._as_before = self._as_before, False  # of one that raises: on all ranks
            _Comparison(said, None, self._group).wait()
            self._as_before = expected


def numbers_of_ranks(numbers: Sequence[int], group: Group | None = None) -> list[list[int]]:
    """Some integers of each rank, by rank.  Every rank of the group must call it."""
    rank, size = world(group)
    if size == 1:
        return [list(numbers)]
    found = torch.zeros(size, len(numbers), dtype=torch.int64, device=host_device(group))
    found[rank] = torch.tensor(numbers, device="cpu")
    distributed.all_reduce(found, group=group)
    by_rank: list[list[int]] = found.tolist()
    return by_rank


def _told(name: str, told: list[Any]) -> WeftError:
    errors = {rank: own for rank, (own, _, _) in enumerate(told) if own is not None}
    if errors:
        kind = next(iter(errors.values()))[0]
        texts = [f"rank {rank}: {text}" for rank, (_, text) in errors.items()]
        more = f" (and {len(texts) - 3} ranks more)" if len(texts) > 3 else ""
        error: WeftError = kind("\n".join(texts[:3]) + more)
        return error
    names = {rank: called for rank, (_, called, _) in enumerate(told)}
    if len(set(names.values())) > 1:
        return ShapeError(
            f"{_differing(names)}: all ranks must make the same calls in the same order. "
            f"Call {name} on every rank."
        )
    facts = [described for _, _, described in told]
    keys = sorted(set().union(*facts))
    key = next(key for key in keys if len({str(fact.get(key)) for fact in facts}) > 1)
    values = {rank: str(fact.get(key)) for rank, fact in enumerate(facts)}
    return ShapeError(
        f"{name}: the ranks differ in {key}, {_differing(values)}: every rank must give the same. "
        f"Call it with the same {key} everywhere."
    )


def _differing(values: Mapping[int, str]) -> str:
    """The first rank's value and the first that differs from it."""
    other = next(rank for rank in values if values[rank] != values[0])
    return f"rank 0 has {values[0]} and rank {other} has {values[other]}"
