"""Kernels in Gluon are the machine code of the same kernels in Triton, and take seconds to compile.

Seen red with: one channel a thread where Triton gives it two.
"""

import time

import pytest

from weft.core.backend import interpreted

if interpreted():
    pytest.skip("needs a process without TRITON_INTERPRET=1", allow_module_level=True)

from tests.compile.test_o3 import build
from weft.core.generated import load
from weft.o3 import generator
from weft.o3.dialects import printed
from weft.o3.division import Facts, divide
from weft.testing.compiler import compile_for, growth, statistics
from weft.testing.o3_workloads import WORKLOADS, calls, conv

SMALL = conv(((128, 0), (80, 1)), (0, 1))
FACTS = {
    "graph": Facts("xz", "x", "", False, False),
    "long rows": Facts("xz", "xz", "xz", False, False),
    "rows with shared weights": Facts("", "", "", True, False),
}


def compiled(job, gluon):
    tiling = job.tiling
    constants = {"BLOCK": tiling.block, "EDGES": tiling.edges, "STAGES": tiling.stages}
    text = printed(job, gluon)
    assert ("gluon" in text) == (gluon and tiling.edges == tiling.stages == 1)
    kernel = load("o3_product", text).__dict__[generator.name(job)]
    return compile_for(build(kernel, constants, "fp32", tiling.warps), "sm_90")


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize("order", calls())
def test_same_code(name, order):
    for job, _ in divide(SMALL, calls()[order], FACTS[name]).jobs:
        found, expected = (statistics(compiled(job, gluon), "sm_90") for gluon in (True, False))
        assert not found["spills"]
        assert not growth(found | {"registers": 0}, expected)  # which swing by some


def test_the_largest_kernel_takes_seconds():
    """Triton's own search takes ten; a slow machine is given time."""
    structure, call = WORKLOADS["sevennet_l3i5"].structure, calls()["second order"]
    jobs = [job for job, _ in divide(structure, call, FACTS["graph"]).jobs]
    compiled(jobs[0], gluon=True)  # the compiler itself is loaded
    begin = time.thread_time()
    compiled(jobs[-1], gluon=True)
    assert time.thread_time() - begin < 5
