"""L-GATr-slim: the transformer of L-GATr 2 on four-vectors and scalars alone.

An item carries vectors (4, batch…, items, V) of space-time, or (batch…, items, V, 4) with
blade_dim=-1, and scalars (batch…, items, S).  Everything here is torch's own.  Parameters are named
and laid out as in the original; `from_lgatr` converts its checkpoints.
"""

from __future__ import annotations

import itertools
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchweft.clifford.layers.attention import Widths, added, check_origin, four_dims
from torchweft.clifford.layers.equilinear import Pair
from torchweft.clifford.layers.transformers import activations_of
from torchweft.errors import ShapeError

__all__ = ["ConditionalLGATrSlim", "LGATrSlim"]


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """t·t' − Σ x_i x_i' of vectors (4, …)."""
    products = x * y
    return products[0] - products[1:].sum(0)


class _Linear(nn.Module):
    """x ↦ weight_v x on vectors' features, and torch's linear map on scalars."""

    def __init__(self, given: Widths, out: Widths, bias: bool = True) -> None:
        super().__init__()
        self.out = out
        self.weight_v = nn.Parameter(torch.empty(out[0], given[0]))
        if self.weight_v.numel():
            nn.init.normal_(self.weight_v, std=given[0] ** -0.5)
        has_scalars = bool(given[1] and out[1])
        self.linear_s = nn.Linear(given[1], out[1], bias=bias) if has_scalars else None

    def forward(self, vectors: Tensor, scalars: Tensor) -> Pair:
        if self.linear_s is None:
            out = scalars.new_zeros(*scalars.shape[:-1], self.out[1])
        else:
            out = self.linear_s(scalars)
        return functional.linear(vectors, self.weight_v), out


class _Norm(nn.Module):
    """Vectors and scalars over the root of their common mean square, and gains behind it."""

    weight_v: nn.Parameter | None
    weight_s: nn.Parameter | None

    def __init__(self, features: Widths, gains: bool) -> None:
        super().__init__()
        self.weight_v = nn.Parameter(torch.ones(features[0])) if gains else None
        self.weight_s = nn.Parameter(torch.ones(features[1])) if gains else None

    def forward(self, vectors: Tensor, scalars: Tensor) -> Pair:
        wide = torch.promote_types(vectors.dtype, torch.float32)
        of_vectors = _dot(vectors.to(wide), vectors.to(wide)).abs()
        squares = torch.cat([of_vectors, scalars.to(wide).square()], -1)
        scale = (squares.mean(-1, keepdim=True) + 0.01).rsqrt()
        v, s = vectors * scale, scalars * scale
        if self.weight_v is not None and self.weight_s is not None:
            v, s = v * self.weight_v, s * self.weight_s
        return v.to(vectors.dtype), s.to(scalars.dtype)


