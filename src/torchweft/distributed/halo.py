"""Rows of other ranks as one more index table: which rows I own, read, and am read for.

    y = [x, H x]        H: rows that other ranks own, in the order in which this rank needs them
    z = x_own + Hᵀ x_halo      the transpose, which is the gradient: rows are added at their owner

A halo is a plan: it is built once and moves rows with one all_to_all a direction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from torchweft.core import private
from torchweft.core.collectives import Group, Pending, begin, exchange, finish, trailing, world
from torchweft.core.operators.operator import Call, Operator
from torchweft.distributed.agreement import Calls, agree
from torchweft.distributed.directory import Owners, find_owners, row_numbers
from torchweft.errors import DeviceError, DTypeError, IndexRangeError, ShapeError

__all__ = ["Halo", "HaloRows", "calls_inside", "planned_halo"]


class HaloRows(NamedTuple):
    """Rows that are under way, between `begin` and `finish`."""

    own: Tensor
    arriving: Tensor
    pending: Pending | None


class Halo:
    """Which rows of a distributed tensor this rank owns, and which it reads of others.

    Every rank of the group builds it, and calls it, together.  Gradients of any order arrive at the
    owner of a row, by exchanges in the order of the backward pass, which must be the same on every
    rank: on GPUs, take gradients with create_graph, or of several results, under
    `torch.autograd.set_multithreading_enabled(False)`, as `potential` does.

    Args:
        global_ids: (n,) integers, the numbers of the rows that this rank owns.
        needed: (h,) integers, the numbers of the rows that it reads, each once, owned by others.
        group: the ranks; None: all.

    Raises:
        DTypeError, ShapeError, IndexRangeError, DeviceError: on every rank, where a table of some
            rank cannot serve: needed rows that are repeated, this rank's own, or nobody's; rows
            with two owners.

    Memory and cost: O(n + h) numbers on this rank; six exchanges of tables.

    Example:
        >>> import torch, torchweft
        >>> halo = torchweft.distributed.Halo(torch.tensor([7, 3]), torch.tensor([]))  # one rank
        >>> halo(torch.tensor([[1.0], [2.0]]))
        tensor([[1.],
                [2.]])
    """

    _order: Tensor | None
    """The halo's rows in the order of their owners; None: they are in it."""
    _arrived: Tensor | None
    """Where each row of the halo is among those that arrive; None: in its place."""

    def __init__(self, global_ids: Tensor, needed: Tensor, group: Group | None = None) -> None:
        tables: list[Tensor] = []

        def describe() -> Mapping[str, Any]:
            tables.extend(
                row_numbers(name, t) for name, t in (("global_ids", global_ids), ("needed", needed))
            )
            if tables[0].device != tables[1].device:
                raise DeviceError(
                    f"global_ids is on {tables[0].device} and needed on {tables[1].device}: both "
                    "must be on one device. Move needed to the device of global_ids."
                )
            return {"device": tables[0].device.type}

        agree("Halo", describe, group)
        own, needed = tables
        owners = find_owners(own, needed, group)
        agree("Halo", lambda: _checked(own, needed, owners), group)
        size = world(group)[1]
        order = owners.rank.argsort(stable=True)
        receive: list[int] = torch.bincount(owners.rank, minlength=size).tolist()
        counts = torch.tensor(receive, device=needed.device)
        send: list[int] = exchange(counts, [1] * size, [1] * size, group).tolist()
        wanted = exchange(owners.row[order], receive, send, group)
        self._plan(len(own), wanted, send, receive, group)
        arrived = torch.empty_like(order)
        arrived[order] = torch.arange(len(order), device=order.device)
        if not bool((order[1:] > order[:-1]).all()):
            self._order, self._arrived = order, arrived

    def _plan(
        self,
        num_rows: int,
        send_rows: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        group: Group | None,
    ) -> None:
        """What `planned_halo` takes; the order of the halo's rows is that of their owners."""
        self.group, self.send, self.receive = group, list(send), list(receive)
        self.num_rows, self.num_halo, self.send_rows = num_rows, sum(receive), send_rows
        self._order = self._arrived = None
        self._calls: Calls | None = None

    @property
    def size(self) -> int:
        """Number of rows, own and halo."""
        return self.num_rows + self.num_halo

    def __call__(self, x: Tensor) -> Tensor:
        """Own rows, then the halo's.

        Args:
            x: (n, ...), this rank's rows in the order of `global_ids`, of any dtype that the
                group's backend sends: torch's gloo and NCCL do not send int16.

        Returns:
            (n + h, ...) in x's dtype.  Differentiable to any order; the gradient of a row arrives
            at its owner, added in the order of the ranks: the same bits at every call.

        Raises:
            ShapeError, DTypeError: on every rank, before anything is sent, where the rows of some
                rank do not fit or differ from the others' in shape, dtype or device.
        """
        if self._alone():
            return self._own(x)
        self._agree("halo(x)", x, self.num_rows)
        found = self._exchanged(x, False)
        if self._arrived is None:
            return found
        own, arrived = found.tensor_split((self.num_rows,))
        return self._joined(own, arrived)

    def begin(self, x: Tensor) -> HaloRows:
        """Send rows and return at once; `finish` waits for them.  Between, work on own rows.

        Gradients take the same way back: they are under way while the work between is
        differentiated.
        """
        if self._alone():
            return HaloRows(self._own(x), x, None)
        self._agree("halo.begin(x)", x, self.num_rows)
        pending = Pending(self.send, self.receive, self.group)
        sent = _sent(x, self.send_rows, False, self.num_rows, self.send)
        return HaloRows(x, begin(pending, sent), pending)

    def finish(self, rows: HaloRows) -> Tensor:
        """(n + h, ...): what `halo(x)` returns, of the rows that `begin` sent."""
        if rows.pending is None:
            return rows.own
        return self._joined(rows.own, finish(rows.pending, rows.arriving))

    def add(self, y: Tensor) -> Tensor:
        """The transpose: what was computed for rows of others is added at their owners.

        Args:
            y: (n + h, ...), of own rows and of the halo's; floating point or complex.

        Returns:
            (n, ...), own rows plus the parts of other ranks, in y's dtype, added in the order of
            the ranks.  Differentiable to any order, repeatable to the bit.
        """
        if self._alone():
            return self._own(y)
        self._agree("halo.add(y)", y, self.size, floating=True)
        if self._order is not None:
            y = torch.cat([y[: self.num_rows], y[self.num_rows :][self._order]])
        return self._exchanged(y, True)

    def _exchanged(self, rows: Tensor, back: bool) -> Tensor:
        counts = self.num_rows, self.send, self.receive
        return _halo_exchange(rows, self.send_rows, back, *counts, private.group_name(self.group))

    def _alone(self) -> bool:
        return world(self.group)[1] == 1

    def _own(self, x: Tensor) -> Tensor:
        _check_rows("x", x, self.num_rows)
        return x

    def _agree(self, name: str, x: Tensor, rows: int, floating: bool = False) -> None:
        """Compare the call between the ranks; compiled and captured calls are not compared."""
        on_gpu = isinstance(x, Tensor) and x.is_cuda
        if torch.compiler.is_compiling() or (on_gpu and torch.cuda.is_current_stream_capturing()):
            return

        def describe() -> Mapping[str, Any]:
            _check_rows(name, x, rows)
            if floating and not (x.dtype.is_floating_point or x.dtype.is_complex):
                raise DTypeError(
                    f"{name}: the rows are {x.dtype}: sums need floating point. Convert them."
                )
            recorded = torch.is_grad_enabled() and x.requires_grad
            return {
                "shape of a row": tuple(x.shape[1:]),
                "dtype": x.dtype,
                "device": x.device.type,
                "requires_grad": recorded,
            }

        if self._calls is None:
            agree(name, describe, self.group)
        else:
            self._calls.compare(name, describe)

    def _joined(self, x: Tensor, arrived: Tensor) -> Tensor:
        arrived = arrived if self._arrived is None else arrived[self._arrived]
        # a gradient that torch gives to a tensor (0,) is no function of the others
        return torch.cat([x.unsqueeze(-1), arrived.unsqueeze(-1)]).squeeze(-1)


