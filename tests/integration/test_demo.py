"""The demo: neighbours, the networks against plain torch, learning, and the page.

Seen red with: mean curvature of the wrong sign, a mirrored tile whose labels are turned too.
"""

import importlib.util
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import torchweft
from torchweft import demo
from torchweft.demo import pictures
from torchweft.demo.chapters import CHAPTERS
from torchweft.demo.data import surface as landforms
from torchweft.demo.data.surface import Surface, load, nearest, split
from torchweft.demo.measure import op_errors
from torchweft.demo.models import filter as training
from torchweft.demo.models import forecaster as forecasting
from torchweft.demo.models import potential as matching
from torchweft.demo.models import segmenter
from torchweft.demo.models.filter import NEIGHBOURS, PlainFilter, SurfaceFilter, graph_of
from torchweft.demo.models.forecaster import Forecaster
from torchweft.voxels import sparse_conv

pytestmark = pytest.mark.slow


def test_the_folder_of_the_page_is_made_before_the_work(tmp_path):
    demo.make_folder(tmp_path / "new" / "page")
    assert (tmp_path / "new" / "page").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"file: a folder .* file exists\. Pass another"):
        demo.main(["--out", str(tmp_path / "file")])


def test_refuses_a_small_cloud(tmp_path):
    np.save(tmp_path / "small.npy", np.random.default_rng(0).normal(size=(50, 3)))
    with pytest.raises(torchweft.ShapeError, match="50 points: the demo needs 1024 or more"):
        load(tmp_path / "small.npy", seed=0)


@pytest.mark.parametrize("dimensions", [2, 3])
def test_neighbours_are_the_nearest(dimensions):
    points = torch.randn(1500, dimensions, generator=torch.Generator().manual_seed(0)) ** 3
    squares = (points[:, None] - points).square().sum(2).fill_diagonal_(torch.inf)
    found = squares.gather(1, nearest(points, 8)).sort(1).values
    torch.testing.assert_close(found, squares.sort(1).values[:, :8], rtol=0, atol=0)
    blocks = split(points, 100)
    assert max(map(len, blocks)) <= 100
    assert torch.cat(blocks).sort().values.tolist() == list(range(1500))


