"""Conjugate gradients: residuals, derivatives through every door, and every way to fail.

Seen red with: the signs of ∂θ and of dA a turned, ∂b taken for the gradient given, one system made
of all, under vmap too, systems that are solved going on, tiny right-hand sides taken for zero, an
absolute limit, the check for NaN taken out, a preconditioner that is not used, α left out of the
gradients, a default ridge that ignores the dtype, preconditioners of one component or of the first
entry of a batch, of the diagonal in place of what is left of it, or in whose place stands the
residual.
"""

import pytest
import torch

import torchweft
from torchweft.reductions import Vi, Vj
from torchweft.reductions import solve as solver
from torchweft.reductions.cluster.sparsity import BlockSparsity
from torchweft.reductions.solve import ConvergenceError, KernelSolve, conjugate_gradient
from torchweft.testing import assert_as_accurate, plain_error


def gaussian(v, x, ridge):
    """(K(x, x) + ridge) v"""
    kernel = (-(x.unsqueeze(-2) - x.unsqueeze(-3)).square().sum(-1)).exp()
    return kernel @ v + ridge * v


def dense(b, x, ridge):
    eye = torch.eye(x.shape[-2], dtype=x.dtype)
    return torch.linalg.solve(gaussian(eye, x, ridge), b)


def solve(b, x, ridge, **options):
    return conjugate_gradient(gaussian, b, (x, ridge), **options)


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def system(dtype=torch.float64, points=40):
    ridge = torch.tensor(0.5, dtype=dtype)
    return draw(points, 3, dtype=dtype), draw(points, 2, dtype=dtype, seed=1), ridge


def residual_ratio(found, b, x, ridge, eps):
    """‖b − A a‖ over eps ‖b‖ and what rounding adds, in float64."""
    a, b, x, ridge = (t.double() for t in (found, b, x, ridge))
    left = (b - gaussian(a, x, ridge)).norm()
    size = gaussian(a.abs(), x, ridge) + b.abs()
    rounding = 4 * len(x) ** 0.5 * torch.finfo(found.dtype).eps * size.norm()
    return float(left / (eps * b.norm() + rounding))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [1e-2, 1e-6])
def test_residual(dtype, eps):
    x, b, ridge = system(dtype)
    found = solve(b, x, ridge, eps=eps)
    assert found.dtype == dtype
    assert residual_ratio(found, b, x, ridge, eps) <= 1


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_the_limit_is_relative(size):
    """A gradient of a mean over many points is tiny, and must be solved for all the same."""
    x, b, ridge = system(torch.float32)
    b = size * b
    assert residual_ratio(solve(b, x, ridge), b, x, ridge, 1e-6) <= 1


def test_a_loose_limit_takes_fewer_iterations():
    assert iterations(eps=1e-2) < iterations(eps=1e-8)


def iterations(preconditioner=None, eps=1e-8):
    x, b, ridge = system()
    scale = torch.logspace(0, 3, len(x), dtype=x.dtype).unsqueeze(1)
    count = []

    def apply(v):
        count.append(None)
        return scale * gaussian(scale * v, x, ridge)

    conjugate_gradient(apply, b, eps=eps, preconditioner=preconditioner)
    return len(count)


def test_preconditioner():
    scale = torch.logspace(0, 3, 40, dtype=torch.float64).unsqueeze(1)
    assert 2 * iterations(lambda r: r / scale**2) < iterations()


def test_no_right_hand_side():
    x, b, ridge = system()
    assert not solve(torch.zeros_like(b), x, ridge).any()
    assert solve(b[:0], x[:0], ridge).shape == (0, 2)


def test_systems_of_a_batch_are_solved_each():
    x = draw(3, 20, 2)
    b = draw(3, 20, 1, seed=1) * torch.tensor([1.0, 0.0, 1e-12]).double().view(3, 1, 1)
    ridge = torch.tensor(0.3).double()
    found = conjugate_gradient(gaussian, b, (x, ridge), eps=1e-8, batch_dims=1)
    for n in (0, 2):
        assert residual_ratio(found[n], b[n], x[n], ridge, 1e-8) <= 1
    assert not found[1].any()


def few():
    return [draw(6, 2), draw(6, 3, seed=1), torch.tensor(0.5).double()]


def exact_solve(b, x, ridge):
    return solve(b, x, ridge, eps=1e-14)


def test_gradients_of_first_and_second_order():
    inputs = [t.requires_grad_() for t in few()]
    torch.autograd.gradcheck(exact_solve, inputs, check_forward_ad=True)
    torch.autograd.gradgradcheck(exact_solve, inputs)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradient_of_one_input(which):
    inputs = few()
    inputs[which].requires_grad_()
    torch.autograd.gradcheck(exact_solve, inputs)


def energy(solver):
    return lambda *args: solver(*args).sin().sum()


