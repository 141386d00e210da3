"""Layers of voxels over arbitrary clouds, windows, points and segments.

Seen red with: empty segments that take a neighbour's sum, pieces cut across segments, windows that
read past the batch, negative cells rounded towards 0, a maximum that starts at 0.
"""

import itertools
import math
from fractions import Fraction

import hypothesis
import torch
from hypothesis import strategies as st

from tests.clouds import cloud, same
from torchweft.testing import assert_within_bound
from torchweft.voxels.layers import pooling as segments
from torchweft.voxels.layers.norm import SparseInstanceNorm
from torchweft.voxels.layers.pooling import (
    global_pool,
    sparse_avg_pool,
    sparse_max_pool,
    sparse_upsample,
)
from torchweft.voxels.layers.voxelize import devoxelize, voxelize
from torchweft.voxels.maps.tensor import SparseTensor

EXAMPLES = 60


@st.composite
def clouds(draw, dim=None):
    """Any small cloud, empty ones and empty samples too, in float64."""
    dim = dim or draw(st.integers(1, 4))
    shape = tuple(draw(st.integers(1, 5)) for _ in range(dim))
    cells = st.tuples(st.integers(0, 2), *(st.integers(0, n - 1) for n in shape))
    rows = draw(st.lists(cells, max_size=20, unique=True))
    torch.manual_seed(draw(st.integers(0, 99)))
    coords = torch.tensor(rows, dtype=torch.int64).view(-1, 1 + dim)
    feats = torch.randn(len(rows), 2, dtype=torch.float64)
    return SparseTensor(feats, coords, shape, 4)


@st.composite
def windows(draw):
    """A cloud and kernel, stride, padding, dilation, each an axis."""
    tensor = draw(clouds())
    axes = [
        tuple(draw(st.integers(low, high)) for _ in range(tensor.dim))
        for low, high in ((1, 3), (1, 3), (0, 2), (1, 2))
    ]
    return tensor, *axes


def members(tensor, kernel, stride, padding, dilation):
    """Output voxel → the rows in its window, by going over all places."""
    found = {}
    shape = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(
            tensor.spatial_shape, kernel, stride, padding, dilation, strict=True
        )
    ]
    rows = {tuple(voxel): row for row, voxel in enumerate(tensor.C.tolist())}
    for sample in range(tensor.batch_size):
        for out in itertools.product(*(range(n) for n in shape)):
            for places in itertools.product(*(range(k) for k in kernel)):
                voxel = tuple(
                    o * s - p + j * d
                    for o, s, p, j, d in zip(out, stride, padding, places, dilation, strict=True)
                )
                if (sample, *voxel) in rows:
                    found.setdefault((sample, *out), []).append(rows[sample, *voxel])
    return found


@hypothesis.given(windows())
@hypothesis.settings(max_examples=EXAMPLES)
def test_pools_of_any_window(given):
    tensor, *window = given
    expected = members(tensor, *window)
    largest, mean = sparse_max_pool(tensor, *window), sparse_avg_pool(tensor, *window)
    assert [tuple(voxel) for voxel in largest.C.tolist()] == list(expected)
    assert largest.coordinates is mean.coordinates
    for row, rows in enumerate(expected.values()):
        inside = tensor.feats[rows]
        same(largest.feats[row], inside.amax(0))
        bound = inside.abs().mean(0)
        assert_within_bound(mean.feats[row], inside.mean(0), bound, len(rows) + 1)


@hypothesis.given(clouds(), st.data())
@hypothesis.settings(max_examples=EXAMPLES)
def test_a_pool_undoes_an_upsampling(tensor, data):
    scale = tuple(data.draw(st.integers(1, 3)) for _ in range(tensor.dim))
    finer = sparse_upsample(tensor, scale)
    assert len(finer) == len(tensor) * math.prod(scale)
    back = sparse_max_pool(finer, scale)
    order = tensor.coordinates.order
    rows = torch.arange(len(tensor)) if order is None else order.long()
    same(back.C, tensor.C[rows])
    same(back.feats, tensor.feats[rows])


