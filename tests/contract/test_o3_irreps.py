"""Irrep and Irreps: what they read and print, order, arithmetic, matrices; equal to e3nn's.

Seen red with: "1o" read as even; p and inv of sort exchanged; odd before even turned round; the
parity left out of D_from_matrix; copies of a block laid out component first.
"""

import copy
import itertools
import pickle
import random

import pytest
import torch

from torchweft import o3
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.irreps.irreps import MulIr
from torchweft.testing import assert_within_bound

Irrep, Irreps = o3.Irrep, o3.Irreps
FLOAT = torch.float64


def close(found, expected, size, terms, stored=0):
    assert_within_bound(found, expected, size, terms, stored=stored)


def test_irreps_read_and_write():
    irreps = Irreps("2x0e + 1o+3x2e")
    assert str(irreps) == repr(irreps) == "2x0e+1x1o+3x2e"
    assert (irreps.dim, irreps.num_irreps, irreps.lmax) == (20, 6, 2)
    assert irreps.ls == [0, 0, 1, 2, 2, 2]
    assert irreps.slices() == [slice(0, 2), slice(2, 5), slice(5, 20)]
    assert irreps == "2x0e+1x1o+3x2e"
    assert irreps == Irreps([(2, "0e"), (1, (1, -1)), (3, "2e")])
    assert irreps == Irreps(["0e", *irreps][1:])
    assert [ir.p for _, ir in irreps] == [1, -1, 1]
    assert Irreps("1y+2y") == "1o+2e"
    assert Irreps(Irrep(1, -1)) == Irreps(["1o"]) == Irreps(MulIr(1, Irrep("1o"))) == "1o"
    assert str(Irreps("0x1e + 16 x 10o")) == "0x1e+16x10o"
    assert Irreps() == Irreps("") == Irreps([]) == " "
    assert (Irreps().dim, Irreps().ls, Irreps().slices(), str(Irreps())) == (0, [], [], "")


def test_irreps_are_values():
    irreps = Irreps("2x0e+1o")
    assert len({irreps, Irreps([(2, "0e"), (1, "1o")]), Irreps("1o+2x0e")}) == 2
    assert pickle.loads(pickle.dumps(irreps)) == copy.deepcopy(irreps) == irreps
    assert pickle.loads(pickle.dumps(Irrep("3o"))) == Irrep(3, -1)
    assert irreps != 3
    assert irreps != "cartesian"
    with pytest.raises(AttributeError):
        irreps.name = "x"


def test_irrep():
    ir = Irrep("2o")
    assert (ir.l, ir.p, ir.dim, str(ir), repr(ir)) == (2, -1, 5, "2o", "2o")
    assert ir == Irrep(2, -1) == Irrep(ir) == Irrep((2, -1)) == Irrep(" 2o ")
    assert (Irrep("1y"), Irrep("2y")) == (Irrep("1o"), Irrep("2e"))
    degree, parity = ir
    assert (degree, parity) == (2, -1)
    assert Irrep("0e").is_scalar()
    assert not Irrep("0o").is_scalar()
    assert [str(ir) for ir in Irrep.iterator(2)] == ["0e", "0o", "1o", "1e", "2e", "2o"]
    assert [str(ir) for ir in itertools.islice(Irrep.iterator(), 8, 9)] == ["4e"]
    assert Irrep("3e") > Irrep("3o") > Irrep("2e")


def test_arithmetic():
    assert [str(ir) for ir in Irrep("1o") * Irrep("2e")] == ["1o", "2o", "3o"]
    assert [str(ir) for ir in Irrep("3o") * "1o"] == ["2e", "3e", "4e"]
    assert 3 * Irrep("6o") == "3x6o"
    assert Irrep("4o") + Irrep("7e") == "4o+7e"
    assert Irreps("2x2e") + "1o" == "2x2e+1o"
    assert 2 * Irreps("2x2e+1o") == Irreps("2x2e+1o") * 2 == "2x2e+1o+2x2e+1o"
    with pytest.raises(TypeError):
        Irreps("1o") * Irreps("1o")


def test_parts():
    irreps = Irreps("16x1e + 3e + 2e + 5o + 2x1e")
    assert irreps[0] == (16, Irrep("1e"))
    assert (irreps[-1].mul, irreps[-1].ir, irreps[-1].dim) == (2, Irrep("1e"), 6)
    assert irreps[2:4] == "2e+5o"
    assert "2e" in irreps
    assert Irrep("2o") not in irreps
    assert irreps.count("1e") == 18
    assert irreps.slice_by_mul[14:18] == "2x1e+3e+2e"
    assert Irreps("4x0e+0x1e+4x2e").slice_by_mul[1:4] == "3x0e+0x1e"
    assert Irreps.spherical_harmonics(3) == "0e+1o+2e+3o"
    assert Irreps.spherical_harmonics(2, p=1) == "0e+1e+2e"
    assert Irreps("3x0e").is_scalar()
    assert not Irreps("0e+0o").is_scalar()


