"""Channelwise products of few numbers on the CPU, by one loop for all structures.

What is empty is in test_o3_cpu.

Seen red with: places of an edge's source taken for those of its target, rows of shared weights that
step on, a factor left out, results that begin one number late, terms of other channels, the table
of the first call kept for other structures, tables of the first graph kept for others.
"""

import pytest
import torch

import torchweft
from tests.cases.channelwise import GRAPHS, STRUCTURES, make_case
from tests.conftest import INTERPRETED
from tests.contract.test_o3_cpu import BACKWARD, SMALL, UVU, graph, values
from torchweft import o3
from torchweft.errors import IndexRangeError
from torchweft.o3.channelwise import numba_table as few
from torchweft.o3.channelwise import operator
from torchweft.o3.graph import Graph, Tables
from torchweft.testing import assert_within_bound
from torchweft.testing.contract import Setting, assert_same_bits, check_values

if INTERPRETED:
    pytest.skip("the CPU's own bodies are tested without Triton", allow_module_level=True)


@pytest.fixture(autouse=True)
def every_call_is_one_of_few(monkeypatch):
    monkeypatch.setattr(operator, "LOOP_PRODUCTS", 2**60)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("edges", GRAPHS)
def test_graphs(edges, dtype, shared):
    case = make_case(f"few, {edges}", UVU, GRAPHS[edges], shared=shared)
    check_values(case, Setting(dtype=dtype, order=1))


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name):
    case = make_case(f"few, {name}", STRUCTURES[name], GRAPHS["two sets"])
    check_values(case, Setting(dtype=torch.float32, order=1))


def test_gradients_of_gradients():
    check_values(make_case("few, second", SMALL, GRAPHS["unsorted"]), Setting(dtype=torch.float64))


def wide(part):
    return part.long() if isinstance(part, torch.Tensor) else part


def test_tables_of_wide_numbers_and_views_change_no_bit():
    tables = graph("unsorted")
    given = values(UVU, BACKWARD, tables, dtype=torch.float32)
    exact = few.run(UVU, BACKWARD, given, tables, False)
    moved = [torch.cat([t[:1], t])[1:].T.contiguous().T for t in given]
    others = (
        few.run(UVU, BACKWARD, moved, tables, False),
        few.run(UVU, BACKWARD, given, Tables(*map(wide, tables)), False),
    )
    for other in others:
        for a, b in zip(other, exact, strict=True):
            assert_same_bits(a, b, "tables")


def test_edges_that_were_traced_are_looked_at():
    """A graph that is made inside of torch.compile is not checked there."""
    conv = o3.TensorProductConv("3x1o", "1o", "3x1e", [(0, 0, 0, "uvu", True)])
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    x, y, w = torch.randn(4, 9), torch.randn(2, 3), torch.randn(2, 3)
    for src, dst, match in (
        ([0, 4], [1, 2], r"src\[1\] is 4 but there are 4 rows of x"),
        ([0, 1], [1, -1], r"dst\[1\] is -1 but there are 4 rows to add to"),
    ):
        with pytest.raises(IndexRangeError, match=match):
            compiled(x, y, w, torch.tensor(src), torch.tensor(dst))


def kernels(function, *given):
    return [
        (launch.backend, launch.kernel) for launch in torchweft.explain(function, *given).launches
    ]


def test_who_computes_few(monkeypatch):
    monkeypatch.undo()
    src, few, many = torch.arange(400) % 7, [("numba", "few_z")], [("numba", "contract_z")]

    def launched(item, edges):
        out = "8x2e" if item == "1o" else "8x0e"
        conv = o3.TensorProductConv(f"8x{item}", item, out, [(0, 0, 0, "uvu", True)])
        x, y = (torch.randn(n, conv.irreps_in1[0].ir.dim * c) for n, c in ((7, 8), (edges, 1)))
        return kernels(conv, x, y, torch.randn(edges, 8), Graph(src[:edges], src[:edges], 7))

    monkeypatch.setattr(operator, "LOOP_PRODUCTS", 9 * 3)  # eight channels count for nine
    assert launched("1o", 9) == launched("1o", 400) == few  # that compile no loops of their own
    monkeypatch.setattr(operator, "LOOPS_FROM", 0)
    assert launched("1o", 9) == many
    assert launched("0e", 9) == few
    assert launched("0e", 400) == many


@pytest.mark.parametrize("name", ["uvu", "uuu"])
def test_bits_do_not_depend_on_what_is_asked_for_together(name):
    structure, tables = STRUCTURES[name], graph("unsorted")
    given = values(structure, BACKWARD, tables, dtype=torch.float32)
    together = few.run(structure, BACKWARD, given, tables, False)
    for result, found in zip(BACKWARD.results, together, strict=True):
        (alone,) = few.run(structure, BACKWARD._replace(results=(result,)), given, tables, False)
        assert_same_bits(alone, found, result.slot)


def test_numbers_that_are_negated_when_they_are_read():
    tables = graph("unsorted")
    given = values(UVU, BACKWARD, tables)
    negated, exact = (
        few.run(UVU, BACKWARD, [first, *given[1:]], tables, False)
        for first in (torch._neg_view(given[0]), -given[0])
    )
    for a, b in zip(negated, exact, strict=True):
        assert_same_bits(a, b, "negated")


def test_results_begin_where_torch_lets_tensors_begin():
    """Products of matrices by MKL have other bits elsewhere; results that nobody asks for move."""
    tables = graph("unsorted")
    for result in few.run(UVU, BACKWARD, values(UVU, BACKWARD, tables), tables, False):
        assert result.data_ptr() % 64 == 0
        assert result.untyped_storage().nbytes() == result.nbytes


def test_calls_that_were_settled_are_of_their_own_graphs():
    """Of several graphs of one kind, and structures of the same shapes."""
    layers = [
        o3.TensorProductConv("3x1o", "1o", "3x1e", [(0, 0, 0, "uvu", True, factor)])
        for factor in (1.0, 3.0)
    ]
    x, y, w = torch.randn(4, 9), torch.randn(6, 3), torch.randn(6, 3)
    src, dst = torch.tensor([0, 1, 2, 3, 3, 1]), torch.tensor([1, 0, 3, 2, 1, 2])
    graphs = Graph(src, dst, 4), Graph(dst, src, 4)
    for _ in range(3):
        for layer in layers:
            for g in graphs:
                leaves = [t.clone().requires_grad_() for t in (x, y, w)]
                found = layer(*leaves, g)
                grads = torch.autograd.grad(found.square().sum(), leaves)
                kept = [t.double().requires_grad_() for t in (x, y, w)]
                rows = layer.recipe(kept[0][g.src], *kept[1:])
                exact = rows.new_zeros(4, 9).index_add(0, g.dst, rows)
                further = torch.autograd.grad(exact.square().sum(), kept)
                for a, b in zip((found, *grads), (exact, *further), strict=True):
                    assert_within_bound(a, b.detach(), b.detach().abs() + b.abs().max(), 64)
