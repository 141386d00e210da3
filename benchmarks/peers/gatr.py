"""GATr's own network; a clone of Qualcomm-AI-research/geometric-algebra-transformer on PYTHONPATH.

It imports xformers, which it uses for masks of that library alone: an empty module takes its place
where it is not installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.harness.case import Candidate, Workload
from benchmarks.workloads import networks
from benchmarks.workloads.networks import Network, Settings
from torchweft.clifford import from_gatr

NAME = "GATr"


def missing() -> str | None:
    if importlib.util.find_spec("gatr") is None:
        return (
            "not here: clone Qualcomm-AI-research/geometric-algebra-transformer, and name the "
            "clone in PYTHONPATH"
        )
    return None


def adapt(workload: Workload) -> list[Candidate] | str:
    if workload.op != NAME:
        return f"{workload.op} is not GATr"
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("xformers.ops")
    if "xformers.ops" not in sys.modules:
        _stand_in()
    import gatr

    some: Settings = workload.tables["settings"]
    configuration = {"attention": {"num_heads": some.heads}, "mlp": {}}
    original = gatr.GATr(
        *(1, 1, some.features, 1, 1, some.scalars), **configuration, num_blocks=some.blocks
    )
    convert = functools.partial(from_gatr, configuration=configuration)
    compiled, plain = _called(torch.compile(original), False), _called(original, True)
    return networks.by_original(NAME, workload, original, convert, compiled, plain)


def _called(network: Network, cached: bool) -> Network:
    """With paths of einsum kept by its own cache, which is switched off to compile it."""
    from gatr.utils.einsum import enable_cached_einsum

    def called(x: Tensor, scalars: Tensor) -> tuple[Tensor, Tensor]:
        enable_cached_einsum(cached)
        return network(x, scalars)

    return called


def _stand_in() -> None:
    """What GATr imports from xformers."""
    ops = ModuleType("xformers.ops")
    ops.AttentionBias = type("AttentionBias", (), {})  # type: ignore[attr-defined]
    ops.memory_efficient_attention = None  # type: ignore[attr-defined]
    sys.modules["xformers"] = ModuleType("xformers")
    sys.modules["xformers.ops"] = ops
