"""The kernels of linear maps by grade, compiled for the GPUs that run them.

The statistics stand in clifford_linear.json: growth over 10 % fails.  To accept a change, run with
TORCHWEFT_WRITE_SNAPSHOT=1 and commit the file.

Seen red: one kernel whatever the number of rows, with `R` specialised.
"""

from typing import Any

import pytest

from torchweft.core.backend import interpreted

if interpreted():
    pytest.skip("needs a process without TRITON_INTERPRET=1", allow_module_level=True)

import torch
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.compile.conftest import Check
from torchweft.clifford import kernels
from torchweft.clifford.matrices import launch, mixed_launch
from torchweft.testing.compiler import TARGETS, Build


def rows(dtype: str, features: int, turned: bool, biased: bool) -> Build:
    """The product of 8 blades; its tiles come by the copy engine of sm_90."""
    tile = launch.rows_tile(features)
    block_m, block_n, block_k = tile.blocks
    block_w = f"{block_n},{block_k}" if turned else f"{block_k},{block_n}"
    types = {
        "x_desc": f"tensordesc<{dtype}[1,{block_m},{block_k}]>",
        "w_desc": f"tensordesc<{dtype}[1,{block_w}]>",
        "z_ptr": f"*{dtype}",
    }
    types |= dict.fromkeys(("R", "F_IN", "F_OUT"), "i32")
    constants: dict[str, Any] = {"BLADES": 8, "N": 3, "TURNED": turned}
    constants |= dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile.blocks, strict=True))
    if biased:
        types["bias_ptr"] = f"*{dtype}"
    else:
        constants["bias_ptr"] = None
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    kernel, aligned = kernels.rows_kernel, ("F_IN", "F_OUT")
    return Build(kernel, types, constants, options, aligned, tensor_cores=True, wide_loads=True)


def sums(dtype: str) -> Build:
    tile = launch.SUM_TILE
    types = {"part_ptr": "*fp32", "sum_ptr": f"*{dtype}", "COLUMNS": "i32"}
    constants = {"N": 3, "PARTS": 2, "BLOCK": tile.blocks[0]}
    options = {"num_warps": tile.num_warps}
    return Build(kernels.sum_kernel, types, constants, options, ("COLUMNS",), False, True)


def turn() -> Build:
    tile = launch.TURN_TILE
    types = {"w_ptr": "*fp32", "t_ptr": "*fp32", "F_IN": "i32", "F_OUT": "i32"}
    constants, options = {"BLOCK": tile.blocks[0]}, {"num_warps": tile.num_warps}
    aligned = ("F_IN", "F_OUT")
    return Build(kernels.turn_kernel, types, constants, options, aligned, False, True)


def meet() -> Build:
    tile = launch.MEET_TILE
    names = ("scale_ptr", "go_ptr", "all_ptr", "turn_ptr", "pairs_ptr", "weight_ptr")
    types = dict.fromkeys(names, "*fp32") | {"R": "i32"}
    constants, options = {"BITS": 25, "BLOCK": tile.blocks[0]}, {"num_warps": tile.num_warps}
    return Build(kernels.meet_kernel, types, constants, options, (), False, False)


def prepare() -> Build:
    """The matrices of maps from 16 features to 32, in two parts."""
    tile = mixed_launch.PREPARED
    types = {"w_ptr": "*fp32", "t_ptr": "*fp32", "columns_ptr": "*i32", "F": "i32", "G": "i32"}
    constants: dict[str, Any] = {"MAPS": 9, "TURNED": False, "PARTS": 2, "BLOCK": tile.blocks[0]}
    options = {"num_warps": tile.num_warps}
    return Build(kernels.prepare_maps_kernel, types, constants, options, ("F", "G"))


