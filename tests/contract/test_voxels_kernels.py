"""The GPU bodies of the sparse convolution, on tables as small as they come."""

import numpy as np
import pytest
import torch

from torchweft.core.backend import interpreted
from torchweft.core.printing.modules import written

if not interpreted() and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a GPU", allow_module_level=True)

from torchweft.core.operators.call_cache import CallCache
from torchweft.testing import assert_as_accurate, assert_within_bound, plain_error
from torchweft.voxels.convolution import launch
from torchweft.voxels.convolution.epilogue import ACTIVATIONS, NO_EPILOGUE, Epilogue
from torchweft.voxels.convolution.functions import CONV_PRECISIONS
from torchweft.voxels.convolution.launch import LEAST_UNITS, MOST_ADDED, PAIRS_PER_UNIT
from torchweft.voxels.maps.gpu import tiles as preparation

DEVICE = "cpu" if interpreted() else "cuda"
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "tf32x3": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]


def tables(offsets, n_in, n_out, density=0.3, seed=0):
    """Sources as maps have them: at one offset a row of the input is read by one output at most."""
    g = torch.Generator().manual_seed(seed)
    sources = torch.full((offsets, n_out), -1, dtype=torch.int32)
    for k in range(offsets):
        size = min(n_in, n_out)
        of_in, of_out = torch.randperm(n_in, generator=g), torch.randperm(n_out, generator=g)
        # offsets differ in how many rows they have, some have none
        there = torch.rand(size, generator=g) < density * (k % 3)
        sources[k, of_out[:size][there]] = of_in[:size][there].int()
    return sources.to(DEVICE)


def draw(kind, *shape, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g).to(DEVICE, DTYPES[kind])


def by_loop(x, weight, sources, groups):
    """(y, number of terms) in the precision of x."""
    y = x.new_zeros(sources.shape[1], weight.shape[2])
    terms = torch.zeros(sources.shape[1], 1, dtype=torch.float64, device=x.device)
    for k, source in enumerate(sources.long()):
        rows = source >= 0
        blocks = zip(x.chunk(groups, 1), weight[k].chunk(groups, 1), strict=True)
        y[rows] += torch.cat([part[source[rows]] @ block for part, block in blocks], 1)
        terms[rows] += weight.shape[1]
    return y, terms


def gradient_by_loop(x, g, sources, groups):
    dw = []
    for source in sources.long():
        rows = source >= 0
        parts = zip(x[source[rows]].chunk(groups, 1), g[rows].chunk(groups, 1), strict=True)
        dw.append(torch.cat([part.mT @ block for part, block in parts], 1))
    return torch.stack(dw), (sources >= 0).sum(1)[:, None, None]


