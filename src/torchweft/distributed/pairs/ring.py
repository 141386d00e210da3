"""Operators of reductions whose columns are spread over ranks: rows stay, columns travel.

    sums      z_i = Σ over all ranks of Σ_j f(x_i, y_j, p)       shifted, smallest: alike

Columns go round a ring: each rank works on the block that it has, its own first, while the next one
is under way from the rank before.  The gradient in what varies with j is a sum over i, so another
ring, in which rows of i travel: no gradient is ever sent, and every order is a ring again.

Beside the arguments of `reductions.engine.operator` an operator takes the name of the group and the
number of the call, which its gradients share: ranks whose backward passes come to them in another
order raise an error, also where formulas and sizes are equal.  Its tables are the `Blocks` of this
rank's rows and the columns of each rank, by rank, numbered from the first of that rank; then those
of this rank's columns and the rows of each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.core import private
from torchweft.core.collectives import Group, pass_on, world
from torchweft.core.operators.tensor_list import ListOperator, Rest, Tensors
from torchweft.distributed.agreement import agree, numbers_of_ranks
from torchweft.reductions.engine import formula_keys as keys
from torchweft.reductions.engine import operator
from torchweft.reductions.engine.found import values_at
from torchweft.reductions.formula.node import variables

__all__ = ["Candidates", "hops", "shifted_sums", "smallest", "sums"]

NO_INDEX = torch.iinfo(torch.int64).max


def hops(
    columns: Sequence[Tensor], counts: Sequence[int], group: Group | None
) -> Iterator[tuple[int, list[Tensor]]]:
    """Each rank with its columns, this rank first, while those of the next are under way.

    Args:
        columns: (B, N, D) each, of one dtype; N = counts[rank].
        counts: number of columns of each rank.
        group: the ranks in a ring.
    """
    rank, size = world(group)
    shapes = [(len(t), t.shape[2]) for t in columns]
    width = sum(batch * dim for batch, dim in shapes)
    if not width:  # nothing travels
        yield from (((rank - hop) % size, list(columns)) for hop in range(size))
        return
    block = torch.cat([t.reshape(-1) for t in columns])
    for hop in range(size):
        source, last = (rank - hop) % size, hop == size - 1
        following, work = block, None
        if not last:
            following = block.new_empty(width * counts[(source - 1) % size])
            work = pass_on(block, following, group)
        yield source, _unpacked(block, shapes, counts[source])
        if work is not None:
            work.wait()
        block = following


def _unpacked(block: Tensor, shapes: Sequence[tuple[int, int]], count: int) -> list[Tensor]:
    lengths = [batch * count * dim for batch, dim in shapes]
    parts = torch.split(block, lengths)
    return [p.view(b, count, d) for p, (b, d) in zip(parts, shapes, strict=True)]


def _parts(
    name: str, tensors: Tensors, rest: Rest, k: int = 1
) -> Iterator[tuple[int, dict[int, Tensor], list[Tensor]]]:
    """(columns before it, values, results) of each block of columns that has pairs."""
    key, batch, rows, columns, how, group_name, call = rest
    group, count = private.process_group(group_name), keys.count(key)
    values, tables = tensors[:count], tensors[count:]
    cats = {v.data[0]: v.data[2] for f in keys.formulas(key) for v in variables(f)}
    travelling = [n for n in range(count) if cats.get(n) == 1]
    name_of_call = f"{name} of call {call} in all_pairs"
    counts = _counts(name_of_call, columns, values, (key, batch, how, k, bool(tables)), group)
    for source, arrived in hops([values[n] for n in travelling], counts, group):
        blocks = tables[operator.TABLES * source : operator.TABLES * (source + 1)]
        if not rows * counts[source] or (blocks and not len(blocks[-1])):
            continue
        here = dict(enumerate(values)) | dict(zip(travelling, arrived, strict=True))
        arguments = key, batch, rows, counts[source], how
        found = operator.reduced(name, [*here.values(), *blocks], arguments, k)
        yield sum(counts[:source]), here, found


def _counts(
    name: str, columns: int, values: Tensors, facts: tuple[Any, ...], group: Group | None
) -> list[int]:
    """Number of columns of each rank; raises on all where ranks call different operators."""
    key, batch, how, k, masked = facts
    described = {
        "formula": key,
        "batch": batch,
        "backend": how,
        "k": k,
        "ranges": masked,
        "dtype": values[0].dtype,
        "device": values[0].device.type,
        "dimensions": [(len(v), v.shape[2]) for v in values],
    }
    digest = hashlib.blake2b(repr((name, described)).encode(), digest_size=7).digest()
    found = numbers_of_ranks([columns, int.from_bytes(digest, "big")], group)
    if len({said for _, said in found}) > 1:
        agree(name, lambda: described, group)
    return [count for count, _ in found]


# sums


def _sums(tensors: Tensors, *rest: Any) -> list[Tensor]:
    """Totals are of float64, in the order of the ring."""
    total = _sum_rule.fake(tensors, *rest)[0].double().zero_()
    for _, _, (found,) in _parts("sums", tensors, rest):
        total += found
    return [total.to(tensors[0].dtype)]


def _shifted(tensors: Tensors, *rest: Any) -> list[Tensor]:
    m, s = _shifted_rule.fake(tensors, *rest)
    m, total = m.fill_(-torch.inf), s.double().zero_()
    for _, _, (top, found) in _parts("shifted", tensors, rest):
        larger = torch.maximum(m, top)
        shift = torch.where(larger.isfinite(), larger, 0)  # −inf: nothing yet
        total = total * (m - shift).exp() + found * (top - shift).exp().double()
        m = larger
    return [m, total.to(s.dtype)]


class _SumRule(operator.SumsRule):
    """z_i = Σ_j f over the columns of all ranks."""

    def body(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        return _sums(tensors, *rest)


class _ShiftedRule(operator.ShiftedRule):
    """m_i and s_i over the columns of all ranks."""

    def body(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        return _shifted(tensors, *rest)


_SCHEMA = "str formula, SymInt batch, SymInt rows, SymInt columns, str how, str group, SymInt call"
_sum_rule = _SumRule()
_sum_operator = ListOperator("reductions_ring_sums", _SCHEMA, _sum_rule)
_shifted_rule = _ShiftedRule(_sum_operator)
_shifted_operator = ListOperator("reductions_ring_shifted", _SCHEMA, _shifted_rule)


def sums(tensors: Tensors, rest: Rest) -> Tensor:
    """(B, M, f.dim): Σ_j f over the columns of all ranks; of this rank's rows."""
    return _sum_operator(tensors, rest)[0]


