"""Genred, KernelSolve and generic_*: keywords, aliases, every reduction, torch and NumPy.

Seen red with: the default axis 1, positions taken from the order of aliases, formula2 read without
the aliases, the other axis for an output, memory that is returned but not written; signatures
without leading sizes or dtypes, and kept where sizes are symbols.
"""

import inspect
import math
import pickle

import numpy as np
import pytest
import torch

from tests.conftest import BACKENDS, INTERPRETED
from tests.nearness import check, draw, same
from torchweft import reductions
from torchweft.reductions import (
    Genred,
    KernelSolve,
    generic_argkmin,
    generic_argmin,
    generic_logsumexp,
    generic_sum,
    numpy,
)
from torchweft.reductions.cluster import from_matrix

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the front end does not depend on the backend")

M, N = 30, 40
ALIASES = ["x = Vi(3)", "y = Vj(3)", "b = Vj(2)", "p = Pm(1)"]
GAUSSIAN = "Exp(-p * SqDist(x, y)) * b"


def inputs():
    x, y, b = draw(M, 3), draw(N, 3, seed=1), draw(N, 2, seed=2).abs() + 0.1
    return x, y, b, torch.tensor([0.7], dtype=x.dtype)


def squares(x, y):
    return (x[:, None] - y).square().sum(-1, keepdim=True)


def kernel(x, y, b, p):
    return (-p * squares(x, y)).exp() * b


def test_axis_0_is_the_default():
    check(Genred(GAUSSIAN, ALIASES), lambda *i: kernel(*i).sum(0), inputs())
    check(Genred(GAUSSIAN, ALIASES, axis=1), lambda *i: kernel(*i).sum(1), inputs())


@pytest.mark.parametrize(
    "aliases",
    [
        ["x=Vi(0,3)", "y=Vj(1,3)", "b=Vj(2,2)", "p=Pm(3,1)"],
        ["p=Pm(3,1)", "b=Vj(2,2)", "y=Vj(1,3)", "x=Vi(0,3)"],
        ("x = Var(0,3,0)", "y = Var(1,3,1)", "b = Var(2,2,1)", "p = Var(3,1,2)"),
    ],
)
def test_positions(aliases):
    same(Genred(GAUSSIAN, aliases, axis=1)(*inputs()), Genred(GAUSSIAN, ALIASES, axis=1)(*inputs()))


def test_variables_inside_the_formula():
    formula = "Exp(-Var(3,1,2) * SqDist(x, y)) * Var(2,2,1)"
    same(
        Genred(formula, ALIASES[:2], axis=1)(*inputs()),
        Genred(GAUSSIAN, ALIASES, axis=1)(*inputs()),
    )
    lost = Genred("Grad(Grad(x + Var(1,3,1), x, Var(2,3,0)), x, Var(3,3,0))", ["x=Vi(0,3)"], axis=1)
    x, y, *_ = inputs()
    same(lost(x, y, x, x), torch.zeros(M, 3, dtype=x.dtype))


SCORE = "-p * SqDist(x, y)"


def score(x, y, b, p):
    return -p * squares(x, y)


