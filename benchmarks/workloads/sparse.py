"""Builds the workloads of voxels: a sparse convolution on a cloud, and its kernel map."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.harness.case import Case, Workload
from benchmarks.workloads.clouds import CLOUDS
from benchmarks.workloads.recipes import NAMES, Random
from torchweft.voxels import SparseTensor, kernel_map, sparse_conv
from torchweft.voxels.convolution import launch
from torchweft.voxels.maps.kernel_map import KernelMap

__all__ = ["FRESH", "KEPT", "Kernel", "conv_case", "fresh_case", "map_case"]

KEPT, FRESH = "sparse convolution", "sparse convolution with its map"

CHECKED = 1 << 16
"""Voxels of the check, whose oracle is in float64."""


class Kernel(NamedTuple):
    """Of a layer: submanifold at stride 1, else with outputs wherever a pair reaches."""

    size: int = 3
    stride: int = 1
    padding: int = 0

    @property
    def submanifold(self) -> bool:
        return self.stride == 1

    @property
    def suffix(self) -> str:
        """In names of cases: nothing for 3x3x3, _k5, _k2s2."""
        if self.stride > 1:
            return f"_k{self.size}s{self.stride}"
        return "" if self.size == 3 else f"_k{self.size}"

    def map(self, tensor: SparseTensor) -> KernelMap:
        """The layer's map on a tensor's voxels."""
        return kernel_map(tensor, *self, submanifold=self.submanifold)


SUBMANIFOLD = Kernel()


class Cloud(NamedTuple):
    """The cloud's name, and how many times it is in the batch."""

    name: str
    copies: int

    @property
    def title(self) -> str:
        return f"{self.name}x{self.copies}" if self.copies > 1 else self.name


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
    voxels, kernel = Cloud(cloud, copies), Kernel(kernel_size)
    precision = "tf32" if tf32 else "ieee"
    return Case(
        f"{voxels.title}_c{channels}{kernel.suffix}_{'tf32' if tf32 else NAMES[dtype]}",
        "submanifold",
        functools.partial(_convolution, KEPT, voxels, channels, dtype, kernel, precision),
        phases=("forward", "forward+backward"),
        dtype=dtype,
        matrix=True,
        tf32=tf32,
        check_batch=CHECKED,
        backends=backends,
    )


def fresh_case(
    cloud: str, channels: int, kernel: Kernel = SUBMANIFOLD, dtype: torch.dtype = torch.float16
) -> Case:
    """The same, with the layer's map: every call has a fresh tensor."""
    voxels = Cloud(cloud, 1)
    return Case(
        f"{cloud}_c{channels}{kernel.suffix}_fresh_{NAMES[dtype]}",
        "submanifold" if kernel.submanifold else "strided",
        functools.partial(_convolution, FRESH, voxels, channels, dtype, kernel, "ieee"),
        phases=("forward", "forward+backward"),
        dtype=dtype,
        matrix=True,
        check_batch=CHECKED,
    )


def map_case(cloud: str, copies: int = 1, kernel: Kernel = SUBMANIFOLD) -> Case:
    """The map of a fresh tensor, with all that forward and backward need."""
    voxels = Cloud(cloud, copies)
    return Case(
        f"{voxels.title}{kernel.suffix}_map",
        "kernel map",
        functools.partial(_map, voxels, kernel),
        phases=("forward",),
        check_batch=CHECKED,
    )


@functools.lru_cache(maxsize=2)
def _rows(cloud: Cloud, device: torch.device, batch: int | None) -> tuple[Tensor, list[int]]:
    voxels, shape = CLOUDS[cloud.name]()
    voxels = voxels[:batch].to(device)
    number = torch.arange(cloud.copies, device=device, dtype=voxels.dtype)
    column = number.repeat_interleave(len(voxels))[:, None]
    return torch.cat([column, voxels.repeat(cloud.copies, 1)], 1), shape


