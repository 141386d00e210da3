"""The bodies in torch and numba: one product or many, chunks of any size, the same sums and bits.

Row order carries no information: permuted rows give permuted results, to the bit, and the weight's
gradient does not change; nor does anything with the number of threads.

Seen red with: rows visited as they stand, pairs of an offset shifted by one, channels not filled up
(C = 31 to 65, two and four threads), what fills up an offset's pairs left in the gradient or added
to row 0, an offset with one row missing taken for a full one, weights not flipped.
"""

import pytest
import torch

from tests.cases.voxels import Cloud, Layer, random_cloud
from tests.conftest import INTERPRETED
from torchweft.testing import assert_within_bound
from torchweft.testing.contract import assert_same_bits
from torchweft.voxels import reference
from torchweft.voxels.convolution import numba_path as loops
from torchweft.voxels.convolution import torch_path as cpu
from torchweft.voxels.convolution.operator import conv_op
from torchweft.voxels.maps.tensor import kernel_map

if INTERPRETED:
    pytest.skip("the CPU's own bodies are tested without Triton", allow_module_level=True)

WIDTHS = [(1, 1, 1), (1, 16, 1), (31, 65, 1), (64, 64, 1), (65, 3, 1), (66, 90, 2), (24, 40, 8),
          (33, 33, 33), (16, 32, 16)]  # fmt: skip
"""(C_in, C_out, groups)"""

LAYERS = [
    Layer((3, 3, 3)),
    Layer((2, 2, 2)),
    Layer((3, 3, 3), "strided", 2, 1),
    Layer((2, 2, 2), "transposed", 2),
]


def tables(cloud, layer):
    """The arguments of conv_op behind the operands, and the map."""
    found = kernel_map(
        cloud.on("cpu"), layer.kernel_size, layer.stride, layer.padding, layer.dilation,
        layer.mode == "submanifold", layer.mode == "transposed",
    )  # fmt: skip
    orders = found.inputs.order, found.outputs.order
    return (found.table, found.transpose().table, *orders, len(found.table)), found


@pytest.fixture(params=["one product", "many", "small chunks", "numba"])
def way(request, monkeypatch):
    """How a body works, whatever the sizes."""
    folded = request.param == "one product"
    monkeypatch.setattr(cpu, "_is_folded", lambda x, shape, data, groups: folded and groups == 1)
    if request.param == "small chunks":
        monkeypatch.setattr(cpu, "MOST_ROWS_PER_CHUNK", 48)
    monkeypatch.setattr(cpu, "GATHERED", 2**12)
    monkeypatch.setattr(loops, "SERIAL", 0)
    cpu._table_cache._entries.clear()
    yield request.param
    cpu._table_cache._entries.clear()


