"""Geometric attention of GATr and L-GATr.

Attention is torch's scaled_dot_product_attention.  Multivectors are (B, batch…, F), or
(batch…, F, B) with blade_dim=-1; the scalars beside them are (batch…, S).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchweft.clifford.algebra import PGA, SPACETIME, Algebra
from torchweft.clifford.calls import RowFunction, check_algebra, program_rows
from torchweft.clifford.layers.equilinear import (
    EquiLayerNorm,
    GradeDropout,
    Pair,
    joined,
    linear_maps,
)
from torchweft.core.operators.operands import as_given
from torchweft.errors import ShapeError

__all__ = [
    "CrossAttention",
    "LGATrAttention",
    "LGATrCrossAttention",
    "RotaryEncoding",
    "SelfAttention",
    "geometric_attention",
]

Widths = tuple[int, int]
"""Features of multivectors, and of scalars."""

Reinserted = tuple[Sequence[int], Sequence[int]]
"""Numbers of multivectors, and of scalars, of a network's input."""


class HeadOptions(TypedDict, total=False):
    """Arguments that every attention takes by name."""

    bias: bool
    head_scale: bool
    dropout: float
    blade_dim: int
    backend: str | None


class AttentionOptions(HeadOptions, total=False):
    """Arguments that SelfAttention and CrossAttention take by name."""

    norm_heads: bool
    pseudoscalar: bool


class SelfAttentionOptions(HeadOptions, total=False):
    """Arguments of SelfAttention that LGATrAttention takes by name."""

    extra: Widths
    rotary_base: float | None


