"""Steps of Sinkhorn's iterations, over all pairs and through clusters.

    softmin  f_i = −ε log Σ_j b_j exp((g_j − C(x_i, y_j)) / ε),   C = |x − y|^p / p,   ε = length^p

    coarse   f_i = −ε log Σ_J b_J exp((g_J − C(x_i, c_J)) / ε),   c_J, b_J of brick J
    fine     f_i = −ε log Σ_j b_j exp((g_j − C(x_i, y_j)) / ε),   j of bricks that i's meets

Bricks meet unless every pair of theirs has a plan a_i b_j exp((f_i + g_j − C) / ε) below
e^−TRUNCATION a_i b_j, which a bound says.  f at x, g at y, and the potentials of x and of y against
themselves stand one after the other as one column: a step is one reduction, whose mask says which
rows see which columns.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchweft.reductions.cluster.sparsity import BlockSparsity
from torchweft.reductions.engine.reduction import reduce
from torchweft.reductions.formula.node import Node, const, node, var

__all__ = ["Cloud", "log_weights", "multiscale", "partners", "softmin"]

BRICK, MOST = 64, 4096  # points of a brick: a tile of rows; bricks of a cloud
COARSE = 0.5  # edges of a brick down to which bricks stand for their points
TRUNCATION = 8.0  # pairs whose plan is below e^−8 of a_i b_j are left out


class Cloud(NamedTuple):
    """Points (*batch, N, D) and the logarithms of their weights (*batch, N, 1)."""

    points: Tensor
    log_weights: Tensor


def log_weights(weights: Tensor) -> Tensor:
    """(*batch, N, 1), −∞ where a weight is 0."""
    return weights.detach().log().unsqueeze(-1)


def softmin(
    p: int,
    length: float,
    x: Tensor,
    source: Cloud,
    potential: Tensor,
    mask: BlockSparsity | None = None,
) -> Tensor:
    """−ε log Σ_j b_j exp((g_j − C(x_i, y_j)) / ε), (*batch, M), ε = length^p

    The source is constant: gradients are in x alone.
    """
    eps = length**p
    ranges = None if mask is None else mask.ranges
    columns = _columns(p, eps, x, source, potential)
    result = reduce("LogSumExp", _score(p, x.shape[-1]), columns, 1, ranges=ranges)
    assert isinstance(result, Tensor)
    return -eps * result.squeeze(-1)


def softmin_of_squares(
    length: float, x: Tensor, source: Cloud, potential: Tensor, mask: BlockSparsity | None = None
) -> Tensor:
    """`softmin` for p = 2, with its gradient x_i − Σ_j π_ij y_j from the same pass over the pairs.

    π_ij = b_j exp((f_i + g_j − C(x_i, y_j)) / ε), whose sum over j is 1.
    """
    eps, at = length**2, x.detach()
    columns = _columns(2, eps, at, source, potential)
    score, weight = _score(2, x.shape[-1]), _away(x.shape[-1])
    ranges = None if mask is None else mask.ranges
    found = reduce("Max_SumShiftExp", score, columns, 1, weight=weight, ranges=ranges)
    assert isinstance(found, Tensor)
    top, total, away = found[..., 0], found[..., 1], found[..., 2:]
    # the largest term is 1, or there is none
    slope = math.sqrt(2 * eps) * away / total.clamp(min=0.5).unsqueeze(-1)
    value = -eps * ((total + (top == -torch.inf)).log() + top)
    return value + (slope * (x - at)).sum(-1)


def _columns(
    p: int, eps: float, x: Tensor, source: Cloud, potential: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x and y in units of (p ε)^(1/p), and the scores of y."""
    scale = (p * eps) ** (-1 / p)
    scores = source.log_weights + potential.unsqueeze(-1) / eps
    return scale * x, scale * source.points.detach(), scores


@functools.cache
def _score(p: int, dim: int) -> Node:
    """h_j − |x_i − y_j|^p"""
    square = node("sqdist", var(0, dim, 0), var(1, dim, 1))
    return var(2, 1, 1) - (square if p == 2 else node("sqrt", square))


@functools.cache
def _away(dim: int) -> Node:
    """1 and x_i − y_j"""
    return node("concat", const(1), var(0, dim, 0) - var(1, dim, 1))


