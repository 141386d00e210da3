"""What a run of the demo was asked for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["Options", "parse"]


class Options(NamedTuple):
    """The arguments of `weft demo`."""

    points: Path | None
    out: Path
    device: torch.device
    seed: int


def parse(arguments: Sequence[str]) -> Options:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(prog="weft demo", description="The main job on real data.")
    cloud = (
        "a cloud of your own: .npy .npz .xyz .bin .ply .pcd; default: matplotlib's elevation model"
    )
    parser.add_argument("--points", type=Path, metavar="FILE", help=cloud)
    parser.add_argument("--out", type=Path, default=Path("weft-demo"), help="folder of the page")
    parser.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--seed", type=int, default=0, help="of noise and learning; default: 0")
    found = parser.parse_args(arguments)
    device = found.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Options(found.points, found.out, torch.device(device), found.seed)
