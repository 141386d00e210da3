"""spconv's submanifold convolution, index pairs and a network; `pip install spconv-cu126`."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.case import Candidate, Workload
from benchmarks.workloads.voxels_unet import NETWORK, flat, given_to, groups, parts

NAME = "spconv"


def missing() -> str | None:
    if importlib.util.find_spec("spconv") is None:
        return "not installed: pip install spconv-cu126"
    if not torch.cuda.is_available():
        return "its CPU path gives wrong results with several threads"
    return None


def adapt(workload: Workload) -> Candidate | str:
    if workload.op == "sparse convolution":
        return _convolution(workload)
    if workload.op == "kernel map":
        return _pairs(workload)
    if workload.op == NETWORK:
        return _network(workload)
    return f"{workload.op} is no layer of spconv"


def _convolution(workload: Workload) -> Candidate | str:
    import spconv.pytorch as spconv

    feats, weight = workload.inputs
    if feats.dtype == torch.bfloat16:
        return "spconv has no bfloat16"
    offsets, c_in, c_out = weight.shape
    if offsets > 32:
        return "spconv 2.3.8 stops with a failed assertion where a kernel has over 32 offsets"
    size = workload.tables["kernel"]
    layer = spconv.SubMConv3d(
        c_in, c_out, size, bias=False, indice_key="cloud", fp32_accum=True
    ).to(feats)
    tensor = _tensor(workload, feats)
    with torch.no_grad():
        layer(tensor)  # builds the pairs, which stay with the tensor

    def function(feats: Tensor, weight: Tensor) -> Tensor:
        moved = tensor.replace_feature(feats)
        return torch.func.functional_call(layer, {"weight": weight}, (moved,)).features

    def oracle(feats: Tensor, weight: Tensor, scale: None) -> Tensor:
        matrices = weight.reshape(c_out, offsets, c_in).permute(1, 2, 0)
        return workload.oracle(feats, matrices, scale=scale)

    own = weight.permute(2, 0, 1).reshape(c_out, size, size, size, c_in).contiguous()
    return Candidate(NAME, "cuda", function, (feats, own), oracle)


def _pairs(workload: Workload) -> Candidate:
    from spconv.core import ConvAlgo
    from spconv.pytorch import ops

    coords, shape = workload.tables["coords"].int().contiguous(), workload.tables["shape"]
    size = workload.tables["kernel"]
    three = [size] * 3

    def function(feats: Tensor) -> Tensor:
        found = ops.get_indice_pairs_implicit_gemm(
            coords,
            workload.tables["size"],
            shape,
            ConvAlgo.MaskImplicitGemm,
            three,
            [1] * 3,
            [size // 2] * 3,
            [1] * 3,
            [0] * 3,
            subm=True,
            is_train=True,
        )
        return found[2][: workload.tables["kept"]]

    return Candidate(NAME, "cuda", function, workload.inputs, workload.oracle)


def _network(workload: Workload) -> Candidate | str:
    from benchmarks.peers.spconv_unet import converted, turned_back

    if not workload.tables["fresh"]:
        return "spconv makes the pairs of strided layers again at each call"
    model = converted(workload.tables["model"])
    weights, norms = groups(model)
    ours = groups(workload.tables["model"])[0]

    def function(feats: Tensor, *vectors: Tensor) -> Tensor:
        scores: Tensor = given_to(model, _tensor(workload, feats), *vectors).features
        return scores

    def oracle(feats: Tensor, vector: Tensor, norms: Tensor, scale: None = None) -> Tensor:
        pieces = zip(parts(vector, weights.values()), ours.values(), strict=True)
        turned = [turned_back(w, other) if w.dim() == 5 else w for w, other in pieces]
        return workload.oracle(feats, flat(turned), norms)

    given = (flat(p.detach() for p in group.values()) for group in (weights, norms))
    return Candidate(NAME, "cuda", function, (workload.inputs[0], *given), oracle)


def _tensor(workload: Workload, feats: Tensor) -> Any:
    import spconv.pytorch as spconv

    tables = workload.tables
    return spconv.SparseConvTensor(
        feats, tables["coords"].int().contiguous(), tables["shape"], tables["size"]
    )
