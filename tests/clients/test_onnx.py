"""Exported networks in ONNX's own runtime, which has no operator of ours.

Seen red with: −1 read as a row of the input, sums in canonical order left there, groups of channels
in the wrong order.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.contract.test_voxels_graphs import cloud
from torchweft import voxels
from torchweft.errors import ShapeError
from torchweft.testing import assert_as_accurate, plain_error

pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")

TOLD = r"No ONNX function found for <OpOverload\(op='torchweft.{}'"


class Features(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, tensor):
        return self.network(tensor).F


def network():
    torch.manual_seed(0)
    return voxels.SparseSequential(
        voxels.SubMConv3d(4, 12, 3),
        voxels.SparseBatchNorm(12),
        nn.ReLU(),
        voxels.SparseConv3d(12, 24, 2, stride=2, indice_key="down", bias=False),
        voxels.SubMConv3d(24, 24, (3, 1, 2), groups=3),
        nn.BatchNorm1d(24),
        voxels.SparseInverseConv3d(24, 8, 2, indice_key="down"),
    ).eval()


def mapped(model, seed, dtype=torch.float32):
    tensor = cloud(300 + 100 * seed, seed)
    tensor = tensor.replace(tensor.F.to(dtype))
    model(tensor)
    return tensor


def exported(model, *tensors):
    shapes = torch.export.AdditionalInputs()
    for tensor in tensors:
        shapes.add((tensor,))
    return torch.export.export(Features(model), tensors[:1], dynamic_shapes=shapes)


def test_a_network_of_any_size_in_onnxruntime(tmp_path):
    model = network()
    program = exported(model, *(mapped(model, seed) for seed in range(2)))
    table = voxels.onnx_translations()
    found = torch.onnx.export(program, custom_translation_table=table)
    assert {node.domain for node in found.model.graph} == {""}  # ONNX's own operators
    names = [value.name for value in found.model.graph.inputs]
    found.save(tmp_path / "network.onnx")
    session = runtime.InferenceSession(tmp_path / "network.onnx")
    read = {value.name for value in session.get_inputs()}
    wide = network().double()
    for seed in range(4):
        tensor = mapped(model, seed)
        leaves = zip(names, pytree.tree_leaves(tensor), strict=True)
        given = {name: leaf.detach().numpy() for name, leaf in leaves if name in read}
        (result,) = session.run(None, given)
        exact = wide(mapped(wide, seed, torch.float64).replace(tensor.F.double())).F.detach()
        rough = model(tensor).F.detach()
        result = torch.from_numpy(np.asarray(result))
        assert_as_accurate(result, exact, plain_error(rough, exact, result.dtype))


def test_what_has_no_translation_is_named():
    """Maps that are built in the program, and convolutions without the table."""
    model = network()
    tensors = [mapped(model, seed) for seed in range(2)]
    with pytest.raises(Exception, match=TOLD.format("voxel_convolution")):
        torch.onnx.export(exported(model, *tensors))
    cold = [cloud(300 + 100 * seed, seed) for seed in range(2)]
    program = exported(model.double(), *cold)
    with pytest.raises(Exception, match=TOLD.format("voxel_(order|map)")):
        torch.onnx.export(program, custom_translation_table=voxels.onnx_translations())


def test_half_a_table():
    (translate,) = voxels.onnx_translations().values()
    table = torch.zeros(14, 5)
    with pytest.raises(ShapeError, match=r"table of 14 rows for 27 offsets.*Export.* on the CPU"):
        translate(None, None, None, table, None, None, None, 27, 1, "ieee", "triton")
