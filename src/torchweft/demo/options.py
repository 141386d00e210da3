"""What a run of the demo was asked for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from torchweft.core.backend import device_of

__all__ = ["Options", "parse"]


class Options(NamedTuple):
    """The arguments of `torchweft demo`."""

    points: Path | None
    out: Path
    device: torch.device
    seed: int


_WHAT = "The main job on real data, a chapter a family. Leaves a page with pictures and numbers."
_FOLDER = "folder of the page; default: torchweft-demo"


def parse(arguments: Sequence[str]) -> Options:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(prog="torchweft demo", description=_WHAT)
    cloud = (
        "a cloud of your own: .npy .npz .xyz .bin (KITTI) .ply .pcd; default: matplotlib's model"
    )
    parser.add_argument("--points", type=Path, metavar="FILE", help=cloud)
    parser.add_argument("--out", type=Path, default=Path("torchweft-demo"), help=_FOLDER)
    parser.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--seed", type=int, default=0, help="of noise and learning; default: 0")
    found = parser.parse_args(arguments)
    return Options(found.points, found.out, device_of(found.device), found.seed)