@pytest.fixture(scope="module")
def cloud_file(tmp_path_factory):
    """A bumpy sphere."""
    directions = np.random.default_rng(0).normal(size=(3000, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    radius = 1 + 0.1 * np.sin(4 * directions[:, :1]) * np.cos(3 * directions[:, 1:2])
    path = tmp_path_factory.mktemp("cloud") / "bumpy.npy"
    np.save(path, radius * directions)
    return path


@pytest.fixture(scope="module")
def surface(cloud_file):
    return load(cloud_file, seed=0)


def test_the_elevation_model_is_there():
    surface = load(None, seed=0)
    assert surface.grid == (344, 403)
    assert surface.truth[:, 2].aminmax() == (236, 1076)
    # the held-out end is made of whole rows, the northern ones
    rows = surface.held_out.view(surface.grid)
    assert rows[:137].all()
    assert not rows[138:].any()


def test_products_of_the_filter_are_right(surface):
    torch.manual_seed(0)
    graph = graph_of(surface, torch.arange(600))
    phi, x = torch.randn(600 * NEIGHBOURS, 8), torch.randn(600, 12)
    z, weight = torch.randn(600, 8, 12), torch.randn(8, 12, 12)
    for name, inputs in {"gather": (phi, x), "mix": (z, weight)}.items():

        def ours(a, b, op=name):
            return getattr(SurfaceFilter, op)(a, b, graph)

        def plain(a, b, op=name):
            return getattr(PlainFilter, op)(a, b, graph)

        for error in op_errors(name, ours, plain, inputs):
            assert error.ratio < 1, error


def test_learning_repeats_and_restores(surface, monkeypatch):
    monkeypatch.setattr(training, "STEPS", 60)
    tiles = training.tiles_of(surface, torch.device("cpu"))
    assert not surface.held_out[torch.cat([t.rows for t in tiles])].any()
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = SurfaceFilter()
        runs.append(training.fit(model, tiles, seed=0))
    assert runs[0] == runs[1]  # bit for bit
    graph = graph_of(surface, torch.arange(len(surface.truth)))
    with torch.no_grad():
        restored = surface.noisy + surface.sigma * model(graph) * surface.frames[:, 2]
    noisy = surface.rmse(surface.noisy, surface.held_out)
    assert surface.rmse(restored, surface.held_out) < noisy / 2


class _Links(HTMLParser):
    """Every tag is closed, nothing is fetched."""

    def __init__(self):
        super().__init__()
        self.open, self.outside = [], []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href") and not value.startswith("data:"):
                self.outside.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_learns_where_charged_bodies_go(monkeypatch):
    monkeypatch.setattr(forecasting, "LEARNED_FROM", 60)
    monkeypatch.setattr(forecasting, "HELD_OUT", 20)
    monkeypatch.setattr(forecasting, "BATCH", 20)
    monkeypatch.setattr(forecasting, "STEPS", 40)
    data = forecasting.simulated(0, torch.device("cpu"))
    assert (len(data.train.charge), len(data.test.charge)) == (60, 20)
    frames = data.frames.position
    torch.testing.assert_close(frames[40].float(), data.test.target, rtol=0, atol=0)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Forecaster(8, 1)
        runs.append(forecasting.fit(model, data.train, seed=0))
    assert runs[0] == runs[1]  # bit for bit
    still = forecasting.rmse(data.test.position, data.test)
    assert forecasting.rmse(forecasting.predicted(model, data.test), data.test) < still / 1.5


def _map(heights):
    """A map of cells of 2 × 3 units."""
    rows, columns = heights.shape
    y, x = torch.meshgrid(-3.0 * torch.arange(rows), 2.0 * torch.arange(columns), indexing="ij")
    points = torch.stack([x, y, heights], -1).reshape(-1, 3)
    held_out = torch.arange(rows * columns) < rows * columns // 3
    frames = torch.eye(3).expand(len(points), 3, 3)
    grid = rows, columns
    return Surface("made up", "m", points, points, frames, points[:, :2], held_out, 2.0, 1.0, grid)


def test_a_dome_is_bent_upwards_as_much_as_its_sphere():
    radius = 400.0
    y, x = torch.meshgrid(3.0 * torch.arange(-40, 41), 2.0 * torch.arange(-40, 41), indexing="ij")
    heights = (radius**2 - x.square() - y.square()).sqrt()
    for sign in (1, -1):
        bent = landforms.bend(_map(sign * heights)).view(81, 81)[25:-25, 25:-25]
        # κ = 1/R; smoothing takes less than 1 % off, away from the edges
        assert (sign * radius * bent > 0.99).all()
        assert (sign * radius * bent < 1.01).all()


def test_a_fold_of_a_cloud_is_its_edge():
    sheet = _map((torch.arange(41.0) - 20).abs().expand(40, -1))
    varied = landforms.bend(sheet.__class__(**{**vars(sheet), "grid": None})).view(40, 41)
    assert varied[10:-10, 20].min() > 0.01
    assert varied[10:-10, 4:12].max() < 1e-12  # a plane


def test_landforms_are_of_distinct_voxels_and_mirrored_tiles_keep_theirs(surface):
    tiles, test = landforms.landforms(surface, torch.device("cpu"))
    found = torch.cat([tile.label for tile in tiles[::4]])
    share = torch.bincount(found, minlength=3) / len(found)
    torch.testing.assert_close(share, torch.tensor([0.2, 0.6, 0.2]), atol=2 / len(found), rtol=0)
    for tile in (*tiles, test):
        assert len(tile.tensor.C.unique(dim=0)) == len(tile.tensor)
        assert all(n % landforms.UNIT == 0 for n in tile.tensor.spatial_shape)
    plain, across, along, both = tiles[:4]
    for part, axes in ((across, [2]), (along, [3]), (both, [2, 3])):
        values = torch.stack([part.label + 1.0, part.tensor.feats[:, 1]], 1)
        there = torch.stack([plain.label + 1.0, plain.tensor.feats[:, 1]], 1)
        turned = plain.tensor.replace(there).dense().flip(axes)
        assert (part.tensor.replace(values).dense() == turned).all()


def test_learns_to_tell_landforms(monkeypatch):
    monkeypatch.setattr(segmenter, "STEPS", 60)
    y, x = torch.meshgrid(torch.arange(90.0), torch.arange(80.0), indexing="ij")
    hills = _map(8 * torch.sin(x / 6 + y / 20) * torch.cos(y / 9))
    tiles, test = landforms.landforms(hills, torch.device("cpu"))
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = segmenter.Segmenter()
        runs.append(segmenter.fit(model, tiles, seed=0))
    assert runs[0] == runs[1]  # bit for bit
    table = segmenter.confusion(segmenter.predicted(model, test.tensor).argmax(1), test.label)
    assert table.sum() == len(test.label)
    assert table.diag().sum() > 1.1 * table.sum(1).max()  # better than the most frequent kind


def test_plain_convolutions_are_the_same(surface):
    tile = landforms.landforms(surface, torch.device("cpu"))[0][0].tensor
    inputs = torch.randn(len(tile), 8), torch.randn(27, 8, 16)
    found = tile.maps.get(tile.coordinates, segmenter.Segmenter().inward[0][0].geometry)

    def ours(x, w):
        return sparse_conv(tile.replace(x), w, 3).feats

    def plain(x, w):
        return segmenter.gathered(x, w, found)

    for error in op_errors("convolution", ours, plain, inputs):
        assert error.ratio < 1, error


def test_pictures_are_as_high_as_what_they_show():
    """Seen red with: width and height exchanged."""
    line = torch.tensor([[0.0, 0.0], [10.0, 1.0]])
    assert pictures.height_of(line) < 3 < pictures.height_of(line.flip(1)) == 9.2
    assert pictures.height_of(torch.zeros(2, 2)) < 3


def test_leaves_a_page_that_needs_nothing_else(cloud_file, tmp_path, monkeypatch, capsys):
    """Seen red with: a demo that says nothing before its last line."""
    monkeypatch.setattr(training, "STEPS", 30)
    for name, few in {"LEARNED_FROM": 30, "HELD_OUT": 10, "BATCH": 10, "STEPS": 25}.items():
        monkeypatch.setattr(forecasting, name, few)
    monkeypatch.setattr(segmenter, "STEPS", 25)
    for name, few in {"LEARNED_FROM": 2, "STEPS": 25}.items():
        monkeypatch.setattr(matching, name, few)
    path = demo.main(["--points", str(cloud_file), "--out", str(tmp_path), "--device", "cpu"])
    assert path == tmp_path / "index.html"
    text = path.read_text(encoding="utf-8")
    reader = _Links()
    reader.feed(text)
    assert not reader.open
    assert not reader.outside
    assert "url(" not in text
    words = ("learned filter", "plain torch", "error / bound", "3,000 points", "torch 2.")
    words = (*words, "torchweft.o3", "each shaken in 2 ways", "forces when turned")
    words = (*words, "torchweft.voxels", "mean overlap", "bent", "submanifold, 3³", "other kinds")
    for part in (*words, "torchweft.clifford", "straight on", "when turned", "30 systems"):
        assert part in text
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert lines[0].startswith("5 chapters, at most 330 s on two cores: products 60, o3 90")
    assert [line.partition(":")[0] for line in lines if line[1] == "/"] == [
        f"{number}/5 {name}" for number, name in enumerate(CHAPTERS, 1)
    ]
    assert said.out.startswith(f"{path}: ")


def test_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    with pytest.raises(torchweft.BackendError, match="pip install matplotlib ase rich"):
        demo.main([])
