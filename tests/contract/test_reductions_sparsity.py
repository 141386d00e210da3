"""Block-sparse masks against dense ones, and every error that a 6-tuple can have.

Seen red with: gaps of boxes that overlap, and gaps rounded up; a band one pair too wide or too
narrow; the second half of a causal mask made as the first; a short last block taken for a whole
one; entries of a batch shifted by the wrong size or not checked; an interval beyond the data let
through; blocks compared in the order given, with tolerance, or empty ones too; corners without
signs; one cached half for both; halves that are not compared.
"""

import pytest
import torch

import torchweft
from torchweft.reductions import Vi, Vj, cluster
from torchweft.reductions.cluster.sparsity import BlockSparsity, blocks_of, checked_ranges


def dense(ranges, rows, columns, axis=1):
    """How often a mask holds each pair: rows × columns, or columns × rows for axis 0."""
    starts, ends, indptr, j_starts, j_ends = (t.tolist() for t in blocks_of(ranges, axis))
    counts = torch.zeros((rows, columns) if axis == 1 else (columns, rows), dtype=torch.int64)
    for c, (start, end) in enumerate(zip(starts, ends, strict=True)):
        for q in range(indptr[c], indptr[c + 1]):
            counts[start:end, j_starts[q] : j_ends[q]] += 1
    return counts


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, check_dtype=False)


def test_a_mask_is_saved_and_loaded(tmp_path):
    """By torch.load's defaults."""
    mask = BlockSparsity.bands(4, 4, width=1)
    torch.save(mask, tmp_path / "mask.pt")
    same(dense(torch.load(tmp_path / "mask.pt"), 4, 4), dense(mask, 4, 4))


def assert_mask(mask, expected):
    """Both halves hold the pairs of a dense mask, once."""
    rows, columns = expected.shape
    mask.check(rows, columns)
    same(dense(mask, rows, columns), expected)
    same(dense(mask, rows, columns, axis=0), expected.T)
    same(dense(mask.t(), columns, rows), expected.T)
    assert mask.num_pairs() == int(expected.sum())
    assert {t.dtype for t in mask.ranges} == {torch.int64}


