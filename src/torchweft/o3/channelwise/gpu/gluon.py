"""Kernels spelled for Gluon, with the layouts that Triton would search for.

For each load and store Triton 3.6 looks at all that is connected with it: in a kernel of a thousand
lines this is nineteen of twenty seconds.  All tensors of our kernels have one layout, so there is
nothing to search: channels in their order, and where a program has a tile of edges, each warp has
one of them.  The machine code is the same.
"""

from __future__ import annotations

import re

from torchweft.o3.channelwise.gpu.kernel_spec import Job, Tiling
from torchweft.o3.channelwise.gpu.source import source

__all__ = ["in_gluon", "printed"]

HEAD = """\
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

BEGIN = "    pid = tl.program_id(0)\n"

PHRASES = (
    (r"tl\.arange\(0, BLOCK\)\[", "tl.arange(0, BLOCK, tl.SliceLayout(0, LAYOUT))["),
    (r"tl\.arange\(0, EDGES\)\[", "tl.arange(0, EDGES, tl.SliceLayout(1, LAYOUT))["),
    (r"tl\.arange\(0, BLOCK\)", "tl.arange(0, BLOCK, LAYOUT)"),
    (r"tl\.arange\(0, 32\)", "tl.arange(0, 32, LANES)"),
    (r"(threads)\((\w+)\)", r"\1(\2, LANES)"),
    (r"tl\.zeros\((\(.*?\)), (tl\.\w+)\)", r"tl.zeros(\1, \2, LAYOUT)"),
    (r"tl\.range\((.*), num_stages=STAGES\)", r"range(\1)"),
    (r"tl\.range\(", "range("),
    (r"(tl\.sum\(tl\.reshape\(.*?\), \d\))", r"tl.convert_layout(\1, LANES)"),
    (r"\A.*?@triton\.jit\(", HEAD),
)
"""What Gluon says in another way; what is forgotten here does not compile."""


def printed(job: Job, gluon: bool, asked: str = "edges") -> str:
    """The module text of a job's kernel, in Gluon where that is there and serves the job.

    Only there can it ask for rows ahead.
    """
    served = gluon and _served(job.tiling)
    text = source(job, asked if served else "")
    return in_gluon(text, job.tiling) if served else text


def in_gluon(text: str, tiling: Tiling) -> str:
    """A kernel's text with layouts."""
    for pattern, phrase in PHRASES:
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
    return text.replace(BEGIN, layouts + BEGIN, 1)


def _served(tiling: Tiling) -> bool:
    """A warp has channels of one edge, and no copies run ahead, which Gluon would not make."""
    return tiling.stages == 1 and tiling.edges in (1, tiling.warps)
