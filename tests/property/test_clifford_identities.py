"""The identities of Clifford algebra, in any metric, on multivectors of small integers: exactly.

Seen red with: left and right contraction swapped.
"""

from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchweft import clifford
from torchweft.clifford import Algebra
from torchweft.testing import assert_within_bound

metrics = st.lists(st.sampled_from([-1, 0, 1]), min_size=0, max_size=4).map(tuple)


class Trial(NamedTuple):
    """Three multivectors of an algebra."""

    algebra: Algebra
    x: Tensor
    y: Tensor
    z: Tensor

    def call(self, name, *arguments):
        return getattr(clifford, name)(*arguments, self.algebra)

    def mul(self, x, y):
        return self.call("geometric_product", x, y)

    def grade(self, x, grade):
        return self.call("grade_project", x, grade)


@st.composite
def trials(draw, metrics=metrics):
    algebra = Algebra(draw(metrics))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (algebra.num_blades, draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    x, y, z = (torch.randint(-3, 4, shape, generator=generator).double() for _ in range(3))
    return Trial(algebra, x, y, z)


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def one(algebra, blade, like):
    """The unit blade at a place, for each row and feature of another multivector."""
    found = torch.zeros_like(like)
    found[blade] = 1
    return found


@given(trial=trials())
def test_the_product_is_associative_and_has_a_one(trial):
    algebra, x, y, z = trial
    same(trial.mul(trial.mul(x, y), z), trial.mul(x, trial.mul(y, z)))
    same(trial.mul(one(algebra, 0, x), x), x)
    same(trial.mul(x, one(algebra, 0, x)), x)


@given(trial=trials(st.just((0, 1, -1, 1, 1))))
@settings(max_examples=5)
def test_also_with_five_vectors(trial):
    _, x, y, z = trial
    same(trial.mul(trial.mul(x, y), z), trial.mul(x, trial.mul(y, z)))
    same(trial.call("reverse", trial.mul(x, y)), trial.mul(*_each(trial, "reverse", y, x)))


def _each(trial, name, *multivectors):
    return [trial.call(name, a) for a in multivectors]


@given(trial=trials())
def test_involutions(trial):
    _, x, y, _ = trial
    xy = trial.mul(x, y)
    same(trial.call("reverse", xy), trial.mul(*_each(trial, "reverse", y, x)))
    same(trial.call("conjugate", xy), trial.mul(*_each(trial, "conjugate", y, x)))
    same(trial.call("grade_involution", xy), trial.mul(*_each(trial, "grade_involution", x, y)))
    same(trial.call("conjugate", x), trial.call("reverse", trial.call("grade_involution", x)))
    for name in ("reverse", "conjugate", "grade_involution"):
        same(trial.call(name, trial.call(name, x)), x)


@settings(max_examples=30)
@given(trial=trials())
def test_the_other_products_are_grades_of_the_product(trial):
    algebra, x, y, _ = trial
    kept = {
        "wedge": lambda a, b: a + b,
        "inner": lambda a, b: abs(a - b),
        "left_contraction": lambda a, b: b - a,
        "right_contraction": lambda a, b: a - b,
    }
    grades = range(algebra.n + 1)
    expected = {name: torch.zeros_like(x) for name in kept}
    for a in grades:
        for b in grades:
            product = trial.mul(trial.grade(x, a), trial.grade(y, b))
            for name, out in kept.items():
                if out(a, b) in grades:
                    expected[name] += trial.grade(product, out(a, b))
    for name in kept:
        same(trial.call(name, x, y), expected[name])
    same(sum(trial.grade(x, a) for a in grades), x)
    same(trial.grade(x, tuple(grades)), x)


@given(trial=trials())
def test_wedge_and_contractions(trial):
    _, x, y, z = trial
    wedge = trial.call("wedge", x, y)
    same(trial.call("wedge", wedge, z), trial.call("wedge", x, trial.call("wedge", y, z)))
    inside = trial.mul(x, trial.call("left_contraction", y, z))
    same(trial.mul(wedge, z)[0], inside[0])  # the contraction is the adjoint of the wedge
    turned = trial.call("left_contraction", *_each(trial, "reverse", y, x))
    same(trial.call("right_contraction", x, y), trial.call("reverse", turned))


@given(trial=trials())
def test_dual_and_join_ignore_the_metric(trial):
    algebra, x, y, _ = trial
    last = one(algebra, -1, x)
    for blade in range(algebra.num_blades):
        e = one(algebra, blade, x)
        same(trial.call("wedge", e, trial.call("dual", e)), last)
    meet = trial.call("wedge", *_each(trial, "dual", x, y))
    join = trial.call("regressive", x, y)
    same(trial.call("dual", join), meet)
    same(trial.call("regressive", last, x), x)
    flat = Algebra((1,) * algebra.n)
    same(clifford.dual(x, flat), trial.call("dual", x))
    same(clifford.wedge(x, y, flat), trial.call("wedge", x, y))
    same(clifford.regressive(x, y, flat), join)
    same(clifford.geometric_product(clifford.reverse(x, flat), last, flat), clifford.dual(x, flat))


@given(trial=trials())
def test_sandwich(trial):
    _, x, y, z = trial
    expected = trial.mul(trial.mul(x, z), trial.call("reverse", x))
    same(trial.call("sandwich", x, z), expected)
    nested = trial.call("sandwich", x, trial.call("sandwich", y, z))
    same(trial.call("sandwich", trial.mul(x, y), z), nested)


@given(trial=trials())
def test_norm(trial):
    _, x, _, _ = trial
    norm = trial.call("norm", x)
    assert norm.shape == (1, *x.shape[1:])
    square = trial.mul(trial.call("reverse", x), x)[:1]
    assert_within_bound(norm, square.abs().sqrt(), norm, terms=1)


@settings(max_examples=30)
@given(trial=trials())
def test_blades_in_the_last_dimension(trial):
    algebra, x, y, _ = trial
    last = [a.movedim(0, -1).contiguous() for a in (x, y)]
    for name in ("geometric_product", "wedge", "inner", "regressive", "sandwich"):
        found = getattr(clifford, name)(*last, algebra, blade_dim=-1)
        same(found.movedim(-1, 0), trial.call(name, x, y))
    for name in ("reverse", "conjugate", "grade_involution", "dual", "norm"):
        found = getattr(clifford, name)(last[0], algebra, blade_dim=-1)
        same(found.movedim(-1, 0), trial.call(name, x))


def test_the_gradient_of_the_norm_is_zero_at_zero():
    x = torch.zeros(8, 2, 3, dtype=torch.float64, requires_grad=True)
    clifford.norm(x, Algebra((1, 1, 1))).sum().backward()
    same(x.grad, torch.zeros_like(x))
