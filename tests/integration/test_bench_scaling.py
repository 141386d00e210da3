"""Tables of scaling that is computed, on small sizes; the page has the large ones."""

import pytest
import torch

from benchmarks import scaling
from torchweft import o3


def test_the_crystal_has_its_neighbours():
    positions, cell, src, dst = scaling.crystal([2, 3, 2])
    expected = o3.neighbour_list(positions, scaling.R_MAX, cell, True)
    number = len(positions)
    assert (dst * number + src).sort()[0].equal((expected[1] * number + expected[0]).sort()[0])


def test_voxels_touch_those_within_one():
    places = scaling.city(4e3)
    assert len(places.unique(dim=0)) == len(places)
    src, dst = scaling.touching(places)
    apart = torch.cdist(places.double(), places.double(), p=torch.inf)
    expected = (apart == 1).nonzero()
    found = torch.stack([src, dst], 1)
    assert found.unique(dim=0).equal(expected)
    assert len(found) == len(expected)


def test_rows_of_tables():
    for rows in (
        scaling.strong_crystal((2, 8), cells=6),
        scaling.weak_crystal((2, 64, 128), cells=1),
        scaling.points((2, 512)),
        scaling.scene((4, 16), voxels=1e4),
    ):
        for row in rows:
            assert row.count("|") == scaling.HEAD.splitlines()[0].count("|")


def test_a_prediction_for_the_largest_measured_crystal_is_its_row():
    """Red before, by a sixth: the line went through 64 and 512 atoms."""
    step = scaling.mace()
    row = scaling.seconds("nvidia_h100_80gb_hbm3", "o3", "4096 atoms forces")
    assert step.seconds + 4096 * step.row_seconds == pytest.approx(row)


def test_times_of_the_page_are_those_of_rows():
    page = scaling.PAGE.read_text(encoding="utf-8")
    mace = scaling.mace()
    pair, voxel = scaling.gaussian(1.0).row_seconds, scaling.convolution().row_seconds
    for value in (mace.row_seconds, mace.seconds, pair, voxel):
        assert f"{value:.1e}" in page


def test_the_page_is_written_between_its_marks(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{scaling.BEGIN}\nold\n{scaling.END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(scaling, "tables", lambda: "new")
    scaling.main(page)
    expected = f"before\n{scaling.BEGIN}\n\nnew\n{scaling.END}\nafter\n"
    assert page.read_text(encoding="utf-8") == expected
