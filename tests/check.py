"""`python -m tests.check [FAMILY]`: run every contract on this machine, and leave receipts of it.

A family's receipt says what was checked, the worst errors, and what failed.  It is written as
contracts end, and names the blocks that are missing.  That of "distributed" comes of
tests/distributed with a rank on each GPU; tests that need more of them are missing, those that need
an optional package are left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness import FOLDER, machine
from tests.cases import receipt
from tests.cases.receipt_of_ranks import check_ranks
from torchweft.device import device_of
from torchweft.errors import WeftError
from torchweft.progress import say

FAMILIES = ("products", "o3", "clifford", "reductions", "voxels")
ON_RANKS = "distributed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check families in turn; 0: all promises hold, 1: one failed or is missing, a wrong call."""
    parser = argparse.ArgumentParser(prog="python -m tests.check", description=__doc__)
    default = f"default: each but {ON_RANKS}"
    parser.add_argument("family", nargs="?", choices=(*FAMILIES, ON_RANKS), help=default)
    parser.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--out", type=Path, help="folder of receipts; default: benchmarks/results")
    rest = "go on with receipts of this code in the folder"
    parser.add_argument("--resume", action="store_true", help=rest)
    ends = "begin no block after so long; tests of several ranks end then"
    parser.add_argument("--seconds", type=float, help=ends)
    options = parser.parse_args(arguments)
    try:
        return _check(options)
    except (WeftError, OSError) as error:
        say(f"check: {error}")
    return 1


def _check(options: argparse.Namespace) -> int:
    begin, red = time.monotonic(), False
    device = device_of(options.device)
    for family in (options.family,) if options.family else FAMILIES:
        seconds = options.seconds and max(0.0, options.seconds - (time.monotonic() - begin))
        made = _check_family(family, device, options, seconds)
        red = red or bool(made.failures or made.missing)
    return 1 if red else 0


def _check_family(
    family: str, device: torch.device, options: argparse.Namespace, seconds: float | None
) -> receipt.Receipt:
    here = machine(device)
    path = (options.out or FOLDER / "results") / here.folder / f"receipt_{family}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = receipt.read(path, vars(here)) if options.resume else None
    told = len(begun.failures) if begun else 0
    receipts = (
        check_ranks(device.type, vars(here), begun, seconds)
        if family == ON_RANKS
        else receipt.check_family(family, device, vars(here), begun, seconds)
    )
    for made in receipts:
        path.write_text(made.json(), encoding="utf-8")
        for failure in made.failures[told:]:
            say(failure)
        told = len(made.failures)
    print(f"{family}: {made}")
    print(f"receipt: {path}")
    return made


if __name__ == "__main__":
    sys.exit(main())
