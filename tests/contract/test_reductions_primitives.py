"""One row of the table of primitives makes an operation that every part of the package knows.

Seen red with: names copied from the table once, when `parse` or `traced` is imported.
"""

import pytest
import torch

from tests.conftest import INTERPRETED
from torchweft.core.expressions.expr import const
from torchweft.reductions import Genred, LazyTensor, Vi, Vj
from torchweft.reductions.formula.derivatives import simplify
from torchweft.reductions.formula.lowering import function
from torchweft.reductions.formula.named import COMPOSED, operations
from torchweft.reductions.formula.node import PRIMITIVES, Primitive, node, read, var
from torchweft.testing.bounds import assert_as_accurate, plain_error

pytestmark = pytest.mark.kernels

BACKENDS = ["torch", "triton"] if INTERPRETED else ["torch", "numba"]


@pytest.fixture
def log1p(monkeypatch):
    row = Primitive(
        "log(1 + x)",
        torch.log1p,
        lambda n, g: (g / (1 + n.args[0]),),
        lambda x: function("log", const(1) + x),
        "Log1p",
    )
    monkeypatch.setitem(PRIMITIVES, "log1p", row)


def points():
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(size, 3, generator=generator) + 0.5 for size in (40, 30)]


def dense(x, y):
    return torch.log1p(x[:, None] * y[None]).sum(1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("log1p")
def test_a_row_is_an_operation(backend):
    x, y = (t.requires_grad_() for t in points())
    wide = [t.detach().double().requires_grad_() for t in (x, y)]
    made = Genred("Log1p(x * y)", ["x = Vi(3)", "y = Vj(3)"], axis=1)
    plain, exact = dense(x, y), dense(*wide)
    found = made(x, y, backend=backend)
    assert_as_accurate(found, exact, plain_error(plain, exact, torch.float32))
    results = zip(
        torch.autograd.grad(found.square().sum(), (x, y)),
        torch.autograd.grad(plain.square().sum(), (x, y)),
        torch.autograd.grad(exact.square().sum(), wide),
        strict=True,
    )
    for mine, rough, right in results:
        assert_as_accurate(mine, right, plain_error(rough, right, torch.float32))


@pytest.mark.usefixtures("log1p")
def test_a_row_is_an_operation_of_lazy_tensors():
    x, y = points()
    lazy = (Vi(x) * Vj(y))._apply("Log1p")
    assert isinstance(lazy, LazyTensor)
    assert "log1p(x0 * y1)" in repr(lazy)
    exact = dense(x.double(), y.double())
    assert_as_accurate(lazy.sum(1), exact, plain_error(dense(x, y), exact, torch.float32))


@pytest.mark.usefixtures("log1p")
def test_a_row_has_text_dimension_and_constants():
    f = operations()["Log1p"](var(0, 3, 0))
    assert f.dim == 3
    assert read(str(f)) is f
    assert simplify(node("log1p", read("const[0.0]()"))) is read("const[0.0]()")


def test_every_row_says_what_it_computes():
    assert all(row.doc for row in PRIMITIVES.values())
    names = [row.name for row in PRIMITIVES.values() if row.name]
    assert len(names) == len(set(names))
    assert not set(names) & set(COMPOSED)
