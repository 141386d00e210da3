"""The same simple ways, compiled by Inductor for these very shapes.

Of Clifford layers flash-clifford's reference is taken where its clone is here: what Inductor makes
of it is faster than what it makes of `clifford.pairwise`.
"""

from __future__ import annotations

import shutil

import torch

from benchmarks.harness.case import Candidate, Workload
from benchmarks.peers import clifford, flash_clifford
from benchmarks.peers.torch_eager import best_way

NAME = "torch.compile"
MOST_TERMS = 64


def missing() -> str | None:
    if torch.cuda.is_available() or shutil.which("g++"):
        return None
    return "Inductor needs g++ on a CPU: install a C++ compiler"


def adapt(workload: Workload) -> Candidate | str:
    if workload.op.startswith("clifford"):
        if (terms := len(workload.tables["algebra"].terms)) > MOST_TERMS:
            return f"Inductor takes minutes for a kernel of {terms} terms"
        function = flash_clifford.reference(workload) or clifford.pairwise(workload)
    elif workload.op == "sparse convolution":
        return "it is gathers and library products, offset by offset: nothing to fuse"
    elif workload.op == "reduction":
        function = workload.oracle  # fused: no matrix is stored
    elif (simple := best_way(workload)) is not None:
        function = simple
    else:
        return f"no way written down for {workload.op} with {sorted(workload.tables)}"
    compiled = torch.compile(function, fullgraph=True, dynamic=False)
    return Candidate(NAME, "torch", compiled, workload.inputs, workload.oracle)
