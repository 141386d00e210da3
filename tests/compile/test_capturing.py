"""The kernel that writes the arguments of a record, compiled for absent GPUs.

The statistics stand in capturing.json: growth over 10 % fails.  To accept a change, run with
TORCHWEFT_WRITE_SNAPSHOT=1 and commit the file.
"""

import pytest

from torchweft.core.backend import interpreted

if interpreted():
    pytest.skip("needs a process without TRITON_INTERPRET=1", allow_module_level=True)

from tests.compile.conftest import Check
from torchweft.capturing import kernels, launch
from torchweft.testing.compiler import Build


@pytest.mark.parametrize("target", ["sm_90", "sm_80", "gfx942"])
def test_kernel(target: str, check: Check) -> None:
    types = {"leaves_ptr": "*i64", "owners_ptr": "*i32", "given_ptr": "*i64"}
    options = {"num_warps": launch.TILE.num_warps, "num_stages": launch.TILE.num_stages}
    build = Build(kernels.write_kernel, types, {"BLOCK": launch.TILE.blocks[0]}, options)
    check(build, f"write_kernel, {target}", target)
