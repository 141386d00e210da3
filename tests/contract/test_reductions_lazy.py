"""LazyTensor: every operation and reduction against the dense tensor, shapes, batches, variables.

Seen red with: reflected operands in order, one tensor of i and of j taken for one variable, ranges
not turned by t(), a weight's variables not renumbered, sizes and batches of lost variables left
out, symbolic variables taken by order, floats rounded to float32, wider sums asked for and not
made, arrays copied instead of shared.
"""

import math

import numpy as np
import pytest
import torch

import torchweft
from tests.conftest import INTERPRETED
from tests.nearness import check, draw, same
from torchweft.reductions import (
    ComplexLazyTensor,
    LazyTensor,
    Pm,
    Var,
    Vi,
    Vj,
    numpy,
)
from torchweft.reductions.cluster import from_matrix, swap_axes

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the front end does not depend on the backend")

M, N, D = 40, 50, 3


def data():
    """x (M, 1, D), y (1, N, D), b (1, N, 1) positive, p (D,) in float64."""
    return (
        draw(M, 1, D),
        draw(1, N, D, seed=1),
        draw(1, N, 1, seed=2).abs() + 0.1,
        draw(D, seed=3).abs() + 0.5,
    )


def dot(a, b):
    return (a * b).sum(-1, keepdim=True)


def soft_dtw(x, y, gamma):
    x, y = torch.broadcast_tensors(x, y)
    table = [[None] * D for _ in range(D)]
    for k in range(D):
        for m in range(D):
            before = [
                table[i][j]
                for i, j in ((k - 1, m - 1), (k - 1, m), (k, m - 1))
                if i >= 0 and j >= 0
            ]
            soft = 0
            if before:
                soft = -gamma * torch.logsumexp(torch.stack([-r / gamma for r in before]), 0)
            table[k][m] = (x[..., k] - y[..., m]) ** 2 + soft
    return table[-1][-1][..., None]


