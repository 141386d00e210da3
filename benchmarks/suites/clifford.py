"""The fused chain GELU, geometric product, norm, and the layer around it: the guide's recipe."""

from __future__ import annotations

import torch

from benchmarks.suites.geometric import chain_case

FAMILY = "clifford"

BOTH = (torch.float32, torch.bfloat16)

CASES = [
    *(
        chain_case(what, kind, algebra, dtype)
        for algebra in ("cl30", "cl20")
        for kind in ("sgp", "fc")
        for what in ("op", "layer")
        for dtype in BOTH
    ),
    # from launch-bound to the largest, and features off and on the tile
    *(
        chain_case("op", "sgp", "cl30", rows=rows, features=features)
        for rows, features in ((1024, 128), (1024, 512), (16384, 512), (4096, 128), (4096, 1024))
    ),
    chain_case("op", "fc", "cl30", rows=1024),
    chain_case("op", "fc", "cl30", rows=16384),
    chain_case("op", "fc", "cl30", features=128),
    # 16 and 32 blades
    *(
        chain_case("op", "sgp", algebra, dtype)
        for algebra in ("cl13", "cl301", "cl50", "cl41")
        for dtype in BOTH
    ),
    chain_case("op", "fc", "cl301"),
    # gradients of gradients: what forces are trained with
    chain_case("op", "sgp", "cl30", features=256, phases=("second",)),
]
