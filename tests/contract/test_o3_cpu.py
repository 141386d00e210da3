"""Printed loops of channelwise products on the CPU against the oracle and the torch executor.

Seen red with: the last row of a task left out, pieces of rows not added up, results of two
products that overwrite each other, sums of an edge that go on from the edge before, a row that is
turned without its storage's offset, rows of shared weights read by edge.
"""

import numpy as np
import pytest
import torch

import torchweft
from tests.cases.channelwise import GRAPHS, STRUCTURES, make_case, make_structure
from tests.cases.o3_workloads import row_by_row
from tests.conftest import INTERPRETED
from torchweft.core.tables import Slices
from torchweft.o3.channelwise.calls import Call, Result, forward, gradient, trimmed
from torchweft.o3.channelwise.product import channelwise_product
from torchweft.o3.channelwise.structure import Product, Structure
from torchweft.o3.graph import Graph, Tables
from torchweft.testing.contract import Setting, assert_same_bits, check_values

if INTERPRETED:
    pytest.skip("the CPU's own bodies are tested without Triton", allow_module_level=True)

from torchweft.o3.channelwise import numba_path as cpu
from torchweft.o3.channelwise import numba_table as few

FORWARD = forward(weighted=True)
BACKWARD, _ = trimmed(gradient(FORWARD, (True, True, True), (True,)))
UVU, SMALL = STRUCTURES["uvu"], make_structure([(3, 1)], [(1, 1)], lmax=1)


@pytest.fixture(autouse=True)
def unwritten_results_are_nan(monkeypatch):
    monkeypatch.setattr(cpu, "_unwritten", lambda shape, name: np.full(shape, np.nan, name))


def values(structure, call, tables, shared=False, dtype=torch.float64):
    """A random tensor for each slot of a call."""
    generator = torch.Generator().manual_seed(0)
    rows = {"x": tables.num_x, "z": tables.num_z, "y": tables.num_edges}
    rows["w"] = 1 if shared else tables.num_edges
    return [
        torch.randn(rows[s], structure.width(s), dtype=torch.float64, generator=generator).to(dtype)
        for s in call.slots
    ]


def graph(name):
    src, dst, nodes, sources = GRAPHS[name]
    return Graph(src, dst, nodes, sources).tables


@pytest.mark.parametrize(
    ("name", "edges", "shared", "dtype"),
    [
        ("uvu", "hub", True, torch.float64),
        ("uvu ragged", "two sets", False, torch.float32),  # the contract's loops
        ("uvv", "unsorted", False, torch.float32),
        ("uuu", "rows", False, torch.float32),
        ("11w", "self loops", True, torch.bfloat16),
        ("unweighted", "empty rows", False, torch.float16),
    ],
)
def test_values_and_gradients(name, edges, shared, dtype):
    case = make_case(f"cpu, {name}, {edges}", STRUCTURES[name], GRAPHS[edges], shared=shared)
    check_values(case, Setting(dtype=dtype, backend="numba", order=1))


def test_gradients_of_gradients():
    case = make_case("cpu, second", SMALL, GRAPHS["unsorted"])
    check_values(case, Setting(dtype=torch.float64, backend="numba"))


@pytest.mark.parametrize("shared", [False, True])
def test_the_same_bits_on_any_number_of_threads(shared, monkeypatch):
    monkeypatch.setattr(cpu, "SERIAL_MULTIPLICATIONS", 0)
    tables, before, found = graph("hub"), torch.get_num_threads(), []
    given = values(UVU, BACKWARD, tables, shared, torch.float32)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(cpu.run(UVU, BACKWARD, given, tables, shared))
    torch.set_num_threads(before)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert_same_bits(a, b, "threads")


def test_wide_indices_change_nothing():
    tables = graph("hub")
    parts = [
        Slices(*(p.long() if isinstance(p, torch.Tensor) else p for p in part))
        if isinstance(part, Slices)
        else part.long()
        if isinstance(part, torch.Tensor)
        else part
        for part in tables
    ]
    given = values(UVU, FORWARD, tables)
    narrow, wide = (cpu.run(UVU, FORWARD, given, t, False) for t in (tables, Tables(*parts)))
    assert_same_bits(narrow[0], wide[0], "int64")


def test_inputs_that_begin_inside_a_storage():
    tables = graph("unsorted")
    given = values(UVU, FORWARD, tables)
    moved = [torch.cat([t[:1], t])[1:] for t in given]
    (found,), (exact,) = (cpu.run(UVU, FORWARD, v, tables, False) for v in (moved, given))
    assert_same_bits(found, exact, "views")


@pytest.mark.parametrize("body", [cpu, few])
@pytest.mark.parametrize("tables", [graph("no edges"), graph("nobody"), row_by_row(0)])
def test_nothing_gives_zeros(tables, body):
    results = body.run(UVU, BACKWARD, values(UVU, BACKWARD, tables), tables, False)
    rows = tables.num_x, tables.num_edges, tables.num_edges
    for result, slot, count in zip(results, "xyw", rows, strict=True):
        assert result.shape == (count, UVU.width(slot))
        assert not result.any()


@pytest.mark.parametrize("body", [cpu, few])
def test_what_no_path_reaches_is_zero(body):
    call = Call("xyw", (Result("z", ((0, 1, 2),)), Result("x", ())))
    tables = graph("two sets")
    z, x = body.run(UVU, call, values(UVU, call, tables), tables, False)
    assert not z[:, -6:].any()
    assert z[:, :-6].all()
    assert not x.any()
    empty = Structure((2, 2, 2, 2), (Product(0, (), (), (), (), ()),))
    (z,) = body.run(empty, FORWARD, values(empty, FORWARD, tables), tables, False)
    assert z.shape == (4, 2)
    assert not z.any()


def test_a_walk_by_source_gives_all_gradients_on_a_graph_and_one_walk_row_by_row():
    def walks(structure, edges):
        leaves = [
            t.requires_grad_() for t in values(structure, FORWARD, edges, dtype=torch.float32)
        ]
        src, dst = edges.src, edges.dst
        given = None if src is None else Graph(src, dst, edges.num_z, edges.num_x)
        z = channelwise_product(structure, *leaves, given, backend="numba")
        told = torchweft.explain(torch.autograd.grad, z.sum(), leaves)
        return [launch.kernel for launch in told.launches]

    assert walks(SMALL, graph("two sets")) == ["contract_xyw"]
    assert walks(SMALL, row_by_row(5)) == ["contract_xyw"]


def test_long_calls_are_refused(monkeypatch):
    assert cpu.serves(UVU, BACKWARD, torch.bfloat16)
    assert not cpu.serves(UVU, BACKWARD, torch.complex64)
    monkeypatch.setattr(cpu, "MAX_LOOP_TERMS", 3)
    assert not cpu.serves(UVU, BACKWARD, torch.float32)