# clusters


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
        shares: (N,) weights of points as fractions of their bricks' weights, in float64.
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
        return self._reduced(values, "max", -torch.inf).view(self.middles.shape[:2])

    def mean(self, values: Tensor) -> Tensor:
        """(G C,) the mean of each brick under its weights; 0 where these are 0."""
        return self._reduced(self.shares * values, "sum", 0)

    def _reduced(self, values: Tensor, how: str, initial: float) -> Tensor:
        # unsafe does not check the lengths, which are right
        found: Tensor = torch.segment_reduce(
            values, how, lengths=self.counts, unsafe=True, initial=initial
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


def _bricks(weights: Tensor, points: Tensor, size: int, count: int) -> tuple[Tensor, ...]:
    """The bricks of a sorted cloud, `count` of them; the last may have no points.

    Returns:
        Points (N, D), logarithms of weights (N, 1), centres (C, D) under the weights, logarithms of
        the bricks' weights (C, 1); in float64 shares (N,), variances (C,), middles (C, D) and half
        edges (C, D) of boxes; and numbers of points (C,).
    """
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
    variances = (shares * (inside - centres.unsqueeze(1)).square()).sum((1, 2))
    own = points, log_weights(weights), centres.to(points.dtype), totals.log().to(points.dtype)
    boxes = (low + high) / 2, (high - low) / 2
    return *own, shares.view(-1)[:total], variances, *boxes, (total - places[:, 0]).clamp(0, size)


def _stacked(sides: list[tuple[Tensor, ...]]) -> _Stack:
    """The stack of the clouds whose bricks are given."""
    points, weights, centres, totals, shares, variances, middles, halves, counts = map(
        torch.cat, zip(*sides, strict=True)
    )
    groups, wide = len(sides), points.double()
    labels = torch.arange(len(counts), device=wide.device)
    labels = labels.repeat_interleave(counts, output_size=len(wide))
    ends = counts.cumsum(0).view(groups, -1)
    return _Stack(
        fine=Cloud(points, weights),
        coarse=Cloud(centres, totals),
        middles=middles.view(groups, -1, wide.shape[1]),
        halves=halves.view(groups, -1, wide.shape[1]),
        counts=counts,
        bounds=torch.cat((ends[:, :1] - counts.view(groups, -1)[:, :1], ends), 1),
        labels=labels,
        away=wide - middles.index_select(0, labels),
        squares=wide.square().sum(-1) / 2,
        shares=shares,
        variances=variances,
        sizes=[len(side[0]) for side in sides],
        seen=torch.tensor(partners(groups), device=wide.device),
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


# clouds cut into bricks of equally many points


def parts_of(extents: Sequence[float], count: int) -> tuple[list[int], float]:
    """Into how many parts each coordinate is cut, and the edge: bricks are about cubes.

    Args:
        extents: of the cloud, by coordinate.
        count: bricks; the last coordinate is cut until there are so many.
    """
    wide = [e for e in extents if e > 0]
    edge = 0.0
    while wide:
        edge = (math.prod(wide) / count) ** (1 / len(wide))
        thin = [e for e in wide if e < edge]
        if not thin:
            break
        wide = [e for e in wide if e >= edge]
    parts = [max(1, round(e / edge)) if e in wide else 1 for e in extents[:-1]]
    return [*parts, -(-count // math.prod(parts))], edge


def brick_order(x: Tensor, size: int, parts: Sequence[int]) -> Tensor:
    """The order of the points (N, D) in bricks of `size`; points that are equal keep theirs."""
    count = len(x)
    order = torch.arange(count, device=x.device)
    for k, column in enumerate(x.unbind(1)):
        slab = size * math.prod(parts[k:])
        more = -count % slab
        keys = pad(column.index_select(0, order), (0, more), value=torch.inf).view(-1, slab)
        inside = keys.argsort(dim=1, stable=True)
        order = pad(order, (0, more)).view(-1, slab).gather(1, inside).view(-1)[:count]
    return order


def all_pairs(rows: Sequence[int], columns: Sequence[int], device: torch.device) -> BlockSparsity:
    """Each group of rows sees all of its columns.

    Args:
        rows: sizes of the groups of rows, which stand one after the other.
        columns: sizes of the groups of columns; rows of group g see group `partners`[g].
        device: of the mask.
    """
    ends = torch.arange(1, len(rows) + 1, device=device)
    (one, one_seen), (other, other_seen) = (_stretches(sizes, device) for sizes in (rows, columns))
    return BlockSparsity((one, ends, other_seen, other, ends, one_seen))


def kept_pairs(keep: Tensor, bounds: Tensor, seen: Tensor) -> BlockSparsity:
    """The mask of the bricks that meet; neighbouring bricks are one interval.

    Args:
        keep: (G, C, C) bricks of group g by bricks of its partner; symmetric, so that rows and
            columns have the same lists.
        bounds: (G, C + 1) where the bricks of each group begin and end.
        seen: (G,) the partners of the groups.
    """
    rows = torch.stack((bounds[:, :-1], bounds[:, 1:]), 2).view(-1, 2)
    edges = pad(keep, (1, 0)) ^ pad(keep, (0, 1))  # [G, C, C + 1]: begins and ends by turns
    group, _, place = edges.nonzero().unbind(1)
    other = bounds.index_select(0, seen).view(-1)
    intervals = other.index_select(0, group * bounds.shape[1] + place).view(-1, 2)
    ends = edges.view(len(rows), -1).sum(1).cumsum(0) // 2
    return BlockSparsity((*(rows, ends, intervals), *(rows, ends, intervals)))


def partners(groups: int) -> list[int]:
    """The group that each group sees: the first two see each other, all others themselves."""
    return [1, 0, *range(2, groups)]


def _stretches(sizes: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """(G, 2) bounds of the groups, and bounds of the groups that they see."""
    ends = [0, *itertools.accumulate(sizes)]
    found = [*itertools.pairwise(ends)]
    seen = [found[group] for group in partners(len(sizes))]
    return torch.tensor(found, device=device), torch.tensor(seen, device=device)
