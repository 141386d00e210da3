"""The geometric algebra transformers GATr and axial GATr.

An item carries multivectors (B, batch…, items, F), or (batch…, items, F, B) with blade_dim=-1, and
plain scalars (batch…, items, S).  `from_gatr` converts the original's checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchweft.clifford import functions
from torchweft.clifford.algebra import PGA, Algebra
from torchweft.clifford.calls import (
    RowFunction,
    backend_for,
    backend_on,
    check_algebra,
    program_rows,
)
from torchweft.clifford.layers.attention import (
    Reinserted,
    Reinsertion,
    SelfAttention,
    Widths,
    added,
    check_origin,
)
from torchweft.clifford.layers.equilinear import (
    EquiLayerNorm,
    GradeDropout,
    Pair,
    joined,
    linear_maps,
)
from torchweft.clifford.programs import operator, programs
from torchweft.core.operators.operands import as_given, narrowed, same_kind
from torchweft.errors import ShapeError

__all__ = [
    "AxialGATr",
    "GATr",
    "GATrBlock",
    "GeometricBilinear",
    "GeometricMLP",
    "ScalarGatedNonlinearity",
    "equivariant_join",
    "join",
]


def join(
    x: Tensor, y: Tensor, algebra: Algebra = PGA, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """dual(dual(x) ∧ dual(y)): `regressive` with GATr's signs.

    `regressive` inverts the dual at the end.  Applying the dual once more instead changes grade k
    by (−1)^(k(n−k)): the grade involution for even n, nothing for odd n.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        y: the right factors, the same layout and dtype; batch and features broadcast.
        algebra: the algebra of the multivectors.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors (B, batch…, F) in x's dtype.

    Source: Brehmer et al.: Geometric algebra transformer, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> points = clifford.embed_point(torch.tensor([[[0.0, 0, 0]], [[1.0, 0, 0]]]))
        >>> first, second = points.unbind(1)
        >>> line = clifford.join(first, second)  # the line through two points
        >>> int((line != 0).sum())
        1
    """
    out = functions.regressive(x, y, algebra, blade_dim=blade_dim, backend=backend)
    if algebra.n % 2:
        return out
    return functions.grade_involution(out, algebra, blade_dim=blade_dim, backend=backend)


def equivariant_join(
    x: Tensor,
    y: Tensor,
    reference: Tensor,
    algebra: Algebra = PGA,
    *,
    blade_dim: int = 0,
    backend: str | None = None,
) -> Tensor:
    """r · join(x, y): the join changes sign under reflections, and so does r.

    r is the coefficient in `reference` of the product of all vectors that are not null: e123 in
    PGA.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        y: the right factors, the same layout and dtype; batch and features broadcast.
        reference: multivectors that broadcast with x.
        algebra: the algebra of the multivectors.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors (B, batch…, F) in x's dtype.

    Source: Brehmer et al.: Geometric algebra transformer, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> x = torch.randn(16, 10, 8)
        >>> clifford.equivariant_join(x, x, x.mean((-2, -1), keepdim=True)).shape
        torch.Size([16, 10, 8])
    """
    check_algebra(algebra)
    orientation = _orientation(reference.movedim(blade_dim, 0), algebra).unsqueeze(blade_dim)
    return orientation * join(x, y, algebra, blade_dim=blade_dim, backend=backend)


_GELU_TANH = functools.partial(functional.gelu, approximate="tanh")

_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "gelu": (_GELU_TANH, functional.gelu),
    "gelu_tanh": (_GELU_TANH, _GELU_TANH),
    "relu": (functional.relu, functional.relu),
    "sigmoid": (torch.sigmoid, torch.sigmoid),
    "silu": (functional.silu, functional.silu),
    "tanh": (torch.tanh, torch.tanh),
}
"""The function of the gates and that of the scalars, by the name of an activation."""


def activations_of(name: str) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """The function of the gates and that of the scalars.

    Raises:
        ShapeError: there is no such activation.
    """
    if name not in _ACTIVATIONS:
        raise ShapeError(
            f"activation is {name!r}: it must be one of {', '.join(_ACTIVATIONS)}. "
            "Pass activation='gelu', as GATr has by default."
        )
    return _ACTIVATIONS[name]


_gelu_tanh = RowFunction(program_rows("gelu_tanh"), "x", as_given)


class ScalarGatedNonlinearity(nn.Module):
    """f(x₀) · x, and f of the scalars.

    Args:
        activation: f: "gelu" as in GATr and L-GATr 1 (tanh formula for the gates, the exact one for
            scalars), "gelu_tanh" as in L-GATr 2 (for both), "relu", "sigmoid", "silu" or "tanh".
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: "triton", "numba", "torch" or None; gates are torch's own but for GELU by Triton.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> layer = clifford.ScalarGatedNonlinearity("relu")
        >>> x, scalars = layer(torch.ones(16, 1), torch.tensor([-1.0, 2.0]))
        >>> scalars
        tensor([0., 2.])
    """

    def __init__(
        self, activation: str = "gelu", *, blade_dim: int = 0, backend: str | None = None
    ) -> None:
        super().__init__()
        activations_of(activation)
        self.activation, self.blade_dim, self.backend = activation, blade_dim, backend

    def forward(self, x: Tensor, scalars: Tensor) -> Pair:
        """The gated multivectors and the activated scalars.

        Args:
            x: multivectors (B, batch…, F).
            scalars: (batch…, S).

        Returns:
            Tensors of the shapes of x and scalars.
        """
        backend = backend_on(self.backend, x.device.type)
        of_gates, of_scalars = activations_of(self.activation)
        if backend == "triton" and of_gates is _GELU_TANH:
            # the gate reads the scalar alone: any algebra of as many blades is the same
            algebra = Algebra((1,) * (x.shape[self.blade_dim].bit_length() - 1))
            return _gelu_tanh((x,), algebra, self.blade_dim, backend), of_scalars(scalars)
        return of_gates(x.narrow(self.blade_dim, 0, 1)) * x, of_scalars(scalars)

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any
    ) -> None:
        check_origin(self, metadata, activation=self.activation)
        super()._load_from_state_dict(state, prefix, metadata, *args)


class GeometricBilinear(nn.Module):
    """linear(concat(a b, r · join(c, d))), with a, b, c, d four linear maps of the input.

    Args:
        in_features: number of input features F_in.
        out_features: F_out, even.
        in_scalars: number of input scalars S_in.
        out_scalars: number of output scalars S_out.
        algebra: the algebra of the multivectors.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Source: Brehmer et al.: Geometric algebra transformer, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> layer = clifford.GeometricBilinear(8, 8, 4, 4)
        >>> x, scalars = torch.randn(16, 10, 8), torch.randn(10, 4)
        >>> x, scalars = layer(x, scalars, x.mean((-2, -1), keepdim=True))
        >>> x.shape, scalars.shape
        (torch.Size([16, 10, 8]), torch.Size([10, 4]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        in_scalars: int,
        out_scalars: int,
        algebra: Algebra = PGA,
        *,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        if out_features % 2:
            raise ShapeError(
                f"out_features is {out_features}: half of them come from the product, half from "
                "the join. Give an even number."
            )
        self.algebra, self.blade_dim, self.backend = algebra, blade_dim, backend
        linear = linear_maps(algebra, False, blade_dim, backend)
        half = (in_features, out_features // 2, in_scalars)
        self.linear_left, self.linear_right = linear(*half), linear(*half)
        self.linear_join_left, self.linear_join_right = linear(*half), linear(*half)
        self.linear_out = linear(out_features, out_features, in_scalars, out_scalars)
        # the product starts near a · 1: gradients reach a from the first step
        self.linear_right.start_near_one()

    def forward(self, x: Tensor, scalars: Tensor, reference: Tensor) -> Pair:
        """The products and joins.

        Args:
            x: multivectors (B, batch…, F_in).
            scalars: (batch…, S_in).
            reference: multivectors that broadcast with x, for r of `equivariant_join`.

        Returns:
            (B, batch…, F_out) and (batch…, S_out).
        """
        maps = self.linear_left, self.linear_right, self.linear_join_left, self.linear_join_right
        factors = [y.movedim(self.blade_dim, 0) for y, _ in joined(maps, x, scalars)]
        both = _products(factors, reference.movedim(self.blade_dim, 0), self.algebra, self.backend)
        out: Pair = self.linear_out(both.movedim(0, self.blade_dim), scalars)
        return out


def _products(
    factors: Sequence[Tensor], reference: Tensor, algebra: Algebra, backend: str | None
) -> Tensor:
    """a b and r · join(c, d), side by side, of a, b, c, d (B, batch…, F)."""
    a, b, c, d = factors
    orientation = _orientation(reference, algebra).expand(a.shape[1:]).unsqueeze(0)
    given = same_kind(narrowed, a=a, b=b, c=c, d=d, reference=orientation)
    rows = [x.flatten(1, -2) if x.dim() > 2 else x.unsqueeze(1) for x in given]
    rows[-1] = rows[-1].contiguous()
    key = programs.key("bilinear", algebra)
    found = operator.run(key, backend_for(backend, algebra, rows), *rows)
    return torch.cat(found, -1).view(*a.shape[:-1], 2 * a.shape[-1])


def _orientation(reference: Tensor, algebra: Algebra) -> Tensor:
    """r of `equivariant_join`, (batch…, F) of (B, batch…, F)."""
    body = sum(1 << i for i, square in enumerate(algebra.metric) if square)
    return reference[algebra.positions[body]]


class GeometricMLP(nn.Module):
    """Bilinear layer to twice the features, gated nonlinearity, linear layer back: GATr's GeoMLP.

    Args:
        features: number of features F.
        scalars: number of scalars S.
        algebra: the algebra of the multivectors.
        activation: see `ScalarGatedNonlinearity`.
        dropout: see `GradeDropout`; of both layers' results.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Source: Brehmer et al.: Geometric algebra transformer, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> layer = clifford.GeometricMLP(8, 4)
        >>> x, scalars = torch.randn(16, 10, 8), torch.randn(10, 4)
        >>> x, scalars = layer(x, scalars, x.mean((-2, -1), keepdim=True))
        >>> x.shape, scalars.shape
        (torch.Size([16, 10, 8]), torch.Size([10, 4]))
    """

    def __init__(
        self,
        features: int,
        scalars: int,
        algebra: Algebra = PGA,
        *,
        activation: str = "gelu",
        dropout: float = 0.0,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        wide = (2 * features, 2 * scalars)
        self.bilinear = GeometricBilinear(
            features, wide[0], scalars, wide[1], algebra, blade_dim=blade_dim, backend=backend
        )
        self.gate = ScalarGatedNonlinearity(activation, blade_dim=blade_dim, backend=backend)
        linear = linear_maps(algebra, False, blade_dim, backend)
        self.linear = linear(wide[0], features, wide[1], scalars)
        self.dropout = GradeDropout(dropout, algebra, blade_dim=blade_dim, backend=backend)

    def forward(self, x: Tensor, scalars: Tensor, reference: Tensor) -> Pair:
        """The result of both layers.

        Args:
            x: multivectors (B, batch…, F).
            scalars: (batch…, S).
            reference: multivectors that broadcast with x, for r of `equivariant_join`.

        Returns:
            Tensors of the shapes of x and scalars.
        """
        hidden = self.dropout(*self.bilinear(x, scalars, reference))
        out: Pair = self.dropout(*self.linear(*self.gate(*hidden)))
        return out


class GATrBlock(nn.Module):
    """A block of `GATr`: x + attention(norm(x)), then x + mlp(norm(x)), of both kinds of features.

    Args:
        features: number of features F.
        scalars: number of scalars S.
        heads: number of attention heads.
        multi_query: see `SelfAttention`.
        algebra: the algebra of the multivectors.
        activation: see `ScalarGatedNonlinearity`.
        extra: (F', S') of the features that enter the attention only, see `SelfAttention`.
        rotary_base: of a `RotaryEncoding` in the attention; None for none.
        dropout: see `GradeDropout`; of attention and of the layers of an MLP.
        blade_dim: 0 for (B, batch…, items, F), −1 for (batch…, items, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Source: Brehmer et al.: Geometric algebra transformer, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> block = clifford.GATrBlock(8, 4, heads=2)
        >>> x, scalars = torch.randn(16, 10, 8), torch.randn(10, 4)
        >>> reference = x.mean((-2, -1), keepdim=True)
        >>> x, scalars = block(x, scalars, reference)
        >>> x.shape, scalars.shape
        (torch.Size([16, 10, 8]), torch.Size([10, 4]))
    """

    def __init__(
        self,
        features: int,
        scalars: int,
        heads: int = 8,
        multi_query: bool = True,
        algebra: Algebra = PGA,
        *,
        activation: str = "gelu",
        extra: Widths = (0, 0),
        rotary_base: float | None = None,
        dropout: float = 0.0,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        layout: dict[str, Any] = {"blade_dim": blade_dim, "backend": backend}
        self.norm = EquiLayerNorm(algebra, **layout)
        layout["dropout"] = dropout
        self.attention = SelfAttention(
            features,
            scalars,
            heads,
            multi_query,
            algebra,
            extra=extra,
            rotary_base=rotary_base,
            **layout,
        )
        self.mlp = GeometricMLP(features, scalars, algebra, activation=activation, **layout)

    def forward(
        self,
        x: Tensor,
        scalars: Tensor,
        reference: Tensor,
        mask: Tensor | None = None,
        extra: Pair | None = None,
    ) -> Pair:
        """Both like what was given.

        `reference` orients the join, see `equivariant_join`; `extra` as in `SelfAttention`.
        """
        x, scalars = added((x, scalars), self.attention(*self.norm(x, scalars), mask, extra))
        return added((x, scalars), self.mlp(*self.norm(x, scalars), reference))


class GATr(nn.Module):
    """The geometric algebra transformer: a linear map, blocks, a linear map.

    The reference of its joins is the mean of the input over items and features.

    Args:
        in_features: input multivectors of an item.
        out_features: output multivectors of an item.
        features: F of the blocks.
        in_scalars: input scalars of an item; 0 for none.
        out_scalars: output scalars of an item; 0 for none.
        scalars: S of the blocks; 0 for none.
        blocks: number of blocks.
        heads: number of attention heads.
        multi_query: see `SelfAttention`.
        algebra: the algebra of the multivectors.
        activation: see `ScalarGatedNonlinearity`.
        reinsert: numbers of input multivectors, and of input scalars, that enter the attention of
            every block once more.
        rotary_base: of a `RotaryEncoding` in the attention, as GATr's `pos_encoding` with a
            `pos_enc_base` of 4096; None for none.
        dropout: see `GradeDropout`; of attention and of the layers of an MLP.
        blade_dim: 0 for (B, batch…, items, F), −1 for (batch…, items, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Source: Brehmer et al.: Geometric algebra transformer, NeurIPS 2023; `from_gatr` converts
    checkpoints.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> network = clifford.GATr(1, 1, 8, in_scalars=0, out_scalars=1, scalars=4, blocks=2)
        >>> points = clifford.embed_point(torch.randn(100, 1, 3))  # 100 items of one multivector
        >>> x, scalars = network(points)
        >>> x.shape, scalars.shape
        (torch.Size([16, 100, 1]), torch.Size([100, 1]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        features: int,
        in_scalars: int,
        out_scalars: int,
        scalars: int,
        blocks: int = 10,
        heads: int = 8,
        multi_query: bool = True,
        algebra: Algebra = PGA,
        *,
        activation: str = "gelu",
        reinsert: Reinserted = ((), ()),
        rotary_base: float | None = None,
        dropout: float = 0.0,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.blade_dim = blade_dim
        self.reinsert = Reinsertion(*reinsert, blade_dim)
        linear = linear_maps(algebra, False, blade_dim, backend)
        self.linear_in = linear(in_features, features, in_scalars, scalars)
        block = functools.partial(GATrBlock, features, scalars, heads, multi_query, algebra)
        self.blocks = nn.ModuleList(
            block(
                activation=activation,
                extra=self.reinsert.widths,
                rotary_base=rotary_base,
                dropout=dropout,
                blade_dim=blade_dim,
                backend=backend,
            )
            for _ in range(blocks)
        )
        self.linear_out = linear(features, out_features, scalars, out_scalars)

    def forward(self, x: Tensor, scalars: Tensor | None = None, mask: Tensor | None = None) -> Pair:
        """The features of each item after all blocks.

        Args:
            x: multivectors (B, batch…, items, F_in).
            scalars: (batch…, items, S_in); None where in_scalars is 0.
            mask: of attention, see `geometric_attention`.

        Returns:
            (B, batch…, items, F_out) and (batch…, items, S_out).
        """
        reference = x.mean((-2, -1) if self.blade_dim == 0 else (-3, -2), keepdim=True)
        scalars = self.linear_in.scalars_of(x, scalars)
        extra = self.reinsert(x, scalars)
        x, scalars = self.linear_in(x, scalars)
        for block in self.blocks:
            x, scalars = block(x, scalars, reference, mask, extra)
        out: Pair = self.linear_out(x, scalars)
        return out


class AxialGATr(nn.Module):
    """`GATr` of items in a grid (rows, columns), with attention along one axis at a time.

    Blocks number 0, 2, … attend among the items of a row, the others among those of a column.

    Args:
        in_features: input multivectors of an item.
        out_features: output multivectors of an item.
        features: F of the blocks.
        in_scalars: input scalars of an item; 0 for none.
        out_scalars: output scalars of an item; 0 for none.
        scalars: S of the blocks; 0 for none.
        blocks: number of blocks.
        heads: number of attention heads.
        multi_query: see `SelfAttention`.
        algebra: the algebra of the multivectors.
        activation: see `ScalarGatedNonlinearity`.
        rotary_bases: of a `RotaryEncoding` of the places in a column, and of those in a row; None
            for none.
        blade_dim: 0 for (B, batch…, rows, columns, F), −1 for (batch…, rows, columns, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Source: Brehmer et al.: Geometric algebra transformer, NeurIPS 2023; `from_gatr` converts
    checkpoints.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> network = clifford.AxialGATr(1, 1, 8, in_scalars=0, out_scalars=1, scalars=4, blocks=2)
        >>> x, scalars = network(torch.randn(16, 5, 10, 1))  # five rows, ten columns
        >>> x.shape, scalars.shape
        (torch.Size([16, 5, 10, 1]), torch.Size([5, 10, 1]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        features: int,
        in_scalars: int,
        out_scalars: int,
        scalars: int,
        blocks: int = 20,
        heads: int = 8,
        multi_query: bool = True,
        algebra: Algebra = PGA,
        *,
        activation: str = "gelu",
        rotary_bases: tuple[float | None, float | None] = (None, None),
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.blade_dim = blade_dim
        linear = linear_maps(algebra, False, blade_dim, backend)
        self.linear_in = linear(in_features, features, in_scalars, scalars)
        block = functools.partial(GATrBlock, features, scalars, heads, multi_query, algebra)
        self.blocks = nn.ModuleList(
            block(
                activation=activation,
                rotary_base=rotary_bases[(i + 1) % 2],
                blade_dim=blade_dim,
                backend=backend,
            )
            for i in range(blocks)
        )
        self.linear_out = linear(features, out_features, scalars, out_scalars)

    def forward(
        self,
        x: Tensor,
        scalars: Tensor | None = None,
        masks: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Pair:
        """The features of each item after all blocks.

        Args:
            x: multivectors (B, batch…, rows, columns, F_in).
            scalars: (batch…, rows, columns, S_in); None where in_scalars is 0.
            masks: of attention in columns, and in rows.

        Returns:
            (B, batch…, rows, columns, F_out) and (batch…, rows, columns, S_out).
        """
        last = -1 if self.blade_dim == 0 else -2
        reference = x.mean((last - 2, last - 1, last), keepdim=True)
        x, scalars = self.linear_in(x, self.linear_in.scalars_of(x, scalars))
        for i, block in enumerate(self.blocks):
            in_columns = i % 2
            if in_columns:
                x, scalars = x.transpose(last - 1, last - 2), scalars.transpose(-2, -3)
            x, scalars = block(x, scalars, reference, masks[1 - in_columns])
            if in_columns:
                x, scalars = x.transpose(last - 1, last - 2), scalars.transpose(-2, -3)
        out: Pair = self.linear_out(x, scalars)
        return out
