"""Kernels of batch norms, compiled for absent GPUs.

The statistics stand in voxels_norms.json: growth over 10 % fails.  To accept a change, run with
TORCHWEFT_WRITE_SNAPSHOT=1 and commit the file.
"""

from typing import Any

import pytest

from torchweft.core.backend import interpreted

if interpreted():
    pytest.skip("needs a process without TRITON_INTERPRET=1", allow_module_level=True)

from tests.compile.conftest import Check
from torchweft.testing.compiler import Build
from torchweft.voxels.norms import kernels, launch

ROWS = ("x_ptr", "g_ptr", "residual_ptr", "dz_ptr", "dx_ptr", "y_ptr")
AFTER: dict[str, dict[str, Any]] = {
    "gelu and residual": {"ACTIVATION": "gelu"},
    "relu": {"ACTIVATION": "relu", "residual_ptr": None, "dz_ptr": None},
}
CASES: dict[str, dict[str, Any]] = {
    "statistics": {},
    "total_statistics": {"CUMULATIVE": False, "count_ptr": None},
    "joined_statistics": {"CUMULATIVE": False},
    "total": {},
    **{
        f"{name}, {how}": given
        for name in ("apply", "gradient_sums")
        for how, given in AFTER.items()
    },
    **{f"gradient, {how}": given | {"count_ptr": None} for how, given in AFTER.items()},
    "statistics, padded": {},
    "total_statistics, padded": {"CUMULATIVE": False, "count_ptr": None},
    **{
        f"{name}, padded": {"ACTIVATION": "relu"} for name in ("apply", "gradient_sums", "gradient")
    },
}


def build(name: str, dtype: str, channels: int) -> Build:
    kernel = getattr(kernels, f"{name.split(',')[0]}_kernel")
    names = kernel.arg_names
    tile = launch._tile(channels)
    if name.startswith("total"):
        tile = launch.TOTAL
    elif name == "joined_statistics":
        tile = launch.JOINED
    blocks = dict(zip(names[len(names) - len(tile.blocks) :], tile.blocks, strict=True))
    padded = name.endswith("padded")
    given = CASES[name] if padded else CASES[name] | {"valid_ptr": None}
    constants = {n: v for n, v in given.items() if n in names} | blocks
    kinds = dict.fromkeys(ROWS, f"*{dtype}") | {"tracked_ptr": "*i64", "valid_ptr": "*i64"}
    kinds |= {"ranks_ptr": "*fp64", "count_ptr": "*i64" if padded else "*fp64"}
    kinds |= {"eps": "fp32", "momentum": "fp32"}
    types = {
        n: kinds.get(n, "*fp32" if n.endswith("_ptr") else "i32")
        for n in names
        if n not in constants
    }
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    wide = not name.startswith(("total", "joined"))
    return Build(kernel, types, constants, options, ("C",), False, wide)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize(("dtype", "channels"), [("fp16", 32), ("fp32", 96), ("bf16", 256)])
@pytest.mark.parametrize("name", CASES)
def test_kernels(name: str, dtype: str, channels: int, target: str, check: Check) -> None:
    check(build(name, dtype, channels), f"{name}, {dtype}, {channels}, {target}", target)
