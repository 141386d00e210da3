"""Rotations: every conversion there and back, also at the poles and at half a turn; e3nn's numbers.

Seen red with: matrix_y turned round; α and γ of a quaternion exchanged; v1 × v2 turned round; the
sign of w left free; γ read from the wrong row; acos in place of atan2; each check of shapes, sizes
and types left out.
"""

import math

import pytest
import torch

from torchweft import o3
from torchweft.errors import DTypeError, ShapeError
from torchweft.testing import assert_within_bound
from torchweft.testing.doors import assert_same_bits

FLOAT = torch.float64
PI = math.pi
SPECIAL = torch.tensor(
    [
        [0, 0, 0],
        [0.3, 0, 0.9],
        [0, PI, 0],
        [1, PI, 2],
        [0.5, 1e-9, 0.2],
        [2, 1e-20, 1],
        [0, PI, PI],
    ],
    dtype=FLOAT,
).T
"""Euler angles of the identity, near the poles and of half turns."""


def near(found, expected, stored=8):
    """Rounding errors of a few steps, each of the size 1."""
    ones = torch.ones_like(expected)
    assert_within_bound(found, expected, ones, terms=9, stored=stored)


def angles(n=50, seed=0):
    torch.manual_seed(seed)
    random = torch.stack(o3.rand_angles(n, dtype=FLOAT))
    return tuple(torch.cat([random, SPECIAL], 1))


def test_right_handed():
    quarter = torch.tensor(PI / 2, dtype=FLOAT)
    x, y, z = torch.eye(3, dtype=FLOAT)
    near(o3.matrix_x(quarter) @ y, z)
    near(o3.matrix_y(quarter) @ z, x)
    near(o3.matrix_z(quarter) @ x, y)
    for matrix in (o3.matrix_x, o3.matrix_y, o3.matrix_z):
        near(torch.linalg.det(matrix(quarter / 3)), quarter.new_ones(()))


def test_angles_apply_the_last_first():
    a, b, c = angles()
    expected = o3.matrix_y(a) @ o3.matrix_x(b) @ o3.matrix_y(c)
    near(o3.angles_to_matrix(a, b, c), expected)
    near(o3.angles_to_matrix(a, b, c)[..., 1], o3.angles_to_xyz(a, b))


FORMS = ("angles", "matrix", "axis_angle", "quaternion")


def convert(start, end, given):
    given = given if isinstance(given, tuple) else (given,)
    return given if start == end else getattr(o3, f"{start}_to_{end}")(*given)


@pytest.mark.parametrize("through", FORMS)
@pytest.mark.parametrize("start", FORMS)
def test_there_and_back(start, through):
    """Each form to each other one and to matrices; matrices are unique."""
    exact = o3.angles_to_matrix(*angles())
    given = convert("angles", start, angles())
    given = given[0] if len(given) == 1 else given
    found = convert(through, "matrix", convert(start, through, given))
    near(found[0] if isinstance(found, tuple) else found, exact, stored=24)


def test_ranges():
    matrix = o3.angles_to_matrix(*angles())
    beta = o3.matrix_to_angles(matrix)[1]
    axis, angle = o3.matrix_to_axis_angle(matrix)
    q = o3.matrix_to_quaternion(matrix)
    for value in (beta, angle):
        assert ((value >= 0) & (value <= PI)).all()
    assert (q[:, 0] >= 0).all()
    near(q.square().sum(-1), q.new_ones(len(q)))
    length = axis.square().sum(-1)
    near(length[angle > 0], torch.ones_like(length[angle > 0]))


def test_small_turns_keep_their_digits():
    axis = torch.tensor([0.6, 0.0, 0.8], dtype=FLOAT)
    for size in (1e-3, 1e-9, 1e-15):
        angle = torch.tensor(size, dtype=FLOAT)
        found_axis, found = o3.matrix_to_axis_angle(o3.axis_angle_to_matrix(axis, angle))
        near(found / size, torch.ones_like(found))
        near(found_axis, axis)
        beta = o3.xyz_to_angles(o3.angles_to_xyz(angle, angle))[1]
        near(beta / size, torch.ones_like(beta))


