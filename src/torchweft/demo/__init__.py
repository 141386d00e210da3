"""The main job on real data, one chapter a family; leaves a page with pictures and numbers."""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchweft.demo.data import SUFFIXES
from torchweft.demo.page import make_folder, require_matplotlib
from torchweft.progress import say, step

if TYPE_CHECKING:
    import torch

    from torchweft.demo.page import Chapter

__all__ = ["Options", "main"]


class Options(NamedTuple):
    """The arguments of `torchweft demo`."""

    points: Path | None
    out: Path
    device: torch.device
    seed: int
    key: str | None = None


_WHAT = "The main job on real data, a chapter a family. Leaves a page with pictures and numbers."
_FOLDER = "folder of the page; default: torchweft-demo"


def _parse(arguments: Sequence[str]) -> Options:
    """The arguments of the command line; help needs no package, a device needs torch."""
    parser = argparse.ArgumentParser(prog="torchweft demo", description=_WHAT)
    cloud = f"a cloud of your own: {SUFFIXES}; default: matplotlib's elevation model"
    parser.add_argument("--points", type=Path, metavar="FILE", help=cloud)
    parser.add_argument("--key", help="name of the points in an .npz or .pt of several arrays")
    parser.add_argument("--out", type=Path, default=Path("torchweft-demo"), help=_FOLDER)
    parser.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--seed", type=int, default=0, help="of noise and learning; default: 0")
    found = parser.parse_args(arguments)
    require_matplotlib()
    with step("loading torch"):
        from torchweft.device import device_of

    return Options(found.points, found.out, device_of(found.device), found.seed, found.key)


def main(arguments: Sequence[str] = ()) -> Path:
    """Run every chapter and write `torchweft-demo/index.html`; says where, and returns it."""
    options = _parse(arguments)
    import torchweft
    from torchweft.demo.measure import machine, versions
    from torchweft.demo.page import page

    make_folder(options.out)
    chapters, seconds = _run(options)
    total = f"{sum(seconds.values()):.0f} s"
    each = ", ".join(f"{name} {spent:.0f}" for name, spent in seconds.items())
    facts = [
        ("machine", machine(options.device)),
        ("versions", f"torchweft {torchweft.__version__}, {versions()}"),
        ("seed", str(options.seed)),
        ("time", f"{total}, compilation included: {each}"),
    ]
    path = options.out / "index.html"
    path.write_text(page("torchweft on real data", _LEAD, chapters, facts), encoding="utf-8")
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
    "Five tasks, one for each part of the library. Each section has the code that was run, the "
    "errors on held-out data beside those of a constant guess, and the times of torchweft and of "
    "the library that people use today. All numbers were measured on this machine."
)
