"""The built pages in a browser: nothing is cut off on a phone, a tablet or a desk, light or dark.

Seen red with: a table that does not scroll in a box of its own.
"""

import itertools
from pathlib import Path

import pytest

from tests import browser

HTML = Path(__file__).parents[2] / "docs" / "_build" / "html"
PAGES = [
    "index", "installation", "getting_started", "faq", "exactness", "performance", "concepts",
    "migrate/index", "migrate/mace", "tutorials/index", "auto_tutorials/plot_2_potential",
    "auto_examples/index", "how-to/several_gpus", "families/o3", "families/reductions",
    "api/index", "api/generated/torchweft.o3.TensorProduct",
    "api/generated/torchweft.reductions.LazyTensor",
]  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.installed() is None, reason=browser.MISSING),
    pytest.mark.skipif(not HTML.exists(), reason="the pages are not built: make docs"),
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    with browser.Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_cut_off(opened, page):
    for width, dark in itertools.product(browser.WIDTHS, (False, True)):
        opened.open(HTML / f"{page}.html", width, dark)
        assert opened.value("document.documentElement.scrollWidth") == width, (width, dark)
