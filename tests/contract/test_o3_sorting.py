"""Tables of entries by row, and columns of rows, by their kernels; launches of a recorded call.

Seen red with: rows counted up to their own number, entries of earlier steps not counted, the last
row's bound left out, a copy of the first step alone; the largest number of a mixture, a column
behind the last, tables of a run found again after a change in place.
"""

import pytest
import torch

from tests.conftest import INTERPRETED
from torchweft import explain
from torchweft.core.recorded import Run
from torchweft.o3.adapters import model_call
from torchweft.o3.adapters.model_call import Call
from torchweft.o3.graph import graph_of
from torchweft.o3.mixing import operator as mixing
from torchweft.o3.radial_linear import launch
from torchweft.o3.sorting import rows as sorting
from torchweft.o3.sorting.rows import (
    ENTRIES_PER_STEP,
    columns_by_kernel,
    sorted_by_kernel,
    sorted_by_torch,
)

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="kernels need a GPU"),
]

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

LONG = 2 * ENTRIES_PER_STEP + 3


def drawn(entries, size, seed=0):
    made = torch.Generator().manual_seed(seed)
    return torch.randint(size, (entries,), generator=made).to(DEVICE)


LISTS = {
    "none": (torch.zeros(0, dtype=torch.int64, device=DEVICE), 3),
    "no rows": (torch.zeros(0, dtype=torch.int64, device=DEVICE), 0),
    "one": (drawn(1, 1), 1),
    "short": (drawn(40, 11), 11),
    "long": (drawn(LONG, 7), 7),
    "sorted": (drawn(LONG, 9).sort().values, 9),
    "one row of many": (torch.full((LONG,), 4, device=DEVICE), 6),
    "more than half of 2^16": (torch.full((40_000,), 3, device=DEVICE), 4),
    "int32": (drawn(40, 5).int(), 5),
    "columns of a table": (drawn(80, 8).view(40, 2)[:, 1], 8),
    "numbers without a row": (drawn(40, 11), 6),
}

DIGITS = {
    "none": (torch.zeros(0, dtype=torch.int64, device=DEVICE), 3),
    "one digit": (drawn(1500, 90), 90),
    "two digits": (drawn(1500, 5000), 5000),
    "a last row behind a digit": (drawn(700, 128), 128),
    "three digits": (drawn(600, 2**20), 2**20),
    "no rows": (drawn(40, 11), 0),
    "int32": (drawn(1030, 700).int(), 700),
    "columns of a table": (drawn(2000, 300).view(1000, 2)[:, 1], 300),
    "numbers without a row": (drawn(1500, 900), 300),
}


def assert_sorted(found, rows, size):
    exact = sorted_by_torch(rows, size, 2**31 - 1)
    assert {t.dtype for t in found} == {torch.int32}
    assert found.rows.tolist() == exact.rows.tolist()
    assert found.indptr.tolist() == exact.indptr.tolist()
    known = int(exact.indptr[-1])  # nobody reads the places of entries without a row
    assert found.order[:known].tolist() == exact.order[:known].tolist()


@pytest.mark.parametrize("name", LISTS)
def test_one_list(name):
    rows, size = LISTS[name]
    (found,) = sorted_by_kernel((rows,), (size,))
    assert_sorted(found, rows, size)


@pytest.mark.parametrize("name", DIGITS)
def test_one_list_by_digits(name, monkeypatch):
    """Seen red with: entries of one digit in another order, rows without their last digit."""
    monkeypatch.setattr(sorting, "MOST_COMPARED", -1)
    rows, size = DIGITS[name]
    (found,) = sorted_by_kernel((rows,), (size,))
    assert_sorted(found, rows, size)


def test_kernels_of_an_order_are_others():
    """A kernel's cache knows no operand that is None in some calls; seen red with: one for both."""
    unordered, ordered = (sorting._digit_kernels(torch.device("cpu"), o) for o in (False, True))
    assert not set(unordered) & set(ordered)


@pytest.mark.parametrize("sizes", [(3, 1100), (1100, 3)])
def test_two_lists_by_digits(sizes, monkeypatch):
    """Seen red with: the numbers of rows of the first list for both."""
    monkeypatch.setattr(sorting, "MOST_COMPARED", -1)
    lists = [drawn(1501, 1200, seed) for seed in range(2)]
    lists[1] = lists[1].int()
    for found, *given in zip(sorted_by_kernel(lists, sizes), lists, sizes, strict=True):
        assert found.order.data_ptr() % 16 == 0
        assert_sorted(found, *given)


