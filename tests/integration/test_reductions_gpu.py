"""What only a GPU shows of reductions: side streams, no waiting once a call is settled, graphs,
large offsets, the accuracy of every path for clouds that are wide and far away.
"""

import pytest
import torch
from torch.utils._pytree import tree_map

from torchweft import constant
from torchweft.capturing.graphs import waiting_raises
from torchweft.products import knn_graph, radius_graph
from torchweft.reductions import Genred, Vi, Vj
from torchweft.reductions.cluster import from_matrix
from torchweft.testing import assert_as_accurate, plain_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

ALIASES = ["x = Vi(3)", "y = Vj(3)", "b = Vj(1)"]
SUM = Genred("Exp(-SqDist(x, y)) * b", ALIASES, axis=1)
LOGARITHM = Genred("b - SqDist(x, y)", ALIASES, "LogSumExp", axis=1)
NEAREST = Genred("SqDist(x, y) + 0 * b", ALIASES, "ArgKMin", axis=1, opt_arg=3)
SIZES = {"few rows": (100, 20_000), "many rows": (100_000, 8192)}


def inputs(rows, columns, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = ((rows, 3), (columns, 3), (columns, 1))
    return [torch.rand(*shape, generator=generator, device="cuda") for shape in shapes]


def halves(rows, columns):
    sides = [torch.tensor([[0, n // 2], [n // 2, n]], device="cuda") for n in (rows, columns)]
    return from_matrix(*sides, torch.tensor([[True, False], [True, True]], device="cuda"))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("reduction", [SUM, LOGARITHM, NEAREST])
def test_a_side_stream(reduction, sizes, masked):
    """Its data are made there, behind work that lasts: a launch on another stream reads before."""
    ranges = halves(*SIZES[sizes]) if masked else None
    expected = reduction(*inputs(*SIZES[sizes]), ranges=ranges)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        given = [torch.full_like(t, torch.nan) for t in inputs(*SIZES[sizes])]
        torch.cuda._sleep(10**8)
        for t, late in zip(given, inputs(*SIZES[sizes]), strict=True):
            t.copy_(late)
        found = reduction(*given, ranges=ranges)
    stream.synchronize()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_no_synchronisation_once_a_call_is_settled(sizes, masked):
    given = [t.requires_grad_() for t in inputs(*SIZES[sizes])]
    ranges = tree_map(constant, halves(*SIZES[sizes])) if masked else None

    def call():
        for reduction in (SUM, LOGARITHM):
            torch.autograd.grad(reduction(*given, ranges=ranges).sum(), given)
        NEAREST(*given, ranges=ranges)

    call()
    with waiting_raises():
        call()


@pytest.mark.parametrize("sizes", SIZES)
def test_graph_replay_on_changed_inputs(sizes):
    given = inputs(*SIZES[sizes])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        SUM(*given), LOGARITHM(*given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = SUM(*given), LOGARITHM(*given)
    for t, other in zip(given, inputs(*SIZES[sizes], seed=1), strict=True):
        t.copy_(other)
    graph.replay()
    for mine, reduction in zip(found, (SUM, LOGARITHM), strict=True):
        torch.testing.assert_close(mine, reduction(*given), rtol=0, atol=0)


def test_positions_past_2_to_the_24():
    columns = 2**24 + 5
    y = torch.full((columns, 1), 2.0, device="cuda")
    y[-1], y[2**24 + 1], y[-2] = 0.25, 0.0, 0.625
    distance = Vi(torch.tensor([[0.25]], device="cuda")).sqdist(Vj(y))
    assert distance.argKmin(3, dim=1).tolist() == [[columns - 1, 2**24 + 1, columns - 2]]


@pytest.mark.parametrize("dim", [3, 16, 64])
@pytest.mark.parametrize("rows", [256, 100_000])
def test_wide_clouds_far_away(dim, rows):
    """1,000 kernel widths across and 10,000 away: with and without tensor cores, of float32."""
    generator = torch.Generator("cuda").manual_seed(dim)
    columns = 8192
    near = torch.rand(columns, dim, generator=generator, device="cuda") * 1000 / dim**0.5
    noise = torch.randn(columns, dim, generator=generator, device="cuda") / dim**0.5
    y = near + noise + 1e4
    x = (near + 1e4).repeat(-(-rows // columns), 1)[:rows]
    b = torch.rand(columns, 1, generator=generator, device="cuda")
    aliases = [f"x = Vi({dim})", f"y = Vj({dim})", "b = Vj(1)"]
    out = Genred("Exp(-SqDist(x, y)) * b", aliases, axis=1)(x, y, b)[:256]

    def dense(x, y, b):
        squares = torch.stack([(row - y).square().sum(1) for row in x[:256]])
        return (-squares).exp() @ b

    exact = dense(*(t.double() for t in (x, y, b)))
    assert_as_accurate(out, exact, plain_error(dense(x, y, b), exact, torch.float32))
    assert float((out - exact).norm() / exact.norm()) <= 2e-6


@pytest.mark.parametrize("items", [1, 40])
def test_graphs_of_near_points(items):
    """Coordinates in 64ths: squares are exact, and there are ties."""
    generator = torch.Generator().manual_seed(items)
    x = torch.randint(0, 64, (20_000, 3), generator=generator) / 64
    batch = torch.randint(0, items, (20_000,), generator=generator)
    for graph, size in ((knn_graph, 12), (radius_graph, 0.125)):
        found = graph(x.cuda(), size, batch.cuda())
        expected = graph(x, size, batch)
        torch.testing.assert_close([t.cpu() for t in found], [*expected], rtol=0, atol=0)
