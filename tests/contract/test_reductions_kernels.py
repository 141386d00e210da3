"""Generated Triton kernels of reductions against the matrix of pairs, in the interpreter.

Seen red with: terms past the end of an interval left in, intervals joined across lists, ties to
whichever comes first in a tile, products of a cloud too wide for them, low parts or terms of rows
left out of products; of long vectors a share of the components or the last one left out, the first
block of a result in the place of all, one entry of a batch for all; bounds of neighbours without
their margin or too low for a row, columns that fill a group up, a group left out behind another; of
vectors a part of a product left out, moments about another point, the first columns for all; of
products that were asked for the factors of rows left out, wide ones taken for narrow ones; a bound
that knows no sign, takes NaN for little, or forgets the last terms.
"""

import functools
import math

import pytest
import torch

from tests.conftest import INTERPRETED
from tests.pairs import (
    DISTANCE,
    SUMS,
    A,
    B,
    P,
    X,
    Y,
    check_shifted,
    check_sums,
    data,
    dense,
    noise_of,
    part,
)
from torchweft.core.gpu.launcher import launch_all
from torchweft.errors import BackendError
from torchweft.reductions.call import Blocks, KernelSpec, Options, ReductionData, Sizes
from torchweft.reductions.formula.evaluate import evaluate
from torchweft.reductions.formula.node import concat, const, node, var
from torchweft.testing.bounds import assert_as_accurate
from torchweft.testing.contract import assert_same_bits

if not INTERPRETED:
    pytest.skip("kernels run here in the interpreter alone", allow_module_level=True)

from torchweft.reductions.gpu import gaussians, launch, neighbours, recipe

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]
DTYPES = [torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    "name", ["angles", "real powers", "choice", "rounded", "atan2", "quotients"]
)
def test_float64_is_float64(name):
    sizes = Sizes(1, 5, 33)
    check_sums(launch.sums, SUMS[name], data(*sizes, torch.float64), sizes)


def test_bits_repeat():
    sizes = Sizes(1, 40, 3000)
    values = data(*sizes)
    first, second = (launch.sums(SUMS["gaussian"], ReductionData(values, sizes)) for _ in range(2))
    assert_same_bits(first, second, "the same call again")


def test_long_formulas_are_refused():
    f = SUMS["gaussian"]
    assert launch.serves(f)
    assert launch.serves(f, f)
    assert not launch.serves(f, k=launch.MOST_SMALLEST + 1)
    with pytest.raises(BackendError, match="1025 smallest values are asked for"):
        launch.smallest(f, 1025, ReductionData(data(1, 3, 3), Sizes(1, 3, 3)))
    assert not launch.serves(node("concat", *[X * Y] * launch.MOST_TERMS))


def long(dim, size):
    """Formulas of vectors of a dimension, results of a size, and their data."""
    x, y, u, w = var(0, dim, 0), var(1, dim, 1), var(2, size, 0), var(3, size, 1)
    p, a = var(4, dim, 2), var(5, 1, 0)
    generator = torch.Generator().manual_seed(dim)
    shapes = {0: (2, 11, dim), 1: (1, 70, dim), 2: (2, 11, size), 3: (2, 70, size)}
    shapes |= {4: (1, 1, dim), 5: (2, 11, 1)}
    values = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    for n in (0, 1):
        values[n] = values[n] / dim**0.5 + 3  # where squares lose what differences keep
    dot = functools.partial(node, "einsum", data=((dim,), "a", (dim,), "a", ""))
    kernel = node("exp", -node("sqdist", x, y))
    formulas = {
        "kernel": kernel,
        "matrix": kernel * w,
        "rows and columns": kernel * (u - w) * a,
        "gradient": kernel * (x - y),
        "two sums": kernel * dot(x - 3, y - 3) * w,
        "absolute": node("exp", -node("sum", node("abs", node("exp", a) * x - y)) / dim) * a,
        "weighted": node("exp", -dot(p * p, node("pow", x - y, data=2))) * w,
        "of one axis": dot(x, x) * node("rsqrt", dot(y, y)) * kernel,
        "scaled": node("exp", -node("sqdist", x * a, y * a)) * part(w, 1),
        "components": kernel * part(x, 2) * part(y, dim - 1),
        "joined": concat(kernel * w, kernel * a),
        "columns": w * part(p, 0),
    }
    return formulas, values


LENGTHS = {"long": (37, 20), "short": (3, 17), "shares": (259, 2)}


def dense_long(f, values, dtype):
    at = {0: lambda v: v[:, :, None], 1: lambda v: v[:, None], 2: lambda v: v[:, :, None]}
    cats = {0: 0, 1: 1, 2: 0, 3: 1, 4: 2, 5: 0}
    given = {n: at[cats[n]](v.to(dtype)) for n, v in values.items()}
    return evaluate(f, given).expand(2, 11, 70, f.dim)


