"""Geometric attention of GATr and L-GATr.

Attention is torch's scaled_dot_product_attention.  Multivectors are (B, batch…, F), or
(batch…, F, B) with blade_dim=-1; the scalars beside them are (batch…, S).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchweft.clifford.algebra import PGA, SPACETIME, Algebra
from torchweft.clifford.layers.equilinear import EquiLayerNorm, linear_maps
from torchweft.errors import ShapeError

__all__ = [
    "LGATrAttention",
    "SelfAttention",
    "geometric_attention",
]

Pair = tuple[Tensor, Tensor]
"""Multivectors and scalars."""


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
) -> tuple[Tensor, Tensor]:
    """softmax_j(⟨q̃_i k_j⟩₀ + q_s·k_s − w·d²(q_i, k_j), over √features) · (v_j, v_s).

    In an algebra with one null vector (PGA) the multivectors of grade n−1 are points, and d² is
    their squared distance: −d² = φ(q)·ψ(k) with n+1 features a channel, homogeneous coordinates
    p ↦ p·p₀/(p₀² + eps) keeping it finite.  There grade n−1 stays out of ⟨q̃k⟩₀.  Without a null
    vector d² is left out.

    Args:
        q: (B, batch…, heads, items_q, F).
        k: (B, batch…, heads, items, F).
        v: (B, batch…, heads, items, F_v).
        q_scalars: (batch…, heads, items_q, S).
        k_scalars: (batch…, heads, items, S).
        v_scalars: (batch…, heads, items, S_v).
        algebra: of the multivectors.
        weights: (heads, F), of the distances; None: 1.
        mask: as torch's attn_mask, for (batch…, heads, items_q, items).
        eps: keeps points at infinity finite.
        blade_dim: −1 if the blades of q, k and v are last.

    Returns:
        (B, batch…, heads, items_q, F_v) and (batch…, heads, items_q, S_v).
    """
    q, k, v = (x.movedim(blade_dim, 0) for x in (q, k, v))
    _check_heads(q, k, v, q_scalars, k_scalars, v_scalars)
    queries, keys = [q_scalars], [k_scalars]
    has_points = algebra.metric.count(0) == 1
    for j, square in enumerate(algebra.squares):
        if square and not (has_points and algebra.grades[j] == algebra.n - 1):
            queries.append(q[j] * square)
            keys.append(k[j])
    if has_points:
        queries += _distance_queries(_points(q, algebra, eps), weights)
        keys += _distance_keys(_points(k, algebra, eps))
    query, key = (torch.cat([f.to(q.dtype) for f in fs], -1) for fs in (queries, keys))
    value = torch.cat([*v.unbind(0), v_scalars.to(v.dtype)], -1)
    if mask is not None:
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    out = functional.scaled_dot_product_attention(
        _four_dims(query),
        _four_dims(key),
        _four_dims(value),
        None if mask is None else _four_dims(mask),
    ).reshape(*query.shape[:-1], value.shape[-1])
    width = v_scalars.shape[-1]
    blades, out_scalars = torch.split(out, [out.shape[-1] - width, width], -1)
    out_blades = torch.unflatten(blades, -1, (algebra.num_blades, -1))
    return out_blades.movedim(-2, blade_dim), out_scalars


def _check_heads(q: Tensor, k: Tensor, v: Tensor, *scalars: Tensor) -> None:
    """Raise unless each has dimensions of heads and items, in one number of dimensions."""
    names = ("q_scalars", "k_scalars", "v_scalars")
    dims = {"q": q.dim() - 1, "k": k.dim() - 1, "v": v.dim() - 1}
    dims |= {name: t.dim() for name, t in zip(names, scalars, strict=True)}
    if min(dims.values()) < 3 or len(set(dims.values())) > 1:
        shown = ", ".join(f"{name} {count}" for name, count in dims.items())
        raise ShapeError(
            f"dimensions beside the blades are {shown}: each needs (batch…, heads, items, "
            "features), at least 3 and the same number. For one head, insert a dimension of "
            "length 1 before the items: q.unsqueeze(-3), q_scalars.unsqueeze(-3)."
        )


def _points(x: Tensor, algebra: Algebra, eps: float) -> tuple[list[Tensor], Tensor]:
    """Coordinates of the points p·p₀/(p₀² + eps) and their weight p₀²/(p₀² + eps), in float32."""
    null = 1 << algebra.metric.index(0)
    blades = algebra.of_grade[algebra.n - 1]
    parts = {j: x[j].to(torch.promote_types(x.dtype, torch.float32)) for j in blades}
    (body,) = (j for j in blades if not algebra.blades[j] & null)
    scale = parts[body] / (parts[body].square() + eps)
    return [parts[j] * scale for j in blades if j != body], parts[body] * scale


def _distance_queries(points: tuple[list[Tensor], Tensor], weights: Tensor | None) -> list[Tensor]:
    """φ(q) = w·(Σ q_i², q₀², q₀q_1, …)."""
    coordinates, body = points
    features = [_sum_of_squares(coordinates), body.square(), *(c * body for c in coordinates)]
    if weights is None:
        return features
    return [f * weights.unsqueeze(-2) for f in features]


def _distance_keys(points: tuple[list[Tensor], Tensor]) -> list[Tensor]:
    """ψ(k) = (−k₀², −Σ k_i², 2k₀k_1, …): φ·ψ = −Σ (q_i k₀ − q₀ k_i)²."""
    coordinates, body = points
    return [-body.square(), -_sum_of_squares(coordinates), *(2 * c * body for c in coordinates)]


def _sum_of_squares(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).square().sum(0)


def _four_dims(x: Tensor) -> Tensor:
    """(batch…, heads, items, E) with one batch dimension: what the fused kernels take."""
    return x[None].flatten(0, -4)


def check_origin(module: nn.Module, metadata: Mapping[str, Any], **own: Any) -> None:
    """Raise unless a checkpoint of another project was of the module's options."""
    for name, value in own.items():
        if metadata.get(name, value) != value:
            raise ShapeError(
                f"{name} is {metadata[name]!r} in the checkpoint: this {type(module).__name__} has "
                f"{value!r}, another function of the same weights. Build the network with "
                f"{name}={metadata[name]!r}."
            )