# name: (of lazy tensors x, y, b, p; the same of tensors where it is written otherwise)
OPERATIONS = {
    "add": (lambda x, y, b, p: x + y, None),
    "numbers": (lambda x, y, b, p: 2 * (1.5 - x) / (y * y + 2.5) - 3 + (-x) / 4, None),
    "reflected": (lambda x, y, b, p: 1 / (1 + x.exp()) + 2.0 / b - (1 - b), None),
    "a list": (
        lambda x, y, b, p: x * [1.0, 2.0, 3.0] + y,
        lambda x, y, b, p: x * torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype) + y,
    ),
    "tensors": (
        lambda x, y, b, p: p._variables[0].value * x + y / p._variables[0].value[0],
        lambda x, y, b, p: p * x + y / p[0],
    ),
    "abs": (lambda x, y, b, p: (x + y).abs() + abs(x), None),
    "exp log": (lambda x, y, b, p: (x * y).exp() + b.log(), None),
    "xlogx": (lambda x, y, b, p: b.xlogx() + x, lambda x, y, b, p: torch.xlogy(b, b) + x),
    "trigonometry": (lambda x, y, b, p: x.cos() * y.sin() + (x * y).atan(), None),
    "arcs": (lambda x, y, b, p: (x.sin() * 0.9).asin() + (y.cos() * 0.9).acos(), None),
    "sinxdivx": (
        lambda x, y, b, p: (x + y).sinxdivx() + x.sinc(),
        lambda x, y, b, p: torch.sinc((x + y) / math.pi) + torch.sinc(x),
    ),
    "atan2": (lambda x, y, b, p: x.atan2(y), None),
    "roots": (lambda x, y, b, p: (b + x * x).sqrt() + (b + 1).rsqrt() * y, None),
    "powers": (
        lambda x, y, b, p: (
            x**3
            + y**2
            + b**1.5
            + b**-1
            + b**0.5
            + b**-0.5
            + ((b + 1).power(2) if isinstance(b, LazyTensor) else (b + 1) ** 2)
        ),
        None,
    ),
    "powers of pairs": (lambda x, y, b, p: (x * x + 0.5) ** (y * 0.5), None),
    "square": (lambda x, y, b, p: (x - y).square(), None),
    "comparisons": (
        lambda x, y, b, p: (
            (x < y) + 2 * (x <= y) + 4 * (x > 0) + 8 * (y >= 1) + (x != y) + (x == x)
        ),
        lambda x, y, b, p: (
            1.0 * (x < y) + 2.0 * (x <= y) + 4.0 * (x > 0) + 8.0 * (y >= 1) + 1.0 * (x != y) + 1.0
        ),
    ),
    "steps": (
        lambda x, y, b, p: (
            (x - y).sign() + (x + y).step() + (x + y).relu() + x.round() + y.round(1)
        ),
        lambda x, y, b, p: (
            (x - y).sign() + 1.0 * (x + y >= 0) + (x + y).relu() + x.round() + y.round(decimals=1)
        ),
    ),
    "clamp": (
        lambda x, y, b, p: (x * y).clamp(-1.25, 0.5) + x.clamp(-1, 1) + x.clamp(y, y + 1),
        lambda x, y, b, p: (
            (x * y).clamp(-1.25, 0.5)
            + x.clamp(-1, 1)
            + torch.clamp(x + 0 * y, y + 0 * x, y + 1 + 0 * x)
        ),
    ),
    "ifelse": (
        lambda x, y, b, p: (x - y).ifelse(x * x, 2) + (x + y).ifelse(0.5, y),
        lambda x, y, b, p: (
            torch.where(x - y >= 0, x * x + 0 * y, 2.0) + torch.where(x + y >= 0, 0.5, y + 0 * x)
        ),
    ),
    "mod": (
        lambda x, y, b, p: (x + y).mod(0.7) + x.mod(1.5, 0.25) + y.mod(2),
        lambda x, y, b, p: (
            (x + y)
            - 0.7 * ((x + y) / 0.7).floor()
            + (x - 1.5 * ((x - 0.25) / 1.5).floor())
            + (y - 2 * (y / 2).floor())
        ),
    ),
    "dot": (lambda x, y, b, p: (x | y) * b, lambda x, y, b, p: dot(x, y) * b),
    "norms": (
        lambda x, y, b, p: (x - y).sqnorm2() + (x - y).norm2() + x.norm(-1) + y.normalize(),
        lambda x, y, b, p: (
            dot(x - y, x - y) + dot(x - y, x - y).sqrt() + dot(x, x).sqrt() + y / dot(y, y).sqrt()
        ),
    ),
    "sqdist": (lambda x, y, b, p: x.sqdist(y) * b, lambda x, y, b, p: dot(x - y, x - y) * b),
    "weighted norms": (
        lambda x, y, b, p: (
            (x - y).weightedsqnorm(p) + x.weightedsqdist(y, b) + y.weightedsqnorm(2.5)
        ),
        lambda x, y, b, p: dot(p * (x - y), x - y) + b * dot(x - y, x - y) + 2.5 * dot(y, y),
    ),
    "a matrix's norm": (
        lambda x, y, b, p: (x - y).weightedsqnorm(p.tensorprod(p)),
        lambda x, y, b, p: dot(p, x - y).square(),
    ),
    "components": (
        lambda x, y, b, p: x[0] * y.elem(1) + x[-1] + y[:, :, 2] * x[..., 1] + b,
        lambda x, y, b, p: x[..., :1] * y[..., 1:2] + x[..., 2:] + y[..., 2:] * x[..., 1:2] + b,
    ),
    "slices": (
        lambda x, y, b, p: x[1:] * y.extract(0, 2) + x[:2] - y[:, :, 1:3] * x[..., -2:],
        lambda x, y, b, p: x[..., 1:] * y[..., :2] + x[..., :2] - y[..., 1:] * x[..., 1:],
    ),
    "one_hot": (
        lambda x, y, b, p: x[0].abs().one_hot(4) * y[0],
        lambda x, y, b, p: (
            torch.nn.functional.one_hot((x[..., 0].abs() + 0.5).floor().long(), 9)[..., :4]
            * y[..., :1]
        ),
    ),
    "bspline": (
        lambda x, y, b, p: LazyTensor([0.0, 1.0, 2.0, 4.0]).bspline(x[0] + y[0], 1),
        lambda x, y, b, p: torch.cat(
            [hat(x[..., :1] + y[..., :1], *knots) for knots in ((0.0, 1.0, 2.0), (1.0, 2.0, 4.0))],
            -1,
        ),
    ),
    "concat": (
        lambda x, y, b, p: LazyTensor.cat((x, y, b), -1).concat(x * y),
        lambda x, y, b, p: torch.cat(
            (*torch.broadcast_tensors(x, y), b.expand(M, N, 1), x * y), -1
        ),
    ),
    "matrices": (
        lambda x, y, b, p: x.tensorprod(y).matvecmult(p) + x.vecmatmult(y.tensorprod(p)),
        lambda x, y, b, p: x * dot(y, p) + dot(x, y) * p,
    ),
    "tensorprod": (
        lambda x, y, b, p: x.tensorprod(y),
        lambda x, y, b, p: (x[..., :, None] * y[..., None, :]).flatten(-2),
    ),
    "tensordot": (
        lambda x, y, b, p: x.tensorprod(p).keops_tensordot(
            y.concat(y), (3, 3), (3, 2), (1,), (0,), (1, 0)
        ),
        lambda x, y, b, p: torch.einsum(
            "...ab,...bc->...ca",
            x[..., :, None] * p,
            torch.cat([y, y], -1).unflatten(-1, (3, 2)),
        ).flatten(-2),
    ),
    "kron": (
        lambda x, y, b, p: x.concat(x).keops_kron(y, (2, 3), (1, 3)),
        lambda x, y, b, p: (
            torch.cat([x, x], -1).unflatten(-1, (2, 1, 3, 1)) * y.unflatten(-1, (1, 1, 1, 3))
        ).flatten(-4),
    ),
    "soft dtw": (
        lambda x, y, b, p: x.softdtw_sqdist(y, 0.5),
        lambda x, y, b, p: soft_dtw(x, y, 0.5),
    ),
    "over components": (
        lambda x, y, b, p: (
            (x * y).sum(-1) + (x + y).min(dim=-1) + (x - y).max(axis=2, keepdim=True)
        ),
        lambda x, y, b, p: (
            (x * y).sum(-1, keepdim=True)
            + (x + y).amin(-1, keepdim=True)
            + (x - y).amax(-1, keepdim=True)
        ),
    ),
    "positions of components": (
        lambda x, y, b, p: (x * y).argmin() + 3 * (x + y).argmax(-1),
        lambda x, y, b, p: (
            1.0 * (x * y).argmin(-1, keepdim=True) + 3.0 * (x + y).argmax(-1, keepdim=True)
        ),
    ),
    "grad": (
        lambda x, y, b, p: (-x.sqdist(y)).exp().grad(x, b),
        lambda x, y, b, p: -2 * b * (x - y) * (-dot(x - y, x - y)).exp(),
    ),
    "diff": (
        lambda x, y, b, p: (x * x * y).diff(x, p),
        lambda x, y, b, p: 2 * x * y * p,
    ),
    "grad_matrix": (
        lambda x, y, b, p: (x * x * y).grad_matrix(x),
        lambda x, y, b, p: torch.diag_embed(2 * x * y).flatten(-2),
    ),
    "divergence": (
        lambda x, y, b, p: (x * x * y).divergence(x),
        lambda x, y, b, p: 2 * dot(x, y),
    ),
    "laplacian": (
        lambda x, y, b, p: (-x.sqdist(y)).exp().laplacian(x),
        lambda x, y, b, p: (4 * dot(x - y, x - y) - 2 * D) * (-dot(x - y, x - y)).exp(),
    ),
    "trace_operator": (
        lambda x, y, b, p: (Vi(7, D) * (x + y)).trace_operator(Vi(7, D)),
        lambda x, y, b, p: (x + y).sum(-1, keepdim=True),
    ),
    "factorize": (
        lambda x, y, b, p: (x * y).exp().factorize(x * y).auto_factorize(),
        lambda x, y, b, p: (x * y).exp(),
    ),
}


