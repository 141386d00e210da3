"""Convolutions, maps and networks on the CPU, beside spconv's CPU wheel: `pip install spconv`.

One thread: set OMP_NUM_THREADS=1, as spconv's CPU layers give wrong results with more.  Networks
take a fresh cloud at each call.
"""

from __future__ import annotations

import torch

from benchmarks.workloads.clouds import lidar_file
from benchmarks.workloads.sparse import Kernel, conv_case, fresh_case, map_case
from benchmarks.workloads.voxels_unet import unet_case

FAMILY = "voxels"

CLOUDS = ("rand50k", "sphere64", "lidar10")
KERNELS = (Kernel(), Kernel(2, stride=2), Kernel(3, stride=2, padding=1))

ALL = [
    *(conv_case(cloud, c, dtype=torch.float32) for cloud in CLOUDS for c in (32, 64)),
    *(conv_case(cloud, 16, kernel_size=5, dtype=torch.float32) for cloud in CLOUDS),
    *(map_case(cloud, kernel=kernel) for cloud in CLOUDS for kernel in KERNELS),
    *(fresh_case(cloud, 32, kernel, torch.float32) for cloud in CLOUDS for kernel in KERNELS),
    conv_case("sphere64", 64, dtype=torch.bfloat16),
    *(
        unet_case(cloud, layers, fresh=True, inference=True, dtype=torch.float32)
        for layers in (18, 42)
        for cloud in ("sphere64", "lidar20", "lidar10")
    ),
]

CASES = [case for case in ALL if lidar_file() or "lidar" not in case.name]
