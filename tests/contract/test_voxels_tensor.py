"""SparseTensor, and tensors made of tensors, against their dense selves.

Seen red with: empty samples dropped, batch numbers that do not count on, union without the sum,
the channels of from_dense in the wrong place, a voxel that stands twice written once, sums of
several tensors rounded after each, lengths with a fraction cut off, coordinates that torch has no
comparison of.
"""

import numpy as np
import pytest
import torch

from torchweft import voxels
from torchweft.errors import DeviceError, DTypeError, IndexRangeError, ShapeError
from torchweft.voxels import SparseTensor


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def tensor(seed=0, count=12, channels=3, batch=3, shape=(3, 4, 5)):
    """Voxels in random order; the last sample is empty."""
    generator = torch.Generator().manual_seed(seed)
    sides = (batch - 1, *shape)
    size = int(torch.tensor(sides).prod())
    places = torch.randperm(size, generator=generator)[:count]
    coords = torch.stack(torch.unravel_index(places, sides), 1)
    feats = torch.randn(count, channels, dtype=torch.float64, generator=generator)
    return SparseTensor(feats, coords, shape, batch)


def test_dense_keeps_every_sample_and_place():
    x = tensor()
    dense = x.dense()
    assert dense.shape == (3, 3, 3, 4, 5)
    assert not dense[2].any()
    expected = torch.zeros(3, 3, 3, 4, 5, dtype=torch.float64)
    for row, (b, i, j, k) in enumerate(x.C.tolist()):
        expected[b, :, i, j, k] = x.F[row]
    same(dense, expected)


def test_dense_is_contiguous():
    """Red before: channels lay last in memory, so that view raised."""
    for x in (tensor(), tensor(channels=1), SparseTensor(torch.ones(1, 2), torch.ones(1, 3).int())):
        assert x.dense().is_contiguous()
        assert x.dense().view(-1).shape == (x.dense().numel(),)


WRITES = {
    "in place": lambda coords: coords[:, 1:].mul_(2),
    "data": lambda coords: coords.data[:, 1:].mul_(2),
    "array": lambda coords: np.multiply(coords.numpy(), [[1, 2, 2]], out=coords.numpy()),
    "alias": lambda coords: torch.from_dlpack(coords)[:, 1:].mul_(2),
}


def line(coords):
    """What a row of three voxels gives: their keys, maps, dense tensor and coordinates."""
    x = SparseTensor(torch.eye(3), coords)
    return x, lambda: [
        x.coordinates.keys,
        x.dense(),
        voxels.sparse_conv(x, torch.ones(9, 3, 3), 3).F,
        voxels.sparse_conv(x, torch.ones(4, 3, 3), 2, stride=2, submanifold=False).F,
        x.C,
    ]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("known", [False, True], ids=["before maps", "after maps"])
@pytest.mark.parametrize("place", ["given", "C"])
def test_what_is_written_to_coordinates_does_not_reach_a_tensor(write, dtype, known, place):
    """Red before with int32: new coordinates beside the keys and maps of the old ones."""
    coords = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 0, 2]], dtype=dtype)
    _, values = line(coords.clone())
    x, found = line(coords)
    for _ in range(known):
        found()
    WRITES[write](coords if place == "given" else x.C)
    for one, other in zip(found(), values(), strict=True):
        same(one, other)


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_from_dense_and_back(dim):
    dense = torch.zeros(2, 3, *range(2, 2 + dim))
    dense[1, 2].flatten()[:2] = torch.tensor([1.0, float("nan")])
    dense[0, 0].flatten()[1] = -2.0
    found = SparseTensor.from_dense(dense)
    assert len(found) == 3
    torch.testing.assert_close(found.dense(), dense, rtol=0, atol=0, equal_nan=True)


