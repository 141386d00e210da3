"""tensor_dot_uu, gating and irrep_wise_linear: worked values, oracles, equivariance, errors.

Seen red with: the scale left out, irrep_index shifted by one, Irreps reading "1o" as even.
"""

import math

import pytest
import torch

from tests.conftest import BACKENDS
from weft import o3
from weft.errors import DTypeError, ShapeError
from weft.testing import assert_within_bound

INFO = o3.irreps_info("2x0e+1o")
randn = torch.randn


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[None, :, None]


def same(found, expected):
    exact = column(*expected)
    assert_within_bound(found, exact, exact.abs(), torch.ones_like(exact))


def test_irreps_read_and_write():
    irreps = o3.Irreps("2x0e + 1o+3x2e")
    assert str(irreps) == "2x0e+1x1o+3x2e"
    assert (irreps.dim, irreps.num_irreps, irreps.lmax) == (20, 6, 2)
    assert irreps == "2x0e+1x1o+3x2e"
    assert irreps == o3.Irreps([(2, "0e"), (1, (1, -1)), (3, "2e")])
    assert [ir.p for _, ir in irreps] == [1, -1, 1]


@pytest.mark.parametrize("text", ["2x", "1x1", "0e 1o", "axb", "-1x0e", "0e++1o"])
def test_unreadable_irreps(text):
    with pytest.raises(ShapeError, match="do not read at.*Write, for example"):
        o3.Irreps(text)


def test_empty_irreps_have_no_lmax():
    with pytest.raises(ShapeError, match="empty"):
        _ = o3.Irreps("").lmax


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


def test_gradients():
    x, y = (randn(2, 5, 3, dtype=torch.float64).requires_grad_() for _ in range(2))
    gates = randn(2, 3, 3, dtype=torch.float64).requires_grad_()
    weight = randn(3, 3, 2, dtype=torch.float64).requires_grad_()
    for layer, inputs in (
        (o3.tensor_dot_uu, (x, y)),
        (o3.gating, (x, gates)),
        (o3.irrep_wise_linear, (x, weight)),
    ):
        backend = BACKENDS[0]
        call = lambda a, b, layer=layer: layer(a, b, INFO, backend=backend)  # noqa: E731
        assert torch.autograd.gradcheck(call, inputs)
        assert torch.autograd.gradgradcheck(call, inputs)


def test_errors():
    x = torch.ones(2, 5, 3)
    with pytest.raises(ShapeError, match=r"input1 is \(2, 4, 3\) but the irreps have 5 components"):
        o3.tensor_dot_uu(x[:, :4], x, INFO)
    with pytest.raises(ShapeError, match=r"gates is \(2, 2, 3\) but there are 3 irreps"):
        o3.gating(x, torch.ones(2, 2, 3), INFO)
    with pytest.raises(ShapeError, match=r"weight is \(2, 3, 3\) but there are 3 irreps"):
        o3.irrep_wise_linear(x, torch.ones(2, 3, 3), INFO)
    with pytest.raises(DTypeError, match="irreps_info is a str"):
        o3.gating(x, x, "0e")
