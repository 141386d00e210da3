"""Any layer on any voxels is torch's dense convolution on that set, gradients included.

In one to three dimensions against torch itself, in four against the maps that dictionaries give;
the outputs are those that a pair reaches, and they ascend.

On the CPU 125 draws for each count of dimensions, in float64.  Where a GPU is, 100 of them run its
kernels, in float32 and half precision, on boxes larger than a tile: kernels of three shapes and
channels of four kinds, since what is compiled follows from them, not from strides, dilations,
paddings, boxes and clouds, which are drawn as freely.

Seen red with: a stride's remainder taken for a neighbour, half of the padding left out of the last
output, the dilation of a submanifold kernel's centre, offsets counted with the first axis fastest.
"""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchweft.testing import assert_within_bound
from torchweft.voxels import reference
from torchweft.voxels.convolution.functions import sparse_conv
from torchweft.voxels.maps.tensor import SparseTensor

GPU = torch.cuda.is_available()
EXAMPLES = 100 if GPU else 125
LONGEST = {1: 300, 2: 16, 3: 7, 4: 4} if GPU else {1: 12, 2: 6, 3: 4, 4: 2}
KERNELS = {
    1: [(1,), (3,), (4,)],
    2: [(3, 3), (1, 4), (2, 3)],
    3: [(3, 3, 3), (2, 1, 3), (2, 2, 2)],
    4: [(3, 2, 1, 3), (2, 2, 2, 1), (1, 3, 1, 1)],
}
CHANNELS = [(1, 3, 1), (8, 16, 1), (6, 9, 3), (5, 5, 5)]
"""(C_in, C_out, groups) for the fold, tiles, groups and the depthwise kernels."""


@st.composite
def widths(draw, d):
    """(kernel, C_in, C_out, groups, dtype)"""
    if GPU:
        dtype = draw(st.sampled_from([torch.float32, torch.float16]))
        return draw(st.sampled_from(KERNELS[d])), *draw(st.sampled_from(CHANNELS)), dtype
    kernel = draw(st.tuples(*[st.integers(1, 4 if d < 3 else 3)] * d))
    groups = draw(st.integers(1, 3))
    inner, outer = (groups * draw(st.integers(1, 3)) for _ in range(2))
    return kernel, inner, outer, groups, torch.float64


@st.composite
def problems(draw, d):
    """(shape, batch, share, seed, geometry, mode, channels, groups, dtype)"""
    axis = st.integers(1, LONGEST[d])
    shape = draw(st.tuples(*[axis] * d))

    def each(low, high):
        return draw(st.tuples(*[st.integers(low, high)] * d))

    mode = draw(st.sampled_from(["submanifold", "strided", "transposed"]))
    kernel, *channels, groups, dtype = draw(widths(d))
    stride = (1,) * d if mode == "submanifold" else each(1, 3)
    dilation = each(1, 2)
    padding = each(0, 2)
    geometry = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    share = draw(st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0]))
    batch, seed = draw(st.integers(1, 2)), draw(st.integers(0, 99))
    return shape, batch, share, seed, geometry, mode, channels, groups, dtype


def tensor_of(shape, batch, share, generator):
    """Voxels in random order, without features."""
    places = batch * math.prod(shape)
    chosen = torch.randperm(places, generator=generator)[: math.ceil(share * places)]
    coords = torch.stack(list(torch.unravel_index(chosen, (batch, *shape))), 1)
    return SparseTensor(torch.empty(len(coords), 0), coords, shape, batch)


def derivatives(function, leaves, g):
    """The value and its gradients."""
    leaves = [a.detach().requires_grad_() for a in leaves]
    value = function(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves, g, materialize_grads=True)]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("d", [1, 2, 3, 4])
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_any_layer_is_the_dense_one(d, data):
    problem = data.draw(problems(d))
    shape, batch, share, seed, geometry, mode, (inner, outer), groups, dtype = problem
    generator = torch.Generator().manual_seed(seed)
    tensor = tensor_of(shape, batch, share, generator)
    given_to = tensor.cuda() if GPU else tensor
    expected = reference.pairs_of(tensor.C.tolist(), **geometry, mode=mode, spatial_shape=shape)
    randn = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    num = math.prod(geometry["kernel_size"])
    sizes = (len(tensor), inner), (num, inner // groups, outer), (len(expected.outputs), outer)
    drawn = [randn(size).to(dtype) for size in sizes]
    found = []

    def ours(x, w):
        modes = {"transposed": mode == "transposed", "submanifold": mode == "submanifold"}
        result = sparse_conv(given_to.replace(x), w, **geometry, **modes, groups=groups)
        found.append(result)
        return result.feats

    *leaves, g = (a.to(given_to.device) for a in drawn)
    results = [result.cpu() for result in derivatives(ours, leaves, g)]
    coords = found[0].C.cpu()
    assert [tuple(row) for row in coords.tolist()] == [tuple(o) for o in expected.outputs]

    def oracle(x, w):
        if len(shape) == 4 or not expected.outputs:
            return reference.conv(x, w, expected.sources(), groups=groups)
        dense = tensor.replace(x).dense()
        y = reference.dense_conv(dense, w, **geometry, groups=groups, mode=mode)
        assert tuple(y.shape[2:]) == found[0].spatial_shape
        return y.movedim(1, -1)[tuple(coords.long().T)]

    *inputs, g = (a.double() for a in drawn)
    exact, *bounds = (
        derivatives(oracle, [f(a) for a in inputs], f(g))
        for f in (torch.clone, torch.abs, torch.ones_like)
    )
    for out, *rest in zip(results, exact, *bounds, strict=True):
        assert_within_bound(out, *rest)
