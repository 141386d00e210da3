"""The chapter of reductions: blocks against all pairs, earth that is carried, words on the page.

Seen red with: a mask of a fifth of the reach, the gradient of the cost not divided by the earth,
plain weights of half the exponent.
"""

import pytest
import torch

from torchweft.demo.chapters import reductions
from torchweft.demo.data.surface import load
from torchweft.demo.models.transport import carried, heaps, levelling
from torchweft.reductions import LazyTensor
from torchweft.testing import assert_as_accurate, assert_within_bound, plain_error

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def part():
    """A quarter of the surface."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reductions, "POINTS", 40_000)
        return reductions._part(load(None, 0), CPU)


def test_blocks_lose_no_pair_within_reach(part):
    """5 σ, beyond which a weight is below e^−12.5."""
    of = part
    x, y = LazyTensor(of.base[:, None, :]), LazyTensor(of.base[None, :, :])
    near = ((x - y) ** 2).sum(-1) <= 25.0
    all_pairs = near.sum(1)
    near.ranges = of.mask.ranges
    torch.testing.assert_close(near.sum(1), all_pairs, rtol=0, atol=0)
    assert of.mask.num_pairs() < 0.1 * len(of.base) ** 2


def test_the_whole_elevation_model_is_smoothed():
    """Seen red with: a part of 40,000 points."""
    assert len(load(None, 0).truth) <= reductions.POINTS


def test_plain_torch_gives_the_same_sums(part):
    of = part._replace(base=part.base[:3000], noisy=part.noisy[:3000])
    wide = of._replace(base=of.base.double(), noisy=of.noisy.double())
    exact, plain = (reductions.plain_weighted(p, p.base[::5]) for p in (wide, of))
    noise = plain_error(plain, exact, torch.float32)
    assert_as_accurate(reductions.weighted(of, of.base[::5]), exact, noise)


def test_smoothing_removes_noise(part):
    restored = reductions.smoothed(part, part.mask)
    assert reductions._rms(restored - part.truth) < reductions._rms(part.noisy - part.truth) / 2


def test_some_rows_are_smoothed_as_all_are(part):
    """Seen red with: the normals of the first rows in place of their own."""
    of = part._replace(
        base=part.base[:3000].double(),
        noisy=part.noisy[:3000].double(),
        normal=torch.nn.functional.normalize(part.noisy[:3000].double()),
    )
    few = slice(None, None, 7)
    exact = reductions.smoothed(of, None)[few]
    error = (reductions.smoothed(of, None, few) - exact).norm() / (exact - of.noisy[few]).norm()
    assert float(error) < torch.finfo(torch.float32).eps  # computed in float64


def test_earth_is_shared_out():
    ground = levelling(load(None, 0))
    for share in (ground.amount, ground.room):
        assert bool((share > 0).all())
        assert_within_bound(
            share.sum(), torch.ones(()).double(), torch.ones(()).double(), len(share)
        )


def test_cells_of_the_picture_hold_all_earth_at_its_mean_place():
    """Seen red with: means without weights."""
    generator = torch.Generator().manual_seed(0)
    places, share = torch.rand(500, 2, generator=generator), torch.rand(500, generator=generator)
    means, shares = heaps(places / 1.5, share)
    assert len(means) == 64  # of an edge of a twelfth
    wide, weight = places.double() / 1.5, share.double()
    assert_within_bound(shares.sum(), weight.sum(), weight.sum(), 500)
    exact = weight @ wide
    assert_within_bound(shares @ means, exact, exact, 500)


def test_earth_goes_where_room_is():
    """A grid moved by a part of its step goes there; the blur lets little go elsewhere."""
    line = torch.arange(8) / 8
    heap = torch.cartesian_prod(line, line)
    share = (1 + torch.arange(64.0) % 3) / 127
    move = torch.tensor([0.02, -0.01])
    error = carried(heap, share, heap + move, share) - (heap + move)
    assert float(error.abs().max()) < float(move.abs().min())
