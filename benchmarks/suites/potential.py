"""Whole potentials: force calls and training steps of MACE's model; needs mace-torch 0.3.16."""

from __future__ import annotations

from benchmarks.workloads.potential import Settings, Structures, potential_cases

FAMILY = "o3"

CASES = [
    *potential_cases("64 atoms", Structures(side=2)),
    *potential_cases("512 atoms", Structures(side=4)),
    *potential_cases("4096 atoms", Structures(side=8), check=4),
    *potential_cases("512 atoms, 2e", Structures(side=4), Settings("128x0e+128x1o+128x2e")),
    *potential_cases("32 molecules", Structures(molecules=32)),
    *potential_cases("tiny", Structures(side=1), Settings("4x0e+4x1o", lmax=2, correlation=2)),
]