def test_order():
    irreps = Irreps("2o + 1e + 0e + 1e")
    assert irreps.sort() == ("0e+1e+1e+2o", (3, 1, 0, 2), (2, 1, 3, 0))
    assert Irreps("1e+1o+0e").sort().irreps == "0e+1o+1e"
    assert Irreps("1e + 0x0e + 1e + 0e + 1e").simplify() == "2x1e+0e+1e"
    assert Irreps("1e + 0e + 1e + 0x2e").regroup() == "0e+2x1e"
    assert Irreps("4x0e + 0x1o").remove_zero_multiplicities() == "4x0e"


def test_filter():
    irreps = Irreps("1e+2e+0e")
    assert irreps.filter() == irreps
    assert irreps.filter(keep=["0e", Irrep("1e")]) == "1e+0e"
    assert irreps.filter(keep="2e+2x1e") == irreps.filter(keep=Irreps("1e+2e")) == "1e+2e"
    assert irreps.filter(drop="2e+2x1e") == irreps.filter(lmax=0) == "0e"
    assert irreps.filter(keep=lambda item: item.ir.l == 1) == irreps.filter(lmax=1)[:1] == "1e"
    with pytest.raises(ShapeError, match=r"keep is '1e', drop None, lmax 1: only one may be"):
        irreps.filter("1e", lmax=1)


@pytest.mark.parametrize("text", ["2x", "1x1", "0e 1o", "axb", "-1x0e", "0e++1o", "1x-1e"])
def test_unreadable_irreps(text):
    with pytest.raises(ShapeError, match=r"do not read at.*Write, for example"):
        Irreps(text)


@pytest.mark.parametrize(
    "pair",
    [(2, "3x1o"), (2, "0e+1o"), (1, (1, 5)), (-1, "0e"), "0e+1o", (1,), (32, 1), (1, (-1, 1))],
)
def test_unreadable_pairs(pair):
    with pytest.raises(ShapeError, match=r"does not read as copies of an irrep.*Write"):
        Irreps([pair])


@pytest.mark.parametrize("given", [("bla",), ("2x1o",), (1,), (1, 2), ("-1e",), ((1, 2, 3),)])
def test_unreadable_irrep(given):
    with pytest.raises(ShapeError, match=r"does not read as an irrep.*Write, for example"):
        Irrep(*given)


def test_irreps_of_the_wrong_type():
    with pytest.raises(DTypeError, match="irreps is a int: it must be text or pairs"):
        Irreps(3)
    with pytest.raises(DTypeError, match=r"l is 1\.5: a degree must be an integer"):
        Irrep(1.5, 1)
    with pytest.raises(ShapeError, match="l is -1: a degree must be 0 or more"):
        Irrep(-1, 1)


def test_other_errors():
    with pytest.raises(ShapeError, match="empty"):
        _ = Irreps("0x1o").lmax
    with pytest.raises(ShapeError, match=r"size is \(3,\): one of its entries must be -1"):
        Irreps("1o").randn(3)
    with pytest.raises(ShapeError, match="normalization is 'integral': it must be one of"):
        Irreps("1o").randn(-1, normalization="integral")
    with pytest.raises(ShapeError, match="the step of"):
        Irreps("4x1o").slice_by_mul[::2]
    with pytest.raises(ShapeError, match=r"R is \(3,\): it must be \(\.\.\., 3, 3\)"):
        Irreps("1o").D_from_matrix(torch.ones(3))


def test_random_numbers():
    irreps = Irreps("5x0e+10x1o")
    x = irreps.randn(5, -1, 4, normalization="norm", requires_grad=True, dtype=FLOAT)
    assert x.shape == (5, 35, 4)
    assert x.is_leaf
    assert x.requires_grad
    length = x[:, 5:].unflatten(1, (10, 3)).square().sum(2)
    close(length, torch.ones_like(length), torch.ones_like(length), terms=3, stored=2)
    assert irreps.randn(2, -1, dtype=FLOAT).shape == (2, 35)
    assert Irreps().randn(2, -1, normalization="norm").shape == (2, 0)


