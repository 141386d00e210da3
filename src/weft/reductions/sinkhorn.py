"""Optimal transport between clouds by Sinkhorn's iterations, and `SamplesLoss` over all losses.

    OT_ε(a, x, b, y) = max Σ a_i f_i + Σ b_j g_j,
    f_i = −ε log Σ_j b_j exp((g_j − C(x_i, y_j)) / ε),   g_j alike,   C(x, y) = |x − y|^p / p
    loss = OT_ε(a, x, b, y) − ½ OT_ε(a, x, a, x) − ½ OT_ε(b, y, b, y)       (debiased)

ε falls from the diameter of the data to blur^p, by scaling^p at each step, and potentials are
averaged with their updates, so that f and g are treated alike.  Gradients are those of the dual
value with the potentials held (the envelope theorem): right to first order, and second derivatives
raise.  How near the potentials are to the maximum is decided by `scaling` alone.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from weft.errors import BackendError, ShapeError
from weft.reductions.cluster import (
    cluster_ranges_centroids,
    grid_cluster,
    sort_clusters,
)
from weft.reductions.formula import Node, node, var
from weft.reductions.losses import KERNELS, centred, kernel_loss, widened
from weft.reductions.reduction import reduce
from weft.reductions.sparsity import BlockSparsity

__all__ = ["SamplesLoss", "sinkhorn_divergence"]

BACKENDS = ("auto", "online", "multiscale")
LARGE = 10_000**2  # pairs: beyond them clusters pay for themselves
MOST_CLUSTERS, POINTS = 4000, 100  # of a cloud; of a cluster, about: some tiles of rows
TRUNCATION = 8.0  # pairs whose plan is below e^−8 of a_i b_j are left out


class _Cloud(NamedTuple):
    """Points (*batch, N, D) and the logarithms of their weights (*batch, N, 1)."""

    points: Tensor
    log_weights: Tensor


class _Cells(NamedTuple):
    """The clusters of a sorted cloud; what bounds are made of in float64.

    Args:
        cloud: their centres and weights.
        ranges: (C, 2)
        centres: (C, D)
        radii: (C,) of the points around the centre.
        labels: (N,) the cluster of each point.
        away: (N, D) of the points from their centres.
        squares: (N,) |x|² / 2 of the points.
    """

    cloud: _Cloud
    ranges: Tensor
    centres: Tensor
    radii: Tensor
    labels: Tensor
    away: Tensor
    squares: Tensor

    def largest(self, values: Tensor) -> Tensor:
        """(C,) the largest value of each cluster."""
        return _largest(values, self.ranges)


class _Potentials(NamedTuple):
    """f at x against y, g at y against x, and those of x and y against themselves."""

    f: Tensor
    g: Tensor
    own_x: Tensor | None
    own_y: Tensor | None


class _Masks(NamedTuple):
    """The pairs that each potential sees; None is all of them."""

    xy: BlockSparsity | None = None
    xx: BlockSparsity | None = None
    yy: BlockSparsity | None = None


ALL = _Masks()


class SamplesLoss(nn.Module):
    """A distance between weighted clouds: loss(x, y) or loss(a, x, b, y).

    Args:
        loss: "sinkhorn", "energy", "gaussian" or "laplacian".
        p: of the cost |x − y|^p / p, 1 or 2; of "sinkhorn" alone, as are those below but blur.
        blur: the length below which details do not count: the temperature is blur^p, the width of
            the kernels blur.
        scaling: what lengths shrink by from a step to the next, between 0 and 1; nearer 1 is
            slower and nearer the maximum.
        debias: whether the loss of a cloud and itself is taken off, so that it is 0.
        backend: "online" looks at all pairs at each step.  "multiscale" goes through clusters and
            leaves out pairs whose transport plan is below e^−8 of a_i b_j, so a potential is off
            by e^−8 blur^p at most; D ≤ 3, no batch.  "auto" takes it from 10⁸ pairs on.
    """

    def __init__(
        self,
        loss: str = "sinkhorn",
        p: int = 2,
        blur: float = 0.05,
        scaling: float = 0.5,
        debias: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        names = ("sinkhorn", *KERNELS)
        for name, value, choices in (
            ("loss", loss, names),
            ("p", p, (1, 2)),
            ("backend", backend, BACKENDS),
        ):
            if value not in choices:
                listed = ", ".join(map(repr, choices))
                raise ShapeError(f"{name} is {value!r}: it must be one of {listed}. Pass one.")
        if not (blur > 0 and 0 < scaling < 1):
            raise ShapeError(
                f"blur is {blur} and scaling {scaling}: blur must be positive, scaling between 0 "
                "and 1. Pass a length of the data, and 0.5, say."
            )
        self.loss, self.p, self.blur, self.scaling = loss, p, blur, scaling
        self.debias, self.backend = debias, backend

    def forward(self, *args: Tensor) -> Tensor:
        """The loss, (*batch).

        Args:
            args: x (*batch, M, D) and y (*batch, N, D) with weights 1 / M and 1 / N; or a
                (*batch, M), x, b (*batch, N) and y.
        """
        a, x, b, y = _weighted(args)
        if self.loss in KERNELS:
            return kernel_loss(self.loss, a, x, b, y, blur=self.blur)
        return sinkhorn_divergence(
            a, x, b, y, self.p, self.blur, self.scaling, self.debias, self.backend
        )


def sinkhorn_divergence(
    a: Tensor,
    x: Tensor,
    b: Tensor,
    y: Tensor,
    p: int = 2,
    blur: float = 0.05,
    scaling: float = 0.5,
    debias: bool = True,
    backend: str = "auto",
) -> Tensor:
    """OT_ε(a, x, b, y) − ½ OT_ε(a, x, a, x) − ½ OT_ε(b, y, b, y), (*batch); see `SamplesLoss`.

    Cost: about 4 log(diameter / blur) / log(1 / scaling) reductions over all pairs, or those of
    the clusters that meet.
    """
    dtype = x.dtype
    a, x, b, y = widened(*map(_first_order, (a, x, b, y)))
    x, y, diagonal = centred(x, y)
    diameter = float(diagonal.max())
    lengths = _lengths(diameter, blur, scaling)
    if _takes_clusters(backend, x, y):
        a, x, b, y, last = _multiscale(a, x, b, y, p, lengths, diameter, debias)
    else:
        last = _online(a, x, b, y, p, lengths, debias)
    total = (a * last.f).sum(-1) + (b * last.g).sum(-1)
    if last.own_x is not None and last.own_y is not None:
        total = total - (a * last.own_x).sum(-1) - (b * last.own_y).sum(-1)
    return total.to(dtype)


def _weighted(args: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(a, x, b, y), checked."""
    if len(args) not in (2, 4):
        raise ShapeError(
            f"{len(args)} tensors are given: x and y, or a, x, b and y are needed. Pass two "
            "clouds, or two clouds with their weights in front."
        )
    x, y = args if len(args) == 2 else args[1::2]
    if min(x.ndim, y.ndim) < 2 or x.shape[:-2] != y.shape[:-2] or x.shape[-1] != y.shape[-1]:
        raise ShapeError(
            f"x is {tuple(x.shape)} but y is {tuple(y.shape)}: both must be (*batch, points, D) "
            "with the same batch and D. Reshape one of them."
        )
    if len(args) == 4:
        a, b = args[::2]
    else:
        a, b = (t.new_full(t.shape[:-1], 1 / max(1, t.shape[-2])) for t in (x, y))
    for name, weights, points in (("a", a, x), ("b", b, y)):
        if weights.shape != points.shape[:-1]:
            raise ShapeError(
                f"{name} is {tuple(weights.shape)} but its points are {tuple(points.shape)}: each "
                f"point has one weight. Pass {name} as {tuple(points.shape[:-1])}."
            )
    return a, x, b, y


