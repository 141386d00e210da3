"""Whole transformers: forward passes and training steps of GATr and L-GATr.

Sizes are those of the originals' experiments: GATr's of the n-body problem with as many items as
for arteries, L-GATr's of tagging jets.
"""

from __future__ import annotations

from benchmarks.workloads.networks import Settings, network_cases

FAMILY = "clifford"

GATR = Settings("GATr", batch=4, items=1000)
LGATR = Settings("L-GATr", batch=128, items=50, scalars=32, blocks=12)
SMALL = {"batch": 2, "items": 6, "features": 4, "scalars": 8, "blocks": 2, "heads": 2}

CASES = [
    *network_cases("GATr 4x1000 fp32", GATR),
    *network_cases("GATr 4x1000 bf16", GATR._replace(autocast=True)),
    *network_cases("L-GATr 128x50 fp32", LGATR),
    *network_cases("L-GATr 128x50 bf16", LGATR._replace(autocast=True)),
    *network_cases("GATr tiny fp32", GATR._replace(**SMALL)),
    *network_cases("GATr tiny bf16", GATR._replace(**SMALL, autocast=True)),
    *network_cases("L-GATr tiny fp32", LGATR._replace(**SMALL)),
    *network_cases("L-GATr tiny bf16", LGATR._replace(**SMALL, autocast=True)),
]
