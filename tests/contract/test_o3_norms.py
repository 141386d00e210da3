"""Norms, norm layers and dropout: formulas, running statistics, zeros, layouts, errors.

Seen red with: eps outside the root, the mean of 0o taken off, running statistics of an empty batch.
"""

import copy
import functools
import pickle

import pytest
import torch

from torchweft import o3
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.irreps.irreps import join, split
from torchweft.testing import assert_as_accurate, assert_o3_equivariant, plain_error
from torchweft.testing.contract import assert_same_bits

DOUBLE = torch.float64
IRREPS = o3.Irreps("4x0e+3x1o+2x0o+5x2e")
LAYERS = {
    "Norm": o3.Norm,
    "squared": functools.partial(o3.Norm, squared=True),
    "NormActivation": lambda i, **o: o3.NormActivation(i, torch.sigmoid, bias=True, **o),
    "not normalized": lambda i, **o: o3.NormActivation(i, torch.tanh, normalize=False, **o),
    "BatchNorm": o3.BatchNorm,
    "instance": functools.partial(o3.BatchNorm, instance=True, normalization="norm"),
    "max": functools.partial(o3.BatchNorm, reduce="max", include_bias=False),
    "LayerNorm": o3.LayerNorm,
    "plain LayerNorm": functools.partial(o3.LayerNorm, affine=False, normalization="norm"),
}


def built(name, layout="mul_ir"):
    torch.manual_seed(0)
    layer = LAYERS[name](IRREPS, layout=layout)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def formula(layer, x):
    """Block by block, for one x (batch, D) of mul_ir."""
    found, first, scalar = [], 0, 0
    norms = isinstance(layer, o3.Norm | o3.NormActivation)
    for block, (mul, ir) in zip(split(x, IRREPS, "mul_ir"), IRREPS, strict=True):
        here = slice(first, first + mul)
        size = block.square().sum(-1)
        if isinstance(layer, o3.Norm):
            found.append((size if layer.squared else size.sqrt())[..., None])
        elif isinstance(layer, o3.NormActivation):
            size = size.sqrt()
            arg = size + layer.biases[here] if layer.bias else size
            scale = layer.scalar_nonlinearity(arg) / (size if layer.normalize else 1)
            found.append(block * scale[..., None])
        else:
            dim = -2 if isinstance(layer, o3.LayerNorm) else 0
            if getattr(layer, "instance", False):
                dim = ()
            if ir == o3.Irrep("0e"):
                block = block - (block if dim == () else block.mean(dim, keepdim=True))
            size = block.square().sum(-1) / (1 if layer.normalization == "norm" else ir.dim)
            if dim != ():
                size = size.mean(dim + (dim < 0), keepdim=True)
            block = block / (size + layer.eps).sqrt()[..., None]
            if layer.weight is not None:
                block = block * layer.weight[here, None]
            if ir == o3.Irrep("0e") and layer.bias is not None:
                block = block + layer.bias[scalar : scalar + mul, None]
                scalar += mul
            found.append(block)
        first += mul
    return (
        torch.cat([b.squeeze(-1) for b in found], -1)
        if norms and isinstance(layer, o3.Norm)
        else join(found, "mul_ir")
    )


@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_its_formula(name):
    layer = built(name)
    x = torch.randn(32, IRREPS.dim)
    exact = formula(copy.deepcopy(layer).double(), x.double())
    plain = formula(layer, x)
    noise = plain_error(plain, exact, torch.float32)
    assert_as_accurate(layer(x), exact, noise + noise.max())


@pytest.mark.parametrize("name", LAYERS)
def test_layouts_hold_the_same_numbers(name):
    layer, turned = built(name), built(name, "ir_mul")
    x = torch.randn(8, 3, IRREPS.dim, dtype=DOUBLE)
    exact = layer.double()(x).detach()
    found = turned.double()(join(split(x, IRREPS, "mul_ir"), "ir_mul"))
    if not isinstance(layer, o3.Norm):
        found = join(split(found, IRREPS, "ir_mul"), "mul_ir")
    noise = 2.0**-52 * exact.abs()
    assert_as_accurate(found, exact, noise + noise.max())


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("name", LAYERS)
def test_equivariant(name, layout):
    layer = built(name, layout).double()
    x = torch.randn(8, IRREPS.dim, dtype=DOUBLE)
    out = layer.irreps_out if isinstance(layer, o3.Norm) else IRREPS
    assert_o3_equivariant(layer, [x], [IRREPS], out, layout=layout)


@pytest.mark.parametrize("name", [n for n in LAYERS if n != "squared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_finite(name, dtype):
    x = torch.zeros(4, IRREPS.dim, dtype=dtype, requires_grad=True)
    layer = built(name).to(dtype)
    value = layer(x)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    assert value.dtype == dtype
    assert torch.isfinite(value).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", LAYERS)
def test_gradients(name):
    layer = built(name).double().eval()
    x = torch.randn(3, IRREPS.dim, dtype=DOUBLE, requires_grad=True)
    torch.autograd.gradcheck(layer, (x,), fast_mode=True)
    torch.autograd.gradgradcheck(layer, (x,), fast_mode=True)


@pytest.mark.parametrize("name", LAYERS)
def test_compiled_exported_copied(name):
    layer = built(name)
    x = torch.randn(5, IRREPS.dim)
    layer(x)
    layer.eval()
    expected = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x), expected, "compiled")
    assert_same_bits(torch.export.export(layer, (x,)).module()(x), expected, "exported")
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_bits(other(x), expected, "copied")
    assert layer(x[:0]).shape == (0, expected.shape[1])