def operands(cloud, maps, width, dtype=torch.float32):
    """x, weight and a gradient of the output."""
    inner, outer, groups = width
    generator = torch.Generator().manual_seed(0)
    num_offsets, num_rows = maps[0].shape
    shapes = (
        (len(cloud.coords), inner),
        (num_offsets, inner // groups, outer),
        (num_rows, outer),
    )
    return [torch.randn(s, generator=generator, dtype=dtype) for s in shapes]


def run(way, x, weight, g, maps, groups):
    """The value and both gradients."""
    rest = (groups, "ieee", "numba" if way == "numba" else "torch")
    return (
        conv_op(x, weight, *maps, "y", *rest),
        conv_op(g, weight, *maps, "x", *rest),
        conv_op(x, g, *maps, "w", *rest),
    )


def oracle(x, weight, g, sources, groups):
    leaves = [a.detach().requires_grad_() for a in (x, weight)]
    y = reference.conv(*leaves, sources, groups=groups)
    return (y.detach(), *torch.autograd.grad(y, leaves, g))


def assert_sums(results, inputs, sources, groups):
    """The value and both gradients are within their bounds."""
    wide = [a.double() for a in inputs]
    exact, sizes, terms = (
        oracle(*map(f, wide), sources, groups) for f in (torch.clone, torch.abs, torch.ones_like)
    )
    for out, *expected in zip(results, exact, sizes, terms, strict=True):
        assert_within_bound(out, *expected)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_sums_and_bits(width, layer, way, poisoned_memory):
    generator = torch.Generator().manual_seed(1)
    cloud = random_cloud((8, 8, 8), 2, generator)
    maps, found = tables(cloud, layer)
    x, weight, g = operands(cloud, maps, width)
    results = run(way, x, weight, g, maps, width[2])

    assert_sums(results, (x, weight, g), found.sources, width[2])

    order = torch.randperm(len(x), generator=generator)
    other = cloud.permuted(order)
    its_maps, its_found = tables(other, layer)
    # outputs of a submanifold layer stand as its inputs do, else they ascend
    rows = order if layer.mode == "submanifold" else torch.arange(len(g))
    assert_same_bits(its_found.outputs.rows, found.outputs.rows[rows], "the outputs")
    y, dx, dw = run(way, x[order], weight, g[rows], its_maps, width[2])
    assert_same_bits(y, results[0][rows], "the value of permuted rows")
    assert_same_bits(dx, results[1][order], "the input's gradient of permuted rows")
    assert_same_bits(dw, results[2], "the weight's gradient of permuted rows")


@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_offsets_that_all_rows_but_one_have(width, way):
    """A line of voxels: rows that are all there need no places, one missing is enough for them."""
    cloud = Cloud(torch.stack([torch.zeros(41), torch.arange(41)], 1).long(), (41,), 1)
    maps, found = tables(cloud, Layer((3,)))
    inputs = operands(cloud, maps, width)
    assert_sums(run(way, *inputs, maps, width[2]), inputs, found.sources, width[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", WIDTHS[2:], ids=str)
@pytest.mark.parametrize("way", ["one product", "many", "numba"], indirect=True)
def test_threads_change_no_bit(width, dtype, way):
    layer = Layer((3, 1, 1))
    cloud = random_cloud((16, 16, 16), 1, torch.Generator().manual_seed(2))
    maps, _ = tables(cloud, layer)
    inputs = operands(cloud, maps, width, dtype)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(run(way, *inputs, maps, width[2]))
    finally:
        torch.set_num_threads(before)
    for results in found[1:]:
        for name, out, expected in zip(("y", "dx", "dw"), results, found[0], strict=True):
            assert_same_bits(out, expected, f"{name} by other threads")


@pytest.mark.parametrize("way", ["one product", "small chunks", "numba"], indirect=True)
def test_infinities_stay_where_they_meet(way):
    """Row 0 is infinite and meets few others: nothing that fills up reads it."""
    cloud = Cloud(torch.tensor([[0, 0], [0, 5], [0, 6], [0, 9]]), (10,), 1)
    maps, _ = tables(cloud, Layer((3,)))
    x, weight, g = operands(cloud, maps, (2, 2, 1))
    x[0] = float("inf")
    y, _, dw = run(way, x, weight, g, maps, 1)
    assert y[1:].isfinite().all()
    assert not y[0].isfinite().any()
    assert dw[[0, 2]].isfinite().all()
    assert not dw[1].isfinite().any()


@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_a_symmetric_map_needs_no_second_table(width, way):
    """Without `back` the offsets of the table are turned round."""
    cloud = random_cloud((8, 8, 8), 1, torch.Generator().manual_seed(3))
    (table, back, _, order, num), its_map = tables(cloud, LAYERS[0])
    inputs = operands(cloud, (table,), width, torch.float64)
    _, expected, _ = run(way, *inputs, (table, back, order, order, num), width[2])
    results = run(way, *inputs, (table, None, order, order, num), width[2])
    kept = table[: num // 2 + 1].clone()  # half of it says all
    for result, again in zip(
        results, run(way, *inputs, (kept, None, order, order, num), width[2]), strict=True
    ):
        torch.testing.assert_close(again, result, rtol=0, atol=0)
    _, found, _ = results
    magnitude = oracle(*(a.abs() for a in inputs), its_map.sources, width[2])[1]
    terms = len(table) * width[1] // width[2]
    assert_within_bound(found, expected, magnitude, 2 * terms)
