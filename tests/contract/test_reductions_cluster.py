"""Clusters, ranges and centroids: worked vectors of the guide, and the formulas on random points.

Seen red with: a sort the other way round, labels packed into 10 bits an axis, cells and sums in a
narrower dtype, points summed in their own order, columns of keep's transpose exchanged, slices
that do not add up, the clamp of the weights taken out.
"""

import itertools

import numpy as np
import pytest
import torch

import torchweft
from torchweft.reductions import cluster
from torchweft.reductions.cluster import arrays
from torchweft.testing import assert_within_bound

X = [[0.05, 0.05], [0.9, 0.9], [0.15, 0.02], [0.55, 0.10], [0.95, 0.85], [0.52, 0.18]]
Y = [[0.1, 0.1], [0.6, 0.1], [0.62, 0.12], [0.9, 0.95]]


def same(found, expected):
    torch.testing.assert_close(
        torch.as_tensor(found), torch.as_tensor(expected), rtol=0, atol=0, check_dtype=False
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_worked_vector_of_the_plane(dtype):
    x, y = torch.tensor(X, dtype=dtype), torch.tensor(Y, dtype=dtype)
    labels_x, labels_y = cluster.grid_cluster(x, 0.25), cluster.grid_cluster(y, 0.25)
    same(labels_x, [0, 3, 0, 2, 3, 1])
    same(labels_y, [0, 1, 1, 2])
    ranges_x, centroids_x, weights_x = cluster.cluster_ranges_centroids(x, labels_x)
    ranges_y, centroids_y, _ = cluster.cluster_ranges_centroids(y, labels_y)
    same(ranges_x, [[0, 2], [2, 3], [3, 4], [4, 6]])
    same(ranges_y, [[0, 1], [1, 3], [3, 4]])
    same(weights_x, [2, 1, 1, 2])
    exact = [[0.1, 0.035], [0.52, 0.18], [0.55, 0.1], [0.925, 0.875]]
    exact = torch.tensor(exact, dtype=torch.float64)
    assert_within_bound(centroids_x, exact, exact, 3)
    keep = (centroids_x[:, None] - centroids_y).square().sum(-1) < 0.3
    same(keep, [[1, 1, 0], [1, 1, 0], [1, 1, 0], [0, 0, 1]])
    found = cluster.from_matrix(ranges_x, ranges_y, keep)
    same(found[0], ranges_x)
    same(found[1], [2, 4, 6, 7])
    same(found[2], [[0, 1], [1, 3], [0, 1], [1, 3], [0, 1], [1, 3], [3, 4]])
    same(found[3], ranges_y)
    same(found[4], [3, 6, 7])
    same(found[5], [[0, 2], [2, 3], [3, 4], [0, 2], [2, 3], [3, 4], [4, 6]])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_worked_vector_of_from_matrix(dtype):
    ranges_i = torch.tensor([[2, 5], [7, 12]], dtype=dtype)
    ranges_j = torch.tensor([[1, 4], [4, 9], [20, 30]], dtype=dtype)
    keep = torch.tensor([[1, 1, 0], [0, 1, 0]], dtype=torch.uint8)
    found = cluster.from_matrix(ranges_i, ranges_j, keep)
    same(found[1], [2, 3])
    same(found[2], [[1, 4], [4, 9], [4, 9]])
    same(found[4], [1, 3, 3])
    same(found[5], [[2, 5], [2, 5], [7, 12]])
    assert {t.dtype for t in found} == {torch.int64}
    turned = cluster.swap_axes(found)
    for one, other in zip(turned, cluster.from_matrix(ranges_j, ranges_i, keep.T), strict=True):
        same(one, other)
    assert cluster.swap_axes(None) is None


def test_nothing_kept_gives_empty_lists():
    found = cluster.from_matrix(
        torch.tensor([[0, 2]]), torch.tensor([[0, 3]]), torch.zeros(1, 1, dtype=torch.bool)
    )
    assert found[2].shape == found[5].shape == (0, 2)
    same(found[1], [0])


@pytest.mark.parametrize("dim", [1, 2, 3, 5])
def test_labels_are_ranks_of_cells(dim):
    torch.manual_seed(dim)
    x = torch.randn(300, dim)
    cells = ((x.double() - x.double().amin(0)) / 0.4).floor().long().tolist()
    ranks = {cell: rank for rank, cell in enumerate(sorted(set(map(tuple, cells))))}
    same(cluster.grid_cluster(x, 0.4), [ranks[tuple(cell)] for cell in cells])


def test_labels_of_cells_with_their_own_edges():
    x = torch.tensor(list(itertools.product([0.0, 1.0, 2.0], repeat=2)))
    same(cluster.grid_cluster(x, torch.tensor([1.0, 3.0])), [0, 0, 0, 1, 1, 1, 2, 2, 2])


def test_cells_far_apart():
    """2^40 cells an axis: their numbers fit no packed key."""
    x = torch.tensor([[0.0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1], [1, 0, 0, 0]]).double()
    same(cluster.grid_cluster(x, 2.0**-40), [0, 3, 1, 2])


def test_many_cells():
    """3000 an axis, of 9 million."""
    line = torch.arange(3000.0)
    x = torch.cat([torch.stack([line, line.flip(0)], 1), torch.stack([line, line], 1)])
    falls, rises = 2 * line + (line < 1499.5), 2 * line + (line > 1499.5)  # two cells a line
    same(cluster.grid_cluster(x, 1.0), torch.cat([falls, rises]))


def test_no_points():
    same(cluster.grid_cluster(torch.zeros(0, 3), 1.0), torch.zeros(0))
    ranges, centroids, weights = cluster.cluster_ranges_centroids(
        torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)
    )
    assert (ranges.shape, centroids.shape, weights.shape) == ((0, 2), (0, 3), (0,))