def test_gradients_of_dense_and_from_dense():
    x = tensor()
    leaf = x.F.clone().requires_grad_()
    weight = torch.randn_like(x.dense())
    (gradient,) = torch.autograd.grad((x.replace(leaf).dense() * weight).sum(), leaf)
    same(gradient, weight.movedim(1, -1)[tuple(x.C.long().T)])
    dense = x.dense().requires_grad_()
    (gradient,) = torch.autograd.grad(SparseTensor.from_dense(dense).F.sum(), dense)
    same(gradient, (dense.detach() != 0).any(1, keepdim=True).expand_as(dense).double())


def test_sums_and_channels_on_the_same_voxels():
    x = tensor()
    y = x.replace(torch.randn_like(x.F))
    same((x + y).dense(), x.dense() + y.dense())
    same(voxels.cat([x, y]).dense(), torch.cat([x.dense(), y.dense()], 1))
    assert (x + y).coordinates is x.coordinates


JOINS = {"+": lambda a, b: a + b, "cat": lambda a, b: voxels.cat([a, b])}


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("given", [True, False], ids=["in a box", "without a box"])
def test_tensors_that_were_built_apart_are_joined_by_voxel(join, given):
    """Red before: an error that the coordinates differ.  Seen red with rows matched by number."""
    x, box = tensor(), ((3, 4, 5), 3) if given else ()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
    feats = torch.randn(len(x), 3, dtype=torch.float64, requires_grad=True)
    apart = SparseTensor(feats[order], x.C[order], *box)
    found, expected = JOINS[join](x, apart), JOINS[join](x, x.replace(feats))
    same(found.F, expected.F)
    assert found.coordinates is x.coordinates
    weight = torch.randn_like(found.F)
    (gradient,) = torch.autograd.grad((found.F * weight).sum(), feats)
    same(gradient, weight[:, -3:])
    compiled = torch.compile(lambda f: JOINS[join](x, apart.replace(f)).F, backend="eager")
    same(compiled(feats.detach()[order]), expected.F.detach())
    empty = [SparseTensor(torch.ones(0, 3), torch.zeros(0, 4).int()) for _ in range(2)]
    assert len(JOINS[join](*empty)) == 0


@pytest.mark.parametrize("join", JOINS)
def test_tensors_on_other_voxels_are_not_joined(join):
    x = tensor()
    for other in (tensor(1), tensor(count=11)):
        with pytest.raises(ShapeError, match=rf"different voxels \(12 and {len(other)}\).* union"):
            JOINS[join](x, other)
    for name, options in {
        "stride": (x.spatial_shape, 3, 2),
        "spatial_shape": ((3, 4, 6), 3),
        "batch_size": (x.spatial_shape, 4),
    }.items():
        with pytest.raises(ShapeError, match=rf"with {name} .* one grid\. Build"):
            JOINS[join](x, SparseTensor(x.F, x.C, *options))
    with pytest.raises(DeviceError, match=r"on cpu and meta: .* Move"):
        JOINS[join](x, tensor().to("meta"))
    twice = SparseTensor(torch.ones(2, 1), torch.zeros(2, 3).int())
    with pytest.raises(ShapeError, match="stands in rows 0 and 1"):
        JOINS[join](twice, SparseTensor(torch.ones(2, 1), torch.tensor([[0, 0, 0], [0, 0, 1]])))


def test_union_adds_on_any_voxels():
    x, y = tensor(0), tensor(1)
    found = voxels.union([x, y])
    same(found.dense(), x.dense() + y.dense())
    assert len(found) == len({tuple(v) for v in (*x.C.tolist(), *y.C.tolist())})
    assert found.coordinates.order is None  # ascending


def test_union_rounds_once():
    tensors = [tensor(seed, count=100).to(torch.bfloat16) for seed in range(8)]
    exact = voxels.union([t.to(torch.float64) for t in tensors]).F
    same(voxels.union(tensors).F, exact.bfloat16())


