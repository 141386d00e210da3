"""Signals on grids of the sphere and of rotations: states, tables in any dtype, inverses, errors.

Numbers: test_o3_against_e3nn_names.  Seen red with: tables of float32 cast to float64,
weights of another quadrature, tables of a checkpoint taken, those of other arguments not refused.
"""

import copy
import pickle

import e3nn.nn
import e3nn.o3
import pytest
import torch

from tests.conftest import INTERPRETED
from torchweft import o3
from torchweft.errors import BackendError, DTypeError, ShapeError
from torchweft.testing import assert_within_bound
from torchweft.testing.contract import assert_same_bits

if INTERPRETED:
    pytest.skip("harmonics have contracts of their own", allow_module_level=True)

DOUBLE = torch.float64
TANH = torch.tanh
LAYERS = {
    "ToS2Grid": (lambda lib: lib.ToS2Grid(3, (8, 9)), (4, 16)),
    "FromS2Grid": (lambda lib: lib.FromS2Grid((8, 9), 3), (4, 8, 9)),
    "S2Activation": (lambda lib: lib.S2Activation("0e+1o+2e", TANH, 10), (4, 9)),
    "SO3Activation": (lambda lib: lib.SO3Activation(1, 2, TANH, 3), (4, 10)),
}


class Theirs:
    ToS2Grid, FromS2Grid = e3nn.o3.ToS2Grid, e3nn.o3.FromS2Grid
    S2Activation, SO3Activation = e3nn.nn.S2Activation, e3nn.nn.SO3Activation


@pytest.mark.parametrize("name", LAYERS)
def test_states(name):
    build, _ = LAYERS[name]
    ours, theirs, exact = build(o3), build(Theirs), build(o3).double().state_dict()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    wide = build(o3).double()
    wide.load_state_dict(theirs.state_dict())
    for layer in (ours.double(), wide):
        for key, table in layer.state_dict().items():
            assert_same_bits(table, exact[key], f"{key}, of a checkpoint in float32")


@pytest.mark.parametrize("name", LAYERS)
def test_tables_are_exact_in_any_dtype(name):
    build, shape = LAYERS[name]
    layer = build(o3)
    x = torch.randn(shape, dtype=DOUBLE)
    wide = copy.deepcopy(layer).double()
    assert_same_bits(wide.float()(x.float()), layer(x.float()), "float32")
    assert_same_bits(copy.deepcopy(layer).half().double()(x), build(o3).double()(x), "float64")
    half = copy.deepcopy(layer).bfloat16()
    assert all(table.dtype == torch.float32 for table in half.buffers())
    assert half(x.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(DTypeError, match=r"x is torch.float64 but .* has tables in torch.float32"):
        layer(x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", LAYERS)
def test_tables_follow_to_a_gpu(name):
    build, shape = LAYERS[name]
    layer, x = build(o3).double(), torch.randn(shape, dtype=DOUBLE)
    there = copy.deepcopy(layer).cuda()
    for (key, table), own in zip(there.state_dict().items(), layer.buffers(), strict=True):
        assert_same_bits(table.cpu(), own, key)
    exact = layer(x)
    size = exact.abs().max().expand_as(exact)
    terms = sum(table.numel() for table in layer.buffers())
    assert_within_bound(there(x.cuda()).cpu(), exact, size, terms)


@pytest.mark.parametrize("name", LAYERS)
def test_copied_and_compiled(name):
    build, shape = LAYERS[name]
    layer, x = build(o3), torch.randn(shape)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_bits(other(x), layer(x), "copied")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x), layer(x), "compiled")
    assert layer(x[:0]).shape[0] == 0
    assert_same_bits(layer(x[None])[0], layer(x), "leading dimensions")
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["component", "norm", "integral"])
@pytest.mark.parametrize("resolution", [None, 20, (20, 30)])
def test_there_and_back(kind, resolution):
    there = o3.ToS2Grid(6, resolution, kind, dtype=DOUBLE)
    back = o3.FromS2Grid(resolution, 6, kind, dtype=DOUBLE)
    x = torch.randn(5, 49, dtype=DOUBLE)
    size = _magnitudes(there, back, x)
    assert_within_bound(back(there(x)), x, size, 49 * there.res_beta * there.res_alpha)


def _magnitudes(there, back, x):
    """Of the sums of absolute values."""
    there, back = copy.deepcopy(there), copy.deepcopy(back)
    for layer in (there, back):
        for name in ("sha", "shb"):
            setattr(layer, name, getattr(layer, name).abs())
    return back(there(x.abs()))


