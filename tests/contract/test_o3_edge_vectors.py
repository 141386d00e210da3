"""The contract of vectors of edges and of their lengths: values, derivatives, doors, launches.

The cases are in tests.cases.edge_vectors.

Seen red with: sums of the edges that leave a node added instead of taken off, the order of sorted
edges left out, a shift left out, a gradient of the shift alone; totals in the order of rows, or of
edges by their other end.
"""

import pytest
import torch

from tests.cases.channelwise import GRAPHS
from tests.cases.edge_vectors import make_case, suite
from tests.conftest import BACKENDS, INTERPRETED
from torchweft import explain
from torchweft.errors import IndexRangeError, ShapeError
from torchweft.o3.edge_vectors.operator import (
    edge_lengths,
    edge_vectors,
    rows_of_edges,
    rows_of_totals,
    totals,
)
from torchweft.o3.graph import Graph, graph_of
from torchweft.testing import assert_as_accurate, assert_within_bound, plain_error
from torchweft.testing.contract import BODY_CHECKS, Setting, check_values
from torchweft.testing.doors import DOOR_CHECKS, check_autocast, check_numerical

pytestmark = pytest.mark.kernels

SUITE = suite()
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels run in the interpreter")
native = pytest.mark.skipif(INTERPRETED, reason="kernels run in the interpreter, doors without it")
UNSORTED = GRAPHS["unsorted"]
DOOR = make_case("door", UNSORTED)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SUITE.cases, ids=lambda case: case.name)
def test_values_and_derivatives(case, dtype):
    if INTERPRETED and "hub" in case.name:
        pytest.skip("an interpreted program takes a millisecond")
    check_values(case, Setting(dtype=dtype, backend=BACKENDS[-1]))


@pytest.mark.parametrize("case", SUITE.full, ids=lambda case: case.name)
@pytest.mark.parametrize("check", BODY_CHECKS[1:])
def test_promises(check, case):
    check(case, Setting(backend=BACKENDS[-1]))


@native
@pytest.mark.parametrize("check", [check for check in DOOR_CHECKS if check is not check_autocast])
def test_doors(check):
    check(DOOR)


@native
@pytest.mark.parametrize("case", SUITE.small, ids=lambda case: case.name)
def test_numerical_gradients(case):
    check_numerical(case)


@native
def test_a_graph_is_not_mapped():
    x, index = torch.randn(5, 3), torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ShapeError, match=r"mapped by torch\.vmap.*Pass in_dims=None"):
        torch.vmap(lambda i: edge_vectors(x, Graph(i, i, 5)))(index)


def graph(edges=UNSORTED):
    return graph_of(edges.src, edges.dst, 11, 11)


def lengths(function, v):
    """|v|, its gradient g for some cotangent, and the gradient of Σ sin g."""
    v = v.clone().requires_grad_()
    r = function(v)
    (g,) = torch.autograd.grad(r.square().sum() + r.sin().sum(), v, create_graph=True)
    (second,) = torch.autograd.grad(g.sin().sum(), v)
    return [r, g, second]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 40, 2**15 + 1])
def test_lengths_and_both_orders(rows, dtype):
    """As accurate as torch's own; many rows go through a loop on the CPU."""
    if INTERPRETED and rows > 40:
        pytest.skip("the same kernel as for fewer rows, in a thousand programs")
    draws = [torch.randn(rows, 3, generator=torch.Generator().manual_seed(n)) for n in range(4)]

    def plain(v):
        return v.square().sum(-1, keepdim=True).sqrt()

    found = lengths(edge_lengths, draws[0].to(dtype))
    exact = [lengths(plain, v.double()) for v in draws]
    rounded = [lengths(plain, v) for v in draws]
    for n, value in enumerate(found):
        noise = [plain_error(p[n], e[n], dtype) for p, e in zip(rounded, exact, strict=True)]
        assert_as_accurate(value, exact[0][n], torch.stack(noise))


@pytest.mark.parametrize("rows", [1, 2**15 + 1])
def test_a_length_of_zero_has_no_gradient(rows):
    if INTERPRETED and rows > 1:
        pytest.skip("the same kernel as for one row")
    v = torch.zeros(rows, 3, requires_grad=True)
    r = edge_lengths(v)
    (g,) = torch.autograd.grad(r.sum(), v)
    assert not r.any()
    assert not g.any()


def test_sums_of_edges_are_by_the_graphs_tables():
    of, v = graph(), torch.randn(40, 2, dtype=torch.float64)
    exact = v.new_zeros(of.num_nodes, 2).index_add(0, of.dst.long(), v)
    size = v.new_zeros(of.num_nodes, 2).index_add(0, of.dst.long(), v.abs())
    assert_within_bound(totals(v, rows_of_edges(of)), exact, size, 40)


def test_a_graph_out_of_range():
    batch = torch.tensor([0, 3, 1])
    text = r"batch\[1\] is 3 but there are 3 graphs: .* lie in 0\.\.2.*or pass the ptr of all"
    with pytest.raises(IndexRangeError, match=text):
        rows_of_totals(batch, 3)


@interpreted
def test_one_kernel_each_way():
    x, shift = torch.randn(11, 3, requires_grad=True), torch.randn(40, 3)
    of = graph()

    def names(function):
        return [launch.kernel for launch in explain(function).launches]

    assert names(lambda: edge_vectors(x, of, shift)) == ["edge_differences"]
    v = edge_vectors(x, of, shift)
    assert names(lambda: v.sum().backward(retain_graph=True)) == ["node_sums"]
    r = edge_lengths(v)
    assert names(lambda: edge_lengths(v)) == ["rows"]
    assert names(lambda: r.sum().backward()) == ["rows", "node_sums"]
    rows, index = torch.randn(40, 1), torch.arange(40) % 3
    assert names(lambda: totals(rows, rows_of_totals(index, 3))) == ["node_sums"]
