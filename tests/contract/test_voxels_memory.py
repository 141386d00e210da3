"""What a map keeps: half of its table and the pairs of half of its offsets, at their size.

Seen red with: the pairs above the centre not swapped, room for all pairs of a table, pairs of all
offsets listed; masks in parts and the half of the table that nobody keeps not let go.
"""

import pytest
import torch

from tests.live_bytes import LiveBytes
from torchweft.core.backend import interpreted

if not interpreted() and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a GPU", allow_module_level=True)

from tests.contract.test_voxels_maps import with_kernels
from torchweft.voxels import SparseTensor, kernel_map
from torchweft.voxels.convolution import launch
from torchweft.voxels.maps.gpu import tiles as preparation

DEVICE = "cpu" if interpreted() else "cuda"
SIDE = 16
pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]


def cloud(count, shuffled, monkeypatch):
    """So many voxels of a box, about half of which are there."""
    with_kernels(monkeypatch, True)
    generator = torch.Generator().manual_seed(count)
    place = torch.randperm(2 * count, generator=generator)[:count]
    place = place if shuffled else place.sort().values
    coords = torch.stack([0 * place, place // SIDE**2, place // SIDE % SIDE, place % SIDE], 1).int()
    box = (-(-2 * count // SIDE**2), SIDE, SIDE)
    return SparseTensor(torch.ones(count, 1, device=DEVICE), coords.to(DEVICE), box, 1)


@pytest.mark.parametrize(("shuffled", "few"), [(False, 2**14), (True, 0)])
@pytest.mark.parametrize(
    ("kernel", "channels", "groups"), [(3, (24, 40), 1), ((1, 5, 7), (8, 8), 8), (1, (16, 16), 1)]
)
@pytest.mark.singly  # seconds an item in the interpreter
def test_half_of_the_pairs_give_the_bits_of_all(
    kernel, channels, groups, shuffled, few, monkeypatch
):
    monkeypatch.setattr(preparation, "MOST_RANKED", few)
    tensor = cloud(200, shuffled, monkeypatch)
    found = kernel_map(tensor, kernel)
    num = found.geometry.num_offsets
    assert found.back is None
    assert len(found.kept) == num // 2 + 1
    x, g = (torch.randn(len(tensor), c, device=DEVICE) for c in channels)
    options = {"groups": groups, "precision": "ieee"}
    order = found.outputs.order
    half = launch.weight_gradient(x, g, found.kept, order, **options, offsets=num, mirrored=True)
    all_pairs = launch.weight_gradient(x, g, found.table, order, **options)
    torch.testing.assert_close(half, all_pairs, rtol=0, atol=0)


@pytest.mark.parametrize("few", [0, 2**14])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_map_takes_what_its_table_and_its_tiles_do(shuffled, few, monkeypatch):
    """Of each voxel the table, lists, mask and row, and while these are made a key and a place.

    Half of the table then goes, and half of the pairs come; of few rows these have room for all, in
    16 bits.
    """
    monkeypatch.setattr(preparation, "MOST_RANKED", few)
    count = 4 * preparation.PANEL
    launch.prepare(kernel_map(cloud(100, shuffled, monkeypatch), 3), gradient=True)
    tensor = cloud(count, shuffled, monkeypatch)
    kernel_map(tensor, 1)  # what coordinates keep is theirs
    with LiveBytes() as alive:
        found = kernel_map(tensor, 3)
        launch.prepare(found, gradient=True)
    pairs = 4 * 14 * count if few else 8 * (int(found.counts.sum()) + count) // 2
    each = 27 * 4 + 2 * 4 + 27 * 4 / preparation.PANEL + 1
    place = 4 if few else 8
    assert alive.most <= count * (each + 27 * 4 + 4 + place)
    assert alive.now <= count * (each + 14 * 4) + pairs
