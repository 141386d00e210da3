"""The floor of a computation: no kernel is faster than its bytes and its operations allow.

    floor = max(bytes_min / bandwidth, flops / peak)

`roofline_pct` of a row is 100 · floor / time.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GPUS", "Gpu", "floor_ms", "gpu_named"]


class Gpu(NamedTuple):
    """Rates that were measured on a GPU, not those of its data sheet."""

    bandwidth: float  # bytes/s of a long copy
    l2_bytes: int
    vector: dict[str, float]  # flop/s of multiply-adds outside the matrix units
    matrix: dict[str, float]  # flop/s of matrix products that are right to the dtype's round-off


_TF32 = 356e12

GPUS = {
    "NVIDIA H200": Gpu(
        bandwidth=4.25e12,
        l2_bytes=50 * 2**20,
        vector={"float32": 50e12, "float16": 50e12, "bfloat16": 50e12},
        # float32 is three products of TF32 parts
        matrix={"float32": _TF32 / 3, "tf32": _TF32, "float16": 790e12, "bfloat16": 790e12},
    ),
}
"""By the name that the driver gives."""


def gpu_named(name: str) -> Gpu | None:
    """The rates of a GPU, None where nobody measured them (then rows have no roofline)."""
    return GPUS.get(name)


def floor_ms(gpu: Gpu, bytes_min: int, flops: int, dtype: str, *, matrix: bool) -> float:
    """max(bytes / bandwidth, flops / peak) in milliseconds.

    Args:
        gpu: the measured rates.
        bytes_min: bytes that must be moved: inputs read once, outputs written once.
        flops: operations that must be done.
        dtype: of the inputs, such as "float32"; "tf32" where matrix products may round to it.
        matrix: whether the small product is a matrix product, which matrix units can do.
    """
    peak = (gpu.matrix if matrix else gpu.vector).get(dtype)
    compute = flops / peak if peak else 0.0
    return 1e3 * max(bytes_min / gpu.bandwidth, compute)
