"""The seed's grid of cases: `dense()`, and the gradients of features and weight, against torch.

Random voxels, features and weights ~ N(0, 1), submanifold=False; dense convolution of the same
rounded inputs in float64 is right, by the computed bound; where that takes seconds, the pairs that
dictionaries find are.  The gradient of the output is random, and every call is made twice.
On the CPU a part of the grid is run, on a GPU the whole.

Seen red with: the weight's gradient doubled, channels of the last vector dropped, fp16 sums.
"""

import functools
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.cases.voxels import random_cloud
from tests.conftest import INTERPRETED
from tests.covering import FULL
from torchweft.testing import assert_within_bound
from torchweft.testing.contract import assert_same_bits
from torchweft.voxels import reference
from torchweft.voxels.convolution.functions import sparse_conv

if INTERPRETED:
    pytest.skip("the grid is for the CPU's bodies and for GPUs", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = (1, 4, 8, 16, 32, 64, 512)
ROOM = 2**27  # numbers of gathered rows
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KERNELS = [(k, p, s) for k in (3, 5) for p in (0, 1, 2) for s in (1, 2)]


@functools.lru_cache(maxsize=4)
def cloud(voxels, box, batch):
    generator = torch.Generator().manual_seed(voxels)
    return random_cloud((box,) * 3, batch, generator, voxels / (batch * box**3))


@functools.lru_cache(maxsize=4)
def sources(voxels, box, batch, kernel, padding, stride):
    """The strided layer's pairs, found by dictionaries."""
    layer = {"kernel_size": (kernel,) * 3, "dilation": (1,) * 3, "mode": "strided"}
    layer |= {"stride": (stride,) * 3, "padding": (padding,) * 3, "spatial_shape": (box,) * 3}
    return reference.pairs_of(cloud(voxels, box, batch).coords.tolist(), **layer).sources()


def check(c_in, c_out, kernel, padding, stride, dtype, *, voxels=40, box=6, batch=2, order=1,
          transposed=False, dense=True):  # fmt: skip
    tensor = cloud(voxels, box, batch).on(DEVICE)
    generator = torch.Generator().manual_seed(c_in + 1000 * c_out)
    x = torch.randn(len(tensor.C), c_in, generator=generator).to(DEVICE, dtype)
    w = torch.randn(kernel**3, c_in, c_out, generator=generator).to(DEVICE, dtype)
    options = {"stride": stride, "padding": padding}

    def ours(x, w):
        found.append(
            sparse_conv(tensor.replace(x), w, kernel, **options, transposed=transposed,
                        submanifold=False)
        )  # fmt: skip
        return found[-1].feats

    axes = {name: (value,) * 3 for name, value in {**options, "dilation": 1}.items()}
    layer = {
        "kernel_size": (kernel,) * 3,
        **axes,
        "mode": "transposed" if transposed else "strided",
    }

    def dense_oracle(x, w):
        y = reference.dense_conv(tensor.replace(x).dense(), w, **layer)
        return y.movedim(1, -1)[tuple(found[0].C.long().T)]

    def pairs_oracle(x, w):
        rows = sources(voxels, box, batch, kernel, padding, stride).to(DEVICE)
        weights, places = (a.split(1 + ROOM // (rows.shape[1] * c_in)) for a in (w, rows))
        return sum(  # some offsets at a time, forgotten at once: the rows of all can be 250 GB
            checkpoint(reference.conv, x, *some, use_reentrant=False)
            for some in zip(weights, places, strict=True)
        )

    oracle = dense_oracle if dense else pairs_oracle
    found = []
    inputs = [x, w]
    size = ours(x, w).shape
    if order:
        inputs.append(torch.randn(size, generator=generator).to(DEVICE, dtype))
    results = evaluated(ours, *inputs)
    wide = [a.double() for a in inputs]
    exact, sizes, terms = (
        evaluated(oracle, *map(f, wide)) for f in (torch.clone, torch.abs, torch.ones_like)
    )
    for out, *rest in zip(results, exact, sizes, terms, strict=True):
        assert_within_bound(out, *rest)
    for out, again in zip(results, evaluated(ours, *inputs), strict=True):
        assert_same_bits(again, out, "the second call")


def evaluated(function, x, w, *g):
    """y and, with the gradient of y, those of x and w."""
    leaves = [a.detach().requires_grad_() for a in (x, w)]
    value = function(*leaves)
    return [value.detach(), *(torch.autograd.grad(value, leaves, *g) if g else ())]


PAIRS = list(itertools.product(WIDTHS, WIDTHS))


@pytest.mark.parametrize(("c_in", "c_out"), PAIRS)
def test_every_pair_of_widths(c_in, c_out):
    """Each with another kernel, padding, stride and dtype; backward up to 64 channels."""
    i = PAIRS.index((c_in, c_out))
    wide = 512 in (c_in, c_out)
    kernel, padding, stride = KERNELS[i % (6 if wide else 12)]
    check(c_in, c_out, kernel, padding, stride, DTYPES[i % 3], order=int(not wide), batch=1 + i % 2,
          dense=False)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kernel", "padding", "stride"), KERNELS)
def test_every_geometry(kernel, padding, stride, dtype):
    check(8, 16, kernel, padding, stride, dtype)


LINES = {
    "16-16-3-1-0": (16, 16, 3, 0, 1),
    "64-64-3-1-1": (64, 64, 3, 1, 1),
    "1-1-3-1-1": (1, 1, 3, 1, 1),
    "1-1-3-1-0": (1, 1, 3, 0, 1),
    "64-32-3-1-1": (64, 32, 3, 1, 1),
    "8-16-3-1-1": (8, 16, 3, 1, 1),
    "4-8-3-1-1": (4, 8, 3, 1, 1),
}
"""C_in-C_out-k-stride-pad of the seed, where it was wrong or just right."""


@pytest.mark.parametrize("line", LINES)
def test_the_lines_of_the_seed(line):
    check(*LINES[line], torch.float16, voxels=512, box=16, batch=1)


def test_512_channels_of_5():
    c_out = 512 if FULL else 128  # weights and oracles of 33 million numbers
    check(512, c_out, 5, 1, 1, torch.float16, voxels=6, box=3, batch=1, dense=False)


def test_27_voxels_in_ten():
    check(16, 16, 5, 2, 1, torch.float16, voxels=27, box=10, batch=1, dense=False)


def test_many_voxels():
    """32,768 voxels: many chunks of rows."""
    check(4, 8, 3, 1, 1, torch.float16, voxels=32768, box=40, batch=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transposed(dtype):
    check(16, 8, 3, 1, 2, dtype, transposed=True)


@pytest.mark.skipif(DEVICE == "cpu", reason="the whole grid needs a CUDA GPU")
@pytest.mark.parametrize("voxels", [512, 32768])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kernel", "padding", "stride"), KERNELS)
def test_the_whole_grid(kernel, padding, stride, dtype, voxels):
    """Every pair of widths, in the seed's box; backward for 16 of them."""
    for c_in, c_out in PAIRS:
        backward = {c_in, c_out} <= {1, 4, 16, 64}
        check(c_in, c_out, kernel, padding, stride, dtype, voxels=voxels, box=64,
              order=int(backward), dense=False)  # fmt: skip
