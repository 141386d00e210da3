"""Kernels in Gluon are the machine code of the same kernels in Triton, and compile at one visit.

Seen red with: one channel a thread where Triton gives it two, lines of the first block alone,
fetches of edges, or of rows, in rows of any length; bodies of loops left in them.
"""

import ast
import re

import pytest
from triton.compiler.code_generator import CodeGenerator

from torchweft.core.backend import interpreted

if interpreted():
    pytest.skip("needs a process without TRITON_INTERPRET=1", allow_module_level=True)

from tests.cases.o3_workloads import WORKLOADS, calls, conv
from tests.compile.test_o3 import build
from torchweft.core.printing import modules as generated
from torchweft.o3.channelwise.gpu import launch
from torchweft.o3.channelwise.gpu.gluon import in_gluon, kernel_source
from torchweft.o3.channelwise.gpu.kernel_split import GraphFacts, split_call
from torchweft.o3.channelwise.gpu.source import kernel_name, triton_source
from torchweft.testing.compiler import compile_for, growth, statistics

SMALL = conv(((128, 0), (80, 1)), (0, 1))
FACTS = {
    "graph": GraphFacts("xz", "x", "", False, False),
    "long rows": GraphFacts("xz", "xz", "xz", False, False),
    "rows with shared weights": GraphFacts("", "", "", True, False),
}


def compiled(spec, gluon):
    tiling = spec.tiling
    constants = {"BLOCK": tiling.block, "EDGES": tiling.edges, "STAGES": tiling.stages}
    served = tiling.stages == 1 and tiling.edges in (1, tiling.warps)
    text = in_gluon(triton_source(spec), tiling) if gluon and served else triton_source(spec)
    assert ("gluon" in kernel_source(spec, gluon)) == (gluon and served)
    kernel = generated.printed("o3_product", text, kernel_name(spec)).function()
    return compile_for(build(kernel, constants, "fp32", tiling.warps), "sm_90")


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize("order", calls())
def test_same_code(name, order):
    for spec, *_ in split_call(SMALL, calls()[order], FACTS[name]).kernels:
        found, expected = (statistics(compiled(spec, gluon), "sm_90") for gluon in (True, False))
        assert not found["spills"]
        assert not growth(found | {"registers": 0}, expected)  # which swing by some


@pytest.mark.parametrize("order", ["backward", "second order"])
def test_weights_of_the_next_edge_are_fetched(order):
    """All lines of all that a kernel reads of them, once."""
    structure, call = WORKLOADS["mace_L2_carbon"].structure, calls()[order]
    for spec, *_ in split_call(structure, call, FACTS["graph"]).kernels:
        text = kernel_source(spec, gluon=True)
        read = [spec.product.w[spec.product.paths[p].w].offset for p in spec.paths]
        lanes = re.findall(r"fetched\(w2_ptr .* (fetch\d)\)", text)
        first = r" = (?:thread \* 0 \+ |tl.where\(thread >= \d+, )(\d+)"
        columns = [int(column) for name in lanes for column in re.findall(name + first, text)]
        assert sorted(columns) == sorted(begin + line for begin in read for line in (0, 32))
        tiling = spec.tiling
        kernel = generated.printed("o3_product", text, kernel_name(spec)).function()
        constants = {"BLOCK": tiling.block, "EDGES": tiling.edges, "STAGES": tiling.stages}
        found = compile_for(build(kernel, constants, "fp32", tiling.warps), "sm_90")
        assert "prefetch.global.L2" in found.asm["ptx"]


@pytest.mark.parametrize("degree", [6, 32])
def test_in_short_rows_programs_that_take_some_edges_fetch_the_row(degree):
    workload = WORKLOADS["mace_L2_sparse"]._replace(nodes=50, degree=degree)
    tables = workload.tables()
    specs = [
        spec
        for order in ("backward", "second order")
        for spec, *_ in split_call(workload.structure, calls()[order], FACTS["graph"]).kernels
    ]
    sources = [launch._kernel(spec, tables, 0)[0]._kernel.src for spec in specs]
    of_edges, of_rows = (["fetched(" + slot in text for text in sources] for slot in "wz")
    assert of_edges == [degree > 6 or not spec.divisible for spec in specs]
    assert of_rows == [degree == 6 and spec.divisible for spec in specs]
    assert {spec.divisible for spec in specs} == {True, False}


@pytest.mark.parametrize("order", ["backward", "second order"])
def test_statements_are_visited_once(order, monkeypatch, tmp_path):
    """By Triton, whose search for layouts took nineteen of twenty seconds before."""
    structure, call = WORKLOADS["sevennet_l3i5"].structure, calls()[order]
    spec = next(spec for spec, *_ in split_call(structure, call, FACTS["graph"]).kernels)
    text = kernel_source(spec, gluon=True)
    written = sum(isinstance(node, ast.Assign) for node in ast.walk(ast.parse(text)))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    visits, visit = [], CodeGenerator.visit_Assign
    monkeypatch.setattr(
        CodeGenerator, "visit_Assign", lambda of, node: (visits.append(node), visit(of, node))[1]
    )
    compiled(spec, gluon=True)
    assert "gluon" in text
    assert written / 2 < len(visits) < 1.1 * written
