"""Geometric attention of GATr and L-GATr on torch's scaled_dot_product_attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from torchweft.clifford.algebra import PGA, Algebra

__all__ = ["geometric_attention"]


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
