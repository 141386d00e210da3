"""Builds the workloads of the products: inputs from torch.randn with seed 0, on the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import Tensor

from benchmarks.harness.case import Workload
from torchweft import constant, products
from torchweft.products.reference import indexed_product

__all__ = ["DTYPE", "NAMES", "Random", "indptr", "product_workload"]

DTYPE = torch.float32

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Of dtypes, in names of cases."""


class Random:
    """Random tensors on a device, always the same ones."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        self._device = device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device, dtype=DTYPE)

    def index(self, size: int, length: int) -> Tensor:
        return torch.randint(
            size, (length,), generator=self._generator, device=self._device, dtype=torch.int32
        )

    def segments(self, num_segments: int, length: int) -> Tensor:
        """Bounds of segments of uneven length: each entry falls into a random one."""
        owner = self.index(num_segments, length).sort().values
        bounds = torch.arange(num_segments + 1, device=self._device, dtype=torch.int32)
        return torch.searchsorted(owner, bounds).int()


def indptr(lengths: list[int], device: torch.device) -> Tensor:
    """Bounds of segments of given lengths."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)


def product_workload(op: str, inputs: tuple[Tensor, ...], shape: str, **tables: object) -> Workload:
    """`indexed_{op}_scale_gather` of two inputs over constant tables, and its oracle."""
    tables = {key: constant(t) if _is_index(t) else t for key, t in tables.items()}
    public: Callable[..., Tensor] = getattr(products, f"indexed_{op}_scale_gather")

    def function(*operands: Tensor, backend: str | None = None) -> Tensor:
        return public(*operands, **tables, backend=backend)

    def oracle(*operands: Tensor, scale: Tensor | None) -> Tensor:
        return indexed_product(op, *operands, **{**tables, "scale": scale})

    with torch.no_grad():
        output_bytes = function(*inputs).nbytes
    flops = _flops(op, inputs, tables)
    return Workload(op, inputs, tables, function, oracle, flops, output_bytes, shape)


def _is_index(table: object) -> TypeGuard[Tensor]:
    return isinstance(table, Tensor) and not table.is_floating_point()


def _flops(op: str, inputs: tuple[Tensor, ...], tables: dict[str, object]) -> int:
    """A multiplication and an addition for each pair of channels that meets, and the scale's."""
    x, y = inputs
    lead = tables.get("index1", tables.get("index2"))
    rank = {"scavec": 1, "mat_t_vec": 3}.get(op, 2)  # of an input1 shared over N
    terms = x.shape[x.dim() - rank] if lead is None else len(lead)
    batch = max(math.prod(x.shape[: x.dim() - rank]), 1)
    pairs = {"outer": lambda: x.shape[-1] * y.shape[-1], "vecmat": lambda: math.prod(y.shape[-2:])}
    channels = pairs[op]() if op in pairs else x.shape[-1]
    return batch * terms * channels * (3 if tables.get("scale") is not None else 2)