@hypothesis.given(clouds())
@hypothesis.settings(max_examples=EXAMPLES)
def test_samples_do_not_mix(tensor):
    """What a sample gives does not depend on the others, to the bit."""
    norm = SparseInstanceNorm(2)
    whole = {reduce: global_pool(tensor, reduce) for reduce in ("max", "mean", "sum")}
    normed = norm(tensor).feats
    for sample in range(4):
        rows = tensor.C[:, 0] == sample
        one = SparseTensor(tensor.feats[rows], tensor.C[rows], tensor.spatial_shape, 4)
        for reduce, found in whole.items():
            same(found[sample], global_pool(one, reduce)[sample])
        same(normed[rows], norm(one).feats)


@st.composite
def owners(draw):
    """Rows of few or many segments, some without rows, some long."""
    count = draw(st.integers(1, 6))
    rows = draw(st.sampled_from([0, 1, 7, 200, 5000]))
    torch.manual_seed(draw(st.integers(0, 99)))
    chosen = torch.randint(0, count, (max(count // 2, 1),))
    return chosen[torch.randint(0, len(chosen), (rows,))], count


@hypothesis.given(owners())
@hypothesis.settings(max_examples=EXAMPLES)
def test_segments_of_any_length(given):
    owner, count = given
    order = torch.argsort(owner, stable=True)
    x = torch.randn(len(owner), 3)
    total = segments.together(x, owner, order, count)
    chosen = segments.first_largest(x.round(), owner, order, count)
    for segment in range(count):
        rows = (owner == segment).nonzero().squeeze(1)
        exact, size = x[rows].double().sum(0), x[rows].abs().double().sum(0)
        assert_within_bound(total[segment], exact, size, len(rows))
        if len(rows):
            same(chosen[rows].int().sum(0), torch.ones(3, dtype=torch.int64))
            first = x[rows].round().argmax(0)  # of torch's equals, not the first
            same(chosen[rows].int().argmax(0) <= first, torch.ones(3, dtype=torch.bool))
            same(x[rows].round()[chosen[rows].int().argmax(0), range(3)], x[rows].round().amax(0))
    # a segment's sum does not depend on where it stands
    last = count - 1
    moved = torch.cat([torch.full((37,), 0), owner + 1])
    longer = torch.cat([torch.randn(37, 3), x])
    again = segments.together(longer, moved, torch.argsort(moved, stable=True), count + 1)
    if len(owner) > 4 * (37 + count):  # as many levels
        same(again[1 + last], total[last])


NUMBERS = st.floats(-100, 100, allow_nan=False, width=32)
EDGES = st.sampled_from([0.1, 0.25, 1 / 3, 0.7, 3.0])


@hypothesis.given(
    st.lists(st.tuples(NUMBERS, NUMBERS), max_size=15), EDGES, st.sampled_from(["mean", "sum"])
)
@hypothesis.settings(max_examples=EXAMPLES)
def test_voxels_of_any_points(points, size, reduce):
    given = torch.tensor(points, dtype=torch.float32).view(-1, 2)
    tensor, voxel = voxelize(given, size, reduce=reduce)
    cells = [tuple(math.floor(Fraction(p) / Fraction(size)) for p in row) for row in given.tolist()]
    assert [tuple(c) for c in tensor.C[:, 1:].tolist()] == sorted(set(cells))
    assert [tuple(c) for c in tensor.C[voxel, 1:].tolist()] == cells
    same(devoxelize(tensor, given, size), tensor.feats[voxel])
    for row in range(len(tensor)):
        inside = given[voxel == row].double()
        exact, bound = (getattr(r, reduce)(0) for r in (inside, inside.abs()))
        assert_within_bound(tensor.feats[row], exact, bound, len(inside) + 1)


@hypothesis.given(clouds(), st.integers(0, 99))
@hypothesis.settings(max_examples=EXAMPLES)
def test_an_affine_function_survives_where_all_corners_are_there(tensor, seed):
    """On a full grid, interpolation between centres is exact for affine functions."""
    full = cloud(
        tensor.dim, 1, batch=1, density=2.0, shape=tuple(n + 1 for n in tensor.spatial_shape)
    )
    torch.manual_seed(seed)
    slope = torch.randn(tensor.dim, 1, dtype=torch.float64)
    centres = full.C[:, 1:].double() + 0.5
    room = torch.tensor(full.spatial_shape).double() - 1
    points = 0.5 + torch.rand(20, tensor.dim, dtype=torch.float64) * room
    found = devoxelize(full.replace(centres @ slope), points, 1.0, mode="trilinear")
    size = points.abs() @ slope.abs() + slope.abs().sum()
    assert_within_bound(found, points @ slope, 8 * size, 2**tensor.dim)