def test_sorting_keeps_the_order_within_a_cluster():
    labels = torch.randint(3, (1000,), generator=torch.Generator().manual_seed(0))
    number = torch.arange(1000)
    (sorted_number, pairs), sorted_labels = cluster.sort_clusters(
        (number, torch.stack([number, number], 1)), labels
    )
    order = sorted(range(1000), key=lambda i: (int(labels[i]), i))
    same(sorted_number, order)
    same(pairs[:, 1], order)
    same(sorted_labels, labels[order])
    assert isinstance(cluster.sort_clusters([number], labels)[0], list)


def test_ranges_of_labels_in_any_order():
    same(cluster.cluster_ranges(torch.tensor([3, 0, 3, 1])), [[0, 1], [1, 2], [2, 2], [2, 4]])
    counts = torch.tensor([2.0, 0.0, 5.0])  # floats, as pykeops has them
    same(cluster.cluster_ranges(torch.tensor([0]), counts), [[0, 2], [2, 2], [2, 7]])


def test_ranges_are_counted_in_integers():
    """float32 has no odd number above 2^24."""
    counts = torch.tensor([2**24, 1, 1])
    same(cluster.cluster_ranges(torch.tensor([0]), counts)[-1], [2**24 + 1, 2**24 + 2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_centroids(dtype):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 3, generator=g).to(dtype)
    labels = torch.randint(5, (2000,), generator=g)
    labels[labels == 2] = 7
    weights = torch.rand(2000, generator=g).to(dtype)
    chosen = torch.nn.functional.one_hot(labels, 8).double()
    for w in (None, weights):
        share = chosen if w is None else chosen * w.double()[:, None]
        total = share.sum(0)[:, None]
        exact, size = share.T @ x.double() / total, share.T @ x.double().abs() / total
        found = cluster.cluster_centroids(x, labels, weights=w)
        used = total[:, 0] > 0
        assert found.dtype == dtype
        assert bool(found[~used].isnan().all())
        assert_within_bound(found[used], exact[used], size[used], 2000)


def test_sums_of_centroids_are_in_float64():
    """In float32 the ones would be lost beside 2^25."""
    x = torch.cat([torch.tensor([2.0**25]), torch.ones(1000), torch.tensor([-(2.0**25)])])
    found = cluster.cluster_centroids(x.view(-1, 1), torch.zeros(1002, dtype=torch.int64))
    same(found, [[1000 / 1002]])


def test_weights_are_clamped():
    x, weights = torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0.0, 0.0, -1.0])
    _, centroids, total = cluster.cluster_ranges_centroids(x, torch.tensor([0, 0, 1]), weights)
    same(centroids, [[2.0], [5.0]])
    assert_within_bound(total, torch.tensor([2e-9, 1e-9]).double(), torch.ones(2).double(), 2)
    _, _, total = cluster.cluster_ranges_centroids(x, torch.tensor([0, 0, 1]), weights, 0.5)
    same(total, [1.0, 0.5])