class _Dropout(nn.Module):
    """In training, each vector and each scalar is 0 with probability p, else times 1/(1 − p)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, vectors: Tensor, scalars: Tensor) -> Pair:
        if not self.training or not self.p:
            return vectors, scalars
        kept = functional.dropout(vectors.new_ones(vectors.shape[1:]), self.p)
        return vectors * kept, functional.dropout(scalars, self.p)


class _Attention(nn.Module):
    """Attention of items over items, or over others."""

    def __init__(
        self, own: Widths, other: Widths, heads: int, attention_ratio: int, dropout: float
    ) -> None:
        super().__init__()
        self.heads = heads
        vectors, scalars = (max(attention_ratio * f // heads, 1) for f in own)
        self.hidden = (vectors, max(scalars, 4))
        wide = (heads * self.hidden[0], heads * self.hidden[1])
        self.linear_in_q = _Linear(own, wide, bias=False)
        self.linear_in_kv = _Linear(other, (2 * wide[0], 2 * wide[1]), bias=False)
        self.linear_out = _Linear(wide, own)
        self.norm = _Norm(self.hidden, gains=False)
        self.dropout = _Dropout(dropout)

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any
    ) -> None:
        check_origin(self, metadata, heads=self.heads)
        super()._load_from_state_dict(state, prefix, metadata, *args)

    def forward(self, own: Pair, other: Pair, mask: Tensor | None) -> Pair:
        q, q_s = self.norm(*self._heads(1, *self.linear_in_q(*own)))
        kv, kv_s = self.norm(*self._heads(2, *self.linear_in_kv(*other)))
        q, (k, v) = q.squeeze(1), kv.unbind(1)
        q_s, (k_s, v_s) = q_s.squeeze(0), kv_s.unbind(0)
        query = torch.cat([q[0], *(-q[1:]).unbind(0), q_s], -1)
        key, value = torch.cat([*k.unbind(0), k_s], -1), torch.cat([*v.unbind(0), v_s], -1)
        if mask is not None:
            mask = four_dims(mask.expand(*query.shape[:-1], key.shape[-2]))
        out = functional.scaled_dot_product_attention(
            four_dims(query), four_dims(key), four_dims(value), mask
        ).reshape(*query.shape[:-1], value.shape[-1])
        out = out.movedim(-3, -2)  # (…, items, heads, features)
        h, t = torch.split(out, [4 * self.hidden[0], self.hidden[1]], -1)
        h = torch.unflatten(h, -1, (4, -1)).movedim(-2, 0)
        result: Pair = self.dropout(*self.linear_out(h.flatten(-2), t.flatten(-2)))
        return result

    def _heads(self, count: int, vectors: Tensor, scalars: Tensor) -> list[Tensor]:
        """Features (count · hidden · heads) to count × (…, heads, items, hidden)."""
        found = []
        for x, hidden, place in ((vectors, self.hidden[0], 1), (scalars, self.hidden[1], 0)):
            split = torch.unflatten(x, -1, (count, hidden, self.heads))
            found.append(split.movedim(-3, place).movedim(-1, -3))
        return found


class _GatedLinear(nn.Module):
    """f(½ b·c) a for vectors a, b, c, and g(t) s for scalars s, t: all five linear in the input."""

    def __init__(self, given: Widths, out: Widths, activations: tuple[str, str]) -> None:
        super().__init__()
        self.linear = _Linear(given, (3 * out[0], 2 * out[1]))
        self.activations = activations

    def forward(self, vectors: Tensor, scalars: Tensor) -> Pair:
        v, s = self.linear(vectors, scalars)
        (a, b, c), (s, t) = v.chunk(3, -1), s.chunk(2, -1)
        of_scalars, of_vectors = (activations_of(name)[0] for name in self.activations)
        return of_vectors(_dot(b, c) / 2) * a, of_scalars(t) * s

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any
    ) -> None:
        check_origin(self, metadata, activations=self.activations)
        super()._load_from_state_dict(state, prefix, metadata, *args)


class _MLP(nn.Module):
    """Gated linear layers, then a linear one."""

    def __init__(
        self,
        features: Widths,
        activations: tuple[str, str],
        mlp_ratio: int,
        mlp_layers: int,
        dropout: float,
    ) -> None:
        super().__init__()
        if mlp_layers < 2:
            raise ShapeError(
                f"mlp_layers is {mlp_layers}: an MLP of L-GATr-slim has at least two layers. Pass "
                "mlp_layers=2."
            )
        wide = (mlp_ratio * features[0], mlp_ratio * features[1])
        widths = [features, *[wide] * (mlp_layers - 1)]
        self.gated = nn.ModuleList(
            _GatedLinear(given, out, activations) for given, out in itertools.pairwise(widths)
        )
        self.linear = _Linear(wide, features)
        self.dropout = _Dropout(dropout)

    def forward(self, vectors: Tensor, scalars: Tensor) -> Pair:
        for gated in self.gated:
            vectors, scalars = self.dropout(*gated(vectors, scalars))
        out: Pair = self.linear(vectors, scalars)
        return out


class _Block(nn.Module):
    """x + attention(norm(x)), with a condition x + attention over it, then x + mlp(norm(x))."""

    def __init__(
        self,
        features: Widths,
        other: Widths | None,
        heads: int,
        activations: tuple[str, str],
        *,
        attention_ratio: int,
        mlp_ratio: int,
        mlp_layers: int,
        norm_gains: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.norm1 = _Norm(features, norm_gains)
        self.norm2 = _Norm(features, norm_gains)
        self.attention = _Attention(features, features, heads, attention_ratio, dropout)
        self.mlp = _MLP(features, activations, mlp_ratio, mlp_layers, dropout)
        if other is not None:
            self.norm3 = _Norm(features, norm_gains)
            self.cross_attention = _Attention(features, other, heads, attention_ratio, dropout)

    def forward(
        self, own: Pair, other: Pair | None, mask: Tensor | None, cross_mask: Tensor | None
    ) -> Pair:
        normed = self.norm1(*own)
        own = added(own, self.attention(normed, normed, mask))
        normed = self.norm2(*own)
        if other is not None:  # as in the original, the condition is not normalised
            own = added(own, self.cross_attention(normed, other, cross_mask))
            normed = self.norm3(*own)
        return added(own, self.mlp(*normed))


class SlimOptions(TypedDict, total=False):
    """Arguments of LGATrSlim that ConditionalLGATrSlim takes by name."""

    activation: str
    vector_activation: str
    attention_ratio: int
    mlp_ratio: int
    mlp_layers: int
    norm_gains: bool
    dropout: float
    blade_dim: int


class LGATrSlim(nn.Module):
    """L-GATr-slim: a linear map, blocks of attention and a gated MLP, a linear map.

    Args:
        in_vectors: input vectors of an item.
        out_vectors: output vectors of an item; 0 for none.
        vectors: V of the blocks.
        in_scalars: input scalars of an item.
        out_scalars: output scalars of an item; 0 for none.
        scalars: S of the blocks.
        blocks: number of blocks.
        heads: number of attention heads.
        activation: of the gates of scalars, see `ScalarGatedNonlinearity`.
        vector_activation: of the gates of vectors.
        attention_ratio: ratio of the features of all heads to those of a block.
        mlp_ratio: ratio of the hidden features of an MLP to those of a block.
        mlp_layers: number of layers of an MLP, at least 2.
        norm_gains: whether parameters follow the norms of a block.
        dropout: probability for each vector and scalar, in attention and MLP.
        blade_dim: 0 for (4, batch…, items, V), −1 for (batch…, items, V, 4).

    Source: L-GATr 2, https://github.com/heidelberg-hepml/lgatr; `from_lgatr` converts checkpoints.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> network = clifford.LGATrSlim(1, 0, 8, 2, 1, 4, blocks=2, heads=2)
        >>> vectors, scalars = network(torch.randn(4, 10, 1), torch.randn(10, 2))
        >>> vectors.shape, scalars.shape
        (torch.Size([4, 10, 0]), torch.Size([10, 1]))
    """

    def __init__(
        self,
        in_vectors: int,
        out_vectors: int,
        vectors: int,
        in_scalars: int,
        out_scalars: int,
        scalars: int,
        blocks: int,
        heads: int,
        *,
        activation: str = "gelu_tanh",
        vector_activation: str = "sigmoid",
        attention_ratio: int = 1,
        mlp_ratio: int = 2,
        mlp_layers: int = 2,
        norm_gains: bool = True,
        dropout: float = 0.0,
        blade_dim: int = 0,
    ) -> None:
        super().__init__()
        self.blade_dim = blade_dim
        features = (vectors, scalars)
        self.linear_in = _Linear((in_vectors, in_scalars), features)
        self.blocks = nn.ModuleList(
            _Block(
                features,
                self._condition,
                heads,
                (activation, vector_activation),
                attention_ratio=attention_ratio,
                mlp_ratio=mlp_ratio,
                mlp_layers=mlp_layers,
                norm_gains=norm_gains,
                dropout=dropout,
            )
            for _ in range(blocks)
        )
        self.linear_out = _Linear(features, (out_vectors, out_scalars))

    _condition: Widths | None = None

    def forward(self, vectors: Tensor, scalars: Tensor, mask: Tensor | None = None) -> Pair:
        """The features of each item after all blocks.

        Args:
            vectors: (4, batch…, items, V_in).
            scalars: (batch…, items, S_in).
            mask: of attention, see `geometric_attention`.

        Returns:
            (4, batch…, items, V_out) and (batch…, items, S_out).
        """
        return self._through(vectors, scalars, None, mask, None)

    def _through(
        self,
        vectors: Tensor,
        scalars: Tensor,
        other: Pair | None,
        mask: Tensor | None,
        cross_mask: Tensor | None,
    ) -> Pair:
        own = self.linear_in(self._first(vectors, scalars), scalars)
        if other is not None:
            other = self._first(*other), other[1]
        for block in self.blocks:
            own = block(own, other, mask, cross_mask)
        vectors, scalars = self.linear_out(*own)
        return vectors.movedim(0, self.blade_dim), scalars

    def _first(self, vectors: Tensor, scalars: Tensor) -> Tensor:
        """Vectors (4, …); both must be of the same items."""
        if vectors.shape[self.blade_dim] == 4 and vectors.dim() == scalars.dim() + 1:
            return vectors.movedim(self.blade_dim, 0)
        order = "(4, batch…, items, V)" if self.blade_dim == 0 else "(batch…, items, V, 4)"
        raise ShapeError(
            f"vectors is {tuple(vectors.shape)} and scalars {tuple(scalars.shape)}: they must be "
            f"{order} and (batch…, items, S). Move the four components, or set blade_dim (0: "
            "first, -1: last)."
        )


class ConditionalLGATrSlim(LGATrSlim):
    """`LGATrSlim` of items with a condition, which it attends over in every block.

    Args:
        in_vectors: input vectors of an item.
        out_vectors: output vectors of an item; 0 for none.
        vectors: V of the blocks.
        in_scalars: input scalars of an item.
        out_scalars: output scalars of an item; 0 for none.
        scalars: S of the blocks.
        other_vectors: vectors of an item of the condition.
        other_scalars: scalars of an item of the condition.
        blocks: number of blocks.
        heads: number of attention heads.
        **options: further arguments of `LGATrSlim`, by name.

    Source: L-GATr 2, https://github.com/heidelberg-hepml/lgatr; `from_lgatr` converts checkpoints.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> network = clifford.ConditionalLGATrSlim(1, 0, 8, 2, 1, 4, 1, 2, blocks=2, heads=2)
        >>> own = torch.randn(4, 10, 1), torch.randn(10, 2)
        >>> other = torch.randn(4, 5, 1), torch.randn(5, 2)
        >>> vectors, scalars = network(own[0], other[0], own[1], other[1])
        >>> vectors.shape, scalars.shape
        (torch.Size([4, 10, 0]), torch.Size([10, 1]))
    """

    def __init__(
        self,
        in_vectors: int,
        out_vectors: int,
        vectors: int,
        in_scalars: int,
        out_scalars: int,
        scalars: int,
        other_vectors: int,
        other_scalars: int,
        blocks: int,
        heads: int,
        **options: Unpack[SlimOptions],
    ) -> None:
        self._condition = (other_vectors, other_scalars)
        shape = (in_vectors, out_vectors, vectors, in_scalars, out_scalars, scalars)
        super().__init__(*shape, blocks, heads, **options)

    def forward(  # type: ignore[override]
        self,
        vectors: Tensor,
        other: Tensor,
        scalars: Tensor,
        other_scalars: Tensor,
        mask: Tensor | None = None,
        cross_mask: Tensor | None = None,
    ) -> Pair:
        """The features of each item after all blocks.

        Args:
            vectors: (4, batch…, items, V_in).
            other: vectors of the condition, (4, batch…, others, V').
            scalars: (batch…, items, S_in).
            other_scalars: scalars of the condition, (batch…, others, S').
            mask: of the attention over items.
            cross_mask: of the attention over the condition.

        Returns:
            (4, batch…, items, V_out) and (batch…, items, S_out).
        """
        return self._through(vectors, scalars, (other, other_scalars), mask, cross_mask)
