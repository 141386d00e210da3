"""Energies of nodes and graphs by their kernel, in the interpreter: values, gradients, launches.

Seen red with: a graph's nodes in the order of rows, the shift left out, the first part alone, nodes
behind the first step left out, the gradient of the total energy left out.
"""

import pytest
import torch
from torch.autograd import forward_ad

from tests.conftest import INTERPRETED
from torchweft import explain
from torchweft.o3.edge_vectors.operator import rows_of_totals
from torchweft.o3.energies import functions
from torchweft.o3.energies.functions import NODES_PER_STEP, graph_energies, sums_of_graphs
from torchweft.testing import assert_within_bound

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not INTERPRETED, reason="kernels run in the interpreter"),
]


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Tensors on the CPU are taken as those on a GPU."""
    monkeypatch.setattr(functions, "on_gpu", lambda tensor: True)


def given(nodes, parts, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(nodes, generator=generator, dtype=dtype) for _ in range(parts + 1)]
    scale, shift = (torch.randn(1, generator=generator, dtype=dtype) for _ in range(2))
    return drawn[1:], 100 * drawn[0], scale, shift


def owners(nodes, graphs):
    """Graphs in any order, the last without nodes."""
    index = torch.randperm(nodes, generator=torch.Generator().manual_seed(0)) % max(graphs - 1, 1)
    return rows_of_totals(index, graphs) if graphs > 1 else None


def exact(parts, alone, scale, shift, tables):
    """In float64, and sums of absolute values."""
    nodes, size = (
        shift + scale * sum(parts),
        shift.abs() + scale.abs() * sum(p.abs() for p in parts),
    )
    index = torch.zeros(len(alone), dtype=torch.int64) if tables is None else tables.dst
    graphs = 1 if tables is None else tables.num_z

    def sums(x):
        return x.new_zeros(graphs).index_add(0, index, x)

    each = sums(nodes), sums(alone) + sums(nodes), alone + nodes
    return each, (sums(size), sums(alone.abs()) + sums(size), alone.abs() + size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("graphs", [1, 4])
@pytest.mark.parametrize(("nodes", "parts"), [(1, 1), (9, 2), (2 * NODES_PER_STEP + 3, 3)])
def test_values(nodes, parts, graphs, dtype):
    case, tables = given(nodes, parts, dtype), owners(nodes, graphs)
    found = graph_energies(*case, tables)
    assert found.nodes.dtype == torch.float64
    wide = [[p.double() for p in case[0]], *(t.double() for t in case[1:])]
    for value, right, size in zip(found, *exact(*wide, tables), strict=True):
        assert_within_bound(value.to(dtype), right, size, nodes * (parts + 2))


@pytest.mark.parametrize("shape", [(0,), (0, 2)])
def test_graphs_without_nodes(shape):
    """Seen red with: a width that torch is to find."""
    assert not sums_of_graphs(torch.zeros(shape), owners(0, 3)).any()
    found = graph_energies(*given(0, 2, torch.float32), owners(0, 3))
    assert found.energy.tolist() == [0.0] * 3


@pytest.mark.parametrize("graphs", [1, 3])
@pytest.mark.parametrize("parts", [1, 2])
def test_gradients_of_both_orders(parts, graphs):
    varied, alone, scale, shift = given(6, parts, torch.float64)
    tables = owners(6, graphs)

    def curved(*rows):
        return tuple(t.sin() for t in graph_energies(rows, alone, scale, shift, tables))

    rows = [part.requires_grad_() for part in varied]
    assert torch.autograd.gradcheck(curved, rows)
    assert torch.autograd.gradgradcheck(curved, rows)


def test_one_launch_and_one_product_back():
    (first, last), alone, scale, shift = given(6, 2, torch.float32)
    first.requires_grad_()

    def launched():
        return graph_energies([first, last], alone, scale, shift, None)

    assert [made.kernel for made in explain(launched).launches] == ["node_energies"]
    interaction = launched().interaction
    assert not explain(lambda: torch.autograd.grad(interaction, first)).launches


def test_forward_derivatives_and_gradients_of_many_cotangents():
    """Seen red with: the kernel's function, which has no tangents."""
    (part,), alone, scale, shift = given(6, 1, torch.float64)

    def energy(part):
        return graph_energies([part], alone, scale, shift, None).energy

    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(energy(forward_ad.make_dual(part, part))).tangent
    assert_within_bound(tangent, scale * part.sum(), (scale * part).abs().sum()[None], 8)

    def curved(part):
        return energy(part.sin()).sum()

    right = torch.diag(-scale * part.sin())
    for found in (
        torch.autograd.functional.hessian(curved, part),
        torch.func.hessian(curved)(part),
    ):
        assert_within_bound(found, right, right.abs(), 8)
    found = torch.autograd.functional.jacobian(energy, part, vectorize=True)
    assert (found == scale).all()


def test_what_varies_beside_the_parts_is_composed():
    parts, alone, scale, shift = given(6, 2, torch.float64)
    scale.requires_grad_()

    def summed(scale):
        return graph_energies(parts, alone, scale, shift, None).energy

    assert torch.autograd.gradcheck(summed, (scale,))
    energy = torch.vmap(lambda alone: graph_energies(parts, alone, scale, shift, None).energy)(
        torch.stack([alone, 2 * alone])
    )
    right = exact(parts, 2 * alone, scale, shift, None)
    assert_within_bound(energy[1], right[0][1].detach(), right[1][1].detach(), 30)
