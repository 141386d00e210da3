"""Weights that mix copies: matrices between blocks of two rows, for all blocks in one operator.

    z[b, n, m] = Σ_paths factor Σ_u t[b, u, m] W[(b,) u, n]      u, n copies, m components

W is shared by all rows, by those of a kind, or each row has its own.  The form Σ z t W is linear in
each of the three, so its derivatives are the same operator with the roles exchanged: of z and W, a
row t; of t and z, a weight.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor

from torchweft.core.backend import choose, interpreted
from torchweft.core.operators.operator import Operator
from torchweft.errors import BackendError
from torchweft.o3.mixing.blocks import Mixing, read
from torchweft.o3.mixing.elements import Kinds, by_torch

__all__ = ["mix", "refuse", "serves"]

_INTERPRETED = interpreted()

SHARED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def serves(
    mixing: Mixing | None, rows: Tensor, shared: bool, backend: str | None = None
) -> TypeGuard[Mixing]:
    """Whether there is a mixing and `mix` takes rows like these: on the GPU.

    Shared weights but in float64; own weights of each row, where each block of t has one path.
    Elsewhere torch multiplies the matrices, if `backend` is "torch" or None.

    Raises:
        BackendError: another backend was asked for.
    """
    if backend == "torch":
        return False
    able = _able(mixing, rows, shared)
    if backend is not None and not (able and backend == "triton"):
        refuse(backend, rows, f"weights that mix copies, in {rows.dtype}")
    return able


def refuse(backend: str, rows: Tensor, what: str) -> NoReturn:
    """Raise: a backend was asked for that lacks this."""
    choose(backend, rows.device.type)  # raises, if it can serve nothing here
    raise BackendError(
        f"backend={backend!r} was asked for {what}, which its kernels do not hold. "
        "Build the module with backend=None or 'torch'."
    )


def _able(mixing: Mixing | None, rows: Tensor, shared: bool) -> bool:
    if mixing is None or not (rows.is_cuda or _INTERPRETED):
        return False
    if shared:
        return rows.dtype in SHARED_DTYPES
    return mixing.single and rows.dtype in (*SHARED_DTYPES, torch.float64)


def mix(
    mixing: Mixing,
    t: Tensor,
    weight: Tensor,
    kinds: Kinds | None = None,
    *,
    kernels: bool = True,
) -> Tensor:
    """z (rows, width) of t (rows, width) and weights: (width,) for all rows, or (rows, width).

    With kinds, weights are (kinds, width): those of a row are its kind's.  `kernels` is what
    `serves` said; without them torch multiplies the rows of one kind after the other.

    Error: |z − z*| ≤ u|z*| + 4√K·u_acc·Σ|factor t W|, K terms a number; with weights that are not
    a row's own TF32 instead where torch.backends.cuda.matmul allows it.  Bitwise repeatable.  Rows
    without a path are zero.
    """
    order, starts = (None, None) if kinds is None else kinds
    return _mix(t, weight, order, starts, mixing.text, "z", weight.dim() == 1, kernels)


_OTHERS = {"z": ("t", "w"), "t": ("z", "w"), "w": ("t", "z")}
"""For each result the two that it is computed from, in the order of arguments."""


def _body(
    a: Tensor,
    b: Tensor,
    order: Tensor | None,
    starts: Tensor | None,
    text: str,
    result: str,
    shared: bool,
    kernels: bool,
) -> Tensor:
    kinds = None if order is None or starts is None else Kinds(order, starts)
    mixing, a, b = read(text), a.contiguous(), b.contiguous()
    if kinds is not None and not kernels:
        return by_torch(mixing, result, a, b, kinds).to(a.dtype)
    found: Tensor = _launch().run(mixing, result, a, b, shared, kinds)
    return found


@functools.cache
def _launch() -> Any:
    """Imported when it first serves."""
    return importlib.import_module("torchweft.o3.mixing.launch")


def _fake(a: Tensor, *others: Any) -> Tensor:
    _, _, starts, text, result, shared, _ = others
    width = read(text).width(result)
    if result != "w":
        return a.new_empty((a.shape[0], width))
    if starts is not None:
        return a.new_empty((starts.shape[0] - 1, width))
    return a.new_empty((width,) if shared else (a.shape[0], width))


def _gradients(
    call: Any, args: Sequence[Any], grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    a, b, order, starts, text, result, *how = args
    values = dict(zip(_OTHERS[result], (a, b), strict=True)) | {result: grad}

    def of(slot: str) -> Tensor:
        first, second = _OTHERS[slot]
        found: Tensor = call(values[first], values[second], order, starts, text, slot, *how)
        return found

    return tuple(
        of(slot) if flag else None for slot, flag in zip(_OTHERS[result], needed, strict=True)
    )


def _batch(call: Any, size: int, dims: Sequence[int | None], args: Sequence[Any]) -> Tensor:
    """Samples as more rows; one by one where weights of many rows differ between them."""
    a, b, order, *rest = args
    _, _, result, shared, _ = rest
    if order is not None or (shared and (result == "w" or dims[1] is not None)):
        each = [[_sample(t, d, i) for t, d in zip((a, b), dims, strict=False)] for i in range(size)]
        return torch.stack([call(*pair, order, *rest) for pair in each])
    first, second = (
        (t.expand(size, *t.shape) if d is None else t.movedim(d, 0)).flatten(0, 1)
        if t.dim() - (d is not None) == 2
        else t
        for t, d in zip((a, b), dims, strict=False)
    )
    found: Tensor = call(first, second, order, *rest)
    return found.view(size, found.shape[0] // size, found.shape[1])


def _sample(tensor: Tensor, dim: int | None, i: int) -> Tensor:
    return tensor if dim is None else tensor.select(dim, i)


_mix = Operator(
    "o3_mix",
    "Tensor a, Tensor b, Tensor? order, Tensor? starts, str mixing, str result, bool shared, "
    "bool kernels",
    2,
    2,
    _body,
    _fake,
    _gradients,
    _batch,
)