@pytest.mark.parametrize(
    ("lengths", "name"),
    [("long", name) for name in long(17, 9)[0]]
    + [("short", name) for name in ("matrix", "rows and columns", "joined")]
    + [("shares", "kernel")],
)
@pytest.mark.singly  # seconds an item in the interpreter
def test_long_vectors(lengths, name):
    formulas, values = long(*LENGTHS[lengths])
    f = formulas[name]
    assert launch.serves(f)
    terms, plain = (dense_long(f, values, d) for d in (torch.float64, torch.float32))
    exact = terms.sum(2)
    noise = noise_of(plain.sum(2), exact, terms.abs().sum(2), torch.float32)
    for listed in (None, WHOLE):
        found = launch.sums(f, ReductionData(values, Sizes(2, 11, 70), listed))
        assert_as_accurate(found, exact, noise)


WHOLE = Blocks(*(torch.tensor(t) for t in ([8, 0], [11, 8], [0, 2, 3], [0, 30, 0], [30, 70, 70])))
"""All pairs, as blocks."""


def test_long_scores():
    dim, size = LENGTHS["long"]
    formulas, values = long(dim, size)
    score = -node("sqdist", var(0, dim, 0), var(1, dim, 1))
    sizes = Sizes(2, 11, 70)
    for w in (const(1), var(3, size, 1), concat(var(3, size, 1), const(1)), formulas["matrix"]):
        assert launch.serves(score, w)
        terms = {}
        for dtype in (torch.float64, torch.float32):
            f = dense_long(score, values, dtype)
            weighted = (f - f.amax(2, keepdim=True)).exp() * dense_long(w, values, dtype)
            terms[dtype] = f.amax(2), weighted
        (m, exact), (plain_m, plain) = terms.values()
        top, found = launch.shifted(score, w, ReductionData(values, sizes))
        assert_as_accurate(top, m, noise_of(plain_m, m, 4 * m.abs(), torch.float32))
        size_of = exact.abs().sum(2) * (1 + 4 * m.abs())
        noise = noise_of(plain.sum(2), exact.sum(2), size_of, torch.float32)
        assert_as_accurate(found, exact.sum(2), noise)
    for f in (-score, formulas["rows and columns"]):
        exact = dense_long(f, values, torch.float32).sort(dim=2, stable=True).indices[:, :, :3]
        found = launch.smallest(f, 3, ReductionData(values, sizes))
        torch.testing.assert_close(found, exact, rtol=0, atol=0)


def test_how_long_formulas_are_printed():
    """Neither the dimension nor the length of a result makes a kernel longer, or more of them."""
    x, y, w = (var(n, 500, n > 0) for n in range(3))
    f = node("exp", -node("sqdist", x, y)) * w
    _, jobs = recipe.kernel_jobs(KernelSpec("sums", f, None, 0, 0))
    assert len(jobs) == 1
    assert len(launch.source("sums", f).splitlines()) < 200
    assert not launch.serves(node("sum", node("concat", x - y, x - y)))


GAUSSIAN = node("exp", -(node("sqdist", X, Y) * P)) * part(B, 0)


@pytest.fixture
def products(monkeypatch):
    """Tensor cores for few columns, and how often they were used."""
    monkeypatch.setattr(gaussians, "LEAST_COLUMNS", 1)
    used, operands = [], gaussians.operands

    def counted(*args):
        found = operands(*args)
        launch_all(found.checks)
        used.append(int(found.guard))
        return found

    monkeypatch.setattr(gaussians, "operands", counted)
    return used


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scale", [0.2, 1000.0])
def test_products(products, sign, scale):
    """Far away and narrow, or so wide that differences take over."""
    sizes = Sizes(2, 300, 150)
    values = data(*sizes)
    for index in (0, 1):
        values[index] = values[index] * scale + 1e4 * (scale < 1)
        values[index] = (values[index] * 64).round() / 64  # of which differences are exact
    f = GAUSSIAN if sign > 0 else -(A * GAUSSIAN) * 3
    check_sums(launch.sums, f, values, sizes)
    score = sign * -(2 * node("sqdist", X, Y)) + part(B, 0) * 0.5 - A if sign > 0 else A - DISTANCE
    for w in (const(1), part(B, 1)):  # of exponents 22 bits of 24 are kept
        check_shifted(launch.shifted, score, w, values, sizes, roundings=4)
    assert products == [int(scale < 1)] * 3


