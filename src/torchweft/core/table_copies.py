"""Private copies of index tables: what is cached for a table is never stale.

The content of a tensor can change while its version and address stay the same: through a NumPy
array or a storage that it shares, through `.data`, or by a CUDA, Triton or Warp kernel that writes
to its address.  So plans, graphs and masks are cached for a private copy of the caller's table, and
each public call compares the table with its copy.  A table that has changed gets a new copy, for
which plans are built anew.

On a GPU the host waits for the result of the comparison.  `constant` makes a copy that the caller
passes instead of the table, and that is not compared; nor are views of it, as rows of edge_index,
whose copies are found by their place in it and its version.

In a function of `torchweft.capture` a table has another content at each replay.  There a copy is
part of the run, is read by no host (`unreadable`), and lives as long as the run.  A CUDA graph that
is recorded otherwise uses the plans of the tables that the last call before it had.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core import recorded
from torchweft.core.operators.operator import (
    below_transforms,
    compiling,
    transformed,
    unwatched,
    watched,
)
from torchweft.core.tables import MOST_VALUES
from torchweft.errors import DTypeError

__all__ = [
    "constant",
    "copies_of",
    "forget",
    "is_constant",
    "mark_constant",
    "place_of",
    "unreadable",
    "with_views",
]

_MARK = "_torchweft_constant"


class _Copy(NamedTuple):
    table: Tensor
    source: weakref.ref[Tensor]  # drops the copy with the caller's tensor
    constant: bool  # of a view of a constant, which is not compared


_copies: dict[Hashable, _Copy] = {}


def constant(table: Tensor) -> Tensor:
    """A copy of an index table that never changes, to be passed instead of the table.

    A call compares a table with the copy that its cached plan was built from; on a GPU it waits for
    the result. A constant is not compared, nor are its views: `src, dst = constant(edge_index)`.

    Args:
        table: integers of any shape, on any device.

    Returns:
        The copy, or the table itself if it is a constant. In-place operations of torch on it are
        noticed by its version; nothing else may write to it.

    Raises:
        DTypeError: the table is not a tensor of integers.

    Example:
        >>> import torch, torchweft
        >>> index = torchweft.constant(torch.tensor([0, 2, 2]))
        >>> x = torch.eye(3)
        >>> torchweft.products.indexed_mul(x, x, index1=index).sum(-1)
        tensor([1., 0., 1.])
    """
    if not isinstance(table, Tensor) or table.is_floating_point() or table.is_complex():
        given = table.dtype if isinstance(table, Tensor) else type(table).__name__
        raise DTypeError(
            f"table is {given}: a constant is an index table, a tensor of integers. Pass one, "
            "e.g. torch.tensor([0, 2, 2])."
        )
    return table if is_constant(table) else _private(table)


def mark_constant(*tables: Tensor | None) -> None:
    """Mark tensors as constant, so that they are not compared; callers must hold no alias."""
    for table in tables:
        if table is not None:
            setattr(table, _MARK, True)


def is_constant(table: Tensor) -> bool:
    """Whether a tensor was made by `constant` or marked."""
    return hasattr(table, _MARK)


def copies_of(tables: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The private copies of a caller's tables: the same objects as long as the content is the same.

    Constants are returned as they are, and so are traced tensors and tensor subclasses.
    """
    if compiling():
        return tuple(tables)
    if recorded.Current.run is not None:
        return tuple(_found(*tables))
    found: list[Tensor | None] = []
    for table in tables:  # the usual call: on the CPU, and nothing has changed
        if table is None or hasattr(table, _MARK):
            found.append(table)
            continue
        kept = None if watched() or transformed() else _copies.get(_place(table))
        if kept is None or not (
            kept.constant or (table.is_cpu and torch.equal(table, kept.table))  # noqa: TID251
        ):
            return tuple(_found(*tables))
        found.append(kept.table)
    return tuple(found)


def with_views(run: recorded.Run, *tables: Tensor) -> list[Tensor]:
    """In a run, tables that view a constant as constants of their own; others as they are."""
    return [_of_run(run, t, _place(t)) if _is_view(t) and unwatched(t) else t for t in tables]


