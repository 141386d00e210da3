"""Bricks of clouds, bounds of the plan between them, and what an update leaves out.

Seen red with: bounds without the boxes' halves, without one corner, or with the groups' own aims;
ceilings without the variance; masks of the old potentials, of rows alone or of a smaller length;
bricks without points that have one; slabs of the wrong size, or not in a stable order; bounds of
the groups themselves, not of those that they see.
"""

import functools
import itertools
import math

import pytest
import torch

from tests.transports import clouds, distance, transport
from torchweft.reductions.cluster.sparsity import BlockSparsity, blocks_of
from torchweft.reductions.transport import multiscale
from torchweft.reductions.transport.settings import Settings
from torchweft.reductions.transport.softmin import (
    Cloud,
    log_weights,
    softmin,
    softmin_of_squares,
)
from torchweft.testing import assert_as_accurate

BLUR = {1: 0.02, 2: 0.07}


@pytest.fixture(autouse=True)
def small_bricks(monkeypatch):
    monkeypatch.setattr(multiscale, "BRICK", 8)


def sides(p, rows=300, columns=200, noise=0.0, seed=0, dim=3):
    """The stack of two clouds, and potentials that are about the solution, f and g of x and y."""
    a, x, b, y = clouds(dim=dim, rows=rows, columns=columns, seed=seed)
    lengths = [1.7, 1.7, 0.8, 0.4, 0.2, BLUR[p]]
    stack = stack_of(a, x - 0.5, b, y - 0.5)
    (x, y), (a, b) = (v.split(stack.sizes)[:2] for v in (stack.fine.points, weights_of(stack)))
    f, g = transport(a, x, b, y, lengths, p)
    own = transport(a, x, a, x, lengths, p)[0], transport(b, y, b, y, lengths, p)[0]
    potential = torch.cat([f, g, *own])
    random = torch.Generator().manual_seed(seed)
    return stack, potential + noise * torch.randn(len(potential), generator=random).double()


def weights_of(stack):
    return stack.fine.log_weights[:, 0].exp()


def stack_of(a, x, b, y):
    cuts = [multiscale._cut(z, None, None) for z in (x, y)]
    most = max(len(cut.counts) for cut in cuts)
    found = []
    for w, z, cut in ((a, x, cuts[0]), (b, y, cuts[1])):
        counts = torch.nn.functional.pad(cut.counts, (0, most - len(cut.counts)))
        found.append(multiscale._bricks(w[cut.order], z[cut.order], counts))
    return multiscale._stacked(found * 2)


def of_groups(stack, potential):
    """For each group its number, points and potential, and those of the group that it sees."""
    points, values = stack.fine.points.split(stack.sizes), potential.split(stack.sizes)
    return [(g, points[g], values[g], points[k], values[k], k) for g, k in enumerate([1, 0, 2, 3])]


def plan(p, x, f, y, g):
    """f_i + g_j − C(x_i, y_j)"""
    return f.unsqueeze(1) + g - distance(x, y) ** p / p


def expanded(stack, found, group, other):
    """A number for each pair of points, from one for each pair of bricks."""
    count = stack.middles.shape[1]
    labels = stack.labels.split(stack.sizes)
    return found[group][labels[group] - group * count][:, labels[other] - other * count]


# bricks


@pytest.mark.parametrize(
    ("extents", "count", "parts"),
    [
        ([1.0, 1.0, 1.0], 1563, [12, 12, 11]),
        ([2.0, 1.0], 50, [10, 5]),
        ([1.0, 1.0, 1e-9], 100, [10, 10, 1]),
        ([1e-9, 1.0, 1.0], 100, [1, 10, 10]),
        ([0.0, 0.0], 7, [1, 7]),
        ([3.0], 5, [5]),
    ],
)
def test_parts(extents, count, parts):
    found, edge = multiscale.parts_of(extents, count)
    assert found == parts
    assert math.prod(found) >= count
    assert 0 <= edge <= max(extents)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("points", [1, 8, 200])
