"""Whole transformers: forward passes and training steps of GATr and L-GATr.

Sizes are those of the originals' experiments: GATr's of the n-body problem with as many items as
for arteries, L-GATr's of tagging jets.
"""

from __future__ import annotations

from benchmarks.workloads.networks import Settings, network_cases

FAMILY = "clifford"

GATR = Settings("GATr", batch=4, items=1000)
LGATR = Settings("L-GATr", batch=128, items=64, scalars=32, blocks=12)
SMALL = {"batch": 2, "items": 6, "features": 4, "scalars": 8, "blocks": 2, "heads": 2}

CASES = [
    *network_cases("GATr fp32", GATR),
    *network_cases("GATr bf16", GATR._replace(autocast=True)),
    *network_cases("L-GATr fp32", LGATR),
    *network_cases("L-GATr bf16", LGATR._replace(autocast=True)),
    *network_cases("tiny GATr fp32", GATR._replace(**SMALL)),
    *network_cases("tiny GATr bf16", GATR._replace(**SMALL, autocast=True)),
    *network_cases("tiny L-GATr fp32", LGATR._replace(**SMALL)),
    *network_cases("tiny L-GATr bf16", LGATR._replace(**SMALL, autocast=True)),
]