def test_composition():
    one, two = angles(), angles(seed=1)
    expected = o3.angles_to_matrix(*one) @ o3.angles_to_matrix(*two)
    near(o3.angles_to_matrix(*o3.compose_angles(*one, *two)), expected, stored=24)
    q = o3.compose_quaternion(o3.angles_to_quaternion(*one), o3.angles_to_quaternion(*two))
    near(o3.quaternion_to_matrix(q), expected, stored=24)
    both = (*o3.angles_to_axis_angle(*one), *o3.angles_to_axis_angle(*two))
    near(o3.axis_angle_to_matrix(*o3.compose_axis_angle(*both)), expected, stored=24)


def test_inverses_and_identities():
    turns = angles()
    matrix = o3.angles_to_matrix(*turns)
    near(o3.angles_to_matrix(*o3.inverse_angles(*turns)), matrix.mT)
    q = o3.angles_to_quaternion(*turns)
    near(o3.quaternion_to_matrix(o3.inverse_quaternion(q)), matrix.mT)
    eye = torch.eye(3, dtype=FLOAT).expand(2, 3, 3)
    near(o3.angles_to_matrix(*o3.identity_angles(2, dtype=FLOAT)), eye)
    near(o3.quaternion_to_matrix(o3.identity_quaternion(2, dtype=FLOAT)), eye)
    assert o3.identity_quaternion(requires_grad=True).requires_grad
    assert all(a.is_leaf and a.requires_grad for a in o3.identity_angles(2, requires_grad=True))


def test_random_rotations_are_uniform():
    """Traces average 0 and their squares 1, as characters of the vector representation must."""
    torch.manual_seed(0)
    n = 20000
    for matrix in (
        o3.rand_matrix(n, dtype=FLOAT),
        o3.quaternion_to_matrix(o3.rand_quaternion(n, dtype=FLOAT)),
        o3.axis_angle_to_matrix(*o3.rand_axis_angle(n, dtype=FLOAT)),
    ):
        traces = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
        spread = 5 / math.sqrt(n)
        assert abs(traces.mean()) < spread
        assert abs(traces.square().mean() - 1) < spread * 3
    assert o3.rand_matrix(2, 3).shape == (2, 3, 3, 3)
    assert o3.rand_matrix().shape == (3, 3)
    assert o3.rand_matrix(requires_grad=True).is_leaf


def test_gradients():
    turns = torch.stack(angles(4))[:, :4].requires_grad_()

    def round_trip(a):
        matrix = o3.angles_to_matrix(*a)
        q = o3.compose_quaternion(o3.matrix_to_quaternion(matrix), o3.angles_to_quaternion(*a))
        axis, angle = o3.quaternion_to_axis_angle(q)
        return o3.axis_angle_to_matrix(axis, angle), *o3.matrix_to_angles(matrix)

    torch.autograd.gradcheck(round_trip, turns)
    torch.autograd.gradgradcheck(round_trip, turns)


def test_compile_and_vmap():
    def function(a, b, c):
        matrix = o3.angles_to_matrix(a, b, c)
        q = o3.matrix_to_quaternion(matrix)
        return o3.quaternion_to_matrix(q) + torch.stack(o3.matrix_to_angles(matrix), -1)[..., None]

    given = angles()
    expected = function(*given)
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    assert_same_bits(compiled(*given), expected, "compiled")
    near(torch.func.vmap(function)(*given), expected)


def test_errors():
    with pytest.raises(ShapeError, match=r"R is \(3, 4\): it must be \(\.\.\., 3, 3\)"):
        o3.matrix_to_angles(torch.ones(3, 4))
    with pytest.raises(ShapeError, match=r"xyz is \(3, 2\): it must be \(\.\.\., 3\)"):
        o3.xyz_to_angles(torch.ones(3, 2))
    with pytest.raises(ShapeError, match=r"q is \(\): it must be \(\.\.\., 4\)"):
        o3.quaternion_to_matrix(torch.ones(()))


