"""From points to voxels and back, against a Python dictionary, exact fractions and grid_sample.

Seen red with: a floor of the rounded quotient, truncation instead of floor, the size left out of
the stride, shares that do not sum to 1, the last point of a voxel taken for the first.
"""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from tests.clouds import DEVICE, at, cloud, occupied, permuted, same
from torchweft.errors import DeviceError, DTypeError, IndexRangeError, ShapeError
from torchweft.testing import assert_within_bound
from torchweft.voxels.layers import pooling as segments
from torchweft.voxels.layers.pooling import sparse_max_pool
from torchweft.voxels.layers.voxelize import devoxelize, point_to_voxel, voxelize
from torchweft.voxels.maps.tensor import SparseTensor

REDUCTIONS = ["mean", "sum", "max", "first"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def points_of(count=200, dim=3, spread=2.0, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return (torch.randn(count, dim, dtype=torch.float64) * spread).to(dtype)


def cells_of(points, size, origin=0.0):
    """⌊(p − origin) / size⌋ in exact arithmetic, where p − origin is exact."""
    sizes = [size] * points.shape[1] if isinstance(size, float) else size
    return [
        tuple(
            math.floor((Fraction(p) - Fraction(origin)) / Fraction(s))
            for p, s in zip(row, sizes, strict=True)
        )
        for row in points.tolist()
    ]


def groups_of(points, size, batch=None):
    """Voxel → its points, voxels ascending."""
    samples = [0] * len(points) if batch is None else batch.tolist()
    found = {}
    for row, (sample, cell) in enumerate(zip(samples, cells_of(points, size), strict=True)):
        found.setdefault((sample, *cell), []).append(row)
    return dict(sorted(found.items()))


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
@pytest.mark.parametrize("batched", [True, False])
def test_voxels_of_a_dictionary(dim, batched):
    points = points_of(dim=dim)
    batch = torch.randint(0, 3, (len(points),)) if batched else None
    size = [0.7, 0.9, 1.1, 1.3][:dim]
    tensor, voxel = voxelize(points, size, batch=batch)
    groups = groups_of(points, size, batch)
    assert [tuple(row) for row in tensor.C.tolist()] == list(groups)
    expected = torch.empty(len(points), dtype=torch.int64)
    for row, members in enumerate(groups.values()):
        expected[members] = row
    same(voxel, expected)
    assert tensor.batch_size == (3 if batched else 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_reductions(reduce, dtype):
    points = points_of()
    feats = points_of(dim=5, seed=1, dtype=dtype).requires_grad_()
    tensor, voxel = voxelize(points, 1.5, feats, reduce=reduce)
    assert tensor.dtype == dtype
    wide = feats.detach().double()
    for row, members in enumerate(groups_of(points, 1.5).values()):
        rows, out = wide[members], tensor.feats[row]
        if reduce == "first":
            same(out, feats[members[0]])
        elif reduce == "max":
            same(out, rows.amax(0).to(dtype))
        else:
            exact, size = (getattr(r, reduce)(0) for r in (rows, rows.abs()))
            assert_within_bound(out, exact, size, len(members) + 1)
    grad = torch.randn_like(tensor.feats)
    (found,) = torch.autograd.grad(tensor.feats, feats, grad)
    share = torch.ones_like(wide)
    for members in groups_of(points, 1.5).values():
        if reduce == "mean":
            share[members] = 1 / len(members)
        elif reduce == "max":
            share[members] = (wide[members] == wide[members].amax(0)).double()
        elif reduce == "first":
            share[members[1:]] = 0
    if reduce == "max":  # where 16 bits make equals, the first has all
        share *= found != 0
    exact = share * grad.double()[voxel]
    assert_within_bound(found, exact, exact.abs(), 1)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_devices_that_do_not_walk_rows_find_the_same(reduce, monkeypatch):
    """The way of a GPU, on the CPU; one voxel has most of the points."""
    points = torch.cat([points_of(), points_of(3000, spread=0.01).abs()])
    feats = torch.randn(len(points), 3)
    expected = voxelize(points, 0.5, feats, reduce=reduce)[0].feats
    monkeypatch.setattr(segments, "walks_rows", lambda device: False)
    same(voxelize(points, 0.5, feats, reduce=reduce)[0].feats, expected)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_gradients_of_gradients(reduce):
    points = points_of(12, 2)
    feats = points_of(12, 2, seed=1, dtype=torch.float64).requires_grad_()

    def function(feats):
        return voxelize(points, 2.0, feats, reduce=reduce)[0].feats

    assert torch.autograd.gradcheck(function, feats)
    assert torch.autograd.gradgradcheck(lambda f: function(f).pow(3), feats)


def test_the_first_of_equals_is_the_maximum():
    feats = torch.tensor([[1.0, torch.nan], [1.0, 5.0], [0.0, torch.nan]], requires_grad=True)
    tensor, _ = voxelize(torch.zeros(3, 2), 1.0, feats, reduce="max")
    same(tensor.feats, torch.tensor([[1.0, torch.nan]]))
    tensor.feats.backward(torch.tensor([[2.0, 3.0]]))
    same(feats.grad, torch.tensor([[2.0, 3.0], [0.0, 0.0], [0.0, 0.0]]))


def test_features_are_the_points_themselves():
    points = points_of().requires_grad_()
    tensor, voxel = voxelize(points, 1.0)
    same(tensor.feats, voxelize(points, 1.0, points)[0].feats)
    tensor.feats.sum().backward()
    count = torch.bincount(voxel).float()[voxel]
    same(points.grad, (1 / count).unsqueeze(1).expand(-1, 3))


EDGES = [0.1, 0.05, 0.3, 1 / 3, 0.7, 1e-3, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", EDGES)
def test_points_on_edges_fall_where_the_numbers_say(size, dtype):
    multiples = torch.arange(-2000, 2000, dtype=torch.float64) * size
    values = torch.cat([multiples, torch.tensor([k / 10 for k in range(-50, 50)]).double()])
    points = values.to(dtype).unsqueeze(1)
    tensor, voxel = voxelize(points, size)
    same(tensor.C[voxel, 1:].long(), torch.tensor(cells_of(points, size)))


def test_origin_moves_the_grid():
    points = points_of(dim=2, spread=40).round() / 8
    low = points.amin(0)
    tensor, voxel = voxelize(points, 0.5, origin=low)
    assert int(tensor.C[:, 1:].min()) == 0
    assert tensor.dense().shape[0] == 1
    same(tensor.C, voxelize(points - low, 0.5)[0].C)
    same(devoxelize(tensor, points, 0.5, origin=low), tensor.feats[voxel])


def test_the_box_and_the_batch_are_as_given():
    points = points_of().abs()
    tensor, _ = voxelize(points, 1.0, spatial_shape=(20, 21, 22), batch_size=4)
    assert tensor.dense().shape == (4, 3, 20, 21, 22)
    with pytest.raises(IndexRangeError, match=r"spatial_shape\[0\] is 1"):
        voxelize(points, 1.0, spatial_shape=(1, 20, 20))
    with pytest.raises(IndexRangeError, match="batch column"):
        voxelize(points, 1.0, batch=torch.full((len(points),), -1))


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_no_points(reduce):
    feats = torch.zeros(0, 4, requires_grad=True)
    tensor, voxel = voxelize(torch.zeros(0, 3), 0.1, feats, reduce=reduce)
    assert (len(tensor), tensor.feats.shape[1], tensor.batch_size) == (0, 4, 1)
    assert voxel.shape == (0,)
    tensor.feats.sum().backward()
    same(feats.grad, torch.zeros(0, 4))
    for mode in ("nearest", "trilinear"):
        same(devoxelize(tensor, torch.ones(2, 3), 0.1, mode=mode), torch.zeros(2, 4))
        assert devoxelize(cloud(), torch.ones(0, 3), 0.1, mode=mode).shape == (0, 3)


def test_bits_repeat_and_values_far_apart_stay_exact():
    points = points_of(5000, spread=1e8, dtype=torch.float64)
    feats = torch.randn(5000, 3)
    (first, index), (second, again) = (voxelize(points, 0.5, feats, reduce="sum") for _ in "ab")
    same(first.feats, second.feats)
    same(index, again)
    same(first.C[index, 1:].long(), torch.tensor(cells_of(points, 0.5)))


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 3])
def test_devoxelize_is_grid_sample(dim, dtype, mode):
    tensor = cloud(dim, dtype=dtype)
    shape = torch.tensor(tensor.spatial_shape)
    torch.manual_seed(3)
    points = torch.rand(300, dim, dtype=torch.float64) * (shape + 2) - 1
    batch = torch.randint(0, 2, (300,))
    found = devoxelize(tensor, 0.3 * points, 0.3, batch, mode)
    assert found.dtype == dtype

    def sampled(dense):
        grid = (2 * points / shape - 1).flip(1).view(1, *(1,) * (dim - 1), -1, dim)
        kind = "nearest" if mode == "nearest" else "bilinear"
        grids = grid.expand(2, *grid.shape[1:])
        out = F.grid_sample(dense, grids, kind, "zeros", align_corners=False)
        return out.view(2, dense.shape[1], -1)[batch, :, torch.arange(300)]

    wide = tensor.replace(tensor.feats.detach().double().requires_grad_())
    there = sampled(occupied(wide))
    known = (there > 0).expand(-1, 3)
    exact = torch.where(known, sampled(wide.dense()) / there, 0)
    size = torch.where(known, sampled(wide.dense().abs()) / there, 0)
    # the oracle's own coordinates are rounded: by u_64 · |p|, which a small total magnifies
    slack = torch.where(known, size.detach() / there, 0) * 2**dim * 1e-9
    clear = ((points % 1).sub(0.5).abs() - 0.5).abs().amin(1) > 1e-9  # off the edges of voxels
    if dtype == torch.float64:
        assert ((found - exact).abs()[clear] <= slack[clear]).all()
    else:
        assert_within_bound(found[clear], exact[clear], size[clear], 2**dim + 1, stored=0)
    assert not found[~known[:, 0]].any()
    grad = torch.randn(300, 3).masked_fill(~clear.unsqueeze(1), 0).to(dtype)
    if dtype != torch.float64:
        (found,) = torch.autograd.grad(found, tensor.feats, grad)
        (size,) = torch.autograd.grad(exact, wide.feats, grad.double().abs(), retain_graph=True)
        (exact,) = torch.autograd.grad(exact, wide.feats, grad.double())
        assert_within_bound(found, exact, size, 300, stored=1)


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_gradients_of_devoxelize(dim, mode):
    tensor = cloud(dim, channels=2, density=0.3)
    torch.manual_seed(4)
    points = torch.rand(9, dim) * torch.tensor(tensor.spatial_shape)
    batch = torch.randint(0, 2, (9,))

    def function(feats):
        return devoxelize(tensor.replace(feats), points, 1.0, batch, mode)

    assert torch.autograd.gradcheck(function, tensor.feats)
    assert torch.autograd.gradgradcheck(lambda f: function(f).pow(3), tensor.feats)


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_points_of_an_interpolation_have_gradients(dim):
    """Where voxels are missing too; seen red with points that were cut off."""
    tensor = cloud(dim, channels=2, density=0.6)
    torch.manual_seed(5)
    points = (torch.rand(9, dim) * torch.tensor(tensor.spatial_shape)).double().requires_grad_()

    def function(points, feats):
        return devoxelize(tensor.replace(feats), points, 0.9, mode="trilinear", origin=-0.2)

    inputs = points, tensor.feats
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *a: function(*a).pow(2), inputs, fast_mode=True)


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
def test_bits_of_devoxelize_do_not_depend_on_the_order_of_rows(mode):
    tensor = cloud(3, dtype=torch.float32)
    other, order = permuted(tensor)
    points = torch.rand(500, 3) * 5
    first, second = (devoxelize(t, points, 1.0, mode=mode) for t in (tensor, other))
    same(first, second)
    first.square().sum().backward()
    second.square().sum().backward()
    same(tensor.feats.grad[order], other.feats.grad)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_nearest_reads_the_voxel_of_each_point(reduce):
    points = points_of(dtype=torch.float64)
    batch = torch.randint(0, 3, (len(points),))
    tensor, voxel = voxelize(points, 0.3, batch=batch, reduce=reduce)
    same(devoxelize(tensor, points, 0.3, batch), tensor.feats[voxel])


def test_centres_and_lines_between_them():
    feats = torch.tensor([[1.0, 10.0], [3.0, torch.inf]], dtype=torch.float64)
    tensor = SparseTensor(feats, torch.tensor([[0, 0], [0, 1]]))
    points = torch.tensor([[0.5], [0.75], [1.25], [-0.25], [1.9], [2.6]], dtype=torch.float64)
    found = devoxelize(tensor, points, 1.0, mode="trilinear")
    same(found[:, 0], torch.tensor([1.0, 1.5, 2.5, 1.0, 3.0, 0.0], dtype=torch.float64))
    assert found[0, 1] == 10  # a voxel of share 0 has no say, even if infinite


def test_voxels_of_a_coarser_level_are_larger():
    tensor = sparse_max_pool(cloud(2), 2)
    points = torch.rand(50, 2) * torch.tensor([7.0, 6.0])
    found = devoxelize(tensor, points, 1.0)
    plain = SparseTensor(tensor.feats, tensor.C, tensor.spatial_shape, 2)
    same(found, devoxelize(plain, points, 2.0))
    dense = at(plain.dense(), plain)
    same(dense, tensor.feats)


def test_a_constant_stays_a_constant():
    tensor = cloud(3, dtype=torch.float32)
    ones = tensor.replace(torch.ones(len(tensor), 1))
    centres = (tensor.C[:, 1:] + torch.rand(len(tensor), 3)) * 0.2
    found = devoxelize(ones, centres, 0.2, tensor.C[:, 0], "trilinear")
    assert_within_bound(found, torch.ones_like(found).double(), torch.ones_like(found), 8)


POINTS = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("error", "match", "change"),
    [
        (ShapeError, r"points are \(4,\): they must be \(P, d\).*Pass", {"points": POINTS[:, 0]}),
        (ShapeError, r"points are \(4, 5\)", {"points": torch.zeros(4, 5)}),
        (DTypeError, r"points are torch.int64.*Pass points.float", {"points": POINTS.long()}),
        (ShapeError, r"feats are \(3, 2\) but there are 4.*Pass", {"feats": torch.ones(3, 2)}),
        (ShapeError, r"batch is \(3,\) but there are 4.*Pass", {"batch": torch.ones(3).int()}),
        (DTypeError, r"batch is torch.float32.*Pass batch.long", {"batch": torch.ones(4)}),
        (ShapeError, r"reduce is 'min': it must be one of mean.*Pass", {"reduce": "min"}),
        (ShapeError, r"size is \[0.0, 0.0, 0.0\].*positive.*Pass", {"size": 0.0}),
        (ShapeError, r"size is \(2,\) but points have 3 axes.*Correct", {"size": [1.0, 2.0]}),
        (ShapeError, r"origin is \(2,\)", {"origin": [1.0, 2.0]}),
        (IndexRangeError, r"nan to nan.*finite.*Drop", {"points": POINTS / 0}),
        (IndexRangeError, r"voxels 3000000000 to", {"points": POINTS + 3e9}),
        (DTypeError, r"feats are torch.int64", {"feats": torch.ones(4, 2).long()}),
        (DeviceError, r"feats are on meta.*one device", {"feats": torch.ones(4, 2).to("meta")}),
        (DTypeError, r"points is a ndarray.*Pass torch.as_tensor", {"points": POINTS.numpy()}),
        (DTypeError, r"feats is a list.*Pass torch.as_tensor", {"feats": [[1.0]] * 4}),
        (DTypeError, r"batch is a list.*Pass torch.as_tensor", {"batch": [0] * 4}),
        (DTypeError, r"size is '1': .* number.*Correct size", {"size": "1"}),
        (DTypeError, r"size is None: .* number", {"size": None}),
        (DTypeError, r"feats are torch.int64", {"feats": torch.ones(4, 2).long(), "reduce": "max"}),
    ],
)
def test_errors_of_voxelize(error, match, change):
    with pytest.raises(error, match=match):
        voxelize(**{"points": POINTS, "size": 1.0, **change})