@pytest.mark.parametrize("join", [SparseTensor.dense, lambda t: voxels.union([t])])
def test_a_voxel_that_stands_twice_is_never_merged(join):
    twice = SparseTensor(torch.ones(3, 1), torch.tensor([[0, 1, 2], [0, 0, 0], [0, 1, 2]]))
    with pytest.raises(ShapeError, match=r"voxel \(0, 1, 2\) stands in rows 0 and 2"):
        join(twice)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_coordinates(dtype):
    x = tensor()
    same(SparseTensor(x.F, x.C.to(dtype), x.spatial_shape, 3).dense(), x.dense())


def test_a_box_is_given_or_not_whoever_asked_for_it():
    """Seen red with a box that was kept once it had been asked for."""
    coords = torch.tensor([[0, 1, 2], [0, 3, 0]])
    x = SparseTensor(torch.ones(2, 1), coords)
    assert x.dense().shape == (1, 1, 4, 3)
    wider = SparseTensor(torch.ones(1, 1), torch.tensor([[0, 0, 5]]))
    assert wider.dense().shape == (1, 1, 1, 6)
    assert voxels.union([x, wider]).spatial_shape == (4, 6)
    assert voxels.sparse_collate([x, wider]).coordinates.given_shape is None


def test_collated_samples_stand_one_behind_the_other():
    x, y = tensor(0), tensor(1, count=5)
    same(voxels.sparse_collate([x, y]).dense(), torch.cat([x.dense(), y.dense()]))
    box = voxels.sparse_collate([x, tensor(1, shape=(5, 2, 6))])
    assert box.spatial_shape == (5, 4, 6)


def test_moves_and_dtypes():
    x = tensor()
    voxels.kernel_map(x, 3)
    assert x.to(torch.float32).dtype == torch.float32
    assert x.to(torch.float32).coordinates is x.coordinates
    assert x.cpu().coordinates is x.coordinates
    meta = x.to("meta")
    assert meta.device.type == "meta"
    assert not meta.coordinates.tables


