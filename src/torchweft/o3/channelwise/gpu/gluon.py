"""Kernels in Gluon, with the layouts that Triton would search for.

For each load and store Triton 3.6 examines all values connected with it: in a kernel of a thousand
lines this takes nineteen of twenty seconds.  All tensors of these kernels have one layout, so there
is nothing to search: channels in their order, and where a program has a tile of edges, one edge for
each warp.  The machine code is the same.
"""

from __future__ import annotations

import re

from torchweft.o3.channelwise.gpu.kernel_spec import RowKernelSpec, RowTiling
from torchweft.o3.channelwise.gpu.source import triton_source

__all__ = ["in_gluon", "kernel_source"]

GLUON_HEAD = """\
from triton.experimental import gluon
from triton.experimental.gluon import language as tl


@gluon.jit
def halved(a, b, thread, BIT: tl.constexpr, AXIS: tl.constexpr):
    high = (thread & BIT) != 0
    return tl.where(high, b, a) + tl.gather(tl.where(high, a, b), thread ^ BIT, AXIS)


@gluon.jit
def threads(EDGES: tl.constexpr, LANES: tl.constexpr):
    edges = tl.arange(0, EDGES, tl.SliceLayout(1, LANES))
    return edges[:, None] * 0 + tl.arange(0, 32, tl.SliceLayout(0, LANES))[None, :]


@gluon.jit
def of_threads(edges, LANES: tl.constexpr):
    return tl.convert_layout(edges, LANES)


@gluon.jit
def fetched(address):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address],
        dtype=tl.int32, is_pure=False, pack=1,
    )


@gluon.jit("""

FIRST_LINE = "    pid = tl.program_id(0)\n"

GLUON_PHRASES = (
    (r"tl\.arange\(0, BLOCK\)\[", "tl.arange(0, BLOCK, tl.SliceLayout(0, LAYOUT))["),
    (r"tl\.arange\(0, EDGES\)\[", "tl.arange(0, EDGES, tl.SliceLayout(1, LAYOUT))["),
    (r"tl\.arange\(0, BLOCK\)", "tl.arange(0, BLOCK, LAYOUT)"),
    (r"tl\.arange\(0, 32\)", "tl.arange(0, 32, LANES)"),
    (r"(threads)\((\w+)\)", r"\1(\2, LANES)"),
    (r"tl\.zeros\((\(.*?\)), (tl\.\w+)\)", r"tl.zeros(\1, \2, LAYOUT)"),
    (r"tl\.range\((.*), num_stages=STAGES\)", r"range(\1)"),
    (r"tl\.range\(", "range("),
    (r"(tl\.sum\(tl\.reshape\(.*?\), \d\))", r"tl.convert_layout(\1, LANES)"),
    (r"\A.*?@triton\.jit\(", GLUON_HEAD),
)
"""Patterns of Triton and their form in Gluon; what is missing here does not compile."""


def kernel_source(spec: RowKernelSpec, gluon: bool, prefetched: str = "edges") -> str:
    """The module text of a kernel, with prefetches in Gluon where that is available and serves it.

    In Gluon each warp must have channels of one edge, and loads are not pipelined.
    """
    _, edges, warps, stages = spec.tiling
    if not gluon or stages != 1 or edges not in (1, warps):
        return triton_source(spec)
    return in_gluon(triton_source(spec, prefetched), spec.tiling)


def in_gluon(text: str, tiling: RowTiling) -> str:
    """A kernel's text with layouts."""
    for pattern, phrase in GLUON_PHRASES:
        text = re.sub(pattern, phrase, text, flags=re.DOTALL if pattern[:2] == r"\A" else 0)
    block, edges, warps, _ = tiling
    layout, lanes = f"[{block // (32 * warps)}], [32], [{warps}], [0]", "[1], [32], [1], [0]"
    if edges > 1:
        layout = f"[1, {block // 32}], [1, 32], [{warps}, 1], [1, 0]"
        lanes = f"[1, 1], [1, 32], [{warps}, 1], [1, 0]"
    layouts = (
        f"    LAYOUT: tl.constexpr = tl.BlockedLayout({layout})\n"
        f"    LANES: tl.constexpr = tl.BlockedLayout({lanes})\n"
    )
    return text.replace(FIRST_LINE, layouts + FIRST_LINE, 1)