def test_errors_of_devoxelize():
    tensor = cloud(2)
    with pytest.raises(ShapeError, match=r"mode is 'cubic': .*Pass one"):
        devoxelize(tensor, torch.zeros(1, 2), 1.0, mode="cubic")
    with pytest.raises(ShapeError, match=r"points are \(1, 3\).* d = 2, as the voxels have"):
        devoxelize(tensor, torch.zeros(1, 3), 1.0)
    with pytest.raises(ShapeError, match=r"batch is \(2,\)"):
        devoxelize(tensor, torch.zeros(1, 2), 1.0, torch.zeros(2).int())
    with pytest.raises(DTypeError, match=r"tensor is a Tensor.*SparseTensor.*Build"):
        devoxelize(tensor.F, torch.zeros(1, 2), 1.0)
    with pytest.raises(IndexRangeError, match=r"batch has the value -1: .* from 0\. Correct"):
        devoxelize(tensor, torch.zeros(1, 2), 1.0, torch.full((1,), -1))


def test_corners_are_all_of_them():
    """Every voxel around a point counts: one at a time is there."""
    point = torch.tensor([[1.25, 1.25]])
    for a, b in itertools.product((0, 1), repeat=2):
        one = SparseTensor(torch.ones(1, 1), torch.tensor([[0, a, b]]))
        same(devoxelize(one, point, 1.0, mode="trilinear"), torch.ones(1, 1))


