"""Kernels of vectors of edges, compiled for absent GPUs.

The statistics stand in o3_edge_vectors.json: growth over 10 % fails.  To accept a change, run with
TORCHWEFT_WRITE_SNAPSHOT=1 and commit the file.
"""

import pytest
import torch

from torchweft.core.backend import interpreted

if interpreted():
    pytest.skip("needs a process without TRITON_INTERPRET=1", allow_module_level=True)

from tests.compile.conftest import Check
from torchweft.o3.edge_vectors import kernels, operator
from torchweft.testing.compiler import Build

NUMBERS = ("x_ptr", "v_ptr", "shift_ptr", "out_ptr")


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("call", ["vectors", "shifted", "sums", "totals"])
def test_kernels(call: str, dtype: str, target: str, check: Check) -> None:
    made = operator._kernel(call, 3, "", (torch.float32,), torch.device("cpu"))
    kernel = kernels.edge_differences if call in ("vectors", "shifted") else kernels.node_sums
    constants = {key: made._shown[key] for key in kernel.arg_names if key in made._shown}
    constants |= dict.fromkeys(("shift_ptr",) if call == "vectors" else ())
    constants |= dict.fromkeys(("dst_order_ptr",) if call == "sums" else ())
    constants |= dict.fromkeys(("src_indptr_ptr", "src_order_ptr") if call == "totals" else ())
    types = {
        key: f"*{dtype}" if key in NUMBERS else "*i32" if key.endswith("_ptr") else "i32"
        for key in kernel.arg_names
        if key not in constants
    }
    chosen = {key: made._shown[key] for key in ("num_warps", "num_stages")}
    build = Build(kernel, types, constants, chosen, tensor_cores=False, wide_loads=False)
    check(build, f"{call}, {dtype}, {target}", target)