THREE, FOUR = torch.ones(3), torch.ones(4)
UNEQUAL = {
    "angles_to_matrix": ((THREE, FOUR, THREE), r"alpha \(3,\), beta \(4,\), gamma \(3,\)"),
    "angles_to_quaternion": ((THREE, THREE, FOUR), r"alpha \(3,\), beta \(3,\), gamma \(4,\)"),
    "angles_to_xyz": ((THREE, FOUR), r"alpha \(3,\), beta \(4,\)"),
    "axis_angle_to_matrix": (
        (torch.ones(4, 3), THREE),
        r"axis\[\.\.\., 0\] \(4,\), angle \(3,\)",
    ),
    "axis_angle_to_quaternion": (
        (torch.ones(2, 4, 3), torch.ones(3, 4)),
        r"xyz\[\.\.\., 0\] \(2, 4\), angle \(3, 4\)",
    ),
    "compose_angles": ((THREE,) * 3 + (FOUR,) * 3, r"a1 \(3,\), .* c2 \(4,\)"),
    "compose_quaternion": ((torch.ones(2, 4), torch.ones(3, 4)), r"q1 \(2, 4\), q2 \(3, 4\)"),
    "compose_axis_angle": (
        (torch.ones(2, 3), torch.ones(2), torch.ones(3, 3), THREE),
        r"q1 \(2, 4\), q2 \(3, 4\)",
    ),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_shapes(name):
    given, text = UNEQUAL[name]
    with pytest.raises(ShapeError, match=f"the shapes {text} do not broadcast: .*unsqueeze"):
        getattr(o3, name)(*given)


def test_shapes_that_broadcast():
    a, b, c = torch.ones(2, 1, 3), torch.ones(4, 1), torch.ones(())
    assert o3.angles_to_matrix(a, b, c).shape == (2, 4, 3, 3, 3)
    assert o3.compose_angles(a, a, a, b, b, b)[0].shape == (2, 4, 3)
    assert o3.axis_angle_to_matrix(torch.ones(3), a).shape == (2, 1, 3, 3, 3)


def test_angles_are_tensors():
    with pytest.raises(DTypeError, match=r"beta is a float: it must be a torch\.Tensor.*as_tensor"):
        o3.angles_to_matrix(THREE, 0.5, THREE)
    array = torch.eye(3).numpy()
    with pytest.raises(DTypeError, match=r"xyz is a ndarray: it must be a torch\.Tensor"):
        o3.xyz_to_angles(array)
    with pytest.raises(DTypeError, match=r"R is a ndarray: it must be a torch\.Tensor"):
        o3.Irreps("1o").D_from_matrix(array)


MAKERS = [f"rand_{form}" for form in FORMS] + ["identity_angles", "identity_quaternion"]


@pytest.mark.parametrize("name", MAKERS)
def test_sizes(name):
    make = getattr(o3, name)
    for shape in ((-1,), (2, -1)):
        with pytest.raises(ShapeError, match=r"a size is -1: sizes must be 0 or more.*Pass 10"):
            make(*shape)
    with pytest.raises(DTypeError, match=r"a size is \(2, 3\): sizes must be integers"):
        make((2, 3))


def test_equal_to_e3nn():
    from e3nn import o3 as theirs

    turns, others = (o3.rand_angles(50, dtype=FLOAT) for _ in range(2))
    calls = {"compose_angles": (*turns, *others), "angles_to_xyz": turns[:2]}
    for start in FORMS:
        given = convert("angles", start, turns)
        given = given if isinstance(given, tuple) else (given,)
        calls |= {f"{start}_to_{end}": given for end in FORMS if end != start}
    for name, given in calls.items():
        found, expected = getattr(o3, name)(*given), getattr(theirs, name)(*given)
        for a, b in zip(
            *(c if isinstance(c, tuple) else (c,) for c in (found, expected)), strict=True
        ):
            near(a, b, stored=999)  # theirs takes the arc cosine of a trace
