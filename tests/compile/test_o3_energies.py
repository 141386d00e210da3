"""The kernel of energies of nodes, compiled for absent GPUs.

The statistics stand in o3_energies.json: growth over 10 % fails.  To accept a change, run with
TORCHWEFT_WRITE_SNAPSHOT=1 and commit the file.
"""

import pytest
import torch

from torchweft.core.backend import interpreted

if interpreted():
    pytest.skip("needs a process without TRITON_INTERPRET=1", allow_module_level=True)

from tests.compile.conftest import Check
from torchweft.o3.energies import functions, kernels
from torchweft.testing.compiler import Build

OF_GRAPHS = ("starts_ptr", "order_ptr")


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("graphs", ["one graph", "graphs"])
def test_energies(graphs: str, dtype: str, target: str, check: Check) -> None:
    made, kernel = functions._kernel(torch.device("cpu"), torch.float32), kernels.node_energies
    constants = {key: made._shown[key] for key in kernel.arg_names if key in made._shown}
    constants |= dict.fromkeys(OF_GRAPHS if graphs == "one graph" else ())
    types = dict.fromkeys(OF_GRAPHS, "*i32") | {"rows": "i32", "node_ptr": "*fp64"}
    types = {key: types.get(key, f"*{dtype}") for key in kernel.arg_names if key not in constants}
    chosen = {key: made._shown[key] for key in ("num_warps", "num_stages")}
    build = Build(kernel, types, constants, chosen, tensor_cores=False, wide_loads=False)
    check(build, f"{graphs}, {dtype}, {target}", target)
