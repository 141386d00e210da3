"""Derivatives of random formulas against autograd, and the identities that hold between them.

Seen red with: an argument used twice that keeps one contribution, an expanded argument whose
contributions are not summed, `diff` along v itself, and a trace of the wrong component.
"""

import random

import pytest
import torch

from torchweft.reductions.formula.derivatives import (
    diff,
    divergence,
    grad_matrix,
    gradient,
    gradients,
    laplacian,
    simplify,
    trace_operator,
)
from torchweft.reductions.formula.evaluate import evaluate
from torchweft.reductions.formula.named import operations
from torchweft.reductions.formula.node import (
    const,
    node,
    reachable,
    read,
    substitute,
    swap,
    var,
    variables,
)

COMPOSED = operations()

ROWS, COLUMNS = 4, 5
SEEDS = range(40)
DIMS = (3, 3, 1, 2, 6)
VARIABLES = [var(k, dim, k % 3) for k, dim in enumerate(DIMS)]


def smooth(name, *args):
    return lambda *f: COMPOSED[name](*f, *args)


UNARY = [
    *(smooth(name) for name in ("Sin", "Cos", "Atan", "Square", "Minus", "SqNorm2", "Sum", "Max")),
    lambda f: COMPOSED["Exp"](-COMPOSED["SqNorm2"](f)),
    lambda f: COMPOSED["Norm2"](f) * f,
    lambda f: COMPOSED["Normalize"](f),
    lambda f: COMPOSED["Sqrt"](1 + f * f),
    lambda f: COMPOSED["Inv"](2 + COMPOSED["Abs"](f)),
    lambda f: COMPOSED["Log"](1 + f * f),
    lambda f: COMPOSED["XLogX"](1 + f * f),
    lambda f: COMPOSED["SinXDivX"](f),
    lambda f: COMPOSED["Elem"](f, f.dim - 1),
    lambda f: COMPOSED["ExtractT"](f, 1, f.dim + 2),
    lambda f: COMPOSED["ClampInt"](f, -1, 1),
    lambda f: COMPOSED["Pow"](f, 3),
]
BINARY = [
    *(smooth(name) for name in ("+", "-", "*", "Atan2", "|", "SqDist")),
    lambda f, g: COMPOSED["WeightedSqNorm"](g, f),
    lambda f, g: f / (2 + g * g),
    lambda f, g: COMPOSED["IfElse"](f, g, f * g),
    lambda f, g: COMPOSED["Powf"](1 + f * f, g),
]
ANY = [smooth(name) for name in ("Concat", "TensorProd")]


def random_formula(seed):
    draw = random.Random(seed)
    pool = list(VARIABLES)
    for _ in range(10):
        f = draw.choice(pool)
        fitting = [g for g in pool if g.dim in (1, f.dim) or f.dim == 1]
        g = draw.choice(fitting)
        made = [draw.choice(UNARY)(f)]
        if not (f.dim == 1 < g.dim):
            made.append(draw.choice(BINARY)(*((f, g) if g.dim <= f.dim else (g, f))))
        made.append(draw.choice(ANY)(f, draw.choice(pool)))
        pool += [h for h in made if h.dim <= 8]
    return draw.choice(pool[-3:]) + 0.5 * draw.choice([h for h in pool[5:] if h.dim == 1])


def numbers(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(ROWS, 1), (1, COLUMNS), (1, 1)]
    return {
        k: torch.randn(*shapes[k % 3], dim, generator=generator).to(dtype).requires_grad_()
        for k, dim in enumerate(DIMS)
    }


def direction(seed, index, dim):
    generator = torch.Generator().manual_seed(1000 + seed)
    value = torch.randn(ROWS, COLUMNS, dim, generator=generator).double()
    return var(index, dim, 2), value


def pairs(value, dim):
    return value.expand(ROWS, COLUMNS, dim)


