"""Kernels that sort entries by row, compiled for absent GPUs.

The statistics stand in o3_sorting.json: growth over 10 % fails.  To accept a change, run with
TORCHWEFT_WRITE_SNAPSHOT=1 and commit the file.
"""

import dataclasses

import pytest
import torch

from torchweft.core.backend import interpreted

if interpreted():
    pytest.skip("needs a process without TRITON_INTERPRET=1", allow_module_level=True)

from tests.compile.conftest import Check
from torchweft.o3.sorting import kernels, rows
from torchweft.testing.compiler import Build

SECOND = ("rows2_ptr", "copy2_ptr", "indptr2_ptr", "order2_ptr")
CPU = torch.device("cpu")


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("lists", [1, 2])
def test_lists(lists: int, target: str, check: Check) -> None:
    made = rows._kernel(CPU, *lists * (torch.int64,))
    absent = dict.fromkeys(SECOND if lists == 1 else ())
    types = {f"rows{n}_ptr": "*i64" for n in (1, 2)}
    check(_build(kernels.sort_rows, made, types, absent), f"{lists} lists, {target}", target)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("name", ["count_digits", "place_entries"])
def test_digits(name: str, ordered: bool, target: str, check: Check) -> None:
    made = rows._digit_kernels(CPU, ordered)[name == "place_entries"]
    absent = {} if ordered else {"order_ptr": None}
    build = _build(getattr(kernels, name), made, {}, absent)
    build = dataclasses.replace(build, tensor_cores=name == "place_entries")
    check(build, f"{name}{', ordered' * ordered}, {target}", target)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_columns(target: str, check: Check) -> None:
    made = rows._columns_kernel(CPU, torch.float32, 10)
    types = {"x_ptr": "*fp32", "marked_ptr": "*fp32", "column_ptr": "*i64"}
    check(_build(kernels.columns_of_rows, made, types, {}), f"columns, {target}", target)


def _build(kernel, made, types, absent) -> Build:  # type: ignore[no-untyped-def]
    constants = {key: made._shown[key] for key in kernel.arg_names if key in made._shown} | absent
    every = {
        key: types.get(key, "*i32" if key.endswith("_ptr") else "i32")
        for key in kernel.arg_names
        if key not in constants
    }
    chosen = {key: made._shown[key] for key in ("num_warps", "num_stages")}
    return Build(kernel, every, constants, chosen, tensor_cores=False, wide_loads=False)