def hat(t, left, middle, right):
    """The B-spline of order 1 on three knots."""
    rising, falling = (t - left) / (middle - left), (right - t) / (right - middle)
    zero = torch.zeros_like(t)
    return torch.where((t >= left) & (t < middle), rising, zero) + torch.where(
        (t >= middle) & (t < right), falling, zero
    )


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(name, axis):
    lazy, dense = OPERATIONS[name]
    dense = lazy if dense is None else dense

    def total(*inputs):
        pairs = dense(*inputs)
        return pairs.expand(M, N, pairs.shape[-1]).sum(axis)

    check(lambda *inputs: lazy(*map(LazyTensor, inputs)).sum(axis), total, data())


def positive(pairs, b):
    return b * b + 0.5


REDUCTIONS = {
    "sum": (lambda f, w, axis: f.sum_reduction(axis=axis), lambda f, w, axis: f.sum(axis)),
    "logsumexp": (
        lambda f, w, axis: f[0].logsumexp(dim=axis),
        lambda f, w, axis: f[..., :1].logsumexp(axis),
    ),
    "weighted logsumexp": (
        lambda f, w, axis: f[0].logsumexp(axis, weight=w),
        lambda f, w, axis: (f[..., :1] + w.log()).logsumexp(axis),
    ),
    "softmax": (
        lambda f, w, axis: f[0].sumsoftmaxweight(w, axis=axis),
        lambda f, w, axis: (f[..., :1].softmax(axis) * w).sum(axis),
    ),
    "min": (lambda f, w, axis: f.min(axis), lambda f, w, axis: f.amin(axis)),
    "max": (lambda f, w, axis: f.max_reduction(dim=axis), lambda f, w, axis: f.amax(axis)),
    "Kmin": (
        lambda f, w, axis: f.Kmin(4, dim=axis),
        lambda f, w, axis: f.sort(axis).values.narrow(axis, 0, 4).movedim(axis, 1),
    ),
    "Kmin of a scalar": (
        lambda f, w, axis: f[1].Kmin(4, axis),
        lambda f, w, axis: f[..., 1].sort(axis).values.narrow(axis, 0, 4).movedim(axis, 1),
    ),
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(name, axis):
    lazy, dense = REDUCTIONS[name]
    check(
        lambda x, y, b, p: lazy(Vi(x[:, 0]) * Vj(y[0]), Vj(b[0]) * [1.0, 2.0] + 1, axis),
        lambda x, y, b, p: dense(
            x * y, (b * torch.tensor([1.0, 2.0], dtype=b.dtype) + 1).expand(M, N, 2), axis
        ),
        data(),
    )


@pytest.mark.parametrize("axis", [0, 1])
def test_indices(axis):
    x, y, *_ = data()
    lazy, dense = LazyTensor(x).sqdist(LazyTensor(y)), (x - y).square().sum(-1, keepdim=True)
    same(lazy.argmin(axis), dense.argmin(axis))
    same(lazy.argmax_reduction(axis=axis), dense.argmax(axis))
    same(
        lazy.argKmin(5, dim=axis),
        dense.sort(axis).indices.narrow(axis, 0, 5).transpose(axis, 1)[..., 0]
        if axis
        else dense.sort(0).indices[:5, :, 0].T,
    )
    values, indices = lazy.min_argmin(axis)
    same(indices, dense.argmin(axis))
    same(values, lazy.min(axis))
    values, indices = lazy.Kmin_argKmin(3, axis)
    same(indices, lazy.argKmin(3, axis))
    same(values, lazy.Kmin_reduction(3, axis))
    values, indices = lazy.max_argmax(axis)
    same(indices, dense.argmax(axis))


def test_more_neighbours_than_there_are():
    x, y, *_ = data()
    values, indices = LazyTensor(x[:, :, :1]).sqdist(LazyTensor(y[:, :2, :1])).Kmin_argKmin(4, 1)
    assert values.shape == (M, 4)
    assert (values[:, 2:] == math.inf).all()
    assert (indices[:, 2:] == -1).all()


def test_axis_comes_from_the_shape():
    x, y = draw(5, 2), draw(7, 2)
    assert LazyTensor(x, axis=0).shape == Vi(x).shape == LazyTensor(x[:, None]).shape == (5, 1, 2)
    assert LazyTensor(y, axis=1).shape == Vj(y).shape == LazyTensor(y[None]).shape == (1, 7, 2)
    assert Var(x, cat=0).shape == (5, 1, 2)
    for p in (LazyTensor(x[0]), Pm(x[0]), LazyTensor(x[:1, None]), LazyTensor([1.0, 2.0])):
        assert p.shape == (1, 1, 2)
    for number in (
        LazyTensor(2.5),
        LazyTensor(3),
        LazyTensor(x[0, 0]),
        Pm(2.5),
        Vi(x[:, :1]).sum(-1),
    ):
        assert number.dim() == 3
        assert number.ndim == 1
    kernel = Vi(x).sqdist(Vj(y))
    assert (kernel.shape, kernel.dim(), kernel.nbatchdims) == ((5, 7), 3, 0)
    assert (kernel.dtype, LazyTensor(2.5).dtype) == ("float64", None)


def test_floats_are_parameters_and_integers_constants():
    x = Vi(draw(5, 1))
    assert [v.cat for v in (x * 0.3 + 0.3)._variables] == [0, 2]
    assert len((x * 3 + 4)._variables) == 1
    exact = (x * (1 / 9)) ** (1 / 3)  # float64 all the way
    dense = (draw(5, 1) * (1 / 9)) ** (1 / 3)
    same(exact.sum(1).nan_to_num(), dense.nan_to_num())


def test_one_tensor_is_one_variable_of_each_axis():
    x = draw(6, 2)
    xi = Vi(x)
    assert len((xi * xi - xi)._variables) == 1
    both = Vi(x) - Vj(x)
    assert [v.cat for v in both._variables] == [0, 1]
    same((both * both).sum(1), (x[:, None] - x).square().sum(1))


@pytest.mark.parametrize("leading", [(), (4,), (2, 3)])
def test_batches_broadcast(leading):
    def kernel(x, y, b, p):
        return (-((x - y) ** 2).sum(-1)).exp() * b + p

    shapes = [(8, 1, 3), (*leading, 1, 9, 3), (*leading[:-1], *(1 for _ in leading[-1:]), 1, 9, 2)]
    inputs = [draw(*shape, seed=k) for k, shape in enumerate(shapes)]
    inputs.append(draw(*leading, 1, 1, 1, seed=3))
    axis = len(leading)

    def dense(x, y, b, p):
        return ((-(x - y).square().sum(-1, keepdim=True)).exp() * b + p).sum(axis + 1)

    check(lambda *i: kernel(*map(LazyTensor, i)).sum(axis + 1), dense, inputs)
    assert kernel(*map(LazyTensor, inputs)).nbatchdims == axis


def test_vi_and_vj_take_batches_of_one_row():
    x, y = draw(4, 1, 3), draw(4, 6, 3)
    out = Vi(x).sqdist(Vj(y)).sum(2)
    assert out.shape == (4, 1, 1)
    check(
        lambda x, y: Vi(x).sqdist(Vj(y)).sum(2),
        lambda x, y: (x[:, :, None] - y[:, None]).square().sum(-1, keepdim=True).sum(2),
        (x, y),
    )


def gaussian(x, y):
    return (-Vi(x).sqdist(Vj(y))).exp()


def dense_gaussian(x, y):
    return (-(x[:, None] - y).square().sum(-1)).exp()


@pytest.mark.parametrize("shape", [(N,), (N, 1), (N, 4), (2, N, 4)])
def test_kernel_times_tensor(shape):
    x, y, v = draw(M, D), draw(N, D, seed=1), draw(*shape, seed=2)
    check(lambda x, y, v: gaussian(x, y) @ v, lambda x, y, v: dense_gaussian(x, y) @ v, (x, y, v))


def test_matvec_and_transposes():
    inputs = draw(M, D), draw(N, D, seed=1), draw(M, seed=2)
    dense = lambda x, y, v: dense_gaussian(x, y).T @ v  # noqa: E731
    check(lambda x, y, v: gaussian(x, y).rmatvec(v), dense, inputs)
    check(lambda x, y, v: gaussian(x, y).T @ v, dense, inputs)
    check(lambda x, y, v: gaussian(x, y).t().matvec(v), dense, inputs)
    assert gaussian(*inputs[:2]).t().shape == (N, M)


def ranges():
    return from_matrix(
        torch.tensor([[0, 3], [3, 9]]),
        torch.tensor([[0, 4], [4, 8]]),
        torch.tensor([[True, False], [True, True]]),
    )


def test_ranges_travel_and_turn():
    x, y = draw(9, 2), draw(8, 2, seed=1)
    mask = torch.zeros(9, 8, dtype=torch.float64)
    mask[:3, :4] = mask[3:, :] = 1
    kernel = Vi(x) - Vj(y)
    kernel.ranges = ranges()
    doubled = 2 * kernel + 1
    assert doubled.ranges is kernel.ranges
    pairs = (2 * (x[:, None] - y) + 1) * mask[..., None]
    torch.testing.assert_close(doubled.sum(1), pairs.sum(1))
    torch.testing.assert_close(doubled.sum(0), pairs.sum(0))
    turned = doubled.t()
    for a, b in zip(turned.ranges, swap_axes(kernel.ranges), strict=True):
        same(a, b)
    torch.testing.assert_close(turned.sum(0), pairs.sum(1))
    torch.testing.assert_close(
        (Vi(x) - Vj(y)).sum(1, ranges=ranges()), (pairs.sum(1) - mask.sum(1)[:, None]) / 2
    )


def test_sizes_outlive_their_variables():
    x, y = draw(5, 2), draw(7, 2)
    same(((Vi(x) - Vi(x)) + 1 + 0 * Vj(y)).sum(1), torch.full((5, 2), 7.0, dtype=x.dtype))
    same(((Vi(x) - Vi(x)) + 1 + 0 * Vj(y)).sum(0), torch.full((7, 2), 5.0, dtype=x.dtype))
    same(((Vi(x[None]) - Vi(x[None])) + Pm(draw(3, 1, seed=4))).sum(2).shape, torch.Size((3, 5, 2)))
    batched = x.expand(3, 5, 2)
    same((Vi(batched) - Vi(batched) + 1).sum(2), torch.ones(3, 5, 2, dtype=x.dtype))
    assert (LazyTensor(2) * LazyTensor(1.5)).sum(0).item() == 3


def test_symbolic_variables_wait_for_data():
    x, y, b = draw(M, D), draw(N, D, seed=1), draw(N, 2, seed=2)
    waiting = ((-Vi(0, D).sqdist(Vj(1, D)) / 2).exp() * Vj(2, 2)).sum(1)
    expected = ((-Vi(x).sqdist(Vj(y)) / 2).exp() * Vj(b)).sum(1)
    same(waiting(x, y, b), expected)
    half = ((-Vi(0, D).sqdist(Vj(y)) / 2).exp() * Vj(b)).sum(1)
    same(half(x), expected)
    same(Vi(x).sqdist(Vj(0, D)).sum(1)(y), Vi(x).sqdist(Vj(y)).sum(1))
    same((2 * Vj(1, D) - Vi(0, D)).sum(1)(x, y), (2 * Vj(y) - Vi(x)).sum(1))
    later = ((-Vi(x).sqdist(Vj(y)) / 2).exp() * Vj(b)).sum(1, call=False)
    same(later(), expected)
    same(later(backend="torch"), expected)
    assert (Vi(0, D).sqdist(Vj(1, D)) * 0.5).sum(1)(x.float(), y.float()).dtype == torch.float32


def test_out():
    x, y, *_ = data()
    kernel = LazyTensor(x).sqdist(LazyTensor(y))
    out = torch.full((M, 1), math.nan, dtype=x.dtype)
    assert kernel.sum(1, out=out) is out
    same(out, kernel.sum(1))


@pytest.mark.parametrize(
    "options", [{"use_double_acc": True}, {"dtype_acc": "float64"}, {"sum_scheme": "kahan_scheme"}]
)
def test_wider_sums(options):
    x, y = draw(50, 1).float(), draw(4000, 1, seed=1).float()
    terms = (x[:, None] - y).square()  # rounded to float32, each
    same((Vi(x) - Vj(y)).square().sum(1, **options), terms.double().sum(1).float())


def test_solve():
    x, b = draw(30, 3), draw(30, 2, seed=1)
    kernel = gaussian(x, x)
    matrix = dense_gaussian(x, x) + 0.5 * torch.eye(30, dtype=x.dtype)
    symbolic = (-Vi(0, 3).sqdist(Vj(1, 3))).exp()
    found = [
        kernel.solve(b, alpha=0.5, eps=1e-12),
        kernel.solve(Vi(b), alpha=0.5, eps=1e-12),
        kernel.solve(b, alpha=0.5, eps=1e-12, call=False)(),
        (kernel * Vj(0, 2)).solve(Vi(b), var=Vj(0, 2), alpha=0.5, eps=1e-12),
        (symbolic * Vj(2, 2)).solve(Vi(2, 2), var=Vj(2, 2), alpha=0.5, eps=1e-12)(x, x, b),
    ]
    for a in found:
        assert (matrix @ a - b).norm() <= 2e-12 * b.norm()
    with pytest.raises(torchweft.ShapeError, match=r"right-hand side is one variable"):
        kernel.solve(kernel)


def test_solve_has_gradients():
    x, b = draw(12, 2).requires_grad_(), draw(12, 1, seed=1).requires_grad_()
    found = gaussian(x, x).solve(b, alpha=0.5, eps=1e-13)
    matrix = dense_gaussian(x, x) + 0.5 * torch.eye(12, dtype=x.dtype)
    expected = torch.linalg.solve(matrix, b)
    for a, e in zip(
        torch.autograd.grad(found.square().sum(), (x, b)),
        torch.autograd.grad(expected.square().sum(), (x, b)),
        strict=True,
    ):
        torch.testing.assert_close(a, e)


# Complex numbers


def complex_data():
    return (
        torch.complex(draw(M, 1, D), draw(M, 1, D, seed=5)),
        torch.complex(draw(1, N, D, seed=6), draw(1, N, D, seed=7)),
        draw(1, N, 1, seed=2),
    )


COMPLEX = {
    "arithmetic": (lambda z, w, b: z * w + z - w / (z + 3) * 2 - (1j - z) / 4, None),
    "with real ones": (lambda z, w, b: b * z + w * b + (b - z) + b / (w + 4), None),
    "functions": (lambda z, w, b: (z * w / 4).exp() + z.conj() - (-w), None),
    "exp1j": (
        lambda z, w, b: (z.real + w.imag).exp1j() * b,
        lambda z, w, b: torch.exp(1j * (z.real + w.imag)) * b,
    ),
    "made of real ones": (
        lambda z, w, b: z.real.real2complex() + w.imag.imag2complex(),
        lambda z, w, b: z.real + 1j * w.imag,
    ),
    "components": (lambda z, w, b: (z * w).sum(-1), lambda z, w, b: (z * w).sum(-1, keepdim=True)),
    "abs": (lambda z, w, b: (z * w).abs() + abs(z) + z.angle(), None),
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", COMPLEX)
def test_complex(name, axis):
    lazy, dense = COMPLEX[name]
    dense = dense or lazy
    inputs = complex_data()
    pairs = dense(*inputs)
    expected = pairs.expand(M, N, pairs.shape[-1]).sum(axis)
    out = lazy(*map(LazyTensor, inputs)).sum(axis)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected)


def test_complex_objects():
    z, w, _ = complex_data()
    lazy = LazyTensor(z)
    assert isinstance(lazy, ComplexLazyTensor)
    assert isinstance(LazyTensor(z.real) * 1j, ComplexLazyTensor)
    assert not isinstance(lazy.real, ComplexLazyTensor)
    assert (lazy.dtype, lazy.shape, lazy.dim()) == ("complex128", (M, 1, D), 3)
    assert (LazyTensor(z[..., :1]) * LazyTensor(w[..., :1])).shape == (M, N)
    assert (LazyTensor([1j, 2.0]) * 1).shape == (1, 1, 2)
    torch.testing.assert_close((Vi(z[:, 0]) * Vj(w[0])).sum(1), (z * w).sum(1))


def test_complex_out():
    z, w, _ = complex_data()
    product = LazyTensor(z) * LazyTensor(w)
    out = torch.zeros(M, D, dtype=z.dtype)
    assert product.sum(1, out=out) is out
    same(out, product.sum(1))


PRODUCTS = {
    f"{kernel} {'complex' if dtype.is_complex else 'real'} {columns} {batch}": (
        kernel,
        dtype,
        (*batch, N, *columns),
    )
    for kernel in ("complex", "real")
    for dtype in (torch.float64, torch.complex128)
    for columns in ((), (1,), (2,), (3,), (4,))
    for batch in ((), (2,))
    if columns or not batch
}


def random(shape, dtype, seed):
    real = draw(*shape, seed=seed)
    return torch.complex(real, draw(*shape, seed=seed + 1)) if dtype.is_complex else real


def complex_kernel(name, x, y):
    """A lazy kernel and its dense matrix."""
    phase = Vi(x).sqdist(Vj(y))
    dense = (x[:, None] - y).square().sum(-1)
    if name == "real":
        return (-phase).exp(), (-dense).exp()
    return phase.exp1j(), torch.exp(1j * dense)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_complex_and_real(name):
    """K @ v is the dense product for complex and real K and v, any columns, batched or not.

    Red before: a complex K read the columns of a real v as pairs of parts, so that two gave one
    column and three an error; v (B, N, E) of complex numbers raised beside any K.
    """
    kernel, dtype, shape = PRODUCTS[name]
    lazy, dense = complex_kernel(kernel, draw(M, D), draw(N, D, seed=1))
    v = random(shape, dtype, 2)
    u = random((*shape[:-2], M, *shape[-1:]) if len(shape) > 1 else (M,), dtype, 4)
    wide = torch.promote_types(dense.dtype, dtype)
    torch.testing.assert_close(lazy @ v, dense.to(wide) @ v.to(wide))
    torch.testing.assert_close(lazy.T @ u, dense.T.to(wide) @ u.to(wide))
    adjoint = dense.mH.to(wide) @ u.to(wide)
    torch.testing.assert_close(lazy.rmatvec(u), adjoint)  # red before: scipy's is the adjoint


def test_products_with_conjugated_views():
    """Red before: view_as_real refuses what `conj` has not written down yet."""
    lazy, dense = complex_kernel("complex", draw(M, D), draw(N, D, seed=1))
    v = random((N, 2), torch.complex128, 2)
    torch.testing.assert_close(lazy @ v.conj(), dense @ v.conj())


def test_complex_variables_of_categories():
    """Red before: Vi and Vj of complex (B, M, D) raised, and so did a parameter of no dimension."""
    z, p = random((2, M, D), torch.complex128, 0), torch.tensor(2j, dtype=torch.complex128)
    torch.testing.assert_close((Vi(z) * Pm(p)).sum(2), z * p)
    assert Vi(z).shape == (2, M, 1, D)
    assert LazyTensor(p).shape == (1, 1)


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("kernel", ["complex", "real"])
def test_solutions_of_complex_systems(kernel, dtype, columns):
    """Red before: complex systems raised "must be square"; a complex b lost its imaginary part."""
    x = draw(M, D)
    difference = Vi(x) - Vj(x)
    lazy, phase = (-Vi(x).sqdist(Vj(x))).exp(), (x[:, None] - x).sum(-1)
    dense = (-(x[:, None] - x).square().sum(-1)).exp() + torch.eye(M, dtype=x.dtype)
    if kernel == "complex":
        lazy, dense = lazy * difference.sum(-1).exp1j(), dense * torch.exp(1j * phase)
    b = random((M, columns), dtype, 6)
    wide = torch.promote_types(dense.dtype, dtype)
    found = lazy.solve(b, alpha=1.0, eps=1e-12)
    assert found.dtype == wide
    torch.testing.assert_close(found, torch.linalg.solve(dense.to(wide), b.to(wide)))


# NumPy


def test_arrays():
    x, y, v = (t.numpy() for t in (draw(M, D), draw(N, D, seed=1), draw(N, 2, seed=2)))
    kernel = (-numpy.Vi(x).sqdist(numpy.Vj(y)) / np.float32(2)).exp()
    out = kernel @ v
    assert isinstance(out, np.ndarray)
    assert out.dtype == np.float64
    expected = (
        -Vi(torch.from_numpy(x)).sqdist(Vj(torch.from_numpy(y))) / 2.0
    ).exp() @ torch.from_numpy(v)
    same(torch.from_numpy(out), expected)
    values, indices = kernel.Kmin_argKmin(3, 1)
    assert (values.shape, indices.dtype) == ((M, 3), np.int64)
    target = np.empty((M, 2))
    assert kernel.__matmul__(v, out=target) is target
    same(torch.from_numpy(target), expected)
    assert (np.float64(0.5) * numpy.Vi(x.astype("float32"))).dtype == "float32"


def test_arrays_backwards_and_read_only():
    x = draw(5, 2).numpy()
    fixed = x.copy()
    fixed.flags.writeable = False
    for given, expected in ((x[::-1], x[::-1].copy()), (fixed, x)):
        same(
            torch.from_numpy((numpy.Vi(given) * numpy.Vj(x)).sum(1)),
            torch.from_numpy((numpy.Vi(expected) * numpy.Vj(x)).sum(1)),
        )


def test_complex_arrays():
    z = (draw(M, 1, 2).numpy() + 1j * draw(M, 1, 2, seed=1).numpy()).astype("complex64")
    lazy = numpy.LazyTensor(z)
    assert isinstance(lazy, numpy.ComplexLazyTensor)
    assert isinstance(lazy.abs(), numpy.LazyTensor)
    assert (lazy * lazy).sum(0).dtype == np.complex64
    x, v = draw(M, 2).numpy(), draw(M, 2, seed=1).numpy()
    wave = numpy.Vi(x).sqdist(numpy.Vj(x)).exp1j()
    dense = np.exp(1j * np.square(x[:, None] - x).sum(-1))
    torch.testing.assert_close(torch.from_numpy(wave @ v), torch.from_numpy(dense @ v))
    ridged = numpy.Vi(x).sqdist(numpy.Vj(x)) * 0j
    torch.testing.assert_close(
        torch.from_numpy(ridged.solve(v, alpha=2.0)), torch.from_numpy(v / (2 + 0j))
    )


def test_linear_operators():
    linalg = pytest.importorskip("scipy.sparse.linalg")
    x = draw(25, 2).numpy()
    kernel = (-numpy.Vi(x).sqdist(numpy.Vj(x))).exp()
    operator = linalg.aslinearoperator(kernel)
    assert (operator.shape, operator.dtype) == ((25, 25), np.float64)
    dense = kernel @ np.eye(25)
    largest = np.linalg.eigvalsh(dense)[-3:]
    found = np.sort(linalg.eigsh(operator, k=3)[0])
    torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(largest))