@contextlib.contextmanager
def calls_inside(halo: Halo, calls: Calls) -> Iterator[None]:
    """While active, calls of the halo are compared as calls inside another."""
    before, halo._calls = halo._calls, calls
    try:
        yield
    finally:
        halo._calls = before
        calls.wait()


def planned_halo(
    num_rows: int,
    send_rows: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    group: Group | None,
    calls: Calls | None = None,
) -> Halo:
    """A halo of which every rank knows its part, in the order of the owners: nothing is sent.

    Args:
        num_rows: number of rows that this rank owns.
        send_rows: places of those that others read, first those for rank 0.
        send: the number of rows for each rank.
        receive: the number of rows of each rank.
        group: the ranks.
        calls: what its calls are inside of; None: each is compared by itself.
    """
    found = Halo.__new__(Halo)
    found._plan(num_rows, send_rows, send, receive, group)
    found._calls = calls
    return found


def _added(own: Tensor, arrived: Tensor, send_rows: Tensor, send: Sequence[int]) -> Tensor:
    """Own rows, to which those of one rank after the other are added: each has a row once."""
    pieces = zip(*(torch.split(t, list(send)) for t in (send_rows, arrived)), strict=True)
    for (rows, part), count in zip(pieces, send, strict=True):
        if count:
            own.index_add_(0, rows, part)
    return own


