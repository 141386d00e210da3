"""The main job on real data, one chapter a family; leaves a page with pictures and numbers."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchweft.demo.page import make_folder, require_matplotlib
from torchweft.progress import say

if TYPE_CHECKING:
    from torchweft.demo.options import Options
    from torchweft.demo.page import Chapter

__all__ = ["main"]


def main(arguments: Sequence[str] = ()) -> Path:
    """Run every chapter and write `torchweft-demo/index.html`; says where, and returns it."""
    require_matplotlib()
    import torchweft
    from torchweft.demo.measure import machine, versions
    from torchweft.demo.options import parse
    from torchweft.demo.page import page

    options = parse(arguments)
    make_folder(options.out)
    chapters, seconds = _run(options)
    total = f"{sum(seconds.values()):.0f} s"
    each = ", ".join(f"{name} {spent:.0f}" for name, spent in seconds.items())
    facts = [
        ("machine", machine(options.device)),
        ("versions", f"torchweft {torchweft.__version__}, {versions()}"),
        ("seed", str(options.seed)),
        ("time", f"{total}, all in: {each}"),
    ]
    path = options.out / "index.html"
    path.write_text(page("torchweft at work", _LEAD, chapters, facts), encoding="utf-8")
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {total}")
    return path


def _run(options: Options) -> tuple[list[Chapter], dict[str, float]]:
    """The chapters, and the seconds of each."""
    from torchweft.demo.chapters import CHAPTERS

    limits = ", ".join(f"{name} {limit}" for name, limit in CHAPTERS.items())
    say(f"{len(CHAPTERS)} chapters, at most {sum(CHAPTERS.values())} s on two cores: {limits}")
    chapters, seconds = [], {}
    for number, name in enumerate(CHAPTERS, 1):
        begin = time.perf_counter()
        module = importlib.import_module(f"torchweft.demo.chapters.{name}")
        chapters.append(module.chapter(options))
        seconds[name] = time.perf_counter() - begin
        say(f"{number}/{len(CHAPTERS)} {name}: {seconds[name]:.0f} s")
    return chapters, seconds


_LEAD = (
    "Sums over structured sets of pairs, fast and differentiable. Each chapter does something a "
    "user would do on real data, says how wrong its numbers are, and how long they took."
)
