"""Potentials of optimal transport through clusters: steps of few points first, then of few pairs.

    coarse   f_i = −ε log Σ_J b_J exp((g_J − C(x_i, c_J)) / ε),   c_J, b_J of brick J
    fine     f_i = −ε log Σ_j b_j exp((g_j − C(x_i, y_j)) / ε),   j of bricks that i's meets

Bricks meet unless every pair of theirs has a plan a_i b_j exp((f_i + g_j − C) / ε) below
e^−TRUNCATION a_i b_j, which a bound says.  f at x, g at y, and the potentials of x and of y against
themselves stand one after the other as one column: a step is one reduction, whose mask says which
rows see which columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchweft.reductions.cluster.bricks import (
    all_pairs,
    brick_order,
    kept_pairs,
    partners,
    parts_of,
)
from torchweft.reductions.cluster.sparsity import BlockSparsity
from torchweft.reductions.transport.softmin import Cloud, log_weights, softmin, softmin_of_squares

__all__ = ["TRUNCATION", "multiscale"]

BRICK, MOST = 64, 4096  # points of a brick: a tile of rows; bricks of a cloud
COARSE = 0.5  # edges of a brick down to which bricks stand for their points
TRUNCATION = 8.0  # pairs whose plan is below e^−8 of a_i b_j are left out


class _Bricks(NamedTuple):
    """A sorted cloud, or several one after the other, and its bricks.

    Args:
        points: (N, D)
        log_weights: (N, 1)
        centres: (C, D) means of the points under their weights.
        log_totals: (C, 1) of the weights of bricks.
        shares: (N,) of the weights of points in those of their bricks, in float64.
        variances: (C,) means of |x − centre|², in float64.
        middles: (C, D) of the bricks' boxes, in float64.
        halves: (C, D) of the boxes' edges, in float64.
        counts: (C,) points; the last bricks may have none.
    """

    points: Tensor
    log_weights: Tensor
    centres: Tensor
    log_totals: Tensor
    shares: Tensor
    variances: Tensor
    middles: Tensor
    halves: Tensor
    counts: Tensor


class _Stack(NamedTuple):
    """G groups of C bricks, N points in all: x and y, and both again if they see themselves.

    Args:
        fine: all points.
        coarse: all bricks.
        middles: (G, C, D)
        halves: (G, C, D)
        counts: (G C,)
        bounds: (G, C + 1) where bricks begin and end.
        labels: (N,) the brick of each point.
        away: (N, D) of the points from the middles of their bricks, in float64.
        squares: (N,) |x|² / 2, in float64.
        shares: (N,) of the weights of points in those of their bricks, in float64.
        variances: (G C,) of bricks.
        sizes: points of each group.
        seen: (G,) the group that each one sees.
    """

    fine: Cloud
    coarse: Cloud
    middles: Tensor
    halves: Tensor
    counts: Tensor
    bounds: Tensor
    labels: Tensor
    away: Tensor
    squares: Tensor
    shares: Tensor
    variances: Tensor
    sizes: list[int]
    seen: Tensor

    def facing(self, values: Tensor) -> Tensor:
        """(G, ...) of the groups that each one sees."""
        return values.index_select(0, self.seen)

    def largest(self, values: Tensor) -> Tensor:
        """(G, C) the largest value of each brick, −∞ of one without points."""
        # the lengths are right, which unsafe does not look at
        found: Tensor = torch.segment_reduce(
            values, "max", lengths=self.counts, unsafe=True, initial=-torch.inf
        )
        return found.view(self.middles.shape[:2])

    def mean(self, values: Tensor) -> Tensor:
        """(G C,) the mean of each brick under its weights; 0 where these are 0."""
        found: Tensor = torch.segment_reduce(
            self.shares * values, "sum", lengths=self.counts, unsafe=True, initial=0
        )
        return found


def multiscale(
    a: Tensor, x: Tensor, b: Tensor, y: Tensor, p: int, lengths: list[float], debias: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The weights in the order of bricks, and the potentials there, as functions of x and y alone.

    Args:
        a: (M,)
        x: (M, D)
        b: (N,)
        y: (N, D)
        p: of the cost.
        lengths: one for each step, and the blur in the end.
        debias: whether potentials of x and of y against themselves follow f and g.
    """
    times = 2 if debias else 1
    extents = torch.stack([z.detach().amax(0) - z.detach().amin(0) for z in (x, y)]).tolist()
    sizes = [BRICK * max(1, -(-len(z) // (BRICK * MOST))) for z in (x, y)]
    counts = [max(1, -(-len(z) // size)) for z, size in zip((x, y), sizes, strict=True)]
    parts, edges = zip(*map(parts_of, extents, counts), strict=True)
    orders = [brick_order(z.detach(), *of) for z, *of in zip((x, y), sizes, parts, strict=True)]
    a, x, b, y = (t.index_select(0, orders[k // 2]) for k, t in enumerate((a, x, b, y)))
    with torch.no_grad():
        sides = [_bricks(a, x, sizes[0], max(counts)), _bricks(b, y, sizes[1], max(counts))]
        stack = _stacked(sides * times)
        potential, mask = _descend(p, lengths, max(edges), stack)
    points, blur = torch.cat([x, y] * times), lengths[-1]
    if p == 2 and points.requires_grad:
        last = softmin_of_squares(blur, points, stack.fine, potential, mask)
    else:
        last = softmin(p, blur, points, stack.fine, potential, mask)
    return a, b, list(torch.split(last, [len(x), len(y)] * times))


def _bricks(weights: Tensor, points: Tensor, size: int, count: int) -> _Bricks:
    """The bricks of a sorted cloud, `count` with those that have no points."""
    total, device = len(points), points.device
    places = torch.arange(count * size, device=device).view(count, size)
    inside = points.index_select(0, places.clamp(max=total - 1).view(-1)).double()
    inside = inside.view(count, size, -1)
    low, high = inside.amin(1), inside.amax(1)
    shares = pad(weights.double(), (0, count * size - total)).view(count, size, 1)
    totals = shares.sum(1)
    # a brick whose weights are all 0 has its centre anywhere
    shares = shares / totals.where(totals > 0, 1).unsqueeze(1)
    centres = (shares * inside).sum(1)
    return _Bricks(
        points,
        log_weights(weights),
        centres.to(points.dtype),
        totals.log().to(points.dtype),
        shares.view(-1)[:total],
        (shares * (inside - centres.unsqueeze(1)).square()).sum((1, 2)),
        (low + high) / 2,
        (high - low) / 2,
        (total - places[:, 0]).clamp(0, size),
    )


def _stacked(sides: list[_Bricks]) -> _Stack:
    all_ = _Bricks(*map(torch.cat, zip(*sides, strict=True)))
    groups, wide = len(sides), all_.points.double()
    labels = torch.arange(len(all_.counts), device=wide.device)
    labels = labels.repeat_interleave(all_.counts, output_size=len(wide))
    ends = all_.counts.cumsum(0).view(groups, -1)
    return _Stack(
        Cloud(all_.points, all_.log_weights),
        Cloud(all_.centres, all_.log_totals),
        all_.middles.view(groups, -1, wide.shape[1]),
        all_.halves.view(groups, -1, wide.shape[1]),
        all_.counts,
        torch.cat((ends[:, :1] - all_.counts.view(groups, -1)[:, :1], ends), 1),
        labels,
        wide - all_.middles.index_select(0, labels),
        wide.square().sum(-1) / 2,
        all_.shares,
        all_.variances,
        [len(side.points) for side in sides],
        torch.tensor(partners(groups), device=wide.device),
    )


def _descend(
    p: int, lengths: list[float], edge: float, stack: _Stack
) -> tuple[Tensor, BlockSparsity]:
    """Potentials of the points, and the mask of the last update: bricks as long as they are small.

    At each length potentials are the mean of what they were and their updates.
    """
    device, fine, coarse = stack.labels.device, stack.fine, stack.coarse
    bricks = [stack.middles.shape[1]] * len(stack.sizes)
    every = all_pairs(bricks, bricks, device)
    num_coarse = max(1, sum(length > COARSE * edge for length in lengths[:-1]))

    potential = torch.zeros_like(coarse.log_weights[:, 0])
    potential = softmin(p, lengths[0], coarse.points, coarse, potential, every)
    for length in lengths[:num_coarse]:
        new = softmin(p, length, coarse.points, coarse, potential, every)
        potential = (potential + new) / 2
    spread = all_pairs(stack.sizes, bricks, device)
    potential = softmin(p, lengths[num_coarse - 1], fine.points, coarse, potential, spread)
    for length in lengths[num_coarse:]:
        mask = mask_of(p, length, stack, potential, spread)
        potential = (potential + softmin(p, length, fine.points, fine, potential, mask)) / 2
    return potential, mask_of(p, lengths[-1], stack, potential, spread)


def mask_of(
    p: int, length: float, stack: _Stack, potential: Tensor, spread: BlockSparsity
) -> BlockSparsity:
    """The bricks that hold a pair whose plan is e^−TRUNCATION or more of a_i b_j after the update.

    f_i is replaced, so what counts is its new value; `_ceiling` is no less, and known before.
    """
    eps = length**p
    ceiling = _ceiling(p, length, stack, potential, spread)
    found = (plane_bound if p == 2 else plain_bound)(eps, stack, ceiling, potential)
    keep = found >= -TRUNCATION * eps
    keep = keep | stack.facing(keep).mT
    return kept_pairs(keep, stack.bounds, stack.seen)


def _ceiling(
    p: int, length: float, stack: _Stack, potential: Tensor, spread: BlockSparsity
) -> Tensor:
    """(N,) no less than the updated potentials: Jensen's inequality in each brick.

    Σ_{j ∈ J} b_j exp(s_j) ≥ b_J exp(mean_J s), and the mean of |x − y_j|² is |x − c_J|² and the
    variance of J; that of |x − y_j| is no more than the root of this.
    """
    dearer = stack.variances / 2 if p == 2 else stack.variances.sqrt()
    best = (stack.mean(potential) - dearer).to(potential.dtype)
    return softmin(p, length, stack.fine.points, stack.coarse, best, spread)


def plain_bound(eps: float, stack: _Stack, rows: Tensor, columns: Tensor) -> Tensor:
    """max_I f + max_J g − the distance of their boxes ≥ f_i + g_j − |x_i − y_j|, (G, C, C)"""
    middles, halves = stack.middles.unsqueeze(2), stack.halves.unsqueeze(2)
    apart = (middles - stack.facing(middles).transpose(1, 2)).abs()
    gaps = (apart - halves - stack.facing(halves).transpose(1, 2)).clamp(min=0)
    best = stack.largest(rows).double().unsqueeze(2)
    best = best + stack.facing(stack.largest(columns)).unsqueeze(1)
    return best - gaps.square().sum(3).sqrt()


def plane_bound(eps: float, stack: _Stack, rows: Tensor, columns: Tensor) -> Tensor:
    """A bound of f_i + g_j − |x_i − y_j|² / 2 over i of I and j of J, (G, C, C)

    With F = f − |x|² / 2 and G alike it is F_i + G_j + x_i · y_j.  Whatever the vector t,
    F_i ≤ F' − t · u, u = x_i − c, F' = max_I (F_i + t · (x_i − c)), so for c, t of I and d, s of J
        F_i + G_j + x_i · y_j ≤ F' + G' + c · d + (d − t) · u + (c − s) · v + u · v,
    which coordinate by coordinate is largest at corners of the boxes that hold u and v.
    t is about where the plan takes c, which makes the bound tight where there is mass.
    """
    c, h, t = stack.middles, stack.halves, _aims(eps, stack, columns)
    along = (t.flatten(0, 1).index_select(0, stack.labels) * stack.away).sum(1) - stack.squares
    above, others = stack.largest(rows + along), stack.facing(stack.largest(columns + along))
    found = torch.baddbmm(others.unsqueeze(1), c, stack.facing(c).mT).add_(above.unsqueeze(2))
    inner, one = -t * h, torch.ones_like(c)
    sides = torch.stack((h, inner, c, one)), torch.stack((h, inner, -c, -one))
    same, opposite = (side.permute(3, 1, 2, 0).contiguous() for side in sides)
    facing = stack.facing(torch.stack((c, one, h, inner), 3)).permute(2, 0, 3, 1).contiguous()
    for u_plus_v, u_minus_v, others in zip(same, opposite, facing, strict=True):
        both = u_plus_v[..., :1] * others[:, 2:3]
        plus = (u_plus_v @ others).abs_().add_(both)
        minus = (u_minus_v @ others).abs_().sub_(both)
        found += torch.maximum(plus, minus, out=plus)
    return found


def _aims(eps: float, stack: _Stack, potential: Tensor) -> Tensor:
    """(G, C, D) about where the plan takes the middles: means of bricks under its weights."""
    shape = stack.middles.shape
    centres = stack.coarse.points.double().view(shape)
    scores = stack.coarse.log_weights.view(shape[:2]) + stack.largest(potential) / eps
    scores = scores - centres.square().sum(2) / (2 * eps)  # what the rows add is the same for all
    scores, centres = stack.facing(scores).unsqueeze(1), stack.facing(centres)
    plan = torch.baddbmm(scores, stack.middles, centres.mT, alpha=1 / eps)
    aims: Tensor = plan.softmax(2) @ centres
    return aims