def derivative(transform, which):
    return lambda solver, *args: transform(solver, argnums=which)(*args)


DERIVATIVES = {
    f"{name} of {which}": (derivative(transform, which), wrap)
    for which in range(3)
    for name, transform, wrap in (
        ("jacrev", torch.func.jacrev, lambda f: f),
        ("jacfwd", torch.func.jacfwd, lambda f: f),
        ("hessian", torch.func.hessian, energy),
    )
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_torch_func(name):
    derive, wrap = DERIVATIVES[name]
    assert_as_dense(lambda solver, *args: derive(wrap(solver), *args), few())


def assert_as_dense(derive, inputs):
    """In float64 no worse than torch.linalg.solve is in float32."""
    exact = derive(dense, *inputs)
    plain = derive(dense, *(t.float() for t in inputs))
    found = derive(exact_solve, *inputs)
    assert_as_accurate(found, exact, plain_error(plain, exact, torch.float32))


@pytest.mark.parametrize("dims", [(0, None, 0), (None, None, 0), (0, None, None), (1, 2, None)])
def test_vmap(dims):
    inputs = few()
    for n, dim in enumerate(dims):
        if dim is not None:
            inputs[n] = draw(5, *inputs[n].shape, seed=n).abs().movedim(0, dim)
    assert_as_dense(lambda solver, *args: torch.func.vmap(solver, dims)(*args), inputs)


def test_vmap_solves_each():
    """A small and hard system beside a large and easy one."""
    x, b, _ = system()
    several, ridges = torch.stack([b, 1e-12 * b]), torch.tensor([0.5, 1e-3]).double()
    found = torch.func.vmap(solve, (0, None, 0))(several, x, ridges)
    assert residual_ratio(found[1], several[1], x, ridges[1], 1e-6) <= 1


def test_repeats_to_the_bit():
    x, b, ridge = system(torch.float32)
    torch.testing.assert_close(solve(b, x, ridge), solve(b, x, ridge), rtol=0, atol=0)


FORMULA = "Exp(-g * SqDist(x, y)) * b"
ALIASES = ["x = Vi(3)", "y = Vj(3)", "b = Vj(2)", "g = Pm(1)"]


def kernel_inputs(dtype=torch.float64, batch=()):
    points = draw(*batch, 12, 3)
    b, g = draw(*batch, 12, 2, seed=1), torch.tensor([0.7]).double()
    return [t.to(dtype) for t in (points, b, g, torch.tensor(0.4))]


def kernel_dense(x, b, g, alpha):
    kernel = (-g * (x.unsqueeze(-2) - x.unsqueeze(-3)).square().sum(-1)).exp()
    return torch.linalg.solve(kernel + alpha * torch.eye(x.shape[-2], dtype=x.dtype), b)


def kernel_solve(x, b, g, alpha, eps=1e-14, unknown="b", axis=1, **options):
    system = KernelSolve(FORMULA, ALIASES, unknown, axis=axis)
    return system(x, x, b, g, alpha=alpha, eps=eps, **options)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_kernel_solve(batch):
    inputs = kernel_inputs(batch=batch)
    exact, plain = kernel_dense(*inputs), kernel_dense(*(t.float() for t in inputs))
    noise = plain_error(plain, exact, torch.float32)
    assert_as_accurate(kernel_solve(*inputs), exact, noise)
    assert_as_accurate(kernel_solve(*inputs, unknown="Var(2,2,1)"), exact, noise)


def test_kernel_solve_solves_each_entry():
    x, b, g, alpha = kernel_inputs(batch=(2,))
    b[1] *= 1e-12
    alone = kernel_solve(x[1], b[1], g, alpha, eps=1e-6)
    found = kernel_solve(x, b, g, alpha, eps=1e-6)[1]
    exact = kernel_dense(x[1], b[1], g, alpha)
    assert_as_accurate(found, exact, (alone - exact).abs())


def test_kernel_solve_over_i():
    inputs = kernel_inputs()
    exact, plain = kernel_dense(*inputs), kernel_dense(*(t.float() for t in inputs))
    system = KernelSolve(FORMULA, ["x = Vj(3)", "y = Vi(3)", "b = Vi(2)", "g = Pm(1)"], "b")
    x, b, g, alpha = inputs
    found = system(x, x, b, g, alpha=alpha, eps=1e-14)
    assert_as_accurate(found, exact, plain_error(plain, exact, torch.float32))


def test_kernel_solve_of_blocks():
    """Two clouds that do not see each other are two systems."""
    x, b, g, alpha = kernel_inputs()
    batch = torch.tensor([0] * 5 + [1] * 7)
    mask = BlockSparsity.from_batch(batch, batch)
    found = kernel_solve(x, b, g, alpha, ranges=mask.ranges)
    parts = [(x[:5], b[:5], g, alpha), (x[5:], b[5:], g, alpha)]
    exact = torch.cat([kernel_dense(*part) for part in parts])
    plain = torch.cat([kernel_dense(*(t.float() for t in part)) for part in parts])
    assert_as_accurate(found, exact, plain_error(plain, exact, torch.float32))


@pytest.mark.parametrize("which", range(4))
def test_gradients_of_kernel_solve(which):
    inputs = kernel_inputs()
    given = [t.clone().requires_grad_(n == which) for n, t in enumerate(inputs)]
    wide = [t.detach().clone().requires_grad_(n == which) for n, t in enumerate(inputs)]
    plain = [t.detach().float().requires_grad_(n == which) for n, t in enumerate(inputs)]

    def second(solver, values):
        (first,) = torch.autograd.grad(
            solver(*values).sin().sum(), values[which], create_graph=True
        )
        return first, torch.autograd.grad(first.sin().sum(), values[which])[0]

    results = zip(second(kernel_solve, given), second(kernel_dense, wide), strict=True)
    for (found, exact), rough in zip(results, second(kernel_dense, plain), strict=True):
        assert_as_accurate(found, exact, plain_error(rough, exact, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_computes_in_float32(dtype):
    inputs = kernel_inputs(dtype)
    found = kernel_solve(*inputs, eps=1e-6)
    assert found.dtype == dtype
    x, b, g, alpha = (t.float() for t in inputs)
    exact = kernel_solve(x, b, g, alpha, eps=1e-6).to(dtype)
    torch.testing.assert_close(found, exact, rtol=0, atol=0)


def line(dtype):
    """A kernel whose eigenvalues fall below all rounding errors."""
    x = torch.rand(500, 1, generator=torch.Generator().manual_seed(0)).to(dtype)
    return (-Vi(x).sqdist(Vj(x)) / 0.02).exp(), draw(500, 1, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_default_ridge(dtype):
    """pykeops' ridge, and one that float32 can solve: tr K is the number of points."""
    kernel, b = line(dtype)
    ridge = max(1e-10, 16 * torch.finfo(dtype).eps * len(b))
    found, expected = (kernel.solve(b, preconditioner="nystrom", alpha=a) for a in (None, ridge))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_float32_solves_with_the_default_ridge():
    kernel, b = line(torch.float32)
    assert kernel.solve(b, eps=1e-3).isfinite().all()


SYSTEMS = {
    "two right-hand sides": (FORMULA, ALIASES, 1, ()),
    "over i": (FORMULA, ["x = Vj(3)", "y = Vi(3)", "b = Vi(2)", "g = Pm(1)"], 0, ()),
    "a matrix for each pair": (FORMULA.replace("* b", "* (b + Sum(b))"), ALIASES, 1, ()),
    "a batch": (FORMULA, ALIASES, 1, (2,)),
}


def counted(monkeypatch):
    """A list that gets an entry at each iteration."""
    count, done = [], solver._done
    monkeypatch.setattr(solver, "_done", lambda *given: count.append(None) or done(*given))
    return count


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("name", ["nystrom", "pivoted_cholesky"])
def test_preconditioners_by_name(monkeypatch, name, system):
    """The same solution in a fifth of the iterations."""
    formula, aliases, axis, batch = SYSTEMS[system]
    x, b = 0.3 * draw(*batch, 30, 3), draw(*batch, 30, 2, seed=1)
    system = KernelSolve(formula, aliases, "b", axis)
    given, options = (x, x, b, torch.ones(1).double()), {"alpha": 1e-3, "eps": 1e-10}
    count = counted(monkeypatch)
    plain = system(*given, **options)
    before = len(count)
    found = system(*given, preconditioner=name, rank=100, **options)
    assert 5 * (len(count) - before) < before
    assert_as_accurate(found, plain, (plain.float() - plain).abs())


def test_preconditioner_of_products(monkeypatch):
    x, b, _ = system(points=60)
    given = b[:, :1], 0.5 * x, torch.tensor(1e-4).double()
    count = counted(monkeypatch)
    plain = solve(*given, eps=1e-12)
    before = len(count)
    found = solve(*given, eps=1e-12, preconditioner="nystrom", rank=60)
    assert 3 * (len(count) - before) < before
    assert_as_accurate(found, plain, (plain.float() - plain).abs())


@pytest.mark.parametrize("name", ["nystrom", "pivoted_cholesky"])
def test_derivatives_do_not_see_the_preconditioner(name):
    """Second derivatives, and a map over points, whose preconditioners differ."""

    def energy(solver, *inputs, **options):
        return solver(*inputs, **options).sin().sum()

    inputs = kernel_inputs()
    options = {"preconditioner": name, "rank": 5}
    for derive in (
        lambda solver, **options: torch.func.hessian(
            lambda x: energy(solver, x, *inputs[1:], **options)
        )(inputs[0]),
        lambda solver, **options: torch.func.vmap(lambda x: solver(x, *inputs[1:], **options))(
            torch.stack([inputs[0], 2 * inputs[0]])
        ),
    ):
        found, exact = derive(kernel_solve, **options), derive(kernel_dense)
        assert_as_accurate(found, exact, (exact.float() - exact).abs())


def nan_in(place):
    inputs = list(system())
    inputs[place] = inputs[place].clone()
    inputs[place].view(-1)[0] = torch.nan
    x, b, ridge = inputs
    return lambda: solve(b, x, ridge)


X = draw(6, 3)
MASK = BlockSparsity.from_batch(torch.zeros(12).long(), torch.zeros(12).long())

ERRORS = {
    "NaN in a tensor": (nan_in(0), ConvergenceError, "met NaN or infinity at iteration 1"),
    "NaN in rhs": (nan_in(1), ConvergenceError, "met NaN or infinity at iteration 0"),
    "NaN in the ridge": (nan_in(2), ConvergenceError, "NaN or infinity.*Check the inputs"),
    "singular": (
        lambda: conjugate_gradient(torch.zeros_like, torch.ones(3)),
        ConvergenceError,
        "not positive definite",
    ),
    "no end": (
        lambda: solve(system()[1], system()[0], 1e-3, max_iter=3),
        ConvergenceError,
        r"left a residual of \d.\de.\d\d of rhs after 3 iterations: 1.0e-06 is needed. Pass a larg",
    ),
    "not square": (
        lambda: conjugate_gradient(lambda v: v[:2], torch.ones(3)),
        torchweft.ShapeError,
        r"operator gives \(2,\) but rhs is \(3,\)",
    ),
    "a rectangle": (
        lambda: Vi(torch.ones(3, 2)).sqdist(Vj(torch.ones(4, 2))).solve(torch.ones(4, 1)),
        torchweft.ShapeError,
        r"operator gives \(3, 1\) but rhs is \(4, 1\): it must be square",
    ),
    "a negative residual": (
        lambda: conjugate_gradient(lambda v: v, torch.ones(3), eps=-1.0),
        torchweft.ShapeError,
        r"eps is -1.0 and max_iter \d+: both must be 0 or more. Pass eps=1e-6",
    ),
    "no b": (
        lambda: KernelSolve(FORMULA, ALIASES, "b")(torch.ones(2, 3), torch.ones(2, 3)),
        torchweft.ShapeError,
        r"called with 2 arguments: the unknown is number 2 .* Pass one tensor for each",
    ),
    "another name": (
        lambda: kernel_solve(*kernel_inputs(), unknown="c"),
        torchweft.ShapeError,
        r"varinvalias is 'c' but the variables are x, y, b, g",
    ),
    "another preconditioner": (
        lambda: kernel_solve(*kernel_inputs(), preconditioner="jacobi"),
        torchweft.ShapeError,
        r"preconditioner is 'jacobi' and rank 100: it must be 'nystrom' or 'pivoted_cholesky'",
    ),
    "a preconditioner without a diagonal": (
        lambda: solve(*system(), preconditioner="pivoted_cholesky"),
        torchweft.ShapeError,
        r"preconditioner is 'pivoted_cholesky' .*: it must be 'nystrom' here, a function",
    ),
    "no rank": (
        lambda: kernel_solve(*kernel_inputs(), preconditioner="nystrom", rank=0),
        torchweft.ShapeError,
        "preconditioner is 'nystrom' and rank 0: .* rank 1 or more",
    ),
    "a preconditioner of blocks": (
        lambda: kernel_solve(*kernel_inputs(), preconditioner="nystrom", ranges=MASK.ranges),
        torchweft.ShapeError,
        "preconditioner='nystrom' is given with ranges: .* Pass a function",
    ),
    "not positive definite": (
        lambda: Vi(X).sqdist(Vj(X)).solve(X[:, :1], alpha=1.0, preconditioner="nystrom"),
        ConvergenceError,
        "Nyström's preconditioner met a matrix that is not positive definite: .* pass precond",
    ),
    "an unknown that is not reduced over": (
        lambda: KernelSolve("x * b", ["x = Vj(1)", "b = Vi(1)"], "b", 1)(X[:, :1], X[:, :1]),
        torchweft.ShapeError,
        "variable 1 is to be solved for, but the formula does not reduce over it: .* as a Vj",
    ),
    "half precision": (
        lambda: conjugate_gradient(lambda v: v, torch.ones(3).half()),
        torchweft.DTypeError,
        r"rhs is torch.float16: .*rhs.float",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, error, text = ERRORS[name]
    with pytest.raises(error, match=text):
        call()
    assert issubclass(ConvergenceError, torchweft.WeftError)