def test_gradients_of_centroids():
    x = torch.randn(20, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(20, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(20) % 3
    torch.autograd.gradcheck(
        lambda x, w: cluster.cluster_centroids(x, labels, weights=w), (x, weights)
    )


def test_arrays_of_numpy():
    x = np.array(X)
    labels = cluster.grid_cluster(x, 0.25)
    (points,), sorted_labels = cluster.sort_clusters([x], labels)
    ranges, centroids, weights = cluster.cluster_ranges_centroids(x, labels)
    found = cluster.swap_axes(cluster.from_matrix(ranges, ranges, np.eye(4, dtype=bool)))
    for array in (labels, points, sorted_labels, centroids, weights, *found):
        assert isinstance(array, np.ndarray)
    same(labels, [0, 3, 0, 2, 3, 1])
    same(cluster.grid_cluster(x[::-1], 0.25), labels[::-1].copy())  # no tensor runs backwards


@pytest.mark.parametrize("shift", [0.0, [0.1, -3.0]])
def test_cells_begin_at_the_origin(shift):
    """And those of NumPy's functions at 0, as in pykeops, here with the cells of min x apart."""
    x = np.array(X)
    cells = np.floor((x - shift) / 0.5).astype(int).tolist()
    ranks = {cell: rank for rank, cell in enumerate(sorted(set(map(tuple, cells))))}
    expected = [ranks[tuple(cell)] for cell in cells]
    origin = torch.tensor(shift, dtype=torch.float64)
    same(cluster.grid_cluster(torch.tensor(x), 0.5, origin=origin), expected)
    if not any(np.atleast_1d(shift)):
        same(arrays.grid_cluster(x, 0.5), expected)
        assert expected != cluster.grid_cluster(x, 0.5).tolist()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: cluster.grid_cluster(torch.zeros(3), 1.0),
            torchweft.ShapeError,
            r"x is \(3,\): points are \(M, D\).*view\(-1, 1\)",
        ),
        (
            lambda: cluster.grid_cluster(torch.zeros(3, 2), torch.ones(3)),
            torchweft.ShapeError,
            r"size is \(3,\) but x is \(3, 2\).*shape \(2,\)",
        ),
        (
            lambda: cluster.grid_cluster(torch.zeros(3, 2), torch.tensor([1.0, 0.0])),
            torchweft.ShapeError,
            r"size is \[1.0, 0.0\]: the edge of a cell must be positive. Pass a length",
        ),
        (
            lambda: cluster.grid_cluster(torch.zeros(3, 2), 1.0, origin=torch.ones(3)),
            torchweft.ShapeError,
            r"origin is \(3,\) but x is \(3, 2\).*Pass origin with shape \(2,\)",
        ),
        (
            lambda: cluster.grid_cluster(torch.zeros(3, 2), -0.5),
            torchweft.ShapeError,
            r"size is -0.5: the edge of a cell",
        ),
        (
            lambda: cluster.sort_clusters(torch.zeros(3, 2), torch.zeros(2).long()),
            torchweft.ShapeError,
            r"x is \(3, 2\) but there are 2 labels: each point has one. Pass the labels",
        ),
        (
            lambda: cluster.cluster_ranges(torch.zeros(3)),
            torchweft.DTypeError,
            r"lab is torch.float32: labels are integers.*lab.long",
        ),
        (
            lambda: cluster.cluster_ranges(torch.tensor([0, -1])),
            torchweft.IndexRangeError,
            r"lab holds -1: labels are 0 … C − 1",
        ),
        (
            lambda: cluster.from_matrix(
                torch.zeros(2, 2).long(), torch.zeros(3, 2).long(), torch.ones(3, 2).bool()
            ),
            torchweft.ShapeError,
            r"keep is \(3, 2\) but there are 2 ranges of i and 3 of j: keep must be \(2, 3\)",
        ),
        (
            lambda: cluster.from_matrix(
                torch.zeros(2).long(), torch.zeros(3, 2).long(), torch.ones(2, 3).bool()
            ),
            torchweft.ShapeError,
            r"ranges_i is \(2,\): it must be \(C, 2\).*cluster_ranges",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()