def hard_voxels(points, size, box, max_points, max_voxels):
    """Point by point: {cell: rows} in the order of first appearance, with exact quotients."""
    dim, found = len(box) // 2, {}
    low, high = box[:dim], box[dim:]
    counts = [round((b - a) / s) for a, b, s in zip(low, high, size, strict=True)]
    for row, point in enumerate(points.tolist()):
        place = point[:dim]
        if not all(a <= p < b for p, a, b in zip(place, low, high, strict=True)):
            continue
        differences = (Fraction(p - a) for p, a in zip(place, low, strict=True))
        cell = tuple(math.floor(p / Fraction(s)) for p, s in zip(differences, size, strict=True))
        if any(c >= n for c, n in zip(cell, counts, strict=True)):
            continue
        if cell not in found and len(found) < max_voxels:
            found[cell] = []
        if len(found.get(cell, range(max_points))) < max_points:
            found[cell].append(row)
    return found


BOXES = [
    ((0.5,), (-2.0, 2.0)),
    ((0.3, 0.7), (-1.0, 0.0, 1.1, 2.1)),  # the first axis is no multiple
    ((0.5, 0.25, 4.0), (-1.0, -1.0, -2.0, 1.0, 1.0, 2.0)),
    ((1.0, 1.0, 0.5, 0.5), (-2.0, -2.0, -1.0, -1.0, 2.0, 2.0, 1.0, 1.0)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("max_points", "max_voxels"), [(1, 1), (3, 5), (100, 7), (2, 1000)])
@pytest.mark.parametrize(("size", "box"), BOXES)
def test_hard_voxels_are_those_of_a_loop(size, box, max_points, max_voxels, dtype):
    torch.manual_seed(0)
    dim = len(size)
    points = torch.randn(300, dim + 2).to(dtype)
    points[::7] = (points[::7] * 4).round() / 4  # edges too
    points[5, 0], points[6, dim - 1], points[8, 0] = torch.nan, torch.inf, -torch.inf
    points[9, dim] = torch.nan  # a feature may be
    points = points.to(DEVICE).requires_grad_()
    kept, coords, counts = point_to_voxel(points, size, box, max_points, max_voxels)
    exact = hard_voxels(points, size, box, max_points, max_voxels)
    assert coords.tolist() == [[0, *cell] for cell in exact]
    assert counts.tolist() == [len(rows) for rows in exact.values()]
    assert (kept.dtype, coords.dtype, counts.dtype) == (dtype, torch.int32, torch.int64)
    expected = points.new_zeros(len(exact), max_points, dim + 2)
    for place, rows in enumerate(exact.values()):
        expected[place, : len(rows)] = points[rows]
    same(kept, expected)
    (gradient,) = torch.autograd.grad(kept.sum(), points)
    chosen = torch.zeros(300, 1, dtype=dtype, device=DEVICE)
    chosen[[row for rows in exact.values() for row in rows]] = 1
    same(gradient, chosen.expand_as(gradient))
    if dim == 3 and dtype == torch.float32:  # one number, and a box on the device
        one = point_to_voxel(points, 0.5, torch.tensor(box, device=DEVICE), max_points, max_voxels)
        again = point_to_voxel(points, (0.5,) * 3, list(box), max_points, max_voxels)
        for a, b in zip(one, again, strict=True):
            same(a, b)


def test_later_points_join_voxels_that_exist():
    """After max_voxels new voxels are left out, while points join those that exist."""
    points = torch.tensor([[0.5], [1.5], [2.5], [0.6], [2.6], [1.6], [0.7]])
    kept, coords, counts = point_to_voxel(points, 1.0, (0.0, 4.0), 2, 2)
    assert coords.tolist() == [[0, 0], [0, 1]]
    assert counts.tolist() == [2, 2]
    same(kept, torch.tensor([[[0.5], [0.6]], [[1.5], [1.6]]]))


@pytest.mark.parametrize("points", [torch.zeros(0, 4), torch.full((3, 4), torch.nan)])
def test_no_point_is_no_hard_voxel(points):
    kept, coords, counts = point_to_voxel(points, 1.0, (0, 0, 0, 4, 4, 4), 5, 9)
    assert (kept.shape, coords.shape, counts.shape) == ((0, 5, 4), (0, 4), (0,))


def test_hard_voxels_of_a_box_past_one_key():
    box = (0.0, 0.0, 0.0, 0.0, *(2.0**30,) * 4)
    points = torch.tensor([[2.0**29, 3, 1, 0], [1, 2, 3, 2.0**29], [2.0**29, 3, 1, 0]])
    _, coords, counts = point_to_voxel(points, 1.0, box, 5, 9)
    assert coords[:, 1:].tolist() == points[:2].int().tolist()
    assert counts.tolist() == [2, 1]


HARD_REFUSED = [
    ({"points": torch.zeros(2, 3).int()}, DTypeError, r"points are torch.int32: .*float\(\)"),
    ({"points": [[0.0]]}, DTypeError, r"points is a list"),
    ({"points": torch.zeros(2, 2)}, ShapeError, r"points are \(2, 2\) but box has 3 axes"),
    ({"box": (0, 0, 0, 4, 4)}, ShapeError, r"box has 5 numbers: .*Pass box="),
    ({"box": (0, 0, 0, 4, 0, 4)}, ShapeError, r"voxels of size .* 1 to \d+\. Correct box"),
    ({"box": (0, 0, 0, math.nan, 4, 4)}, ShapeError, r"Correct box"),
    ({"voxel_size": 0.0}, ShapeError, r"voxel_size is \[0.0, 0.0, 0.0\]: .*positive"),
    ({"voxel_size": (1, 1)}, ShapeError, r"voxel_size is \(2,\) but points have 3 axes"),
    ({"max_points": 0}, ShapeError, r"max_points is 0 and max_voxels 9: .*at least 1"),
    ({"max_voxels": 2.5}, DTypeError, r"max_voxels is 2\.5: it must be an integer\. Pass"),
]


@pytest.mark.parametrize(("changed", "error", "match"), HARD_REFUSED)
def test_errors_of_hard_voxels(changed, error, match):
    given = {
        "points": torch.zeros(2, 4),
        "voxel_size": 1.0,
        "box": (0, 0, 0, 4, 4, 4),
        "max_points": 5,
        "max_voxels": 9,
    }
    with pytest.raises(error, match=match):
        point_to_voxel(**given | changed)
