"""CEGNN's blocks: their programs against the published formulas, on every backend.

Seen red with: the norm of the result taken before √½, a gate by the size of the scalar, a mean over
the edges out of a node.
"""

import pytest
import torch

import torchweft
from tests.conftest import BACKENDS, INTERPRETED
from torchweft import clifford
from torchweft.clifford import Algebra, reference
from torchweft.clifford.layers.basic import MVLayerNorm
from torchweft.clifford.layers.cegnn import EGCL, SteerableGeometricProduct, message_plan
from torchweft.clifford.programs import programs
from torchweft.clifford.programs.operator import run
from torchweft.clifford.programs.programs import key
from torchweft.core.expressions.rewrite import hoisted
from torchweft.core.printing.schedule import schedule
from torchweft.testing import assert_as_accurate
from torchweft.testing.bounds import plain_error

pytestmark = pytest.mark.kernels

METRICS = [(0, 1, -1)] if INTERPRETED else [(1, 1, 1), (1, -1, -1, -1), (0, 1, 1)]
ROWS, FEATURES = 9, 5


def squares(x, algebra):
    """⟨x̃_g x_g⟩₀ of each grade."""
    q = torch.tensor(algebra.squares, dtype=x.dtype).view(-1, 1, 1) * x * x
    return torch.stack([q[b.start : b.stop].sum(0) for b in algebra.of_grade])


def root(square):
    return (square * square + 1e-16) ** 0.25


def silu(algebra, x, a, b):
    t = torch.cat([x[:1], squares(x, algebra)[1:]])
    gates = torch.sigmoid(a.unsqueeze(1) * t + b.unsqueeze(1))
    return gates[list(algebra.grades)] * x


def balanced(algebra, x, s):
    divisors = torch.sigmoid(s).unsqueeze(1) * (root(squares(x, algebra)) - 1) + 1 + 1e-6
    return x / divisors[list(algebra.grades)]


def steerable(algebra, x, left, right, w, s):
    product = reference.product(x, balanced(algebra, right, s), algebra, w.T)
    return (left + product) / 2**0.5


def steerable_norm(algebra, x, left, right, w, s, a):
    o = steerable(algebra, x, left, right, w, s)
    size = root(squares(o, algebra).sum(0, keepdim=True)).mean(-1, keepdim=True)
    return a * o / (size + 1e-6)


FORMULAS = {
    "silu": (silu, "xgg"),
    "grade_normalization": (balanced, "xg"),
    "steerable": (steerable, "xxxpg"),
    "steerable norm": (steerable_norm, "xxxpg1"),
}
"""Each program, and its operands: multivectors, numbers a grade, a path, or one, by feature."""


def operands(algebra, kinds, dtype, rows=ROWS):
    generator = torch.Generator().manual_seed(0)
    lengths = {"g": algebra.n + 1, "p": len(algebra.paths), "1": 1}
    shapes = [
        (algebra.num_blades, rows, FEATURES) if kind == "x" else (lengths[kind], FEATURES)
        for kind in kinds
    ]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def derivatives(function, inputs, upstream, again):
    """The value, its gradients, and the gradients of ⟨gradients, again⟩."""
    leaves = [a.detach().clone().requires_grad_() for a in inputs]
    value = function(*leaves)
    first = torch.autograd.grad(value, leaves, upstream.to(value), create_graph=True)
    total = sum((g * a.to(g)).sum() for g, a in zip(first, again, strict=True))
    return [value, *first, *torch.autograd.grad(total, leaves, materialize_grads=True)]


def program(name, algebra):
    builder, *words = name.split(" ")
    return key(builder, algebra, *words)


