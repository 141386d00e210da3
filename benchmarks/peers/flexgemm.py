"""FlexGEMM's masked implicit GEMM, in Triton, on torchweft's kernel map.

`git clone https://github.com/JeffreyXiang/FlexGEMM`, and put the clone on PYTHONPATH: its CUDA
extension, which makes maps, is not needed.  It tunes for each number of channels and size of cloud,
among tiles that it chooses by the GPU's name: it knows the H100, so an H200 is called one.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.harness.case import Candidate, Workload
from torchweft.voxels import KernelMap

NAME = "FlexGEMM"


def missing() -> str | None:
    if importlib.util.find_spec("flex_gemm") is None:
        return "not installed: put a clone of JeffreyXiang/FlexGEMM on PYTHONPATH"
    if not torch.cuda.is_available():
        return "it needs a GPU"
    return None


def adapt(workload: Workload) -> Candidate | str:
    if workload.op != "sparse convolution":
        return f"{workload.op} needs more of FlexGEMM than its kernels in Triton"
    feats, weight = workload.inputs
    offsets, c_in, c_out = weight.shape
    if offsets > 32:
        return "FlexGEMM keeps a row's offsets in 32 bits"
    config, convolution = _library()
    size, cache = workload.tables["kernel"].size, _neighbours(workload.tables["map"])
    bias = feats.new_zeros(c_out)  # its backward fails without one

    def function(feats: Tensor, weight: Tensor) -> Tensor:
        config.allow_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        result: Tensor = convolution.apply(feats, None, None, cache, weight, bias)[0]
        return result

    def oracle(feats: Tensor, weight: Tensor, scale: None) -> Tensor:
        matrices = weight.reshape(c_out, offsets, c_in).permute(1, 2, 0)
        return workload.oracle(feats, matrices, scale=scale)

    own = weight.permute(2, 0, 1).reshape(c_out, size, size, size, c_in).contiguous()
    return Candidate(NAME, "triton", function, (feats, own), oracle)


@functools.cache
def _library() -> tuple[Any, Any]:
    """Its switches, and its convolution."""
    os.environ.setdefault("FLEX_GEMM_AUTOSAVE_AUTOTUNE_CACHE", "0")
    named = torch.cuda.get_device_name().replace("H200", "H100")
    with mock.patch.object(torch.cuda, "get_device_name", return_value=named):
        from flex_gemm.kernels.triton.spconv import config
        from flex_gemm.ops.spconv.submanifold_conv3d import SubMConv3dFunction
    return config, SubMConv3dFunction


def _neighbours(found: KernelMap) -> object:
    """Its tables: rows by Gray code of their offsets, the offsets of each block, all pairs."""
    from flex_gemm.ops.spconv.submanifold_conv3d import SubMConv3dNeighborCache

    there = found.sources >= 0
    codes = (there.long() << torch.arange(len(there), device=there.device)[:, None]).sum(0)
    place = codes.clone()
    for k in range(1, len(there)):
        place ^= codes >> k
    order = place.argsort()

    class Neighbours(SubMConv3dNeighborCache):  # type: ignore[misc]
        def compute_kernel_idx(self, block_size: int) -> None:
            blocks = torch.nn.functional.pad(there[:, order], (0, -len(order) % block_size))
            used = blocks.unflatten(1, (-1, block_size)).any(2).T
            self[f"valid_kernel_{block_size}"] = used.nonzero()[:, 1].int()
            self[f"valid_kernel_seg_{block_size}"] = _bounds(used.sum(1)).int()

    out_rows = there.nonzero()[:, 1]
    return Neighbours(
        neighbor_map=found.sources.T.contiguous().view(torch.uint32),
        sorted_idx=order,
        valid_signal_i=found.sources[there].view(torch.uint32),
        valid_signal_o=out_rows.int().view(torch.uint32),
        valid_signal_seg=_bounds(there.sum(1)).int().view(torch.uint32),
    )


def _bounds(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