@pytest.mark.parametrize("sizes", [(3, 11), (11, 3), (4, 1), (1, 8)])
def test_two_lists_of_any_sizes(sizes):
    lists = [drawn(LONG, size, seed) for seed, size in enumerate(sizes)]
    lists[1] = lists[1].int()
    for found, *given in zip(sorted_by_kernel(lists, sizes), lists, sizes, strict=True):
        assert_sorted(found, *given)


def test_tables_are_right_where_launches_are_left_out(monkeypatch):
    """Seen red with: tables of memory that no launch has filled, which a graph keeps."""
    monkeypatch.setattr(sorting, "_kernel", lambda *kind: lambda *launch: None)
    monkeypatch.setattr(sorting, "noting", lambda: True)
    rows, size = LISTS["long"]
    (found,) = sorted_by_kernel((rows,), (size,))
    assert_sorted(found, rows, size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_columns(width, dtype):
    x = torch.eye(width, dtype=dtype, device=DEVICE).repeat(18, 1)[:18]
    column, marked = columns_by_kernel(x)
    assert (column == x.argmax(1)).all()
    assert (marked == x).all()
    x[0], x[1], x[2] = 0, 3 * x[1], -x[2]
    x[3] = float("nan")
    x[4, 0] += 0.5
    column, marked = columns_by_kernel(x)
    assert marked.dtype == dtype
    assert marked[:5].isnan().all()
    assert (marked[5:] == x[5:]).all()
    assert ((column >= 0) & (column < width)).all()


@pytest.fixture
def served(monkeypatch):
    """Tensors on the CPU are sorted as those on a GPU."""
    if not INTERPRETED:
        pytest.skip("launches are counted in the interpreter")
    monkeypatch.setattr(sorting, "serves", lambda rows, size: True)
    monkeypatch.setattr(model_call, "columns_of_rows", columns_by_kernel)


def names(function):
    return [made.kernel for made in explain(function).launches]


@pytest.mark.usefixtures("served")
def test_a_record_sorts_each_table_once():
    """A graph for all layers is one launch, elements are two; nothing else is copied."""
    edges, attributes, call = torch.stack([drawn(40, 11), drawn(40, 11, 1)]), torch.eye(3), Call()
    call.mark([torch.nn.Identity()])
    call.elements(attributes)
    call.running = True  # in a forward pass, whose layers share what the first made

    def layers():
        for _ in range(2):
            graph = graph_of(edges[0], edges[1], 11, 11)
            element = call.elements(attributes)
            assert mixing.rows_of_elements(element, 3).order.tolist() == [0, 1, 2]
        return graph

    with Run() as run:
        assert names(layers) == ["sort_rows", "columns_of_rows", "sort_rows"]
        assert not run.copies


@pytest.mark.usefixtures("served")
def test_tables_of_a_run_follow_changes_in_place():
    edges = torch.stack([drawn(40, 11), drawn(40, 11, 1)])
    with Run():
        first = graph_of(edges[0], edges[1], 11, 11)
        assert graph_of(edges[0], edges[1], 11, 11) is first
        assert graph_of(edges[1], edges[0], 11, 11) is not first
        was = edges.clone()
        edges += 1
        edges %= 11
        second = graph_of(edges[0], edges[1], 11, 11)
    assert first.src.tolist() == was[0].tolist()
    assert second.src.tolist() == edges[0].tolist()


def test_layers_of_a_run_share_sources_in_order(monkeypatch):
    src, order, made = drawn(40, 11), torch.randperm(40, device=DEVICE), []
    plain = torch.Tensor.index_select
    monkeypatch.setattr(
        torch.Tensor, "index_select", lambda *given: made.append(1) or plain(*given)
    )
    with Run():
        found = [launch._in_order(src, order) for _ in range(2)]
    assert len(made) == 1
    assert found[0] is found[1]
    assert found[0].tolist() == src[order].tolist()
    assert launch._in_order(src, order).tolist() == src[order].tolist()