def shifted_sums(tensors: Tensors, rest: Rest) -> tuple[Tensor, Tensor]:
    """`operator.shifted_sums` over the columns of all ranks."""
    m, s = _shifted_operator(tensors, rest)
    return m, s


# the smallest values


class Candidates:
    """The smallest values so far, (B, M, k, D), and their columns; k = 0 as in `operator.smallest`.

    Equal values come in the order of their columns, whatever the order in which they are added.
    """

    def __init__(self, shape: Sequence[int], k: int, like: Tensor) -> None:
        self._first, self._k = k == 0, max(k, 1)
        shape = (*shape[:2], self._k, shape[2])
        self._values = like.new_full(shape, torch.inf)
        self._columns = torch.full(shape, NO_INDEX, device=like.device)

    def add(self, values: Tensor, columns: Tensor) -> None:
        """More values, and their columns, −1 for none."""
        nothing = columns < 0
        values = torch.cat([self._values, values.where(~nothing, torch.inf)], 2)
        columns = torch.cat([self._columns, columns.where(~nothing, NO_INDEX)], 2)
        columns, order = columns.sort(2)
        values = values.gather(2, order)
        # sorts have NaN as the largest
        compared = -values if self._first else values.where(values == values, torch.inf)
        order = compared.sort(dim=2, descending=self._first, stable=True).indices
        order = order[:, :, : self._k]
        self._values, self._columns = values.gather(2, order), columns.gather(2, order)

    def index(self) -> Tensor:
        """(B, M, k, D) the columns, −1 for none."""
        return self._columns.where(self._columns != NO_INDEX, -1)


def _smallest(
    tensors: Tensors, key: str, k: int, batch: int, rows: int, columns: int, how: str, *spread: Any
) -> Tensor:
    (f,) = keys.formulas(key)
    best = Candidates((batch, rows, f.dim), k, tensors[0])
    rest = (key, batch, rows, columns, how, *spread)
    for before, values, (index,) in _parts("smallest", tensors, rest, k):
        at = values_at(str(f), values, index, how)
        best.add(at, torch.where(index < 0, -1, index + before))
    return best.index()


def _smallest_fake(tensors: Tensors, key: str, k: int, batch: Any, rows: Any, *_: Any) -> Tensor:
    (f,) = keys.formulas(key)
    return tensors[0].new_empty(batch, rows, max(k, 1), f.dim, dtype=torch.int64)


operator.register_constant(
    "reductions_ring_smallest(Tensor[] tensors, str formula, int k, SymInt batch, SymInt rows, "
    "SymInt columns, str how, str group, SymInt call) -> Tensor",
    _smallest,
    _smallest_fake,
)


def smallest(tensors: Tensors, k: int, rest: Rest) -> Tensor:
    """`operator.smallest` among the columns of all ranks, numbered in the order of the ranks."""
    key, *others = rest
    tensors = [t.detach() for t in tensors]
    found: Tensor = torch.ops.torchweft.reductions_ring_smallest(tensors, key, k, *others)
    return found
