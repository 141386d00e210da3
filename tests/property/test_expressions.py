"""Derivatives of random programs against torch.autograd, in float64, to the third order.

Seen red with: a copy along an axis whose adjoint is not summed.
"""

import random

import pytest
import torch

from torchweft.core.expressions.expr import Form, add, apply, const, contract, count, total
from torchweft.core.expressions.program import Operand, Output, Program, evaluate, jvp, run, vjp

ROWS, FEATURES = 5, 3
SIZE = {"row": ROWS, "feature": FEATURES}


def random_program(seed):
    """Sums, functions and a form of three operands, drawn at random."""
    draw = random.Random(seed)
    x, y = (Operand(name, 2, ("row", "feature")) for name in "xy")
    w = Operand("w", 2, ("feature",))
    terms = [(draw.choice([-1, 1, 0.5]), *(draw.randrange(2) for _ in range(4))) for _ in range(7)]
    form = Form("random", (2, 2, 2, 2), terms)
    pool = [*x.leaves(), *y.leaves(), *w.leaves()]
    pool += contract(form, "out", (x.leaves(), y.leaves(), w.leaves(), None))
    for _ in range(6):
        a, b = draw.choice(pool), draw.choice(pool)
        pool.append(
            draw.choice(
                [
                    add(a, const(0.5) * b),
                    a * b,
                    apply("normal_cdf", a),
                    apply("sigmoid", b),
                    apply("rsqrt", a * a + const(1)),
                    a
                    * apply("reciprocal", count("feature"))
                    * total(x.leaves()[0] * b, {"feature"}),
                ]
            )
        )
    z = Operand("z", 2, ("row", "feature"))
    return Program(f"random {seed}", (x, y, w), (Output(z, (pool[-1], pool[-2] + pool[-3])),))


def randn(operand, generator):
    shape = (operand.size, *(SIZE[axis] for axis in operand.axes))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def plain(program, inputs):
    """The program in torch, operation by operation, so that autograd differentiates it."""
    leaves = {
        o.name: t if "row" in o.axes else t[:, None]
        for o, t in zip(program.inputs, inputs, strict=True)
    }
    (output,) = program.outputs
    values = evaluate(output.components, leaves, SIZE)
    return torch.stack([torch.as_tensor(v).expand(ROWS, FEATURES) for v in values])


def check(found, expected, what):
    noise = 2**14 * torch.finfo(torch.float64).eps
    for a, b in zip(found, expected, strict=True):
        b = torch.zeros_like(a) if b is None else b
        assert float((a - b).abs().max()) <= noise * (1 + float(b.abs().max())), what


@pytest.mark.parametrize("seed", range(12))
def test_gradients_of_gradients_of_gradients(seed):
    program, generator = random_program(seed), torch.Generator().manual_seed(seed)
    inputs = [randn(o, generator).requires_grad_() for o in program.inputs]
    results, arguments = [plain(program, inputs)], list(inputs)
    derived = program
    for order in range(1, 4):
        cotangents = [torch.randn_like(r).requires_grad_() for r in results]
        results = torch.autograd.grad(
            results, arguments, cotangents, create_graph=True, allow_unused=True
        )
        results = [
            torch.zeros_like(a, requires_grad=True) if r is None else r
            for r, a in zip(results, arguments, strict=True)
        ]
        results = [r if r.requires_grad else r.clone().requires_grad_() for r in results]
        derived = vjp(derived, "1" * len(derived.inputs), "1" * len(derived.outputs))
        arguments += cotangents
        found = run(derived, [a.detach() for a in arguments])
        check(found, [r.detach() for r in results], f"order {order}")


@pytest.mark.parametrize("seed", range(12))
def test_changes_along_tangents(seed):
    program, generator = random_program(seed), torch.Generator().manual_seed(seed)
    inputs, tangents = ([randn(o, generator) for o in program.inputs] for _ in range(2))
    _, expected = torch.autograd.functional.jvp(
        lambda *a: plain(program, a), tuple(inputs), tuple(tangents)
    )
    check(run(jvp(program, "111"), [*inputs, *tangents]), [expected], "jvp")
