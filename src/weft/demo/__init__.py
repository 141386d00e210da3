"""The main job on real data, one chapter a family; leaves a page with pictures and numbers."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import BackendError
from weft.progress import say

if TYPE_CHECKING:
    from weft.demo.options import Options
    from weft.demo.page import Chapter

__all__ = ["main", "make_folder", "require_matplotlib"]


def main(arguments: Sequence[str] = ()) -> Path:
    """Run every chapter and write `weft-demo/index.html`; says where, and returns it."""
    require_matplotlib()
    import weft
    from weft.demo.measure import machine, versions
    from weft.demo.options import parse
    from weft.demo.page import page

    options = parse(arguments)
    make_folder(options.out)
    chapters, seconds = _run(options)
    total = f"{sum(seconds.values()):.0f} s"
    each = ", ".join(f"{name} {spent:.0f}" for name, spent in seconds.items())
    facts = [
        ("machine", machine(options.device)),
        ("versions", f"weft {weft.__version__}, {versions()}"),
        ("seed", str(options.seed)),
        ("time", f"{total}, all in: {each}"),
    ]
    path = options.out / "index.html"
    path.write_text(page("weft at work", _LEAD, chapters, facts), encoding="utf-8")
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {total}")
    return path


def _run(options: Options) -> tuple[list[Chapter], dict[str, float]]:
    """The chapters, and the seconds of each."""
    from weft.demo.chapters import CHAPTERS

    limits = ", ".join(f"{name} {limit}" for name, limit in CHAPTERS.items())
    say(f"{len(CHAPTERS)} chapters, at most {sum(CHAPTERS.values())} s on two cores: {limits}")
    chapters, seconds = [], {}
    for number, name in enumerate(CHAPTERS, 1):
        begin = time.perf_counter()
        module = importlib.import_module(f"weft.demo.chapters.{name}")
        chapters.append(module.chapter(options))
        seconds[name] = time.perf_counter() - begin
        say(f"{number}/{len(CHAPTERS)} {name}: {seconds[name]:.0f} s")
    return chapters, seconds


def require_matplotlib() -> None:
    """Raise unless matplotlib is installed.

    Raises:
        BackendError: it is not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendError(
            "matplotlib is not installed: pages take their pictures from it, and the demo its "
            'elevation model. Run pip install "weft[demo]".'
        )


def make_folder(out: Path) -> None:
    """The folder of a page, made before the work, which a wrong name would cost.

    Raises:
        NotADirectoryError: it cannot be made or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        writable = os.access(out, os.W_OK)
        reason = "it may not be written"
    except OSError as error:
        writable, reason = False, str(error.strerror).lower()
    if not writable:
        raise NotADirectoryError(
            f"--out is {out}: a folder for the page is needed, and {reason}. Pass another --out."
        )


_LEAD = (
    "Sums over structured sets of pairs, fast and differentiable. Each chapter does something a "
    "user would do on real data, says how wrong its numbers are, and how long they took."
)