def check(kind, offsets, n_in, n_out, c, d, groups=1, order=None, **other):
    """Convolution and weight gradient of random tables, every element within its bound."""
    sources = tables(offsets, n_in, n_out)
    x, g = draw(kind, n_in, c), draw(kind, n_out, d, seed=2)
    weight = draw(kind, offsets, c // groups, d, seed=3)
    check_convolve(kind, x, weight, sources, order, groups, **other)
    check_gradient(kind, x, g, sources, order, groups)


def check_convolve(kind, x, weight, sources, order, groups=1, **other):
    precision = kind if kind in CONV_PRECISIONS else "ieee"
    y = launch.convolve(x, weight, sources, order, groups=groups, precision=precision, **other)
    used = weight.flip(0) if other.get("flip") else weight
    exact, terms = by_loop(x.double(), used.double(), sources, groups)
    size, _ = by_loop(x.double().abs(), used.double().abs(), sources, groups)
    if (after := other.get("after")) is not None:
        exact, terms = after.to(torch.float64)(exact), terms + steps_of(after)
        size = magnitudes(after)(size)
    assert y.dtype == x.dtype
    assert_within_bound(y, exact, size, terms, tf32=kind == "tf32")


def steps_of(after):
    """Roundings of an epilogue: one a step, and those of 1 / √, which a GPU gives to two units."""
    return sum(t is not None for t in after[:5]) + (4 if after.var is not None else 0)


def magnitudes(after):
    """The epilogue that adds what another adds or subtracts, of magnitudes alone."""
    scale, shift, residual, mean, var = (None if t is None else t.double().abs() for t in after[:5])
    return Epilogue(scale, shift, residual, None if mean is None else -mean, var, eps=after.eps)


def check_gradient(kind, x, g, sources, order, groups=1):
    precision = kind if kind in CONV_PRECISIONS else "ieee"
    dw = launch.weight_gradient(x, g, sources, order, groups=groups, precision=precision)
    exact, terms = gradient_by_loop(x.double(), g.double(), sources, groups)
    size, _ = gradient_by_loop(x.double().abs(), g.double().abs(), sources, groups)
    assert dw.dtype == x.dtype
    assert_within_bound(dw, exact, size, terms, tf32=kind == "tf32")


@pytest.mark.parametrize("kind", DTYPES)
def test_dtypes(kind):
    check(kind, 27, 60, 80, 20, 24)


@pytest.mark.parametrize(
    ("precision", "c", "read"),
    [("ieee", 16, 2), ("tf32", 16, 1), ("tf32x3", 16, 1), ("tf32", 8, 2)],
)
@pytest.mark.parametrize("axis", [1, 2])
def test_dots_read_float32_weights_along_their_axis(monkeypatch, precision, c, read, axis):
    """Whichever axis of the weight is contiguous, kernels get what they read fast."""
    monkeypatch.setattr(launch, "_convolvers", CallCache())
    monkeypatch.setattr(launch, "_gpu_of", lambda device: launch.Gpu(True, True, 232_448, 132))
    plain, strides = launch.kernel_for, []

    def kernel_for(name, numbers, *others):
        strides.append(numbers[-2:])
        return plain(name, numbers, *others)

    monkeypatch.setattr(launch, "kernel_for", kernel_for)
    sources, x, weight = tables(3, 20, 30), draw("fp32", 20, c), draw("fp32", 3, c, 24)
    given = weight if axis == 2 else weight.transpose(1, 2).contiguous().transpose(1, 2)
    check_convolve("fp32" if precision == "ieee" else precision, x, given, sources, None)
    assert strides == [(1, c) if read == 1 else (24, 1)]


@pytest.mark.parametrize(
    ("offsets", "n_in", "n_out", "c", "d"),
    [
        (1, 7, 5, 16, 16),
        (8, 100, 70, 33, 70),
        (9, 40, 70, 64, 130),
        (3, 60, 64, 130, 260),
        (32, 30, 40, 17, 16),
        (125, 20, 40, 16, 17),
    ],
)
def test_shapes(offsets, n_in, n_out, c, d):
    check("fp16", offsets, n_in, n_out, c, d)


@pytest.mark.parametrize("c", [1, 3, 8])
def test_few_channels(c):
    check("fp32", 27, 40, 70, c, 20)
    check("fp16", 40, 40, 40, c, 16)


@pytest.mark.parametrize(
    ("c", "d", "groups"), [(32, 64, 2), (12, 36, 4), (40, 40, 40), (20, 60, 20), (18, 6, 2)]
)
def test_groups(c, d, groups):
    check("fp32", 9, 70, 100, c, d, groups)


@pytest.mark.parametrize(("c", "groups"), [(16, 1), (3, 1), (6, 6)])
def test_bias_and_flip(c, groups):
    check(
        "bf16", 9, 70, 100, c, 24, groups, after=Epilogue(shift=draw("bf16", 24, seed=4)), flip=True
    )


@pytest.mark.parametrize(
    ("c", "d", "groups"), [(20, 24, 1), (4, 24, 1), (24, 24, 24), (20, 136, 1)]
)
@pytest.mark.parametrize("given", ["scale", "shift", "residual", "mean var", "all"])
def test_epilogue(given, c, d, groups):
    """relu moves no error: the bound is that of the sum.  More than 64 columns are two halves."""
    tensors = {
        "scale": draw("fp32", d, seed=4),
        "shift": draw("bf16", d, seed=5),
        "residual": draw("bf16", 100, d, seed=6),
        "mean": draw("fp32", d, seed=7),
        "var": draw("fp32", d, seed=8).abs(),
    }
    used = {name: t for name, t in tensors.items() if given == "all" or name in given.split()}
    after = Epilogue(**used, activation="relu", eps=1e-5 if "var" in used else 0.0)
    check("bf16", 9, 70, 100, c, d, groups, after=after)


def test_statistics_of_a_norm_in_float64():
    """Seen red with an eps in float32."""
    mean, var = draw("fp64", 24, seed=4), 1e-9 * draw("fp64", 24, seed=5).abs()
    check("fp64", 9, 70, 100, 20, 24, after=Epilogue(mean=mean, var=var, eps=1e-3))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    """As torch's, on the same sums; a NaN stays one."""
    sources, x = tables(9, 70, 100), draw("fp32", 70, 20)
    x[3] = float("nan")
    weight, options = draw("fp32", 9, 20, 24, seed=3), {"groups": 1, "precision": "ieee"}
    sums = launch.convolve(x, weight, sources, None, **options)
    found = launch.convolve(
        x, weight, sources, None, after=Epilogue(activation=activation), **options
    )
    bad = sums.isnan()
    assert bad.any()
    torch.testing.assert_close(found.isnan(), bad, rtol=0, atol=0)
    exact = ACTIVATIONS[activation](sums[~bad].double())
    noise = plain_error(ACTIVATIONS[activation](sums[~bad]), exact, torch.float32)
    assert_as_accurate(found[~bad], exact, noise)


THIRDS = [
    ({}, 3),
    ({"flip": True, "after": Epilogue(shift=draw("fp16", 24, seed=4), activation="relu")}, 3),
    ({"after": Epilogue(residual=draw("fp16", 150, 24, seed=4))}, 1),
    ({"after": Epilogue(scale=draw("fp32", 24, seed=4))}, 1),
]


@pytest.mark.parametrize(("other", "passes"), THIRDS)
@pytest.mark.parametrize("kind", ["fp16", "fp64"])
def test_sums_over_thirds_of_the_offsets(kind, other, passes):
    """Each third has its own order of rows; sums are rounded once.  31 is no multiple of 3."""
    y, after = draw(kind, 150, 24), other.get("after", NO_EPILOGUE)
    for offsets in (27, 31):
        sources, c = tables(offsets, 90, 150), launch.LEAST_IN_THIRDS
        weight = draw(kind, offsets, c, 24, seed=3)
        assert len(launch._passes(weight, y, after)) == passes
        check_convolve(kind, draw(kind, 90, c), weight, sources, None, **other)


def test_strides():
    sources = tables(9, 60, 90)
    x, g = draw("fp32", 20, 60).mT, draw("fp32", 90, 1).expand(90, 36)
    wide = draw("fp32", 60, 50)[:, 5:25]
    weight = draw("fp32", 9, 36, 20).mT
    for one in (x, wide):
        check_convolve("fp32", one, weight, sources, None)
        check_gradient("fp32", one, g, sources, None)


def test_a_gradient_of_more_shares_than_one_step_adds():
    """Two thirds of the pairs belong to one offset, whose shares fill two steps of the sum."""
    n = MOST_ADDED * LEAST_UNITS * PAIRS_PER_UNIT
    check_gradient("fp32", draw("fp32", n, 16), draw("fp32", n, 16), tables(3, n, n), None)


@pytest.mark.parametrize("shares", [1, 20, 30])
def test_a_gradient_of_few_shares(shares, monkeypatch):
    """Their sums are added two, four and eight at a time."""
    monkeypatch.setattr(launch, "_most_shares", lambda *_: shares)
    monkeypatch.setattr(launch, "_differentiators", CallCache())
    check_gradient(
        "fp32", draw("fp32", 2000, 16), draw("fp32", 2000, 70), tables(9, 2000, 2000), None
    )


def test_nothing_to_sum():
    for n_in, n_out in ((0, 5), (5, 0), (0, 0)):
        check("fp32", 27, n_in, n_out, 16, 16)
    none = torch.full((27, 9), -1, dtype=torch.int32, device=DEVICE)
    check_convolve("fp16", draw("fp16", 4, 16), draw("fp16", 27, 16, 16), none, None)
    check_gradient("fp16", draw("fp16", 4, 16), draw("fp16", 9, 16), none, None)


@pytest.mark.parametrize(("c", "groups"), [(16, 1), (2, 1), (6, 6)])
def test_row_order_carries_no_information(c, groups, monkeypatch):
    monkeypatch.setattr(preparation, "ROWS_PER_SORT", 64)
    if interpreted():  # a row of BLAS's product has other bits at another place in the matrix
        monkeypatch.setattr(
            np, "matmul", lambda a, b, dtype: np.einsum("ik,kj->ij", a, b, dtype=dtype)
        )
    sources = tables(9, 150, 300, seed=5)
    x, g = draw("fp16", 150, c), draw("fp16", 300, 30, seed=2)
    weight = draw("fp16", 9, c // groups, 30, seed=3)
    options = {"groups": groups, "precision": "ieee"}
    y = launch.convolve(x, weight, sources, None, **options)
    dw = launch.weight_gradient(x, g, sources, None, **options)
    for seed in range(2):
        of = torch.Generator().manual_seed(seed)
        old_in, old_out = (torch.randperm(n, generator=of).to(DEVICE) for n in (150, 300))
        new_in = torch.argsort(old_in).int()
        moved = sources[:, old_out]
        moved = torch.where(moved >= 0, new_in[moved.long().clamp(min=0)], -1)
        order = torch.argsort(old_out).int()
        moved = moved[:, order.long()]  # columns stand in canonical order
        again = launch.convolve(x[old_in], weight, moved, order, **options)
        torch.testing.assert_close(again, y[old_out], rtol=0, atol=0)
        again = launch.weight_gradient(x[old_in], g[old_out], moved, order, **options)
        torch.testing.assert_close(again, dw, rtol=0, atol=0)


def test_few_outputs_may_read_many_inputs():
    """Their rows do not fit 16 bits.  Seen red with lists of int16."""
    sources = tables(5, 40_000, 60)
    x, g = draw("fp32", 40_000, 16), draw("fp32", 60, 16, seed=2)
    check_gradient("fp32", x, g, sources, None)


def test_rows_are_sorted_by_mask_and_tiles_by_length():
    sources = tables(27, 400, 500, seed=6)
    made = preparation.tiles_of(sources, None, 27)
    rows = made.rows[made.rows >= 0]
    torch.testing.assert_close(rows.sort().values, torch.arange(500, device=DEVICE).int())
    there = (sources >= 0)[:, rows.long()]
    for parts, turns in zip((1, 2), made.turns, strict=True):
        needed = [int(tile.any(1).sum()) for tile in there.split(64 * parts, dim=1)]
        turns = turns[: len(needed)]  # room for them may be larger
        lengths = [needed[i] for i in turns.tolist()]
        assert sorted(turns.tolist()) == list(range(len(turns)))
        assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("offsets", [27, 40])
def test_rows_ascend_in_the_gray_code_of_their_masks(offsets):
    """The rarest offset in a sample of columns is the highest digit.  Seen red with plain bits."""
    count = 1500
    there = tables(offsets, 400, count, seed=8) >= 0
    made = preparation.tiles_of(torch.where(there, 0, -1).int(), None, offsets)
    lane = torch.arange(8192 // preparation.padded(offsets), device=DEVICE)
    sample = lane // 8 * count // (len(lane) // 8) // 8 * 8 + lane % 8
    often = there[:, sample[sample < count]].sum(1).tolist()
    digits = there[sorted(range(offsets), key=often.__getitem__)].int().cumsum(0) % 2
    keys = digits.T.tolist()
    assert made.rows[made.rows >= 0].tolist() == sorted(range(count), key=keys.__getitem__)


@pytest.mark.parametrize("count", [1, 63, 64, 128, 500])
@pytest.mark.parametrize("few", [0, 2**14])
@pytest.mark.parametrize("offsets", [27, 40])
def test_few_rows_are_ranked_as_a_stable_sort_would(count, few, offsets, monkeypatch):
    """Seen red with: equal keys of a chunk in any order, of an earlier chunk behind."""
    monkeypatch.setattr(preparation, "MOST_RANKED", few)
    dense = torch.where(tables(3, count, count, seed=count)[0] >= 0, 1, 0)
    table = torch.arange(count, device=DEVICE).int().expand(offsets, -1).clone()
    table[1:] = torch.where(dense > 0, table[1:], -1)  # two masks, each of many rows
    table[offsets - 1, : count // 3] = -1
    made = preparation._make_tiles(table, None, offsets, preparation.SearchRemains(), None)
    there = (table >= 0).T.int().tolist()
    rows = made.rows[made.rows >= 0].tolist()
    runs = [there[row] for row in rows]
    first = {tuple(mask): runs.index(mask) for mask in runs}
    for mask, begin in first.items():
        same_mask = [row for row in range(count) if tuple(there[row]) == mask]
        assert rows[begin : begin + len(same_mask)] == same_mask


def test_offsets_past_int32_are_the_same(monkeypatch):
    """WIDE code on small tensors."""
    plain = launch.kernel_for

    def wide(kernel, numbers, constants, tile, *key):
        module, function = kernel.rsplit(".", 1)
        names = written(f"torchweft.voxels.{module}", function).arg_names
        names = names[len(names) - len(constants) - len(tile.blocks) :]
        named = dict(zip(names, constants, strict=False))
        if "WIDE" in named:
            named["WIDE"] = True
        return plain(kernel, numbers, tuple(named.values()), tile, *key)

    for module in (launch, preparation):
        monkeypatch.setattr(module, "kernel_for", wide)
    caches = launch._convolvers, launch._differentiators, preparation._tile_kernels
    for cache in caches:
        cache.clear()
    for c, groups in ((16, 1), (3, 1), (6, 6)):
        check("fp32", 9, 70, 100, c, 12, groups)
    for cache in caches:
        cache.clear()