def geometric_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scalars: Tensor,
    k_scalars: Tensor,
    v_scalars: Tensor,
    algebra: Algebra = PGA,
    *,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    eps: float = 1e-3,
    blade_dim: int = 0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax_j((⟨q̃_i k_j⟩₀ + q_s·k_s − w·d²(q_i, k_j)) / √features) · (v_j, v_s), as in GATr.

    In an algebra with one null vector (PGA) the multivectors of grade n−1 are points, and d² is
    their squared distance: −d² = φ(q)·ψ(k) with n+1 features for each channel, where homogeneous
    coordinates p ↦ p·p₀/(p₀² + eps) keep it finite.  Grade n−1 is then left out of ⟨q̃k⟩₀.  Without
    a null vector d² is left out.

    Args:
        q: (B, batch…, heads, items_q, F); without batch, heads may be left out in all tensors.
        k: (B, batch…, heads, items, F); a dimension of 1 head serves the heads of all queries.
        v: (B, batch…, heads, items, F_v), or of 1 head.
        q_scalars: (batch…, heads, items_q, S).
        k_scalars: (batch…, heads, items, S).
        v_scalars: (batch…, heads, items, S_v).
        algebra: the algebra of the multivectors.
        weights: (heads, F), of the distances; None: 1.
        mask: as attn_mask of torch's scaled_dot_product_attention, for (batch…, heads, items_q,
            items).
        eps: keeps the distances of points at infinity finite.
        blade_dim: −1 if the blades of q, k and v are last.
        backend: "triton", "numba", "torch" or None, for the features; the attention is torch's own.

    Returns:
        (B, batch…, heads, items_q, F_v) and (batch…, heads, items_q, S_v), in the dtypes of v and
        v_scalars.

    Raises:
        ShapeError: tensors whose heads, items or features do not fit each other.
        BackendError: the backend cannot serve here.

    Error: that of torch's attention, at that dtype.

    Gradients: torch's fused kernels of attention have first gradients alone.  For gradients of
    gradients and forward mode, call it, or a network with it, under
    `torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)`.

    Cost: one call of torch's scaled_dot_product_attention.

    Source: Brehmer et al.: Geometric algebra transformer, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> x, scalars = torch.randn(16, 2, 10, 4), torch.randn(2, 10, 3)  # two heads, ten items
        >>> y, t = clifford.geometric_attention(x, x, x, scalars, scalars, scalars)
        >>> y.shape, t.shape
        (torch.Size([16, 2, 10, 4]), torch.Size([2, 10, 3]))
        >>> from torch.nn.attention import SDPBackend, sdpa_kernel
        >>> with sdpa_kernel(SDPBackend.MATH):  # for gradients of gradients
        ...     y, t = clifford.geometric_attention(x, x, x, scalars, scalars, scalars)
    """
    check_algebra(algebra)
    q, k, v = (x.movedim(blade_dim, 0) for x in (q, k, v))
    _check_heads(q, k, v, q_scalars, k_scalars, v_scalars)
    weighted = weights is not None and algebra.metric.count(0) == 1
    options = algebra, backend, float(eps)
    queries = _of_heads(q, weights if weighted else None, *options)
    keys = _features((k,), algebra, 0, backend, "keys", float(eps)) if 0 in algebra.metric else k
    query, key = _with_scalars(queries, q_scalars), _with_scalars(keys, k_scalars)
    value = _with_scalars(v, v_scalars)
    if mask is not None:
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    # written out for each head: not every kernel of torch's reads strides of 0
    key, value = (t.expand(*query.shape[:-2], -1, -1).contiguous() for t in (key, value))
    out = functional.scaled_dot_product_attention(
        four_dims(query),
        four_dims(key),
        four_dims(value),
        None if mask is None else four_dims(mask),
    ).reshape(*query.shape[:-1], value.shape[-1])
    width = v_scalars.shape[-1]
    blades, out_scalars = torch.split(out, [out.shape[-1] - width, width], -1)
    out_blades = torch.unflatten(blades, -1, (algebra.num_blades, -1))
    return out_blades.movedim(-2, blade_dim), out_scalars


def _check_heads(q: Tensor, k: Tensor, v: Tensor, *scalars: Tensor) -> None:
    """Raise unless each has a dimension of items, in one number of dimensions."""
    names = ("q_scalars", "k_scalars", "v_scalars")
    dims = {"q": q.dim() - 1, "k": k.dim() - 1, "v": v.dim() - 1}
    dims |= {name: t.dim() for name, t in zip(names, scalars, strict=True)}
    if min(dims.values()) < 2 or len(set(dims.values())) > 1:
        shown = ", ".join(f"{name} {count}" for name, count in dims.items())
        raise ShapeError(
            f"dimensions beside the blades are {shown}: each needs (batch…, heads, items, "
            "features), or (items, features), the same number. Insert a dimension of length 1 "
            "before the items where heads are missing: q.unsqueeze(-3), q_scalars.unsqueeze(-3)."
        )


def _with_scalars(features: Tensor, scalars: Tensor) -> Tensor:
    """(C, batch…, heads, items, F) and (batch…, heads, items, S) in rows of C F + S numbers."""
    rows = features.movedim(0, -2).flatten(-2)  # one copy: torch joins many strided parts slowly
    own = scalars.to(rows.dtype).expand(*rows.shape[:-1], -1)  # of no scalars, heads are one
    return torch.cat([rows, own], -1)


def _of_heads(
    q: Tensor, weights: Tensor | None, algebra: Algebra, backend: str | None, eps: float
) -> Tensor:
    """What queries are made of, (C, batch…, heads, items, F), by weights (heads, F) if any.

    The heads become features, as which they come out of a linear map.
    """
    if weights is None:
        return _features((q,), algebra, 0, backend, "queries", eps)
    if q.dim() == 3:  # without heads
        return _of_heads(q.unsqueeze(1), weights, algebra, backend, eps).squeeze(1)
    heads, width = q.shape[-3], q.shape[-1]
    every = weights.to(q.dtype).expand(heads, width).mT.reshape(1, -1)
    rows = q.movedim(-3, -1).flatten(-2)
    z = _weighted((rows, every), algebra, 0, backend, "queries", eps)
    return z.view(*z.shape[:-1], width, heads).movedim(-1, -3)


_features = RowFunction(
    program_rows("attention", lambda algebra, side, eps: (side, eps.hex())), "x", as_given
)
"""What queries, or keys, are made of: (C, batch…, heads, items, F)."""

_weighted = RowFunction(
    program_rows("attention", lambda algebra, side, eps: (side, eps.hex(), "weighted")),
    "x",
    as_given,
    weight="1 F",
)
"""The same with a weight (1, F) of the distances."""


def four_dims(x: Tensor) -> Tensor:
    """(batch…, heads, items, E) with one batch dimension: what the fused kernels take."""
    return x[None].flatten(0, -4) if x.dim() > 2 else x[None, None]


def check_origin(module: nn.Module, metadata: Mapping[str, Any], **own: Any) -> None:
    """Raise unless a checkpoint of another project was of the module's options."""
    for name, value in own.items():
        if metadata.get(name, value) != value:
            raise ShapeError(
                f"{name} is {metadata[name]!r} in the checkpoint: this {type(module).__name__} has "
                f"{value!r}, another function of the same weights. Build the network with "
                f"{name}={metadata[name]!r}."
            )


