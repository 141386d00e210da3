"""Bad input raises the right class, names the argument and the offending value, says what to do.

Seen red with: the check of the weight, of groups, of the precision, of negative batch numbers taken
out, numba taken for torch.
"""

import re

import pytest
import torch

import torchweft
from tests.conftest import INTERPRETED
from torchweft import voxels
from torchweft.voxels.convolution import functions as ops
from torchweft.voxels.maps.tensor import SparseTensor

COORDS = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4], [1, 0, 0, 0]])
FEATS = torch.zeros(3, 6)
WEIGHT = torch.zeros(27, 6, 4)


def raises(error, builtin, pattern):
    assert issubclass(error, builtin)
    return pytest.raises(error, match=re.compile(pattern, re.DOTALL))


def conv(weight=WEIGHT, kernel_size=3, feats=FEATS, coords=COORDS, **options):
    return ops.sparse_conv(SparseTensor(feats, coords), weight, kernel_size, **options)


CASES = {
    "offsets": (
        lambda: conv(WEIGHT[:8]),
        torchweft.ShapeError,
        r"weight is \(8, 6, 4\) but feats has C_in = 6, the kernel 27 offsets.*\(27, 6, C_out\)",
    ),
    "channels": (lambda: conv(WEIGHT[:, :5]), torchweft.ShapeError, r"weight is \(27, 5, 4\)"),
    "torch's weight": (
        lambda: conv(torch.zeros(4, 6, 3, 3, 3)),
        torchweft.ShapeError,
        r"weight is \(4, 6, 3, 3, 3\).*permute",
    ),
    "groups": (lambda: conv(groups=4), torchweft.ShapeError, r"groups is 4.*C_in = 6.*divide"),
    "groups of outputs": (
        lambda: conv(WEIGHT[:, :2], groups=3),
        torchweft.ShapeError,
        r"C_out = 4 but groups is 3",
    ),
    "no groups": (lambda: conv(groups=0), torchweft.ShapeError, r"groups is 0"),
    "bias": (
        lambda: conv(bias=torch.zeros(6)),
        torchweft.ShapeError,
        r"bias is \(6,\) but weight has C_out = 4",
    ),
    "no channels": (
        lambda: ops.sparse_conv(SparseTensor(FEATS[:, :0], COORDS), WEIGHT[:, :0], 3),
        torchweft.ShapeError,
        r"feats has no channels: .* one or more",
    ),
    "precision": (
        lambda: conv(precision="bf16"),
        torchweft.DTypeError,
        r"precision is 'bf16'.*ieee, tf32, tf32x3",
    ),
    "dtypes": (
        lambda: conv(WEIGHT.double()),
        torchweft.DTypeError,
        r"weight is torch.float64 but feats is torch.float32: .* Pass weight\.to\(feats\.dtype\)",
    ),
    "dtype of a module": (
        lambda: voxels.SubMConv3d(6, 4, 3).double()(SparseTensor(FEATS, COORDS)),
        torchweft.DTypeError,
        r"weight is torch.float64 but feats .* Use \.to\(torch\.float32\) of the module of weight",
    ),
    "an array": (
        lambda: conv(WEIGHT.numpy()),
        torchweft.DTypeError,
        r"weight is a ndarray: it must be a torch.Tensor. Pass torch.as_tensor",
    ),
    "a list": (
        lambda: conv(bias=[0.0] * 4),
        torchweft.DTypeError,
        r"bias is a list: it must be a torch.Tensor. Pass torch.as_tensor",
    ),
    "bias of another dtype": (
        lambda: conv(bias=torch.zeros(4).half()),
        torchweft.DTypeError,
        r"bias is torch.float16 but feats is torch.float32",
    ),
    "devices": (
        lambda: conv(WEIGHT.to("meta")),
        torchweft.DeviceError,
        r"weight is on meta but feats is on cpu",
    ),
    "stride": (lambda: conv(stride=2), torchweft.ShapeError, r"stride is \(2, 2, 2\).*must be 1"),
    "stride 0": (
        lambda: conv(stride=0, submanifold=False),
        torchweft.ShapeError,
        r"stride is \(0, 0, 0\): every number must be at least 1",
    ),
    "half a voxel": (
        lambda: conv(kernel_size=2.5),
        torchweft.DTypeError,
        r"kernel_size holds 2.5: it must be an integer, or 3 of them",
    ),
    "transposed": (
        lambda: conv(transposed=True),
        torchweft.ShapeError,
        r"transposed=True.*submanifold=False",
    ),
    "twice": (
        lambda: conv(coords=COORDS[[0, 0, 1]]),
        torchweft.ShapeError,
        r"voxel \(0, 1, 2, 3\) stands in rows 0 and 1.*voxelize",
    ),
    "negative": (
        lambda: conv(coords=COORDS - torch.tensor([0, 0, 0, 1]), submanifold=False),
        torchweft.IndexRangeError,
        r"axis 2 has the coordinate -1.*Shift",
    ),
    "negative batch": (
        lambda: conv(coords=COORDS - torch.tensor([1, 0, 0, 0])),
        torchweft.IndexRangeError,
        r"batch column of coords has the value -1: .* count from 0\. Correct",
    ),
    "not a tensor": (
        lambda: ops.sparse_conv(FEATS, WEIGHT, 3),
        torchweft.DTypeError,
        r"tensor is a Tensor: it must be a torchweft.voxels.SparseTensor",
    ),
    "axes": (
        lambda: ops.sparse_conv3d(SparseTensor(FEATS, COORDS[:, :3]), WEIGHT, 3),
        torchweft.ShapeError,
        r"coordinates of 2 axes: it needs 3.*sparse_conv",
    ),
    "triton": (
        lambda: conv(backend="triton"),
        torchweft.BackendError,
        r"backend='triton' was asked for on cpu",
    ),
    "unknown": (lambda: conv(backend="cuda"), torchweft.BackendError, r"no such backend"),
    "no key": (
        lambda: ops.sparse_inverse_conv(SparseTensor(FEATS, COORDS), WEIGHT, "down"),
        torchweft.ShapeError,
        r"indice_key='down' names no map",
    ),
}
if INTERPRETED:  # its interpreter serves the CPU
    del CASES["triton"]
