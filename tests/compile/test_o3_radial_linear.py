"""Kernels of products whose weights are h A, in their default layouts, compiled for absent GPUs.

The statistics stand in o3_radial_linear.json: growth over 10 % fails.  To accept a change, run
with TORCHWEFT_WRITE_SNAPSHOT=1 and commit the file.
"""

import re

import pytest
import torch

from torchweft.core.backend import interpreted

if interpreted():
    pytest.skip("needs a process without TRITON_INTERPRET=1", allow_module_level=True)

from tests.cases.o3_workloads import WORKLOADS
from tests.compile.conftest import Check
from torchweft.core.printing.modules import printed
from torchweft.o3.radial_linear import kernels, launch
from torchweft.o3.radial_linear import source as generator
from torchweft.o3.radial_linear.source import RadialKernelSpec
from torchweft.testing.compiler import Build, compile_for

HIDDEN = 64
TYPES = {"indptr_ptr": "*i32", "src_ptr": "*i32", "h_ptr": "*fp16", "a_ptr": "*fp16"}


def specs(structure, precision):
    recipe = launch._recipe(structure, HIDDEN, precision, torch.int32, torch.device("cpu"))
    return [spec for spec, *_ in recipe.steps]


def build(spec: RadialKernelSpec) -> Build:
    tiling = spec.tiling
    kernel = printed("o3_radial", generator.source(spec), generator.NAME).function()
    constants = {"BLOCK": tiling.block, "STAGES": tiling.stages}
    types = {
        name: TYPES.get(name, "*fp32" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
        if name not in constants
    }
    options = {"num_warps": generator.RADIAL_WARPS, "num_stages": 1}
    return Build(kernel, types, constants, options, tensor_cores=True, wide_loads=True)


@pytest.mark.parametrize("precision", ["tf32x3", "tf32"])
@pytest.mark.parametrize("name", ["mace_L2_carbon"])
def test_kernels(name: str, precision: str, check: Check) -> None:
    for n, spec in enumerate(specs(WORKLOADS[name].structure, precision)):
        check(build(spec), f"{name}, {precision}, kernel {n}", "sm_90")


@pytest.mark.parametrize("hidden", [64, 128])
@pytest.mark.parametrize("name", ["row_parts", "column_parts", "formed_weights", "summed_products"])
def test_kernels_of_parts(name: str, hidden: int, check: Check) -> None:
    width = WORKLOADS["mace_L2_carbon"].structure.width("w")
    depth = max(16, hidden)
    tile = launch.split_tile(hidden)
    made = {
        "row_parts": ((hidden, 16, 16, 2), tile),
        "column_parts": ((hidden, width, 1, 2), tile),
        "formed_weights": ((width, depth), launch.FORMED_TILE),
        "summed_products": (launch.summed_constants(hidden, width), launch.SUMMED_TILE),
    }
    kernel, products = getattr(kernels, name), name in ("formed_weights", "summed_products")
    options = launch.split_kernel(name, *made[name])._shown
    constants = {key: value for key, value in options.items() if key in kernel.arg_names}
    missing = {"row_parts": ("order_ptr", "powers_ptr")}.get(name, ())
    constants |= dict.fromkeys(missing)
    halves = ("parts_ptr", *(("h_ptr", "a_ptr") if products else ()))
    types = {
        key: "*fp16" if key in halves else "*i32" if key == "columns_ptr" else "*fp32"
        if key.endswith("_ptr") else "i32"
        for key in kernel.arg_names
        if key not in constants
    }  # fmt: skip
    chosen = {key: options[key] for key in ("num_warps", "num_stages")}
    wide = name != "column_parts"  # whose columns are gathered
    build = Build(kernel, types, constants, chosen, tensor_cores=products, wide_loads=wide)
    check(build, f"{name}, hidden {hidden}", "sm_90")


@pytest.mark.parametrize("precision", ["tf32x3", "tf32"])
@pytest.mark.parametrize("name", ["mace_L2_carbon", "sevennet_l3i5"])
def test_nothing_is_exchanged_between_threads(name: str, precision: str) -> None:
    """In the loop over edges, no tile changes its layout: the weights are used where they stand.

    Shared memory is what was foreseen, or less.
    """
    for spec in specs(WORKLOADS[name].structure, precision):
        compiled = compile_for(build(spec), "sm_90")
        assert compiled.metadata.shared <= spec.shared_bytes
        text = compiled.asm["ttgir"]
        loop = text.rsplit("scf.for", 1)[1].split("scf.yield")[0]
        assert "warp_group_dot" in loop
        assert not re.findall("convert_layout", loop)
