"""The seed's metadata: the document's vectors, and masks against the definition.

Seen red: with groups closed at one member more, with slots counted within an offset, with [0, 0]
for the range of each group of one member (which these tests once asked for; the design document's
own program prints ([4, 4], 12, 1, 4)), and with masks of one size for both sides of a strided map.
"""

import itertools

import pytest
import torch

from torchweft.errors import DTypeError, IndexRangeError, ShapeError
from torchweft.voxels.maps.metadata import build_masks, greedy_group
from torchweft.voxels.maps.tensor import SparseTensor, kernel_map

COORDS = [(1, 5, 0), (0, 0, 2), (0, 1, 1), (0, 0, 3)]
PAIRS = {
    13: [(0, 0), (2, 2), (1, 1), (3, 3)],
    11: [(1, 2)],
    12: [(1, 3)],
    14: [(3, 1)],
    15: [(2, 1)],
}
LAST_ALONE = [([0, 0], 0, 4, 4), ([1, 1], 4, 4, 4), ([2, 3], 8, 4, 4), ([4, 4], 12, 1, 4)]


@pytest.mark.parametrize(
    ("counts", "limits", "positions", "ranges"),
    [
        (
            [4, 1, 1, 1, 1],
            (4, 2, 4),
            [0, 4, 5, 8, 9],
            [([0, 0], 0, 4, 4), ([1, 2], 4, 2, 4), ([3, 4], 8, 2, 4)],
        ),
        ([4, 1, 1, 1, 1], (4, 6, None), [0, 4, 5, 6, 7], [([0, 4], 0, 8, 8)]),
        (
            [10, 7, 7, 5, 3, 3, 2, 1, 1],
            (4, 3, 12),
            [0, 12, 20, 27, 32, 35, 38, 40, 41],
            [
                ([0, 0], 0, 10, 12),
                ([1, 1], 12, 7, 8),
                ([2, 3], 20, 12, 12),
                ([4, 6], 32, 8, 8),
                ([7, 8], 40, 2, 4),
            ],
        ),
        (
            [5, 5, 4],
            (4, 2, 8),
            [0, 8, 16],
            [([0, 0], 0, 5, 8), ([1, 1], 8, 5, 8), ([2, 2], 16, 4, 4)],
        ),
        ([9], (4, 2, 4), [0], [([0, 0], 0, 9, 12)]),
        ([], (4, 2, 4), [], []),
        ([3, 0, 0], (4, 2, 4), [0, 3, 4], [([0, 1], 0, 3, 4), ([2, 2], 4, 0, 0)]),
        (
            [4, 4, 4, 2, 1],
            (4, 2, 4),
            [0, 4, 8, 12, 14],
            [
                ([0, 0], 0, 4, 4),
                ([1, 1], 4, 4, 4),
                ([2, 2], 8, 4, 4),
                ([3, 4], 12, 3, 4),
            ],
        ),
        ([4, 4, 2, 2, 1], (4, 2, 4), [0, 4, 8, 10, 12], LAST_ALONE),
    ],
)
def test_greedy_group(counts, limits, positions, ranges):
    found = greedy_group(counts, *limits)
    assert found.pos_indices == positions
    assert found.as_ranges() == ranges
    assert found.total_slots == sum(alloc for *_, alloc in ranges)
    assert [m for members in found.membership for m in members] == list(range(len(counts)))
    assert found[2] == found.membership  # red before: unpacked as the design document's five
    for gemm, group in zip(found.gemm_list, found.groups, strict=True):
        assert gemm == {
            "num_offsets": len(group.members),
            "gemm_M": group.alloc,
            "slots": group.req,
            "padding": group.alloc - group.req,
        }


def test_masks_of_the_document():
    found = build_masks(PAIRS, 27, 4, alignment=4, max_group=2, max_slots=4)
    assert found.offsets_active.tolist() == [13, 11, 12, 14, 15]
    assert found.counts[found.offsets_active].tolist() == [4, 1, 1, 1, 1]
    assert found.slots[found.offsets_active].tolist() == [0, 4, 5, 8, 9]
    rows = {
        13: ([0, 2, 1, 3], [0, 2, 1, 3]),
        11: ([-1, 4, -1, -1], [-1, -1, 4, -1]),
        12: ([-1, 5, -1, -1], [-1, -1, -1, 5]),
        14: ([-1, -1, -1, 8], [-1, 8, -1, -1]),
        15: ([-1, -1, 9, -1], [-1, 9, -1, -1]),
    }
    for offset in range(27):
        of_input, of_output = rows.get(offset, ([-1] * 4, [-1] * 4))
        assert found.in_mask.view(27, 4)[offset].tolist() == of_input
        assert found.out_mask.view(27, 4)[offset].tolist() == of_output