WEIGHTED = {
    "LogSumExp": (None, lambda *i: score(*i).logsumexp(1)),
    "LogSumExpWeight": ("b", lambda *i: (score(*i) + i[2].log()).logsumexp(1)),
    "SumSoftMaxWeight": ("b", lambda *i: (score(*i).softmax(1) * i[2]).sum(1)),
    "SoftMax": ("b", lambda *i: (score(*i).softmax(1) * i[2]).sum(1)),
    "Max_SumShiftExp": (
        None,
        lambda *i: torch.cat(
            [score(*i).amax(1), (score(*i) - score(*i).amax(1, keepdim=True)).exp().sum(1)], -1
        ),
    ),
    "Max_SumShiftExpWeight": (
        "b",
        lambda *i: torch.cat(
            [
                score(*i).amax(1),
                ((score(*i) - score(*i).amax(1, keepdim=True)).exp() * i[2]).sum(1),
            ],
            -1,
        ),
    ),
    "Min": (None, lambda *i: score(*i).amin(1)),
    "Max": (None, lambda *i: score(*i).amax(1)),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_reduction(name):
    weight, dense = WEIGHTED[name]
    check(Genred(SCORE, ALIASES, name, axis=1, formula2=weight), dense, inputs())


def test_indices():
    x, y, b, p = inputs()
    dense = score(x, y, b, p)

    def found(name, **options):
        return Genred(SCORE, ALIASES, name, axis=1, **options)(x, y, b, p)

    same(found("ArgMin"), dense.argmin(1))
    same(found("ArgMax"), dense.argmax(1))
    same(found("ArgKMin", opt_arg=3), dense.sort(1).indices[:, :3, 0])
    for name, index in (("Min_ArgMin", dense.argmin(1)), ("Max_ArgMax", dense.argmax(1))):
        values, indices = found(name)
        same(indices, index)
        same(values, found(name[:3]))
    values, indices = found("KMin_ArgKMin", opt_arg=3)
    same(values, found("KMin", opt_arg=3))
    same(indices, found("ArgKMin", opt_arg=3))
    assert values.shape == (M, 3)


def test_batches_broadcast():
    b = inputs()[2]
    batched = (draw(2, 1, M, 3), draw(4, N, 3, seed=1), b, draw(2, 1, 1, seed=5).abs())

    def dense(x, y, b, p):
        return (
            (
                -p[..., None, None, :]
                * (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1, True)
            ).exp()
            * b
        ).sum(-2)

    check(Genred(GAUSSIAN, ALIASES, axis=1), dense, batched)


def test_ranges_and_backends():
    x, y, b, p = inputs()
    blocks_i, blocks_j = torch.tensor([[0, 10], [15, 30]]), torch.tensor([[0, 25], [25, 40]])
    ranges = from_matrix(blocks_i, blocks_j, torch.tensor([[True, False], [False, True]]))
    mask = torch.zeros(M, N, 1, dtype=x.dtype)
    mask[:10, :25] = mask[15:, 25:] = 1
    reduction = Genred(GAUSSIAN, ALIASES, axis=1)
    torch.testing.assert_close(
        reduction(x, y, b, p, ranges=ranges), (kernel(x, y, b, p) * mask).sum(1)
    )
    for backend in ("auto", "CPU", *BACKENDS):
        torch.testing.assert_close(
            reduction(x, y, b, p, backend=backend), kernel(x, y, b, p).sum(1)
        )


def test_out_is_written_and_returned():
    given, reduction = inputs(), Genred(GAUSSIAN, ALIASES, axis=1)
    out = torch.full((M, 2), math.nan, dtype=torch.float64)
    assert reduction(*given, out=out) is out
    same(out, reduction(*given))


def test_signature():
    names = (
        "formula aliases reduction_op axis dtype opt_arg formula2 cuda_type dtype_acc "
        "use_double_acc sum_scheme enable_chunks rec_multVar_highdim use_fast_math precision"
    )
    defaults = {
        "reduction_op": "Sum",
        "axis": 0,
        "dtype_acc": "auto",
        "use_double_acc": False,
        "sum_scheme": "auto",
        "enable_chunks": True,
        "rec_multVar_highdim": False,
        "use_fast_math": True,
    }
    given = inspect.signature(Genred).parameters
    assert " ".join(given) == names
    for name, value in defaults.items():
        assert given[name].default == value
    call = inspect.signature(Genred.__call__).parameters
    assert {name: call[name].default for name in ("backend", "device_id", "ranges", "out")} == {
        "backend": "auto",
        "device_id": -1,
        "ranges": None,
        "out": None,
    }


def test_every_keyword_is_taken():
    reduction = Genred(
        GAUSSIAN,
        ALIASES,
        reduction_op="Sum",
        axis=1,
        dtype="float64",
        opt_arg=None,
        formula2=None,
        cuda_type="double",
        dtype_acc="float64",
        use_double_acc=True,
        sum_scheme="block_sum",
        enable_chunks=False,
        rec_multVar_highdim=None,
        use_fast_math=False,
        precision="ieee",
    )
    given = inputs()
    torch.testing.assert_close(reduction(*given), kernel(*given).sum(1))


def test_pickle():
    reduction = Genred(GAUSSIAN, ALIASES, axis=1)
    same(pickle.loads(pickle.dumps(reduction))(*inputs()), reduction(*inputs()))


def test_generic():
    x, y, b, p = inputs()
    rows, columns = "a = Vi(2)", "a = Vj(2)"
    same(
        generic_sum(GAUSSIAN, rows, *ALIASES)(x, y, b, p),
        Genred(GAUSSIAN, ALIASES, axis=1)(x, y, b, p),
    )
    same(
        generic_sum(GAUSSIAN, columns, *ALIASES)(x, y, b, p), Genred(GAUSSIAN, ALIASES)(x, y, b, p)
    )
    same(
        generic_logsumexp(SCORE, "a = Vi(1)", *ALIASES)(x, y, b, p),
        Genred(SCORE, ALIASES, "LogSumExp", axis=1)(x, y, b, p),
    )
    points = ("x = Vi(3)", "y = Vj(3)")
    dense = squares(x, y)
    same(generic_argmin("SqDist(x, y)", "a = Vj(1)", *points)(x, y), dense.argmin(0))
    same(
        generic_argkmin("SqDist(x, y)", "a = Vi(4)", *points)(x, y), dense.sort(1).indices[:, :4, 0]
    )


def test_kernel_solve():
    x, _, _, p = inputs()
    b = draw(M, 2, seed=4)
    solve = KernelSolve(GAUSSIAN, ALIASES, "b", axis=1)
    found = solve(x, x, b, p, alpha=0.3, eps=1e-12)
    matrix = (-p * squares(x, x)[..., 0]).exp() + 0.3 * torch.eye(M, dtype=x.dtype)
    assert (matrix @ found - b).norm() <= 2e-12 * b.norm()
    arrays = numpy.KernelSolve(GAUSSIAN, ALIASES, "b", axis=1)
    given = [t.numpy() for t in (x, x, b, p)]
    same(torch.from_numpy(arrays(*given, alpha=0.3, eps=1e-12)), found)


def test_arrays():
    given = inputs()
    arrays = [t.numpy() for t in given]
    reduction = numpy.Genred(GAUSSIAN, ALIASES, axis=1)
    out = reduction(*arrays)
    assert isinstance(out, np.ndarray)
    same(torch.from_numpy(out), Genred(GAUSSIAN, ALIASES, axis=1)(*given))
    target = np.empty((M, 2))
    assert reduction(*arrays, out=target) is target
    same(torch.from_numpy(target), torch.from_numpy(out))
    ranges = from_matrix(np.array([[0, M]]), np.array([[0, N]]), np.ones((1, 1), bool))
    same(torch.from_numpy(reduction(*arrays, ranges=list(ranges))), torch.from_numpy(out))
    values, indices = numpy.Genred(SCORE, ALIASES, "Min_ArgMin", axis=1)(*arrays)
    assert (values.dtype, indices.dtype) == (np.float64, np.int64)
    for name, output in (("sum", "a=Vi(2)"), ("logsumexp", "a=Vi(1)")):
        formula = GAUSSIAN if name == "sum" else SCORE
        made = getattr(numpy, f"generic_{name}")(formula, output, *ALIASES)
        expected = getattr(reductions, f"generic_{name}")(formula, output, *ALIASES)
        assert isinstance(made, numpy.Genred)
        same(torch.from_numpy(made(*arrays)), expected(*given))
    points = ("x = Vi(3)", "y = Vj(3)")
    nearest = numpy.generic_argkmin("SqDist(x, y)", "a = Vi(2)", *points)(*arrays[:2])
    assert nearest.shape == (M, 2)
    assert numpy.generic_argmin("SqDist(x, y)", "a = Vi(1)", *points)(*arrays[:2]).shape == (M, 1)


def dense_sum(x, y, b, p):
    return kernel(x, y, b, p).sum(1)


def test_gradients():
    x, y, b, p = (t[:5].clone().requires_grad_() for t in inputs())
    reduction = Genred(GAUSSIAN, ALIASES, axis=1)
    assert torch.autograd.gradcheck(reduction, (x, y, b, p))
    assert torch.autograd.gradgradcheck(reduction, (x, y, b, p))


def test_transforms():
    x, y, b, p = inputs()
    reduction = Genred(GAUSSIAN, ALIASES, axis=1)
    for apply in (
        lambda f: torch.func.grad(lambda x: f(x, y, b, p).square().sum())(x),
        lambda f: torch.func.vmap(f, (0, None, None, None))(draw(3, M, 3), y, b, p),
        lambda f: torch.func.jvp(lambda b: f(x, y, b, p), (b,), (b + 1,))[1],
    ):
        torch.testing.assert_close(apply(reduction), apply(dense_sum))


@pytest.mark.parametrize("inside", [False, True])
def test_compiles_in_one_graph(inside):
    torch._dynamo.reset()
    made = Genred(SCORE, ALIASES, "SumSoftMaxWeight", axis=1, formula2="b")

    def apply(*given):
        if inside:
            reduction = Genred(SCORE, ALIASES, "SumSoftMaxWeight", axis=1, formula2="b")
        else:
            reduction = made
        return reduction(*given)

    compiled = torch.compile(apply, fullgraph=True, backend="aot_eager")
    same(compiled(*inputs()), made(*inputs()))


def test_one_reduction_of_changing_calls():
    """Each call has the shapes, dtype, layout, mask, gradients and mode of its own."""
    reduction = Genred(GAUSSIAN, ALIASES, axis=1)
    whole = from_matrix(torch.tensor([[0, M]]), torch.tensor([[0, N]]), torch.tensor([[True]]))
    x, y, b, p = inputs()
    batch = draw(3, M, 3, seed=5)
    for _ in range(2):
        for given in (
            (x, y, b, p),
            (x[:7], y, b, p),
            (x.T.contiguous().T, y.expand(N, 3), b[:, :1].expand(N, 2), p),
            (x.float(), y.float(), b.float(), p.float()),
            (batch, y, b, p),
            (x[None], y, b, p),
            (x, y, b, p.expand(3, 1)),
        ):
            found = reduction(*given)
            assert found.dtype == given[0].dtype
            x_, y_, b_, p_ = (t.double() for t in given)
            wide = p_.unsqueeze(-2).unsqueeze(-2)
            squares_ = (x_.unsqueeze(-2) - y_.unsqueeze(-3)).square().sum(-1, keepdim=True)
            exact = ((-wide * squares_).exp() * b_).sum(-2)
            torch.testing.assert_close(found, exact.to(found.dtype))
        same(reduction(x, y, b, p, ranges=whole), reduction(x, y, b, p))
        leaf = x.clone().requires_grad_()
        assert reduction(leaf, y, b, p).requires_grad
        with torch.no_grad():
            assert not reduction(leaf, y, b, p).requires_grad
        with torch.inference_mode():
            torch.testing.assert_close(reduction(x, y, b, p), kernel(x, y, b, p).sum(1))


def test_sizes_that_are_symbols():
    """Traced with symbols for sizes, after a call with numbers."""
    from torch.fx.experimental.proxy_tensor import make_fx

    reduction, given = Genred(GAUSSIAN, ALIASES, axis=1), inputs()
    expected = reduction(*given)
    traced = make_fx(reduction, tracing_mode="symbolic")(*given)
    same(traced(*given), expected)
    x, y, b, p = given
    same(traced(x[:9], y, b, p), expected[:9])
