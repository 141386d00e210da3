"""Submanifold convolutions on the CPU, beside gather, multiply, add for each offset in torch."""

from __future__ import annotations

import torch

from benchmarks.workloads.sparse import conv_case

FAMILY = "voxels"

CASES = [
    conv_case("rand50k", 64, dtype=torch.float32, backends=("torch",)),
    conv_case("sphere64", 64, dtype=torch.float32, backends=("torch",)),
    conv_case("sphere64", 64, dtype=torch.bfloat16, backends=("torch",)),
]
