"""KeOps' reductions, by the same formula strings; `pip install pykeops`."""

from __future__ import annotations

import importlib.util

from torch import Tensor

from weft.bench.case import Candidate, Workload

NAME = "pykeops"


def missing() -> str | None:
    if importlib.util.find_spec("pykeops") is None:
        return "not installed: pip install pykeops"
    return None


def adapt(workload: Workload) -> Candidate | str:
    if workload.op != "reduction":
        return f"{workload.op} is no reduction of a formula"
    from pykeops.torch import Genred

    of, aliases = workload.tables["formula"], workload.tables["aliases"]
    options = {"opt_arg": of.k} if of.kind == "KMin" else {}  # it refuses one elsewhere
    reduction = Genred(of.text, aliases, reduction_op=of.kind, axis=1, **options)

    def function(*inputs: Tensor) -> Tensor:
        found: Tensor = reduction(*inputs, ranges=workload.tables["ranges"])
        return found

    return Candidate(NAME, "keops", function, workload.inputs, workload.oracle)