@pytest.mark.parametrize("metric", METRICS, ids=str)
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_derivatives_are_those_of_the_formulas(backend, name, metric, poisoned_memory):
    """In float64, to float32's noise: near null multivectors a root's derivatives have no limit."""
    algebra = Algebra(metric)
    formula, kinds = FORMULAS[name]
    inputs = operands(algebra, kinds, torch.float64)
    upstream, *again = operands(algebra, "x" + kinds, torch.float64)
    functions = [
        lambda *a: run(program(name, algebra), backend, *a)[0],
        lambda *a: formula(algebra, *a),
        lambda *a: formula(algebra, *(e.float() for e in a)),
    ]
    found, exact, plain = (derivatives(f, inputs, upstream, again) for f in functions)
    for out, true, short in zip(found, exact, plain, strict=True):
        assert_as_accurate(out, true.detach(), (short - true).detach().abs())


@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_are_one_loop(name):
    """Gradients of what features share are sums over rows, whatever factors they come with."""
    algebra = Algebra((1, 1, 1))
    names = "1" * len(FORMULAS[name][1])
    gradient = programs.program(f"{program(name, algebra)} | vjp {names} 1")
    results = schedule(hoisted(gradient).program).results
    kinds = {"x": False, "g": True, "p": True, "1": True}
    assert [r.summed for r in results] == [kinds[kind] for kind in FORMULAS[name][1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("metric", [(1, 1, 1), (0, 1, 1)], ids=str)
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_are_as_accurate_as_the_formulas(backend, name, metric, dtype, poisoned_memory):
    algebra = Algebra(metric)
    formula, kinds = FORMULAS[name]
    inputs = operands(algebra, kinds, dtype, rows=130)
    (out,) = run(program(name, algebra), backend, *inputs)
    exact = formula(algebra, *(a.double() for a in inputs))
    plain = formula(algebra, *(a.float() for a in inputs))
    assert out.dtype == dtype
    assert_as_accurate(out, exact, plain_error(plain, exact, dtype))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # 1 / (1 + ∞) is right
@pytest.mark.parametrize("backend", BACKENDS)
def test_gates_stay_finite(backend):
    algebra = Algebra((1, 1, 1))
    x = 1e4 * torch.randn(8, 3, 2, generator=torch.Generator().manual_seed(0))
    a = torch.full((4, 2), -1.0)
    leaves = [t.requires_grad_() for t in (x, a, torch.zeros(4, 2))]
    z = clifford.silu(*leaves, algebra, backend=backend)
    for t in (z, *torch.autograd.grad(z.sum(), leaves)):
        assert t.isfinite().all()


def test_a_norm_in_the_same_pass_is_the_norm():
    algebra = Algebra((1, 1, 1))
    torch.manual_seed(0)
    product, norm = SteerableGeometricProduct(FEATURES, algebra), MVLayerNorm(FEATURES, algebra)
    x = torch.randn(8, ROWS, FEATURES)
    plain = norm(product(x))
    exact = norm.double()(product.double()(x.double()))
    assert_as_accurate(product(x.double(), norm), exact, plain_error(plain, exact, torch.float32))


def test_messages_are_differences_and_means():
    src, dst = torch.tensor([0, 2, 1, 0]), torch.tensor([1, 1, 0, 3])
    plan = message_plan(src, dst, 5)
    h = torch.randn(8, 5, 3, generator=torch.Generator().manual_seed(0))
    difference = torchweft.products.sparse_scale(h, plan.difference)
    torch.testing.assert_close(difference, h[:, dst] - h[:, src], rtol=0, atol=0)
    mean = torchweft.products.sparse_scale(difference, plan.mean)
    expected = torch.zeros_like(h)
    expected[:, 0], expected[:, 3] = difference[:, 2], difference[:, 3]
    expected[:, 1] = difference[:, 0] / 2 + difference[:, 1] / 2
    torch.testing.assert_close(mean, expected, rtol=0, atol=0)


def test_edges_without_the_features_that_were_announced():
    algebra = Algebra((1, 1))
    layer = EGCL(3, algebra, edge_features=2)
    plan = message_plan(torch.tensor([0, 1]), torch.tensor([1, 0]), 2)
    text = r"edge_attr has 0 features: EGCL was built for 2\. Pass that many, or build"
    with pytest.raises(torchweft.ShapeError, match=text):
        layer(torch.randn(4, 2, 3), plan)