def test_empty():
    x = SparseTensor(torch.zeros(0, 4), torch.zeros(0, 3, dtype=torch.int32), (2, 3), 2)
    same(x.dense(), torch.zeros(2, 4, 2, 3))
    assert len(voxels.union([x, x])) == len(voxels.sparse_collate([x, x])) == 0


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: SparseTensor.from_dense(torch.zeros(2, 3)), ShapeError, r"dense is \(2, 3\)"),
        (lambda: voxels.union([]), ShapeError, "union was given no tensor"),
        (lambda: voxels.sparse_collate([]), ShapeError, "sparse_collate was given no tensor"),
        (
            lambda: voxels.sparse_collate([tensor(), tensor(shape=(3, 4))]),
            ShapeError,
            "samples of 3 axes at stride .* and 2 at",
        ),
        (
            lambda: voxels.sparse_collate([tensor(), tensor(channels=2)]),
            ShapeError,
            r"samples of 3 axes at stride .* with 3 channels, and 3 at .* with 2.* Collate",
        ),
        (
            lambda: voxels.union([tensor(), tensor(channels=2)]),
            ShapeError,
            r"tensors of 3 axes at stride .* with 3 channels, and 3 at .* with 2.* Resample",
        ),
        (
            lambda: voxels.union([tensor(), tensor().to("meta")]),
            DeviceError,
            r"union was given tensors on cpu and meta.* Move",
        ),
        (
            lambda: voxels.union(tensor()),
            DTypeError,
            r"union was given a SparseTensor: it takes a list of .* Pass \[a, b\]",
        ),
        (
            lambda: voxels.cat([tensor().F, tensor().F]),
            DTypeError,
            r"cat was given a list with a Tensor in it: it takes a list of .* Pass \[a, b\]",
        ),
        (lambda: tensor() + tensor().F, DTypeError, r"\+ was given a Tensor.*replace"),
        (
            lambda: SparseTensor(torch.zeros(1, 2), [[0, 0, 0]]),
            DTypeError,
            r"coords is a list: it must be a torch.Tensor. Pass torch.as_tensor\(coords\)",
        ),
        (
            lambda: SparseTensor(torch.zeros(1, 2).numpy(), torch.zeros(1, 3).int()),
            DTypeError,
            r"feats is a ndarray: it must be a torch.Tensor",
        ),
        (
            lambda: tensor().replace(None),
            DTypeError,
            r"feats is a NoneType: it must be a torch.Tensor",
        ),
        (
            lambda: SparseTensor(torch.zeros(1, 2), torch.zeros(1, 3).int(), (2.5, 3)),
            DTypeError,
            r"spatial_shape is \(2.5, 3\): .* 2 integers, .* Pass spatial_shape",
        ),
        (
            lambda: SparseTensor(torch.zeros(1, 2), torch.zeros(1, 3).int(), 4),
            DTypeError,
            r"spatial_shape is 4: .* 2 integers",
        ),
        (
            lambda: SparseTensor(torch.zeros(1, 2), torch.zeros(1, 3).int(), (2, 2), 1.5),
            DTypeError,
            r"batch_size is 1.5: it must be an integer.* Pass",
        ),
        (
            lambda: SparseTensor(torch.zeros(0, 2), torch.zeros(0, 3).int(), (2, 2), -1),
            ShapeError,
            r"batch_size is -1: .* Pass",
        ),
        (
            lambda: voxels.union([tensor(), tensor(shape=(3, 4))]),
            ShapeError,
            "tensors of 3 axes at stride .* and 2 at",
        ),
        (
            lambda: SparseTensor(torch.zeros(1, 2, device="meta"), torch.zeros(1, 3).int()),
            DeviceError,
            "feats are on meta, coords on cpu",
        ),
        (
            lambda: SparseTensor(torch.zeros(1, 2).int(), torch.zeros(1, 3).int()),
            DTypeError,
            "feats are torch.int32",
        ),
        (
            lambda: SparseTensor(torch.zeros(1, 2), torch.zeros(1, 3)),
            DTypeError,
            r"coords are torch.float32: they must be integers. Use voxelize",
        ),
        (
            lambda: SparseTensor(torch.zeros(1, 2), torch.zeros(1, 6).int()),
            ShapeError,
            r"coords are \(1, 6\): they must be \(N, 1 \+ d\), batch number first.* Add the batch",
        ),
        (
            lambda: SparseTensor(torch.zeros(2, 5), torch.zeros(3, 4).int()),
            ShapeError,
            r"feats are \(2, 5\) but there are 3 voxels: feats must be \(3, C\)\. Pass one",
        ),
        (
            lambda: SparseTensor(torch.zeros(1, 2), torch.zeros(1, 3).int(), stride=0),
            ShapeError,
            r"stride is \(0, 0\): every number must be at least 1\. Correct stride",
        ),
        (
            lambda: SparseTensor(torch.zeros(1, 2), torch.tensor([[0, -1, 2]])).dense(),
            IndexRangeError,
            "axis 0 has the coordinate -1 and no spatial_shape was given",
        ),
    ],
)
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call()


QUERIES = torch.tensor([[0, 2, -1], [0, 2, 0], [7, 0, 0], [0, 2, -1], [0, -5, 2**31 - 1]])


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.uint32])
def test_voxels_are_found(dtype):
    """Red before: queries were not checked, and only `coordinates` had the look-up."""
    rows = torch.tensor([[0, 5, 5], [0, 2, -1], [1, -3, 0], [0, -5, 2**31 - 1]])
    x = SparseTensor(torch.randn(4, 2), rows)
    if dtype in (torch.int16, torch.uint32):
        queries = QUERIES[1:3].to(dtype)
        assert x.find(queries).tolist() == [-1, -1]
        return
    found = x.find(QUERIES.to(dtype))
    assert found.tolist() == [1, -1, -1, 1, 3]
    assert found.dtype == torch.int32
    assert x.coordinates.find(x.C.flip(0)).tolist() == [3, 2, 1, 0]
    assert x.find(QUERIES[:0]).shape == (0,)
    none = SparseTensor(torch.zeros(0, 2), rows[:0])
    assert none.find(QUERIES).tolist() == [-1] * 5
    wide = SparseTensor(torch.randn(2, 1), torch.tensor([[0, 0, 0], [9, 2**31 - 1, -(2**31)]]))
    assert wide.find(torch.tensor([[9, 2**31 - 1, -(2**31)], [9, 0, 0]])).tolist() == [1, -1]


