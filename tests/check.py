"""`python -m tests.check [FAMILY]`: run every contract on this machine, and leave a receipt of it.

The receipt says what was checked, the worst errors, and what failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import FOLDER, machine
from tests.cases import receipt
from torchweft.device import device_of
from torchweft.errors import WeftError
from torchweft.progress import say

FAMILIES = ("products", "o3", "clifford", "reductions", "voxels")


def main(arguments: Sequence[str] | None = None) -> int:
    """Check one family or all; 0: all promises hold, 1: one failed or the call was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.check", description=__doc__)
    parser.add_argument("family", nargs="?", choices=FAMILIES, help="default: all of them")
    parser.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--out", type=Path, help="folder of receipts; default: benchmarks/results")
    options = parser.parse_args(arguments)
    try:
        return _check(options)
    except (WeftError, OSError) as error:
        say(f"check: {error}")
    return 1


def _check(options: argparse.Namespace) -> int:
    device = device_of(options.device)
    here = machine(device)
    made = receipt.check_all(device, vars(here), options.family)
    name = f"receipt_{options.family}" if options.family else "receipt"
    path = (options.out or FOLDER / "results") / here.folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(made.json(), encoding="utf-8")
    print(made)
    print(f"receipt: {path}")
    return 1 if made.failures else 0


if __name__ == "__main__":
    sys.exit(main())