def _exchanged(
    rows: Tensor,
    send_rows: Tensor,
    back: bool,
    num_rows: int,
    send: Sequence[int],
    receive: Sequence[int],
    group: str,
) -> Tensor:
    counts, ranks = (list(send), list(receive)), private.process_group(group)
    if back:
        arrived = rows.new_empty(len(send_rows), *rows.shape[1:])
        others = rows[num_rows:].contiguous()
        distributed.all_to_all_single(arrived, others, *counts, ranks)
        return _added(rows[:num_rows].clone(), arrived, send_rows, send)
    found = rows.new_empty(num_rows + sum(receive), *rows.shape[1:])
    found[:num_rows] = rows
    sent = rows.index_select(0, send_rows)
    distributed.all_to_all_single(found[num_rows:], sent, *counts[::-1], ranks)
    return found


def _exchanged_shape(rows: Tensor, *args: Any) -> Tensor:
    _, back, num_rows, _, receive, _ = args
    return rows.new_empty(num_rows if back else num_rows + sum(receive), *rows.shape[1:])


def _selected(
    rows: Tensor, send_rows: Tensor, back: bool, num_rows: int, send: Sequence[int]
) -> Tensor:
    if back:
        return _added(rows.new_zeros(num_rows, *rows.shape[1:]), rows, send_rows, send)
    return rows.index_select(0, send_rows)


def _selected_shape(rows: Tensor, send_rows: Tensor, *args: Any) -> Tensor:
    back, num_rows, _ = args
    return rows.new_empty(num_rows if back else len(send_rows), *rows.shape[1:])


def _transposed(
    call: Call, args: Sequence[Any], grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    _, send_rows, back, *rest = args
    return (call(grad, send_rows, not back, *rest) if needed[0] else None,)


_halo_exchange = Operator(
    "halo_exchange",
    "Tensor rows, Tensor send_rows, bool back, SymInt num_rows, SymInt[] send, SymInt[] receive, "
    "str group",
    1,
    1,
    _exchanged,
    _exchanged_shape,
    _transposed,
    trailing,
)
"""Own rows -> own rows, then the halo's; back: the transpose."""

_sent = Operator(
    "halo_sent",
    "Tensor rows, Tensor send_rows, bool back, SymInt num_rows, SymInt[] send",
    1,
    1,
    _selected,
    _selected_shape,
    _transposed,
    trailing,
)
"""Own rows -> those that are sent; back: the transpose."""


def _checked(own: Tensor, needed: Tensor, owners: Owners) -> Mapping[str, Any]:
    """Nothing that must be equal; an error where a table cannot serve."""
    if (row := _repeated(own)) is not None or (row := owners.claimed_twice) is not None:
        raise IndexRangeError(
            f"row {row} is owned more than once: a row has one owner. Correct global_ids."
        )
    if (row := _repeated(needed)) is not None:
        raise IndexRangeError(
            f"needed holds row {row} more than once: each row is sent once. Use needed.unique()."
        )
    faults: Sequence[tuple[Tensor, str]] = (
        (
            owners.rank < 0,
            "which no rank owns: after torch.distributed.init_process_group, every needed row "
            "must be in some rank's global_ids",
        ),
        (torch.isin(needed, own), "which this rank owns: a halo is of others' rows"),
    )
    for where, what in faults:
        if where.any():
            raise IndexRangeError(
                f"needed holds row {int(needed[where][0])}, {what}. Correct needed or global_ids."
            )
    return {}


def _repeated(table: Tensor) -> int | None:
    found, counts = torch.unique(table, return_counts=True)
    return int(found[counts > 1][0]) if len(found) < len(table) else None


def _check_rows(name: str, x: Tensor, rows: int) -> None:
    if not isinstance(x, Tensor):
        raise DTypeError(f"{name}: the rows are a {type(x).__name__}: they must be a tensor.")
    if not x.dim() or len(x) != rows:
        raise ShapeError(
            f"{name}: the rows are {tuple(x.shape)}: this rank has {rows} of them. "
            f"Pass ({rows}, ...)."
        )
