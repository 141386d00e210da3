"""The check of links finds what is broken, and nothing else.

Seen red with: fragments that are not looked for, and links of Markdown pages that are not read.
"""

import re
import runpy
from pathlib import Path

import pytest

from torchweft.demo.chapters import CHAPTERS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def broken():
    return runpy.run_path(str(ROOT / "docs" / "check_links.py"))["broken"]


def test_broken_links_are_told(broken, tmp_path):
    (tmp_path / "other.html").write_text('<h1 id="there">x</h1>', encoding="utf-8")
    good = ["other.html", "other.html#there", "#own", "other.html?q=1#", "https://example.org/x#y"]
    bad = ["none.html", "other.html#gone", "#gone", "none.svg"]
    links = "".join(f'<a href="{link}">x</a>' for link in [*good, *bad[:-1]])
    page = f'<p id="own">{links}<img src="{bad[-1]}"></p>'
    (tmp_path / "index.html").write_text(page, encoding="utf-8")
    assert broken(tmp_path) == [f"index.html: {link}" for link in bad]


def test_links_of_the_readme_are_read(broken, tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("[a](src/none.py) [b](src)", encoding="utf-8")
    (tmp_path / "src").mkdir()
    monkeypatch.setitem(broken.__globals__, "ROOT", tmp_path)
    assert broken(tmp_path) == ["README.md: src/none.py"]


def test_the_readme_has_no_broken_links(broken, tmp_path):
    assert broken(tmp_path) == []


def test_the_demo_names_pages_that_are_there():
    """Red before: four of the demo's pages had moved to docs/migrate."""
    chapters = (ROOT / "src/torchweft/demo/chapters").glob("*.py")
    text = "".join(path.read_text(encoding="utf-8") for path in chapters)
    names = re.findall(r'"((?:families|how-to|migrate)/\w+)"', text)
    assert len(names) >= len(CHAPTERS)
    assert [name for name in names if not (ROOT / f"docs/{name}.md").is_file()] == []