def _lengths(diameter: float, blur: float, scaling: float) -> list[float]:
    """From the diameter on, lengths that shrink by `scaling`, then the blur."""
    steps = math.ceil(math.log(blur / max(diameter, blur)) / math.log(scaling) - 1e-9)
    return [*(diameter * scaling**n for n in range(steps)), blur]


def _takes_clusters(backend: str, x: Tensor, y: Tensor) -> bool:
    possible = x.ndim == 2 and x.shape[-1] <= 3
    if backend == "multiscale" and not possible:
        raise BackendError(
            f"x is {tuple(x.shape)}: multiscale needs one cloud (M, D) with D ≤ 3, for its "
            "clusters. Pass backend='online'."
        )
    large = x.shape[-2] * y.shape[-2] > LARGE
    return backend == "multiscale" or (backend == "auto" and possible and large)


def _online(
    a: Tensor, x: Tensor, b: Tensor, y: Tensor, p: int, lengths: list[float], debias: bool
) -> _Potentials:
    """The potentials at the end, as functions of x and y alone."""
    clouds = _Cloud(x, _log(a)), _Cloud(y, _log(b))
    with torch.no_grad():
        potentials = _descend(p, lengths, clouds, _start(p, lengths[0], clouds, debias))
    return _updated(p, lengths[-1], clouds, clouds, potentials, ALL)


