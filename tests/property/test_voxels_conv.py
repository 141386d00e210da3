"""Any layer on any voxels is torch's dense convolution on that set, gradients included.

In one to three dimensions against torch itself, in four against the maps that dictionaries give;
the outputs are those that a pair reaches, and they ascend.

Seen red with: a stride's remainder taken for a neighbour, half of the padding left out of the last
output, the dilation of a submanifold kernel's centre, offsets counted with the first axis fastest.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.testing import assert_within_bound
from weft.voxels import reference
from weft.voxels.ops import sparse_conv
from weft.voxels.tensor import SparseTensor


@st.composite
def problems(draw, d):
    """(shape, batch, share, seed, geometry, mode, channels, groups)"""
    axis = st.integers(1, {1: 12, 2: 6, 3: 4, 4: 2}[d])
    shape = draw(st.tuples(*[axis] * d))

    def each(low, high):
        return draw(st.tuples(*[st.integers(low, high)] * d))

    mode = draw(st.sampled_from(["submanifold", "strided", "transposed"]))
    kernel = each(1, 4 if d < 3 else 3)
    stride = (1,) * d if mode == "submanifold" else each(1, 3)
    dilation = each(1, 2)
    padding = each(0, 2)
    groups = draw(st.integers(1, 3))
    channels = tuple(groups * draw(st.integers(1, 3)) for _ in range(2))
    geometry = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    share = draw(st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0]))
    batch, seed = draw(st.integers(1, 2)), draw(st.integers(0, 99))
    return shape, batch, share, seed, geometry, mode, channels, groups


def tensor_of(shape, batch, share, generator, channels):
    places = batch * math.prod(shape)
    chosen = torch.randperm(places, generator=generator)[: math.ceil(share * places)]
    coords = torch.stack(list(torch.unravel_index(chosen, (batch, *shape))), 1)
    feats = torch.randn(len(coords), channels, generator=generator, dtype=torch.float64)
    return SparseTensor(feats, coords, shape, batch)


def derivatives(function, leaves, g):
    """The value and its gradients."""
    leaves = [a.detach().requires_grad_() for a in leaves]
    value = function(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves, g, materialize_grads=True)]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("d", [1, 2, 3, 4])
@settings(max_examples=125)
@given(data=st.data())
def test_any_layer_is_the_dense_one(d, data):
    problem = data.draw(problems(d))
    shape, batch, share, seed, geometry, mode, (inner, outer), groups = problem
    generator = torch.Generator().manual_seed(seed)
    tensor = tensor_of(shape, batch, share, generator, inner)
    num = math.prod(geometry["kernel_size"])
    weight = torch.randn(num, inner // groups, outer, generator=generator, dtype=torch.float64)
    found = []

    def ours(x, w):
        modes = {"transposed": mode == "transposed", "submanifold": mode == "submanifold"}
        result = sparse_conv(tensor.replace(x), w, **geometry, **modes, groups=groups)
        found.append(result)
        return result.feats

    expected = reference.pairs_of(tensor.C.tolist(), **geometry, mode=mode, spatial_shape=shape)
    g = torch.randn(len(expected.outputs), outer, generator=generator, dtype=torch.float64)
    results = derivatives(ours, (tensor.feats, weight), g)
    assert [tuple(row) for row in found[0].C.tolist()] == [tuple(o) for o in expected.outputs]

    def oracle(x, w):
        if len(shape) == 4 or not expected.outputs:
            return reference.conv(x, w, expected.sources(), groups=groups)
        dense = tensor.replace(x).dense()
        y = reference.dense_conv(dense, w, **geometry, groups=groups, mode=mode)
        assert tuple(y.shape[2:]) == found[0].spatial_shape
        return y.movedim(1, -1)[tuple(found[0].C.long().T)]

    inputs = (tensor.feats, weight)
    exact = derivatives(oracle, inputs, g)
    sizes, terms = (
        derivatives(oracle, [f(a) for a in inputs], f(g)) for f in (torch.abs, torch.ones_like)
    )
    for out, *rest in zip(results, exact, sizes, terms, strict=True):
        assert_within_bound(out, *rest)
