"""A convolution of 20,000 edges on the CPU, degrees up to 2, 64 channels."""

from __future__ import annotations

from benchmarks.suites.equivariant import Layer, conv_case, own_blocks
from weft.o3 import Irreps

FAMILY = "o3"


def _layer() -> Layer:
    kept = ("0e", "1o", "2e")
    return own_blocks(Irreps("64x0e+64x1o+64x2e"), Irreps("1x0e+1x1o+1x2e"), kept)


CASES = [conv_case("conv_l2_20k", _layer, 1000, 20, backends=("numba", "torch"))]
