"""Submanifold convolutions, kernel maps and a network: the guide's clouds, in half precision."""

from __future__ import annotations

import torch

from benchmarks.workloads.clouds import lidar_file
from benchmarks.workloads.sparse import conv_case, map_case
from benchmarks.workloads.voxels_unet import unet_case

FAMILY = "voxels"

ALL = [
    conv_case("lidar05", 64),
    conv_case("lidar05", 128, 6),
    conv_case("sphere64", 1024),
    conv_case("sphere256", 256),
    conv_case("sphere512", 128),
    conv_case("rand1m", 32),
    map_case("lidar05"),
    map_case("lidar05", 6),
    map_case("sphere64"),
    map_case("sphere256"),
    map_case("sphere512"),
    map_case("rand1m"),
    conv_case("sphere256", 256, dtype=torch.bfloat16),
    conv_case("sphere256", 64, dtype=torch.float32),
    conv_case("sphere256", 64, dtype=torch.float32, tf32=True),
    conv_case("sphere256", 64, kernel_size=5),
    conv_case("sphere128", 512),
    conv_case("sphere1024", 64),
    map_case("sphere1024"),
    unet_case("lidar05", 42),
    unet_case("lidar05", 42, fresh=True),
    unet_case("lidar05", 42, inference=True),
    unet_case("lidar05", 42, fresh=True, inference=True),
]

CASES = [case for case in ALL if lidar_file() or "lidar" not in case.name]
