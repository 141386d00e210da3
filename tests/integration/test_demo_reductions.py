"""The chapter of reductions: blocks against all pairs, earth that is carried, words on the page.

Seen red with: a mask of a fifth of the reach, the gradient of the cost not divided by the earth.
"""

import torch

from weft.demo.chapters import reductions
from weft.demo.levelling import Levelling, carried, levelling
from weft.demo.surface import load
from weft.testing import assert_within_bound

CPU = torch.device("cpu")


def part():
    return reductions._part(load(None, 0), CPU)


def test_blocks_lose_what_is_nothing():
    """A weight beyond the reach is below e^−12.5, and there are fewer than N of them."""
    of = part()
    wide = of._replace(base=of.base.double(), noisy=of.noisy.double(), normal=of.normal.double())
    exact = reductions.smoothed(wide, None)
    found = reductions.smoothed(wide, of.mask)
    spread = wide.noisy[:, 2].max() - wide.noisy[:, 2].min()
    bound = len(of.base) * torch.tensor(-12.5).exp() * spread  # a point's own weight is 1
    assert float((found - exact).abs().max()) < float(bound)
    assert of.mask.num_pairs() < 0.1 * len(of.base) ** 2


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
