"""Calls without doors: results that kernels end by themselves are those of all other calls.

In the interpreter these are the kernels; elsewhere a GPU that is absent says what is asked of it.
Seen red with: m left out of m + log s, the last component not divided by; values of Max not
negated, indices in their place, NaN at an index that a door gives; calls under vmap or with
gradients taken for plain ones, memory of negative views as it is; every call settled anew.
"""

import copy
import pickle
import sys

import pytest
import torch

from tests.conftest import BACKENDS, INTERPRETED
from tests.contract.absent_gpu import stand_in
from torchweft.reductions import Genred, Vi, Vj
from torchweft.testing import assert_as_accurate, plain_error

pytestmark = pytest.mark.kernels

ALIASES = ["x = Vi(3)", "y = Vj(3)", "b = Vj(2)", "p = Pm(1)"]
SCORE, WEIGHT = "p * (x | y) - SqDist(x, y)", "b"
SIZES = [(1, 1, ()), (5, 7, (1, 2, 1)), (70, 3, ()), (2, 1200, ())]
interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="kernels run here in the interpreter alone"
)


def score(x, y, b, p):
    x, y = x[..., :, None, :], y[..., None, :, :]
    return p[..., None, None, :] * (x * y).sum(-1, keepdim=True) - (x - y).square().sum(
        -1, keepdim=True
    )


def softmax(x, y, b, p):
    return (score(x, y, b, p).softmax(-2) * b[..., None, :, :]).sum(-2)


def logarithm(x, y, b, p):
    return (score(x, y, b, p).exp() * b.square()[..., None, :, :]).sum(-2).log()


SUMS = {
    "Sum": (
        Genred(f"Exp({SCORE}) * b", ALIASES, axis=1),
        lambda *g: (score(*g).exp() * g[2][..., None, :, :]).sum(-2),
    ),
    "LogSumExp": (Genred(SCORE, ALIASES, "LogSumExp", axis=1), lambda *g: score(*g).logsumexp(-2)),
    "LogSumExp, weights": (
        Genred(SCORE, ALIASES, "LogSumExp", axis=1, formula2="Square(b)"),
        logarithm,
    ),
    "softmax": (Genred(SCORE, ALIASES, "SumSoftMaxWeight", axis=1, formula2=WEIGHT), softmax),
}
VECTORS = f"Concat({SCORE}, x | y)"
SMALLEST = ["Min", "Max", "ArgMin", "ArgMax", "Min_ArgMin", "Max_ArgMax"]
SEVERAL = ["KMin", "ArgKMin", "KMin_ArgKMin"]


def inputs(rows, columns, dtype=torch.float32, batch=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((*batch, rows, 3), (*batch, columns, 3), (*batch, columns, 2), (1,))
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def noise(dense, given):
    """That of plain torch at `given` and at seven inputs near it.

    One row holds most of the largest exponential, so a single draw is one sample of its error;
    independent draws have exponentials of other sizes and say nothing of it.
    """
    generator, errors = torch.Generator().manual_seed(0), []
    for size in (0, *[1e-3] * 7):
        near = [t.float() * (1 + size * torch.randn(t.shape, generator=generator)) for t in given]
        exact, plain = (dense(*(t.to(d) for t in near)) for d in (torch.float64, torch.float32))
        errors.append(plain_error(plain, exact, given[0].dtype))
    return torch.stack(errors)


def taken(call):
    """Whether the calls of a reduction needed no door."""
    return [bool(found) for found in call._direct.values()]


def by_a_door(call, given):
    return call(given[0].clone().requires_grad_(), *given[1:], backend="triton")


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_sums(name, sizes, dtype):
    *sizes, batch = sizes
    call, dense = copy.deepcopy(SUMS[name][0]), SUMS[name][1]
    given = inputs(*sizes, dtype, batch)
    found = call(*given, backend="triton")
    assert taken(call) == [True]
    exact = dense(*(t.double() for t in given))
    assert found.dtype == dtype
    assert_as_accurate(found, exact, noise(dense, given))
    assert by_a_door(call, given).shape == found.shape


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("formula", [SCORE, VECTORS])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", [*SMALLEST, *SEVERAL])
def test_smallest(name, sizes, formula):
    """Numbers are small integers, so scores are exact, and ties are many."""
    call = Genred(formula, ALIASES, name, axis=1, opt_arg=3 if name in SEVERAL else None)
    rows, columns, batch = sizes
    given = [(2 * t).round() for t in inputs(rows, columns, batch=batch)]
    found, expected = call(*given, backend="triton"), by_a_door(call, given)
    assert taken(call) == [True]
    pairs = zip(found, expected, strict=True) if "_" in name else [(found, expected)]
    for mine, other in pairs:
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other.detach(), rtol=0, atol=0)


SCORES = {
    "nothing": [float("-inf")] * 3,
    "one": [float("-inf"), 2.0, float("-inf")],
    "too much": [float("inf"), 0.0, 1.0],
    "no number": [float("nan"), 0.0, 1.0],
    "none at all": [float("nan"), float("nan"), float("-inf")],
}


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("repeats", [1, 700])
@pytest.mark.parametrize("reduction", ["LogSumExp", "SumSoftMaxWeight", "Min", "Max"])
def test_scores_that_are_no_numbers(reduction, name, repeats):
    s = torch.tensor(SCORES[name] * repeats)[:, None]
    more = {"formula2": "s * 0 + 1"} if reduction == "SumSoftMaxWeight" else {}
    call = Genred("s + x", ["x = Vi(1)", "s = Vj(1)"], reduction, axis=1, **more)
    x = torch.zeros(2, 1)
    found = call(x, s, backend="triton")
    assert taken(call) == [True]
    other = call(x.requires_grad_(), s, backend="triton").detach()
    torch.testing.assert_close(found, other, rtol=0, atol=0, equal_nan=True)


