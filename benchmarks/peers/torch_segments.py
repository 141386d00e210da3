"""torch's own ways to reduce rows over segments: scatter_reduce, segment_reduce, torch.sparse."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from benchmarks.harness.case import Candidate, Workload
from benchmarks.workloads.segments import REDUCTIONS, plain

NAME = "torch segments"


def missing() -> str | None:
    return None


def adapt(workload: Workload) -> list[Candidate] | str:
    if workload.op == "graph sum":
        return [_sparse(workload)]
    name = workload.op.removeprefix("segment ")
    if name not in (*REDUCTIONS, "softmax"):
        return f"no segments in {workload.op}"
    index, size = workload.tables["index"], workload.tables["num_segments"]
    found = [_candidate("scatter_reduce", workload, lambda x: plain(name, x, index, size))]
    if name in REDUCTIONS:
        found.append(_candidate("segment_reduce", workload, _segment_reduce(workload, name)))
    return found


def _candidate(backend: str, workload: Workload, function) -> Candidate:
    return Candidate(NAME, backend, function, workload.inputs, workload.oracle)


def _segment_reduce(workload: Workload, name: str):
    """It takes rows in order: others are gathered first."""
    index, size = workload.tables["index"], workload.tables["num_segments"]
    order = None if workload.tables["ordered"] else index.argsort(stable=True)
    lengths = index.bincount(minlength=size)

    def function(x: Tensor) -> Tensor:
        rows = x if order is None else x.index_select(0, order)
        return torch.segment_reduce(rows, name, lengths=lengths, axis=0, unsafe=True)

    return function


def _sparse(workload: Workload) -> Candidate:
    """A CSR matrix of ones times rows."""
    src, bounds = workload.tables["src"], workload.tables["indptr"]
    x = workload.inputs[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them beta
        ones = torch.ones(len(src), device=x.device, dtype=x.dtype)
        matrix = torch.sparse_csr_tensor(bounds, src, ones, (len(x), len(x)))
    return _candidate("sparse CSR", workload, lambda x: matrix @ x)
