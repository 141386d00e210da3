"""What the demo's pages say of code and times; transport that lays scans onto each other.

Seen red with: docstrings left in, imports of names that are not used, a constant left out, a class
cut off after its first lines, a ratio upside down, rotations turned back, a shift not turned back.
"""

import dis
import itertools
from functools import partial

import numpy as np
import pytest
import torch

from tests import browser
from torchweft.demo import page
from torchweft.demo.chapters import reductions
from torchweft.demo.data.surface import load
from torchweft.demo.models import filter as filters
from torchweft.demo.models import forecaster, potential, segmenter, transport
from torchweft.demo.models.transport import Motion, angle, fitted, registered, scans
from torchweft.demo.pictures import curve
from torchweft.demo.snippets import shown, snippet

SHOWN = {
    "products": (filters.message_layer,),
    "o3": (potential.Layer,),
    "clifford": (forecaster.Forecaster,),
    "reductions": (reductions.weighted, reductions.smoothed),
    "transport of a map": (transport.carried,),
    "transport of a cloud": (transport.registered,),
    "voxels": (segmenter.Segmenter,),
}


@pytest.mark.parametrize("name", SHOWN)
def test_code_on_the_page_is_short_and_is_the_code_that_ran(name):
    """Compiled, it gives the instructions of the original."""
    parts = SHOWN[name]
    text = snippet(*parts)
    lines = [line for line in text.splitlines() if line.strip()]
    assert 8 <= len(lines) <= 26
    assert max(map(len, lines)) <= 100
    assert '"""' not in text
    given = dict(vars(__import__(parts[0].__module__, fromlist=["x"])))
    for part in parts:
        given.pop(part.__name__)
    exec(compile(text, name, "exec"), given)
    for part in parts:
        assert _bodies(given[part.__name__]) == _bodies(part)


def _bodies(part):
    """Instructions of a function, or of those of a class; of code in them, its name."""
    functions = [part] if not isinstance(part, type) else [*vars(part).values()]
    return [
        [(i.opname, getattr(i.argval, "co_name", i.argval)) for i in dis.get_instructions(function)]
        for function in functions
        if hasattr(function, "__code__")
    ]


def test_code_has_what_it_uses_and_no_more():
    text = snippet(transport.carried)
    assert text.startswith(
        "import torch\nfrom torch import Tensor\nfrom torchweft.reductions import"
    )
    assert "\n\nBLUR = 0.02\n\n" in text
    assert "cluster" not in text
    coloured = shown(transport.carried)
    assert "<b>def</b> carried(" in coloured
    assert "from torchweft/demo/models/transport.py" in coloured


def test_ratios_are_the_time_of_others_over_ours():
    found = {
        "training step": {"torchweft": 10.0, "e3nn": 5.0, "plain torch": 25.0},
        "inference": {"torchweft": 1.0, "plain torch": 3.0},
    }
    assert page.leads(found) == [
        ("0.50\u00a0×", "training step: time of e3nn / time of torchweft"),
        ("3.0\u00a0×", "inference: time of plain torch / time of torchweft"),
    ]
    table = page.times("Some.", found)
    assert "<th>torchweft</th><th>e3nn</th><th>plain torch</th>" in table
    assert "<td>10.0</td><td>5.0 (0.50\u00a0×)</td><td>25.0 (2.5\u00a0×)</td>" in table
    assert "<td>1.0</td><td>–</td><td>3.0 (3.0\u00a0×)</td>" in table


@pytest.mark.skipif(browser.installed() is None, reason=browser.MISSING)
def test_the_style_of_pages_is_readable(tmp_path):
    """Seen red with: pictures for wide screens alone, soft letters that are too light, small ones,
    code that may not scroll.
    """
    found = {
        "training step": {"torchweft": 10.0, "e3nn": 5000.0, "plain torch": 25000.0},
        "energies and forces": {"torchweft": 1.0, "plain torch": 3.0},
    }
    levels = {"constant guess": 3.0}
    losses = (4 * 0.98 ** np.arange(100)).tolist()
    blocks = (
        page.paragraph("Text with `code_of_a_long_name_that_is_one_word`. " * 8),
        page.cards([("2.07 eV/Å", "error of forces"), *page.leads(found), ("1e-06", "change")]),
        page.formula("<span><i>y</i> = Σ<sub><i>k</i></sub> <i>x</i></span>" * 9),
        shown(potential.Layer),
        page.figure(partial(curve, losses, levels, "RMS error"), "A curve. " * 20),
        page.times("Times. " * 20, found),
        page.details("More", page.table("Errors.", ["", "forces"], [("a", "1.0e-7")], 0)),
        page.documentation({"o3": "families/o3", "nowhere": "no/page"}),
    )
    text = page.page("Title", "A lead. " * 9, [page.Chapter("torchweft.o3", "A title", blocks)], [])
    path = tmp_path / "index.html"
    path.write_text(text, encoding="utf-8")
    with browser.Browser(tmp_path) as seen:
        for width, dark in itertools.product(browser.WIDTHS, (False, True)):
            seen.open(path, width, dark)
            browser.assert_readable(seen)


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    """Points of a lopsided surface."""
    random = np.random.default_rng(0)
    directions = random.normal(size=(600, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    points = directions * [1, 2, 3] + 0.5 * np.maximum(directions[:, :1], 0) ** 2 * [0, 3, 2]
    path = tmp_path_factory.mktemp("cloud") / "lopsided.npy"
    np.save(path, points)
    return load(path, seed=0)


def test_a_motion_is_fitted_to_where_points_go():
    """To rounding, relative to the points; a mirror image is not taken for a rotation."""
    points = torch.randn(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turn = torch.linalg.qr(points[:3]).Q
    motion = Motion(turn * turn.det().sign(), torch.tensor([1.0, -2.0, 3.0]).double())
    found = fitted(points, motion(points))
    rounding = 50 * torch.finfo(torch.float64).eps
    assert float((found(points) - motion(points)).abs().max()) < rounding * 10
    assert float(fitted(points, -points).turn.det()) > 0


def test_scans_are_of_different_points_and_are_laid_onto_each_other(cloud):
    found = scans(cloud, seed=1)
    radius = cloud.noisy.sub(cloud.noisy.mean(0)).square().sum(1).mean().sqrt()
    whole = (cloud.noisy - cloud.noisy.mean(0)) / radius
    back = torch.cat([found.fixed, found.back(found.moving)])
    assert torch.cdist(back, whole).amin(1).max() < 1e-3  # they are points of the cloud
    assert len(torch.cdist(back, whole).argmin(1).unique()) == 600  # each once
    still = Motion(torch.eye(3), torch.zeros(3))
    assert abs(angle(still, found.back) - transport.ROTATION) < 0.01
    motion = registered(found.moving, found.fixed)
    assert angle(motion, found.back) < transport.ROTATION / 4
