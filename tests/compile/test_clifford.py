"""Clifford's generated kernels in their default tiles, compiled for GPUs that are not here.

Gluon for NVIDIA, Triton for AMD.  The statistics stand in clifford.json: growth over 10 % fails.
To accept a change, run with TORCHWEFT_WRITE_SNAPSHOT=1 and commit the file.

Seen red: one kernel whatever the number of rows, with `num_rows` or the stride of row sums
specialised.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from torchweft.core.backend import interpreted

if interpreted():
    pytest.skip("needs a process without TRITON_INTERPRET=1", allow_module_level=True)

from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from tests.compile.conftest import Check
from torchweft.clifford.programs import launch
from torchweft.clifford.programs import source as generator
from torchweft.clifford.programs.programs import program
from torchweft.core.expressions.program import Operand
from torchweft.core.printing.modules import printed
from torchweft.testing.compiler import (
    SHARED_LIMIT,
    TARGETS,
    Build,
    compile_for,
    faults,
    statistics,
)

SIZES = {"fp64": 8, "fp32": 4, "bf16": 2}
EPS = (1e-6).hex()
BACKWARD = " | vjp 111 1"
PLANE = f"chain 1,1 euclidean {EPS}"
SPACE = f"chain 1,1,1 euclidean {EPS}"


def builds(key: str, dtype: str, features: int, target: str) -> list[Build]:
    """The kernels that a program of 4096 rows gets on a GPU of 132 processors."""
    gluon, aligned = target.startswith("sm_"), features % 16 == 0
    limits = launch.GpuLimits(gluon, 132, SHARED_LIMIT[target])
    kernels = launch.choose(program(key), 4096, features, SIZES[dtype], aligned, limits)
    return [build(kernel, dtype, features, aligned) for kernel in kernels]


def build(made: launch.RowKernel, dtype: str, features: int, aligned: bool) -> Build:
    """A kernel, ready to be compiled."""
    found, tiling, *_ = made
    name = generator.name(found)
    kernel = printed(name, generator.source(found, tiling), name).function()
    operands = (*found.inputs, *(output.operand for output in found.outputs))
    results = {output.operand for output in found.outputs}
    wide = {
        o.name for o in operands if o.axes == ("row",) or ("row" not in o.axes and o in results)
    }
    constants: dict[str, Any] = {
        "num_features": features,
        "ROWS": tiling.rows,
        "BLOCK": tiling.block,
    }
    types = {}
    for argument in kernel.arg_names:
        if argument.endswith("_ptr"):
            sums = argument.removesuffix("_ptr") in wide and dtype != "fp64"
            types[argument] = "*fp32" if sums else f"*{dtype}"
        elif argument.startswith("stride") and argument.endswith("f"):
            constants[argument] = 1
        elif argument not in constants:
            types[argument] = "i64" if argument.endswith("c") else "i32"
    strides = tuple(a for a in types if a.startswith("stride")) if aligned else ()
    options = {"num_warps": tiling.warps, "num_stages": 1}
    return Build(kernel, types, constants, options, strides)


CASES = {
    f"{name}, {dtype}, F={features}, {target}": (key, dtype, features, target)
    for name, key, dtype, features, targets in (
        ("Cl(2,0) chain", PLANE, "fp32", 512, ("sm_80", "sm_90", "gfx942")),
        ("Cl(2,0) chain gradient", PLANE + BACKWARD, "fp32", 512, ("sm_90",)),
        ("Cl(3,0) chain", SPACE, "fp32", 512, ("sm_90", "gfx942")),
        ("Cl(3,0) chain", SPACE, "bf16", 512, ("sm_90",)),
        ("Cl(3,0) chain", SPACE, "fp32", 20, ("sm_90",)),
        ("Cl(3,0) chain gradient", SPACE + BACKWARD, "fp32", 512, ("sm_80", "sm_90")),
        ("Cl(3,0) chain gradient", SPACE + BACKWARD, "bf16", 512, ("sm_90",)),
        ("Cl(3,0) chain gradient", SPACE + BACKWARD, "fp32", 1024, ("sm_90",)),
        ("Cl(3,0) chain gradient", SPACE + BACKWARD, "bf16", 128, ("sm_90",)),
        (
            "Cl(5,0) chain gradient",
            f"chain 1,1,1,1,1 euclidean {EPS}{BACKWARD}",
            "fp32",
            512,
            ("sm_90",),
        ),
        ("Cl(3,0) product", "product 1,1,1 geometric", "fp32", 512, ("sm_90", "gfx942")),
    )
    for target in targets
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_compiles_within_its_gates(name: str, check: Check) -> None:
    target = CASES[name][-1]
    for made in builds(*CASES[name]):
        check(made, f"{name}, {made.kernel.__name__}", target)


def test_spills_and_missing_instructions_are_faults() -> None:
    (made,) = builds(*CASES["Cl(3,0) chain, fp32, F=512, sm_90"])
    tight = replace(made, options=made.options | {"maxnreg": 32}, tensor_cores=True)
    compiled = compile_for(tight, "sm_90")
    spills, missing = faults(tight, compiled, "sm_90", statistics(compiled, "sm_90"))
    assert spills.endswith("register spills")
    assert missing == "no tensor-core instruction"


def specialisation(rows: int, features: int, blade_last: bool) -> str:
    """What Triton compiles a kernel anew for: its source, and what it reads off the arguments."""
    found = program(PLANE + BACKWARD)
    inputs = {o.name: tensor(o, rows, features, blade_last) for o in found.inputs}
    aligned = all(launch._is_aligned(t) for t in inputs.values() if t.dim() == 3)
    limits = launch.GpuLimits(True, 132, SHARED_LIMIT["sm_90"])
    seen = []
    for part, tiling, *_ in launch.choose(found, rows, features, 4, aligned, limits):
        source = generator.source(part, tiling)
        kernel = printed(generator.name(part), source, generator.name(part)).function()
        bind = create_function_from_signature(
            kernel.signature, kernel.params, make_backend(TARGETS["sm_90"])
        )
        reads, results = generator.parameters(part)
        pointers = [torch.empty(16)] * (len(reads) + len(results))
        strides = [stride for o in reads for stride in inputs[o.name].stride()]
        _, read, _ = bind(*pointers, rows, *strides, features, tiling.rows, tiling.block)
        seen.append(f"{read} {source}")
        inputs |= {o.name: tensor(o, rows, features, False) for o in results}
    return "".join(seen)


def tensor(operand: Operand, rows: int, features: int, blade_last: bool) -> torch.Tensor:
    """An operand that has strides and no data."""
    lengths = [{"row": rows, "feature": features}[axis] for axis in operand.axes]
    shape = (*lengths, operand.size) if blade_last else (operand.size, *lengths)
    made = torch.empty(shape, device="meta")
    return made.movedim(-1, 0) if blade_last else made


@pytest.mark.parametrize("blade_last", [False, True])
@pytest.mark.parametrize("features", [8192, 512, 20, 3, 1])
def test_one_kernel_whatever_the_number_of_rows(features: int, blade_last: bool) -> None:
    counts = (1, 2, 5, 16, 100, 4096, 4097, 70_000_000)
    assert len({specialisation(rows, features, blade_last) for rows in counts}) == 1
