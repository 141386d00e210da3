"""Cases as data: what is computed, on which inputs, by whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Candidate", "Case", "Peer", "Workload"]


class Workload(NamedTuple):
    """One operation on one set of inputs.

    `function(*inputs, backend=None)` is ours.  `oracle(*inputs, scale)` is the same formula in
    plain torch for any dtype; `scale` holds the coefficients that are no input, if there are any,
    so that their absolute values, or ones, can be put in their place.  `ways` are more functions
    of ours, by the name that stands as their backend: compiled, captured.
    """

    op: str  # as peers know it: a product, or the name of a layer
    inputs: tuple[Tensor, ...]
    tables: Mapping[str, Any]  # the keyword arguments beside the inputs
    function: Callable[..., Tensor]
    oracle: Callable[..., Tensor]
    flops: int  # of the forward pass
    output_bytes: int
    shape: str
    polynomial: bool = True  # else plain PyTorch tells how large an error may be
    draws: int = 1  # of inputs near the given ones, at which its errors are taken
    gradients: float | None = None  # backward's operations, in forward passes; None: one an input
    ways: Mapping[str, Callable[..., Tensor]] = {}

    @property
    def scale(self) -> Tensor | None:
        """The coefficients among the tables."""
        return self.tables.get("scale")

    @property
    def table_bytes(self) -> int:
        """What one pass reads beside the inputs."""
        return sum(t.nbytes for t in self.tables.values() if isinstance(t, Tensor))


class Case(NamedTuple):
    """A named workload, and what is measured of it.

    `build(device, batch)` makes it: batch None is the full size; where float64 would not fit
    into memory, the check is made on `check_batch` rows of the batch.
    """

    name: str
    mode: str
    build: Callable[[torch.device, int | None], Workload]
    phases: tuple[str, ...] = ("forward", "forward+backward", "second")
    dtype: torch.dtype = torch.float32
    matrix: bool = False  # the small product is a matrix product
    tf32: bool = False  # float32 matrix products may cut their factors off to TF32
    check_batch: int | None = None
    backends: tuple[str | None, ...] = (None,)


class Candidate(NamedTuple):
    """Someone who computes a workload, in a layout of its own.

    `oracle(*inputs, scale)` takes the inputs, and gives the output, in that layout.
    """

    peer: str
    backend: str
    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    oracle: Callable[..., Tensor]


class Peer(Protocol):
    """A module in benchmarks/peers."""

    NAME: str

    def missing(self) -> str | None:
        """Why the peer cannot serve on this machine, None if it can."""

    def adapt(self, workload: Workload) -> Candidate | list[Candidate] | str:
        """The peer's way to compute a workload, or ways, or why it has none."""
