"""e3nn's smaller names: items of a row, instructions, arguments, steps; numbers are compared in
test_o3_against_e3nn_names.

Seen red with: an old name that is dropped, a step whose slope is 0 · ∞.
"""

import copy
import pickle

import e3nn.io
import e3nn.math
import e3nn.nn
import e3nn.o3
import pytest
import torch

from torchweft import o3
from torchweft.errors import BackendError, IndexRangeError, ShapeError
from torchweft.testing.contract import assert_same_bits

DOUBLE = torch.float64


def test_extract():
    layer = o3.Extract("1e+0e+0e", ["0e", "0e"], [(1,), (2,)])
    one, other = layer(torch.tensor([0.0, 0, 0, 1, 2]))
    assert (one.tolist(), other.tolist()) == ([1], [2])
    x = torch.randn(3, 2, 5)
    assert o3.Extract("1e+2x0e", [""], [()])(x)[0].shape == (3, 2, 0)
    assert o3.ExtractIr("1e+2x0e", "2e")(x).shape == (3, 2, 0)
    assert o3.ExtractIr("1e+2x0e", e3nn.o3.Irrep("0e")).irreps_out == "2x0e"
    copied = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    assert_same_bits(copied(x)[1], layer(x)[1], "copied")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x)[0], layer(x)[0], "compiled")
    assert not layer.state_dict()


def test_errors_of_extract():
    with pytest.raises(ShapeError, match="there are 1 instructions and 2 irreps_outs"):
        o3.Extract("1e+0e", ["0e", "1e"], [(1,)])
    with pytest.raises(IndexRangeError, match="names item 2 of irreps_in, which has 2"):
        o3.Extract("1e+0e", ["0e"], [(2,)])
    with pytest.raises(ShapeError, match=r"instruction \(0,\) extracts 1x1e of .* has 1x0e: items"):
        o3.Extract("1e+0e", ["0e"], [(0,)])
    with pytest.raises(ShapeError, match=r"x is \(3,\) but ExtractIr takes 1x1e\+1x0e"):
        o3.ExtractIr("1e+0e", "0e")(torch.randn(3))


@pytest.mark.parametrize(
    "build",
    [
        lambda backend: o3.ExtractIr("1e", "1e", backend=backend),
        lambda backend: o3.FullyConnectedNet([2, 2], backend=backend),
    ],
)
def test_backends(build):
    build("torch")
    with pytest.raises(BackendError, match="for which it has no kernels: torch's own operations"):
        build("numba")


def test_instructions_are_e3nns():
    given = "2x0e+1x1o", "1x1o", "2x1o"
    ours, theirs = (lib.FullyConnectedTensorProduct(*given).instructions for lib in (o3, e3nn.o3))
    assert all(isinstance(instruction, o3.Instruction) for instruction in ours)
    assert ours == theirs
    assert o3.Instruction._fields == e3nn.o3.Instruction._fields


def test_arguments_of_e3nn():
    """compile_left_right and compile_right change nothing; two normalizations must agree."""
    given = "2x0e+1x1o", "1x1o", "2x1o+2x0e"
    plain = o3.FullyConnectedTensorProduct(*given, irrep_normalization="norm")
    for options in (
        {"normalization": "norm"},
        {"normalization": "norm", "irrep_normalization": "norm"},
        {"normalization": "norm", "compile_left_right": False, "compile_right": True},
    ):
        assert o3.FullyConnectedTensorProduct(*given, **options).instructions == plain.instructions
    with pytest.raises(
        ShapeError, match="'component' and normalization 'norm': they are two names"
    ):
        o3.FullyConnectedTensorProduct(
            *given, irrep_normalization="component", normalization="norm"
        )
    with pytest.raises(ShapeError, match="'none' and normalization 'norm'"):
        o3.TensorSquare("2x1o", normalization="norm")


def test_steps_of_tiny_numbers():
    """e3nn's slope is NaN there."""
    for dtype in (DOUBLE, torch.float32):
        x = torch.tensor([-1.0, 0.0, 1e-40, 1e-30, 1e-3, 1 / 700], dtype=dtype, requires_grad=True)
        value = o3.soft_unit_step(x)
        for _ in range(3):
            (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
            assert value.isfinite().all()
    assert o3.soft_unit_step(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_every_name_of_e3nn_is_here_or_says_what_is():
    """But e3nn.o3.irrep, a module that e3nn lists and does not have."""
    lacking = set()
    for module in (e3nn.o3, e3nn.nn, e3nn.math, e3nn.io):
        for name in set(module.__all__) - {"irrep"} - set(o3.__all__):
            with pytest.raises(AttributeError, match=f"has no {name}, a name of e3nn.* Use "):
                getattr(o3, name)
            lacking.add(name)
    assert lacking == set(o3._INSTEAD)
    with pytest.raises(AttributeError, match=r"module 'torchweft.o3' has no attribute 'nothing'"):
        o3.nothing  # noqa: B018
