"""Labels to train with: shaken molecules of the G2 set, in one file.

    python -m benchmarks.g2_labels FILE.npz [--molecules 1500]

Energies and forces are of GFN2-xTB where tblite is installed, and else ASE's EMT; energies are less
those of single atoms by least squares.  1,500 molecules take tblite two minutes on one core, and
.5 MB.  `python -m benchmarks.train_mace FILE.npz` reads the file where tblite is not installed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchweft.demo.data.molecules import NUMBERS, best_labels, labelled, names, shaken

__all__ = ["Labelled", "load", "main"]

Array = np.ndarray[Any, Any]


class Labelled(NamedTuple):
    """M molecules of N atoms in all; energies in eV, lengths in Å."""

    labels: Array  # the name of the method
    numbers: Array  # (N,) atomic numbers
    positions: Array  # (N, 3)
    ptr: Array  # (M + 1,) the atoms of molecule m are ptr[m] .. ptr[m + 1] − 1
    energy: Array  # (M,)
    forces: Array  # (N, 3)


def made(count: int) -> Labelled:
    """All names of the set in turn, in a random order; always the same."""
    random = np.random.default_rng(0)
    every = names()
    systems = [
        shaken(every[place % len(every)], 1, random)[0]
        for place in random.permutation(max(count, len(every)))[:count]
    ]
    labels = best_labels()
    found = labelled(systems, labels)
    counts = np.array([[(some.numbers == number).sum() for number in NUMBERS] for some in systems])
    energy = found.energy.numpy()
    energy = energy - counts @ np.linalg.lstsq(counts, energy, rcond=None)[0]
    return Labelled(
        np.array(labels), np.concatenate([some.numbers for some in systems]),
        found.position.numpy(), found.ptr.numpy(), energy, found.force.numpy(),
    )  # fmt: skip


def load(path: Path) -> Labelled:
    """What `main` wrote."""
    with np.load(path) as file:
        return Labelled(**file)


def main() -> None:
    """Make the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--molecules", type=int, default=1500)
    options = parser.parse_args()
    np.savez_compressed(options.file, **made(options.molecules)._asdict())


if __name__ == "__main__":
    main()
