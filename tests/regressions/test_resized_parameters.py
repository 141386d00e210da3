"""FSDP frees a gathered parameter by resizing its storage, which `Tensor.numpy` forbids for good.

Red before: "Trying to resize storage that is not resizable" at the end of a forward pass, with
every sparse convolution on a CPU.
"""

import pytest
import torch
from torch import nn

from tests.conftest import INTERPRETED
from torchweft import clifford, o3, products, reductions, voxels

pytest.importorskip("numba")
if INTERPRETED:
    pytest.skip("the CPU's own executors compute these", allow_module_level=True)

ROWS = 64


def rows(*shape):
    return nn.Parameter(torch.randn(ROWS, *shape, dtype=torch.float64))


def convolution(backend):
    x = voxels.SparseTensor(rows(2), torch.arange(ROWS)[:, None].expand(-1, 4).contiguous())
    module = voxels.SubMConv3d(2, 3, 3, backend=backend).double()
    return module(x).feats, [x.feats, *module.parameters()]


def messages(backend):
    graph = o3.Graph(torch.arange(ROWS), torch.arange(ROWS).flip(0), ROWS)
    conv = o3.TensorProductConv("2x1o", "1o", "2x0e", [(0, 0, 0, "uvu", True)], backend=backend)
    given = rows(6), rows(3), rows(2)
    return conv(*given, graph), given


def rows_of_a_program(backend):
    module = o3.IrrepWiseLinear("2x0e+1o", 3, 4, backend=backend).double()
    x = rows(5, 3)
    return module(x), [x, *module.parameters()]


def multivectors(backend):
    algebra = clifford.Algebra.cl(3)
    module = clifford.MVLayerNorm(4, algebra, backend=backend).double()
    x = nn.Parameter(torch.randn(8, ROWS, 4, dtype=torch.float64))
    return module(x), [x, *module.parameters()]


def product(backend):
    given = rows(4), rows(4)
    return products.indexed_mul(*given, torch.arange(ROWS), backend=backend), given


def scaled_product(backend):
    x, y, scale = rows(4), rows(4), nn.Parameter(torch.ones(ROWS, dtype=torch.float64))
    table = torch.arange(ROWS)
    found = products.indexed_mul_scale_gather(x, y, scale, table, table, backend=backend)
    return found, [x, y, scale]


def reduction(backend):
    x, y, b = rows(3), rows(3), rows(2)
    distance = ((reductions.Vi(x) - reductions.Vj(y)) ** 2).sum(-1)
    return (-distance).exp().__matmul__(b, backend=backend), [x, y, b]


CASES = [
    convolution,
    messages,
    rows_of_a_program,
    multivectors,
    product,
    scaled_product,
    reduction,
]


@pytest.mark.parametrize("case", CASES)
def test_storages_of_operands_can_be_resized(case):
    z, operands = case("numba")
    z.square().sum().backward()
    for n, operand in enumerate(operands):
        assert operand.grad is not None
        assert operand.untyped_storage().resizable(), f"operand {n} of {tuple(operand.shape)}"