def test_ieee_takes_differences(products):
    sizes = Sizes(2, 300, 17)
    launch.sums(GAUSSIAN, ReductionData(data(*sizes), sizes, None, Options("ieee")))
    assert not products


@pytest.mark.parametrize("dim", [6, 33])
def test_products_of_many_dimensions(products, dim):
    sizes = Sizes(2, 300, 70)
    values = data(*sizes)
    generator = torch.Generator().manual_seed(dim)
    for index, length in ((0, 300), (1, 70)):
        values[index] = torch.randn(2, length, dim, generator=generator) * 0.1 + 100
    distance = node("sqdist", var(0, dim, 0), var(1, dim, 1))
    check_sums(launch.sums, node("exp", -distance) * A * part(B, 1), values, sizes)
    check_shifted(launch.shifted, 2 * -distance, const(1), values, sizes, roundings=4)
    assert products == [1, 1]


@pytest.mark.parametrize(("scale", "narrow"), [(0.1, 1), (1.5, 0)])
@pytest.mark.parametrize("precision", ["tf32x3", "tf32"])
def test_products_that_were_asked_for(monkeypatch, precision, scale, narrow):
    """Of a narrow cloud exponents are products alone; a wide one is served as well."""
    monkeypatch.setattr(gaussians, "LEAST_COLUMNS", 1)
    ran, narrowed = [], gaussians.narrowed

    def seen(made):
        both = narrowed(made)
        ran.extend(int(m.guard) for m in both)
        return both

    monkeypatch.setattr(gaussians, "narrowed", seen)
    sizes, dim = Sizes(2, 300, 70), 33
    values = data(*sizes)
    generator = torch.Generator().manual_seed(dim)
    for index, length in ((0, 300), (1, 70)):
        values[index] = torch.randn(2, length, dim, generator=generator) * scale
    f = node("exp", -node("sqdist", var(0, dim, 0), var(1, dim, 1))) * A * part(B, 1)
    found = launch.sums(f, ReductionData(values, sizes, None, Options(precision)))
    terms, plain = (dense(f, values, sizes, d) for d in (torch.float64, torch.float32))
    bits = {"tf32x3": 22, "tf32": 11}[precision]
    largest = 2 * max(v.double().square().sum(-1).max() for v in (values[0], values[1]))
    magnitude = terms.abs().sum(2) * (1 + 2 ** (24 - bits) * largest)
    exact = terms.sum(2)
    assert_as_accurate(found, exact, noise_of(plain.sum(2), exact, magnitude, torch.float32))
    assert ran == [narrow, 1 - narrow]


@pytest.mark.parametrize("at", [0, 1023, 1024, 2049])
@pytest.mark.parametrize(
    ("worst", "holds"),
    [(8.0, 1), (-8.0, 1), (8.01, 0), (-8.01, 0), (math.inf, 0), (-math.inf, 0), (math.nan, 0)],
)
def test_the_bound_of_products(worst, holds, at):
    terms = [torch.zeros(1, 2050, 1, dtype=torch.float64) for _ in range(2)]
    terms[1][0, at] = worst
    guard = torch.ones((), dtype=torch.int32)
    launch_all(gaussians.within(terms, 8.0, guard))
    assert int(guard) == holds


VECTORS = {
    "gradient in x": lambda k, x, y, g, b: -2 * (g * (b * k * (x - y))),
    "gradient in y and b": lambda k, x, y, g, b: concat(k * g * (y - x) * b, k * g),
    "few": lambda k, x, y, g, b: -(k * g * concat(b, b * b)),
    "many": lambda k, x, y, g, b: k * node("sub", y, node("pow", y, data=2)) * b,
}


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("dim", [3, 19])
@pytest.mark.singly  # seconds an item in the interpreter
def test_products_with_vectors(products, monkeypatch, name, dim):
    """Far away and narrow; then so wide that differences take over."""
    monkeypatch.setattr(gaussians, "MOMENTS_PER_PRODUCT", 16)
    x, y, g, b = var(0, dim, 0), var(1, dim, 1), var(4, 1, 0), var(2, 1, 1)
    f = VECTORS[name](node("exp", -node("sqdist", x, y)), x, y, g, b)
    sizes = Sizes(2, 300, 150)
    for scale in (0.25, 1000.0):
        generator = torch.Generator().manual_seed(dim)
        shapes = {0: (2, 300, dim), 1: (2, 150, dim), 4: (1, 300, 1), 2: (2, 150, 1)}
        values = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
        far = 0 if name == "many" or scale > 1 else 1024
        for n in (0, 1):
            values[n] = (values[n] * scale * 64).round() / 64 + far
        check_sums(launch.sums, f, values, sizes)
    half = len(products) // 2
    assert half
    assert products == [1] * half + [0] * half