def test_half_precision_sums_in_float32():
    x = torch.full((1, 3), 300.0, dtype=torch.float16)  # its square is beyond float16
    assert float(o3.Norm("1o")(x)) == float(torch.tensor(300 * 3**0.5).half())


def test_running_statistics():
    layer = o3.BatchNorm("2x0e+1x1o", momentum=0.25).double()
    x = torch.randn(6, 2, 5, dtype=DOUBLE) + 3
    layer(x)
    scalars = x[..., :2].flatten(0, 1)
    mean, var = scalars.mean(0), scalars.var(0, unbiased=False)
    size = x[..., 2:].square().mean()
    expected = {
        "running_mean": 0.25 * mean,
        "running_var": torch.cat([0.75 + 0.25 * var, 0.75 + 0.25 * size[None]]),
    }
    for name, exact in expected.items():
        noise = 2.0**-52 * exact.abs()
        assert_as_accurate(getattr(layer, name), exact, noise)
    before = copy.deepcopy(layer.state_dict())
    layer(x[:0])
    for name, value in layer.state_dict().items():
        assert_same_bits(value, before[name], f"{name} after an empty batch")
    layer.eval()
    assert_same_bits(layer(x[:1]), layer(x)[:1], "evaluated row by row")


def test_one_row_is_its_bias():
    layer = o3.BatchNorm("2x0e").double()
    torch.nn.init.normal_(layer.bias)
    found = layer(torch.randn(1, 2, dtype=DOUBLE)).detach()
    assert_same_bits(found, layer.bias.detach()[None], "no variance")


def test_state_is_e3nns():
    assert list(o3.BatchNorm("2x0e+1o").state_dict()) == [
        "weight",
        "bias",
        "running_mean",
        "running_var",
    ]
    layer = o3.NormActivation("2x0e+1o", torch.tanh, bias=True)
    layer.load_state_dict({"biases": torch.ones(3), "norm.tp.weight": torch.zeros(0)})
    assert layer.biases.tolist() == [1, 1, 1]


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
def test_dropout_drops_whole_irreps(layout):
    torch.manual_seed(0)
    layer = o3.Dropout(IRREPS, 0.25, layout=layout)
    found = layer(torch.ones(64, 3, IRREPS.dim))
    for block in split(found, IRREPS, layout):
        kept = block[:, :1, :, :1]
        assert_same_bits(block.contiguous(), kept.expand_as(block).contiguous(), "whole")
        assert set(kept.flatten().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    x = torch.randn(4, IRREPS.dim)
    assert layer.eval()(x) is x
    assert o3.Dropout(IRREPS, 1.0)(x).abs().sum() == 0
    assert_same_bits(o3.Dropout(IRREPS, 0.0)(x), x, "nothing dropped")
    assert o3.Dropout(IRREPS, 0.25)(x[:0]).shape == x[:0].shape  # red before: torch's error


def test_errors():
    with pytest.raises(ShapeError, match=r"epsilon is 0.1 and normalize is False"):
        o3.NormActivation("1o", torch.tanh, normalize=False, epsilon=0.1)
    with pytest.raises(ShapeError, match=r"epsilon is -1 and normalize is True"):
        o3.NormActivation("1o", torch.tanh, epsilon=-1)
    with pytest.raises(ShapeError, match="reduce is 'sum': it must be one of mean, max"):
        o3.BatchNorm("1o", reduce="sum")
    with pytest.raises(ShapeError, match=r"x is \(3,\): it must be \(batch, …, 3\)"):
        o3.BatchNorm("1o")(torch.randn(3))
    with pytest.raises(ShapeError, match=r"x is \(5, 4\) but BatchNorm takes 1x1o"):
        o3.BatchNorm("1o")(torch.randn(5, 4))
    with pytest.raises(ShapeError, match=r"x is \(3,\): it must be \(batch, …, 3\)"):
        o3.Dropout("1o", 0.5)(torch.randn(3))
    with pytest.raises(ShapeError, match="p is 2: a probability"):
        o3.Dropout("1o", 2)
    with pytest.raises(ShapeError, match=r"x is \(2, 4\) but LayerNorm takes 1x1o"):
        o3.LayerNorm("1o")(torch.randn(2, 4))


def test_batches_are_tensors():
    with pytest.raises(DTypeError, match=r"x is a ndarray: it must be a torch\.Tensor"):
        o3.BatchNorm("1x1o")(torch.ones(2, 3).numpy())


@pytest.mark.parametrize("name", LAYERS)
def test_autocast_keeps_float32(name):
    """As torch keeps norm and layer_norm; batch norms return what they are given.

    Red before: 16 bits stayed 16 bits in all of them.
    """
    layer, x = built(name).eval(), IRREPS.randn(7, -1)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(layer(x), expected, name)
        narrow = layer(x.bfloat16())
    norms = isinstance(layer, o3.Norm | o3.LayerNorm)
    assert narrow.dtype == (torch.float32 if norms else torch.bfloat16)