def orthogonal(*shape, seed=0):
    """Rotations and, at odd places, reflections."""
    torch.manual_seed(seed)
    turn = o3.rand_matrix(*shape, dtype=FLOAT)
    signs = 1 - 2 * (torch.arange(turn[..., 0, 0].numel()) % 2).reshape(shape)
    return signs[..., None, None] * turn


def test_matrices_of_irreps():
    irreps = Irreps("2x0o+2x1o+0x5e+1e+2e")
    turn = orthogonal(4)
    matrix = irreps.D_from_matrix(turn)
    sign = torch.linalg.det(turn)[:, None, None].round()
    blocks = [sign, sign, turn, turn, sign * turn, Irrep("2e").D_from_matrix(turn)]
    expected = torch.stack([torch.block_diag(*(b[i] for b in blocks)) for i in range(4)])
    close(matrix, expected, expected.abs(), terms=1)
    assert Irreps().D_from_matrix(turn).shape == (4, 0, 0)
    assert irreps.D_from_matrix(turn[0]).shape == (irreps.dim, irreps.dim)
    assert irreps.D_from_matrix(turn.half()).dtype == torch.float16


@pytest.mark.parametrize("ir", list(Irrep.iterator(11)), ids=str)
def test_matrices_represent_the_group(ir):
    first, second = orthogonal(6), orthogonal(6, seed=1).flip(0)
    one, two, both = map(ir.D_from_matrix, (first, second, first @ second))
    close(both, one @ two, one.abs() @ two.abs(), terms=ir.dim, stored=2 * ir.l)
    eye = torch.eye(ir.dim, dtype=FLOAT).expand_as(one)
    close(one @ one.mT, eye, one.abs() @ one.mT.abs(), terms=ir.dim, stored=2 * ir.l)


def test_matrices_from_other_forms():
    irreps = Irreps("0o+1o+3e+4o")
    torch.manual_seed(0)
    angles = o3.rand_angles(5, dtype=FLOAT)
    turn = o3.angles_to_matrix(*angles)
    k = torch.tensor([0, 1, 2, 3, 0])
    signed = (1 - 2 * (k % 2))[:, None, None] * turn
    exact = irreps.D_from_matrix(turn)
    size = torch.ones_like(exact)
    for found, expected in (
        (irreps.D_from_angles(*angles), exact),
        (irreps.D_from_angles(*angles, k), irreps.D_from_matrix(signed)),
        (irreps.D_from_quaternion(o3.angles_to_quaternion(*angles)), exact),
        (
            irreps.D_from_quaternion(o3.angles_to_quaternion(*angles), k),
            irreps.D_from_matrix(signed),
        ),
        (irreps.D_from_axis_angle(*o3.angles_to_axis_angle(*angles)), exact),
    ):
        close(found, expected, size, terms=9, stored=8)


def test_equal_to_e3nn():
    from e3nn import o3 as theirs

    random.seed(0)
    for _ in range(100):
        items = [
            (random.randint(0, 4), (random.randint(0, 5), random.choice((1, -1))))
            for _ in range(random.randint(0, 6))
        ]
        a, b = Irreps(items), theirs.Irreps(items)
        assert repr(a) == repr(b)
        assert (a.dim, a.ls, a.slices()) == (b.dim, b.ls, b.slices())
        assert str(tuple(a.sort())) == str(tuple(b.sort()))
        assert str(a.regroup()) == str(b.regroup())
        for seed, kind in enumerate(("component", "norm")):
            drawn = [
                torch.manual_seed(seed) and c.randn(2, -1, 3, normalization=kind) for c in (a, b)
            ]
            torch.testing.assert_close(*drawn, rtol=0, atol=0, equal_nan=True)


class Layer(torch.nn.Module):
    """Reads its irreps inside the graph."""

    def __init__(self):
        super().__init__()
        self.irreps, self.ir = Irreps("4x0e+2x1o+2e"), Irrep("2e")

    def forward(self, x, R):
        total = x.sum() * (self.ir in self.irreps) + Irreps("2e+1o").sort().irreps.dim
        for (mul, ir), where in zip(self.irreps, self.irreps.slices(), strict=True):
            total = total + x[..., where].square().sum() * mul * ir.dim * (ir == self.ir)
        return total + (x @ self.irreps.D_from_matrix(R)).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compile_and_export(dtype):
    layer, x, turn = Layer(), torch.randn(3, 15, dtype=dtype), orthogonal(3).to(dtype)
    expected = layer(x, turn)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):  # the guards are asked too
        torch.testing.assert_close(compiled(x, turn), expected, rtol=0, atol=0)
    program = torch.export.export(layer, (x, turn)).module()
    torch.testing.assert_close(program(x, turn), expected, rtol=0, atol=0)
