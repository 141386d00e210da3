"""Kernels of symmetric contractions, compiled for absent GPUs.

The statistics stand in o3_symmetric.json: growth over 10 % fails.  To accept a change, run with
TORCHWEFT_WRITE_SNAPSHOT=1 and commit the file.
"""

from dataclasses import replace

import pytest

from torchweft.core.backend import interpreted

if interpreted():
    pytest.skip("needs a process without TRITON_INTERPRET=1", allow_module_level=True)

from tests.compile.conftest import Check
from torchweft.core.printing.kernel import Frame
from torchweft.core.printing.modules import printed
from torchweft.o3.irreps.irreps import Irreps
from torchweft.o3.symmetric import kernels as symmetric_kernels
from torchweft.o3.symmetric import operator as symmetric_operator
from torchweft.o3.symmetric import source as symmetric_generator
from torchweft.o3.symmetric.program import program_parts, symmetric_key, symmetric_program
from torchweft.o3.symmetric.source import SymmetricKernelSpec
from torchweft.testing.compiler import Build

ORDERS = {"forward": "", "backward": " | vjp 11 1", "second order": " | vjp 11 1 | vjp 111 11"}
LAYERS = {
    "mace_L3": ("128x0e+128x1o+128x2e+128x3o", "128x0e+128x1o"),
    "mace_L2": ("128x0e+128x1o+128x2e", "128x0e+128x1o+128x2e"),
}
CASES = {
    f"{layer}, {layout}, {order}, {dtype}, {target}": (layer, layout, order, dtype, target)
    for layer, layout, orders, dtype, target in (
        ("mace_L3", "ir_mul", tuple(ORDERS), "fp32", "sm_90"),
        ("mace_L3", "mul_ir", ("forward", "backward"), "fp32", "sm_90"),
        ("mace_L2", "ir_mul", tuple(ORDERS), "fp32", "sm_90"),
        ("mace_L3", "ir_mul", ("forward", "backward"), "bf16", "sm_90"),
        ("mace_L3", "ir_mul", ("forward", "backward"), "fp32", "sm_80"),
        ("mace_L3", "ir_mul", ("forward",), "fp32", "gfx942"),
    )
    for order in orders
}
INTEGERS = {"element_ptr": "*i64", "order_ptr": "*i32", "starts_ptr": "*i32"}


@pytest.mark.parametrize("name", CASES)
def test_contractions(name: str, check: Check) -> None:
    layer, layout, order, dtype, target = CASES[name]
    root = symmetric_key(*map(Irreps, LAYERS[layer]), 3)
    for n, (part, _) in enumerate(program_parts(root + ORDERS[order])):
        places = symmetric_operator.columns(part, layout, 128)
        warps, _ = symmetric_operator.shape(part)
        frame = Frame(target.startswith("sm_"))
        spec = SymmetricKernelSpec(symmetric_program(part), places, 128, warps, frame)
        name_of = symmetric_generator.name(spec)
        kernel = printed("o3_symmetric", symmetric_generator.source(spec), name_of).function()
        pointers = {n: INTEGERS.get(n, f"*{dtype}") for n in kernel.arg_names if "_ptr" in n}
        types = {**pointers, "rows": "i32", "span": "i32"}
        check(Build(kernel, types, {}, {"num_warps": warps}), f"{name}, kernel {n}", target)


def test_fold(check: Check) -> None:
    types = {"part_ptr": "*fp32", "out_ptr": "*fp32", "starts_ptr": "*i32"}
    types |= {"span": "i32", "width": "i32"}
    blocks, warps, *_ = symmetric_operator.FOLD_PARTS_TILE
    constants = dict(zip(("BLOCK_P", "BLOCK_C"), blocks, strict=True))
    build = Build(symmetric_kernels.fold_parts_kernel, types, constants, {"num_warps": warps})
    check(replace(build, multiples_of_16=("width",), wide_loads=True), "fold of parts", "sm_90")