def close(found, expected):
    """Within the rounding of a few dozen operations, beside the largest number there is."""
    noise = 2**14 * torch.finfo(torch.float64).eps
    assert float((found - expected).abs().max()) <= noise * (1 + float(expected.abs().max()))


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_are_those_of_autograd(seed):
    f, values = random_formula(seed), numbers(seed)
    e, weight = direction(seed, 10, f.dim)
    out = pairs(evaluate(f, values), f.dim)
    tensors = [values[v.data[0]].expand(ROWS, COLUMNS, -1) for v in VARIABLES]
    free = {v.data[0]: t.detach().requires_grad_() for v, t in zip(VARIABLES, tensors, strict=True)}
    out = pairs(evaluate(f, free), f.dim)
    first = torch.autograd.grad(
        out, list(free.values()), weight, create_graph=True, materialize_grads=True
    )
    found = gradients(f, VARIABLES, e)
    known = {**{k: t.detach() for k, t in free.items()}, 10: weight}
    for v, formula, expected in zip(VARIABLES, found, first, strict=True):
        assert formula is gradient(f, v, e)
        close(pairs(evaluate(formula, known), v.dim), expected.detach())
        close(pairs(evaluate(simplify(formula), known), v.dim), expected.detach())
    u, along = direction(seed + 1, 11, DIMS[0])
    if first[0].requires_grad:
        second = torch.autograd.grad(
            first[0], list(free.values()), along, materialize_grads=True, allow_unused=True
        )
        again = gradients(found[0], VARIABLES, u)
        for v, formula, expected in zip(VARIABLES, again, second, strict=True):
            close(pairs(evaluate(simplify(formula), {**known, 11: along}), v.dim), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_identities(seed):
    f, values = random_formula(seed), {k: t.detach() for k, t in numbers(seed).items()}
    v = VARIABLES[0]
    e, weight = direction(seed, 10, f.dim)
    u, along = direction(seed + 1, 11, v.dim)
    known = {**values, 10: weight, 11: along}

    def number(formula):
        return pairs(evaluate(formula, known), formula.dim)

    moved = diff(f, v, u)
    assert not {w.data[0] for w in variables(moved)} - {*range(5), 11}
    # <e, diff(f, v, u)> = <grad(f, v, e), u>
    close((weight * number(moved)).sum(-1), (number(gradient(f, v, e)) * along).sum(-1))
    matrix = number(grad_matrix(f, v)).unflatten(-1, (f.dim, v.dim))
    close(number(moved), (matrix @ along[..., None])[..., 0])
    close(number(gradient(f, v, e)), (weight[..., None, :] @ matrix)[..., 0, :])
    close(number(simplify(f)), number(f))
    simple = simplify(f)
    assert simplify(simple) is simple
    assert len(reachable(simple)) <= len(reachable(f)) + 2
    assert read(str(simple)) is simple
    assert swap(swap(f)) is f
    assert substitute(f, {}) is f
    square = COMPOSED["TensorProd"](f, v) if f.dim == 1 else COMPOSED["Sum"](f) * v
    rows = number(grad_matrix(square, v)).unflatten(-1, (v.dim, v.dim))
    close(number(divergence(square, v))[..., 0], rows.diagonal(dim1=-2, dim2=-1).sum(-1))


@pytest.mark.parametrize("seed", SEEDS)
def test_laplacians_are_traces_of_hessians(seed):
    f, values = random_formula(seed), {k: t.detach() for k, t in numbers(seed).items()}
    f, v = COMPOSED["Sum"](f), VARIABLES[0]
    hessian = evaluate(grad_matrix(gradient(f, v, const(1)), v), values)
    hessian = pairs(hessian, v.dim**2).unflatten(-1, (v.dim, v.dim))
    trace = hessian.diagonal(dim1=-2, dim2=-1).sum(-1)
    close(pairs(evaluate(laplacian(f, v), values), 1)[..., 0], trace)


def test_a_trace_forgets_the_variable():
    x, w, s = var(0, 3, 0), var(7, 3, 1), var(2, 1, 2)
    square = COMPOSED["TensorProd"](x, x)
    linear = COMPOSED["MatVecMult"](square, w) * s + w
    f = trace_operator(linear, w)
    assert w not in variables(f)
    values = {0: torch.randn(4, 3).double(), 2: torch.randn(1, 1).double()}
    close(evaluate(f, values), values[2] * values[0].square().sum(-1, keepdim=True) + 3)


def test_gradients_of_inner_nodes():
    x, y = VARIABLES[:2]
    distance = node("sqdist", x, y)
    assert gradient(node("exp", -distance), distance, const(1)) is -node("exp", -distance)
    assert gradient(x, y, const(1)) is gradient(const(3), y, const(1))
    assert gradient(x, x, const(2)) is node("expand", const(2), data=3)