def added(x: Pair, change: Pair) -> Pair:
    """The sums of multivectors and of scalars."""
    return x[0] + change[0], x[1] + change[1]


class Reinsertion(nn.Module):
    """Features of a network's input that enter the attention of every block once more.

    Args:
        features: numbers of the multivectors.
        scalars: numbers of the scalars.
        blade_dim: 0 for (B, batch…, items, F), −1 for (batch…, items, F, B).
    """

    def __init__(
        self, features: Sequence[int] = (), scalars: Sequence[int] = (), blade_dim: int = 0
    ) -> None:
        super().__init__()
        self.features, self.scalars = tuple(features), tuple(scalars)
        self.widths: Widths = (len(self.features), len(self.scalars))
        self._dim = -1 if blade_dim == 0 else -2

    def forward(self, x: Tensor, scalars: Tensor) -> Pair | None:
        """Those features, None where there are none."""
        if not any(self.widths):
            return None
        of_x = (x.narrow(self._dim, i, 1) for i in self.features)
        of_scalars = (scalars.narrow(-1, i, 1) for i in self.scalars)
        return (
            torch.cat([x.narrow(self._dim, 0, 0), *of_x], self._dim),
            torch.cat([scalars[..., :0], *of_scalars], -1),
        )

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any
    ) -> None:
        check_origin(self, metadata, features=self.features, scalars=self.scalars)
        super()._load_from_state_dict(state, prefix, metadata, *args)


