"""Index tables whose content changes unseen: no call may use what was cached for the old content.

A NumPy array, a storage, `.data` and DLPack share memory with a tensor and change it without a new
version.  Each function is called, its table is changed in each way, and it is called again: values
and gradients are those of a call with new tensors, to the bit.

Seen red with: plans found by identity and version, as before (every way but "in place").
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchweft
from tests.nearness import same
from torchweft import o3, products
from torchweft.core import table_copies
from torchweft.reductions import BlockSparsity, LazyTensor

ROWS, COUNT = 5, 12
OLD = torch.arange(COUNT) % ROWS
NEW = torch.arange(COUNT) * 3 % 4
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


Changing = tuple[Tensor, Callable[[], object]]
"""A table, and what changes it from OLD to NEW."""


def _by_numpy(device: str = "cpu") -> Changing:
    array = OLD.numpy().copy()

    def change() -> None:
        array[:] = NEW.numpy()

    return torch.from_numpy(array), change


def _by_exported_array(device: str = "cpu") -> Changing:
    table = OLD.clone()
    array = table.numpy()

    def change() -> None:
        np.copyto(array, NEW.numpy())

    return table, change


def _by_new_data(device: str = "cpu") -> Changing:
    table = OLD.to(device, copy=True)

    def change() -> None:
        table.data = NEW.to(device, copy=True)

    return table, change


def _by_data(device: str = "cpu") -> Changing:
    table = OLD.to(device, copy=True)
    return table, lambda: table.data.copy_(NEW)


def _by_dlpack(device: str = "cpu") -> Changing:
    table = OLD.to(device, copy=True)
    alias = torch.from_dlpack(table)
    return table, lambda: alias.copy_(NEW)


def _by_storage(device: str = "cpu") -> Changing:
    table = OLD.to(device, copy=True)
    alias = torch.empty(0, dtype=table.dtype, device=device).set_(table.untyped_storage())
    return table, lambda: alias.copy_(NEW)


def _in_place(device: str = "cpu") -> Changing:
    table = OLD.to(device, copy=True)
    return table, lambda: table.copy_(NEW)


WAYS = {
    "numpy": _by_numpy,
    "exported array": _by_exported_array,
    "new data": _by_new_data,
    "data": _by_data,
    "dlpack": _by_dlpack,
    "storage": _by_storage,
    "in place": _in_place,
}


def _rows(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _gathered(x: Tensor, table: Tensor) -> Tensor:
    return products.indexed_mul(x, x.square(), index1=table, index2=table.flip(0))


def _summed(x: Tensor, table: Tensor) -> Tensor:
    rows = x[:1].repeat(COUNT, 1) * torch.arange(COUNT, device=x.device)[:, None]
    return products.indexed_mul_scale_gather(rows, rows, None, index_out=table, out_size=ROWS)


def _largest(x: Tensor, table: Tensor) -> Tensor:
    rows = x[:1].repeat(COUNT, 1) * torch.arange(COUNT, device=x.device)[:, None]
    return products.indexed_mul_scale_gather(rows, rows, None, index_out=table)


def _by_hand(x: Tensor, table: Tensor) -> Tensor:
    return products.sparse_scale(x, products.SparseScaleInfo(index=table))


CONV = o3.TensorProductConv("2x0e", "0e", "2x0e", [(0, 0, 0, "uvu", True)])
EDGES = _rows(COUNT, 1), _rows(COUNT, 2)


def _convolved(x: Tensor, table: Tensor) -> Tensor:
    edges = (e.to(x.device) for e in EDGES)
    return CONV(x[:, :2], *edges, table, OLD.to(x.device), ROWS)


def _of_views(x: Tensor, table: Tensor) -> Tensor:
    """Rows of one tensor, taken anew for each call."""
    pair = table.view(2, COUNT // 2)
    edges = (e[: COUNT // 2].to(x.device) for e in EDGES)
    return CONV(x[:, :2], *edges, pair[0], pair[1], ROWS)


LINEAR = o3.Linear("2x0e", "2x0e", num_elements=ROWS).double()
CONTRACTION = o3.SymmetricContraction("2x0e", "2x0e", 2, ROWS).double()


def _by_element(x: Tensor, table: Tensor) -> Tensor:
    return LINEAR.to(x.device)(x[OLD, :2], element=table)


def _contracted(x: Tensor, table: Tensor) -> Tensor:
    return CONTRACTION.to(x.device)(x[OLD, :2], table)


CALLS = [_gathered, _summed, _largest, _by_hand, _convolved, _of_views, _by_element, _contracted]


def _values(call: Callable[[Tensor, Tensor], Tensor], table: Tensor) -> list[Tensor]:
    x = _rows(ROWS, 3).to(table.device).requires_grad_()
    z = call(x, table)
    (first,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
    return [z, first, *torch.autograd.grad(first.square().sum(), x)]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__[1:])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_changed_table_is_read_again(call, way, device):
    if device == "cuda" and way in ("numpy", "exported array"):
        pytest.skip("NumPy shares host memory only")
    table, change = WAYS[way](device)
    for content in (OLD, NEW):
        fresh = _values(call, content.to(device, copy=True))
        for found, exact in zip(_values(call, table), fresh, strict=True):
            same(found, exact)
        change()


def test_gradients_are_those_of_the_table_that_was_read():
    """Seen red with: plans of gradients made of the table at the time of the backward pass."""
    table, change = _by_numpy()
    x = _rows(ROWS, 3).requires_grad_()
    z = _gathered(x, table)
    change()
    y = x.detach().requires_grad_()
    (exact,) = torch.autograd.grad(_gathered(y, OLD.clone()).square().sum(), y)
    same(torch.autograd.grad(z.square().sum(), x)[0], exact)


def test_an_unchanged_table_keeps_its_plan(monkeypatch):
    """Seen red with: a new copy for each call."""
    made = []
    private = table_copies._private
    monkeypatch.setattr(table_copies, "_private", lambda t: made.append(t) or private(t))
    table, change = _by_numpy()
    for _ in range(3):
        _convolved(_rows(ROWS, 3), table)
        _of_views(_rows(ROWS, 3), table)
    assert sum(t.data_ptr() == table.data_ptr() for t in made) == 2  # the table and its first row
    made.clear()
    change()
    _convolved(_rows(ROWS, 3), table)
    assert len(made) == 1


def test_objects_hold_what_they_were_made_of():
    """Seen red with: a graph whose tables are the caller's."""
    table, change = _by_numpy()
    x = _rows(ROWS, 3)
    graph, (info, _) = o3.Graph(table, OLD, ROWS), products.sparse_scale_infos(table, OLD)
    held = torchweft.constant(table)
    change()
    same(CONV(x[:, :2], *EDGES, graph), _convolved(x, OLD.clone()))
    old, _ = products.sparse_scale_infos(OLD, OLD)
    same(products.sparse_scale(x, info), products.sparse_scale(x, old))
    same(_gathered(x, held), _gathered(x, OLD.clone()))


