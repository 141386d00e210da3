"""Products of parts of 16 bits against float64, in the interpreter: h A, h^T g, and their range.

Seen red with: low parts left out; powers of two of rows of h left out of a sum over them, or of y;
those of another path, or of each path into a block of z its own; a piece of a sum that goes on;
rows in their own order.
"""

import pytest
import torch

from tests.conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("kernels run here in the interpreter alone", allow_module_level=True)

from tests.cases.channelwise import GRAPHS, STRUCTURES
from tests.cases.radial_linear import make_case
from torchweft.o3.graph import graph_of
from torchweft.o3.radial_linear import launch as parts
from torchweft.o3.radial_linear.operator import radial_product
from torchweft.testing import assert_within_bound
from torchweft.testing.contract import Setting, check_values

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]

SIZES = [(70, 40, 150), (130, 64, 200), (5, 128, 70), (1, 33, 17)]


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def uneven(tensor, dim):
    """Rows or columns of very different sizes, and one of zeros."""
    steps = torch.linspace(-60, 60, tensor.shape[dim]).exp2()
    steps[-1] = 0
    return tensor * (steps[:, None] if dim == 0 else steps)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_formed_weights(size):
    rows, hidden, width = size
    h, a = uneven(randn(rows, hidden), 0), uneven(randn(hidden, width, seed=1), 1)
    exact, scale = h.double() @ a.double(), h.double().abs() @ a.double().abs()
    assert_within_bound(parts.formed_weights(h, a), exact, scale, hidden)


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("size", [(70, 40, 150), (33, 128, 70), (130, 16, 200)], ids=str)
def test_summed_products(size, pieces, monkeypatch):
    monkeypatch.setattr(parts, "processors", lambda device: pieces)
    rows, hidden, width = size
    h, g = randn(rows, hidden), uneven(randn(rows, width, seed=1), 1)
    exact, scale = h.double().t() @ g.double(), h.double().abs().t() @ g.double().abs()
    assert_within_bound(parts.summed_products(h, g), exact, scale, rows)
    h = uneven(h, 0)
    exact, scale = h.double().t() @ g.double(), h.double().abs().t() @ g.double().abs()
    assert_within_bound(parts.summed_products(h, g), exact, scale, rows)


def test_nothing_to_multiply():
    assert parts.formed_weights(randn(0, 40), randn(40, 7)).shape == (0, 7)
    assert parts.formed_weights(randn(5, 40), randn(40, 0)).shape == (5, 0)
    assert not parts.summed_products(randn(0, 40), randn(0, 7)).any()


def test_small_numbers_beside_large_ones():
    """They are right to 2^-38 of their row's largest."""
    h, a = torch.zeros(2, 40), torch.zeros(40, 1)
    h[0, 0], h[:, 1], a[1] = 1, 2**-20 / 3, 1
    large, alone = (parts.formed_weights(h, a)[:, 0] - h[:, 1]).double().abs().tolist()
    assert 0 < large <= 2**-38
    assert alone <= 2**-43


@pytest.mark.parametrize(("kind", "name"), [("uvu", "unsorted"), ("uvu ragged", "sorted")])
def test_rows_and_columns_of_all_sizes(kind, name):
    """In the forward kernel columns share a power of two where they add to one block of z."""
    case = make_case(f"sizes, {kind}, {name}", STRUCTURES[kind], GRAPHS[name], 40)
    x, y, h, a = (t.float() for t in case.inputs)
    h, a = uneven(h, 0), uneven(a, 1)
    edges = GRAPHS[name]
    graph = graph_of(edges.src, edges.dst, edges.num_nodes, edges.num_sources)
    wide = [t.double() for t in (x, y, h, a)]
    exact = case.oracle(*wide, **case.tables)
    size = case.magnitude(*(t.abs() for t in wide), **case.tables)
    found = radial_product(STRUCTURES[kind], x, y, h, a, graph, backend="triton")
    assert_within_bound(found, exact, size, 40)


def test_derivatives_by_parts():
    case = make_case("derivatives by parts", STRUCTURES["uvu"], GRAPHS["sorted"], 40)
    check_values(case, Setting(backend="triton", order=1))
