"""The chapter of reductions: blocks against all pairs, earth that is carried, words on the page.

Seen red with: a mask of a fifth of the reach, the gradient of the cost not divided by the earth,
plain weights of half the exponent.
"""

import torch

from weft.demo.chapters import reductions
from weft.demo.levelling import Levelling, carried, levelling
from weft.demo.surface import load
from weft.reductions import LazyTensor
from weft.testing import assert_as_accurate, assert_within_bound, plain_error

CPU = torch.device("cpu")


def part():
    return reductions._part(load(None, 0), CPU)


def test_blocks_lose_no_pair_within_reach():
    """5 σ, beyond which a weight is below e^−12.5."""
    of = part()
    x, y = LazyTensor(of.base[:, None, :]), LazyTensor(of.base[None, :, :])
    near = ((x - y) ** 2).sum(-1) <= 25.0
    all_pairs = near.sum(1)
    near.ranges = of.mask.ranges
    torch.testing.assert_close(near.sum(1), all_pairs, rtol=0, atol=0)
    assert of.mask.num_pairs() < 0.1 * len(of.base) ** 2


def test_plain_torch_gives_the_same_sums():
    of = part()
    of = of._replace(base=of.base[:3000], noisy=of.noisy[:3000])
    wide = of._replace(base=of.base.double(), noisy=of.noisy.double())
    exact, plain = (reductions.plain_weighted(p, p.base[::5]) for p in (wide, of))
    noise = plain_error(plain, exact, torch.float32)
    assert_as_accurate(reductions.weighted(of, of.base[::5]), exact, noise)


def test_smoothing_removes_noise():
    of = part()
    restored = reductions.smoothed(of, of.mask)
    assert reductions._rms(restored - of.truth) < reductions._rms(of.noisy - of.truth) / 2


def test_earth_is_shared_out():
    ground = levelling(load(None, 0))
    for share in (ground.amount, ground.room):
        assert bool((share > 0).all())
        assert_within_bound(
            share.sum(), torch.ones(()).double(), torch.ones(()).double(), len(share)
        )


def test_earth_goes_where_room_is():
    """A grid moved by a part of its step goes there; the blur lets little go elsewhere."""
    line = torch.arange(8) / 8
    heap = torch.cartesian_prod(line, line)
    share = (1 + torch.arange(64.0) % 3) / 127
    move = torch.tensor([0.02, -0.01])
    error = carried(Levelling(heap, share, heap + move, share, 1.0), CPU) - (heap + move)
    assert float(error.abs().max()) < float(move.abs().min())