def test_constants_are_not_compared(monkeypatch):
    """Seen red with: constants looked up like other tables."""
    table = torchweft.constant(OLD)
    assert torchweft.constant(table) is table
    info, _ = products.sparse_scale_infos(OLD, OLD)
    moved = info.to("cpu")
    monkeypatch.setattr(table_copies, "_place", None)
    products.indexed_mul(_rows(ROWS, 3), _rows(COUNT, 3), index1=table)
    products.sparse_scale(_rows(ROWS, 3), moved)


def test_a_constant_that_torch_changes_is_read_again():
    table = torchweft.constant(OLD)
    _gathered(_rows(ROWS, 3), table)
    table.copy_(NEW)
    same(_gathered(_rows(ROWS, 3), table), _gathered(_rows(ROWS, 3), NEW.clone()))


def test_views_of_constants_are_not_compared(monkeypatch):
    """Rows of an edge_index, taken anew for each call; seen red with: compared like others."""
    x, pair = _rows(ROWS, 3), torchweft.constant(torch.stack([NEW, OLD]))
    exact = _convolved(x, NEW)
    same(_of_pair(x, pair), exact)
    made = len(o3.graph._graphs._entries)
    monkeypatch.setattr(torch, "equal", None)
    same(_of_pair(x, pair), exact)
    assert len(o3.graph._graphs._entries) == made


def _of_pair(x: Tensor, pair: Tensor) -> Tensor:
    src, dst = pair
    return CONV(x[:, :2], *EDGES, src, dst, ROWS)


