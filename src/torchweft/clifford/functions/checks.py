"""What an operation may be given, and its arguments with blades first and one dimension of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchweft.clifford.algebra import Algebra
from torchweft.core.backend import choose
from torchweft.core.operators.operator import constant_when_compiling
from torchweft.errors import BackendError, DTypeError, ShapeError

__all__ = [
    "backend_for",
    "backend_on",
    "blades_first",
    "blades_last",
    "check_bias",
    "check_weight",
    "flat",
    "norm_words",
    "together",
]

LARGEST = 5
"""Basis vectors up to which code is generated; larger algebras run on the torch path."""

NORMS = ("euclidean", "metric")


def blades_first(algebra: Algebra, blade_dim: int, **multivectors: Tensor) -> list[Tensor]:
    """Views (B, rows…, F) of multivectors with blades along dimension 0 or −1."""
    if not isinstance(algebra, Algebra):
        raise DTypeError(
            f"algebra is {algebra!r}: it must be a torchweft.clifford.Algebra. "
            "Pass Algebra((1, 1, 1)) or Algebra.cl(3)."
        )
    if blade_dim not in (0, -1):
        raise ShapeError(
            f"blade_dim is {blade_dim}: it must be 0 for (B, batch…, F) or -1 for (batch…, F, B)."
        )
    for name, x in multivectors.items():
        if x.dim() < 2 or x.shape[blade_dim] != algebra.num_blades:
            layout = "(B, batch…, F)" if blade_dim == 0 else "(batch…, F, B)"
            raise ShapeError(
                f"{name} is {tuple(x.shape)}: it must be {layout} with B = {algebra.num_blades} "
                f"blades along dimension {blade_dim}, as {algebra} has. Pass all blades, or the "
                f"other blade_dim."
            )
    return [x.movedim(blade_dim, 0) for x in multivectors.values()]


def blades_last(z: Tensor, blade_dim: int) -> Tensor:
    """Where the caller has the blades."""
    return z.movedim(0, blade_dim)


def together(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both of one shape: a dimension of length 1 meets any length."""
    if x.shape == y.shape:
        return x, y
    pairs = zip(x.shape, y.shape, strict=False)
    if x.dim() != y.dim() or any(a != b and 1 not in (a, b) for a, b in pairs):
        raise ShapeError(
            f"x is {tuple(x.shape)} and y is {tuple(y.shape)}, blades first: batch dimensions and "
            "features must be equal or 1. Pass as many of each, with 1 where one serves all."
        )
    return tuple(torch.broadcast_tensors(x, y))  # type: ignore[no-untyped-call]


def flat(x: Tensor) -> Tensor:
    """(B, batch…, F) as (B, rows, F): a view where strides allow."""
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


def check_weight(weight: Tensor, needed: dict[str, int | None]) -> None:
    """The weight's dimensions are the ones needed; None for any length."""
    fits = weight.dim() == len(needed) and all(
        length is None or size == length
        for size, length in zip(weight.shape, needed.values(), strict=False)
    )
    if not fits:
        shape = ", ".join(k if v is None else f"{k} = {v}" for k, v in needed.items())
        raise ShapeError(
            f"weight is {tuple(weight.shape)}: it must be ({shape}), P the paths of the algebra in "
            "the order of algebra.paths. Transpose it, or give it one entry a path and feature."
        )


def check_bias(biases: Sequence[Tensor], length: int) -> None:
    """The bias, if there is one, has an entry for each feature that comes out."""
    for bias in biases:
        if bias.shape != (length,):
            raise ShapeError(
                f"bias is {tuple(bias.shape)}: it must be ({length},), a number for the scalar of "
                "each feature that the weight gives. Pass that many, or None."
            )


def _check_norm(norm: str) -> str:
    """The name of a norm."""
    if norm not in NORMS:
        raise ShapeError(
            f"norm is {norm!r}: it must be one of {NORMS}. Use 'metric' where the metric is not "
            "definite, to be invariant under its boosts and translations."
        )
    return norm


def norm_words(normalize: bool, norm: str, eps: float) -> tuple[str, ...]:
    """The words of the norm that ends a chain."""
    return (_check_norm(norm), float(eps).hex()) if normalize else ()


def backend_for(backend: str | None, algebra: Algebra, tensors: Sequence[Tensor]) -> str:
    """The backend that serves the call; algebras of many dimensions are the torch path's."""
    if algebra.n <= LARGEST:
        return backend_on(backend, tensors[0].device.type)
    if backend in (None, "torch"):
        return "torch"
    raise BackendError(
        f"backend={backend!r} was asked for with n = {algebra.n} basis vectors: kernels are "
        f"generated up to n = {LARGEST}. Pass backend=None or 'torch'."
    )


@constant_when_compiling
def backend_on(backend: str | None, device: str) -> str:
    """The backend that serves tensors on a device."""
    return choose(backend, device)
