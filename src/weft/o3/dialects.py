"""Kernels spelled for Gluon, with the layouts that Triton would search for.

For each load and store Triton 3.6 looks at all that is connected with it: in a kernel of a thousand
lines this is nineteen of twenty seconds.  All tensors of a flat kernel have one layout, channels in
their order, so there is nothing to search.  The machine code is the same.
"""

from __future__ import annotations

import re

from weft.o3.generator import Job, Tiling, source

__all__ = ["in_gluon", "printed"]

HEAD = """\
from triton.experimental import gluon
from triton.experimental.gluon import language as tl


@gluon.jit
def halved(a, b, thread, BIT: tl.constexpr):
    high = (thread & BIT) != 0
    return tl.where(high, b, a) + tl.gather(tl.where(high, a, b), thread ^ BIT, 0)


@gluon.jit
def fetched(address):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address],
        dtype=tl.int32, is_pure=False, pack=1,
    )


@gluon.jit("""

BEGIN = "    pid = tl.program_id(0)\n"

PHRASES = (
    (r"\A.*?@triton\.jit\(", HEAD),
    (r"tl\.arange\(0, BLOCK\)", "tl.arange(0, BLOCK, LAYOUT)"),
    (r"tl\.arange\(0, 32\)", "tl.arange(0, 32, LANES)"),
    (r"tl\.zeros\(\(BLOCK,\), (tl\.\w+)\)", r"tl.zeros((BLOCK,), \1, LAYOUT)"),
    (r"tl\.range\((.*), num_stages=STAGES\)", r"range(\1)"),
    (r"tl\.range\(", "range("),
    (r"(tl\.sum\(tl\.reshape\(\w+, \(32, \d+\)\), 1\))", r"tl.convert_layout(\1, LANES)"),
)
"""What Gluon says in another way; what is forgotten here does not compile."""


def printed(job: Job, gluon: bool, fetched: bool = True) -> str:
    """The module text of a job's kernel, in Gluon where that is there and serves the job.

    Only there can it ask for rows of the next edge.
    """
    flat = gluon and _flat(job.tiling)
    text = source(job, fetched=fetched and flat)
    return in_gluon(text, job.tiling) if flat else text


def in_gluon(text: str, tiling: Tiling) -> str:
    """A flat kernel's text with layouts."""
    for pattern, phrase in PHRASES:
        text = re.sub(pattern, phrase, text, flags=re.DOTALL if pattern[:2] == r"\A" else 0)
    each = tiling.block // (32 * tiling.warps)
    layouts = (
        f"    LAYOUT: tl.constexpr = tl.BlockedLayout([{each}], [32], [{tiling.warps}], [0])\n"
        "    LANES: tl.constexpr = tl.BlockedLayout([1], [32], [1], [0])\n"
    )
    return text.replace(BEGIN, layouts + BEGIN, 1)


def _flat(tiling: Tiling) -> bool:
    """Tensors are blocks of channels alone, and no copies run ahead, which Gluon would not make."""
    return tiling.edges == tiling.stages == 1
