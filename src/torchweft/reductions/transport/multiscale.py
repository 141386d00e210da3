"""Sinkhorn's iterations through clusters of points, for the cost C = |x − y|^p / p.

    coarse   f_i = −ε log Σ_J b_J exp((g_J − C(x_i, c_J)) / ε),   c_J, b_J of brick J
    fine     f_i = −ε log Σ_j b_j exp((g_j − C(x_i, y_j)) / ε),   j of bricks that i's meets

Bricks are clusters of equally many points, or those of the user's labels.  They meet unless every
pair of theirs has a plan a_i b_j exp((f_i + g_j − C) / ε) below e^−truncate a_i b_j, which a bound
says; unbalanced updates are damped after that, f_i ← λ f_i.

f at x, g at y, and the potentials of x and of y against themselves stand one after the other as one
column: a step is one reduction, whose mask says which rows see which columns.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchweft.reductions.cluster.sparsity import BlockSparsity
from torchweft.reductions.transport.settings import Settings
from torchweft.reductions.transport.softmin import (
    Cloud,
    log_weights,
    softmin,
    softmin_of_squares,
)

__all__ = ["multiscale", "partners"]

BRICK, MOST = 64, 4096  # points of a brick: a tile of rows; bricks of a cloud
COARSE = 0.5  # edges of a brick down to which bricks stand for their points


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
        return _by_brick(values, "max", self.counts, -torch.inf).view(self.middles.shape[:2])

    def mean(self, values: Tensor) -> Tensor:
        """(G C,) the mean of each brick under its weights; 0 where these are 0."""
        return _by_brick(self.shares * values, "sum", self.counts, 0)


def multiscale(
    clouds: Sequence[tuple[Tensor, Tensor, Tensor | None]],
    lengths: list[float],
    settings: Settings,
) -> list[Tensor]:
    """The potentials at the points, as functions of these alone.

    Args:
        clouds: weights (N,), points (N, D) and labels (N,) or None, of x and of y.
        lengths: one for each step, and the blur in the end.
        settings: with `debias`, potentials of x and of y against themselves follow f and g.
    """
    times, p = 2 if settings.debias else 1, settings.p
    cuts = [_cut(z.detach(), labels, settings.cluster_scale) for _, z, labels in clouds]
    most = max(len(cut.counts) for cut in cuts)
    with torch.no_grad():
        sides = [
            _bricks(a[cut.order], z[cut.order], pad(cut.counts, (0, most - len(cut.counts))))
            for (a, z, _), cut in zip(clouds, cuts, strict=True)
        ]
        stack = _stacked(sides * times)
        potential, mask = _descend(settings, lengths, max(cut.edge for cut in cuts), stack)
    sorted_points = [
        z.index_select(0, cut.order) for (_, z, _), cut in zip(clouds, cuts, strict=True)
    ]
    points, blur = torch.cat(sorted_points * times), lengths[-1]
    if p == 2 and points.requires_grad:
        last = softmin_of_squares(blur, points, stack.fine, potential, mask)
    else:
        last = softmin(p, blur, points, stack.fine, potential, mask)
    last = settings.damping(blur) * last
    parts = torch.split(last, [len(z) for z in sorted_points] * times)
    places = [cut.order.argsort() for cut in cuts] * times
    return [part.index_select(0, place) for part, place in zip(parts, places, strict=True)]


class _Cut(NamedTuple):
    """A cloud cut into bricks: the order of its points, points of each brick, and an edge."""

    order: Tensor
    counts: Tensor
    edge: float


def _cut(points: Tensor, labels: Tensor | None, scale: float | None) -> _Cut:
    """Bricks of the labels, or of equally many points and edges of about `scale`."""
    if labels is not None:
        found, order = labels.sort(stable=True)
        counts = found.unique_consecutive(return_counts=True)[1]  # type: ignore[no-untyped-call]
        return _Cut(order, counts, scale or _widest(points[order], counts))
    total, extents = len(points), (points.amax(0) - points.amin(0)).tolist()
    size = _brick_size(total, extents, scale)
    count = -(-total // size)
    parts, edge = parts_of(extents, count)
    counts = torch.full((count,), size, device=points.device)
    counts[-1] = total - size * (count - 1)
    return _Cut(brick_order(points, size, parts), counts, edge)


def _brick_size(total: int, extents: Sequence[float], scale: float | None) -> int:
    """Points of a brick: tiles of rows, at most MOST of them, and edges of about `scale`."""
    tiles = max(1, -(-total // (BRICK * MOST)))
    if scale:
        wanted = total / math.prod(max(1.0, extent / scale) for extent in extents)
        tiles = max(tiles, math.ceil(wanted / BRICK))
    return BRICK * tiles


def _widest(points: Tensor, counts: Tensor) -> float:
    """The longest edge of the boxes around bricks, whose points are sorted."""
    low, high = (_by_brick(points, how, counts) for how in ("min", "max"))
    return float((high - low).max())


def _by_brick(values: Tensor, how: str, counts: Tensor, initial: float | None = None) -> Tensor:
    """The "sum", "min" or "max" of the values of each brick."""
    # unsafe does not check the lengths, which are right
    found: Tensor = torch.segment_reduce(values, how, lengths=counts, unsafe=True, initial=initial)
    return found


def _bricks(weights: Tensor, points: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    """The bricks of a sorted cloud; some may have no points.

    Returns:
        Points (N, D), logarithms of weights (N, 1), centres (C, D) under the weights, logarithms of
        the bricks' weights (C, 1); in float64 shares (N,), variances (C,), middles (C, D) and half
        edges (C, D) of boxes; and numbers of points (C,).
    """
    inside, shares = points.double(), weights.double().unsqueeze(1)
    labels = _labels(counts, len(points))
    empty = (counts == 0).unsqueeze(1)
    low, high = (_by_brick(inside, how, counts).masked_fill(empty, 0) for how in ("min", "max"))
    totals = _by_brick(shares, "sum", counts, 0)
    # a brick whose weights are all 0 has its centre anywhere
    shares = shares / totals.where(totals > 0, 1).index_select(0, labels)
    centres = _by_brick(shares * inside, "sum", counts, 0)
    away = (inside - centres.index_select(0, labels)).square().sum(1, keepdim=True)
    variances = _by_brick(shares * away, "sum", counts, 0).squeeze(1)
    own = points, log_weights(weights), centres.to(points.dtype), totals.log().to(points.dtype)
    return *own, shares.squeeze(1), variances, (low + high) / 2, (high - low) / 2, counts


def _labels(counts: Tensor, total: int) -> Tensor:
    """(N,) the brick of each point."""
    places = torch.arange(len(counts), device=counts.device)
    return places.repeat_interleave(counts, output_size=total)


def _stacked(sides: list[tuple[Tensor, ...]]) -> _Stack:
    """The stack of the clouds whose bricks are given."""
    points, weights, centres, totals, shares, variances, middles, halves, counts = map(
        torch.cat, zip(*sides, strict=True)
    )
    groups, wide = len(sides), points.double()
    labels = _labels(counts, len(wide))
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
    settings: Settings, lengths: list[float], edge: float, stack: _Stack
) -> tuple[Tensor, BlockSparsity]:
    """Potentials of the points, and the mask of the last update: bricks as long as they are small.

    At each length potentials are the mean of what they were and their updates.
    """
    p, damping = settings.p, settings.damping
    device, fine, coarse = stack.labels.device, stack.fine, stack.coarse
    bricks = [stack.middles.shape[1]] * len(stack.sizes)
    every = all_pairs(bricks, bricks, device)
    num_coarse = max(1, sum(length > COARSE * edge for length in lengths[:-1]))
    if settings.verbose:
        _tell(_summary(stack, edge, lengths, num_coarse))

    potential, first = torch.zeros_like(coarse.log_weights[:, 0]), lengths[0]
    potential = damping(first) * softmin(p, first, coarse.points, coarse, potential, every)
    for length in lengths[:num_coarse]:
        new = damping(length) * softmin(p, length, coarse.points, coarse, potential, every)
        potential = (potential + new) / 2
    spread = all_pairs(stack.sizes, bricks, device)
    last = lengths[num_coarse - 1]
    potential = damping(last) * softmin(p, last, fine.points, coarse, potential, spread)
    for length in lengths[num_coarse:]:
        mask = mask_of(settings, length, stack, potential, spread)
        new = damping(length) * softmin(p, length, fine.points, fine, potential, mask)
        potential = (potential + new) / 2
    return potential, mask_of(settings, lengths[-1], stack, potential, spread)


def _summary(stack: _Stack, edge: float, lengths: list[float], num_coarse: int) -> str:
    """What `verbose` tells of the descent."""
    count = stack.middles.shape[1]
    of_x, of_y = ((stack.counts[k : k + count] > 0).sum() for k in (0, count))
    down = ", ".join(f"{length:.3g}" for length in lengths)
    return (
        f"{of_x} x {of_y} clusters of {max(stack.counts)} points at most, edge {edge:.3g}; lengths "
        f"{down}, the first {num_coarse} between clusters"
    )


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def mask_of(
    settings: Settings, length: float, stack: _Stack, potential: Tensor, spread: BlockSparsity
) -> BlockSparsity:
    """The bricks that hold a pair whose plan is e^−truncate or more of a_i b_j after the update.

    f_i is replaced, so what counts is its new value; `_ceiling` is no less, and known before.
    """
    p = settings.p
    eps = length**p
    ceiling = _ceiling(p, length, stack, potential, spread)
    found = (plane_bound if p == 2 else plain_bound)(eps, stack, ceiling, potential)
    least = -math.inf if settings.truncate is None else -settings.truncate * eps
    keep = found >= least
    keep = keep | stack.facing(keep).mT
    mask = kept_pairs(keep, stack.bounds, stack.seen)
    if settings.verbose:
        sizes = stack.sizes
        every = sum(size * sizes[k] for size, k in zip(sizes, partners(len(sizes)), strict=True))
        _tell(f"length {length:.3g}: {100 * mask.num_pairs() / every:.3g} % of all pairs kept")
    return mask


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
