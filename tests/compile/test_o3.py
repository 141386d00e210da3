"""Generated kernels of channelwise products in their default layouts, compiled for absent GPUs.

The statistics stand in o3.json: growth over 10 % fails.  To accept a change, run with
TORCHWEFT_WRITE_SNAPSHOT=1 and commit the file.
"""

from dataclasses import replace
from typing import Any

import pytest

from torchweft.core.backend import interpreted

if interpreted():
    pytest.skip("needs a process without TRITON_INTERPRET=1", allow_module_level=True)

from tests.cases.o3_workloads import WORKLOADS, calls
from tests.compile.conftest import Check
from torchweft.core.printing.modules import printed
from torchweft.o3.channelwise.gpu import kernels, launch
from torchweft.o3.channelwise.gpu.gluon import kernel_source
from torchweft.o3.channelwise.gpu.kernel_spec import RowKernelSpec
from torchweft.o3.channelwise.gpu.kernel_split import GraphFacts, split_call
from torchweft.o3.channelwise.gpu.source import kernel_name
from torchweft.testing.compiler import Build

INTEGERS = tuple(
    f"{name}_ptr" for name in ("indptr", "owner", "edges", "index", "places", "columns", "entries")
)
CASES = {
    f"{name}, {order}, {dtype}, {target}": (name, order, dtype, target)
    for name, orders, dtype, targets in (
        ("mace_L2_carbon", ("forward", "backward", "second order"), "fp32", ("sm_90",)),
        ("mace_L2_carbon", ("forward",), "fp32", ("sm_80", "gfx942")),
        ("mace_L2_carbon", ("forward",), "bf16", ("sm_90",)),
        ("mace_L2_carbon", ("backward in runs",), "fp32", ("sm_80", "sm_90", "gfx942")),
        ("mace_L2_carbon", ("backward in runs",), "bf16", ("sm_90",)),
        ("l3_uniform64", ("forward", "backward", "backward in runs"), "fp32", ("sm_90",)),
        ("sevennet_l3i5", ("forward", "backward", "backward lent"), "fp32", ("sm_90",)),
        ("sevennet_l3i5", ("backward",), "fp64", ("sm_90",)),
        ("uuu_seed", ("forward", "backward"), "fp32", ("sm_90",)),
    )
    for order in orders
    for target in targets
}


def specs(name: str, order: str, dtype: str) -> list[RowKernelSpec]:
    workload = WORKLOADS[name]
    graph = "" if workload.shared else "xz"
    order, _, runs = order.partition(" in ")
    lends, order = order.endswith(" lent"), order.removesuffix(" lent")
    facts = GraphFacts(graph, graph[:1], "", workload.shared, dtype == "fp64", bool(runs), lends)
    return [spec for spec, *_ in split_call(workload.structure, calls()[order], facts).kernels]


def build(kernel: Any, constants: dict[str, Any], dtype: str, warps: int) -> Build:
    names = [name for name in kernel.arg_names if name not in constants]
    types = {
        name: "*i32" if name in INTEGERS else f"*{dtype}" if name.endswith("_ptr") else "i32"
        for name in names
    }
    return Build(kernel, types, constants, {"num_warps": warps, "num_stages": 1})


def product(spec: RowKernelSpec, dtype: str, target: str) -> Build:
    tiling, text = spec.tiling, kernel_source(spec, gluon=target.startswith("sm_"))
    constants = {"BLOCK": tiling.block, "EDGES": tiling.edges, "STAGES": tiling.stages}
    kernel = printed("o3_product", text, kernel_name(spec)).function()
    return build(kernel, constants, dtype, tiling.warps)


@pytest.mark.parametrize("name", CASES)
def test_products(name: str, check: Check) -> None:
    workload, order, dtype, target = CASES[name]
    for n, spec in enumerate(specs(workload, order, dtype)):
        check(product(spec, dtype, target), f"{name}, kernel {n}", target)


@pytest.mark.parametrize("places", [None, 2])
def test_folds(places: int | None, check: Check) -> None:
    constants: dict[str, Any] = {"COUNT": places or 1, "BLOCK_E": 16, "BLOCK_C": 128}
    if places is None:
        constants["places_ptr"] = None
    found = build(kernels.fold_rows_kernel, constants, "fp32", 4)
    found = replace(found, multiples_of_16=("width", "partial_width"), wide_loads=places is None)
    check(found, f"fold of rows, {places}", "sm_90")
    constants = dict(zip(("BLOCK_E", "BLOCK_C"), launch.LOAN_TILE.blocks, strict=True))
    constants["VECTOR"] = launch.VECTOR
    found = build(kernels.fold_lent_kernel, constants, "fp32", launch.LOAN_TILE.num_warps)
    numbers = ("count", "width", "partial_width")
    found = replace(found, multiples_of_16=numbers, wide_loads=True)
    check(found, "fold of loans", "sm_90")
    constants = {"COUNT": 2, "BLOCK_R": launch.FOLDED_NUMBERS // 16, "BLOCK_C": 16}
    found = build(kernels.fold_columns_kernel, constants, "fp32", 1)
    check(found, "fold of columns", "sm_90")
