"""Weights of other projects in torchweft's layers, against each project's documented formula.

The oracles below say, place by place, which voxel a saved weight multiplies: spconv's (C_out, k…,
C_in) with its own centre, torchsparse's list of offsets, MinkowskiEngine's decoding of an index.

Seen red with: the last axis fastest for MinkowskiEngine, the first for even torchsparse kernels,
spconv's even kernels unshifted, channels swapped, spconv's kernel of one place turned like others.
"""

import copy
import itertools
import math
import pickle

import pytest
import torch

from tests.clouds import cloud, same
from torchweft import voxels
from torchweft.errors import DTypeError, ShapeError
from torchweft.testing import assert_within_bound
from torchweft.voxels.layers.checkpoints import from_minkowski, from_spconv, from_torchsparse
from torchweft.voxels.layers.convolution import (
    SparseConv2d,
    SparseConv3d,
    SparseConvTranspose3d,
    SparseInverseConv3d,
    SubMConv1d,
    SubMConv2d,
    SubMConv3d,
)
from torchweft.voxels.layers.norm import SparseBatchNorm
from torchweft.voxels.layers.sequential import SparseSequential
from torchweft.voxels.maps.tensor import SparseTensor


def loaded(model, state):
    model.load_state_dict(state)
    return model


def spconv_terms(weight, sizes, begin, dilation=1, stride=1):
    """(offset, (C_in, C_out)) of weight[:, j0, j1, …, :]; the memory itself where that is all."""
    if math.prod(sizes) == stride == 1:
        weight = weight.reshape(weight.shape[-1], -1).T.reshape(weight.shape)
    for places in itertools.product(*(range(k) for k in sizes)):
        offset = tuple(dilation * (j - b) for j, b in zip(places, begin, strict=True))
        yield offset, weight[(slice(None), *places)].T