@pytest.mark.parametrize("worst", [math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("name", ["few", "many"])
def test_columns_without_parts_are_summed_by_differences(products, worst, name):
    x, y, g, b = var(0, 3, 0), var(1, 3, 1), var(4, 1, 0), var(2, 1, 1)
    columns = b * {"few": y, "many": concat(y, y, y)}[name]
    f = node("exp", -node("sqdist", x, y)) * g * columns
    shapes = {0: (2, 300, 3), 1: (2, 150, 3), 4: (1, 300, 1), 2: (2, 150, 1)}
    generator = torch.Generator().manual_seed(5)
    values = {n: torch.rand(s, generator=generator) for n, s in shapes.items()}
    values[2][1, 70] = worst
    found = launch.sums(f, ReductionData(values, Sizes(2, 300, 150)))
    plain = dense(f, values, Sizes(2, 300, 150), torch.float32).sum(2)
    assert products == [1]
    assert torch.isfinite(plain[0]).all()
    assert torch.isinf(plain[1]).all() == math.isinf(worst)
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert (kind(found) == kind(plain)).all()


@pytest.fixture
def bounded(monkeypatch):
    """Bounds for few rows and columns, a few rows at a time; the guards of all calls."""
    monkeypatch.setattr(neighbours, "LEAST_ROWS", 1)
    monkeypatch.setattr(neighbours, "LEAST_PAIRS", 1)
    monkeypatch.setattr(neighbours, "GROUPS_PER_NEIGHBOUR", 4)
    monkeypatch.setattr(neighbours, "BYTES_OF_BOUNDS", 1)
    monkeypatch.setattr(neighbours, "SHARE_OF_GROUPS", 2)
    found, nearest = [], neighbours.nearest

    def counted(*args):
        found.append(int(nearest(*args)))
        return torch.tensor(found[-1:], dtype=torch.int32)

    monkeypatch.setattr(neighbours, "nearest", counted)
    return found


def by_differences(u, v, k):
    """(B, M, k, 1), the smallest index first where distances are equal."""
    square = torch.zeros(len(u), u.shape[1], v.shape[1])
    for c in range(u.shape[2]):
        square += (u[:, :, None, c] - v[:, None, :, c]).square()
    return square.sort(dim=2, stable=True).indices[:, :, :k, None]


@pytest.mark.parametrize(
    ("dim", "k", "rows", "columns"), [(2, 3, 20, 4200), (5, 1, 130, 1000), (19, 3, 20, 1100)]
)
def test_nearest_by_bounds(bounded, dim, k, rows, columns):
    """Points on a grid far away: many distances are equal; two rows are nowhere near."""
    generator = torch.Generator().manual_seed(dim)
    u, v = (torch.randn(2, n, dim, generator=generator) for n in (rows, columns))
    u[:, :2] *= 100
    v[:, -1] = u[:, 5]
    u, v = ((t * 16).round() / 16 + 1024 for t in (u, v))
    distance = node("sqdist", var(1, dim, 1), var(0, dim, 0))
    found = launch.smallest(distance, k, ReductionData({0: u, 1: v}, Sizes(2, rows, columns)))
    torch.testing.assert_close(found, by_differences(u, v, k), rtol=0, atol=0)
    assert bounded == [1]


@pytest.mark.parametrize("name", ["one place", "a point at infinity", "tight clusters"])
def test_bounds_that_leave_all(bounded, name):
    """Where bounds tell nothing all pairs are compared."""
    generator = torch.Generator().manual_seed(0)
    u, v = torch.randn(1, 20, 17, generator=generator), torch.randn(1, 900, 17, generator=generator)
    if name == "a point at infinity":
        v[0, 7, 3] = torch.inf
    else:
        u, v = ((t * 2.0**-12 * (name == "tight clusters")) for t in (u, v))
        v[:, -1] += 100
    distance = node("sqdist", var(0, 17, 0), var(1, 17, 1))
    found = launch.smallest(distance, 2, ReductionData({0: u, 1: v}, Sizes(1, 20, 900)))
    torch.testing.assert_close(found, by_differences(u, v, 2), rtol=0, atol=0)
    assert bounded == [0]


def test_which_distances_have_bounds(bounded):
    values = {0: torch.randn(1, 2, 3), 1: torch.randn(1, 600, 3), 3: torch.randn(1, 1, 1)}
    sizes = Sizes(1, 2, 600)
    for f in (DISTANCE, -DISTANCE, node("sqdist", X, Y + P)):
        launch.smallest(f, 1, ReductionData(values, sizes))
    launch.smallest(DISTANCE, 1, ReductionData(values, sizes, None, Options("ieee")))
    assert len(bounded) == 2
