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
from torch import Tensor

from torchweft.core.collectives import Group, Pending, begin, exchange, finish, world
from torchweft.core.table_copies import constant
from torchweft.distributed.agreement import Calls, agree
from torchweft.distributed.directory import Owners, find_owners, row_numbers
from torchweft.errors import DeviceError, DTypeError, IndexRangeError, ShapeError
from torchweft.products.functions import sparse_scale
from torchweft.products.infos import SparseScaleInfo, sparse_scale_infos

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
        self._gather, self._sum = (
            _constant(info) for info in sparse_scale_infos(send_rows, in_size=num_rows)
        )
        self._order = self._arrived = None
        self._calls: Calls | None = None

    @property
    def size(self) -> int:
        """Number of rows, own and halo."""
        return self.num_rows + self.num_halo

    def __call__(self, x: Tensor) -> Tensor:
        """Own rows, then the halo's.

        Args:
            x: (n, ...), this rank's rows in the order of `global_ids`; any dtype.

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
        arrived = exchange(self._rows_to_send(x), self.send, self.receive, self.group)
        return self._joined(x, arrived)

    def begin(self, x: Tensor) -> HaloRows:
        """Send rows and return at once; `finish` waits for them.  Between, work on own rows.

        Gradients take the same way back: they are under way while the work between is
        differentiated.
        """
        if self._alone():
            return HaloRows(self._own(x), x, None)
        self._agree("halo.begin(x)", x, self.num_rows)
        pending = Pending(self.send, self.receive, self.group)
        return HaloRows(x, begin(pending, self._rows_to_send(x)), pending)

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
            (n, ...), own rows plus the parts of other ranks, in y's dtype; sums of 16-bit
            rows are formed in float32.  Differentiable to any order, repeatable to the bit.
        """
        if self._alone():
            return self._own(y)
        self._agree("halo.add(y)", y, self.size, floating=True)
        own, others = y[: self.num_rows], y[self.num_rows :]
        if self._order is not None:
            others = others[self._order]
        arrived = exchange(others, self.receive, self.send, self.group)
        added: Tensor = own + _scaled(arrived, self._sum, self.num_rows)
        return added

    def _alone(self) -> bool:
        return world(self.group)[1] == 1

    def _own(self, x: Tensor) -> Tensor:
        _check_rows("x", x, self.num_rows)
        return x

    def _agree(self, name: str, x: Tensor, rows: int, floating: bool = False) -> None:
        """Compare the call between the ranks; compiled and captured calls are not compared."""
        if torch.compiler.is_compiling() or (
            x.is_cuda and torch.cuda.is_current_stream_capturing()
        ):
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

    def _rows_to_send(self, x: Tensor) -> Tensor:
        if not (x.dtype.is_floating_point or x.dtype.is_complex):
            return x[self.send_rows]
        return _scaled(x, self._gather, len(self.send_rows))

    def _joined(self, x: Tensor, arrived: Tensor) -> Tensor:
        return torch.cat([x, arrived if self._arrived is None else arrived[self._arrived]])


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


def _constant(info: SparseScaleInfo) -> SparseScaleInfo:
    """Tables that nobody else holds: no call compares their content."""
    tables: Any = (constant(t) if isinstance(t, Tensor) else t for t in info)
    return SparseScaleInfo(*tables)


def _scaled(x: Tensor, info: SparseScaleInfo, rows: int) -> Tensor:
    """Rows of x gathered, or added, by a table."""
    flat = torch.view_as_real(x) if x.is_complex() else x
    width = torch.Size(flat.shape[1:]).numel()
    if not width:
        return x.new_empty(rows, *x.shape[1:])
    found = sparse_scale(flat.reshape(len(flat), width), info).reshape(rows, *flat.shape[1:])
    return torch.view_as_complex(found) if x.is_complex() else found


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
        (owners.rank < 0, "which no rank owns: every needed row must be in some rank's global_ids"),
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