def unreadable(*tables: Tensor | None) -> bool:
    """Whether a run is under way in which the content of one of the tables may not be read."""
    run = recorded.Current.run
    if run is None:
        return False
    own = {id(copy) for copy, _ in run.copies.values()}
    return any(t is not None and (not is_constant(t) or id(t) in own) for t in tables)


def forget(*tables: Tensor) -> None:
    """Drop the private copies of tables, with every plan that is cached for them.

    Calls notice by themselves that a table has changed; this frees memory.

    Args:
        tables: as they were given to calls; without any, everything is dropped.

    Example:
        >>> import torch
        >>> from torchweft import products
        >>> index = torch.tensor([1, 0])
        >>> products.segment_sum(torch.ones(2), index).tolist()
        [1.0, 1.0]
        >>> products.forget(index)
    """
    for place in [_place(t) for t in tables] if tables else list(_copies):
        _copies.pop(place, None)


@below_transforms
def _found(*tables: Tensor | None) -> list[Tensor | None]:
    places = [
        None if t is None or hasattr(t, _MARK) or not unwatched(t) else _place(t) for t in tables
    ]
    if (run := recorded.Current.run) is not None:
        every = zip(tables, places, strict=True)
        return [t if t is None or p is None else _of_run(run, t, p) for t, p in every]
    pairs = {
        place: (table, kept.table)
        for place, table in zip(places, tables, strict=True)
        if place is not None and (kept := _copies.get(place)) and not kept.constant
    }
    if not _are_equal([*pairs.values()]):
        for place, pair in pairs.items():
            if not _are_equal([pair]):
                _copies.pop(place, None)
    return [
        t if t is None or p is None else _kept(t, p) for t, p in zip(tables, places, strict=True)
    ]


def _of_run(run: recorded.Run, table: Tensor, place: Hashable) -> Tensor:
    """The copy of a table in its present version; the run holds the table, so no id returns.

    Of a view of a constant it is the one of other calls, unless it would be made in a recording.
    """
    if _is_view(table) and (place in _copies or not run.recording):
        return recorded.keep(_kept(table, place))
    key = place, recorded.version(table)
    if key not in run.copies:
        run.copies[key] = _private(table), table
    copy: Tensor = run.copies[key][0]
    return copy


def place_of(table: Tensor) -> tuple[Tensor, Hashable]:
    """The tensor whose memory a table views, and where; equal views have one place."""
    base = table._base
    owner = table if base is None else base
    return owner, (table.storage_offset(), table.shape, table.stride(), table.dtype)


def _place(table: Tensor) -> Hashable:
    """The key of a table."""
    owner, place = place_of(table)
    return id(owner), place, recorded.version(owner) if hasattr(owner, _MARK) else 0


def _is_view(table: Tensor) -> bool:
    """Whether it views a constant."""
    return table._base is not None and is_constant(table._base)


def _are_equal(pairs: list[Any]) -> bool:
    """Whether tables equal their copies; on a GPU one number is read, or none while recording."""
    if not pairs:
        return True
    table = pairs[0][0]
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    if table.device.type == "cpu" or len(pairs) == 1:
        return all(torch.equal(t, c) for t, c in pairs)  # noqa: TID251 - copies
    return bool(torch.stack([(t == c).all() for t, c in pairs]).all())


def _kept(table: Tensor, place: Hashable) -> Tensor:
    found = _copies.get(place)
    if found is None:
        if len(_copies) >= MOST_VALUES:
            _copies.pop(next(iter(_copies)), None)  # the oldest
        owner = table if table._base is None else table._base
        copies = _copies  # at exit, globals are gone before the last tables
        gone = weakref.ref(owner, lambda _: copies.pop(place, None))
        found = _copies[place] = _Copy(_private(table), gone, _is_view(table))
    return found.table


def _private(table: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        copy = table.detach().clone(memory_format=torch.contiguous_format)
    mark_constant(copy)
    return copy