@pytest.mark.parametrize(
    ("queries", "error", "match"),
    [
        (QUERIES.float(), DTypeError, r"queries are torch.float32: they must be integers"),
        (QUERIES[:, :2], ShapeError, r"queries are \(5, 2\): .* then d = 2 axes"),
        (QUERIES[0], ShapeError, r"queries are \(3,\): "),
        ([[0, 0, 0]], DTypeError, r"queries is a list"),
        (
            QUERIES.to("meta"),
            DeviceError,
            r"device of queries is meta, that of the voxels cpu: .*Move",
        ),
    ],
)
def test_queries_that_are_no_voxels_are_refused(queries, error, match):
    x = SparseTensor(torch.randn(2, 1), torch.tensor([[0, 0, 0], [0, 1, 1]]))
    with pytest.raises(error, match=match):
        x.find(queries)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("boxed", [False, True])
def test_pruned_tensors_keep_rows_in_order(boxed, ordered):
    """Red before: there was no such method."""
    torch.manual_seed(0)
    rows = (torch.rand(3, 6, 5) < 0.5).nonzero() - torch.tensor([0, 0, 0 if boxed else 2])
    rows = rows if ordered else rows[torch.randperm(len(rows))]
    feats = torch.randn(len(rows), 2, dtype=torch.float64, requires_grad=True)
    x = SparseTensor(feats, rows, *(((6, 5), 3) if boxed else ()), stride=2)
    voxels.kernel_map(x, 3)  # keys are sorted before
    mask = (feats[:, 0] > 0) & (rows[:, 0] < 2)  # no voxel of the last sample
    y = x.prune(mask)
    assert y.C.tolist() == rows[mask].tolist()
    torch.testing.assert_close(y.F, feats[mask], rtol=0, atol=0)
    assert (y.stride, y.batch_size) == (x.stride, x.batch_size)
    assert y.coordinates.given_shape == x.coordinates.given_shape
    fresh = SparseTensor(feats[mask], rows[mask])
    assert voxels.kernel_map(y, 3).sources.tolist() == voxels.kernel_map(fresh, 3).sources.tolist()
    (gradient,) = torch.autograd.grad(y.F.sum(), feats)
    assert gradient[:, 0].tolist() == mask.double().tolist()
    if boxed:
        assert y.dense().shape == x.dense().shape
        masked = x.replace(feats * mask[:, None]).dense()
        assert bool((y.dense() == masked).all())
    assert len(x.prune(torch.zeros_like(mask))) == 0
    whole = x.prune(torch.ones_like(mask))
    assert whole.C.tolist() == x.C.tolist()
    assert len(SparseTensor(feats[:0], rows[:0]).prune(mask[:0])) == 0


@pytest.mark.parametrize(
    ("mask", "error", "match"),
    [
        (torch.ones(2), DTypeError, r"mask is torch.float32: .* Pass mask.bool\(\)"),
        (torch.ones(2, 1).bool(), ShapeError, r"mask is \(2, 1\) but there are 2 .*squeeze"),
        (torch.ones(3).bool(), ShapeError, r"mask is \(3,\) but there are 2"),
        ([True, False], DTypeError, r"mask is a list"),
        (
            torch.ones(2, device="meta").bool(),
            DeviceError,
            r"device of mask is meta, that of the voxels cpu: .*Move",
        ),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask, error, match):
    x = SparseTensor(torch.randn(2, 1), torch.tensor([[0, 0, 0], [0, 1, 1]]))
    with pytest.raises(error, match=match):
        x.prune(mask)