def _convolution(
    op: str,
    cloud: Cloud,
    channels: int,
    dtype: torch.dtype,
    kernel: Kernel,
    precision: str,
    device: torch.device,
    batch: int | None,
) -> Workload:
    coords, shape = _rows(cloud, device, batch)
    random, offsets = Random(device), kernel.size**3
    feats = random.normal(len(coords), channels).to(dtype)
    weight = random.normal(offsets, channels, channels) / math.sqrt(12 * channels)
    tensor = SparseTensor(feats, coords, shape, cloud.copies)
    found = kernel.map(tensor)

    def function(feats: Tensor, weight: Tensor, backend: str | None = None) -> Tensor:
        rows = tensor.replace(feats)
        if op == FRESH:
            rows = SparseTensor(feats, coords, shape, cloud.copies)
        return sparse_conv(
            rows,
            weight,
            kernel.size,
            stride=kernel.stride,
            padding=kernel.padding,
            submanifold=kernel.submanifold,
            precision=precision,
            backend=backend,
        ).feats

    def oracle(feats: Tensor, weight: Tensor, scale: None) -> Tensor:
        result = feats.new_zeros(len(found.outputs), channels)
        for k in range(offsets):
            in_rows, out_rows = found.pairs(k)
            result = result.index_add(0, out_rows, feats[in_rows] @ weight[k])
        return result

    pairs = int(found.counts.sum())
    output_bytes = len(found.outputs) * channels * dtype.itemsize
    return Workload(
        op,
        (feats, weight.to(dtype)),
        _tables(cloud, coords, shape, kernel) | {"map": found},
        function,
        oracle,
        2 * pairs * channels**2,
        output_bytes,
        f"N={len(coords)} L={pairs} C={channels} K={offsets}",
    )


def _map(cloud: Cloud, kernel: Kernel, device: torch.device, batch: int | None) -> Workload:
    coords, shape = _rows(cloud, device, batch)
    feats, offsets = torch.ones(len(coords), 1, device=device), kernel.size**3
    # rows of a table that say all: a submanifold layer's second half is the first, reversed
    kept = offsets // 2 + 1 if kernel.submanifold else offsets

    def function(feats: Tensor, backend: str | None = None) -> Tensor:
        found = kernel.map(SparseTensor(feats, coords, shape, cloud.copies))
        if device.type == "cuda":
            launch.prepare(found, gradient=True)
        return found.kept[:kept]

    known = kernel.map(SparseTensor(feats, coords, shape, cloud.copies))

    def oracle(feats: Tensor, scale: None) -> Tensor:
        return _looked_up(known, coords, shape)[:kept]

    return Workload(
        "kernel map",
        (feats,),
        _tables(cloud, coords, shape, kernel) | {"kept": kept, "map": known},
        function,
        oracle,
        0,
        4 * offsets * len(known.outputs),
        f"N={len(coords)} K={offsets}",
    )


def _tables(
    cloud: Cloud, coords: Tensor, shape: Sequence[int], kernel: Kernel
) -> dict[str, object]:
    return {"coords": coords, "shape": shape, "size": cloud.copies, "kernel": kernel}


def _looked_up(found: KernelMap, coords: Tensor, shape: Sequence[int]) -> Tensor:
    """The table of a map's outputs by a search among sorted cells: (K, N_out) int32, -1: none."""
    margin = 2 * max(shape)  # no voxel that a kernel reaches has the cell of another

    def cells(rows: Tensor) -> Tensor:
        cell, *axes = rows.unbind(1)
        for axis, length in zip(axes, shape, strict=True):
            cell = cell * (length + 2 * margin) + axis + margin
        return cell

    inputs, order = cells(coords.long()).sort()
    outputs = found.outputs.rows.long()
    outputs = outputs[cells(outputs).argsort()]
    step = torch.tensor([1, *found.geometry.stride], device=coords.device)
    table = []
    for offset in torch.nn.functional.pad(found.offsets, (1, 0)):
        wanted = cells(outputs * step + offset)
        place = torch.searchsorted(inputs, wanted).clamp(max=len(inputs) - 1)
        table.append(torch.where(inputs[place] == wanted, order[place], -1))
    return torch.stack(table).int()
