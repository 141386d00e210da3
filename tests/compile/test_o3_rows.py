"""Kernels of functions of a row, compiled for absent GPUs.

The statistics stand in o3_rows.json: growth over 10 % fails.  To accept a change, run with
TORCHWEFT_WRITE_SNAPSHOT=1 and commit the file.
"""

import pytest

from torchweft.core.backend import interpreted

if interpreted():
    pytest.skip("needs a process without TRITON_INTERPRET=1", allow_module_level=True)

from tests.compile.conftest import Check
from torchweft import o3
from torchweft.core.expressions.program import Program
from torchweft.core.printing.kernel import Frame
from torchweft.core.printing.modules import printed
from torchweft.o3.pointwise import ROW_WARPS, PointwiseKernelSpec, source
from torchweft.o3.row_programs import (
    activation_key,
    bessel_key,
    cutoff_key,
    edge_key,
    harmonics_key,
    radial_basis_key,
    row_program,
)
from torchweft.o3.symmetric.program import weight_program
from torchweft.testing.compiler import Build, compile_for

ORDERS = {"forward": "", "backward": " | vjp 1 1", "second order": " | vjp 1 1 | vjp 11 1"}
FUNCTIONS = {
    "harmonics to 3": harmonics_key(range(4), True, "component"),
    "harmonics to 6": harmonics_key(range(7), True, "component"),
    "cutoff": cutoff_key(5.0, 6),
    "silu": activation_key("silu", 0.35, 0.21),
    "tanh": activation_key("tanh", 0.35, 0.21),
}
WAVES = {"bessel": bessel_key(5.0, 8), "radial basis": radial_basis_key(5.0, 8, 5)}
CASES = {
    f"{function}, {order}, {dtype}, {target}": (function, order, dtype, target)
    for function, orders, dtype, target in (
        ("harmonics to 3", tuple(ORDERS), "fp32", "sm_90"),
        ("harmonics to 3", ("backward",), "fp64", "sm_90"),
        ("harmonics to 3", ("backward",), "fp32", "gfx942"),
        ("harmonics to 6", tuple(ORDERS), "fp32", "sm_90"),
        ("cutoff", tuple(ORDERS), "fp32", "sm_90"),
        ("cutoff", ("backward",), "bf16", "sm_80"),
        ("silu", tuple(ORDERS), "fp32", "sm_90"),
        ("silu", ("backward",), "bf16", "gfx942"),
        ("tanh", ("forward",), "fp64", "sm_90"),
        ("tanh", ("second order",), "fp32", "sm_90"),
    )
    for order in orders
}


@pytest.mark.parametrize("name", CASES)
def test_functions(name: str, check: Check) -> None:
    function, order, dtype, target = CASES[name]
    program = row_program(FUNCTIONS[function] + ORDERS[order])
    check(build(program, 1, dtype, target), name, target)


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("function", WAVES)
def test_waves_compile(function: str, order: str, dtype: str) -> None:
    """Without a snapshot: for huge angles sin and cos have an array, which counts as spills."""
    program = row_program(WAVES[function] + ORDERS[order])
    compile_for(build(program, 1, dtype, "sm_90"), "sm_90")


@pytest.mark.parametrize("order", ["", " | vjp 1 11", " | vjp 1 11 | vjp 111 1"])
def test_functions_of_edges_compile(order: str) -> None:
    key = edge_key(FUNCTIONS["harmonics to 3"], WAVES["radial basis"])
    compile_for(build(row_program(key + order), 1, "fp32", "sm_90"), "sm_90")


@pytest.mark.parametrize("order", ["weights", "gradients"])
def test_weights_of_couplings(order: str, check: Check) -> None:
    module = o3.SymmetricContraction("128x0e+128x1o+128x2e+128x3o", "128x0e+128x1o", 3, 2)
    step = "" if order == "weights" else f" | vjp {'1' * len(module._couplings())} 1"
    program = weight_program(module._mixed + step)
    check(build(program, 128, "fp32", "sm_90"), f"couplings, {order}", "sm_90")


def build(program: Program, channels: int, dtype: str, target: str) -> Build:
    """The kernel of a program."""
    spec = PointwiseKernelSpec(program, channels, Frame(target.startswith("sm_"), dtype == "fp64"))
    kernel = printed("o3_rows", source(spec), "rows").function()
    types = {n: f"*{dtype}" if n.endswith("_ptr") else "i32" for n in kernel.arg_names}
    # rows of few numbers are read number by number
    return Build(kernel, types, {}, {"num_warps": ROW_WARPS}, wide_loads=False)
