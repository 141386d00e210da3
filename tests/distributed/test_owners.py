"""Owners of rows: even parts, the same on every rank, near rows together.

Seen red with: the remainder of rows given to the last part, weights left out, rows outside the
cell cut where they lie, edges of one direction given to METIS.
"""

import importlib.util

import pytest
import torch

from torchweft.distributed import by_metis, by_position, round_robin
from torchweft.errors import BackendError, DTypeError, IndexRangeError, ShapeError

PARTS = [1, 2, 3, 4, 5, 6, 7, 64]


def spread(owner, parts):
    """Most and fewest rows of a part."""
    counts = torch.bincount(owner, minlength=parts)
    return int(counts.max()), int(counts.min())


def points(count=50, size=3, seed=0):
    return torch.rand(count, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [0, 1, 5, 50, 343])
@pytest.mark.parametrize("parts", PARTS)
def test_parts_differ_by_one_row_at_most(count, parts):
    lattice = torch.arange(count)[:, None] // torch.tensor([1, 7, 49]) % 7  # many equal coordinates
    for owner in (
        by_position(points(count), parts),
        by_position(lattice, parts),
        by_position(torch.zeros(count, 3), parts),
        by_position(points(count), parts, cell=torch.eye(3)),
        round_robin(count, parts),
    ):
        most, fewest = spread(owner, parts)
        assert most - fewest <= 1
        assert (most, fewest) == (-(-count // parts), count // parts)


def test_equal_rows_go_by_their_numbers():
    assert by_position(torch.zeros(6, 2), 3).tolist() == [0, 0, 1, 1, 2, 2]


def test_the_longest_side_is_cut():
    x = points(64) * torch.tensor([1.0, 10.0, 1.0])
    owner = by_position(x, 2)
    assert x[owner == 0, 1].max() <= x[owner == 1, 1].min()


def test_rows_are_taken_into_their_cell():
    cell = torch.tensor([[2.0, 0.0, 0.0], [1.0, 5.0, 0.0], [0.0, 0.0, 3.0]])
    inside = points(40).double() @ cell.double()
    images = torch.randint(-3, 4, (40, 3), generator=torch.Generator().manual_seed(1)).double()
    moved = inside + images @ cell.double()
    assert by_position(moved, 5, cell).equal(by_position(inside, 5, cell))


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_weights_are_spread_as_evenly_as_rows(parts):
    x = points(500)
    weights = (x[:, 0] * 20).long() ** 2  # dense at one end
    owner = by_position(x, parts, weights=weights)
    loads = torch.bincount(owner, weights.double(), minlength=parts)
    even = torch.bincount(by_position(x, parts), weights.double(), minlength=parts)
    assert loads.max() < even.max()
    for table in (torch.bincount(owner, minlength=parts).double(), loads):
        assert table.max() <= 1.6 * table.mean()
    assert spread(by_position(x, parts, weights=torch.zeros(500)), parts)[0] == -(-500 // parts)


@pytest.mark.parametrize(
    ("error", "call", "text"),
    [
        (ShapeError, lambda: by_position(points(), 0), "parts is 0"),
        (ShapeError, lambda: round_robin(3, -1), "parts is -1"),
        (ShapeError, lambda: by_position(points()[:, 0], 2), r"positions is \(50,\)"),
        (
            ShapeError,
            lambda: by_position(points(), 2, weights=torch.ones(49)),
            r"weights is \(49,\) for 50 positions",
        ),
        (ShapeError, lambda: by_position(points(), 2, torch.zeros(3, 3)), "cell is .* volume"),
        (ShapeError, lambda: by_position(points(), 2, torch.eye(2)), "must be 3 vectors"),
    ],
)
def test_faults_are_told(error, call, text):
    with pytest.raises(error, match=text):
        call()


needs_metis = pytest.mark.skipif(
    importlib.util.find_spec("pymetis") is None, reason="needs pymetis"
)


@needs_metis
@pytest.mark.parametrize("parts", [2, 3, 4, 7])
def test_metis_cuts_few_edges_into_even_parts(parts):
    side = 12
    rows = torch.arange(side * side).view(side, side)
    across, down = (rows[:, :-1], rows[:, 1:]), (rows[:-1], rows[1:])
    pairs = torch.cat([torch.stack(ends, -1).view(-1, 2) for ends in (across, down)])
    src, dst = pairs.T  # one direction of each
    owner = by_metis(src, dst, side * side, parts)
    assert owner.equal(by_metis(src, dst, side * side, parts))
    for table in (torch.bincount(owner), torch.bincount(owner[dst])):
        assert len(table) == parts
        assert table.max() <= 1.6 * table.double().mean()
    cut = int((owner[src] != owner[dst]).sum())
    assert cut <= 2 * (parts - 1) * side  # strips would cut (parts − 1) sides


@needs_metis
def test_metis_takes_few_rows_loops_and_no_edges():
    empty = torch.arange(0)
    assert by_metis(empty, empty, 3, 5).tolist() == [0, 1, 2]
    assert by_metis(empty, empty, 0, 2).tolist() == []
    assert spread(by_metis(empty, empty, 10, 2), 2) == (5, 5)
    loops = torch.arange(4)
    assert spread(by_metis(loops, loops, 4, 2), 2) == (2, 2)
    with pytest.raises(IndexRangeError, match="src holds 4 and num_nodes is 4"):
        by_metis(loops + 1, loops, 4, 2)
    with pytest.raises(DTypeError, match=r"dst holds torch\.float32"):
        by_metis(loops, loops.float(), 4, 2)
    with pytest.raises(ShapeError, match="src has 4 edges and dst has 3"):
        by_metis(loops, loops[1:], 4, 2)


def test_metis_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"pymetis is not installed.*torchweft\[distributed\]"):
        by_metis(torch.arange(2), torch.arange(2), 2, 2)
