"""The recipe of docs/how-to/add_an_op.md, which shows the parts of this file, at work.

Seen red with: the gradient's tables not exchanged; the batch rule's channels in the wrong order;
x itself returned where each row has one entry.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from torchweft.core.operators.operator import Operator
from torchweft.core.tables import Plan
from torchweft.testing import doors
from torchweft.testing.contract import Case, assert_contract

Sizes = list[int]


def body(x: Tensor, source: Tensor, target: Tensor, sizes: Sizes) -> Tensor:
    """z[m] = Σ_{k: target[k] = m} x[source[k]]"""
    plan = Plan(
        rows={"x": source, "z": target},
        sizes={"x": sizes[0], "z": sizes[1]},
        num_entries=source.numel(),
        device=x.device,
    )
    table = plan.table("x_z")
    terms = x.index_select(0, table.index1)
    if table.indptr is None:  # one entry a row, in the order of rows
        return terms
    return torch.segment_reduce(terms, "sum", lengths=table.indptr.diff())


def fake(x: Tensor, source: Tensor, target: Tensor, sizes: Sizes) -> Tensor:
    """What comes out, without computing it."""
    return x.new_empty(sizes[1], x.shape[1])


def gradients(call: Any, args: Any, grad: Tensor, needed: Any) -> tuple[Tensor]:
    """The same sum with the tables exchanged."""
    _, source, target, (rows_in, rows_out) = args
    return (call(grad, target, source, [rows_out, rows_in]),)


def batch(call: Any, size: int, in_dims: Any, args: Any) -> Tensor:
    """Mapped samples stand beside each other, as further channels."""
    columns = args[0].movedim(in_dims[0], 1).flatten(1)
    return call(columns, *args[1:]).unflatten(1, (size, -1)).movedim(1, 0)


add_rows = Operator(
    "example_add_rows",
    "Tensor x, Tensor source, Tensor target, SymInt[] sizes",
    linear=1,
    tables=2,
    body=body,
    fake=fake,
    gradients=gradients,
    batch=batch,
)


def call(x, source, target, sizes, backend=None):
    return add_rows(x, source, target, sizes)


def oracle(x, source, target, sizes):
    return x.new_zeros(sizes[1], x.shape[1]).index_add(0, target, x[source])


def case(name, source, target, num_out):
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tables = {"source": torch.tensor(source), "target": torch.tensor(target)}
    return Case(name, call, oracle, (x,), {**tables, "sizes": [3, num_out]})


CASES = [
    case("rows added", source=[0, 2, 2, 1], target=[3, 0, 0, 1], num_out=4),
    case("rows permuted", source=[0, 1, 2], target=[2, 0, 1], num_out=3),
]


# Autocast is the public function's, and torch.func's mixed derivatives need a second input.
DOORS = (
    doors.check_opcheck,
    doors.check_numerical,
    doors.check_compile,
    doors.check_export,
    doors.check_vmap,
    doors.check_forward_mode,
    doors.check_meta,
    doors.check_checkpoint,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_value(case, dtype):
    assert_contract(case, dtype=dtype)


@pytest.mark.parametrize("check", DOORS, ids=lambda check: check.__name__)
def test_every_door(check):
    check(CASES[0])