def test_rotations_there_and_back():
    grid = o3.SO3Grid(2, 4).double()
    x = torch.randn(5, 35, dtype=DOUBLE)
    size = copy.deepcopy(grid)
    size.D = size.D.abs()
    bound = size.from_grid(size.to_grid(x.abs()))
    assert_within_bound(grid.from_grid(grid.to_grid(x)), x, bound, grid.D.numel())


def test_points():
    layer = o3.ToS2Grid(2, (6, 7), dtype=DOUBLE)
    assert layer.grid.shape == (6, 7, 3)
    assert_within_bound(layer.grid.norm(dim=-1), torch.ones(6, 7).double(), torch.ones(6, 7), 9)
    y = o3.spherical_harmonics(range(3), layer.grid, True)
    flat = o3.ToS2Grid(2, (6, 7), "integral", dtype=DOUBLE)
    x = torch.randn(9, dtype=DOUBLE)
    assert_within_bound(flat(x), y @ x, y.abs() @ x.abs(), 9, stored=9)
    assert repr(layer) == "ToS2Grid(lmax=2 res=6x7 (beta x alpha))"
    assert repr(o3.SO3Grid(1, 2)) == "SO3Grid(lmax=1 res=8x4x8 (alpha x beta x gamma))"


def test_even_functions_change_parities():
    assert o3.S2Activation("0o+1e+2o", torch.cos, 10).irreps_out == "0e+1o+2e"
    assert o3.S2Activation("0o+1e+2o", torch.tanh, 10).irreps_out == "0o+1e+2o"
    assert o3.S2Activation("0o+1o", torch.cos, 10, lmax_out=0).irreps_out == "0e"


def test_errors_of_resolutions():
    with pytest.raises(ShapeError, match="lmax and res are both None: one of them"):
        o3.ToS2Grid()
    with pytest.raises(ShapeError, match=r"in beta is 9 and lmax 3: it must be even.*res=8"):
        o3.ToS2Grid(3, 9)
    with pytest.raises(ShapeError, match="in beta is 6 and lmax 3"):
        o3.FromS2Grid(6, 3)
    with pytest.raises(ShapeError, match="normalization has 2 factors but lmax is 3"):
        o3.FromS2Grid(8, 3, torch.ones(2))
    with pytest.raises(ShapeError, match="normalization is 'other': it must be one of component"):
        o3.ToS2Grid(3, 8, "other")
    with pytest.raises(ShapeError, match="normalization is 'norm': it must be 'component'"):
        o3.SO3Grid(1, 2, normalization="norm")
    with pytest.raises(ShapeError, match="resolution is 0 and aspect_ratio 2: there must be one"):
        o3.SO3Grid(1, 0)
    with pytest.raises(BackendError, match="has no kernels"):
        o3.ToS2Grid(3, 8, backend="numba")


def test_errors_of_calls():
    with pytest.raises(ShapeError, match=r"x is \(15,\): it must be \(\.\.\., 16\)"):
        o3.ToS2Grid(3, 8)(torch.randn(15))
    with pytest.raises(ShapeError, match=r"x is \(7, 9\) but the grid is 8 by 9"):
        o3.FromS2Grid((8, 9), 3)(torch.randn(7, 9))
    with pytest.raises(ShapeError, match=r"features is \(9, 9\): it must be \(\.\.\., 10\)"):
        o3.SO3Grid(1, 2).to_grid(torch.randn(9, 9))
    with pytest.raises(ShapeError, match=r"features is \(4, 4, 8\) but the grid is \(8, 4, 8\)"):
        o3.SO3Grid(1, 2).from_grid(torch.randn(4, 4, 8))
    with pytest.raises(ShapeError, match=r"features is \(8,\) but S2Activation takes"):
        o3.S2Activation("0e+1o+2e", TANH, 10)(torch.randn(8))


def test_errors_of_irreps():
    for irreps in ("", "2x0e", "0e+2e", "0e+1o+2o", "1o+0e"):
        with pytest.raises(
            ShapeError, match=r"irreps is .*: a signal on the sphere has each degree"
        ):
            o3.S2Activation(irreps, TANH, 10)
    with pytest.raises(ShapeError, match=r"silu was given for 1x0o.*must be even or odd"):
        o3.S2Activation("0o+1e", torch.nn.functional.silu, 10)


def test_another_checkpoint_is_refused():
    layer = o3.ToS2Grid(3, (8, 9))
    with pytest.raises(RuntimeError, match="shb of the checkpoint is another table than ToS2Grid"):
        layer.load_state_dict(e3nn.o3.ToS2Grid(3, (8, 9), "norm").state_dict())
    with pytest.raises(RuntimeError, match="size mismatch for shb"):
        layer.load_state_dict(o3.ToS2Grid(3, (10, 9)).state_dict())
