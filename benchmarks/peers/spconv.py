"""spconv's submanifold convolution, index pairs and a network; `pip install spconv-cu126`.

spconv keeps pairs with the tensor that a layer returned: a convolution is called with features on
that tensor, so that pairs are made in the cases of maps alone.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.case import Candidate, Workload
from benchmarks.workloads.voxels_unet import NETWORK, flat, given_to, groups, parts

__all__ = ["NAME", "adapt", "adapt_to", "missing"]

NAME = "spconv"
PACKAGES = {"spconv": (NAME, "cuda"), "spconv_triton": ("spconv-triton", "triton")}
"""The name and backend in rows of each package that has spconv's names."""


def missing() -> str | None:
    if importlib.util.find_spec("spconv") is None:
        return "not installed: pip install spconv-cu126"
    if not torch.cuda.is_available():
        return "its CPU path gives wrong results with several threads"
    return None


def adapt(workload: Workload) -> Candidate | str:
    if workload.op == "sparse convolution":
        if workload.inputs[0].dtype == torch.bfloat16:
            return "spconv has no bfloat16"
        if len(workload.inputs[1]) > 32:
            return "spconv 2.3.8 stops with a failed assertion where a kernel has over 32 offsets"
    return adapt_to("spconv", workload)


def adapt_to(package: str, workload: Workload) -> Candidate | str:
    """By spconv, or by a package with its names and its layout of weights."""
    if workload.op == "sparse convolution":
        return _convolution(package, workload)
    if workload.op == "kernel map":
        return _pairs(package, workload)
    if workload.op == NETWORK:
        return _network(package, workload)
    return f"{workload.op} is no layer of spconv"


def _convolution(package: str, workload: Workload) -> Candidate:
    feats, weight = workload.inputs
    offsets, c_in, c_out = weight.shape
    size = workload.tables["kernel"]
    constants = importlib.import_module(f"{package}.constants")
    layer = importlib.import_module(f"{package}.pytorch").SubMConv3d(
        c_in, c_out, size, bias=False, indice_key="cloud", fp32_accum=True
    )
    layer = layer.to(feats)
    with torch.no_grad():
        kept = layer(_tensor(package, workload, feats))  # it has the pairs, its input has not

    def function(feats: Tensor, weight: Tensor) -> Tensor:
        constants.SPCONV_ALLOW_TF32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        moved = kept.replace_feature(feats)
        return torch.func.functional_call(layer, {"weight": weight}, (moved,)).features

    def oracle(feats: Tensor, weight: Tensor, scale: None) -> Tensor:
        matrices = weight.reshape(c_out, offsets, c_in).permute(1, 2, 0)
        return workload.oracle(feats, matrices, scale=scale)

    own = weight.permute(2, 0, 1).reshape(c_out, size, size, size, c_in).contiguous()
    return Candidate(*PACKAGES[package], function, (feats, own), oracle)


def _pairs(package: str, workload: Workload) -> Candidate:
    ops = importlib.import_module(f"{package}.pytorch.ops")
    algorithm = importlib.import_module(f"{package}.core").ConvAlgo.MaskImplicitGemm
    coords, shape = workload.tables["coords"].int().contiguous(), workload.tables["shape"]
    size = workload.tables["kernel"]

    def function(feats: Tensor) -> Tensor:
        found = ops.get_indice_pairs_implicit_gemm(
            coords,
            workload.tables["size"],
            shape,
            algorithm,
            ksize=[size] * 3,
            stride=[1] * 3,
            padding=[size // 2] * 3,
            dilation=[1] * 3,
            out_padding=[0] * 3,
            subm=True,
            is_train=True,
        )
        return found[2][: workload.tables["kept"]]

    return Candidate(*PACKAGES[package], function, workload.inputs, workload.oracle)


def _network(package: str, workload: Workload) -> Candidate | str:
    from benchmarks.peers.spconv_unet import converted, turned_back

    if not workload.tables["fresh"]:
        return "it makes the pairs of strided layers again at each call"
    model = converted(package, workload.tables["model"])
    weights, norms = groups(model)
    ours = groups(workload.tables["model"])[0]

    def function(feats: Tensor, *vectors: Tensor) -> Tensor:
        scores: Tensor = given_to(model, _tensor(package, workload, feats), *vectors).features
        return scores

    def oracle(feats: Tensor, vector: Tensor, norms: Tensor, scale: None = None) -> Tensor:
        pieces = zip(parts(vector, weights.values()), ours.values(), strict=True)
        turned = [turned_back(w, other) if w.dim() == 5 else w for w, other in pieces]
        return workload.oracle(feats, flat(turned), norms)

    given = (flat(p.detach() for p in group.values()) for group in (weights, norms))
    return Candidate(*PACKAGES[package], function, (workload.inputs[0], *given), oracle)


def _tensor(package: str, workload: Workload, feats: Tensor) -> Any:
    tables = workload.tables
    return importlib.import_module(f"{package}.pytorch").SparseConvTensor(
        feats, tables["coords"].int().contiguous(), tables["shape"], tables["size"]
    )
