"""Products whose copies are mixed by weights of each row's own: one form, and all its derivatives.

    Q(x, y, w, z) = Σ_paths factor Σ_un z[n, m] w[u, n] Σ_ab C[a, b, m] x[u, a] y[b]

    torchweft::o3_mixed_rows(Tensor[] tensors, str structure, str call, str mixing) -> Tensor[]

The form is linear in each of the four, so its derivatives of every order are calls of the same
operator, as those of channelwise products are.  Between x, y and z nothing is stored.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from torchweft.core.backend import interpreted
from torchweft.core.operators.operator import constant_when_compiling
from torchweft.core.operators.tensor_list import Call as Door
from torchweft.core.operators.tensor_list import ListOperator, Rest, Results, Tensors
from torchweft.o3.channelwise.calls import forward, read_call
from torchweft.o3.channelwise.operator import Contraction
from torchweft.o3.channelwise.structure import Structure, read
from torchweft.o3.mixing import blocks as mixing_plan
from torchweft.o3.mixing.blocks import Mixing
from torchweft.o3.mixing.rows_source import forms, numbers

__all__ = ["holds", "mixed_rows"]

_INTERPRETED = interpreted()

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

MOST_NUMBERS, MOST_TERMS = 2**14, 2**9
"""Of a row's weights, and of its couplings: what is written out, and compilers bear."""

_FORWARD = str(forward(True))


def holds(
    mixing: Mixing | None, structure: Structure, rows: Tensor, backend: str | None
) -> TypeGuard[Mixing]:
    """Whether kernels hold such products: on the GPU, rows of few weights."""
    if mixing is None or backend not in (None, "triton") or rows.dtype not in DTYPES:
        return False
    if not (rows.is_cuda or _INTERPRETED):
        return False
    count, terms = _size(structure.text, mixing.text)
    return 0 < count <= MOST_NUMBERS and terms <= MOST_TERMS


@constant_when_compiling
def _size(structure: str, mixing: str) -> tuple[int, int]:
    """Numbers of a row's weights, and terms."""
    return _counted(read(structure), mixing_plan.read(mixing))


@functools.lru_cache(maxsize=1024)
def _counted(structure: Structure, mixing: Mixing) -> tuple[int, int]:
    every = (form for _, members in forms(structure, mixing) for form in members)
    return numbers(structure, mixing), sum(len(form.entries) for form in every)


def mixed_rows(
    structure: Structure, mixing: Mixing, x: Tensor, y: Tensor, weight: Tensor
) -> Tensor:
    """z (rows, width) of x, y (rows, width) and weights (rows, width), where `holds` says so.

    Args:
        structure: a product of channels without weights.
        mixing: of its result, by the weights.
        x: rows of the structure's width.
        y: rows of the structure's width.
        weight: rows of the mixing's width.

    Error: |z − z*| ≤ u|z*| + 4√K·u_acc·Σ|factor C x y w|, K terms a number.  Bitwise repeatable.
    Rows without a path are zero.
    """
    return _mixed_rows([x, y, weight], (structure.text, _FORWARD, mixing.text))[0]


class _MixedRows(Contraction):
    """Derivatives of Q."""

    def body(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        from torchweft.o3.mixing import rows_launch as mixing_rows_launch

        structure, call, mixing = rest
        values = [t.contiguous() for t in tensors]
        what = read_call(call)
        return mixing_rows_launch.run(read(structure), mixing_plan.read(mixing), what, values)

    def fake(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        structure, call, mixing = rest
        rows = tensors[0].shape[0]
        widths = read(structure).widths[:2] + mixing_plan.read(mixing).widths[1:]
        return [
            tensors[0].new_empty(rows, widths["xyzw".index(slot)])
            for slot, _ in read_call(call).results
        ]

    def batch(
        self, call: Door, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        rows = [
            (t.expand(size, *t.shape) if d is None else t.movedim(d, 0)).flatten(0, 1)
            for t, d in zip(tensors, dims, strict=True)
        ]
        return tuple(r.view(size, r.shape[0] // size, r.shape[1]) for r in call(rows, rest))


_mixed_rows = ListOperator("o3_mixed_rows", "str structure, str call, str mixing", _MixedRows())
