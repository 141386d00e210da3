"""Nearest neighbours by cells against all pairs, index by index.

Seen red with: 3^D cells taken for enough, their borders a cell too far on either side or taken for
the end of the points, ties to the largest index or left to the order of the cells, a row of cells
forgotten, numbers of cells that run into the next line or out of the table; a tree's nodes left out
at the distance of the last neighbour, boxes of other nodes, heaps ordered by distance alone.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchweft
from tests.conftest import INTERPRETED
from tests.host_waits import steps
from torchweft.reductions import BlockSparsity, Vi, Vj
from torchweft.reductions.engine import nearest as knn
from torchweft.reductions.engine import tree
from torchweft.reductions.engine.nearest import nearest
from torchweft.testing import assert_within_bound

pytestmark = pytest.mark.kernels


def by_all_pairs(x, y, k):
    """Stable sort of squared distances: the smallest index first."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, y = x.to(wide), y.to(wide)
    square = torch.zeros(len(x), len(y), dtype=wide)
    for a, b in zip(x.T, y.T, strict=True):
        square += (a[:, None] - b).square()
    found = square.sort(dim=1, stable=True).indices[:, :k]
    return torch.nn.functional.pad(found, (0, k - found.shape[1]), value=-1)


def assert_exact(x, y, k):
    torch.testing.assert_close(nearest(x, y, k), by_all_pairs(x, y, k), rtol=0, atol=0)


