"""`torchweft inspect`: the numbers of its page against counting by hand, its errors.

Seen red with: tiles that are not filled up at the end, masks whose rarest offset is lowest, a box
full of voxels written as 1e+02%.
"""

import importlib.util
import itertools
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import torchweft
from torchweft import cli
from torchweft.demo import inspection as layer
from torchweft.demo.inspection import by_mask, inspect, layer_of, spacing_of, tile_waste
from torchweft.voxels import SparseTensor, kernel_map


@pytest.fixture(scope="module")
def cloud_file(tmp_path_factory):
    """A wavy sheet, 0.1 from point to point."""
    x, y = np.meshgrid(0.1 * np.arange(40), 0.1 * np.arange(30))
    path = tmp_path_factory.mktemp("cloud") / "sheet.npy"
    np.save(path, np.stack([x, y, np.sin(x)], -1).reshape(-1, 3))
    return path


def voxels(count, side, seed=0):
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(side, (count, 3), generator=generator).unique(dim=0)
    coords = torch.nn.functional.pad(places, (1, 0))
    return SparseTensor(torch.zeros(len(coords), 1), coords)


def test_counts_of_a_layer_are_those_of_a_set():
    tensor = voxels(300, 9)
    layer = layer_of(tensor, 0.5, 3)
    there = {tuple(row) for row in tensor.C[:, 1:].tolist()}
    steps = list(itertools.product((-1, 0, 1), repeat=3))
    counts = [
        sum(tuple(a + b for a, b in zip(v, step, strict=True)) in there for v in there)
        for step in steps
    ]
    assert layer.counts.tolist() == counts
    assert layer.pairs == sum(counts)
    assert layer.operations(8) == 2 * sum(counts) * 64
    assert layer.saved(8) == 27 * layer.box / sum(counts)
    assert layer.bytes(8)["gathered"] == 2 * 8 * sum(counts)
    found = kernel_map(tensor, 3)
    assert found.back is None  # one table is kept
    assert layer.bytes(8)["map"] == found.sources.nbytes
    found = kernel_map(tensor, 2)
    assert layer_of(tensor, 0.5, 2).bytes(8)["map"] == found.sources.nbytes + found.targets.nbytes


def test_tile_waste_is_counted_tile_by_tile():
    there = torch.rand(27, 150, generator=torch.Generator().manual_seed(0)) < 0.1
    rows = [range(begin, min(begin + 64, 150)) for begin in range(0, 150, 64)]
    needed = sum(any(bool(there[k, o]) for o in tile) for tile in rows for k in range(27))
    assert tile_waste(there, 64) == 64 * needed / int(there.sum())
    assert tile_waste(torch.ones(27, 128, dtype=torch.bool), 64) == 1


def test_rows_of_equal_masks_stand_together():
    there = torch.rand(5, 4000, generator=torch.Generator().manual_seed(0)) < torch.tensor(
        [[0.5], [0.01], [0.9], [0.3], [0.99]]
    )
    order = by_mask(there)
    assert order.sort().values.tolist() == list(range(4000))
    masks = there[:, order].T
    changes = (masks[1:] != masks[:-1]).sum(1)
    assert changes.max() <= 2  # Gray codes, a few of which do not occur
    assert (changes > 0).sum() < 2**5
    assert (masks[1:, 1] != masks[:-1, 1]).sum() == 1  # the rarest changes once


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_rows_are_sorted_among_as_many_as_kernels_do():
    """Seen red with: the 65,536 rows of kernels that are no more."""
    assert layer.NEAR == importlib.import_module("torchweft.voxels.maps.gpu.tiles").ROWS_PER_SORT


def test_waste_falls_where_rows_are_sorted_also_with_a_kernel_past_63_offsets():
    for kernel in (3, 5):
        waste = layer_of(voxels(3000, 24), 1.0, kernel).waste
        assert waste["by mask", 64] < waste["ascending", 64]
        assert waste["by mask", 64] < waste["by mask", 128]


def test_writes_a_page(cloud_file, tmp_path):
    path = inspect(cloud_file, None, 3, 16, tmp_path / "out")
    assert path == tmp_path / "out" / "index.html"
    text = path.read_text(encoding="utf-8")
    HTMLParser().feed(text)
    # the size is twice the distance of neighbours
    for part in ("sheet.npy", "1,200", "voxels of edge 0.2", "16 → 16 channels", "by mask, 64"):
        assert part in text
    assert text.count("<img") == 4
    assert "://" not in text


def test_a_full_box_is_full(cloud_file, tmp_path):
    page = inspect(cloud_file, 100.0, 1, 4, tmp_path).read_text(encoding="utf-8")
    assert "100%" in page
    assert "1e+02" not in page


def test_spacing_passes_over_repeated_points(cloud_file):
    points = torch.from_numpy(np.load(cloud_file))
    assert abs(spacing_of(points.repeat(2, 1)) - 0.1) < 0.01
    with pytest.raises(torchweft.ShapeError, match=r"all 9 points are at one place.*Pass --size"):
        spacing_of(torch.ones(9, 3))


@pytest.mark.parametrize(
    ("size", "kernel", "channels", "error", "text"),
    [
        (
            -1.0,
            3,
            8,
            torchweft.DTypeError,
            r"--size is -1\.0: .* positive and finite\. Pass --size",
        ),
        (
            1.0,
            0,
            8,
            torchweft.ShapeError,
            r"--kernel is 0: it must be at least 1\. Pass --kernel 3",
        ),
        (
            1.0,
            3,
            0,
            torchweft.ShapeError,
            r"--channels is 0: it must be at least 1\. Pass --channels",
        ),
        (1e-12, 3, 8, torchweft.IndexRangeError, r"points fall into voxels .* pass a larger size"),
    ],
)
def test_teaches(cloud_file, tmp_path, size, kernel, channels, error, text):
    with pytest.raises(error, match=text):
        inspect(cloud_file, size, kernel, channels, tmp_path)


def test_refuses_too_little_and_too_much(tmp_path, monkeypatch):
    np.save(tmp_path / "one.npy", np.zeros((1, 3)))
    with pytest.raises(torchweft.ShapeError, match="holds 1 finite points: at least 2 are needed"):
        inspect(tmp_path / "one.npy", None, 3, 8, tmp_path)
    monkeypatch.setattr(layer, "MOST", 1000)
    with pytest.raises(torchweft.ShapeError, match=r"a kernel of 3 on .* Pass a larger --size"):
        layer_of(voxels(300, 9), 0.5, 3)


def test_the_command(cloud_file, tmp_path, capsys):
    words = ["inspect", str(cloud_file), "--size", "0.4", "--channels", "8", "--out", str(tmp_path)]
    assert cli.main(words) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'index.html'}: ")
    page = tmp_path / "page"
    assert cli.main(["inspect", str(tmp_path / "none.npy"), "--out", str(page)]) == 1
    assert "torchweft inspect: " in (error := capsys.readouterr().err)
    assert "none.npy is not a file" in error
    assert not page.exists()
