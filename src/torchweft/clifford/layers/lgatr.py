"""L-GATr, the Lorentz-equivariant transformer, of items or of items and a condition.

An item carries multivectors (B, batch…, items, F) of space-time, or (batch…, items, F, B) with
blade_dim=-1, and plain scalars (batch…, items, S).  There are neither joins nor distances; queries,
keys, values and products are normalised.  `from_lgatr` converts the original's checkpoints.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchweft.clifford import functions
from torchweft.clifford.algebra import SPACETIME
from torchweft.clifford.layers.attention import (
    LGATrAttention,
    LGATrCrossAttention,
    Reinserted,
    Reinsertion,
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
from torchweft.clifford.layers.transformers import ScalarGatedNonlinearity
from torchweft.errors import ShapeError

__all__ = [
    "LGATR_1",
    "LGATR_2",
    "ConditionalLGATr",
    "ConditionalLGATrBlock",
    "LGATr",
    "LGATrBlock",
    "LGATrMLP",
    "LGATrOptions",
]


class LGATrOptions(NamedTuple):
    """Options of L-GATr's blocks; the defaults are those of its version 1, `LGATR_1`.

    Args:
        attention_ratio: the ratio of the features of all heads to those of a block.
        attention_bias: whether the maps before the attention have a bias.
        head_scale: whether a factor for each head's result is a parameter.
        norm_gains: whether parameters, one for each grade and feature, follow the norms of a block.
        mlp_ratio: the ratio of the hidden features of an MLP to those of a block.
        mlp_layers: number of layers of an MLP.
        products: whether the first layer of an MLP is a geometric product; else it is a gated
            linear map.
        bivectors: whether that product keeps its bivectors.
        dropout: see `GradeDropout`; of attention and of the layers of an MLP.

    Example:
        >>> from torchweft import clifford
        >>> clifford.LGATR_2 == clifford.LGATrOptions(attention_bias=False, norm_gains=True)
        True
    """

    attention_ratio: int = 1
    attention_bias: bool = True
    head_scale: bool = False
    norm_gains: bool = False
    mlp_ratio: int = 4
    mlp_layers: int = 2
    products: bool = True
    bivectors: bool = True
    dropout: float = 0.0


LGATR_1 = LGATrOptions()
"""The defaults of L-GATr's version 1."""

LGATR_2 = LGATrOptions(attention_bias=False, norm_gains=True)
"""The defaults of L-GATr's version 2, whose activation is "gelu_tanh"."""


class LGATrMLP(nn.Module):
    """linear(gate(norm(linear(a b)))), a and b two linear maps to `mlp_ratio` times the features.

    Args:
        features: number of features F.
        scalars: number of scalars S.
        pseudoscalar: see `EquiLinear`.
        activation: see `ScalarGatedNonlinearity`.
        options: see `LGATrOptions`; each further layer is a gate and a linear map.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Source: Spinner et al.: Lorentz-equivariant geometric algebra transformers for high-energy
    physics, NeurIPS 2024.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> x, scalars = clifford.LGATrMLP(8, 4)(torch.randn(16, 10, 8), torch.randn(10, 4))
        >>> x.shape, scalars.shape
        (torch.Size([16, 10, 8]), torch.Size([10, 4]))
    """

    def __init__(
        self,
        features: int,
        scalars: int,
        pseudoscalar: bool = True,
        *,
        activation: str = "gelu",
        options: LGATrOptions = LGATR_1,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        if options.mlp_layers < 1:
            raise ShapeError(
                f"mlp_layers is {options.mlp_layers}: an MLP has at least one layer. Pass "
                "LGATrOptions(mlp_layers=2)."
            )
        self.blade_dim, self.backend = blade_dim, backend
        self.products, self.bivectors = options.products, options.bivectors
        layout: dict[str, Any] = {"blade_dim": blade_dim, "backend": backend}
        linear = linear_maps(SPACETIME, pseudoscalar, blade_dim, backend)
        wide = (options.mlp_ratio * features, options.mlp_ratio * scalars)
        widths = [(features, scalars), *[wide] * (options.mlp_layers - 1), (features, scalars)]
        if self.products:
            out = widths[1]
            self.linear_left = linear(features, out[0], scalars)
            self.linear_right = linear(features, out[0], scalars)
            self.linear_out = linear(out[0], out[0], scalars, out[1])
            self.norm = EquiLayerNorm(SPACETIME, **layout)
            # the product starts near a · 1: gradients reach a from the first step
            self.linear_right.start_near_one()
            widths = widths[1:]
        self.gate = ScalarGatedNonlinearity(activation, **layout)
        self.linears = nn.ModuleList(
            linear(a[0], b[0], a[1], b[1]) for a, b in itertools.pairwise(widths)
        )
        self.dropout = GradeDropout(options.dropout, SPACETIME, **layout)

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any
    ) -> None:
        check_origin(self, metadata, bivectors=self.bivectors)
        super()._load_from_state_dict(state, prefix, metadata, *args)

    def forward(self, x: Tensor, scalars: Tensor) -> Pair:
        """The result of all layers.

        Args:
            x: multivectors (B, batch…, F).
            scalars: (batch…, S).

        Returns:
            Tensors of the shapes of x and scalars.
        """
        if self.products:
            x, scalars = self.dropout(*self._product(x, scalars))
        for linear in self.linears:
            x, scalars = self.dropout(*linear(*self.gate(x, scalars)))
        return x, scalars

    def _product(self, x: Tensor, scalars: Tensor) -> Pair:
        layout: dict[str, Any] = {"blade_dim": self.blade_dim, "backend": self.backend}
        maps = self.linear_left, self.linear_right
        left, right = (y for y, _ in joined(maps, x, scalars))
        product = functions.geometric_product(left, right, SPACETIME, **layout)
        if not self.bivectors:
            product = functions.grade_project(product, (0, 1, 3, 4), SPACETIME, **layout)
        out: Pair = self.norm(*self.linear_out(product, scalars))
        return out