def draw(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", [1, 2, 3, 5])
@pytest.mark.parametrize("k", [1, 4, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_even_points(dim, k, dtype):
    assert_exact(draw(300, dim).to(dtype), draw(700, dim, seed=1).to(dtype), k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_go_to_the_smallest_index(dtype):
    """A lattice in random order, and every point twice."""
    line = torch.arange(6.0, dtype=dtype)
    lattice = torch.cartesian_prod(line, line, line).repeat(2, 1)
    lattice = lattice[torch.randperm(len(lattice), generator=torch.Generator().manual_seed(0))]
    assert_exact(lattice, lattice, 9)


CLOUDS = {
    "uneven": draw(500, 3) ** 8,
    "two far clusters": torch.cat([draw(300, 3), 1e4 + draw(7, 3, seed=1)]),
    "a curve": torch.stack([draw(400, 1)[:, 0] ** n for n in (1, 2, 3)], 1),
    "a plane": torch.cat([draw(400, 2), torch.ones(400, 1)], 1),
    "one place": torch.ones(50, 3),
    "far away": 1e5 + draw(300, 3),
}


@pytest.mark.parametrize("name", CLOUDS)
@pytest.mark.parametrize("other", CLOUDS)
def test_uneven_points(name, other):
    """Also queries that are nowhere near the points."""
    assert_exact(CLOUDS[name], CLOUDS[other], 6)


LATTICE = torch.cartesian_prod(*[torch.arange(7.0)] * 3).repeat(2, 1)
LATTICE = LATTICE[torch.randperm(len(LATTICE), generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("name", [*CLOUDS, "ties"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tree(name, dtype):
    """Also queries elsewhere, few dimensions, and all points."""
    pytest.importorskip("numba")
    y = (CLOUDS | {"ties": LATTICE})[name].to(dtype)
    for x, k in ((y, 6), (y, 1), (draw(40, 3).to(dtype), len(y)), (1e3 * draw(9, 3).to(dtype), 3)):
        for dim in (1, 2, 3):
            given = x[:, -dim:], y[:, -dim:], k
            found = tree.nearest_by_tree(*given)
            torch.testing.assert_close(found, by_all_pairs(*given), rtol=0, atol=0)


SPELLINGS = {
    "sqdist": lambda x, y: Vi(x).sqdist(Vj(y)),
    "the other way": lambda x, y: Vj(y).sqdist(Vi(x)),
    "a sum of squares": lambda x, y: ((Vi(x) - Vj(y)) ** 2).sum(-1),
    "a product": lambda x, y: (Vj(y) - Vi(x)).sqnorm2(),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_lazy_tensors_find_neighbours_by_the_tree(monkeypatch, name):
    """Each entry of a batch, and not where the formula, the mask or the points do not fit it."""
    pytest.importorskip("numba")
    for least in ("LEAST_ROWS", "LEAST_COLUMNS", "LEAST_PAIRS"):
        monkeypatch.setattr(tree, least, 1)
    calls, by_tree = [], tree.nearest_by_tree
    monkeypatch.setattr(
        tree, "nearest_by_tree", lambda *given: calls.append(None) or by_tree(*given)
    )
    x, y = draw(2, 40, 3), draw(50, 3, seed=1)
    spelled = SPELLINGS[name]
    found = spelled(x, y).argKmin(7, dim=2, backend="numba")
    assert len(calls) == 2
    for of, near in zip(x, found, strict=True):
        torch.testing.assert_close(near, by_all_pairs(of, y, 7), rtol=0, atol=0)
    first = spelled(x[0], y).argmin(1, backend="numba")
    torch.testing.assert_close(first, found[0, :, :1], rtol=0, atol=0)
    assert len(calls) == 3
    y[0, 0] = torch.inf
    (2 * spelled(x[0], y)).argKmin(7, dim=1, backend="numba")
    spelled(x[0], y).argKmin(7, dim=1, backend="numba")
    lazy = spelled(x[0], draw(50, 3))
    lazy.ranges = BlockSparsity.from_batch(torch.zeros(40).long(), torch.zeros(50).long()).ranges
    lazy.argKmin(7, dim=1, backend="numba")
    assert len(calls) == 3


def test_nearest_uses_the_tree(monkeypatch):
    pytest.importorskip("numba")
    for name in ("LEAST_ROWS", "LEAST_COLUMNS", "LEAST_PAIRS"):
        monkeypatch.setattr(tree, name, 1)
    monkeypatch.setattr(knn, "_among_cells", None)
    assert_exact(draw(30, 2), draw(60, 2, seed=1), 5)


@pytest.mark.parametrize("backend", ["numba", "torch", None])
def test_more_neighbours_than_kernels_keep(backend):
    """K smallest of 2000, and of 1200: −1 and +∞ where there are fewer."""
    if backend == "numba":
        pytest.importorskip("numba")
    x, y = draw(3, 4), draw(2000, 4, seed=1)
    for points in (y, y[:1200]):
        values, found = Vi(x).sqdist(Vj(points)).Kmin_argKmin(1500, dim=1, backend=backend)
        torch.testing.assert_close(found, by_all_pairs(x, points, 1500), rtol=0, atol=0)
        assert bool((values[:, len(points) :] == torch.inf).all())
        there = values[:, : len(points)]
        exact = (x[:, None] - points[found[:, : len(points)]]).double().square().sum(-1)
        assert_within_bound(there, exact, exact, 4)  # so they ascend but for rounding


def test_few_pairs_at_a_time(monkeypatch):
    monkeypatch.setattr(knn, "PAIRS_PER_CHUNK", 100)
    assert_exact(draw(100, 2), draw(200, 2, seed=1), 5)


def test_cells_that_are_few(monkeypatch):
    monkeypatch.setattr(knn, "MOST_CELLS", 2)
    assert_exact(draw(100, 3), draw(200, 3, seed=1), 5)


def test_fewer_points_than_asked_for():
    assert_exact(draw(10, 3), draw(4, 3, seed=1), 6)
    assert_exact(draw(10, 3), draw(4, 3, seed=1), 4)
    assert_exact(draw(0, 3), draw(4, 3, seed=1), 2)
    assert bool((nearest(draw(10, 3), draw(0, 3), 2) == -1).all())


def test_points_cannot_be_mapped():
    with pytest.raises(torchweft.ShapeError, match=r"x is mapped by torch.vmap: .* Call once for"):
        torch.vmap(lambda x: nearest(x, x, 2))(draw(3, 5, 2))


def test_infinite_points():
    x = draw(20, 2)
    y = draw(30, 2, seed=1)
    y[3] = torch.inf
    assert_exact(x, y, 5)


def box_of(y):
    low, high = y.double().aminmax(dim=0)
    return knn._Box(low.tolist(), high.tolist(), low, high)


@pytest.mark.parametrize("reach", [1, 2])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_runs_end_inside_of_the_border(dim, reach):
    y = draw(300, dim)
    grid = knn._Grid(y, box_of(y), 0.3)
    corners = torch.stack([torch.zeros_like(grid.most), grid.most]).long()
    middles = grid.key(corners[:, None] + knn._steps(dim, reach, corners.device))
    assert middles.min() - 1 >= 0
    assert middles.max() + 2 <= grid.numbers()


class DividesAsAGpu(TorchDispatchMode):
    """Torch on a GPU multiplies by the inverse of a number of the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.div.Tensor and not isinstance(args[1], torch.Tensor):
            return args[0] * (1 / args[1])
        return func(*args, **(kwargs or {}))


def test_the_host_counts_the_cells_that_a_gpu_numbers():
    """Else runs leave the table of cells.  Seen red with quotients in place of products."""
    for seed in range(300):
        y = draw(50 + seed, 1, seed=seed).double()
        box = box_of(y)
        with DividesAsAGpu():
            grid = knn._Grid(y, box, (box.high[0] - box.low[0]) / len(y))
        last = grid.key(grid.most.long()) + max(knn.RUNS[2])
        assert last + 2 < len(grid.starts)


@pytest.mark.skipif(not INTERPRETED, reason="kernels run here in the interpreter alone")
@pytest.mark.parametrize("reach", [1, 2])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_kernel(dim, reach):
    """Points that coincide and cells of all sizes, empty ones too, queries outside of them."""
    x, y = (draw(n, dim, seed=n) * 2 - 0.5 for n in (9, 300))
    y = (y**3 * 256).round() / 256
    grid = knn._first_grid(y, 4, box_of(y))
    assert knn._has_kernel(grid, x, y, 4)
    cells = grid.cells(x)
    near, farthest = knn._by_kernel(grid, cells, knn._steps(dim, reach, x.device), x, y, 4)
    expected, final = knn._look(grid, x, y, 4, reach)
    assert bool(final.any())
    border = knn._border(grid, x, cells, reach)
    torch.testing.assert_close(farthest.double().sqrt() < border, final & border.isfinite())
    torch.testing.assert_close(near[final], expected[final], rtol=0, atol=0)


def test_the_host_reads_points_twice_before_it_looks(monkeypatch):
    """Their box and the filled cells; then once a look.  Seen red with a box for each grid."""
    monkeypatch.setattr(knn, "worth_a_tree", lambda *_: False)
    looks = iter([torch.arange(500) % 2 == 0, torch.ones(250, dtype=torch.bool)])

    def look(grid, x, y, k, reach):
        return torch.zeros(len(x), k, dtype=torch.int64), next(looks)

    monkeypatch.setattr(knn, "_look", look)
    found = steps(lambda: nearest(draw(500, 3), draw(400, 3, seed=1), 4))
    assert found == ["read", "read", "rows", "rows"]


@pytest.mark.parametrize("size", [5e-324, 1e150, 1e307])
def test_boxes_of_any_size(monkeypatch, size):
    """Seen red with the product of their sides, which is infinite, and with cells of no size."""
    monkeypatch.setattr(knn, "worth_a_tree", lambda *_: False)
    y = draw(30, 3).double().round(decimals=1) * size
    assert_exact(y, y, 2)


@pytest.mark.parametrize("dim", [1, 3])
def test_boxes_wider_than_their_dtype(monkeypatch, dim):
    """Their sides are infinite; seen red with ends that are finite alone."""
    monkeypatch.setattr(knn, "worth_a_tree", lambda *_: False)
    y = torch.linspace(-1, 1, 9, dtype=torch.float64).unsqueeze(1).expand(9, dim)
    y = y * torch.finfo(torch.float64).max
    assert nearest(y, y, 1)[:, 0].tolist() == list(range(9))


def test_cost():
    """Evenly spread points: most queries end where they begin, the others beside."""
    x, y = draw(2000, 3), draw(20_000, 3, seed=1)
    grid = knn._first_grid(y, 8, box_of(y))
    for reach, cost, share in ((1, 20, 0.7), (2, 100, 1.0)):
        starts, ends = knn._lists(grid, grid.cells(x), knn._steps(3, reach, x.device))
        _, final = knn._look(grid, x, y, 8, reach)
        assert float((ends - starts).sum(1).double().mean()) < cost * 8
        assert float(final.double().mean()) >= share


ERRORS = {
    "dims": (
        lambda: nearest(draw(3, 2), draw(3, 3), 1),
        torchweft.ShapeError,
        r"x is \(3, 2\), y is",
    ),
    "none": (
        lambda: nearest(draw(3, 2), draw(3, 2), 0),
        torchweft.ShapeError,
        r"k is 0.*at least 1",
    ),
    "dtypes": (
        lambda: nearest(draw(3, 2), draw(3, 2).double(), 1),
        torchweft.DTypeError,
        r"x is torch.float32 but y is torch.float64.*y.to",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, error, text = ERRORS[name]
    with pytest.raises(error, match=text):
        call()
