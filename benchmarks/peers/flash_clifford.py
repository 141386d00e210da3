"""flash-clifford's fused layers of Cl(2,0) and Cl(3,0), and its reference in torch.

`git clone https://github.com/maxxxzdn/flash-clifford`, and name the clone in the environment
variable TORCHWEFT_FLASH_CLIFFORD: it is no package, and its modules have names like `tests`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.harness.case import Candidate, Workload
from torchweft.clifford import Algebra

__all__ = ["NAME", "adapt", "missing", "reference"]

NAME = "flash-clifford"
VARIABLE = "TORCHWEFT_FLASH_CLIFFORD"

Chain = Callable[[Tensor, Tensor, Tensor], Tensor]


def missing() -> str | None:
    if VARIABLE not in os.environ:
        return f"not here: clone maxxxzdn/flash-clifford, and name the clone in {VARIABLE}"
    if not torch.cuda.is_available():
        return "its kernels are for GPUs"
    return None


def adapt(workload: Workload) -> Candidate | str:
    if (found := _kind(workload)) is None:
        return f"{workload.op} of this algebra is no layer of flash-clifford"
    dims, kind = found
    product = {"sgp": "fused_gelu_sgp_norm", "fc": "fused_gelu_fcgp_norm"}[kind]
    chain: Chain = getattr(_module("ops/__init__.py"), f"{product}_{dims}d")
    return Candidate(NAME, "triton", _layer(workload, chain), workload.inputs, workload.oracle)


def reference(workload: Workload) -> Callable[..., Tensor] | None:
    """Its formula in torch, for a compiler; None where there is none, or no clone."""
    found = _kind(workload)
    if found is None or VARIABLE not in os.environ:
        return None
    dims, kind = found
    written = _module("tests/baselines.py")
    product = getattr(written, f"{'sgp' if kind == 'sgp' else 'fcgp'}_{dims}d")
    gate, norm = written.mv_gelu, getattr(written, f"mv_rmsnorm_{dims}d")
    return _layer(workload, lambda x, y, weight: norm(product(gate(x), gate(y), weight)))


def _kind(workload: Workload) -> tuple[int, str] | None:
    """The dimension, and sgp or fc."""
    algebra: Algebra | None = workload.tables.get("algebra")
    known = {Algebra.cl(2): 2, Algebra.cl(3): 3}
    if algebra not in known or "kind" not in workload.tables:
        return None
    return known[algebra], workload.tables["kind"]


def _layer(workload: Workload, chain: Chain) -> Callable[..., Tensor]:
    """The chain, after the linear map of grades if there is one, as one batched product."""
    if not workload.tables["layer"]:
        return chain
    algebra: Algebra = workload.tables["algebra"]
    sizes = torch.tensor([grade.stop - grade.start for grade in algebra.of_grade])
    grade_of = torch.repeat_interleave(sizes).to(workload.inputs[0].device)
    others = algebra.num_blades - 1

    def function(x: Tensor, weight: Tensor, linear: Tensor, bias: Tensor) -> Tensor:
        rows = torch.nn.functional.pad(bias.view(1, 1, -1), (0, 0, 0, 0, 0, others))
        return chain(x, torch.baddbmm(rows, x, linear[grade_of]), weight)

    return function


@functools.cache
def _module(path: str) -> ModuleType:
    """A file of the clone, under a name that nothing else has."""
    file = Path(os.environ[VARIABLE]) / path
    name = f"flash_clifford_{file.parent.name}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