def test_views_of_a_constant_that_torch_changes():
    x, pair = _rows(ROWS, 3), torchweft.constant(torch.stack([NEW, OLD]))
    _of_pair(x, pair)
    pair[0].copy_(OLD)
    same(_of_pair(x, pair), _of_pair(x, torch.stack([OLD, OLD])))


def test_copies_of_views_die_with_their_constant():
    before, pair = len(table_copies._copies), torchweft.constant(torch.stack([NEW, OLD]))
    _of_pair(_rows(ROWS, 3), pair)
    assert len(table_copies._copies) == before + 2
    del pair
    assert len(table_copies._copies) == before


def test_tables_made_in_inference_mode():
    """Seen red with: a copy that is an inference tensor, which autograd cannot save."""
    with torch.inference_mode():
        table = OLD.clone()
        _gathered(_rows(ROWS, 3), table)
    for found, exact in zip(
        _values(_gathered, table), _values(_gathered, OLD.clone()), strict=True
    ):
        same(found, exact)


def test_forgotten_tables_and_those_that_died_are_dropped():
    before = len(table_copies._copies)
    first, second = OLD.clone(), OLD.clone()
    _gathered(_rows(ROWS, 3), first)
    assert len(table_copies._copies) == before + 1  # the flipped one has died
    products.forget(first)
    assert len(table_copies._copies) == before
    _gathered(_rows(ROWS, 3), second)
    del second
    assert len(table_copies._copies) == before


def test_only_integers_are_constants():
    with pytest.raises(torchweft.DTypeError, match=r"table is torch\.float32.*index table"):
        torchweft.constant(torch.ones(3))
    with pytest.raises(torchweft.DTypeError, match=r"table is list"):
        torchweft.constant([0, 1])


def _masked(x: Tensor, ranges: Any) -> list[Tensor]:
    x = x.clone().requires_grad_()
    distance = ((LazyTensor(x[:, None]) - LazyTensor(x[None])) ** 2).sum(-1)
    distance.ranges = ranges
    z = (-distance).exp().sum(1)
    return [z.detach(), *torch.autograd.grad(z.square().sum(), x)]


def test_a_changed_mask_is_read_again():
    """Seen red with: blocks found by the identity of the ranges, as before."""
    columns = np.array([[0, 3]])
    rows, ends = torch.tensor([[0, ROWS]]), torch.tensor([1])
    seen = torch.from_numpy(columns)
    ranges = (rows, ends, seen, seen, ends, rows)
    held = BlockSparsity(ranges)
    x = _rows(ROWS, 3)
    first = _masked(x, ranges)
    columns[:] = [[2, ROWS]]
    mask = torch.tensor([[2, ROWS]])
    exact = _masked(x, (rows, ends, mask, mask, ends, rows))
    for found, a, b, old in zip(_masked(x, ranges), exact, _masked(x, held), first, strict=True):
        same(found, a)
        same(b, old)


def test_a_changed_mask_is_checked_again():
    """Seen red with: values checked once for the same tensors, as before."""
    columns = np.array([[0, 3]])
    rows, ends, seen = torch.tensor([[0, ROWS]]), torch.tensor([1]), torch.from_numpy(columns)
    ranges = (rows, ends, seen, seen, ends, rows)
    _masked(_rows(ROWS, 3), ranges)
    columns[:] = [[2, ROWS + 1]]
    with pytest.raises(torchweft.IndexRangeError, match=r"there are 5 points"):
        _masked(_rows(ROWS, 3), ranges)


def test_a_mask_is_compared_once_a_call(monkeypatch):
    """Seen red with: compared when it is checked, and for each half of its blocks."""
    rows, columns = (torch.tensor([[0, n]]) for n in (ROWS, 3))
    ranges = tuple(t.clone() for t in (rows, torch.tensor([1]), columns) * 2)
    ranges = (*ranges[:3], columns.clone(), ranges[4], rows.clone())
    _masked(_rows(ROWS, 3), ranges)
    place, seen = table_copies._place, []
    monkeypatch.setattr(table_copies, "_place", lambda table: seen.append(table) or place(table))
    _masked(_rows(ROWS, 3), ranges)
    assert len(seen) == len(ranges)
