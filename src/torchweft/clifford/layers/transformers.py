"""The geometric algebra transformers GATr (projective algebra) and L-GATr (space-time).

An item carries multivectors (B, batch…, items, F), or (batch…, items, F, B) with blade_dim=-1, and
plain scalars (batch…, items, S).  L-GATr has neither join nor distances; queries, keys, values and
products are normalised.  `from_gatr` and `from_lgatr` convert the originals' checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchweft.clifford import functions
from torchweft.clifford.algebra import PGA, SPACETIME, Algebra
from torchweft.clifford.calls import backend_on
from torchweft.clifford.layers.attention import LGATrAttention, Pair, SelfAttention, check_origin
from torchweft.clifford.layers.equilinear import EquiLayerNorm, linear_maps
from torchweft.errors import ShapeError

__all__ = [
    "GATr",
    "GATrBlock",
    "GeometricBilinear",
    "GeometricMLP",
    "LGATr",
    "LGATrBlock",
    "LGATrMLP",
    "ScalarGatedNonlinearity",
    "equivariant_join",
    "join",
]


def join(
    x: Tensor, y: Tensor, algebra: Algebra = PGA, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """dual(dual(x) ∧ dual(y)): `regressive` with GATr's signs.

    `regressive` undoes the dual at the end.  Applying it once more instead changes grade k by
    (−1)^(k(n−k)): the grade involution for even n, nothing for odd n.
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
    PGA.  `reference` is like x, or broadcasts with it.
    """
    body = sum(1 << i for i, square in enumerate(algebra.metric) if square)
    orientation = reference.movedim(blade_dim, 0)[algebra.positions[body]].unsqueeze(blade_dim)
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


class ScalarGatedNonlinearity(nn.Module):
    """f(x₀) · x, and f of the scalars.

    Args:
        activation: f: "gelu" as in GATr and L-GATr 1 (tanh formula for the gates, the exact one for
            scalars), "gelu_tanh" as in L-GATr 2 (for both), "relu", "sigmoid", "silu" or "tanh".
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: None chooses; gates are torch's own on every backend.
    """

    def __init__(
        self, activation: str = "gelu", *, blade_dim: int = 0, backend: str | None = None
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ShapeError(
                f"activation is {activation!r}: it must be one of {', '.join(_ACTIVATIONS)}. "
                "Pass activation='gelu', as GATr has by default."
            )
        self.activation, self.blade_dim, self.backend = activation, blade_dim, backend

    def forward(self, x: Tensor, scalars: Tensor) -> Pair:
        """Both like what was given."""
        backend_on(self.backend, x.device.type)
        of_gates, of_scalars = _ACTIVATIONS[self.activation]
        return of_gates(x.narrow(self.blade_dim, 0, 1)) * x, of_scalars(scalars)

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any
    ) -> None:
        check_origin(self, metadata, activation=self.activation)
        super()._load_from_state_dict(state, prefix, metadata, *args)


class GeometricBilinear(nn.Module):
    """linear(concat(a b, r · join(c, d))), with a, b, c, d four linear maps of the input.

    Args:
        in_features: F_in.
        out_features: F_out, even.
        in_scalars: S_in.
        out_scalars: S_out.
        algebra: of the multivectors.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: None chooses.
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
        nn.init.ones_(self.linear_right.s2mvs.bias)

    def forward(self, x: Tensor, scalars: Tensor, reference: Tensor) -> Pair:
        """(B, batch…, F_in), (batch…, S_in), and a reference that broadcasts with x for r."""
        maps = self.linear_left, self.linear_right, self.linear_join_left, self.linear_join_right
        a, b, c, d = (linear(x, scalars)[0] for linear in maps)
        blade_dim, backend = self.blade_dim, self.backend
        product = functions.geometric_product(
            a, b, self.algebra, blade_dim=blade_dim, backend=backend
        )
        joined = equivariant_join(
            c, d, reference, self.algebra, blade_dim=blade_dim, backend=backend
        )
        both = torch.cat([product, joined], -1 if blade_dim == 0 else -2)
        out: Pair = self.linear_out(both, scalars)
        return out


