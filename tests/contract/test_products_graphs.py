"""Graphs of near points against a loop over all pairs, edge by edge.

Seen red with: a point left out that stands with k others in one place, ties to the largest index,
cells a little smaller than the radius, cells of two items that touch, edges of an unsorted batch in
the order of its items, ≤ taken for <, the farthest kept by max_neighbors.
"""

import pytest
import torch

import torchweft
from torchweft.core.table_copies import is_constant
from torchweft.products import knn_graph, radius_graph
from torchweft.reductions import graphs
from torchweft.reductions.engine import whole


def squares(x):
    wide = torch.promote_types(x.dtype, torch.float32)
    columns = (x[:, None] if x.dim() == 1 else x).to(wide).T
    return sum((c[:, None] - c).square() for c in columns)


def by_loop(square, batch, allowed, key):
    """For each point its neighbours, ascending by key, and the edges of all."""
    edges = []
    for dst in range(len(square)):
        near = [s for s in range(len(square)) if batch[s] == batch[dst] and allowed(s, dst)]
        edges += [(src, dst) for src in key(near, square[:, dst])]
    src, dst = torch.tensor(edges, dtype=torch.int64).reshape(len(edges), 2).T
    return src, dst


def by_distance(near, square):
    return sorted(near, key=lambda s: (float(square[s]), s))


def dense_knn(x, k, batch, loop):
    return by_loop(
        squares(x), batch, lambda s, d: loop or s != d, lambda near, q: by_distance(near, q)[:k]
    )


def dense_radius(x, r, batch, loop, most):
    square = squares(x.double())
    return by_loop(
        square, batch, lambda s, d: (loop or s != d) and bool(square[s, d] < r * r),
        lambda near, q: sorted(by_distance(near, q)[:most]),
    )  # fmt: skip


def same(found, expected):
    assert all(map(is_constant, found))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def draw(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


LATTICE = torch.cartesian_prod(*3 * [torch.arange(3.0)]).repeat(2, 1)
LATTICE = LATTICE[torch.randperm(54, generator=torch.Generator().manual_seed(0))]
ITEMS = torch.randint(0, 7, (30,), generator=torch.Generator().manual_seed(1))
CLOUDS = {
    "even": (draw(30, 3), None),
    "a line": (draw(30), None),
    "high dimension": (draw(30, 6), None),
    "ties and twins": (LATTICE, None),
    "one place": (torch.ones(12, 2), None),
    "two far clusters": (torch.cat([draw(20, 2), 1e7 + draw(5, 2)]).double(), None),
    "items": (draw(30, 3), ITEMS),
    "far numbers of items": (draw(30, 2), 10**9 * (ITEMS - 3)),  # and items without points
    "items of one": (draw(9, 3), torch.arange(9).flip(0)),
    "halves": (draw(30, 2).half(), ITEMS.int()),
    "one": (draw(1, 3), None),
    "none": (draw(0, 3), None),
    "none in items": (draw(0, 3), ITEMS[:0]),
}


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("k", [1, 5, 100])
@pytest.mark.parametrize("cloud", CLOUDS)
def test_nearest(cloud, k, loop):
    x, batch = CLOUDS[cloud]
    items = torch.zeros(len(x)) if batch is None else batch
    same(knn_graph(x, k, batch, loop), dense_knn(x, k, items, loop))


def test_nearest_of_items_in_cells(monkeypatch):
    monkeypatch.setattr(graphs, "POINTS_IN_CELLS", 1)
    for cloud in ("items", "far numbers of items", "items of one"):
        x, batch = CLOUDS[cloud]
        same(knn_graph(x, 4, batch), dense_knn(x, 4, batch, False))


@pytest.mark.parametrize(("loop", "most"), [(False, None), (True, None), (False, 3), (True, 2)])
@pytest.mark.parametrize("r", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("cloud", CLOUDS)
def test_radius(cloud, r, loop, most):
    x, batch = CLOUDS[cloud]
    items = torch.zeros(len(x)) if batch is None else batch
    same(radius_graph(x, r, batch, loop, most), dense_radius(x, r, items, loop, most))


def test_radius_in_chunks(monkeypatch):
    whole_graph = radius_graph(draw(30, 3), 0.5)
    monkeypatch.setattr(graphs, "PAIRS_PER_CHUNK", 50)
    same(radius_graph(draw(30, 3), 0.5), whole_graph)


def test_radius_of_cells_whose_numbers_would_not_fit(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_CELLS", 4)
    x, batch = CLOUDS["items"]
    same(radius_graph(x, 0.2, batch), dense_radius(x, 0.2, batch, False, None))


X = draw(4, 3)
WRONG = {
    "k": (lambda: knn_graph(X, 0), ValueError, r"k is 0: .* Pass k=1"),
    "r": (lambda: radius_graph(X, 0.0), ValueError, r"r is 0.0: .* Pass one"),
    "most": (
        lambda: radius_graph(X, 1.0, max_neighbors=0), ValueError, r"max_neighbors is 0: .* Pass 1",
    ),
    "rank": (lambda: knn_graph(X[None], 1), ValueError, r"x is \(1, 4, 3\): .* Reshape it"),
    "NaN": (
        lambda: knn_graph(torch.tensor([0.0, torch.nan]), 1), ValueError,
        r"x\[1\] is \[nan\]: .* Leave",
    ),
    "integers": (lambda: knn_graph(X.long(), 1), TypeError, r"x is torch.int64: .* Pass x.double"),
    "items": (
        lambda: radius_graph(X, 1.0, torch.zeros(3, dtype=torch.int64)), ValueError,
        r"batch is \(3,\) and there are 4 points: .* Pass zeros",
    ),
    "real items": (
        lambda: radius_graph(X, 1.0, torch.zeros(4)), TypeError, r"batch is torch.float32: .* Pass",
    ),
    "device": (
        lambda: knn_graph(X, 1, torch.zeros(4, dtype=torch.int64, device="meta")), RuntimeError,
        r"batch is on meta and x on cpu: .* Pass batch.to\('cpu'\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    call, error, match = WRONG[name]
    assert issubclass(error, Exception)
    with pytest.raises(error, match=match) as caught:
        call()
    assert isinstance(caught.value, torchweft.WeftError)


def test_rows_of_several_ranks_are_refused():
    class Spread(whole.Whole):
        spread = True

    with (
        whole.using(Spread()),
        pytest.raises(torchweft.BackendError, match=r"inside distributed.all_pairs.*Build it out"),
    ):
        knn_graph(X, 1)
