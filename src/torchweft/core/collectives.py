"""Sums and exchanges between the ranks of torch.distributed, with gradients of any order.

Three kinds of values stand on ranks: *rows*, of which each rank holds its own; *parts*, whose sum
over the ranks is meant; *copies*, equal on every rank.

    exchange   rows of a rank -> rows of others; the gradient goes back the same way
    total      parts -> copies; gradient: copies -> parts, which is no communication
    all_sum    parts -> parts, each of which is the sum: for losses that the ranks add up
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from torchweft.core import private
from torchweft.core.operators.operator import Call, Operator, plain_call, recording

__all__ = [
    "Group",
    "Pending",
    "all_sum",
    "begin",
    "everywhere",
    "exchange",
    "finish",
    "gathered",
    "host_device",
    "largest",
    "pass_on",
    "total",
    "trailing",
    "world",
]

Group = Any  # torch.distributed.ProcessGroup, which is absent where torch was built without it


def world(group: Group | None = None) -> tuple[int, int]:
    """(this rank, number of ranks) in a group; (0, 1) without torch.distributed."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    members: Any = distributed.group.WORLD if group is None else group
    if isinstance(members, distributed.ProcessGroup):  # what torch's functions ask in the end
        return members.rank(), members.size()
    return distributed.get_rank(group), distributed.get_world_size(group)


def _reduced(x: Tensor, group: Group | None, operation: Any) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(x, operation, group)
    return x


class _AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group | None, x: Tensor) -> Tensor:
        ctx.group = group
        return _reduced(x, group, distributed.ReduceOp.SUM)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, all_sum(grads[0], ctx.group)


def all_sum(x: Tensor, group: Group | None = None) -> Tensor:
    """Σ over the ranks; so is its gradient, since the loss of each rank depends on every rank."""
    if world(group)[1] == 1:
        return x
    if plain_call((x,)) and not (recording() and x.requires_grad):
        return _reduced(x, group, distributed.ReduceOp.SUM)
    found: Tensor = _AllSum.apply(group, x)  # type: ignore[no-untyped-call]
    return found


def largest(x: Tensor, group: Group | None = None) -> Tensor:
    """max over the ranks of each element, ∞ where one of several has NaN; it has no gradient."""
    x = x.detach()
    if world(group)[1] == 1:
        return x
    if x.is_floating_point():  # backends leave out a NaN, or not, by the order of the ranks
        x = x.nan_to_num(torch.inf, torch.inf, -torch.inf)
    return _reduced(x, group, distributed.ReduceOp.MAX)


def everywhere(answer: bool, groups: Iterable[Group]) -> bool:
    """Whether the answer is yes on all ranks of some groups: one all_reduce of hosts for each."""
    for group in groups:
        no = torch.tensor([not answer], dtype=torch.int32, device=host_device(group))
        answer = not largest(no, group).item()
    return answer


def host_device(group: Group | None) -> torch.device:
    """Where numbers of hosts are sent from: host memory, or the GPU if the group has NCCL alone."""
    speaks = distributed.get_backend_config(group)
    return torch.device("cpu") if "cpu" in speaks else torch.device("cuda")


def gathered(x: Tensor, group: Group | None = None) -> Tensor:
    """(ranks, ...): x of each rank, of equal shape and dtype; it has no gradient."""
    found = x.new_empty(world(group)[1], *x.shape)
    _gather(found.flatten(), x.detach().flatten(), group)
    return found


_gather: Any = getattr(distributed, "all_gather_single", None)  # the name from torch 2.13 on
_gather = _gather or getattr(distributed, "all_gather_into_tensor", None)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group | None, x: Tensor) -> Tensor:
        ctx.group = group
        return _reduced(x, group, distributed.ReduceOp.SUM)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, _Parts.apply(ctx.group, grads[0])  # type: ignore[no-untyped-call]


class _Parts(torch.autograd.Function):
    """Copies as what each rank's parts are multiplied by: the transpose of `total`."""

    @staticmethod
    def forward(ctx: Any, group: Group | None, x: Tensor) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, total(grads[0], ctx.group)


def total(x: Tensor, group: Group | None = None) -> Tensor:
    """Σ over the ranks of a part that each holds: one value, of which each rank gets a copy.

    Every rank calls backward on its copy; the gradient of the one value then reaches each part
    once.

    Args:
        x: this rank's part, of equal shape and dtype on every rank.
        group: the ranks; None: all.

    Returns:
        The sum, in x's shape and dtype; x itself with one rank.

    Cost: one all_reduce; the gradient needs no communication.

    Example:
        >>> import torch
        >>> from torchweft.distributed import total
        >>> total(torch.tensor([1.0, 2.0]))  # one rank
        tensor([1., 2.])
    """
    if world(group)[1] == 1:
        return x
    found: Tensor = _Total.apply(group, x)  # type: ignore[no-untyped-call]
    return found


