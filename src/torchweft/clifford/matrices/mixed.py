"""Equivariant linear maps of multivectors and scalars, several of the same features at once.

    y_j = Σ_t sign · x_i(t) @ W[map of t] over the terms t of blade j;  y_end += s @ A_endᵀ + a
    t = Σ_end x_end @ C_endᵀ + s @ Dᵀ + c

The ends are the scalar and, with the pseudoscalar's maps, the last blade.  Parameters are one row
of numbers, those of one kind side by side: W of each map (M, F_in, F_out), a, c, A of all (ends
F_out, S_in) with blades interleaved, D (S_out, S_in), C (S_out, ends F_in).  So A and D are one
matrix, and one product makes what scalars add to both results; W of all is read by a table of its
columns.

GPU: a pass makes two of the library's products, one kernel that copies W as the next one reads it,
and one over blades; the gradient a copy of gy_end beside gt, four products, and four kernels.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.clifford.algebra import Algebra
from torchweft.clifford.matrices.terms import dense, moves, terms
from torchweft.core.operators.operator import FusedOperator, Gradients, below_transforms

__all__ = ["mixed", "serves"]

MOST_FEATURES = 256
"""Features of multivectors, in or out, up to which the kernels are the faster way."""


def serves(x: Tensor, f_in: int, f_out: int) -> bool:
    """Whether the kernels take numbers like those of x, and are the faster way."""
    return x.dtype != torch.float64 and max(f_in, f_out) <= MOST_FEATURES


class _Weights(NamedTuple):
    """Views of a row of parameters, or of its gradient.

    Args:
        maps: W, a row.
        sums: W, a and c, a row: their gradients are sums by the same kernel.
        of_scalars: A above D, (ends F_out + S_out, S_in).
        to_scalars: C, (S_out, ends F_in).
        bias: a and c, (ends F_out + S_out,), or None.
    """

    maps: Tensor
    sums: Tensor
    of_scalars: Tensor
    to_scalars: Tensor
    bias: Tensor | None


class _Layout(NamedTuple):
    """What the numbers of a row mean.

    Args:
        signature: of the algebra.
        pseudoscalar: whether its maps are among the maps.
        features: F_out of each map.
        f_in: F_in.
        s_out: S_out of all.
        s_in: S_in.
        bias: whether there is one.
    """

    signature: str
    pseudoscalar: bool
    features: tuple[int, ...]
    f_in: int
    s_out: int
    s_in: int
    bias: bool

    @property
    def ends(self) -> int:
        """Blades that scalars are mixed with."""
        return 1 + self.pseudoscalar

    @property
    def wide(self) -> int:
        """Numbers that scalars add to the multivectors of an item."""
        return self.ends * sum(self.features)

    @property
    def number_of_maps(self) -> int:
        """M."""
        return _number_of_maps(self.signature, self.pseudoscalar)

    def weights(self, row: Tensor) -> _Weights:
        """Views of a contiguous row."""
        columns = self.wide + self.s_out
        into = self.ends * self.f_in
        of_maps, of_bias = self.number_of_maps * self.f_in * sum(self.features), columns * self.bias
        sizes = [of_maps + of_bias, columns * self.s_in, self.s_out * into]
        sums, of_scalars, to_scalars = row.split_with_sizes(sizes)
        maps, bias = sums.split_with_sizes([of_maps, of_bias])
        return _Weights(
            maps,
            sums,
            of_scalars.view(columns, self.s_in),
            to_scalars.view(self.s_out, into),
            bias if self.bias else None,
        )

    def columns(self, device: torch.device) -> Tensor:
        """(F_out of all, 2): for each column of W the first number and the distance to the next."""
        return _columns(self.number_of_maps * self.f_in, self.features, device)

    def at_ends(self, x: Tensor) -> Tensor:
        """(rows, ends · F) of multivectors (B, rows, F), blades interleaved."""
        if self.ends == 1:
            return x[0]
        return torch.stack([x[0], x[-1]], -1).flatten(1)


@functools.cache
def _number_of_maps(signature: str, pseudoscalar: bool) -> int:
    algebra = Algebra.from_signature(signature)
    return algebra.n + 1 + sum(map(len, moves(algebra, pseudoscalar)))


@functools.cache
@below_transforms
def _columns(lines: int, features: tuple[int, ...], device: torch.device) -> Tensor:
    begins = itertools.accumulate(features, initial=0)
    found = [
        (lines * begin + column, count)
        for begin, count in zip(begins, features, strict=False)
        for column in range(count)
    ]
    return torch.tensor(found, dtype=torch.int32, device=device)


def mixed(
    x: Tensor,
    scalars: Tensor,
    row: Tensor,
    *,
    algebra: Algebra,
    pseudoscalar: bool,
    features: Sequence[int],
    s_out: int,
    bias: bool,
) -> tuple[Tensor, Tensor]:
    """The features of all maps side by side.

    Args:
        x: multivectors (B, rows, F_in).
        scalars: (rows, S_in), S_in > 0.
        row: the parameters, see above.
        algebra: of the multivectors.
        pseudoscalar: whether its maps are among the maps.
        features: F_out of each map.
        s_out: S_out of all.
        bias: whether there is one.

    Returns:
        (B, rows, F_out of all) and (rows, S_out).
    """
    y, t = _mixed(x, scalars, row, algebra.signature, pseudoscalar, list(features), s_out, bias)
    return y, t


def _layout(
    x: Tensor,
    scalars: Tensor,
    signature: str,
    pseudoscalar: bool,
    features: Sequence[int],
    s_out: int,
    bias: bool,
) -> _Layout:
    widths = tuple(features), x.shape[-1], s_out, scalars.shape[-1]
    return _Layout(signature, pseudoscalar, *widths, bias)


def _forward(x: Tensor, scalars: Tensor, row: Tensor, *options: Any) -> list[Tensor]:
    from torchweft.clifford.matrices import mixed_launch as launch

    layout = _layout(x, scalars, *options)
    weights = layout.weights(row)
    sums = _linear(scalars, weights.of_scalars, weights.bias)
    t = sums[:, layout.wide :].data  # no view for autograd, which would refuse to change it
    if layout.s_out:
        t.addmm_(layout.at_ends(x), weights.to_scalars.mT)
    y = x.new_empty((*x.shape[:-1], sum(layout.features)))
    table = terms(layout.signature, layout.pseudoscalar, x.device)
    tables = table.by_target, table.targets, layout.columns(x.device)
    launch.maps(x, weights.maps, sums, y, tables, layout.ends, False)
    return [y, t]


def _linear(scalars: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """A new tensor, also where autocast would narrow: the operands have their dtype."""
    sums = scalars.new_empty(len(scalars), len(matrix))
    if bias is None:
        return torch.mm(scalars, matrix.mT, out=sums)
    return torch.addmm(bias, scalars, matrix.mT, out=sums)


def _backward(
    args: Sequence[Any], saved: Sequence[Tensor], grads: Sequence[Tensor], needed: Sequence[bool]
) -> Gradients:
    from torchweft.clifford.matrices import mixed_launch as launch

    x, scalars, row, *options = args
    gy, gt = grads
    layout = _layout(x, scalars, *options)
    weights = layout.weights(row)
    table = terms(layout.signature, layout.pseudoscalar, x.device)
    columns = layout.columns(x.device)
    sums = layout.at_ends(gy)
    if layout.s_out:
        sums = torch.cat([sums, gt], 1)
    gx = g_scalars = g_row = None
    if needed[0]:
        gx = x.new_empty(x.shape)
        first = _linear(gt, weights.to_scalars.mT, None) if layout.s_out else None
        tables = table.by_source, table.sources, columns
        launch.maps(gy, weights.maps, first, gx, tables, layout.ends, True)
    if needed[1]:
        g_scalars = _linear(sums, weights.of_scalars.mT, None)
    if needed[2]:
        g_row = torch.empty_like(row)
        found = layout.weights(g_row)
        torch.mm(sums.mT, scalars, out=found.of_scalars)
        if layout.s_out:
            torch.mm(gt.mT, layout.at_ends(x), out=found.to_scalars)
        tables = table.by_map, table.maps, columns
        biased = sums.contiguous() if layout.bias else None
        launch.map_weights(x, gy, biased, tables, layout.number_of_maps, found.sums)
    return gx, g_scalars, g_row


def _composition(x: Tensor, scalars: Tensor, row: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """The same by torch's own products, over all pairs of blades."""
    layout = _layout(x, scalars, *options)
    weights = layout.weights(row)
    sizes = [layout.number_of_maps * layout.f_in * f for f in layout.features]
    parts = weights.maps.split_with_sizes(sizes)
    shape = layout.number_of_maps, layout.f_in
    maps = torch.cat([part.reshape(*shape, -1) for part in parts], -1)
    table = dense(layout.signature, layout.pseudoscalar, maps.dtype, maps.device)
    matrices = torch.einsum("mji,mfg->jifg", table, maps)
    y = torch.einsum("jifg,irf->jrg", matrices, x)
    sums = scalars @ weights.of_scalars.mT
    if weights.bias is not None:
        sums = sums + weights.bias
    added, t = sums.split_with_sizes([layout.wide, layout.s_out], 1)
    first, *last = added.view(len(added), sum(layout.features), layout.ends).unbind(2)
    inner = y[1:-1] if last else y[1:]
    y = torch.cat([y[:1] + first, inner, *(y[-1:] + e for e in last)])
    return y, t + layout.at_ends(x) @ weights.to_scalars.mT


def _fake(x: Tensor, scalars: Tensor, row: Tensor, *options: Any) -> list[Tensor]:
    layout = _layout(x, scalars, *options)
    sums = scalars.new_empty(len(scalars), layout.wide + layout.s_out)
    return [x.new_empty((*x.shape[:-1], sum(layout.features))), sums[:, layout.wide :]]


_mixed = FusedOperator(
    "clifford_mixed_linear",
    "Tensor x, Tensor scalars, Tensor row, str signature, bool pseudoscalar, int[] features, "
    "int s_out, bool bias",
    3,
    _forward,
    _backward,
    _fake,
    _composition,
    results=2,
)
