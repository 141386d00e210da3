"""Tensor products of irreps: the guide's workloads."""

from __future__ import annotations

from benchmarks.workloads.contraction import contraction_case
from benchmarks.workloads.equivariant import (
    Layer,
    conv_case,
    every_path,
    linear_case,
    own_blocks,
    product_case,
    radial_case,
)
from benchmarks.workloads.training import training_case
from torchweft.demo.models.potential import Settings
from torchweft.o3 import Irreps

FAMILY = "o3"

FACTORS = Irreps("1x0e+1x1o+1x2e+1x3o")
NATURAL = ("0e", "1o", "2e", "3o")
EVEN = ("0e", "1e", "2e", "3e")
ALL = ("forward", "forward+backward", "second")


def _mace() -> Layer:
    return own_blocks(Irreps("128x0e+128x1o+128x2e"), FACTORS, NATURAL)


def _uniform() -> Layer:
    return own_blocks(Irreps("64x0e+64x1o+64x2e+64x3o"), FACTORS, NATURAL)


def _sevennet() -> Layer:
    return own_blocks(Irreps("128x0e+64x1e+32x2e+32x3e"), Irreps("1x0e+1x1e+1x2e+1x3e"), EVEN)


def _diffdock() -> Layer:
    x = Irreps("10x1o+10x1e+48x0e+48x0o")
    return every_path(x, Irreps("1x0e+1x1o+1x2e"), x, "uvw")


def _shared() -> Layer:
    x = Irreps("128x0e+128x1o+128x2e")
    return every_path(x, Irreps("0e+1o+2e"), x, "uvw", shared=True)


def _uuu() -> Layer:
    x = Irreps("128x0e+128x1o+128x2e+128x3o")
    return every_path(x, x, x, "uuu", shared=True)


CASES = [
    conv_case("W1 mace_L2_carbon", _mace, 1000, 158),
    radial_case("W1r mace_L2_carbon, radial linear", _mace, 1000, 158, 64),
    radial_case("W1r mace_L2_carbon, radial linear, tf32", _mace, 1000, 158, 64, tf32=True),
    conv_case("W1s mace_L2_sparse", _mace, 23000, 6),
    conv_case("W2 l3_uniform64", _uniform, 5000, 32),
    conv_case("W2n sevennet_l3i5", _sevennet, 2560, 64),
    product_case("W3 uvw_diffdock", _diffdock, 50000, ALL),
    product_case("W3s uvw_shared128", _shared, 50000, ALL),
    contraction_case(
        "W4 symcon_mace", "128x0e+128x1o+128x2e+128x3o", "128x0e+128x1o", 3, 89, 10000
    ),
    linear_case("W4l linear_l2", "128x0e+128x1o+128x2e", 100_000),
    product_case("W5 uuu_seed", _uuu, 20000, ALL),
    training_case("training step", Settings(channels=128, lmax=2, layers=3, radial=64), 128, 4),
]