def clusters(count, size, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(count, (size,), generator=g).sort().values


def labelled(size, seed, dim=2, cell=0.2):
    x = torch.rand(size, dim, generator=torch.Generator().manual_seed(seed))
    return cluster.sort_clusters(x, cluster.grid_cluster(x, cell))


def test_from_clusters():
    labels_i, labels_j = clusters(6, 40, 0), clusters(4, 30, 1)
    keep = torch.rand(7, 5, generator=torch.Generator().manual_seed(2)) < 0.4
    mask = BlockSparsity.from_clusters(labels_i, labels_j, keep)
    assert_mask(mask, keep[labels_i[:, None], labels_j])
    assert repr(mask).startswith("BlockSparsity(7 blocks of rows × 5 of columns, ")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_from_matrix(dtype):
    ranges_i = torch.tensor([[2, 5], [7, 12]], dtype=dtype)
    ranges_j = torch.tensor([[1, 4], [4, 9], [20, 30]], dtype=dtype)
    keep = torch.tensor([[True, True, False], [False, True, False]])
    expected = torch.zeros(14, 30)
    for k, line in enumerate(keep):
        for l in line.nonzero()[:, 0]:  # noqa: E741
            expected[slice(*ranges_i[k]), slice(*ranges_j[l])] = 1
    assert_mask(BlockSparsity.from_matrix(ranges_i, ranges_j, keep), expected)


@pytest.mark.parametrize("radius", [0.0, 0.1, 0.35, 2.0])
def test_from_radius_loses_nothing(radius):
    (x, labels_x), (y, labels_y) = labelled(150, 0), labelled(120, 1)
    mask = BlockSparsity.from_radius(x, labels_x, y, labels_y, radius)
    held = dense(mask, 150, 120)
    assert_mask(mask, held)
    near = torch.cdist(x.double(), y.double()) <= radius
    assert int(held.max()) <= 1
    assert bool((held[near] == 1).all())
    # a pair of clusters is kept if and only if their boxes are near
    for a in labels_x.unique():
        for b in labels_y.unique():
            one, other = x[labels_x == a], y[labels_y == b]
            gap = torch.maximum(other.amin(0) - one.amax(0), one.amin(0) - other.amax(0))
            expected = gap.double().clamp(min=0).norm() <= radius
            assert bool((held[labels_x == a][:, labels_y == b] == expected).all())


def test_from_radius_at_the_radius():
    """√(0.3² + 0.4²) is 0.5, and rounding does not lose it; an unused label keeps nothing."""
    x, y = torch.tensor([[[0.0, 0.0]], [[0.3, 0.4]]], dtype=torch.float64)
    there = torch.tensor([1])
    assert_mask(BlockSparsity.from_radius(x, there, y, there, 0.5), torch.ones(1, 1))
    assert_mask(BlockSparsity.from_radius(x, there, y, there, 0.4999), torch.zeros(1, 1))
    none = BlockSparsity.from_radius(x[:0], there[:0], y, there, 0.5)
    assert_mask(none, torch.zeros(0, 1))


@pytest.mark.parametrize("block", [1, 4, 64])
@pytest.mark.parametrize(("rows", "columns"), [(13, 13), (9, 21), (21, 9), (0, 5), (5, 0)])
def test_bands(rows, columns, block):
    for width in (0, 1, 5):
        i, j = torch.arange(rows)[:, None], torch.arange(columns)
        expected = (i - j).abs() <= width
        assert_mask(BlockSparsity.bands(rows, columns, width, block), whole_blocks(expected, block))


@pytest.mark.parametrize("block", [1, 4, 64])
@pytest.mark.parametrize(("rows", "columns"), [(13, 13), (9, 21), (21, 9), (0, 5), (5, 0)])
def test_causal(rows, columns, block):
    expected = torch.arange(columns) <= torch.arange(rows)[:, None]
    assert_mask(BlockSparsity.causal(rows, columns, block), whole_blocks(expected, block))


def whole_blocks(mask, block):
    """Blocks of which one pair is kept."""
    rows, columns = mask.shape
    out = torch.zeros_like(mask)
    for i in range(0, rows, block):
        for j in range(0, columns, block):
            out[i : i + block, j : j + block] = mask[i : i + block, j : j + block].any()
    return out


def test_from_batch_and_from_ptr():
    batch_x, batch_y = torch.tensor([0, 0, 1, 3, 3, 3]), torch.tensor([1, 1, 2, 3])
    expected = batch_x[:, None] == batch_y
    assert_mask(BlockSparsity.from_batch(batch_x, batch_y), expected)
    mask = BlockSparsity.from_ptr(torch.tensor([0, 2, 3, 3, 6]), torch.tensor([0, 0, 2, 3, 4]))
    assert_mask(mask, expected)
    assert_mask(BlockSparsity.from_batch(batch_x[:0], batch_y), torch.zeros(0, 4))
    assert_mask(BlockSparsity.from_batch(batch_x[:0], batch_y[:0]), torch.zeros(0, 0))


def test_entries_of_a_batch():
    masks = [
        BlockSparsity.bands(5, 7, 1),
        BlockSparsity.causal(5, 7, 2),
        BlockSparsity.from_batch(torch.zeros(0, dtype=torch.int64), torch.zeros(7).long()),
    ]
    stacked = BlockSparsity.stack(masks, 5, 7)
    expected = torch.block_diag(*(dense(m, 5, 7) for m in masks))
    assert stacked.batch == stacked.to("cpu").batch == (3, 5, 7)
    assert stacked.t().batch == (3, 7, 5)
    assert "of 3 entries" in repr(stacked)
    same(dense(stacked, 15, 21), expected)
    same(dense(stacked.t(), 21, 15), expected.T)
    stacked.check(5, 7)
    checked_ranges(stacked, 5, 7)
    with pytest.raises(torchweft.ShapeError, match="3 entries of 5 × 7 pairs but the data 4 × 7"):
        checked_ranges(stacked, 4, 7)
    with pytest.raises(torchweft.IndexRangeError):  # it would see the next entry
        BlockSparsity.stack(masks, 5, 6)


def test_blocks_are_kept():
    mask = BlockSparsity.bands(6, 6, 1)
    blocks = blocks_of(mask, 1)
    assert blocks_of(mask.ranges, 1) is blocks
    assert blocks_of(mask, 0) is not blocks
    assert all(t.is_contiguous() and t.dtype == torch.int64 for t in blocks)
    mask.ranges[0][0, 1] = 0  # in place: the row is gone
    assert blocks_of(mask, 1).ends[0] == 0


V3 = (
    [[2, 5], [7, 12]],
    [2, 3],
    [[1, 4], [4, 9], [4, 9]],
    [[1, 4], [4, 9], [20, 30]],
    [1, 3, 3],
    [[2, 5], [2, 5], [7, 12]],
)


def ranges(**other):
    names = ("ranges_i", "slices_i", "redranges_j", "ranges_j", "slices_j", "redranges_i")
    values = dict(zip(names, V3, strict=True)) | other
    return tuple(torch.as_tensor(values[name]) for name in names)


def test_ranges_in_any_order_with_gaps_and_repeats():
    """Blocks that touch, come in any order, are empty; an interval listed twice."""
    mask = BlockSparsity(
        ranges(
            ranges_i=[[7, 12], [3, 3], [2, 5], [5, 7]],
            slices_i=[2, 2, 4, 4],
            redranges_j=[[4, 9], [4, 9], [1, 4], [4, 9]],
            ranges_j=[[1, 4], [4, 9]],
            slices_j=[1, 4],
            redranges_i=[[2, 5], [2, 5], [7, 12], [7, 12]],
        )
    )
    mask.check(12, 9)
    same(dense(mask, 12, 9, axis=0), dense(mask, 12, 9).T)
    assert int(dense(mask, 12, 9).max()) == 2


ERRORS = {
    "five": (
        lambda: checked_ranges(ranges()[:5], 12, 30),
        torchweft.ShapeError,
        r"ranges is 5 arrays: it must be six, \(ranges_i, slices_i, redranges_j.*from_matrix",
    ),
    "on the device meta": (
        lambda: BlockSparsity(tuple(t.to("meta") for t in ranges())),
        torchweft.DeviceError,
        r"ranges_i is on the device meta, without values",
    ),
    "none": (lambda: checked_ranges(3, 12, 30), torchweft.ShapeError, r"ranges is <class 'int'>"),
    "floats": (
        lambda: checked_ranges(ranges(slices_i=[2.0, 3.0]), 12, 30),
        torchweft.DTypeError,
        r"slices_i is torch.float32: ranges are tensors of integers",
    ),
    "lists": (
        lambda: checked_ranges(V3, 12, 30),
        torchweft.DTypeError,
        r"ranges_i is list: ranges are tensors",
    ),
    "flat": (
        lambda: checked_ranges(ranges(redranges_j=[1, 4]), 12, 30),
        torchweft.ShapeError,
        r"redranges_j is \(2,\): it must be \(number, 2\)",
    ),
    "slices too short": (
        lambda: checked_ranges(ranges(slices_j=[1, 3]), 12, 30),
        torchweft.ShapeError,
        r"slices_j is \(2,\) but ranges_j is \(3, 2\).*must be \(3,\)",
    ),
    "slices with a zero in front": (
        lambda: checked_ranges(ranges(slices_i=[0, 2]), 12, 30),
        torchweft.ShapeError,
        r"slices_i ends at 2 and falls 0 times, but redranges_j has 3 rows",
    ),
    "slices that fall": (
        lambda: checked_ranges(ranges(slices_j=[1, 0, 3]), 12, 30),
        torchweft.ShapeError,
        r"slices_j ends at 3 and falls 1 times",
    ),
    "rows outside": (
        lambda: checked_ranges(ranges(), 11, 30),
        torchweft.IndexRangeError,
        r"ranges_i\[1\] is \[7, 12\) but there are 11 points: 0 ≤ start ≤ end ≤ 11",
    ),
    "columns outside": (
        lambda: checked_ranges(ranges(redranges_j=[[1, 4], [4, 9], [4, 31]]), 12, 30),
        torchweft.IndexRangeError,
        r"redranges_j\[2\] is \[4, 31\) but there are 30 points",
    ),
    "negative": (
        lambda: checked_ranges(ranges(ranges_i=[[-1, 5], [7, 12]]), 12, 30),
        torchweft.IndexRangeError,
        r"ranges_i\[0\] is \[-1, 5\)",
    ),
    "backwards": (
        lambda: checked_ranges(ranges(redranges_i=[[2, 5], [5, 2], [7, 12]]), 12, 30),
        torchweft.IndexRangeError,
        r"redranges_i\[1\] is \[5, 2\)",
    ),
    "overlap": (
        lambda: checked_ranges(ranges(ranges_i=[[7, 12], [2, 8]]), 12, 30),
        torchweft.ShapeError,
        r"ranges_i holds the blocks \[2, 8\) and \[7, 12\), which overlap",
    ),
    "two masks": (
        lambda: BlockSparsity(ranges(redranges_i=[[2, 5], [2, 4], [7, 12]])).check(12, 30),
        torchweft.ShapeError,
        r"two different masks, first at row 4, column 4",
    ),
    "two masks in a reduction": (  # silent before: the gradient of y saw other pairs
        lambda: (
            Vi(torch.zeros(12, 1))
            .sqdist(Vj(torch.zeros(30, 1)))
            .sum(1, ranges=ranges(redranges_i=[[2, 5], [2, 4], [7, 12]]))
        ),
        torchweft.ShapeError,
        r"two different masks, first at row 4, column 4.*must list the pairs.*from_matrix",
    ),
    "labels in no order": (
        lambda: BlockSparsity.from_batch(torch.tensor([1, 0]), torch.tensor([0])),
        torchweft.ShapeError,
        r"batch_x is not ascending.*sort_clusters",
    ),
    "more labels than keep has": (
        lambda: BlockSparsity.from_clusters(
            torch.tensor([0, 2]), torch.tensor([0]), torch.ones(2, 1)
        ),
        torchweft.ShapeError,
        r"keep is \(2, 1\) but there are 3 ranges of i",
    ),
    "bounds of different batches": (
        lambda: BlockSparsity.from_ptr(torch.tensor([0, 2]), torch.tensor([0, 1, 2])),
        torchweft.ShapeError,
        r"ptr_x is \(2,\) but ptr_y is \(3,\)",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, error, text = ERRORS[name]
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("seed", range(20))
def test_halves_are_compared_by_their_pairs(seed):
    """Halves that are cut elsewhere are one mask; an interval shortened or moved is not."""
    g = torch.Generator().manual_seed(seed)
    bounds = [torch.arange(0, size + 1, size // 6) for size in (12, 30)]
    rows, columns = (torch.stack([b[:-1], b[1:]], 1) for b in bounds)
    keep = torch.rand(len(rows), len(columns), generator=g) < 0.5
    keep[0, 0] = True
    whole = BlockSparsity.from_matrix(rows, columns, keep).ranges
    fine = torch.arange(30)
    second = BlockSparsity.from_matrix(
        rows, torch.stack([fine, fine + 1], 1), keep.repeat_interleave(5, 1)
    ).ranges[3:]
    checked_ranges((*whole[:3], *second), 12, 30)
    place = int(torch.randint(len(whole[2]), (1,), generator=g))
    lost, moved = whole[2].clone(), whole[2].clone()
    lost[place, 1] -= 1
    moved[place] = 30 - moved[place].flip(0)
    for other in (lost, moved):
        given = (*whole[:2], other, *whole[3:])
        if (dense(given, 12, 30) == dense(given, 12, 30, axis=0).T).all():
            checked_ranges(given, 12, 30)
        else:
            with pytest.raises(torchweft.ShapeError, match="two different masks"):
                checked_ranges(given, 12, 30)


def test_right_ranges_raise_nothing():
    checked_ranges(ranges(), 12, 30)
    BlockSparsity(ranges()).check(12, 30)
