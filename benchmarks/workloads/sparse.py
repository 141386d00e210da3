"""Builds the workloads of voxels: a submanifold convolution on a cloud, and its kernel map."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from benchmarks.harness.case import Case, Workload
from benchmarks.workloads.clouds import CLOUDS
from benchmarks.workloads.recipes import Random
from torchweft.voxels import SparseTensor, kernel_map, sparse_conv
from torchweft.voxels.convolution import launch

__all__ = ["conv_case", "map_case"]

CHECKED = 1 << 16
"""Voxels of the check, whose oracle is in float64."""

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def conv_case(
    cloud: str,
    channels: int,
    copies: int = 1,
    dtype: torch.dtype = torch.float16,
    kernel_size: int = 3,
    tf32: bool = False,
    backends: tuple[str | None, ...] = (None,),
) -> Case:
    """Submanifold, C → C, no bias: features ~ N(0, 1), weight ~ N(0, 1) / √(12 C)."""
    many = f"x{copies}" if copies > 1 else ""
    kernel = f"_k{kernel_size}" if kernel_size != 3 else ""
    precision = "tf32" if tf32 else "ieee"
    return Case(
        f"{cloud}{many}_c{channels}{kernel}_{'tf32' if tf32 else NAMES[dtype]}",
        "submanifold",
        functools.partial(_convolution, cloud, channels, copies, dtype, kernel_size, precision),
        phases=("forward", "forward+backward"),
        dtype=dtype,
        matrix=True,
        tf32=tf32,
        check_batch=CHECKED,
        backends=backends,
    )


def map_case(cloud: str, copies: int = 1, kernel_size: int = 3) -> Case:
    """The map of a fresh tensor, with all that forward and backward need."""
    many = f"x{copies}" if copies > 1 else ""
    return Case(
        f"{cloud}{many}_map",
        "kernel map",
        functools.partial(_map, cloud, copies, kernel_size),
        phases=("forward",),
        check_batch=CHECKED,
    )


@functools.lru_cache(maxsize=2)
def _cloud(
    cloud: str, copies: int, device: torch.device, batch: int | None
) -> tuple[Tensor, list[int]]:
    voxels, shape = CLOUDS[cloud]()
    voxels = voxels[:batch].to(device)
    number = torch.arange(copies, device=device, dtype=voxels.dtype)
    column = number.repeat_interleave(len(voxels))[:, None]
    return torch.cat([column, voxels.repeat(copies, 1)], 1), shape


def _convolution(
    cloud: str,
    channels: int,
    copies: int,
    dtype: torch.dtype,
    kernel_size: int,
    precision: str,
    device: torch.device,
    batch: int | None,
) -> Workload:
    coords, shape = _cloud(cloud, copies, device, batch)
    random, offsets = Random(device), kernel_size**3
    feats = random.normal(len(coords), channels).to(dtype)
    weight = random.normal(offsets, channels, channels) / math.sqrt(12 * channels)
    tensor = SparseTensor(feats, coords, shape, copies)
    found = kernel_map(tensor, kernel_size)

    def function(feats: Tensor, weight: Tensor, backend: str | None = None) -> Tensor:
        rows = tensor.replace(feats)
        return sparse_conv(rows, weight, kernel_size, precision=precision, backend=backend).feats

    def oracle(feats: Tensor, weight: Tensor, scale: None) -> Tensor:
        result = feats.new_zeros(len(coords), channels)
        for k in range(offsets):
            in_rows, out_rows = found.pairs(k)
            result = result.index_add(0, out_rows, feats[in_rows] @ weight[k])
        return result

    pairs = int(found.counts.sum())
    tables = {"coords": coords, "shape": shape, "size": copies, "kernel": kernel_size, "map": found}
    return Workload(
        "sparse convolution",
        (feats, weight.to(dtype)),
        tables,
        function,
        oracle,
        2 * pairs * channels**2,
        feats.nbytes,
        f"N={len(coords)} L={pairs} C={channels} K={offsets}",
    )


def _map(
    cloud: str, copies: int, kernel_size: int, device: torch.device, batch: int | None
) -> Workload:
    coords, shape = _cloud(cloud, copies, device, batch)
    feats = torch.ones(len(coords), 1, device=device)
    kept = kernel_size**3 // 2 + 1  # rows of a table that say all

    def function(feats: Tensor, backend: str | None = None) -> Tensor:
        tensor = SparseTensor(feats, coords, shape, copies)
        found = kernel_map(tensor, kernel_size)
        if device.type == "cuda":
            launch.prepare(found, gradient=True)
        return found.kept[:kept]

    def oracle(feats: Tensor, scale: None) -> Tensor:
        cpu = SparseTensor(feats.cpu(), coords.cpu(), shape, copies)
        return kernel_map(cpu, kernel_size).table[:kept].to(device)

    tables = {"coords": coords, "shape": shape, "size": copies, "kernel": kernel_size, "kept": kept}
    return Workload(
        "kernel map",
        (feats,),
        tables,
        function,
        oracle,
        0,
        4 * kernel_size**3 * len(coords),
        f"N={len(coords)} K={kernel_size**3}",
    )