def pass_on(block: Tensor, following: Tensor, group: Group | None = None) -> Any:
    """Start to send a block to the next rank, and to receive one from the rank before.

    An all_to_all of which each rank has one part: gloo sends single blocks from hosts alone.

    Args:
        block: (n,).
        following: where the other arrives, (m,).
        group: the ranks in a ring; None: all.

    Returns:
        What to `wait()` for, until when both are left alone.
    """
    rank, size = world(group)
    send, receive = [0] * size, [0] * size
    send[(rank + 1) % size], receive[(rank - 1) % size] = len(block), len(following)
    return distributed.all_to_all_single(following, block, receive, send, group, async_op=True)


def _exchanged(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: str) -> Tensor:
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    distributed.all_to_all_single(
        received, rows.contiguous(), list(receive), list(send), private.process_group(group)
    )
    return received


def _fake(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: str) -> Tensor:
    return rows.new_empty(sum(receive), *rows.shape[1:])


def _gradients(
    call: Call, args: Sequence[Any], grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    _, send, receive, group = args
    return (call(grad, receive, send, group) if needed[0] else None,)


def trailing(call: Call, size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> Tensor:
    """The batch rule of exchanges of rows: the mapped dimension moves behind the others."""
    rows, dim = args[0], in_dims[0]
    assert dim is not None
    return call(rows.movedim(dim, -1), *args[1:]).movedim(-1, 0)


_exchange = Operator(
    "exchange",
    "Tensor rows, SymInt[] send, SymInt[] receive, str group",
    1,
    0,
    _exchanged,
    _fake,
    _gradients,
    trailing,
)


def exchange(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], group: Group | None = None
) -> Tensor:
    """Rows to other ranks, and theirs to this one: one all_to_all, as is the gradient.

    Args:
        rows: (sum(send), ...): first the rows for rank 0, then those for rank 1, ...
        send: number of rows for each rank.
        receive: number of rows that each rank has for this one.
        group: the ranks; None: all.

    Returns:
        (sum(receive), ...): first the rows from rank 0, then those from rank 1, ...
    """
    if world(group)[1] == 1:
        return rows
    return _exchange(rows, list(send), list(receive), private.group_name(group))


class Pending:
    """Rows that are under way: where they arrive, and what is kept until they have."""

    def __init__(self, send: Sequence[int], receive: Sequence[int], group: Group | None) -> None:
        self.send, self.receive, self.group = list(send), list(receive), group
        self.back: Pending | None = None
        """The gradients' way back, from the moment that it begins."""

    def start(self, rows: Tensor) -> Tensor:
        """Where the rows will have arrived after `wait`."""
        self.sent = rows.contiguous()
        self.received = rows.new_empty(sum(self.receive), *rows.shape[1:])
        self.work = distributed.all_to_all_single(
            self.received, self.sent, self.receive, self.send, self.group, async_op=True
        )
        return self.received

    def wait(self) -> Tensor:
        """The rows that arrived."""
        self.work.wait()
        received = self.received
        del self.work, self.sent, self.received
        return received


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Pending, rows: Tensor) -> Tensor:
        ctx.pending = pending
        return pending.start(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, _Returned.apply(ctx.pending.back, grads[0])  # type: ignore[no-untyped-call]


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Pending, arriving: Tensor) -> Tensor:
        ctx.pending = pending
        pending.wait()
        return arriving.view_as(arriving)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        """Sends the gradient back, and hands it to the backward pass of `begin`, which waits."""
        there = ctx.pending
        there.back = Pending(there.receive, there.send, there.group)
        there.back.start(grads[0].detach())
        return None, grads[0]


class _Returned(torch.autograd.Function):
    """A gradient that was sent back by the backward pass of `finish`, at its owners."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, grad: Tensor) -> Tensor:
        ctx.pending = pending
        return pending.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        back = ctx.pending
        return None, exchange(grads[0], back.receive, back.send, back.group)


def begin(pending: Pending, rows: Tensor) -> Tensor:
    """Start an exchange; the tensor holds what arrives after `finish`.

    Its gradient starts in the backward pass of `finish` and is waited for in that of `begin`;
    second gradients wait at once.
    """
    arriving: Tensor = _Begin.apply(pending, rows)  # type: ignore[no-untyped-call]
    return arriving


def finish(pending: Pending, arriving: Tensor) -> Tensor:
    """What `begin` started, arrived."""
    received: Tensor = _Finish.apply(pending, arriving)  # type: ignore[no-untyped-call]
    return received
