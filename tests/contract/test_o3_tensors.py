"""SphericalTensor and CartesianTensor: irreps, peaks, surfaces, inverses, errors.

Numbers: test_o3_against_e3nn_names.  Seen red with: a second grid of peaks that is not turned.
"""

import copy
import pickle

import e3nn.io
import pytest
import torch

from tests.conftest import INTERPRETED
from torchweft import o3
from torchweft.errors import ShapeError
from torchweft.testing import assert_within_bound
from torchweft.testing.contract import assert_same_bits

if INTERPRETED:
    pytest.skip("harmonics have contracts of their own", allow_module_level=True)

DOUBLE = torch.float64


@pytest.mark.parametrize("p_val", [1, -1])
@pytest.mark.parametrize("p_arg", [1, -1])
def test_irreps(p_val, p_arg):
    ours, theirs = (lib.SphericalTensor(3, p_val, p_arg) for lib in (o3, e3nn.io))
    assert ours == theirs
    assert isinstance(ours, o3.Irreps)
    for formula in ("ij=ji", "ij=-ji", "ijk=jik=ikj", "ijkl=jikl=ijlk=klij"):
        assert o3.CartesianTensor(formula) == e3nn.io.CartesianTensor(formula)


@pytest.mark.parametrize("irreps", [o3.SphericalTensor(3, 1, -1), o3.CartesianTensor("ij=-ji")])
def test_copied(irreps):
    for other in (copy.deepcopy(irreps), pickle.loads(pickle.dumps(irreps))):
        assert type(other) is type(irreps)
        assert other == irreps
        assert getattr(other, "indices", None) == getattr(irreps, "indices", None)


def test_odd_values():
    """e3nn has no harmonics for them."""
    signal, point = torch.randn(16), torch.randn(3)
    even, odd = (o3.SphericalTensor(3, p_val, -1) for p_val in (1, -1))
    assert_same_bits(odd.signal_xyz(signal, point), even.signal_xyz(signal, point), "odd")


def test_peaks_are_e3nns():
    irreps, theirs = o3.SphericalTensor(4, 1, -1), e3nn.io.SphericalTensor(4, 1, -1)
    at = torch.tensor([[4.0, 0, 4], [0, 5, 0]])  # the second at a pole of the first grid
    x = irreps.with_peaks_at(at)
    points, values = irreps.find_peaks(x)
    expected, their_values = theirs.find_peaks(x)
    order, their_order = (torch.argsort(v) for v in (values, their_values))
    size = expected.norm(dim=1, keepdim=True).expand_as(expected)
    assert_within_bound(points[order], expected[their_order], size, 25, stored=25)
    assert values.max() > 4.9
    nothing, none = irreps.find_peaks(torch.zeros(25))
    assert (nothing.shape, none.shape) == ((0, 3), (0,))


def test_no_peaks_and_no_samples():
    irreps = o3.SphericalTensor(2, 1, 1)
    assert_same_bits(irreps.with_peaks_at(torch.zeros(0, 3)), torch.zeros(9), "no vectors")
    assert_same_bits(irreps.with_peaks_at(torch.zeros(2, 3)), torch.zeros(9), "of length 0")
    assert irreps.sum_of_diracs(torch.empty(1, 0, 2, 3), torch.empty(2, 0, 1)).shape == (2, 0, 9)
    assert irreps.from_samples_on_s2(torch.empty(2, 0, 3), torch.empty(2, 0)).shape == (2, 9)


@pytest.mark.parametrize("relu", [False, True])
def test_surfaces(relu):
    irreps, theirs = o3.SphericalTensor(3, 1, -1), e3nn.io.SphericalTensor(3, 1, -1)
    x = torch.randn(2, 16)
    centers = torch.randn(2, 3)
    found, expected = (s.plotly_surface(x, centers, 10, relu=relu) for s in (irreps, theirs))
    for own, other in zip(found, expected, strict=True):
        for name, numbers in other.items():
            given = torch.tensor(numbers)
            assert_within_bound(
                torch.tensor(own[name]), given, given.abs().max().expand_as(given), 16, stored=16
            )
    assert len(irreps.plotly_surface(x[0], res=10)) == 1


def test_cartesian_tensors_there_and_back():
    tensor = o3.CartesianTensor("ij=ji")
    t = torch.randn(5, 3, 3, dtype=DOUBLE)
    found = tensor.to_cartesian(tensor.from_cartesian(t))
    size = (t.abs() + t.mT.abs()).sum((1, 2), keepdim=True).expand_as(t)
    assert_within_bound(found, (t + t.mT) / 2, size, 9, stored=9)
    product = tensor.reduced_tensor_products(t)
    assert product.change_of_basis.dtype == DOUBLE
    assert_same_bits(tensor.from_cartesian(t, product), tensor.from_cartesian(t), "one product")
    x, y = torch.randn(2, 5, 3, dtype=DOUBLE)
    outer = torch.einsum("zi,zj->zij", x, y)
    bound = outer.abs().sum((1, 2)).unsqueeze(1).expand(5, 6)
    assert_within_bound(tensor.from_vectors(x, y), tensor.from_cartesian(outer), bound, 9, stored=9)


def test_errors():
    irreps = o3.SphericalTensor(2, 1, -1)
    with pytest.raises(ShapeError, match=r"vectors is \(2, 2, 3\) .* vectors must be \(N, 3\)"):
        irreps.with_peaks_at(torch.randn(2, 2, 3))
    with pytest.raises(ShapeError, match=r"the irreps are 1x0o.*p_val 1, since lengths are even"):
        o3.SphericalTensor(2, -1, -1).with_peaks_at(torch.randn(2, 3))
    with pytest.raises(ShapeError, match="no signal of degrees to 2 has these 2 values"):
        irreps.with_peaks_at(torch.eye(3)[[0, 0]], torch.tensor([1.0, 2.0]))
    with pytest.raises(ShapeError, match=r"signal is \(8,\) but SphericalTensor takes"):
        irreps.norms(torch.randn(8))
    with pytest.raises(ShapeError, match=r"data is \(3,\) but 'ij=ji' has 2 indices"):
        o3.CartesianTensor("ij=ji").from_cartesian(torch.randn(3))
    with pytest.raises(ShapeError, match=r"data is \(9,\) but CartesianTensor takes 1x0e\+1x2e"):
        o3.CartesianTensor("ij=ji").to_cartesian(torch.randn(9))
