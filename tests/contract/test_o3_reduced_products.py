"""ReducedTensorProducts: e3nn's basis and state, equivariance, dtypes, errors.

Its numbers: test_o3_against_e3nn_names.  Seen red with: irreps sorted after the last factor only,
a symmetry without its sign, a table that keeps the rounding of float32, a checkpoint of another
basis that is taken.
"""

import copy
import pickle

import e3nn.o3
import pytest
import torch

from torchweft import o3
from torchweft.errors import BackendError, DTypeError, ShapeError
from torchweft.testing import assert_o3_equivariant, assert_within_bound
from torchweft.testing.contract import assert_same_bits

DOUBLE = torch.float64
FORMULA, IRREPS = "ijk=jik=ikj", "0e+1o+2e"


def product():
    return o3.ReducedTensorProducts(FORMULA, i=IRREPS)


def test_irreps():
    assert o3.ReducedTensorProducts("ij=-ji", i="1o").irreps_out == "1e"
    assert (
        o3.ReducedTensorProducts("ijk=-jik=-ikj=-kji", i="1o", filter_ir_out="1o").irreps_out == ""
    )
    assert o3.ReducedTensorProducts("ij=-ij", i="1o", j="1o")(*torch.randn(2, 4, 3)).shape == (4, 0)
    assert o3.ReducedTensorProducts("ij", i="1o", j="").irreps_out == ""
    found = o3.ReducedTensorProducts("ij", i=e3nn.o3.Irreps("1o"), j="1o")
    assert [type(irreps) for irreps in found.irreps_in] == [o3.Irreps] * 2
    assert repr(found) == "ReducedTensorProducts(1x1o x 1x1o -> 1x0e+1x1e+1x2e)"


def test_symmetries_and_equivariance():
    made = product().double()
    x, y, z = torch.randn(3, 4, 9, dtype=DOUBLE)
    basis = made.change_of_basis
    size = torch.einsum("kabc,za,zb,zc->zk", *(a.abs() for a in (basis, x, y, z)))
    for other in ((y, x, z), (x, z, y), (z, y, x)):
        assert_within_bound(made(*other), made(x, y, z), size, 9**3)
    assert_o3_equivariant(made, [x, y, z], [IRREPS] * 3, made.irreps_out)
    gram = torch.einsum("kabc,labc->kl", basis, basis)
    assert_within_bound(gram, torch.eye(len(gram), dtype=DOUBLE), torch.ones_like(gram), 9**3)


def test_leading_dimensions_broadcast():
    made = o3.ReducedTensorProducts("ij=ji", i="1o")
    assert made(torch.randn(2, 1, 3), torch.randn(5, 3)).shape == (2, 5, 6)
    assert made(torch.randn(0, 3), torch.randn(0, 3)).shape == (0, 6)


def test_tables_are_exact_in_any_dtype():
    made = product()
    exact = copy.deepcopy(made).double().change_of_basis
    assert_same_bits(made.double().float().change_of_basis, exact.float(), "rounded once")
    assert_same_bits(made.double().change_of_basis, exact, "float64")
    assert made.half().change_of_basis.dtype == torch.float32
    xs = torch.randn(3, 4, 9).half()
    assert made(*xs).dtype == torch.float16
    exact[:] = 0
    assert made.double().change_of_basis.any(), "the tables are kept apart"


def test_states():
    ours, theirs = product(), e3nn.o3.ReducedTensorProducts(FORMULA, i=IRREPS)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    missing, unexpected = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not unexpected
    assert all(key.startswith("main.") for key in missing), "tables of e3nn's code"
    assert_same_bits(ours.double().change_of_basis, product().double().change_of_basis, "exact")
    other = theirs.state_dict()
    other["change_of_basis"] = other["change_of_basis"].flip(0)
    with pytest.raises(RuntimeError, match="change_of_basis of the checkpoint is another table"):
        ours.load_state_dict(other)


def test_copied_and_compiled():
    made = product()
    xs = torch.randn(3, 4, 9)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert_same_bits(other(*xs), made(*xs), "copied")
        assert_same_bits(
            other.double().change_of_basis, product().double().change_of_basis, "exact"
        )
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(*xs), made(*xs), "compiled")
    with torch.autocast("cpu", torch.bfloat16):
        assert made(*xs).dtype == torch.bfloat16


def test_errors():
    for formula, term in (
        ("ij=jk", "jk"),
        ("ii", "ii"),
        ("-ij=ji", "-ij"),
        ("ij=+ji", r"\+ji"),
        ("", ""),
    ):
        with pytest.raises(
            ShapeError, match=f"does not read at '{term}': terms are the same letters"
        ):
            o3.ReducedTensorProducts(formula, i="1o")
    with pytest.raises(
        ShapeError, match="irreps of k are given, but the formula has the indices ij"
    ):
        o3.ReducedTensorProducts("ij=ji", i="1o", k="1o")
    with pytest.raises(ShapeError, match=r"index i has the irreps 1x0e and 1x1o: .*same"):
        o3.ReducedTensorProducts("ij=ji", i="1o", j="0e")
    with pytest.raises(ShapeError, match="index j has the irreps none"):
        o3.ReducedTensorProducts("ij", i="1o")
    made = o3.ReducedTensorProducts("ij=ji", i="1o")
    with pytest.raises(
        DTypeError, match=r"1 tensors were given to .*: it takes one for each index, 2"
    ):
        made(torch.randn(3))
    with pytest.raises(ShapeError, match=r"x1 is \(4,\) but ReducedTensorProducts takes 1x1o"):
        made(torch.randn(3), torch.randn(4))
    with pytest.raises(DTypeError, match=r"x is torch.float64 but .* has tables in torch.float32"):
        made(torch.randn(3).double(), torch.randn(3).double())
    with pytest.raises(BackendError, match="has no kernels"):
        o3.ReducedTensorProducts("ij", i="1o", j="1o", backend="triton")