def maps(dtype: str, precision: str = "ieee", spills: int = 0) -> Build:
    """The maps of multivectors of 32 features to 64."""
    tile = mixed_launch.maps_tile(32, 64, precision)
    types = dict.fromkeys(("x_ptr", "w_ptr", "first_ptr", "z_ptr"), f"*{dtype}")
    types |= dict.fromkeys(("terms_ptr", "starts_ptr"), "*i32")
    aligned = ("F", "G", "stride_xb", "stride_xr", "stride_fr")
    types |= dict.fromkeys(("R", *aligned), "i32")
    constants: dict[str, Any] = {"stride_xf": 1, "MAPS": 9, "BLADES": 16, "ENDS": 2}
    constants |= {"PRECISION": precision}
    constants |= dict(zip(("BLOCK_R", "BLOCK_F", "BLOCK_G"), tile.blocks, strict=True))
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    exact = precision == "ieee" and dtype == "fp32"
    return Build(kernels.maps_kernel, types, constants, options, aligned, not exact, spills=spills)


def map_weights(dtype: str, precision: str = "ieee") -> Build:
    """The gradient of their matrices, and of biases."""
    tile = mixed_launch.weights_tile(32, 32)
    types = dict.fromkeys(("x_ptr", "y_ptr", "sums_ptr"), f"*{dtype}") | {"part_ptr": "*fp32"}
    types |= dict.fromkeys(("terms_ptr", "starts_ptr", "columns_ptr"), "*i32")
    aligned = ("F", "G", "stride_xb", "stride_xr", "stride_yb", "stride_yr", "stride_sr")
    types |= dict.fromkeys(("R", "numbers", "before", *aligned), "i32")
    constants: dict[str, Any] = {"stride_xf": 1, "stride_yf": 1, "MAPS": 9, "PARTS": 8}
    constants |= {"PRECISION": precision}
    constants |= dict(zip(("BLOCK_R", "BLOCK_F", "BLOCK_G"), tile.blocks, strict=True))
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return Build(kernels.map_weights_kernel, types, constants, options, aligned)


CASES = {
    "rows, bf16, sm_90": (rows("bf16", 512, False, False), "sm_90"),
    "rows, bf16, narrow, sm_90": (rows("bf16", 128, False, False), "sm_90"),
    "rows, fp16, turned, biased, sm_90": (rows("fp16", 512, True, True), "sm_90"),
    "maps, tf32, sm_90": (maps("fp32", "tf32"), "sm_90"),
    "maps, tf32x3, sm_80": (maps("fp32", "tf32x3", spills=7), "sm_80"),
    "maps, tf32x3, sm_90": (maps("fp32", "tf32x3"), "sm_90"),
    "gradient of their weights, tf32, sm_90": (map_weights("fp32", "tf32"), "sm_90"),
    **{
        f"{name}, {target}": (build, target)
        for name, build in (
            ("sums", sums("fp32")),
            ("sums, bf16", sums("bf16")),
            ("turn", turn()),
            ("meet", meet()),
            ("matrices of maps", prepare()),
            ("maps", maps("fp32")),
            ("maps, bf16", maps("bf16")),
            ("gradient of their weights", map_weights("fp32")),
            ("gradient of their weights, bf16", map_weights("bf16")),
        )
        for target in ("sm_80", "sm_90", "gfx942")
    },
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_compiles_within_its_gates(name: str, check: Check) -> None:
    made, target = CASES[name]
    check(made, name, target)


def specialisation(rows: int) -> str:
    """What Triton compiles the product anew for, read off the arguments."""
    kernel, tile = kernels.rows_kernel, launch.rows_tile(512)
    backend = make_backend(TARGETS["sm_90"])
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    x = torch.empty(8, rows, 512, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(4, 512, 512, dtype=torch.bfloat16, device="meta")
    block_m, block_n, block_k = tile.blocks
    x_desc = TensorDescriptor.from_tensor(x, [1, block_m, block_k])
    w_desc = TensorDescriptor.from_tensor(weight, [1, block_k, block_n])
    z = torch.empty(16, dtype=torch.bfloat16)
    _, read, _ = bind(x_desc, w_desc, None, z, rows, 512, 512, 8, 3, False, *tile.blocks)
    return str(read)


def test_one_product_whatever_the_number_of_rows() -> None:
    counts = (1, 2, 5, 16, 100, 4096, 4097, 70_000_000)
    assert len({specialisation(rows) for rows in counts}) == 1