@interpreted
def test_what_needs_a_door():
    """Gradients, maps, forward mode, masks, memory of its own and explanations."""
    call = copy.deepcopy(SUMS["LogSumExp"][0])
    given = inputs(5, 7)
    options = {"backend": "triton"}
    expected = call(*given, **options)
    call._direct.clear()
    by_a_door(call, given).sum().backward()
    torch.func.vmap(lambda x: call(x, *given[1:], **options))(torch.stack([given[0]] * 2))
    torch.func.jvp(lambda x: call(x, *given[1:], **options), (given[0],), (given[1][:5],))
    out = torch.empty_like(expected)
    assert call(*given, out=out, **options) is out
    with torch.autocast("cpu"):
        call(*given, **options)
    assert taken(call) == []
    torch.testing.assert_close(out, expected)
    with torch.inference_mode():
        call(*given, **options)
    assert taken(call) == [True]


@interpreted
@pytest.mark.parametrize("options", [{"dtype_acc": "float64"}, {"sum_scheme": "kahan_scheme"}])
@pytest.mark.parametrize("name", SUMS)
def test_other_accumulators(name, options):
    formula = f"Exp({SCORE}) * b" if name == "Sum" else SCORE
    weight = {"softmax": WEIGHT, "LogSumExp, weights": "Square(b)"}.get(name)
    kind = {"Sum": "Sum", "softmax": "SumSoftMaxWeight"}.get(name, "LogSumExp")
    call = Genred(formula, ALIASES, kind, axis=1, formula2=weight, **options)
    given = inputs(5, 700)
    found = call(*given, backend="triton")
    assert found.dtype == torch.float32
    dense = SUMS[name][1]
    exact = dense(*(t.double() for t in given))
    assert_as_accurate(found, exact, noise(dense, given))


@interpreted
def test_lazy_tensors():
    x, y, b, p = inputs(5, 7)
    k = (Vi(x) | Vj(y)) * p - Vi(x).sqdist(Vj(y))
    k.backend = "triton"
    for call in (
        lambda k: k.sum(1),
        lambda k: k.logsumexp(1),
        lambda k: k.sumsoftmaxweight(Vj(b), 1),
        lambda k: k.min(1),
        lambda k: k.argKmin(3, 1),
        lambda k: k @ b,
        lambda k: (k * 0.5).sum(0),
    ):
        graded = (Vi(x.clone().requires_grad_()) | Vj(y)) * p - Vi(x).sqdist(Vj(y))
        graded.backend = "triton"
        torch.testing.assert_close(call(k), call(graded).detach())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", range(3))
def test_negative_views(backend, place):
    """Their memory has the other sign; torch makes them of imaginary parts of conjugates."""
    call = copy.deepcopy(SUMS["Sum"][0])
    given = inputs(5, 7)
    expected = call(*given, backend=backend)
    given[place] = torch._neg_view(-given[place])
    assert given[place].is_neg()
    for graded in (False, True):
        given[3].requires_grad_(graded)
        torch.testing.assert_close(call(*given, backend=backend), expected)


def test_a_copy_settles_anew():
    call = SUMS["Sum"][0]
    call(*inputs(5, 7))
    for other in (copy.deepcopy(call), pickle.loads(pickle.dumps(call))):
        assert other._direct == {}
        torch.testing.assert_close(other(*inputs(5, 7)), call(*inputs(5, 7)), rtol=0, atol=0)


MOST_CALLS = 48
"""Python functions that a settled call enters: 0.6 microseconds each on a slow host."""


@pytest.fixture
def absent_gpu(monkeypatch, tmp_path):
    """Kernels serve the CPU's tensors, and are launched into nothing."""
    from torchweft.reductions.engine import operator
    from torchweft.reductions.gpu import gaussians, launch, recipe

    monkeypatch.setenv("TORCHWEFT_CACHE_DIR", str(tmp_path))
    stand_in(monkeypatch)
    monkeypatch.setattr(operator, "choose", lambda backend, device: "triton")
    for module in (launch, gaussians, recipe):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    operator._plan.cache_clear()
    yield
    operator._plan.cache_clear()
    recipe._recipe.cache_clear()


def entered(call):
    """How many functions of Python a call enters."""
    found = []
    sys.setprofile(
        lambda frame, event, _: found.append(frame.f_code.co_name) if event == "call" else None
    )
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.skipif(INTERPRETED, reason="kernels are compiled")
def test_what_a_call_costs_the_host(absent_gpu):
    x, y, b = (torch.rand(1000, d) for d in (3, 3, 1))
    squares = "1.375 * SqDist(x, y)"  # no other test keeps what follows of it
    aliases = ["x = Vi(3)", "y = Vj(3)", "b = Vj(1)"]
    lazy, weight = 1.375 * Vi(x).sqdist(Vj(y)), Vj(b)
    calls = {"sum": lambda: lazy.sum(1), "logsumexp": lambda: lazy.logsumexp(1)}
    calls["softmax"] = lambda: lazy.sumsoftmaxweight(weight, 1)
    calls |= {"min": lambda: lazy.min(1), "argKmin": lambda: lazy.argKmin(3, 1)}
    for name in ("Sum", "LogSumExp", "SumSoftMaxWeight", "Min", "ArgMin", "ArgKMin"):
        more = {"formula2": "b"} if "Soft" in name else {}
        call = Genred(squares, aliases, name, axis=1, opt_arg=3 if "K" in name else None, **more)
        calls[f"Genred {name}"] = lambda call=call: call(x, y, b)
    for name, call in calls.items():
        call()
        names = entered(call)
        assert len(names) <= MOST_CALLS, f"{name} enters {len(names)}: {names}"
