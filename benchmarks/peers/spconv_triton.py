"""spconv-triton: spconv's layers in Triton, which tunes itself; `pip install spconv-triton`.

It keeps its choices of tiles in Triton's cache.  Choices made while other programs used the GPU are
slower: delete `*.autotune.json` there before a measurement.
"""

from __future__ import annotations

import importlib.util

import torch

from benchmarks.harness.case import Candidate, Workload
from benchmarks.peers.spconv import adapt_to

NAME = "spconv-triton"


def missing() -> str | None:
    if importlib.util.find_spec("spconv_triton") is None:
        return "not installed: pip install spconv-triton"
    if not torch.cuda.is_available():
        return "its kernels are for GPUs"
    return None


def adapt(workload: Workload) -> Candidate | str:
    return adapt_to("spconv_triton", workload)