# torch's transforms


def lazy_sum(x, y, b):
    kernel = (-((LazyTensor(x[:, None]) - LazyTensor(y[None])) ** 2).sum(-1) / 2).exp()
    return (kernel * LazyTensor(b[None])).sum(1)


def dense_sum(x, y, b):
    return (-(x[:, None] - y).square().sum(-1) / 2).exp() @ b


def small():
    return draw(6, 2), draw(7, 2, seed=1), draw(7, 2, seed=2)


def test_gradients_of_both_orders():
    inputs = [t.requires_grad_() for t in small()]
    assert torch.autograd.gradcheck(lazy_sum, inputs)
    assert torch.autograd.gradgradcheck(lazy_sum, inputs)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "jacrev", "hessian"])
def test_transforms(transform):
    x, y, b = small()
    apply = {
        "grad": lambda f: torch.func.grad(lambda x: f(x, y, b).square().sum())(x),
        "vmap": lambda f: torch.func.vmap(f, (0, None, None))(draw(3, 6, 2), y, b),
        "jvp": lambda f: torch.func.jvp(lambda x, b: f(x, y, b), (x, b), (x + 1, b - 1))[1],
        "jacrev": lambda f: torch.func.jacrev(f, 1)(x, y, b),
        "hessian": lambda f: torch.func.hessian(lambda x: f(x, y, b).sum())(x),
    }[transform]
    torch.testing.assert_close(apply(lazy_sum), apply(dense_sum))


