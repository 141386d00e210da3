"""Bad input raises the right class, names the argument and the offending value, says what to do.

Seen red with: the check of the weight's order, of the blades, and of the dtypes taken out.
"""

import inspect
import re

import pytest
import torch

import torchweft
from torchweft import clifford
from torchweft.clifford import Algebra

SPACE = Algebra((1, 1, 1))
X = torch.zeros(8, 5, 6)
WEIGHT = torch.zeros(6, 20)
MATRICES = torch.zeros(20, 6, 4)
LINEAR = torch.zeros(4, 6, 3)

PAIRS = (
    "geometric_product", "wedge", "inner", "left_contraction", "right_contraction", "regressive",
    "sandwich",
)  # fmt: skip
SINGLES = (
    "reverse", "grade_involution", "conjugate", "dual", "norm", "gelu", "rms_norm", "exp", "log",
    "inverse",
)  # fmt: skip


def raises(error, builtin, pattern):
    assert issubclass(error, builtin)
    return pytest.raises(error, match=re.compile(pattern, re.DOTALL))


def call(name, *arguments, **options):
    return getattr(clifford, name)(*arguments, SPACE, **options)


def chain(weight, **options):
    return clifford.gelu_geometric_product_norm(X, X, weight, SPACE, **options)


BLADES = r"is \(7, 5, 6\): it must be \(B, batch…, F\) with B = 8 blades.*Pass"


@pytest.mark.parametrize("name", PAIRS)
def test_the_number_of_blades_of_pairs(name):
    with raises(torchweft.ShapeError, ValueError, "[xr] " + BLADES):
        call(name, X[:7], X)
    with raises(torchweft.ShapeError, ValueError, "[yx] " + BLADES):
        call(name, X, X[:7])
    with raises(torchweft.ShapeError, ValueError, r"is \(5, 6\).*B = 8"):
        call(name, X[0], X[0])


@pytest.mark.parametrize("name", SINGLES)
def test_the_number_of_blades_of_one(name):
    with raises(torchweft.ShapeError, ValueError, BLADES):
        call(name, X[:7])
    with raises(torchweft.ShapeError, ValueError, r"is \(8, 5, 6\).*\(batch…, F, B\) with B = 8"):
        call(name, X, blade_dim=-1)


@pytest.mark.parametrize("name", PAIRS)
def test_dtypes_and_devices_of_pairs(name):
    with raises(torchweft.DTypeError, TypeError, r"is torch.float64 but . is torch.float32.*Pass"):
        call(name, X, X.double())
    with raises(torchweft.DTypeError, TypeError, r"is torch.int64.*must be float64.*Pass"):
        call(name, X.long(), X.long())
    with raises(torchweft.DTypeError, TypeError, r"is a list.*as_tensor"):
        call(name, X.tolist(), X)
    with raises(torchweft.DeviceError, RuntimeError, r"is on meta but . is on cpu.*Pass"):
        call(name, X, X.to("meta"))


@pytest.mark.parametrize("name", SINGLES)
def test_dtypes_of_one(name):
    with raises(torchweft.DTypeError, TypeError, r"x?.* is torch.int64.*must be float64"):
        call(name, X.long())


@pytest.mark.parametrize(
    ("function", "pattern"),
    [
        (lambda: chain(WEIGHT.T), r"weight is \(20, 6\): it must be \(F = 6, P = 20\)"),
        (lambda: chain(WEIGHT[:, :19]), r"weight is \(6, 19\).*P = 20"),
        (lambda: chain(WEIGHT[:5]), r"weight is \(5, 20\).*F = 6"),
        (lambda: chain(MATRICES), r"weight is \(20, 6, 4\).*\(F = 6, P = 20\)"),
        (
            lambda: chain(MATRICES.permute(2, 1, 0), fully_connected=True),
            r"weight is \(4, 6, 20\).*\(P = 20, F_in = 6, F_out\)",
        ),
        (lambda: chain(WEIGHT, fully_connected=True), r"weight is \(6, 20\).*F_in = 6"),
        (
            lambda: clifford.geometric_product(X, X, SPACE, WEIGHT.T),
            r"weight is \(20, 6\).*F = 6, P = 20.*order of algebra.paths",
        ),
        (
            lambda: clifford.fully_connected_geometric_product(X, X, MATRICES.mT, SPACE),
            r"weight is \(20, 4, 6\).*F_in = 6",
        ),
        (
            lambda: clifford.grade_linear(X, LINEAR[:3], None, SPACE),
            r"weight is \(3, 6, 3\).*n\+1 = 4",
        ),
        (
            lambda: clifford.grade_linear(X, LINEAR, torch.zeros(6), SPACE),
            r"bias is \(6,\).*3",
        ),
    ],
)
def test_weights(function, pattern):
    with raises(torchweft.ShapeError, ValueError, pattern):
        function()


