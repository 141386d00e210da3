"""The Lorentz-equivariant transformer L-GATr, in the algebra of space-time.

Unlike GATr it has no join and no distances; queries, keys, values and products are normalised.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from torchweft.clifford.algebra import Algebra
from torchweft.clifford.functions import products as ops
from torchweft.clifford.layers.equilinear import MixedLinear
from torchweft.clifford.layers.gatr import EquiLayerNorm, ScalarGatedNonlinearity, SelfAttention

__all__ = ["SPACETIME", "LGATr", "LGATrAttention", "LGATrBlock", "LGATrMLP"]

SPACETIME = Algebra.cl(1, 3)
"""L-GATr's algebra: time squares to 1 and is first, space to −1."""


class LGATrAttention(SelfAttention):
    """`SelfAttention` with `EquiLayerNorm` of the queries, keys and values of each head.

    Args:
        features: F.
        scalars: S.
        heads: how many.
        multi_query: the heads share keys and values.
        pseudoscalar: see `EquiLinear`.
        blade_dim: 0 for (B, batch…, items, F), −1 for (batch…, items, F, B).
    """

    def __init__(
        self,
        features: int,
        scalars: int,
        heads: int = 8,
        multi_query: bool = False,
        pseudoscalar: bool = True,
        *,
        blade_dim: int = 0,
    ) -> None:
        super().__init__(
            features,
            scalars,
            heads,
            multi_query,
            SPACETIME,
            growth=1,
            pseudoscalar=pseudoscalar,
            blade_dim=blade_dim,
        )
        self.norm_qkv = EquiLayerNorm(SPACETIME)

    def _heads(self, x: Tensor, scalars: Tensor) -> list[Tensor]:
        return list(self.norm_qkv(*super()._heads(x, scalars)))


class LGATrMLP(nn.Module):
    """linear(gate(norm(linear(a b)))), with a and b two linear maps to four times the features.

    Args:
        features: F.
        scalars: S.
        pseudoscalar: see `EquiLinear`.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
    """

    def __init__(
        self, features: int, scalars: int, pseudoscalar: bool = True, *, blade_dim: int = 0
    ) -> None:
        super().__init__()
        self.blade_dim = blade_dim
        linear = functools.partial(
            MixedLinear, algebra=SPACETIME, pseudoscalar=pseudoscalar, blade_dim=blade_dim
        )
        wide = (4 * features, 4 * scalars)
        self.linear_left = linear(features, wide[0], scalars)
        self.linear_right = linear(features, wide[0], scalars)
        self.linear_out = linear(wide[0], wide[0], scalars, wide[1])
        self.norm = EquiLayerNorm(SPACETIME, blade_dim=blade_dim)
        self.gate = ScalarGatedNonlinearity(blade_dim=blade_dim)
        self.linear = linear(wide[0], features, wide[1], scalars)
        # the product starts near a · 1: gradients reach a from the first step
        with torch.no_grad():
            self.linear_right.s2mvs.bias.view(wide[0], -1)[:, 0] = 1

    def forward(self, x: Tensor, scalars: Tensor) -> tuple[Tensor, Tensor]:
        """Both like what was given."""
        left, right = (linear(x, scalars)[0] for linear in (self.linear_left, self.linear_right))
        product = ops.geometric_product(left, right, SPACETIME, blade_dim=self.blade_dim)
        y = self.gate(*self.norm(*self.linear_out(product, scalars)))
        out: tuple[Tensor, Tensor] = self.linear(*y)
        return out


class LGATrBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), on multivectors and scalars.

    Args:
        features: F.
        scalars: S.
        heads: of the attention.
        multi_query: see `LGATrAttention`.
        pseudoscalar: see `EquiLinear`.
        blade_dim: 0 for (B, batch…, items, F), −1 for (batch…, items, F, B).
    """

    def __init__(
        self,
        features: int,
        scalars: int,
        heads: int = 8,
        multi_query: bool = False,
        pseudoscalar: bool = True,
        *,
        blade_dim: int = 0,
    ) -> None:
        super().__init__()
        self.norm = EquiLayerNorm(SPACETIME, blade_dim=blade_dim)
        self.attention = LGATrAttention(
            features, scalars, heads, multi_query, pseudoscalar, blade_dim=blade_dim
        )
        self.mlp = LGATrMLP(features, scalars, pseudoscalar, blade_dim=blade_dim)

    def forward(
        self, x: Tensor, scalars: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both like what was given."""
        dx, ds = self.attention(*self.norm(x, scalars), mask)
        x, scalars = x + dx, scalars + ds
        dx, ds = self.mlp(*self.norm(x, scalars))
        return x + dx, scalars + ds


class LGATr(nn.Module):
    """A linear map, blocks, a linear map.

    Args:
        in_features: multivectors of an item that come in.
        out_features: multivectors that go out.
        features: F of the blocks.
        in_scalars: scalars of an item that come in.
        out_scalars: scalars that go out.
        scalars: S of the blocks.
        blocks: how many.
        heads: of the attention.
        multi_query: see `LGATrAttention`.
        pseudoscalar: equivariant under rotations and boosts alone, as L-GATr is unless told
            otherwise; False: under reflections too.
        blade_dim: 0 for (B, batch…, items, F), −1 for (batch…, items, F, B).
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
        multi_query: bool = False,
        pseudoscalar: bool = True,
        *,
        blade_dim: int = 0,
    ) -> None:
        super().__init__()
        linear = functools.partial(
            MixedLinear, algebra=SPACETIME, pseudoscalar=pseudoscalar, blade_dim=blade_dim
        )
        self.linear_in = linear(in_features, features, in_scalars, scalars)
        self.blocks = nn.ModuleList(
            LGATrBlock(features, scalars, heads, multi_query, pseudoscalar, blade_dim=blade_dim)
            for _ in range(blocks)
        )
        self.linear_out = linear(features, out_features, scalars, out_scalars)

    def forward(
        self, x: Tensor, scalars: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(B, batch…, items, F_in) and (batch…, items, S_in) to the same with F_out and S_out."""
        x, scalars = self.linear_in(x, scalars)
        for block in self.blocks:
            x, scalars = block(x, scalars, mask)
        out: tuple[Tensor, Tensor] = self.linear_out(x, scalars)
        return out