class SelfAttention(nn.Module):
    """Geometric attention of items over items, between linear maps.

    Args:
        features: F.
        scalars: S.
        heads: number of heads.
        multi_query: the heads share keys and values, as in GATr by default.
        algebra: of the multivectors.
        growth: ratio of the features of all heads to the input features.
        pseudoscalar: see `EquiLinear`.
        blade_dim: 0 for (B, batch…, items, F), −1 for (batch…, items, F, B).
        backend: None chooses; the attention itself is torch's own on every backend.
    """

    log_weights: nn.Parameter | None

    def __init__(
        self,
        features: int,
        scalars: int,
        heads: int = 8,
        multi_query: bool = True,
        algebra: Algebra = PGA,
        *,
        growth: int = 2,
        pseudoscalar: bool = False,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.algebra, self.blade_dim, self.heads = algebra, blade_dim, heads
        hidden = (max(growth * features // heads, 1), max(growth * scalars // heads, 4))
        wide = (heads * hidden[0], heads * hidden[1])
        shared = hidden if multi_query else wide
        linear = linear_maps(algebra, pseudoscalar, blade_dim, backend)
        self.q_linear = linear(features, wide[0], scalars, wide[1])
        self.k_linear = linear(features, shared[0], scalars, shared[1])
        self.v_linear = linear(features, shared[0], scalars, shared[1])
        self.out_linear = linear(wide[0], features, wide[1], scalars)
        self.hidden = hidden
        # of distances, which need points and hence a null vector
        has_points = algebra.metric.count(0) == 1
        self.log_weights = nn.Parameter(torch.zeros(heads, hidden[0])) if has_points else None

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any
    ) -> None:
        check_origin(self, metadata, heads=self.heads)
        super()._load_from_state_dict(state, prefix, metadata, *args)

    def forward(self, x: Tensor, scalars: Tensor, mask: Tensor | None = None) -> Pair:
        """(B, batch…, items, F) and (batch…, items, S), and back to the same shapes."""
        (q, q_s), (k, k_s), (v, v_s) = (
            self._heads(*linear(x, scalars))
            for linear in (self.q_linear, self.k_linear, self.v_linear)
        )
        weights = None if self.log_weights is None else self.log_weights.exp()
        h, t = geometric_attention(q, k, v, q_s, k_s, v_s, self.algebra, weights=weights, mask=mask)
        # (…, heads, items, hidden) to (…, items, heads · hidden)
        h, t = (a.transpose(-3, -2).flatten(-2) for a in (h, t))
        out: Pair = self.out_linear(h.movedim(0, self.blade_dim), t)
        return out

    def _heads(self, x: Tensor, scalars: Tensor) -> list[Tensor]:
        """(…, items, hidden · heads) to (…, heads, items, hidden); shared ones are expanded."""
        split = [
            torch.unflatten(y, -1, (hidden, -1)).movedim(-1, -3)
            for y, hidden in zip((x.movedim(self.blade_dim, 0), scalars), self.hidden, strict=True)
        ]
        return [y.expand(*y.shape[:-3], self.heads, *y.shape[-2:]) for y in split]


class LGATrAttention(SelfAttention):
    """`SelfAttention` with `EquiLayerNorm` of the queries, keys and values of each head.

    Args:
        features: F.
        scalars: S.
        heads: number of heads.
        multi_query: the heads share keys and values.
        pseudoscalar: see `EquiLinear`.
        blade_dim: 0 for (B, batch…, items, F), −1 for (batch…, items, F, B).
        backend: None chooses.
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
        backend: str | None = None,
    ) -> None:
        options: dict[str, Any] = {"blade_dim": blade_dim, "backend": backend}
        shape = (features, scalars, heads, multi_query, SPACETIME)
        super().__init__(*shape, growth=1, pseudoscalar=pseudoscalar, **options)
        self.norm_qkv = EquiLayerNorm(SPACETIME, backend=backend)

    def _heads(self, x: Tensor, scalars: Tensor) -> list[Tensor]:
        return list(self.norm_qkv(*super()._heads(x, scalars)))
