"""spconv's convolutions, index pairs and a network; `pip install spconv-cu126`, on a CPU `spconv`.

spconv keeps pairs with the tensor that a layer returned: where ours keeps its map, a convolution is
called with features on that tensor.  On a CPU only its native algorithm is there, without backward.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.case import Candidate, Workload
from benchmarks.workloads.sparse import FRESH, KEPT
from benchmarks.workloads.voxels_unet import NETWORK, flat, given_to, groups, parts

__all__ = ["NAME", "adapt", "adapt_to", "missing"]

NAME = "spconv"
PACKAGES = {"spconv": (NAME, "cuda"), "spconv_triton": ("spconv-triton", "triton")}
"""The name and backend in rows of each package that has spconv's names."""


def missing() -> str | None:
    if importlib.util.find_spec("spconv") is None:
        return "not installed: pip install spconv-cu126, or spconv to measure on a CPU"
    return None


def adapt(workload: Workload) -> Candidate | str:
    feats = workload.inputs[0]
    if workload.op in (FRESH, KEPT):
        if feats.dtype == torch.bfloat16:
            return "spconv has no bfloat16"
        if feats.is_cuda and len(workload.inputs[1]) > 32:
            return "spconv 2.3.8 stops with a failed assertion where a kernel has over 32 offsets"
    if feats.device.type == "cpu" and torch.get_num_threads() > 1:
        return "its CPU layers give wrong results with several threads: set OMP_NUM_THREADS=1"
    return adapt_to("spconv", workload)


def adapt_to(package: str, workload: Workload) -> Candidate | str:
    """By spconv, or by a package with its names and its layout of weights."""
    makers = {FRESH: _convolution, KEPT: _convolution, "kernel map": _pairs, NETWORK: _network}
    if workload.op not in makers:
        return f"{workload.op} is no layer of spconv"
    candidate = makers[workload.op](package, workload)
    if isinstance(candidate, Candidate) and not workload.inputs[0].is_cuda:
        return candidate._replace(backend="cpu")
    return candidate


def _convolution(package: str, workload: Workload) -> Candidate:
    feats, weight = workload.inputs
    offsets, c_in, c_out = weight.shape
    size = workload.tables["kernel"].size
    constants = importlib.import_module(f"{package}.constants")
    layer = _layer(package, workload)
    with torch.no_grad():
        made = layer(_tensor(package, workload, feats))  # it has the pairs, its input has not

    def function(feats: Tensor, weight: Tensor) -> Tensor:
        constants.SPCONV_ALLOW_TF32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        fresh = workload.op == FRESH
        given = _tensor(package, workload, feats) if fresh else made.replace_feature(feats)
        return torch.func.functional_call(layer, {"weight": weight}, (given,)).features

    order = _order(made.indices, workload)

    def oracle(feats: Tensor, weight: Tensor, scale: None) -> Tensor:
        matrices = weight.reshape(c_out, offsets, c_in).permute(1, 2, 0)
        return workload.oracle(feats, matrices, scale=scale)[order]

    own = weight.permute(2, 0, 1).reshape(c_out, size, size, size, c_in).contiguous()
    return Candidate(*PACKAGES[package], function, (feats, own), oracle)


def _layer(package: str, workload: Workload) -> torch.nn.Module:
    """The layer whose kernel a workload names."""
    layers = importlib.import_module(f"{package}.pytorch")
    feats, weight = workload.inputs
    kernel = workload.tables["kernel"]
    sizes = *weight.shape[1:], kernel.size
    options = {"bias": False, "indice_key": "cloud", "fp32_accum": True}
    if kernel.submanifold:
        layer = layers.SubMConv3d(*sizes, **options)
    else:
        layer = layers.SparseConv3d(*sizes, kernel.stride, kernel.padding, **options)
    return layer.to(feats)  # type: ignore[no-any-return]


def _order(indices: Tensor, workload: Workload) -> Tensor:
    """The row of ours for each of spconv's outputs."""
    if workload.tables["kernel"].submanifold:
        return torch.arange(len(indices), device=indices.device)
    ours = workload.tables["map"].outputs.rows.to(indices)
    every, places = torch.unique(torch.cat([ours, indices]), dim=0, return_inverse=True)
    if not len(every) == len(ours) == len(indices):
        raise RuntimeError(f"{len(indices)} outputs of spconv are not our {len(ours)} voxels")
    return places[: len(ours)].argsort()[places[len(ours) :]]


def _pairs(package: str, workload: Workload) -> Candidate:
    if workload.inputs[0].is_cuda:
        return _implicit_pairs(package, workload)
    return _native_pairs(package, workload)


def _native_pairs(package: str, workload: Workload) -> Candidate:
    """Rows of inputs and of outputs that meet, by offset, inputs ascending, then -1.

    Of a submanifold layer the offsets before the centre: the others are these, turned round.
    """
    ops = importlib.import_module(f"{package}.pytorch.ops")
    arguments = _geometry(package, workload, "Native")
    kernel, found = workload.tables["kernel"], workload.tables["map"]
    kept = workload.tables["kept"] - int(kernel.submanifold)

    def function(feats: Tensor) -> Tensor:
        pairs: Tensor = ops.get_indice_pairs(**arguments)[1]
        return pairs[:, :kept]

    # numbers of its outputs, by row of ours
    number = _order(ops.get_indice_pairs(**arguments)[0], workload).argsort()

    def oracle(feats: Tensor, scale: None) -> Tensor:
        table = torch.full((2, kept, len(feats)), -1, dtype=torch.int32)
        for k in range(kept):
            in_rows, order = found.pairs(k)[0].sort()
            table[0, k, : len(order)] = in_rows
            table[1, k, : len(order)] = number[found.pairs(k)[1][order]]
        return table

    inputs = tuple(t.detach() for t in workload.inputs)  # of its own, as its oracle is another
    return Candidate(*PACKAGES[package], function, inputs, oracle)


def _implicit_pairs(package: str, workload: Workload) -> Candidate:
    ops = importlib.import_module(f"{package}.pytorch.ops")
    arguments = _geometry(package, workload, "MaskImplicitGemm")

    def function(feats: Tensor) -> Tensor:
        found = ops.get_indice_pairs_implicit_gemm(**arguments, is_train=True)
        return found[2][: workload.tables["kept"]]

    return Candidate(*PACKAGES[package], function, workload.inputs, workload.oracle)


def _geometry(package: str, workload: Workload, algorithm: str) -> dict[str, Any]:
    """Arguments of spconv's functions that find pairs."""
    tables, kernel = workload.tables, workload.tables["kernel"]
    return {
        "indices": tables["coords"].int().contiguous(),
        "batch_size": tables["size"],
        "spatial_shape": tables["shape"],
        "algo": getattr(importlib.import_module(f"{package}.core").ConvAlgo, algorithm),
        "ksize": [kernel.size] * 3,
        "stride": [kernel.stride] * 3,
        "padding": [kernel.size // 2 if kernel.submanifold else kernel.padding] * 3,
        "dilation": [1] * 3,
        "out_padding": [0] * 3,
        "subm": kernel.submanifold,
    }


def _network(package: str, workload: Workload) -> Candidate | str:
    from benchmarks.peers.spconv_unet import converted, turned_back

    if not workload.tables["fresh"]:
        return "it makes the pairs of strided layers again at each call"
    known = workload.tables["model"]
    model = converted(package, known).train(known.training)
    weights, norms = groups(model)
    ours = groups(known)[0]

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
