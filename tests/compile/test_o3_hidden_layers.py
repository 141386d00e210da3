"""Kernels of the hidden layers of a network, compiled for absent GPUs.

The statistics stand in o3_hidden_layers.json: growth over 10 % fails.  To accept a change, run with
TORCHWEFT_WRITE_SNAPSHOT=1 and commit the file.
"""

import pytest

from torchweft.core.backend import interpreted

if interpreted():
    pytest.skip("needs a process without TRITON_INTERPRET=1", allow_module_level=True)

from tests.compile.conftest import Check
from torchweft.core.printing.modules import printed
from torchweft.o3.hidden_layers.functions import TILE
from torchweft.o3.hidden_layers.source import HIDDEN_LAYERS, HiddenLayers, KernelSpec, source
from torchweft.testing.compiler import Build

LAYERS = HiddenLayers((8, 64, 64, 64), 0.5, (0.25, 0.25, 0.25))
SPILLS = {"second": 170, "second, more stored": 210, "second sums": 10}
"""Two factors in parts are kept at a time."""


CASES = [(kind, more) for kind in ("rows", "back", "second") for more in (False, True)]
OTHERS = [(kind, False) for kind in ("tangent", "sums", "second sums")]


@pytest.mark.parametrize(("kind", "more"), [*CASES, *OTHERS])
def test_hidden_layers(kind: str, more: bool, check: Check) -> None:
    spec = KernelSpec(LAYERS, kind, more)
    kernel = printed("o3_hidden_layers", source(spec), HIDDEN_LAYERS).function()
    constants = {"BLOCK": TILE.blocks[0]}
    types = {n: "*fp32" if n.endswith("_ptr") else "i32" for n in kernel.arg_names}
    types = {name: of for name, of in types.items() if name not in constants}
    options = {"num_warps": TILE.num_warps, "num_stages": TILE.num_stages}
    name = f"{kind}, more stored" if more else kind
    spills = SPILLS.get(name, 0)
    build = Build(kernel, types, constants, options, tensor_cores=True, spills=spills)
    check(build, f"{name}, sm_90", "sm_90")