def _multiscale(
    a: Tensor,
    x: Tensor,
    b: Tensor,
    y: Tensor,
    p: int,
    lengths: list[float],
    diameter: float,
    debias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, _Potentials]:
    """The sorted clouds, and their potentials: of clusters first, of points from their size on."""
    dim = x.shape[-1]
    count = min(MOST_CLUSTERS, max(1, max(len(x), len(y)) // POINTS))
    size = max(diameter / (math.sqrt(dim) * count ** (1 / dim)), torch.finfo(x.dtype).tiny)
    a, x, cells_x = _sorted(a, x, size)
    b, y, cells_y = _sorted(b, y, size)
    clouds, cells = (_Cloud(x, _log(a)), _Cloud(y, _log(b))), (cells_x, cells_y)
    coarse = cells_x.cloud, cells_y.cloud
    num_coarse = max(1, sum(length > size for length in lengths[:-1]))
    with torch.no_grad():
        potentials = _start(p, lengths[0], coarse, debias)
        potentials = _descend(p, lengths[:num_coarse], coarse, potentials)
        potentials = _updated(p, lengths[num_coarse - 1], clouds, coarse, potentials, ALL)
        for length in lengths[num_coarse:]:
            masks = _masks(p, length, cells, potentials)
            potentials = _descend(p, [length], clouds, potentials, masks)
        masks = _masks(p, lengths[-1], cells, potentials)
    return a, x, b, y, _updated(p, lengths[-1], clouds, clouds, potentials, masks)


def _sorted(a: Tensor, x: Tensor, size: float) -> tuple[Tensor, Tensor, _Cells]:
    labels = grid_cluster(x, size)
    (a, x), labels = sort_clusters((a, x), labels)
    points, weights = x.detach(), a.detach()
    ranges, centres, totals = cluster_ranges_centroids(points, labels, weights, 0.0)
    # a cell whose weights are all 0 has a centre anywhere: its first point
    centres = centres.where(centres.isfinite(), points.index_select(0, ranges[:, 0]))
    cloud, wide = _Cloud(centres, _log(totals)), points.double()
    centres = centres.double()
    away = wide - centres.index_select(0, labels)
    radii = _largest(away.norm(dim=-1), ranges)
    return a, x, _Cells(cloud, ranges, centres, radii, labels, away, wide.square().sum(-1) / 2)


def _log(weights: Tensor) -> Tensor:
    return weights.detach().log().unsqueeze(-1)


def _start(p: int, length: float, clouds: tuple[_Cloud, _Cloud], debias: bool) -> _Potentials:
    """The first update, of potentials that are 0."""
    zeros = [torch.zeros_like(cloud.log_weights[..., 0]) for cloud in clouds]
    own = zeros if debias else (None, None)
    return _updated(p, length, clouds, clouds, _Potentials(*zeros, *own), ALL)


def _descend(
    p: int,
    lengths: list[float],
    clouds: tuple[_Cloud, _Cloud],
    potentials: _Potentials,
    masks: _Masks = ALL,
) -> _Potentials:
    """At each length the mean of the potentials and their updates."""
    for length in lengths:
        new = _updated(p, length, clouds, clouds, potentials, masks)
        potentials = _Potentials(
            *(
                None if old is None or other is None else (old + other) / 2
                for old, other in zip(potentials, new, strict=True)
            )  # type: ignore[arg-type]
        )
    return potentials


def _updated(
    p: int,
    length: float,
    at: tuple[_Cloud, _Cloud],
    sources: tuple[_Cloud, _Cloud],
    potentials: _Potentials,
    masks: _Masks,
) -> _Potentials:
    """Every potential from those of the sources, at any points.

    Sources are held: a gradient sees the points where a potential is taken.
    """
    (x, _), (y, _) = at
    source_x, source_y = sources
    f, g, own_x, own_y = potentials
    softmin = functools.partial(_softmin, p, length)
    turned = None if masks.xy is None else masks.xy.t()
    return _Potentials(
        softmin(x, source_y, g, masks.xy),
        softmin(y, source_x, f, turned),
        None if own_x is None else softmin(x, source_x, own_x, masks.xx),
        None if own_y is None else softmin(y, source_y, own_y, masks.yy),
    )


def _softmin(
    p: int,
    length: float,
    x: Tensor,
    source: _Cloud,
    potential: Tensor,
    mask: BlockSparsity | None,
) -> Tensor:
    """−ε log Σ_j exp(log b_j + (g_j − C(x_i, y_j)) / ε), (*batch, M), ε = length^p"""
    eps = length**p
    scale = (p * eps) ** (-1 / p)
    scores = source.log_weights + potential.unsqueeze(-1) / eps
    columns = (scale * x, scale * source.points.detach(), scores)
    ranges = None if mask is None else mask.ranges
    result = reduce("LogSumExp", _score(p, x.shape[-1]), columns, 1, ranges=ranges)
    assert isinstance(result, Tensor)
    return -eps * result.squeeze(-1)


@functools.cache
def _score(p: int, dim: int) -> Node:
    """h_j − |x_i − y_j|^p, of points in units of (p ε)^(1/p)."""
    square = node("sqdist", var(0, dim, 0), var(1, dim, 1))
    return var(2, 1, 1) - (square if p == 2 else node("sqrt", square))


def _masks(p: int, length: float, cells: tuple[_Cells, _Cells], potentials: _Potentials) -> _Masks:
    """For each potential the clusters that hold a pair whose plan is e^−8 or more of a_i b_j."""
    bound = _plane_bound if p == 2 else _plain_bound
    eps = length**p

    def kept(one: _Side, other: _Side) -> Tensor:
        return bound(eps, one, other) >= -TRUNCATION * eps

    def own(side: _Side) -> BlockSparsity:
        keep = kept(side, side)
        half = _half(side.cells, side.cells, keep | keep.T)
        return BlockSparsity((*half, *half))

    x, y = cells
    f, g, own_x, own_y = potentials
    xy = kept(_Side(x, f), _Side(y, g))
    return _Masks(
        BlockSparsity((*_half(x, y, xy), *_half(y, x, xy.T))),
        None if own_x is None else own(_Side(x, own_x)),
        None if own_y is None else own(_Side(y, own_y)),
    )


def _half(rows: _Cells, columns: _Cells, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As of `from_matrix`, with clusters that follow each other as one interval."""
    before, behind = pad(keep, (1, 0))[:, :-1], pad(keep, (0, 1))[:, 1:]
    first, last = ((keep & ~beside).nonzero()[:, 1] for beside in (before, behind))
    starts, ends = columns.ranges.unbind(1)
    intervals = torch.stack([starts.index_select(0, first), ends.index_select(0, last)], 1)
    return rows.ranges, (keep & ~before).sum(1).cumsum(0), intervals


class _Side(NamedTuple):
    """Clusters, and the potentials of their points."""

    cells: _Cells
    potential: Tensor


def _plain_bound(eps: float, one: _Side, other: _Side) -> Tensor:
    """max_I f + max_J g − (|c_I − c_J| − r_I − r_J) ≥ f_i + g_j − |x_i − y_j|, (CI, CJ)"""
    (cells, f), (others, g) = one, other
    distance = torch.cdist(cells.centres, others.centres)
    best = (cells.largest(f) + cells.radii).unsqueeze(1)
    return best + (others.largest(g) + others.radii) - distance


def _plane_bound(eps: float, one: _Side, other: _Side) -> Tensor:
    """A bound of f_i + g_j − |x_i − y_j|² / 2 over i of I and j of J, (CI, CJ)

    With F = f − |x|² / 2 and G alike it is F_i + G_j + x_i · y_j.  Whatever the vector t,
    F_i ≤ F' − t · (x_i − c), F' = max_I (F_i + t · (x_i − c)), so for c, t of I and d, s of J
        F_i + G_j + x_i · y_j ≤ F' + G' + c · d + |d − t| r_I + |c − s| r_J + r_I r_J.
    t is about where the plan takes c, which makes the bound tight where there is mass.
    """
    c, d = one.cells.centres, other.cells.centres
    cost = torch.cdist(c, d).square() / 2
    t = _aims(eps, cost, other)
    s = t if one is other else _aims(eps, cost.T, one)
    above = _above(one, t)
    others_above = above if one is other else _above(other, s)
    best = above.unsqueeze(1) + others_above + c @ d.T
    r, q = one.cells.radii.unsqueeze(1), other.cells.radii
    return best + torch.cdist(t, d) * r + torch.cdist(c, s) * q + r * q


def _aims(eps: float, cost: Tensor, other: _Side) -> Tensor:
    """(CI, D) about where the plan takes the centres: means of those of J under its weights."""
    cells, g = other
    scores = cells.cloud.log_weights[:, 0] + cells.largest(g) / eps
    return (scores - cost / eps).softmax(1) @ cells.centres


def _above(side: _Side, t: Tensor) -> Tensor:
    """max_I (f_i − |x_i|² / 2 + t_I · (x_i − c_I)), (CI,)"""
    cells, f = side
    along = (t.index_select(0, cells.labels) * cells.away).sum(1)
    return cells.largest(f - cells.squares + along)


def _largest(values: Tensor, ranges: Tensor) -> Tensor:
    """The largest of each cluster; their lengths are right, which unsafe does not look at."""
    lengths = ranges.diff().view(-1)
    largest: Tensor = torch.segment_reduce(values, "max", lengths=lengths, unsafe=True)
    return largest


class _Held(torch.autograd.Function):
    """x; its gradient cannot be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        held: Tensor = _Refusal.apply(grads[0])  # type: ignore[no-untyped-call]
        return held


class _Refusal(_Held):
    """x; it cannot be differentiated."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise BackendError(
            "the gradient of a Sinkhorn loss is asked for its own gradient: it holds the "
            "potentials, so only first derivatives are right. Use loss='energy', 'gaussian' or "
            "'laplacian' for second ones, or detach the gradient."
        )


def _first_order(x: Tensor) -> Tensor:
    held: Tensor = _Held.apply(x)  # type: ignore[no-untyped-call]
    return held