COMPILED = {
    "built inside": lazy_sum,
    "Vi and Vj": lambda x, y, b: (Vi(x) | Vj(y)).logsumexp(1, weight=Vj(b.abs())),
    "neighbours": lambda x, y, b: Vi(x).sqdist(Vj(y)).Kmin_argKmin(3, dim=1)[1],
    "turned": lambda x, y, b: ((Vi(x) - Vj(y)).norm2().t() * Vi(b)).sum(0),
    "floats": lambda x, y, b: (Vi(x) * 0.3 + [1.0, 2.0]).ifelse(Vj(y), 2).sum(1),
    "components": lambda x, y, b: (Vi(x)[0] * Vj(y)[..., 1:]).sum(1),
    "lost variables": lambda x, y, b: (Vi(x) - Vi(x)).sum(1),
    "complex": lambda x, y, b: (Vi(x) * 1j * Vj(y)).exp().sum(1).real,
    "matmul": lambda x, y, b: gaussian(x, y).__matmul__(b),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_in_one_graph(name):
    torch._dynamo.reset()
    function, inputs = COMPILED[name], small()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    same(compiled(*inputs), function(*inputs))


def test_compiles_with_a_kernel_from_outside():
    torch._dynamo.reset()
    x, y, b = small()
    kernel = gaussian(x, y)

    def apply(b):
        return (kernel * LazyTensor(b[None])).sum(1)

    same(torch.compile(apply, fullgraph=True, backend="eager")(b), kernel @ b)


def test_compiled_sizes_are_not_specialised():
    torch._dynamo.reset()
    compiled = torch.compile(lazy_sum, fullgraph=True, backend="aot_eager", dynamic=True)
    x, y, b = small()
    same(compiled(x, y, b), lazy_sum(x, y, b))
    with torch.compiler.set_stance("fail_on_recompile"):
        same(compiled(x[:4], y, b), lazy_sum(x[:4], y, b))


def test_compiled_gradients():
    torch._dynamo.reset()
    x, y, b = small()
    compiled = torch.compile(lazy_sum, fullgraph=True, backend="aot_eager")
    found = []
    for function in (compiled, lazy_sum):
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(function(leaf, y, b).square().sum(), leaf)[0])
    same(*found)