class RotaryEncoding(nn.Module):
    """Rotary encoding: features c and c + S/2 of item i turn by the angle i · base^(−2c/S).

    In attention, products of queries and keys then depend on differences of positions.  As in GATr;
    frequencies are rounded to float32.

    Args:
        scalars: number of scalars S, even.
        base: the ratio of the longest period to the shortest.

    Raises:
        ShapeError: an odd number of scalars.

    Source: Su et al.: RoFormer: enhanced transformer with rotary position embedding, 2021.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> clifford.RotaryEncoding(4)(torch.randn(2, 10, 4)).shape
        torch.Size([2, 10, 4])
    """

    frequencies: Tensor

    def __init__(self, scalars: int, base: float = 4096.0) -> None:
        super().__init__()
        if scalars % 2:
            raise ShapeError(
                f"scalars is {scalars}: a rotary encoding turns pairs of them. Give an even number."
            )
        powers = torch.arange(0, scalars, 2, dtype=torch.float32) / scalars
        self.register_buffer("frequencies", 1 / base**powers)

    def forward(self, scalars: Tensor) -> Tensor:
        """The scalars, turned by the angles of their positions.

        Args:
            scalars: (batch…, items, S).

        Returns:
            A tensor of their shape and dtype.
        """
        items = torch.arange(scalars.shape[-2], device=scalars.device, dtype=self.frequencies.dtype)
        angles = items[:, None] * self.frequencies
        cos, sin = angles.cos().to(scalars.dtype), angles.sin().to(scalars.dtype)
        first, second = scalars.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class _Attention(nn.Module):
    """Geometric attention of items over items, between linear maps.

    Args:
        queries: features of what queries are made of.
        keys: of what keys are made of.
        values: of what values are made of.
        hidden: of a head.
        out: of the result.
        heads: number of heads.
        multi_query: the heads share keys and values.
        algebra: the algebra of the multivectors.
        bias: of the maps before the attention.
        head_scale: a factor for each head's result is a parameter.
        rotary_base: of a `RotaryEncoding` of queries and keys; None for none.
        dropout: see `GradeDropout`; of the result.
        norm_heads: norm each head's queries, keys and values, as in L-GATr.
        pseudoscalar: see `EquiLinear`.
        blade_dim: 0 for (B, batch…, items, F), −1 for (batch…, items, F, B).
        backend: "triton", "numba", "torch" or None; the attention itself is torch's own on every
            backend.
    """

    log_weights: nn.Parameter | None
    head_scale: nn.Parameter | None

    def __init__(
        self,
        queries: Widths,
        keys: Widths,
        values: Widths,
        hidden: Widths,
        out: Widths,
        heads: int,
        multi_query: bool,
        algebra: Algebra,
        *,
        bias: bool = True,
        head_scale: bool = False,
        rotary_base: float | None = None,
        dropout: float = 0.0,
        norm_heads: bool = False,
        pseudoscalar: bool = False,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.algebra, self.blade_dim, self.heads = algebra, blade_dim, heads
        self.hidden, self.backend = hidden, backend
        linear = linear_maps(algebra, pseudoscalar, blade_dim, backend)
        wide = (heads * hidden[0], heads * hidden[1])
        shared = hidden if multi_query else wide
        self.q_linear = linear(queries[0], wide[0], queries[1], wide[1], bias=bias)
        self.k_linear = linear(keys[0], shared[0], keys[1], shared[1], bias=bias)
        self.v_linear = linear(values[0], shared[0], values[1], shared[1], bias=bias)
        self.out_linear = linear(wide[0], out[0], wide[1], out[1])
        self.rotary = None if rotary_base is None else RotaryEncoding(hidden[1], rotary_base)
        # of distances, which need points and hence a null vector
        has_points = algebra.metric.count(0) == 1
        self.log_weights = nn.Parameter(torch.zeros(heads, hidden[0])) if has_points else None
        self.head_scale = nn.Parameter(torch.ones(heads)) if head_scale else None
        self.norm_qkv = EquiLayerNorm(algebra, backend=backend) if norm_heads else None
        self.dropout = GradeDropout(dropout, algebra, blade_dim=blade_dim)

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any
    ) -> None:
        norm_heads = self.norm_qkv is not None
        check_origin(self, metadata, heads=self.heads, norm_heads=norm_heads)
        super()._load_from_state_dict(state, prefix, metadata, *args)

    def _attend(self, queries: Pair, keys: Pair, values: Pair, mask: Tensor | None) -> Pair:
        heads = [self._heads(*found) for found in self._mapped(queries, keys, values)]
        if self.norm_qkv is not None:
            heads = _together(self.norm_qkv, heads)
        (q, q_s), (k, k_s), (v, v_s) = heads
        if self.rotary is not None:
            q_s, k_s = self.rotary(q_s), self.rotary(k_s)
        weights = None if self.log_weights is None else self.log_weights.exp()
        h, t = geometric_attention(
            *(q, k, v, q_s, k_s, v_s), self.algebra,
            weights=weights, mask=mask, backend=self.backend,
        )  # fmt: skip
        if self.head_scale is not None:
            scale = self.head_scale.view(-1, 1, 1)
            h, t = (h * scale).to(h.dtype), (t * scale).to(t.dtype)
        # (…, heads, items, hidden) to (…, items, heads · hidden)
        h, t = (a.transpose(-3, -2).flatten(-2) for a in (h, t))
        out: Pair = self.dropout(*self.out_linear(h.movedim(0, self.blade_dim), t))
        return out

    def _mapped(self, *given: Pair) -> list[Pair]:
        """What queries, keys and values are made of: maps of one input are computed together."""
        maps = self.q_linear, self.k_linear, self.v_linear
        found: dict[int, Pair] = {}
        for i, (x, scalars) in enumerate(given):
            same = [j for j, (a, b) in enumerate(given) if a is x and b is scalars]
            if same[0] == i:
                found |= zip(same, joined([maps[j] for j in same], x, scalars), strict=True)
        return [found[i] for i in range(len(given))]

    def _heads(self, x: Tensor, scalars: Tensor) -> Pair:
        """(…, items, hidden · heads) to (…, heads, items, hidden), or 1 head where it is shared."""
        of_x, of_scalars = (
            torch.unflatten(y, -1, (hidden, -1)).movedim(-1, -3)
            if hidden
            else y.unsqueeze(-3)  # without scalars
            for y, hidden in zip((x.movedim(self.blade_dim, 0), scalars), self.hidden, strict=True)
        )
        return of_x, of_scalars

    def _joined(self, x: Tensor, scalars: Tensor, extra: Pair | None) -> Pair:
        """Features, and after them those that enter the attention alone."""
        if extra is None:
            return x, scalars
        features = -1 if self.blade_dim == 0 else -2
        return torch.cat([x, extra[0]], features), torch.cat([scalars, extra[1]], -1)


