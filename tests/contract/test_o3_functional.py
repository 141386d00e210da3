"""tensor_dot_uu, gating and irrep_wise_linear: worked values, oracles, equivariance, errors.

Seen red with: the scale left out, irrep_index shifted by one.
"""

import math

import pytest
import torch

from tests.cases.o3 import suite
from tests.conftest import BACKENDS, INTERPRETED
from torchweft import o3
from torchweft.errors import DTypeError, ShapeError
from torchweft.testing import assert_within_bound
from torchweft.testing.contract import BODY_CHECKS, Setting, check_values
from torchweft.testing.doors import check_compile, check_export, check_numerical

pytestmark = pytest.mark.kernels

INFO = o3.irreps_info("2x0e+1o")
SUITE = suite()
SHARE = 5 if INTERPRETED else 1  # an interpreted program takes a millisecond
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
randn = torch.randn


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[None, :, None]


def same(found, expected):
    exact = column(*expected)
    assert_within_bound(found, exact, exact.abs(), torch.ones_like(exact))


def test_info_has_one_entry_an_instance():
    assert INFO.irrep_seg.tolist() == [0, 1, 2, 5]
    assert INFO.irrep_index.tolist() == [0, 1, 2, 2, 2]
    assert INFO.num_irreps == 3
    assert INFO.to(torch.float32).irrep_index.dtype == torch.int64
    assert INFO.to(torch.float32).rdims.dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
class TestWorkedValues:
    info = o3.irreps_info("0e+1o")

    def test_tensor_dot(self, backend):
        x, y = column(1, 2, 3, 4), column(5, 6, 7, 8)
        same(o3.tensor_dot_uu(x, y, self.info, backend=backend), (5, 65 / math.sqrt(3)))
        same(o3.tensor_dot_uu(x, y, self.info, scaled=False, backend=backend), (5, 65))

    def test_gating(self, backend):
        z = o3.gating(column(1, 2, 3, 4), column(10, 100), self.info, backend=backend)
        same(z, (10, 200, 300, 400))

    def test_linear(self, backend):
        weight = torch.tensor([[[1.0, 2]], [[3, 4]]], dtype=torch.float64)
        z = o3.irrep_wise_linear(column(1, 2, 3, 4), weight, self.info, backend=backend)
        same(z[..., :1], (1, 6, 9, 12))
        same(z[..., 1:], (2, 8, 12, 16))
        own = weight.expand(1, -1, -1, -1)
        z = o3.irrep_wise_linear(column(1, 2, 3, 4), own, self.info, backend=backend)
        same(z[..., :1], (1, 6, 9, 12))


def rotation(seed):
    q, _ = torch.linalg.qr(
        randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    )
    one = torch.ones(1, 1, dtype=torch.float64)
    return torch.block_diag(one, one, q)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equivariance(backend):
    turn = rotation(0)
    x, y = randn(4, 5, 3, dtype=torch.float64), randn(4, 5, 3, dtype=torch.float64)
    gates, weight = randn(4, 3, 3, dtype=torch.float64), randn(3, 3, 2, dtype=torch.float64)

    def agree(layer, *fixed, invariant=False):
        before, after = layer(x, *fixed), layer(turn @ x, *fixed)
        expected = before if invariant else turn @ before
        size = layer(x.abs(), *(f.abs() for f in fixed))
        size = size if invariant else turn.abs() @ size
        assert_within_bound(after, expected, size, terms=9, stored=3)

    agree(lambda a, g: o3.gating(a, g, INFO, backend=backend), gates)
    agree(lambda a, w: o3.irrep_wise_linear(a, w, INFO, backend=backend), weight)
    before = o3.tensor_dot_uu(x, y, INFO, backend=backend)
    after = o3.tensor_dot_uu(turn @ x, turn @ y, INFO, backend=backend)
    size = o3.tensor_dot_uu(turn.abs() @ x.abs(), turn.abs() @ y.abs(), INFO, backend=backend)
    assert_within_bound(after, before, size, terms=9, stored=3)


def named(case):
    return case.name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SUITE.cases[::SHARE], ids=named)
def test_values_and_derivatives(case, backend):
    for dtype in DTYPES[:1] if INTERPRETED else DTYPES:
        check_values(case, Setting(dtype=dtype, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SUITE.full[::SHARE], ids=named)
@pytest.mark.parametrize("check", BODY_CHECKS[1:])
def test_promises(check, case, backend):
    check(case, Setting(backend=backend))


@pytest.mark.skipif(INTERPRETED, reason="the doors are checked without TRITON_INTERPRET")
@pytest.mark.parametrize("case", SUITE.doors, ids=named)
@pytest.mark.parametrize("check", [check_compile, check_export])
def test_doors(check, case):
    check(case)


@pytest.mark.skipif(INTERPRETED, reason="thousands of calls; the oracle's derivatives are checked")
@pytest.mark.parametrize("case", SUITE.small, ids=named)
def test_numerical_gradients(case):
    check_numerical(case)


def test_errors():
    x = torch.ones(2, 5, 3)
    with pytest.raises(ShapeError, match=r"input1 is \(2, 4, 3\) but there are 5 components"):
        o3.tensor_dot_uu(x[:, :4], x, INFO)
    with pytest.raises(ShapeError, match=r"gates is \(2, 2, 3\) but there are 3 irreps"):
        o3.gating(x, torch.ones(2, 2, 3), INFO)
    with pytest.raises(ShapeError, match=r"weight is \(2, 3, 3\) but there are 3 irreps"):
        o3.irrep_wise_linear(x, torch.ones(2, 3, 3), INFO)
    with pytest.raises(ShapeError, match=r"gates is \(3, 4\) .* it must be \(N, 3, 3\)"):
        o3.gating(x, torch.ones(3, 4), INFO)
    with pytest.raises(ShapeError, match=r"weight is \(3, 4, 2\) .* it must be \(N, 3, 3, Cout\)"):
        o3.irrep_wise_linear(x, torch.ones(3, 4, 2), INFO)
    with pytest.raises(ShapeError, match=r"input is \(5,\)"):
        o3.gating(x[0, :, 0], x, INFO)
    with pytest.raises(DTypeError, match="input is a list"):
        o3.gating([1.0], x, INFO)
    with pytest.raises(DTypeError, match="irreps_info is a str"):
        o3.gating(x, x, "0e")
