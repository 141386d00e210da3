"""Triton's stages without its cache give the code that Triton gives.

Seen red with: options left out, the first stage of Gluon's kernels skipped, alignment left out.
"""

import pytest
import torch

from tests.conftest import INTERPRETED
from tests.contract.some_kernel import a_process, arguments, live
from torchweft.core.gpu import compiler

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

GLUON = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def some_kernel(x_ptr, y_ptr, n, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout)
    gl.store(y_ptr + i, 2 * gl.load(x_ptr + i, mask=i < n, other=0.0), mask=i < n)
"""


@pytest.fixture
def driver(monkeypatch, tmp_path):
    yield from a_process(monkeypatch, tmp_path)


@pytest.mark.parametrize("spelled", ["triton", "gluon"])
@pytest.mark.parametrize("options", [{"num_warps": 4, "num_stages": 1}, {"num_warps": 8}])
@pytest.mark.parametrize("given", [{}, {"n": 64}, {"shift": 1}, {"dtype": torch.float16}])
def test_the_code_is_tritons(spelled, options, given, driver):
    kernel = live(kernel=GLUON) if spelled == "gluon" else live()
    values = arguments(**given, block=1024)  # several numbers a thread
    ours = compiler.lower(compiler.walk(kernel, values, options, "sm_90"))
    theirs = kernel.run(*values, grid=(1,), warmup=True, **options)
    assert compiler.code_of(ours) == compiler.code_of(theirs)
