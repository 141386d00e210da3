"""L-GATr 2's own network; `pip install lgatr`."""

from __future__ import annotations

import functools
import importlib.util

import torch

from benchmarks.harness.case import Candidate, Workload
from benchmarks.workloads import networks
from benchmarks.workloads.networks import Settings
from torchweft.clifford import from_lgatr

NAME = "L-GATr"


def missing() -> str | None:
    return None if importlib.util.find_spec("lgatr") else "not installed: pip install lgatr"


def adapt(workload: Workload) -> list[Candidate] | str:
    if workload.op != NAME:
        return f"{workload.op} is not L-GATr"
    import lgatr

    some: Settings = workload.tables["settings"]
    configuration = {"attention": {"num_heads": some.heads}, "mlp": {}}
    original = lgatr.LGATr(*(some.blocks, 1, 1, some.features, 1, 1, some.scalars), **configuration)
    convert = functools.partial(from_lgatr, configuration=configuration)
    return networks.by_original(NAME, workload, original, convert, torch.compile(original))