def test_options():
    with raises(torchweft.ShapeError, ValueError, r"norm is 'lorentz'.*euclidean.*metric"):
        chain(WEIGHT, norm="lorentz")
    with raises(torchweft.ShapeError, ValueError, r"blade_dim is 1: it must be 0 .* or -1"):
        call("wedge", X, X, blade_dim=1)
    with raises(torchweft.ShapeError, ValueError, r"grades?.*4.*0.*3"):
        clifford.grade_project(X, 4, SPACE)


ROWS = torch.zeros(8, 3, 3, 6)  # with heads, items and features
NEEDED = {"points": ROWS[0], "features": 2, "in_features": 2, "out_features": 2, "n_features": 2}
NEEDED |= {"hidden": 2, "hidden_features": 2, "in_channels": 2, "out_channels": 2, "heads": 1}
NEEDED |= {"kernel_size": 3, "grades": [1], "source": {}, "blade_dim": 0}
TAKING_ALGEBRAS = [
    name for name in clifford.__all__
    if callable(getattr(clifford, name))
    and "algebra" in inspect.signature(getattr(clifford, name)).parameters
]  # fmt: skip


@pytest.mark.parametrize("name", TAKING_ALGEBRAS)
def test_a_metric_is_no_algebra(name):
    """Red before with an AttributeError: the convolutions, CGLayer, loaders and six functions."""
    taker = getattr(clifford, name)
    given = {
        p.name: NEEDED.get(p.name, 2 if p.annotation == "int" else ROWS)
        for p in inspect.signature(taker).parameters.values()
        if p.default is p.empty and p.kind is not p.VAR_KEYWORD
    }
    with raises(torchweft.DTypeError, TypeError, r"algebra is a tuple: .*Algebra.*Pass Algebra"):
        taker(**(given | {"algebra": (1, 1, 1)}))


def test_a_weight_in_the_place_of_the_algebra():
    with raises(torchweft.DTypeError, TypeError, r"algebra is a Tensor: .*order.*algebra=…"):
        clifford.geometric_product(X, X, WEIGHT, SPACE)


def test_shapes_that_do_not_broadcast():
    with raises(torchweft.ShapeError, ValueError, r"\(8, 5, 6\).*\(8, 4, 6\)"):
        call("geometric_product", X, X[:, :4])
    with raises(torchweft.ShapeError, ValueError, r"\(8, 5, 6\).*\(8, 6\)"):
        call("geometric_product", X, X[:, 0])


def test_backends_that_cannot_serve():
    with raises(torchweft.BackendError, RuntimeError, r"backend='cuda'.*there is no such backend"):
        call("wedge", X, X, backend="cuda")
    large = torch.zeros(64, 2, 3)
    with raises(
        torchweft.BackendError, RuntimeError, r"backend='triton'.*n = 6.*up to n = 5.*Pass"
    ):
        clifford.wedge(large, large, Algebra((1,) * 6), backend="triton")


def test_an_algebra_is_no_grade():
    with raises(
        torchweft.DTypeError, TypeError, r"grades is a Algebra: .* Use grade_project\(x, grades"
    ):
        clifford.grade_project(X, SPACE, 2)


def test_every_text_says_what_to_do():
    for bad in (
        lambda: call("wedge", X[:7], X),
        lambda: call("wedge", X, X.double()),
        lambda: chain(WEIGHT.T),
        lambda: chain(WEIGHT, norm="lorentz"),
        lambda: clifford.wedge(X, X, (1, 1, 1)),
        lambda: Algebra((2,)),
    ):
        with pytest.raises(torchweft.WeftError) as caught:
            bad()
        assert re.search(r"(Pass|Transpose|Use|Scale) .*\.$", str(caught.value)), str(caught.value)
