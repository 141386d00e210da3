"""The demo's pages, of a map and of a cloud: what they hold, and how they look in a browser.

Seen red with: a page that fetches its style, a demo that says nothing before its last line, a
chapter without a constant guess; how pages look, see test_demo_code.py.
"""

import itertools
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from tests import browser
from torchweft import demo
from torchweft.demo.chapters import CHAPTERS, reductions
from torchweft.demo.inspection import inspect
from torchweft.demo.models import filter as training
from torchweft.demo.models import forecaster, potential, segmenter

pytestmark = pytest.mark.slow

FEW = {
    training: {"STEPS": 30},
    forecaster: {"LEARNED_FROM": 30, "HELD_OUT": 10, "BATCH": 10, "STEPS": 25},
    segmenter: {"STEPS": 25},
    potential: {"LEARNED_FROM": 2, "STEPS": 25},
    reductions: {"POINTS": 20_000, "ROUNDS": 1},
}


@pytest.fixture(scope="module", params=["map", "cloud"])
def made(request, tmp_path_factory):
    """A page after little training, the kind of surface, and what was said meanwhile."""
    folder = tmp_path_factory.mktemp(request.param)
    arguments = ["--out", str(folder / "page"), "--device", "cpu"]
    if request.param == "cloud":
        directions = np.random.default_rng(0).normal(size=(5000, 3))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        radius = 1 + 0.1 * np.sin(4 * directions[:, :1]) * np.cos(3 * directions[:, 1:2])
        np.save(folder / "bumpy.npy", radius * directions * [1, 1.2, 1.5])
        arguments += ["--points", str(folder / "bumpy.npy")]
    said = []
    with pytest.MonkeyPatch.context() as patch:
        for module, names in FEW.items():
            for name, few in names.items():
                patch.setattr(module, name, few)
        patch.setattr(demo, "say", said.append)
        path = demo.main(arguments)
    return path, request.param, said


class Links(HTMLParser):
    """Every tag is closed; what is fetched, and where links lead."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.links, self.anchors = [], [], [], set()

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "img", "br", "source"):
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "srcset") and not value.startswith("data:"):
                self.fetched.append(value)
            if name == "href":
                self.links.append(value)
            if name == "id":
                self.anchors.add(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_page_needs_nothing_else(made):
    text = made[0].read_text(encoding="utf-8")
    reader = Links()
    reader.feed(text)
    assert not reader.open
    assert not reader.fetched
    assert "url(" not in text
    inside = [link[1:] for link in reader.links if link.startswith("#")]
    assert len(inside) == len(CHAPTERS)
    assert set(inside) <= reader.anchors
    others = [link for link in reader.links if not link.startswith("#")]
    assert all(re.fullmatch(r"file://.*/docs/.*\.(md|html)", link) for link in others)


def test_each_chapter_has_its_code_a_constant_guess_and_both_ratios(made):
    chapters = made[0].read_text(encoding="utf-8").split("<section")[1:]
    assert len(chapters) == len(CHAPTERS)
    for family, text in zip(CHAPTERS, chapters, strict=True):
        code = re.sub("<[^>]*>", "", text.partition("<pre>")[2].partition("</pre>")[0])
        assert re.search(rf"^from torchweft(\.{family})? import ", code, re.MULTILINE)
        assert "The code that was run, from torchweft/demo/" in text
        assert "constant guess" in text
        cards = re.findall(r"<b>([^<]*)</b><span>([^<]*)</span>", text)
        ratios = [what for number, what in cards if number.endswith("×")]
        assert sum("/ time of torchweft" in what for what in ratios) >= 2, ratios
        assert "Read more" in text


def test_a_page_says_what_its_surface_calls_for(made):
    text = made[0].read_text(encoding="utf-8")
    words = {
        "map": ("138,632 points", "Level the map", "“ridge”", "The whole map"),
        "cloud": ("5,000 points", "two scans of the cloud", "“bent”", "found by transport"),
    }
    others = words["cloud" if made[1] == "map" else "map"]
    for part in words[made[1]]:
        assert part in text
    for part in others:
        assert part not in text


def test_progress_is_told(made):
    path, _, said = made
    assert said[0].startswith("5 chapters, at most 330 s on two cores: products 60, o3 90")
    assert [line.partition(":")[0] for line in said[1:]] == [
        f"{number}/5 {name}" for number, name in enumerate(CHAPTERS, 1)
    ]
    assert path.name == "index.html"


@pytest.mark.skipif(browser.installed() is None, reason=browser.MISSING)
def test_a_page_is_readable_at_three_widths_light_and_dark(made, tmp_path):
    """Leaves screenshots in its folder."""
    with browser.Browser(tmp_path) as seen:
        for width, dark in itertools.product(browser.WIDTHS, (False, True)):
            seen.open(made[0], width, dark)
            browser.assert_readable(seen)
            picture = tmp_path / f"{width}-{'dark' if dark else 'light'}.png"
            seen.screenshot(picture)
            assert picture.stat().st_size > 100_000


@pytest.mark.skipif(browser.installed() is None, reason=browser.MISSING)
def test_the_page_of_inspect_is_readable_too(tmp_path):
    x, y = np.meshgrid(0.1 * np.arange(40), 0.1 * np.arange(30))
    np.save(tmp_path / "sheet.npy", np.stack([x, y, np.sin(x)], -1).reshape(-1, 3))
    path = inspect(tmp_path / "sheet.npy", None, 3, 8, tmp_path / "page")
    with browser.Browser(tmp_path) as seen:
        for width, dark in itertools.product(browser.WIDTHS, (False, True)):
            seen.open(path, width, dark)
            browser.assert_readable(seen, "pre, .scroll")  # it has tables of nine columns
            seen.screenshot(tmp_path / f"inspect-{width}-{'dark' if dark else 'light'}.png")