def _together(norm: EquiLayerNorm, heads: list[Pair]) -> list[Pair]:
    """Queries, keys and values after a norm; of one shape, they are normed in one call."""
    if len({x.shape for x, _ in heads}) > 1:
        return [norm(*pair) for pair in heads]
    x, scalars = zip(*heads, strict=True)
    y, t = norm(torch.stack(x, 1), torch.stack(scalars))
    return list(zip(y.unbind(1), t.unbind(), strict=True))


class SelfAttention(_Attention):
    """Geometric attention of items over items, between linear maps.

    Args:
        features: number of features F.
        scalars: number of scalars S.
        heads: number of heads.
        multi_query: the heads share keys and values, as in GATr by default.
        algebra: the algebra of the multivectors.
        growth: ratio of the features of all heads to the input features.
        extra: (F', S') of further features that enter the attention only, see `forward`.
        rotary_base: of a `RotaryEncoding` of queries and keys; None for none.
        **options: `bias` of the maps before the attention (True); `head_scale`, whether a factor
            for each head's result is a parameter (False); `dropout` of the result (0.0);
            `norm_heads`, whether each head's queries, keys and values are normalised (False);
            `pseudoscalar`, see `EquiLinear` (False); `blade_dim`, 0 for (B, batch…, items, F), −1
            for (batch…, items, F, B); `backend`: the attention itself is torch's own.

    Source: Brehmer et al.: Geometric algebra transformer, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> layer = clifford.SelfAttention(8, 4, heads=2)
        >>> x, scalars = layer(torch.randn(16, 10, 8), torch.randn(10, 4))
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
        growth: int = 2,
        extra: Widths = (0, 0),
        rotary_base: float | None = None,
        **options: Unpack[AttentionOptions],
    ) -> None:
        own, keys = (features, scalars), (features + extra[0], scalars + extra[1])
        values = own if multi_query else keys
        hidden = _of_a_head(own, heads, growth, rotary_base is not None)
        widths = keys, keys, values, hidden, own
        super().__init__(*widths, heads, multi_query, algebra, rotary_base=rotary_base, **options)
        self.multi_query = multi_query

    def forward(
        self, x: Tensor, scalars: Tensor, mask: Tensor | None = None, extra: Pair | None = None
    ) -> Pair:
        """The attention over all items.

        Args:
            x: multivectors (B, batch…, items, F).
            scalars: (batch…, items, S).
            mask: see `geometric_attention`.
            extra: (B, batch…, items, F') and (batch…, items, S'), further features that queries and
                keys are made of, and, unless `multi_query`, values.

        Returns:
            Tensors of the shapes of x and scalars.
        """
        own, joined = (x, scalars), self._joined(x, scalars, extra)
        return self._attend(joined, joined, own if self.multi_query else joined, mask)


class CrossAttention(_Attention):
    """Geometric attention of items over other items, which keys and values are made of.

    Args:
        features: F of the items, and of the result.
        scalars: S of the items, and of the result.
        other_features: F of the other items.
        other_scalars: S of the other items.
        heads: number of heads.
        multi_query: the heads share keys and values; GATr has no other cross attention.
        algebra: the algebra of the multivectors.
        hidden: (F, S) of a head; None: those of twice the other items' features, as in GATr.
        **options: the options of `SelfAttention`, by name.

    Source: Brehmer et al.: Geometric algebra transformer, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> layer = clifford.CrossAttention(8, 4, 6, 3, heads=2)
        >>> own = torch.randn(16, 10, 8), torch.randn(10, 4)
        >>> other = torch.randn(16, 5, 6), torch.randn(5, 3)
        >>> x, scalars = layer(*own, *other)
        >>> x.shape, scalars.shape
        (torch.Size([16, 10, 8]), torch.Size([10, 4]))
    """

    def __init__(
        self,
        features: int,
        scalars: int,
        other_features: int,
        other_scalars: int,
        heads: int = 8,
        multi_query: bool = True,
        algebra: Algebra = PGA,
        *,
        hidden: Widths | None = None,
        **options: Unpack[AttentionOptions],
    ) -> None:
        own, other = (features, scalars), (other_features, other_scalars)
        hidden = hidden or _of_a_head(other, heads, 2)
        super().__init__(own, other, other, hidden, own, heads, multi_query, algebra, **options)

    def forward(
        self,
        x: Tensor,
        scalars: Tensor,
        other: Tensor,
        other_scalars: Tensor,
        mask: Tensor | None = None,
    ) -> Pair:
        """The attention of items over the other items.

        Args:
            x: multivectors (B, batch…, items, F).
            scalars: (batch…, items, S).
            other: multivectors (B, batch…, others, F').
            other_scalars: (batch…, others, S').
            mask: for (batch…, heads, items, others), see `geometric_attention`.

        Returns:
            Tensors of the shapes of x and scalars.
        """
        keys = other, other_scalars
        return self._attend((x, scalars), keys, keys, mask)


class LGATrAttention(SelfAttention):
    """`SelfAttention` with `EquiLayerNorm` of the queries, keys and values of each head.

    Args:
        features: number of features F.
        scalars: number of scalars S.
        heads: number of heads.
        multi_query: the heads share keys and values.
        pseudoscalar: see `EquiLinear`.
        growth: ratio of the features of all heads to the input features.
        **options: further arguments of `SelfAttention`, by name.

    Source: Spinner et al.: Lorentz-equivariant geometric algebra transformers for high-energy
    physics, NeurIPS 2024.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> layer = clifford.LGATrAttention(8, 4, heads=2)
        >>> x, scalars = layer(torch.randn(16, 10, 8), torch.randn(10, 4))
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
        growth: int = 1,
        **options: Unpack[SelfAttentionOptions],
    ) -> None:
        super().__init__(
            features,
            scalars,
            heads,
            multi_query,
            SPACETIME,
            growth=growth,
            pseudoscalar=pseudoscalar,
            norm_heads=True,
            **options,
        )


class LGATrCrossAttention(CrossAttention):
    """`CrossAttention` with `EquiLayerNorm` of the queries, keys and values of each head.

    Args:
        features: F of the items, and of the result.
        scalars: S of the items, and of the result.
        other_features: F of the other items.
        other_scalars: S of the other items.
        heads: number of heads.
        multi_query: the heads share keys and values.
        pseudoscalar: see `EquiLinear`.
        growth: ratio of the features of all heads to those of the items.
        **options: further arguments of `CrossAttention`, by name.

    Source: Spinner et al.: Lorentz-equivariant geometric algebra transformers for high-energy
    physics, NeurIPS 2024.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> layer = clifford.LGATrCrossAttention(8, 4, 6, 3, heads=2)
        >>> own = torch.randn(16, 10, 8), torch.randn(10, 4)
        >>> other = torch.randn(16, 5, 6), torch.randn(5, 3)
        >>> x, scalars = layer(*own, *other)
        >>> x.shape, scalars.shape
        (torch.Size([16, 10, 8]), torch.Size([10, 4]))
    """

    def __init__(
        self,
        features: int,
        scalars: int,
        other_features: int,
        other_scalars: int,
        heads: int = 8,
        multi_query: bool = False,
        pseudoscalar: bool = True,
        *,
        growth: int = 1,
        **options: Unpack[HeadOptions],
    ) -> None:
        super().__init__(
            features,
            scalars,
            other_features,
            other_scalars,
            heads,
            multi_query,
            SPACETIME,
            hidden=_of_a_head((features, scalars), heads, growth),
            pseudoscalar=pseudoscalar,
            norm_heads=True,
            **options,
        )


def _of_a_head(features: Widths, heads: int, growth: int, rotary: bool = False) -> Widths:
    """Features of a head, which has no scalars where there are none."""
    scalars = max(growth * features[1] // heads, 4) if features[1] else 0
    if rotary:
        scalars = max(scalars + scalars % 2, 8)
    return max(growth * features[0] // heads, 1), scalars
