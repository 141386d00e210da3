"""FastMACE's evaluation of MACE's models; `pip install fastmace`, and what it asks for.

Its calculator for ASE compiles the model; steps as CUDA graphs, its fastest way, exist only inside
of its own loop of molecular dynamics, which is no force call: `fastmace bench` times these.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.case import Candidate, Workload
from benchmarks.workloads import potential

NAME = "FastMACE"


def missing() -> str | None:
    if importlib.util.find_spec("fastmace") is None:
        return "not installed: pip install fastmace"
    return None if torch.cuda.is_available() else "it is for GPUs of NVIDIA"


def adapt(workload: Workload) -> Candidate | str:
    if workload.op != potential.FORCES:
        return f"{workload.op} is not what FastMACE computes: energies and forces of MACE's models"
    (atoms, *more), (positions,) = workload.tables["atoms"], workload.inputs
    if more or not atoms.pbc.all():
        return "it takes one periodic structure"
    import fastmace

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some.model"
        torch.save(workload.tables["model"].cpu(), path)
        workload.tables["model"].to(positions.device)
        calc = fastmace.calc(str(path), trusted=True)

    def function(positions: Tensor) -> Tensor:
        atoms.positions[:] = positions.cpu().numpy()
        calc.calculate(atoms, ("energy", "forces"))
        energy, forces = calc.results["energy"], calc.results["forces"].ravel()
        return positions.new_tensor(np.concatenate([[energy / len(atoms)], forces]))

    return Candidate(NAME, "cuda", function, workload.inputs, workload.oracle)