def test_bricks_are_slabs_of_slabs(dim, points):
    """All of a slab comes before the next one in its coordinate; the last ones are not full."""
    x = clouds(dim=dim, rows=points)[1]
    parts, _ = multiscale.parts_of([1.0] * dim, -(-points // 8))
    order = multiscale.brick_order(x, 8, parts)
    assert sorted(order.tolist()) == list(range(points))
    whole = x[order]
    for k in range(dim):
        size = 8 * math.prod(parts[k + 1 :])
        around = size * parts[k]
        for start in range(0, points, around):
            slabs = whole[start : start + around, k].split(size)
            for one, other in itertools.pairwise(slabs):
                assert float(one.max()) <= float(other.min())


def test_equal_points_keep_their_order():
    x = torch.zeros(50, 3)
    assert multiscale.brick_order(x, 8, [2, 2, 2]).tolist() == list(range(50))


def test_what_bricks_hold():
    a, x, b, y = clouds(rows=100, columns=30)
    a[:40] = 0  # of whole bricks, too
    stack = stack_of(a, x, b, y)
    count = stack.middles.shape[1]
    assert stack.counts.view(4, count).sum(1).tolist() == [100, 30, 100, 30]
    weights = weights_of(stack)
    for k in range(4 * count):
        inside = (stack.labels == k).nonzero()[:, 0]
        group, place = divmod(k, count)
        assert stack.bounds[group, place + 1] - stack.bounds[group, place] == len(inside)
        if not len(inside):
            assert float(stack.coarse.log_weights[k]) == -math.inf
            continue
        assert int(inside[0]) == int(stack.bounds[group, place])
        total = weights[inside].sum()
        assert_as_accurate(stack.coarse.log_weights[k].exp(), total[None], 1e-15 * total)


def pairs_of(mask, rows, columns):
    """The mask as a matrix of how often a pair counts."""
    found = torch.zeros(rows, columns, dtype=torch.int64)
    starts, ends, indptr, first, last = blocks_of(mask, 1)
    for block, (start, end) in enumerate(zip(starts, ends, strict=True)):
        for q in range(indptr[block], indptr[block + 1]):
            found[start:end, first[q] : last[q]] += 1
    return found


def test_groups_see_their_partners():
    rows, columns = [3, 2, 3, 2], [4, 5, 4, 5]
    mask = multiscale.all_pairs(rows, columns, torch.device("cpu"))
    mask.check(10, 18)
    exact = torch.zeros(10, 18, dtype=torch.int64)
    exact[:3, 4:9], exact[3:5, :4], exact[5:8, 9:13], exact[8:, 13:] = 1, 1, 1, 1
    torch.testing.assert_close(pairs_of(mask, 10, 18), exact, rtol=0, atol=0)


# the last update


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_a_value_and_its_gradient_in_one_pass(dim, masked):
    """Those of the soft minimum; a row without columns has the value ∞ and the gradient 0."""
    _, x, b, y = clouds(dim=dim)
    mask = BlockSparsity.from_batch(torch.arange(60) // 20, torch.arange(40) // 20)
    source, potential = Cloud(y, log_weights(b)), y.square().sum(1)
    found, exact = (
        with_gradient(function, x, source, potential, mask if masked else None)
        for function in (softmin_of_squares, functools.partial(softmin, 2))
    )
    rows = 40 if masked else 60
    for one, other in zip(found, exact, strict=True):
        error = torch.finfo(torch.float32).eps * other[:rows].abs()
        assert_as_accurate(one[:rows], other[:rows], error)
    assert bool(found[0][rows:].isinf().all())
    assert not found[1][rows:].any()


def with_gradient(function, x, *others):
    x = x.detach().requires_grad_()
    value = function(0.3, x, *others)
    (gradient,) = torch.autograd.grad(value.nan_to_num(posinf=0).sum(), x)
    return value.detach(), gradient


# bounds


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("seed", [0, 1])
def test_bounds_hold(p, noise, seed):
    """Of every pair of points, also under potentials that are no solution."""
    stack, potential = sides(p, noise=noise, seed=seed)
    rows = potential + noise * potential.flip(0)
    bound = multiscale.plane_bound if p == 2 else multiscale.plain_bound
    found = bound(BLUR[p] ** p, stack, rows, potential)
    for (group, x, f, *_), (_, _, _, y, g, other) in zip(
        of_groups(stack, rows), of_groups(stack, potential), strict=True
    ):
        slack = expanded(stack, found, group, other) - plan(p, x, f, y, g)
        assert float(slack.min()) >= -64 * torch.finfo(torch.float64).eps
        assert float(slack.amin(1).median()) < 0.5  # not a bound that keeps everything


def test_the_plane_bound_is_reached():
    """One brick each, at corners of its box, and potentials that t and s make constant."""
    e = torch.tensor([[-1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    c, d = torch.tensor([[0.2, 0.1], [0.5, -0.3]], dtype=torch.float64)
    x, y = c + 0.1 * e, d + 0.2 * e
    half = torch.full((2,), 0.5, dtype=torch.float64)
    stack = stack_of(half, x, half, y)
    (x, y) = stack.fine.points.split(stack.sizes)[:2]
    f = x.square().sum(1) / 2 - (x - c) @ d
    g = y.square().sum(1) / 2 - (y - d) @ c
    potential = torch.cat([f, g, f, g])
    found = multiscale.plane_bound(0.01, stack, potential, potential)[0, 0, 0]
    exact = plan(2, x, f, y, g).max()
    assert_as_accurate(found, exact, torch.finfo(torch.float32).eps * exact.abs())


@pytest.mark.parametrize("p", [1, 2])
def test_ceilings_hold(p):
    """Of the updated potentials; and they are near these."""
    length = BLUR[p]
    stack, potential = sides(p, 800, 700, 0.01, dim=2)
    spread = multiscale.all_pairs(stack.sizes, [stack.middles.shape[1]] * 4, torch.device("cpu"))
    ceiling = multiscale._ceiling(p, length, stack, potential, spread)
    every = multiscale.all_pairs(stack.sizes, stack.sizes, torch.device("cpu"))
    new = softmin(p, length, stack.fine.points, stack.fine, potential, every)
    rounding = 64 * torch.finfo(torch.float64).eps
    assert float((ceiling - new).min()) >= -rounding
    assert float((ceiling - new).median()) < 4 * length**p


@pytest.mark.parametrize("p", [1, 2])
def test_ceilings_are_reached(p):
    """A point in the middle of others that are all as far from it."""
    x, y = torch.zeros(1, 3).double(), torch.cat([torch.eye(3), -torch.eye(3)]).double()
    weights = (torch.full((len(z),), 1 / len(z)).double() for z in (x, y))
    stack = stack_of(next(weights), x, next(weights), y)
    spread = multiscale.all_pairs(stack.sizes, [1] * 4, torch.device("cpu"))
    potential = torch.zeros(sum(stack.sizes)).double()
    found = multiscale._ceiling(p, 0.3, stack, potential, spread)[:1]
    exact = torch.full_like(found, 1 / p)
    assert_as_accurate(found, exact, torch.finfo(torch.float32).eps * exact)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_what_updates_leave_out(p, noise):
    """e^−8 of a row's mass at most, so potentials are too large by −ε log(1 − e^−8) at most."""
    length = BLUR[p]
    stack, potential = sides(p, 800, 700, noise, dim=2)
    every, spread = (
        multiscale.all_pairs(stack.sizes, columns, torch.device("cpu"))
        for columns in (stack.sizes, [stack.middles.shape[1]] * 4)
    )
    mask = multiscale.mask_of(Settings(p), length, stack, potential, spread)
    if not noise:
        assert mask.num_pairs() < 0.7 * every.num_pairs()
    full, some = (
        softmin(p, length, stack.fine.points, stack.fine, potential, m) for m in (every, mask)
    )
    allowed = -(length**p) * math.log1p(-math.exp(-Settings().truncate))
    rounding = 64 * torch.finfo(torch.float64).eps * float(full.abs().max())
    assert float((some - full).min()) >= -rounding
    assert float((some - full).max()) <= allowed + rounding


@pytest.mark.parametrize("p", [1, 2])
def test_what_all_updates_leave_out(p):
    """Errors of updates add up at most, half of each where it is averaged."""
    a, x, b, y = clouds(dim=2, rows=800, columns=700)
    lengths = [1.0, 0.5, 0.2, BLUR[p] * 2, BLUR[p]]
    whole, found = [(a, x, None), (b, y, None)], []
    for most in (8.0, None):
        settings = Settings(p, truncate=most)
        found.append(torch.cat(multiscale.multiscale(whole, lengths, settings)))
    eps = [length**p for length in lengths]
    allowed = -math.log1p(-math.exp(-8)) * (sum(eps[2:]) / 2 + eps[-1])
    assert 0 < float((found[0] - found[1]).abs().max()) <= allowed


@pytest.mark.parametrize("p", [1, 2])
def test_masks_are_the_bricks_of_the_bound(p):
    """Pairs that rows or columns need: one half serves both."""
    length = BLUR[p]
    stack, potential = sides(p)
    spread = multiscale.all_pairs(stack.sizes, [stack.middles.shape[1]] * 4, torch.device("cpu"))
    mask = multiscale.mask_of(Settings(p), length, stack, potential, spread)
    total = sum(stack.sizes)
    mask.check(total, total)
    found = pairs_of(mask, total, total)
    ceiling = multiscale._ceiling(p, length, stack, potential, spread)
    bound = multiscale.plane_bound if p == 2 else multiscale.plain_bound
    keep = bound(length**p, stack, ceiling, potential) >= -Settings().truncate * length**p
    keep = keep | keep[[1, 0, 2, 3]].mT
    assert 0 < int(keep.sum()) < keep.numel()
    ends = [0, *torch.tensor(stack.sizes).cumsum(0).tolist()]
    exact = torch.zeros_like(found)
    for group, other in enumerate([1, 0, 2, 3]):
        part = expanded(stack, keep, group, other).to(torch.int64)
        exact[ends[group] : ends[group + 1], ends[other] : ends[other + 1]] = part
    torch.testing.assert_close(found, exact, rtol=0, atol=0)
    assert len(mask.ranges[2]) < int(keep.sum())
