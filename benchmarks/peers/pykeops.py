"""KeOps' reductions, by the same formula strings; `pip install pykeops`."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.harness.case import Candidate, Workload

NAME = "pykeops"


def missing() -> str | None:
    if importlib.util.find_spec("pykeops") is None:
        return "not installed: pip install pykeops"
    return None


@contextlib.contextmanager
def _its_stream(device: torch.device) -> Iterator[None]:
    """It always launches on the default stream: without an order between it and the caller's,
    it would run while the caller's earlier work does, and its time would be seen as nothing."""
    if device.type != "cuda":
        yield
        return
    ours, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    default.wait_stream(ours)
    yield
    ours.wait_stream(default)


def adapt(workload: Workload) -> Candidate | str:
    if workload.op != "reduction":
        return f"{workload.op} is no reduction of a formula"
    from pykeops.torch import Genred

    of, aliases = workload.tables["formula"], workload.tables["aliases"]
    options = {"opt_arg": of.k} if of.kind == "KMin" else {}  # it refuses one elsewhere
    reduction = Genred(of.text, aliases, reduction_op=of.kind, axis=1, **options)

    def function(*inputs: Tensor) -> Tensor:
        with _its_stream(inputs[0].device):
            found: Tensor = reduction(*inputs, ranges=workload.tables["ranges"])
        return found

    return Candidate(NAME, "keops", function, workload.inputs, workload.oracle)