class GeometricMLP(nn.Module):
    """Bilinear layer to twice the features, gated nonlinearity, linear layer back: GATr's GeoMLP.

    Args:
        features: F.
        scalars: S.
        algebra: of the multivectors.
        activation: see `ScalarGatedNonlinearity`.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: None chooses.
    """

    def __init__(
        self,
        features: int,
        scalars: int,
        algebra: Algebra = PGA,
        *,
        activation: str = "gelu",
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

    def forward(self, x: Tensor, scalars: Tensor, reference: Tensor) -> Pair:
        """Both like what was given."""
        out: Pair = self.linear(*self.gate(*self.bilinear(x, scalars, reference)))
        return out


class LGATrMLP(nn.Module):
    """linear(gate(norm(linear(a b)))), with a and b two linear maps to four times the features.

    Args:
        features: F.
        scalars: S.
        pseudoscalar: see `EquiLinear`.
        activation: see `ScalarGatedNonlinearity`.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: None chooses.
    """

    def __init__(
        self,
        features: int,
        scalars: int,
        pseudoscalar: bool = True,
        *,
        activation: str = "gelu",
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.blade_dim, self.backend = blade_dim, backend
        linear = linear_maps(SPACETIME, pseudoscalar, blade_dim, backend)
        wide = (4 * features, 4 * scalars)
        self.linear_left = linear(features, wide[0], scalars)
        self.linear_right = linear(features, wide[0], scalars)
        self.linear_out = linear(wide[0], wide[0], scalars, wide[1])
        self.norm = EquiLayerNorm(SPACETIME, blade_dim=blade_dim, backend=backend)
        self.gate = ScalarGatedNonlinearity(activation, blade_dim=blade_dim, backend=backend)
        self.linear = linear(wide[0], features, wide[1], scalars)
        # the product starts near a · 1: gradients reach a from the first step
        with torch.no_grad():
            self.linear_right.s2mvs.bias.view(wide[0], -1)[:, 0] = 1

    def forward(self, x: Tensor, scalars: Tensor) -> Pair:
        """Both like what was given."""
        left, right = (linear(x, scalars)[0] for linear in (self.linear_left, self.linear_right))
        product = functions.geometric_product(
            left, right, SPACETIME, blade_dim=self.blade_dim, backend=self.backend
        )
        out: Pair = self.linear(*self.gate(*self.norm(*self.linear_out(product, scalars))))
        return out


class GATrBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), on multivectors and scalars: see `GATr`."""

    def __init__(
        self,
        features: int,
        scalars: int,
        heads: int = 8,
        multi_query: bool = True,
        algebra: Algebra = PGA,
        *,
        activation: str = "gelu",
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.norm = EquiLayerNorm(algebra, blade_dim=blade_dim, backend=backend)
        shape = (features, scalars, heads, multi_query, algebra)
        self.attention = SelfAttention(*shape, blade_dim=blade_dim, backend=backend)
        options: dict[str, Any] = {"blade_dim": blade_dim, "backend": backend}
        self.mlp = GeometricMLP(features, scalars, algebra, activation=activation, **options)

    def forward(
        self, x: Tensor, scalars: Tensor, reference: Tensor, mask: Tensor | None = None
    ) -> Pair:
        """Both like what was given; `reference` orients the join, see `equivariant_join`."""
        return _with_residuals(self, x, scalars, mask, reference)


class LGATrBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), on multivectors and scalars: see `LGATr`."""

    def __init__(
        self,
        features: int,
        scalars: int,
        heads: int = 8,
        multi_query: bool = False,
        pseudoscalar: bool = True,
        *,
        activation: str = "gelu",
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.norm = EquiLayerNorm(SPACETIME, blade_dim=blade_dim, backend=backend)
        shape = (features, scalars, heads, multi_query, pseudoscalar)
        self.attention = LGATrAttention(*shape, blade_dim=blade_dim, backend=backend)
        options: dict[str, Any] = {"blade_dim": blade_dim, "backend": backend}
        self.mlp = LGATrMLP(features, scalars, pseudoscalar, activation=activation, **options)

    def forward(self, x: Tensor, scalars: Tensor, mask: Tensor | None = None) -> Pair:
        """Both like what was given."""
        return _with_residuals(self, x, scalars, mask)


class GATr(nn.Module):
    """The geometric algebra transformer: a linear map, blocks, a linear map.

    Args:
        in_features: input multivectors of an item.
        out_features: output multivectors of an item.
        features: F of the blocks.
        in_scalars: input scalars of an item.
        out_scalars: output scalars of an item.
        scalars: S of the blocks.
        blocks: number of blocks.
        heads: number of attention heads.
        multi_query: see `SelfAttention`.
        algebra: of the multivectors.
        activation: see `ScalarGatedNonlinearity`.
        blade_dim: 0 for (B, batch…, items, F), −1 for (batch…, items, F, B).
        backend: None chooses.
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
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.blade_dim = blade_dim
        linear = linear_maps(algebra, False, blade_dim, backend)
        self.linear_in = linear(in_features, features, in_scalars, scalars)
        shape = (features, scalars, heads, multi_query, algebra)
        self.blocks = nn.ModuleList(
            GATrBlock(*shape, activation=activation, blade_dim=blade_dim, backend=backend)
            for _ in range(blocks)
        )
        self.linear_out = linear(features, out_features, scalars, out_scalars)

    def forward(self, x: Tensor, scalars: Tensor, mask: Tensor | None = None) -> Pair:
        """(B, batch…, items, F_in) and (batch…, items, S_in) to the same with F_out and S_out."""
        items_features = (-2, -1) if self.blade_dim == 0 else (-3, -2)
        reference = x.mean(items_features, keepdim=True)
        return _through_blocks(self, x, scalars, reference, mask)


class LGATr(nn.Module):
    """The Lorentz-equivariant transformer: a linear map, blocks, a linear map.

    Args:
        in_features: input multivectors of an item.
        out_features: output multivectors of an item.
        features: F of the blocks.
        in_scalars: input scalars of an item.
        out_scalars: output scalars of an item.
        scalars: S of the blocks.
        blocks: number of blocks.
        heads: number of attention heads.
        multi_query: see `LGATrAttention`.
        pseudoscalar: equivariant under rotations and boosts alone, as L-GATr is by default;
            False: under reflections too.
        activation: see `ScalarGatedNonlinearity`.
        blade_dim: 0 for (B, batch…, items, F), −1 for (batch…, items, F, B).
        backend: None chooses.
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
        activation: str = "gelu",
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        linear = linear_maps(SPACETIME, pseudoscalar, blade_dim, backend)
        self.linear_in = linear(in_features, features, in_scalars, scalars)
        shape = (features, scalars, heads, multi_query, pseudoscalar)
        self.blocks = nn.ModuleList(
            LGATrBlock(*shape, activation=activation, blade_dim=blade_dim, backend=backend)
            for _ in range(blocks)
        )
        self.linear_out = linear(features, out_features, scalars, out_scalars)

    def forward(self, x: Tensor, scalars: Tensor, mask: Tensor | None = None) -> Pair:
        """(B, batch…, items, F_in) and (batch…, items, S_in) to the same with F_out and S_out."""
        return _through_blocks(self, x, scalars, mask)


def _with_residuals(
    block: GATrBlock | LGATrBlock,
    x: Tensor,
    scalars: Tensor,
    mask: Tensor | None,
    *reference: Tensor,
) -> Pair:
    """x + attention(norm(x)), then x + mlp(norm(x))."""
    dx, ds = block.attention(*block.norm(x, scalars), mask)
    x, scalars = x + dx, scalars + ds
    dx, ds = block.mlp(*block.norm(x, scalars), *reference)
    return x + dx, scalars + ds


def _through_blocks(network: GATr | LGATr, x: Tensor, scalars: Tensor, *others: Any) -> Pair:
    x, scalars = network.linear_in(x, scalars)
    for block in network.blocks:
        x, scalars = block(x, scalars, *others)
    out: Pair = network.linear_out(x, scalars)
    return out