class LGATrBlock(nn.Module):
    """A block of `LGATr`: x + attention(norm(x)), then x + mlp(norm(x)), of both kinds of features.

    Args:
        features: number of features F.
        scalars: number of scalars S.
        heads: number of attention heads.
        multi_query: see `LGATrAttention`.
        pseudoscalar: see `EquiLinear`.
        activation: see `ScalarGatedNonlinearity`.
        extra: (F', S') of the features that enter the attention only, see `SelfAttention`.
        options: see `LGATrOptions`.
        blade_dim: 0 for (B, batch…, items, F), −1 for (batch…, items, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Source: Spinner et al.: Lorentz-equivariant geometric algebra transformers for high-energy
    physics, NeurIPS 2024.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> block = clifford.LGATrBlock(8, 4, heads=2)
        >>> x, scalars = block(torch.randn(16, 10, 8), torch.randn(10, 4))
        >>> x.shape, scalars.shape
        (torch.Size([16, 10, 8]), torch.Size([10, 4]))
    """

    def __init__(
        self,
        features: int,
        scalars: int,
        heads: int = 8,
        multi_query: bool = False,
        pseudoscalar: bool = True,
        *,
        activation: str = "gelu",
        extra: Widths = (0, 0),
        options: LGATrOptions = LGATR_1,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        layout: dict[str, Any] = {"blade_dim": blade_dim, "backend": backend}
        gains = (features, scalars) if options.norm_gains else None
        self.norm1 = EquiLayerNorm(SPACETIME, gains=gains, **layout)
        self.norm2 = EquiLayerNorm(SPACETIME, gains=gains, **layout)
        shape = (features, scalars, heads, multi_query, pseudoscalar)
        attention = _of_attention(options) | layout
        self.attention = LGATrAttention(*shape, extra=extra, **attention)
        mlp = (features, scalars, pseudoscalar)
        self.mlp = LGATrMLP(*mlp, activation=activation, options=options, **layout)

    def forward(
        self, x: Tensor, scalars: Tensor, mask: Tensor | None = None, extra: Pair | None = None
    ) -> Pair:
        """The features after attention and MLP.

        Args:
            x: multivectors (B, batch…, items, F).
            scalars: (batch…, items, S).
            mask: see `geometric_attention`.
            extra: see `SelfAttention.forward`.

        Returns:
            Tensors of the shapes of x and scalars.
        """
        x, scalars = added((x, scalars), self.attention(*self.norm1(x, scalars), mask, extra))
        return added((x, scalars), self.mlp(*self.norm2(x, scalars)))


class ConditionalLGATrBlock(LGATrBlock):
    """A block of `ConditionalLGATr`: `LGATrBlock`, with attention over a condition in between.

    Args:
        features: number of features F.
        scalars: number of scalars S.
        other_features: number of multivectors of an item of the condition.
        other_scalars: number of scalars of an item of the condition.
        heads: numbers of heads, of the attention over items and of that over the condition.
        multi_query: a flag for each of both attentions, see `LGATrAttention`.
        pseudoscalar: see `EquiLinear`.
        activation: see `ScalarGatedNonlinearity`.
        options: see `LGATrOptions`.
        cross_options: options of the attention over the condition; None: the same.
        blade_dim: 0 for (B, batch…, items, F), −1 for (batch…, items, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Source: L-GATr 2, https://github.com/heidelberg-hepml/lgatr.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> block = clifford.ConditionalLGATrBlock(8, 4, 6, 3, heads=(2, 2))
        >>> own = torch.randn(16, 10, 8), torch.randn(10, 4)
        >>> other = torch.randn(16, 5, 6), torch.randn(5, 3)
        >>> x, scalars = block(*own, *other)
        >>> x.shape, scalars.shape
        (torch.Size([16, 10, 8]), torch.Size([10, 4]))
    """

    def __init__(
        self,
        features: int,
        scalars: int,
        other_features: int,
        other_scalars: int,
        heads: tuple[int, int] = (8, 8),
        multi_query: tuple[bool, bool] = (False, False),
        pseudoscalar: bool = True,
        *,
        activation: str = "gelu_tanh",
        options: LGATrOptions = LGATR_2,
        cross_options: LGATrOptions | None = None,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        layout: dict[str, Any] = {"blade_dim": blade_dim, "backend": backend}
        shape = (features, scalars, heads[0], multi_query[0], pseudoscalar)
        super().__init__(*shape, activation=activation, options=options, **layout)
        own, other = (features, scalars), (other_features, other_scalars)
        gains = options.norm_gains
        self.norm3 = EquiLayerNorm(SPACETIME, gains=own if gains else None, **layout)
        self.norm_other = EquiLayerNorm(SPACETIME, gains=other if gains else None, **layout)
        cross = (*own, *other, heads[1], multi_query[1], pseudoscalar)
        attention = _of_attention(cross_options or options) | layout
        self.cross_attention = LGATrCrossAttention(*cross, **attention)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        scalars: Tensor,
        other: Tensor,
        other_scalars: Tensor,
        mask: Tensor | None = None,
        cross_mask: Tensor | None = None,
    ) -> Pair:
        """The features after attention, attention over the condition, and MLP.

        Args:
            x: multivectors (B, batch…, items, F).
            scalars: (batch…, items, S).
            other: multivectors of the condition, (B, batch…, others, F').
            other_scalars: scalars of the condition, (batch…, others, S').
            mask: of the attention over items.
            cross_mask: of the attention over the condition.

        Returns:
            Tensors of the shapes of x and scalars.
        """
        x, scalars = added((x, scalars), self.attention(*self.norm1(x, scalars), mask))
        others = self.norm_other(other, other_scalars)
        change = self.cross_attention(*self.norm2(x, scalars), *others, cross_mask)
        x, scalars = added((x, scalars), change)
        return added((x, scalars), self.mlp(*self.norm3(x, scalars)))


class LGATr(nn.Module):
    """The Lorentz-equivariant transformer: a linear map, blocks, a linear map.

    Args:
        in_features: input multivectors of an item.
        out_features: output multivectors of an item.
        features: F of the blocks.
        in_scalars: input scalars of an item; 0 for none.
        out_scalars: output scalars of an item; 0 for none.
        scalars: S of the blocks; 0 for none.
        blocks: number of blocks.
        heads: number of attention heads.
        multi_query: see `LGATrAttention`.
        pseudoscalar: equivariant under rotations and boosts only, as L-GATr is by default;
            False: under reflections too.
        activation: see `ScalarGatedNonlinearity`; "gelu_tanh" is that of L-GATr 2.
        reinsert: numbers of input multivectors, and of input scalars, that enter the attention of
            every block once more.
        options: of the blocks; `LGATR_2` are those of L-GATr 2.
        blade_dim: 0 for (B, batch…, items, F), −1 for (batch…, items, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Source: Spinner et al.: Lorentz-equivariant geometric algebra transformers for high-energy
    physics, NeurIPS 2024; `from_lgatr` converts checkpoints.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> network = clifford.LGATr(1, 1, 8, in_scalars=0, out_scalars=1, scalars=4, blocks=2)
        >>> momenta = clifford.embed_vector(torch.randn(100, 1, 4), clifford.SPACETIME)
        >>> x, scalars = network(momenta)
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
        multi_query: bool = False,
        pseudoscalar: bool = True,
        *,
        activation: str = "gelu",
        reinsert: Reinserted = ((), ()),
        options: LGATrOptions = LGATR_1,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.reinsert = Reinsertion(*reinsert, blade_dim)
        linear = linear_maps(SPACETIME, pseudoscalar, blade_dim, backend)
        self.linear_in = linear(in_features, features, in_scalars, scalars)
        shape = (features, scalars, heads, multi_query, pseudoscalar)
        layout: dict[str, Any] = {"blade_dim": blade_dim, "backend": backend, "options": options}
        extra = self.reinsert.widths
        self.blocks = nn.ModuleList(
            LGATrBlock(*shape, activation=activation, extra=extra, **layout) for _ in range(blocks)
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
        scalars = self.linear_in.scalars_of(x, scalars)
        extra = self.reinsert(x, scalars)
        x, scalars = self.linear_in(x, scalars)
        for block in self.blocks:
            x, scalars = block(x, scalars, mask, extra)
        out: Pair = self.linear_out(x, scalars)
        return out


class ConditionalLGATr(nn.Module):
    """L-GATr 2's transformer of items with a condition, which it attends over in every block.

    Args:
        in_features: input multivectors of an item.
        out_features: output multivectors of an item.
        features: F of the blocks.
        in_scalars: input scalars of an item; 0 for none.
        out_scalars: output scalars of an item; 0 for none.
        scalars: S of the blocks; 0 for none.
        other_features: multivectors of an item of the condition.
        other_scalars: scalars of an item of the condition; 0 for none.
        blocks: number of blocks.
        heads: numbers of heads, of the attention over items and of that over the condition.
        multi_query: a flag for each of both attentions, see `LGATrAttention`.
        pseudoscalar: as in `LGATr`.
        activation: see `ScalarGatedNonlinearity`.
        options: of the blocks.
        cross_options: of the attention over the condition, if others.
        blade_dim: 0 for (B, batch…, items, F), −1 for (batch…, items, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Source: L-GATr 2, https://github.com/heidelberg-hepml/lgatr; `from_lgatr` converts checkpoints.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> widths = 1, 1, 8, 0, 1, 4, 2, 0  # multivectors, scalars, those of the condition
        >>> network = clifford.ConditionalLGATr(*widths, blocks=2)
        >>> x, scalars = network(torch.randn(16, 10, 1), torch.randn(16, 5, 2))
        >>> x.shape, scalars.shape
        (torch.Size([16, 10, 1]), torch.Size([10, 1]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        features: int,
        in_scalars: int,
        out_scalars: int,
        scalars: int,
        other_features: int,
        other_scalars: int,
        blocks: int = 10,
        heads: tuple[int, int] = (8, 8),
        multi_query: tuple[bool, bool] = (False, False),
        pseudoscalar: bool = True,
        *,
        activation: str = "gelu_tanh",
        options: LGATrOptions = LGATR_2,
        cross_options: LGATrOptions | None = None,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        linear = linear_maps(SPACETIME, pseudoscalar, blade_dim, backend)
        self.linear_in = linear(in_features, features, in_scalars, scalars)
        shape = (features, scalars, other_features, other_scalars, heads, multi_query, pseudoscalar)
        both = {"options": options, "cross_options": cross_options}
        layout: dict[str, Any] = {"blade_dim": blade_dim, "backend": backend, **both}
        self.blocks = nn.ModuleList(
            ConditionalLGATrBlock(*shape, activation=activation, **layout) for _ in range(blocks)
        )
        self.linear_out = linear(features, out_features, scalars, out_scalars)

    def forward(
        self,
        x: Tensor,
        other: Tensor,
        scalars: Tensor | None = None,
        other_scalars: Tensor | None = None,
        mask: Tensor | None = None,
        cross_mask: Tensor | None = None,
    ) -> Pair:
        """The features of each item after all blocks.

        Args:
            x: multivectors (B, batch…, items, F_in).
            other: multivectors of the condition, (B, batch…, others, F').
            scalars: (batch…, items, S_in); None where in_scalars is 0.
            other_scalars: scalars of the condition, (batch…, others, S'); None where there are
                none.
            mask: of the attention over items.
            cross_mask: of the attention over the condition.

        Returns:
            (B, batch…, items, F_out) and (batch…, items, S_out).
        """
        others = other, self.linear_in.scalars_of(other, other_scalars)
        x, scalars = self.linear_in(x, self.linear_in.scalars_of(x, scalars))
        for block in self.blocks:
            x, scalars = block(x, scalars, *others, mask, cross_mask)
        out: Pair = self.linear_out(x, scalars)
        return out


def _of_attention(options: LGATrOptions) -> dict[str, Any]:
    return {
        "growth": options.attention_ratio,
        "bias": options.attention_bias,
        "head_scale": options.head_scale,
        "dropout": options.dropout,
    }
