"""What ranks must agree on, compared before anything is sent: an error of one is told on all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from torchweft.core.collectives import Group, world
from torchweft.errors import ShapeError, WeftError

__all__ = ["agree", "numbers_of_ranks"]

Facts = Mapping[str, Any]


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
    facts: Facts = {}
    error: WeftError | None = None
    try:
        facts = describe()
    except WeftError as raised:
        error = raised
    rank, size = world(group)
    if size == 1:
        if error is not None:
            raise error
        return facts
    described = {key: repr(value) for key, value in facts.items()}
    if _same((name, described, error and rank), group):
        return facts
    told: list[Any] = [None] * size
    own = None if error is None else (type(error), str(error))
    distributed.all_gather_object(told, (own, name, described), group)
    raise _told(name, told) from error


def numbers_of_ranks(numbers: Sequence[int], group: Group | None = None) -> list[list[int]]:
    """Some integers of each rank, by rank.  Every rank of the group must call it."""
    rank, size = world(group)
    if size == 1:
        return [list(numbers)]
    found = torch.zeros(size, len(numbers), dtype=torch.int64, device=_device(group))
    found[rank] = torch.tensor(numbers)
    distributed.all_reduce(found, group=group)
    by_rank: list[list[int]] = found.tolist()
    return by_rank


def _same(said: object, group: Group | None) -> bool:
    """Whether every rank said the same."""
    digest = hashlib.blake2b(repr(said).encode(), digest_size=7).digest()
    number = int.from_bytes(digest, "big")
    extremes = torch.tensor([number, -number], device=_device(group))
    distributed.all_reduce(extremes, distributed.ReduceOp.MAX, group)
    highest, lowest = extremes.tolist()
    return bool(highest == -lowest)


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
        f"{name}: {key} differs between the ranks, {_differing(values)}: it must be the same on "
        f"every rank. Call it with the same {key} everywhere."
    )


def _differing(values: Mapping[int, str]) -> str:
    """The first rank's value and the first that differs from it."""
    other = next(rank for rank in values if values[rank] != values[0])
    return f"rank 0 has {values[0]} and rank {other} has {values[other]}"


def _device(group: Group | None) -> torch.device:
    """Where numbers of hosts are sent from: host memory, or the GPU if the group has NCCL alone."""
    speaks = distributed.get_backend_config(group)
    return torch.device("cpu") if "cpu" in speaks else torch.device("cuda")
