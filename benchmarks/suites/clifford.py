"""The fused chain GELU, geometric product, norm, and the layer around it: the guide's recipe."""

from __future__ import annotations

import torch

from benchmarks.workloads.geometric import chain_case

FAMILY = "clifford"

BOTH = (torch.float32, torch.bfloat16)

CASES = [
    *(
        chain_case(what, kind, "cl30", dtype)
        for kind in ("sgp", "fc")
        for what in ("op", "layer")
        for dtype in BOTH
    ),
    chain_case("op", "sgp", "cl20"),
    chain_case("layer", "sgp", "cl20"),
    chain_case("op", "fc", "cl20"),
    # from launch-bound to the largest
    *(
        chain_case("op", "sgp", "cl30", rows=rows, features=features)
        for rows, features in ((1024, 128), (16384, 512), (4096, 1024))
    ),
    # 16 and 32 blades
    *(chain_case("op", "sgp", "cl13", dtype) for dtype in BOTH),
    chain_case("op", "sgp", "cl301"),
    chain_case("op", "sgp", "cl50"),
    # gradients of gradients: what forces are trained with
    chain_case("op", "sgp", "cl30", features=256, phases=("second",)),
]