def torchsparse_terms(weight, sizes):
    """The offsets of its documentation: x fastest where the number of places is odd, else z."""
    axes = [range(-k // 2 + 1, k // 2 + 1) for k in sizes]
    if math.prod(sizes) % 2:
        offsets = [(x, y, z) for z in axes[2] for y in axes[1] for x in axes[0]]
    else:
        offsets = [(x, y, z) for x in axes[0] for y in axes[1] for z in axes[2]]
    yield from zip(offsets, weight, strict=True)


def minkowski_terms(weight, sizes):
    """Its decoding of an index: the remainder by the first axis, then by the next."""
    for index, matrix in enumerate(weight):
        offset, rest = [], index
        for size in sizes:
            place = rest % size
            offset.append(place if size % 2 == 0 else place - size // 2)
            rest //= size
        yield tuple(offset), matrix


def submanifold(tensor, terms, channels):
    """out[p] = Σ x[p + offset] @ matrix, voxel by voxel."""
    rows = {tuple(voxel): row for row, voxel in enumerate(tensor.C.tolist())}
    out = torch.zeros(len(tensor), channels, dtype=torch.float64)
    for offset, matrix in terms:
        for (sample, *voxel), row in rows.items():
            there = (sample, *(v + o for v, o in zip(voxel, offset, strict=True)))
            if there in rows:
                out[row] += tensor.feats[rows[there]].detach() @ matrix
    return out


def strided(tensor, out, terms, stride):
    """out[o] = Σ x[o·stride + offset] @ matrix on the voxels of `out`."""
    rows = {tuple(voxel): row for row, voxel in enumerate(tensor.C.tolist())}
    found = torch.zeros(out.feats.shape, dtype=torch.float64)
    for offset, matrix in terms:
        for row, (sample, *voxel) in enumerate(out.C.tolist()):
            there = (sample, *(v * stride + o for v, o in zip(voxel, offset, strict=True)))
            if there in rows:
                found[row] += tensor.feats[rows[there]].detach() @ matrix
    return found


def agree(out, exact, terms=200):
    size = torch.full_like(exact, float(exact.abs().max()))
    assert_within_bound(out.feats, exact, size, terms)


SIZES = [(3, 3, 3), (1, 3, 5), (3, 1, 1), (1, 1, 1)]


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_spconv_submanifold(sizes, dilation):
    tensor = cloud()
    weight = torch.randn(4, *sizes, 3, dtype=torch.float64)
    layer = SubMConv3d(3, 4, sizes, dilation=dilation, bias=False).double()
    loaded(layer, from_spconv({"weight": weight}, layer))
    begin = [k // 2 for k in sizes]
    exact = submanifold(tensor, spconv_terms(weight, sizes, begin, dilation), 4)
    agree(layer(tensor), exact)


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (2, 3)], ids=str)
def test_spconvs_even_submanifold_kernels_begin_one_lower(sizes):
    tensor = cloud(2)
    weight = torch.randn(4, *sizes, 3, dtype=torch.float64)
    larger = tuple(k + (k % 2 == 0) for k in sizes)
    layer = SubMConv2d(3, 4, larger, bias=False).double()
    loaded(layer, from_spconv({"weight": weight}, layer))
    begin = [k // 2 for k in sizes]
    agree(layer(tensor), submanifold(tensor, spconv_terms(weight, sizes, begin), 4))
    with pytest.raises(ShapeError, match=r"begins \(., .\) below.*larger by one"):
        from_spconv({"weight": weight}, SubMConv2d(3, 4, sizes))


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("sizes", [(3, 3), (2, 2), (3, 2), (1, 1)], ids=str)
def test_spconv_strided(sizes, padding):
    tensor = cloud(2)
    weight = torch.randn(4, *sizes, 3, dtype=torch.float64)
    layer = SparseConv2d(3, 4, sizes, 2, padding, bias=False).double()
    out = loaded(layer, from_spconv({"weight": weight}, layer))(tensor)
    agree(out, strided(tensor, out, spconv_terms(weight, sizes, [padding] * 2, stride=2), 2))


@pytest.mark.parametrize("sizes", [(3, 3, 3), (1, 3, 5), (2, 2, 2), (2, 1, 2)], ids=str)
def test_torchsparse_submanifold(sizes):
    tensor = cloud()
    weight = torch.randn(math.prod(sizes), 3, 4, dtype=torch.float64)
    layer = SubMConv3d(3, 4, sizes, bias=False).double()
    loaded(layer, from_torchsparse({"kernel": weight}, layer))
    agree(layer(tensor), submanifold(tensor, torchsparse_terms(weight, sizes), 4))


@pytest.mark.parametrize("sizes", [(3, 3, 3), (1, 3, 5), (1, 1, 1)], ids=str)
def test_weights_of_spconv_1(sizes):
    """(k…, C_in, C_out); red before: they had to be turned by hand, wrongly for one position."""
    tensor = cloud()
    weight = torch.randn(*sizes, 3, 4, dtype=torch.float64)
    layer = SubMConv3d(3, 4, sizes, bias=False).double()
    loaded(layer, from_spconv({"weight": weight}, layer))
    terms = [
        (tuple(j - k // 2 for j, k in zip(places, sizes, strict=True)), weight[places])
        for places in itertools.product(*(range(k) for k in sizes))
    ]
    agree(layer(tensor), submanifold(tensor, terms, 4))


def test_weights_that_fit_two_versions_of_spconv_need_the_version():
    """Red before: (3, 3, 3) was read as spconv 2's, whoever had written it."""
    weight = torch.arange(27.0).view(3, 3, 3)
    layer = SubMConv1d(3, 3, 3, bias=False)
    with pytest.raises(ShapeError, match=r"weight is \(3, 3, 3\), .* Pass version=2, or version=1"):
        from_spconv({"weight": weight}, layer)
    same(from_spconv({"weight": weight}, layer, version=1)["weight"], weight)
    turned = from_spconv({"weight": weight}, layer, version=2)["weight"]
    same(turned, weight.movedim(0, -1))
    net = SparseSequential(layer, SubMConv1d(3, 4, 1, bias=False))  # the second layer tells
    for version, other in ((1, torch.ones(1, 3, 4)), (2, torch.ones(4, 1, 3))):
        state = from_spconv({"0.weight": weight, "1.weight": other}, net)
        same(state["0.weight"], weight if version == 1 else turned)
    single = SubMConv1d(1, 1, 1, bias=False)
    same(from_spconv({"weight": torch.ones(1, 1, 1)}, single)["weight"], torch.ones(1, 1, 1))
    with pytest.raises(ShapeError, match=r"version is 3: .* Pass version=2"):
        from_spconv({"weight": weight}, layer, version=3)


CONVERT = {"torchsparse": from_torchsparse, "minkowski": from_minkowski}


@pytest.mark.parametrize("project", CONVERT)
def test_outputs_are_at_floor_of_every_input(project):
    """Red before: kernels of three were refused, and boxes that the stride does not divide."""
    size, stride = (2, 2) if project == "torchsparse" else (3, 2)
    layer = SparseSequential(SparseConv3d(3, 4, size, stride, bias=False, outputs="floor")).double()
    weight = torch.randn(size**3, 3, 4, dtype=torch.float64)
    loaded(layer, CONVERT[project]({"0.kernel": weight}, layer))
    terms = {"torchsparse": torchsparse_terms, "minkowski": minkowski_terms}[project]
    matrices = list(terms(weight, (size,) * 3))
    for box in ((6, 4, 2), (5, 4, 3), None):
        tensor = cloud(shape=(5, 4, 2), density=0.9)
        shift = torch.tensor([0, 0, 0, 0 if box else 3], dtype=torch.int32)
        tensor = SparseTensor(tensor.F, tensor.C - shift, box, 2)
        out = layer(tensor)
        floors = torch.cat([tensor.C[:, :1], tensor.C[:, 1:] // stride], 1).unique(dim=0)
        same(out.C, floors)
        agree(out, strided(tensor, out, matrices, stride))
        for network in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            same(network(tensor).F, out.F)
        same(torch.compile(layer, backend="eager")(tensor).C, floors)
    with pytest.raises(DTypeError, match="SparseConv3d was given a Tensor"):
        layer[0](tensor.F)


@pytest.mark.parametrize("kwargs", [{"kernel_size": 2}, {"kernel_size": (3, 3, 3), "stride": 2}])
def test_pools_of_minkowski_too(kwargs):
    tensor = cloud(shape=(4, 4, 5))
    for kind in (voxels.SparseMaxPool, voxels.SparseAvgPool):
        pool = kind(**kwargs, outputs="floor")
        from_minkowski({}, pool)
        floors = torch.cat([tensor.C[:, :1], tensor.C[:, 1:] // 2], 1).unique(dim=0)
        same(pool(tensor=tensor).C, floors)
        match = rf"^{kind.__name__} is a {kind.__name__}\(.* Build it with outputs="
        with pytest.raises(ShapeError, match=match):
            from_minkowski({}, kind(**kwargs))


REFUSED = {
    "cells": (SparseConv3d(3, 4, 2, 2), "minkowski"),
    "wide": (SparseConv3d(3, 4, 3, 2, 1), "minkowski"),
    "stride 1": (SparseConv3d(3, 4, 2), "minkowski"),
    "wide, transposed": (SparseConvTranspose3d(3, 4, 3, 2, 1), "minkowski"),
    "wide axis": (SparseConv3d(3, 4, (2, 3, 1), (2, 1, 1), (0, 1, 0)), "torchsparse"),
    "torchsparse's cells": (SparseConv3d(3, 4, 2, 2), "torchsparse"),
    "torchsparse's stride 1": (SparseConv3d(3, 4, 3, 1, 1), "torchsparse"),
    "torchsparse's transposed": (SparseConvTranspose3d(3, 4, 3, 2, 1), "torchsparse"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_write_other_voxels_are_refused(name):
    """Red before: they were loaded."""
    layer, project = REFUSED[name]
    saved = torch.ones(math.prod(layer.kernel_size), 3, 4)
    with pytest.raises(
        ShapeError, match=r"^1 is a Sparse.* floor\(c / stride\) .* Build it with outputs="
    ):
        CONVERT[project]({"1.kernel": saved}, SparseSequential(torch.nn.ReLU(), layer))


def test_strided_kernels_that_reach():
    """torchsparse writes all that a kernel of three reaches at stride two, unless told not to."""
    tensor = cloud(shape=(6, 6, 4), density=0.1)
    weight = torch.randn(27, 3, 4, dtype=torch.float64)
    layer = SparseConv3d(3, 4, 3, 2, 1, bias=False).double()
    out = loaded(layer, from_torchsparse({"kernel": weight}, layer))(tensor)
    agree(out, strided(tensor, out, torchsparse_terms(weight, (3,) * 3), 2))
    floors = SparseConv3d(3, 4, 3, 2, bias=False, outputs="floor").double()
    some = loaded(floors, from_torchsparse({"kernel": weight}, floors))(tensor)
    assert len(some) < len(out)
    rows = out.find(some.C).long()
    assert int(rows.min()) >= 0
    agree(some, out.F[rows].detach())


def test_even_kernels_of_torchsparse_that_begin_elsewhere_are_refused():
    layer = SparseConv3d(3, 4, 4, 4, outputs="floor")
    with pytest.raises(ShapeError, match=r"begins \(1, 1, 1\) below its voxel, the layer one"):
        from_torchsparse({"kernel": torch.ones(64, 3, 4)}, layer)


@pytest.mark.parametrize("sizes", [(3, 3, 3), (1, 3, 5), (2, 2, 2), (3, 2, 1)], ids=str)
def test_minkowski_submanifold(sizes):
    tensor = cloud()
    weight = torch.randn(math.prod(sizes), 3, 4, dtype=torch.float64)
    layer = SubMConv3d(3, 4, sizes, bias=False).double()
    loaded(layer, from_minkowski({"kernel": weight}, layer))
    agree(layer(tensor), submanifold(tensor, minkowski_terms(weight, sizes), 4))


@pytest.mark.parametrize(("size", "padding"), [(3, 1), (2, 0)])
@pytest.mark.parametrize("project", ["spconv", "torchsparse", "minkowski"])
def test_transposed_kernels_write_where_strided_ones_read(project, size, padding):
    """out[q] = Σ over o·2 + offset = q of x[o] @ matrix: the same offsets, sides swapped."""
    tensor = cloud()
    saved = torch.randn(4, *(size,) * 3, 3, dtype=torch.float64)
    if project != "spconv":
        saved = torch.randn(size**3, 3, 4, dtype=torch.float64)
    convert, terms = {
        "spconv": (from_spconv, lambda w, s: spconv_terms(w, s, [padding] * 3)),
        "torchsparse": (from_torchsparse, torchsparse_terms),
        "minkowski": (from_minkowski, minkowski_terms),
    }[project]
    state = {"weight" if project == "spconv" else "kernel": saved}
    matrices = list(terms(saved, (size,) * 3))
    rule = {"padding": padding} if project == "spconv" else {"outputs": "floor"}
    down = SparseConv3d(3, 3, size, 2, **rule, indice_key="down").double()
    up = SparseInverseConv3d(3, 4, size, bias=False, indice_key="down").double()
    coarse = down(tensor)
    out = loaded(up, convert(state, up))(coarse)
    exact = torch.zeros(len(out), 4, dtype=torch.float64)
    rows = {tuple(v): row for row, v in enumerate(tensor.C.tolist())}
    for row, (sample, *voxel) in enumerate(coarse.C.tolist()):
        for offset, matrix in matrices:
            there = (sample, *(2 * v + o for v, o in zip(voxel, offset, strict=True)))
            if there in rows:
                exact[rows[there]] += coarse.feats[row].detach() @ matrix
    agree(out, exact)
    if project != "spconv":
        floor = SparseConvTranspose3d(3, 4, size, 2, bias=False, outputs="floor").double()
        onto = loaded(floor, convert(state, floor))(coarse, tensor.coordinates)
        same(onto.F, out.F)
    if project != "spconv" and size == 3:
        return  # the other projects write other voxels
    turned = SparseConvTranspose3d(3, 4, size, 2, padding, bias=False).double()
    out = loaded(turned, convert(state, turned))(tensor)
    places = {tuple(v): row for row, v in enumerate(out.C.tolist())}
    exact = torch.zeros(len(out), 4, dtype=torch.float64)
    for row, (sample, *voxel) in enumerate(tensor.C.tolist()):
        for offset, matrix in matrices:
            there = (sample, *(2 * v + o for v, o in zip(voxel, offset, strict=True)))
            if there in places:
                exact[places[there]] += tensor.feats[row].detach() @ matrix
    agree(out, exact)


def test_order_of_a_small_kernel():
    """A kernel 2 × 3 × 1 whose matrices are its places, by hand."""
    layer = SparseInverseConv3d(1, 1, (2, 3, 1), padding=(0, 1, 0), bias=False, indice_key="a")
    places = torch.arange(6.0)
    expected = {
        "spconv": [0, 1, 2, 3, 4, 5],
        "torchsparse": [0, 1, 2, 3, 4, 5],
        "minkowski": [0, 2, 4, 1, 3, 5],
    }
    found = {
        "spconv": from_spconv({"weight": places.view(1, 2, 3, 1, 1)}, layer),
        "torchsparse": from_torchsparse({"kernel": places.view(6, 1, 1)}, layer),
        "minkowski": from_minkowski({"kernel": places.view(6, 1, 1)}, layer),
    }
    for project, order in expected.items():
        same(found[project]["weight"].flatten(), torch.tensor(order).float())
    odd = SubMConv3d(1, 1, (3, 1, 3), bias=False)
    state = from_torchsparse({"kernel": torch.arange(9.0).view(9, 1, 1)}, odd)
    same(state["weight"].flatten(), torch.tensor([0.0, 3, 6, 1, 4, 7, 2, 5, 8]))
    even = SubMConv1d(1, 1, 3, bias=False)
    state = from_spconv({"weight": torch.tensor([[[1.0], [2.0]]])}, even)
    same(state["weight"].flatten(), torch.tensor([1.0, 2, 0]))


def network():
    return SparseSequential(
        SubMConv3d(3, 4, 3),
        SparseBatchNorm(4),
        torch.nn.ReLU(),
        SubMConv3d(4, 5, 1),
        torch.nn.Linear(5, 2),
    )


def test_whole_networks_load():
    torch.manual_seed(0)
    ours = network().state_dict()
    rest = {k: v for k, v in ours.items() if k.startswith(("1.", "4."))}
    spconv = rest | {"0.bias": ours["0.bias"], "3.bias": ours["3.bias"]}
    spconv["0.weight"] = ours["0.weight"].reshape(3, 3, 3, 3, 4).movedim(-1, 0)
    spconv["3.weight"] = ours["3.weight"].reshape(5, 1, 1, 1, 4)
    first_fastest = ours["0.weight"].reshape(3, 3, 3, 3, 4).permute(2, 1, 0, 3, 4).flatten(0, 2)
    torchsparse = rest | {"0.kernel": first_fastest, "3.kernel": ours["3.weight"][0]}
    torchsparse |= {"0.bias": ours["0.bias"], "3.bias": ours["3.bias"]}
    minkowski = {k: v for k, v in torchsparse.items() if k.endswith("kernel")}
    minkowski |= {f"{k}.bias": ours[f"{k}.bias"][None] for k in "03"}
    minkowski |= {k.replace("1.", "1.bn."): v for k, v in rest.items() if k.startswith("1.")}
    minkowski |= {k.replace("4.", "4.linear."): v for k, v in rest.items() if k.startswith("4.")}
    for convert, state in (
        (from_spconv, spconv),
        (from_torchsparse, torchsparse),
        (from_minkowski, minkowski),
    ):
        model = network()
        loaded(model, convert(state, model))
        for name, tensor in model.state_dict().items():
            same(tensor, ours[name])


def test_weights_that_do_not_fit_are_refused():
    layer = SubMConv3d(3, 4, 3)
    with pytest.raises(ShapeError, match=r"weight is \(27, 3, 4\): spconv's .*Build the layer"):
        from_spconv({"weight": torch.ones(27, 3, 4)}, layer)
    with pytest.raises(ShapeError, match=r"kernel is \(8, 3, 4\) but .*Build the layer"):
        from_torchsparse({"kernel": torch.ones(8, 3, 4)}, layer)
    with pytest.raises(ShapeError, match=r"kernel maps 4 to 3 channels, the layer 3 to 4.*Build"):
        from_minkowski({"kernel": torch.ones(27, 4, 3)}, layer)
    with pytest.raises(ShapeError, match=r"kernel is of an even submanifold.*retrain"):
        from_torchsparse({"kernel": torch.ones(64, 3, 4)}, SubMConv3d(3, 4, 4))
    with pytest.raises(ShapeError, match=r"begins \(0, 0, 0\) below.*begins \(1, 1, 1\)"):
        from_minkowski({"kernel": torch.ones(64, 3, 4)}, SubMConv3d(3, 4, 4))
    network = SparseSequential(torch.nn.Sequential(layer))
    for load, leaf in ((from_spconv, "weight"), (from_torchsparse, "kernel")):
        match = rf"has conv\.{leaf} and the model no module conv: .* are 0\.0, .*Give the state"
        with pytest.raises(ShapeError, match=match):  # red before: it came back as it was
            load({f"conv.{leaf}": torch.ones(1)}, network)
    other = {"norm.weight": torch.ones(4), "0.0.bias": torch.ones(4)}
    with pytest.raises(ShapeError, match=r"has norm\.weight"):
        from_spconv(other, network)
    weight = torch.ones(4, 3, 3, 3, 3)  # of a larger network, with parts that are not here
    assert from_spconv(other | {"0.0.weight": weight}, network).keys() == other.keys() | {
        "0.0.weight"
    }
    unpadded = SparseConv3d(3, 4, 3, 2)
    with pytest.raises(ShapeError, match=r"has a kernel of \(2, 2, 2\)"):
        from_spconv({"weight": torch.ones(4, 2, 2, 2, 3)}, unpadded)
