"""The same simple ways, compiled by Inductor for these very shapes."""

from __future__ import annotations

import shutil

import torch

from benchmarks.peers.torch_eager import best_way
from weft.bench.case import Candidate, Workload

NAME = "torch.compile"


def missing() -> str | None:
    if torch.cuda.is_available() or shutil.which("g++"):
        return None
    return "Inductor needs g++ on a CPU: install a C++ compiler"


def adapt(workload: Workload) -> Candidate | str:
    if (function := best_way(workload)) is None:
        return f"no way written down for {workload.op} with {sorted(workload.tables)}"
    compiled = torch.compile(function, fullgraph=True, dynamic=False)
    return Candidate(NAME, "torch", compiled, workload.inputs, workload.oracle)
