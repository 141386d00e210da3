"""Geometric attention of GATr and L-GATr, and the equivariant linear maps and norm around it.

Attention is torch's scaled_dot_product_attention.  Multivectors are (B, batch…, F), or
(batch…, F, B) with blade_dim=-1; the scalars beside them are (batch…, S).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchweft.clifford import functions
from torchweft.clifford.algebra import PGA, SPACETIME, Algebra
from torchweft.clifford.calls import backend_for
from torchweft.clifford.layers.basic import MultivectorModule
from torchweft.errors import ShapeError

__all__ = [
    "EquiLayerNorm",
    "EquiLinear",
    "LGATrAttention",
    "MixedLinear",
    "SelfAttention",
    "geometric_attention",
]

Pair = tuple[Tensor, Tensor]
"""Multivectors and scalars."""

Map = tuple[tuple[int, int, int], ...]
"""Blades (source, target, sign) of an equivariant map that takes a grade elsewhere."""


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


class EquiLayerNorm(MultivectorModule):
    """x / √max(eps, mean over features of Σ_g |Σ_(j∈g) q_j x_j²|), and layer norm of the scalars.

    Args:
        algebra: of the multivectors.
        eps: the least mean square that is divided by.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: None chooses; the norm is torch's own on every backend.
    """

    def __init__(
        self,
        algebra: Algebra = PGA,
        eps: float = 0.01,
        *,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__(algebra, blade_dim, backend)
        self.eps = eps

    def forward(self, x: Tensor, scalars: Tensor) -> Pair:
        """Both like what was given."""
        self.check(x)
        backend_for(self.backend, self.algebra, [x])
        first = self.blades_first(x)
        sizes = self.grade_squares(first).abs().sum(0, keepdim=True)
        scale = sizes.mean(-1, keepdim=True).clamp(min=self.eps).rsqrt()
        y = self.blades_back((first * scale).to(x.dtype))
        return y, functional.layer_norm(scalars, scalars.shape[-1:])


class EquiLinear(MultivectorModule):
    """y = Σ_a φ_a(x) · weight[a], plus bias on the scalar, with the equivariant maps φ_a of GATr.

    In order: the n+1 projections ⟨x⟩_g; for each null vector e, e⟨x⟩_g for g < n
    (nine maps in PGA, as in GATr); with `pseudoscalar`, the n+1 products ⟨x⟩_g e_1…n.

    Parameters: weight (maps, F_in, F_out), bias (F_out,).

    Args:
        in_features: F_in.
        out_features: F_out.
        algebra: of the multivectors.
        bias: whether there is one.
        pseudoscalar: add those maps, as L-GATr does by default; the layer is then equivariant
            under even versors, and not under reflections.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: None chooses.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        algebra: Algebra = PGA,
        bias: bool = True,
        *,
        pseudoscalar: bool = False,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__(algebra, blade_dim, backend)
        if min(in_features, out_features) < 1:
            raise ShapeError(
                f"in_features is {in_features}, out_features {out_features}: both must be at "
                "least 1. Give the numbers of multivectors in and out."
            )
        self.in_features, self.out_features = in_features, out_features
        self.pseudoscalar = pseudoscalar
        self._moves = [_times_vector(algebra, i) for i, m in enumerate(algebra.metric) if m == 0]
        if pseudoscalar:
            self._moves.append(_times_pseudoscalar(algebra))
        for k, move in enumerate(self._moves):
            source, target, sign = torch.tensor([term for of in move for term in of]).unbind(1)
            self.register_buffer(f"_source{k}", source, persistent=False)
            self.register_buffer(f"_target{k}", target, persistent=False)
            self.register_buffer(f"_sign{k}", sign.to(torch.get_default_dtype()), persistent=False)
        maps = algebra.n + 1 + sum(len(move) for move in self._moves)
        self.weight = nn.Parameter(torch.empty(maps, in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random weights that keep the mean square of the features, no bias."""
        moved = sum(len(of) for move in self._moves for of in move)
        into_a_blade = 1 + moved / self.algebra.num_blades
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.in_features * into_a_blade))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """X (B, batch…, F_in), result (B, batch…, F_out)."""
        self.check(x, self.in_features)
        first = self.blades_first(x)
        grades = self.algebra.n + 1
        out = functions.grade_linear(
            first, self.weight[:grades], self.bias, self.algebra, backend=self.backend
        )
        start = grades
        for k, move in enumerate(self._moves):
            source, target, sign = (getattr(self, f"_{t}{k}") for t in ("source", "target", "sign"))
            parts = torch.split(first.index_select(0, source), [len(of) for of in move])
            weights = self.weight[start : start + len(move)]
            moved = torch.cat([part @ w for part, w in zip(parts, weights, strict=True)])
            signs = sign.to(moved.dtype).view(-1, *[1] * (moved.dim() - 1))
            # the targets of one move differ, so the order of additions is fixed
            out = out.index_add(0, target, (moved * signs).to(out.dtype))
            start += len(move)
        return self.blades_back(out)


class MixedLinear(nn.Module):
    """`EquiLinear` between multivectors, with plain scalars mixed in and out.

    y = φ(x), plus s2mvs(s) on the scalar blade;  t = mvs2s(x₀) + s2s(s).  With `pseudoscalar` both
    ends are pairs, x₀ and the last blade, interleaved as in L-GATr.

    Args:
        in_features: F_in.
        out_features: F_out.
        in_scalars: S_in.
        out_scalars: S_out; 0 for none.
        algebra: of the multivectors.
        pseudoscalar: see `EquiLinear`.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: None chooses.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        in_scalars: int,
        out_scalars: int = 0,
        algebra: Algebra = PGA,
        *,
        pseudoscalar: bool = False,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.in_scalars, self.out_scalars = in_scalars, out_scalars
        self.blade_dim = blade_dim
        self.mvs2mvs = EquiLinear(
            in_features,
            out_features,
            algebra,
            bias=False,
            pseudoscalar=pseudoscalar,
            blade_dim=blade_dim,
            backend=backend,
        )
        self._ends = (0, -1) if pseudoscalar else (0,)
        self.s2mvs = nn.Linear(in_scalars, len(self._ends) * out_features)
        if out_scalars:
            self.mvs2s = nn.Linear(len(self._ends) * in_features, out_scalars)
            self.s2s = nn.Linear(in_scalars, out_scalars, bias=False)

    def forward(self, x: Tensor, scalars: Tensor) -> tuple[Tensor, Tensor]:
        """(B, batch…, F_in) and (batch…, S_in) to (B, batch…, F_out) and (batch…, S_out)."""
        if scalars.shape[-1] != self.in_scalars:
            raise ShapeError(
                f"scalars is {tuple(scalars.shape)}: MixedLinear needs (batch…, "
                f"{self.in_scalars}). Pass that many, or build it with "
                f"in_scalars={scalars.shape[-1]}."
            )
        y = self.mvs2mvs(x).movedim(self.blade_dim, 0)
        added = self.s2mvs(scalars).unflatten(-1, (-1, len(self._ends))).movedim(-1, 0)
        y = torch.cat([y[:1] + added[:1], y[1:]])
        if len(self._ends) == 2:
            y = torch.cat([y[:-1], y[-1:] + added[1:]])
        y = y.movedim(0, self.blade_dim)
        if not self.out_scalars:
            return y, scalars[..., :0]
        first = x.movedim(self.blade_dim, 0)
        ends = torch.stack([first[end] for end in self._ends], -1).flatten(-2)
        return y, self.mvs2s(ends) + self.s2s(scalars)


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


def _times_vector(algebra: Algebra, i: int) -> tuple[Map, ...]:
    """e_i⟨x⟩_g for g < n: blades without e_i, grade by grade."""
    vector = 1 << i
    return tuple(
        tuple(
            (j, algebra.positions[blade | vector], algebra.sign(vector, blade))
            for j in blades
            if not (blade := algebra.blades[j]) & vector
        )
        for blades in algebra.of_grade[:-1]
    )


def _times_pseudoscalar(algebra: Algebra) -> tuple[Map, ...]:
    """⟨x⟩_g e_1…n for all grades g."""
    whole = algebra.blades[-1]
    return tuple(
        tuple(
            (j, algebra.positions[blade ^ whole], sign)
            for j in blades
            if (sign := algebra.sign(blade := algebra.blades[j], whole))
        )
        for blades in algebra.of_grade
    )


def linear_maps(
    algebra: Algebra, pseudoscalar: bool, blade_dim: int, backend: str | None
) -> Callable[..., MixedLinear]:
    """(in_features, out_features, in_scalars, out_scalars=0) -> the map of a network's layers."""
    return functools.partial(
        MixedLinear,
        algebra=algebra,
        pseudoscalar=pseudoscalar,
        blade_dim=blade_dim,
        backend=backend,
    )