BUILTINS = {
    torchweft.ShapeError: ValueError,
    torchweft.DTypeError: TypeError,
    torchweft.DeviceError: RuntimeError,
    torchweft.IndexRangeError: IndexError,
    torchweft.BackendError: RuntimeError,
}


@pytest.mark.parametrize("name", CASES)
def test_texts(name):
    function, error, pattern = CASES[name]
    with raises(error, BUILTINS[error], pattern) as caught:
        function()
    assert re.search(
        r"(Pass|Correct|Build|Use|Merge|Shift|Move|Give|Or pass) .*\.$", str(caught.value)
    )


def test_a_key_names_one_map():
    tensor = SparseTensor(FEATS, COORDS)
    ops.sparse_conv(tensor, WEIGHT, 3, indice_key="a")
    with raises(
        torchweft.ShapeError, ValueError, r"indice_key='a' names the map.*another indice_key"
    ):
        ops.sparse_conv(tensor, WEIGHT, 3, dilation=2, indice_key="a")


def test_an_inverse_layer_reads_what_its_layer_wrote():
    tensor = SparseTensor(FEATS, COORDS)
    ops.sparse_conv(tensor, WEIGHT, 3, submanifold=False, padding=1, indice_key="down")
    with raises(torchweft.ShapeError, ValueError, r"'down' names a map onto .* voxels.*that level"):
        ops.sparse_inverse_conv(tensor, WEIGHT, "down")


@pytest.mark.parametrize("name", ["offsets", "channels", "groups", "bias", "dtypes"])
def test_what_was_settled_is_of_one_kind(name):
    """Good calls of every kind that a bad one differs from come first.

    Seen red with offsets and tensors' kinds, and groups, left out of what settles a call.
    """
    for bias in (None, torch.zeros(4)):
        conv(bias=bias)
    conv(torch.zeros(8, 6, 4), 2, submanifold=False, padding=1)
    conv(WEIGHT[:, :2], groups=1, feats=FEATS[:, :2])
    test_texts(name)


TORCH_ONLY = {
    "layer": lambda **backend: voxels.SparseLayerNorm(4, **backend),
    "group": lambda **backend: voxels.SparseGroupNorm(2, 4, **backend),
    "instance": lambda **backend: voxels.SparseInstanceNorm(4, **backend),
    "max": lambda **backend: voxels.SparseMaxPool(2, **backend),
    "avg": lambda **backend: voxels.SparseAvgPool(2, **backend),
    "global": lambda **backend: voxels.GlobalPool(**backend),
    "upsample": lambda **backend: voxels.SparseUpsample(2, **backend),
}


@pytest.mark.parametrize("name", TORCH_ONLY)
def test_layers_of_torch_take_no_other_backend(name):
    assert TORCH_ONLY[name]().backend is None
    assert TORCH_ONLY[name](backend="torch").backend == "torch"
    for backend, why in (("triton", "has no kernels"), ("cuda", "is none of triton")):
        with raises(torchweft.BackendError, RuntimeError, f"backend='{backend}'.* it {why}"):
            TORCH_ONLY[name](backend=backend)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_convolutions_take_the_backend_that_was_requested(backend):
    if backend == "triton" and INTERPRETED:
        pytest.skip("the interpreter serves the CPU")
    tensor = SparseTensor(FEATS, COORDS, (8, 8, 8), 2)
    width = FEATS.shape[1]
    down = voxels.SparseConv3d(width, 4, 3, indice_key="a", backend="torch")
    up = voxels.SparseInverseConv3d(4, 2, 3, indice_key="a", backend=backend)
    assert f"backend='{backend}'" in repr(up)
    coarse = down(tensor)
    with raises(torchweft.BackendError, RuntimeError, f"backend='{backend}' was asked for"):
        up(coarse)
    layer = voxels.SubMConv3d(width, 4, 3, backend=backend)
    with raises(torchweft.BackendError, RuntimeError, f"backend='{backend}' was asked for"):
        layer(tensor)