def test_masks_of_two_sizes():
    """A strided map has fewer outputs than inputs: each mask has the rows of its side."""
    coords = torch.tensor([(0, *c) for c in COORDS])
    found = kernel_map(SparseTensor(torch.ones(4, 1), coords, (2, 6, 4)), 2, 2, submanifold=False)
    inputs, outputs = len(coords), found.sources.shape[1]
    assert outputs < inputs
    one, two = build_masks(found, 8, inputs), build_masks(found, 8, (inputs, outputs))
    assert (len(two.in_mask), len(two.out_mask)) == (8 * inputs, 8 * outputs)
    torch.testing.assert_close(two.in_mask, one.in_mask, rtol=0, atol=0)
    kept = one.out_mask.view(8, inputs)[:, :outputs]
    torch.testing.assert_close(two.out_mask.view(8, outputs), kept, rtol=0, atol=0)
    assert int((two.out_mask >= 0).sum()) == int(found.counts.sum())


def test_prefix_sums_of_the_document():
    found = build_masks({0: [(0, 0), (1, 1)], 2: [(0, 1)]}, 3, 2)
    assert found.counts.tolist() == [2, 0, 1]
    assert found.slot_array.tolist() == [0, 2, 2, 3]
    assert found.offsets_active.tolist() == [0, 2]


def test_masks_of_a_map():
    """The document's cloud: the pairs of its kernel map, slots by output row."""
    coords = torch.tensor([(0, *c) for c in COORDS])
    found = kernel_map(SparseTensor(torch.ones(4, 1), coords), 3)
    pairs = {k: list(zip(*(r.tolist() for r in found.pairs(k)), strict=True)) for k in range(27)}
    assert {k: sorted(p) for k, p in pairs.items() if p} == {k: sorted(p) for k, p in PAIRS.items()}
    masks = build_masks(found, 27, 4, max_group=2, max_slots=4)
    assert masks.out_mask.view(27, 4)[13].tolist() == [0, 1, 2, 3]
    for one, other in zip(masks, build_masks(pairs, 27, 4, max_group=2, max_slots=4), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_gather_products_scatter_is_the_convolution():
    """buf[in_mask] = x, one product an offset, y += buf[out_mask]."""
    generator = torch.Generator().manual_seed(0)
    cells = torch.tensor(list(itertools.product(range(4), repeat=3)))
    chosen = cells[torch.randperm(64, generator=generator)[:20]]
    tensor = SparseTensor(
        torch.randn(20, 3, dtype=torch.float64, generator=generator),
        torch.cat([torch.zeros(20, 1, dtype=torch.int64), chosen], 1),
    )
    weight = torch.randn(27, 3, 5, dtype=torch.float64, generator=generator)
    found = kernel_map(tensor, 3)
    masks = build_masks(found, 27, 20)
    grouped = greedy_group(masks.counts[masks.offsets_active].tolist())
    buffer = torch.zeros(grouped.total_slots, 3, dtype=torch.float64)
    products = torch.zeros(grouped.total_slots, 5, dtype=torch.float64)
    expected = torch.zeros(20, 5, dtype=torch.float64)
    result = torch.zeros(20, 5, dtype=torch.float64)
    for k in range(27):
        slots = masks.in_mask.view(27, 20)[k]
        buffer[slots[slots >= 0].long()] = tensor.feats[slots >= 0]
        used = slots[slots >= 0].long()
        products[used] = buffer[used] @ weight[k]
        at = masks.out_mask.view(27, 20)[k]
        result[at >= 0] += products[at[at >= 0].long()]
        in_rows, out_rows = found.pairs(k)
        expected[out_rows] += tensor.feats[in_rows] @ weight[k]
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_errors():
    with pytest.raises(ShapeError, match=r"slots\[1\] is 2 after 1: counts must descend"):
        greedy_group([1, 2])
    with pytest.raises(DTypeError, match=r"slots is 2\.5: it must be an integer\. Pass"):
        greedy_group([2.5, 1])
    with pytest.raises(DTypeError, match=r"kernel_map is a list: it must be a KernelMap.*Pass"):
        build_masks([(0, 0)], 1, 1)
    with pytest.raises(ShapeError, match="alignment is 0: it must be at least 1"):
        greedy_group([1], alignment=0)
    with pytest.raises(IndexRangeError, match="the map has the offset 27 but num_offsets is 27"):
        build_masks({27: [(0, 0)]}, 27, 4)
    with pytest.raises(IndexRangeError, match="the input row 4 but num_points is 4"):
        build_masks({0: [(4, 0)]}, 27, 4)
    with pytest.raises(IndexRangeError, match=r"the output row 3 but num_points\[1\] is 3"):
        build_masks({0: [(3, 3)]}, 27, (4, 3))