def test_autocast_changes_nothing():
    x, y, b = (t.float() for t in small())
    expected = lazy_sum(x, y, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(lazy_sum(x, y, b), expected)


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_positions_past_2_to_the_24(backend):
    """Float32 does not count so far: neighbours, their values, sums of ranges beyond."""
    columns = 2**24 + 5
    x = torch.tensor([[0.25]])
    y = torch.full((columns, 1), 2.0)
    last = torch.tensor([columns - 1, columns - 2, 2**24 + 1, 2**24])
    y[last] = torch.tensor([[0.25], [0.5], [0.0], [1.0]])
    distance = Vi(x).sqdist(Vj(y))
    distance.backend = backend
    found = distance.argKmin(4, dim=1)
    torch.testing.assert_close(found, torch.stack([last[[0, 2, 1, 3]]]), rtol=0, atol=0)
    assert y[found[0, 3]].item() == 1.0
    ranges = from_matrix(
        torch.tensor([[0, 1]]), torch.tensor([[0, 2**24], [2**24, columns]]), torch.tensor([[0, 1]])
    )
    one = torch.ones(columns, 1)
    product = (distance * 0 + 1) * Vj(one)
    assert product.sum(1, ranges=ranges, backend=backend).item() == 5
    assert distance.argmin(1, ranges=ranges, backend=backend).item() == columns - 1


def test_numbers_have_their_sign():
    """They are kept from call to call, and 0.0 equals -0.0."""
    one = torch.ones(1, 1)
    for number in (0.0, -0.0, 0.0, -0.0):
        assert (Vi(one) / number).sum(1).item() == math.copysign(math.inf, number)


def test_how_it_is_printed():
    x, y, _ = small()
    assert repr((-Vi(x).sqdist(Vj(y)) / 2.5).exp()).startswith(
        "LazyTensor(exp(-sqdist(x0, y1) / p2)"
    )
    assert "(x0 - (y1 - x0)) * y1 + 2" in repr((Vi(x) - (Vj(y) - Vi(x))) * Vj(y) + 2)
    assert "-(x0 + y1)" in repr(-(Vi(x) + Vj(y)))
    assert "extract(x0, (1, 1))" in repr(Vi(x)[1])
    twice = Vi(x) - Vj(y)
    for _ in range(200):
        twice = twice * twice
    assert len(repr(twice)) < 400
    assert "shape=(" in repr(twice)
