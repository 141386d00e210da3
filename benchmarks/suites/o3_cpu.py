"""Layers of irreps on the CPU: a convolution of 20,000 edges, and calls of few rows."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from benchmarks.harness.case import Case, Workload
from benchmarks.workloads.equivariant import (
    Layer,
    conv_case,
    every_path,
    linear_case,
    own_blocks,
    product_case,
)
from benchmarks.workloads.recipes import Random
from torchweft.o3 import Irreps, SphericalHarmonics

FAMILY = "o3"

ALL = ("forward", "forward+backward", "second")


def _layer(channels: int) -> Layer:
    x = Irreps(f"{channels}x0e+{channels}x1o+{channels}x2e")
    return own_blocks(x, Irreps("1x0e+1x1o+1x2e"), ("0e", "1o", "2e"))


def _scalars() -> Layer:
    return own_blocks(Irreps("64x0e"), Irreps("1x0e"), ("0e",))


def _fully_connected() -> Layer:
    x = Irreps("8x0e+8x1o+8x2e")
    return every_path(x, x, x, "uvw", shared=True)


def _harmonics(rows: int, device: torch.device, batch: int | None) -> Workload:
    """Y_0, Y_1 and Y_2 of |Y_l|² = 2l+1 at x/|x|."""
    degrees = Irreps("0e+1o+2e")
    layer, vectors = SphericalHarmonics(degrees, True, "component"), batch or rows

    def function(x: Tensor, backend: str | None = None) -> Tensor:
        return layer(x)

    def oracle(x: Tensor, scale: None = None) -> Tensor:
        a, b, c = (x / x.square().sum(-1, keepdim=True).sqrt()).unbind(-1)
        of_two = (a * c, a * b, (3 * b * b - 1) / 12**0.5, b * c, (c * c - a * a) / 2)
        parts = (torch.ones_like(a), *(3**0.5 * t for t in (a, b, c)))
        return torch.stack([*parts, *(15**0.5 * t for t in of_two)], -1)

    inputs = (Random(device).normal(vectors, 3),)
    return Workload(
        "spherical harmonics", inputs, {"irreps": degrees}, function, oracle, 30 * vectors,
        vectors * degrees.dim * inputs[0].element_size(), f"N={vectors} {degrees}",
        polynomial=False,
    )  # fmt: skip


def _harmonics_case(name: str, rows: int) -> Case:
    return Case(name, "batch", functools.partial(_harmonics, rows))


CASES = [
    conv_case("conv_l2_20k", lambda: _layer(64), 1000, 20, backends=("numba", "torch")),
    conv_case("conv_l2_100", lambda: _layer(16), 20, 6),
    conv_case("conv_scalars_100", _scalars, 25, 4),
    conv_case("conv_scalars_2k", _scalars, 200, 10),
    product_case("product_l2_200", lambda: _layer(16), 200, ALL),
    product_case("fully_connected_200", _fully_connected, 200, ALL),
    linear_case("linear_l2_200", "64x0e+64x1o+64x2e", 200),
    linear_case("linear_scalars_200", "256x0e", 200),
    _harmonics_case("harmonics_l2_200", 200),
    _harmonics_case("harmonics_l2_20k", 20_000),
]
