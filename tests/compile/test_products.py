"""Every product kernel in its default tiles, compiled for GPUs that are not here.

The statistics stand in products.json: growth over 10 % fails.  To accept a change, run with
TORCHWEFT_WRITE_SNAPSHOT=1 and commit the file.
"""

from functools import partial
from typing import Any

import pytest

from torchweft.core.backend import interpreted
from torchweft.core.gpu.launcher import Tile

if interpreted():
    pytest.skip("needs a process without TRITON_INTERPRET=1", allow_module_level=True)

from tests.compile.conftest import Check
from torchweft.products import kernels, tiles
from torchweft.products.segments import kernels as segments
from torchweft.testing.compiler import TARGETS, Build, compile_for

SIZES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


def build(
    kernel: Any,
    dtype: str,
    tile: Tile,
    constants: dict[str, Any],
    absent: tuple[str, ...] = (),
    **gates: bool,
) -> Build:
    """A kernel on aligned operands with contiguous rows; `absent` tables are None."""
    names = kernel.arg_names
    blocks = [name for name in names if name.startswith("BLOCK")]
    fixed = dict(zip(blocks, tile.blocks, strict=True)) | dict.fromkeys(absent)
    fixed |= {name: 1 for name in names if name in ("stride_xc", "stride_yd")} | constants
    types = {}
    for name in names:
        if name in fixed:
            continue
        types[name] = "*i32" if name.endswith("_ptr") else "i32"
        if name in ("x_ptr", "y_ptr", "z_ptr"):
            types[name] = f"*{dtype}"
        elif name == "scale_ptr":
            types[name] = "*fp64" if dtype == "fp64" else "*fp32"
    aligned = [n for n in types if n.startswith("stride") or n in ("K", "C", "D")]
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return Build(kernel, types, fixed, options, tuple(aligned), **gates)


def rows(op: str, dtype: str, items: int, accumulate: bool = False, channels: int = 64) -> Build:
    inner = channels if op in ("outer", "vecmat") else 1
    constants = {"OP": op, "ACCUMULATE": accumulate, "ALONG_N": False, "WIDE": accumulate}
    constants["K"] = inner
    depth, width = (inner, channels) if op == "vecmat" else (1, channels * inner)
    tile = tiles.rows_tile(op, width, items, 100_000, SIZES[dtype], depth)
    absent = ("indptr_ptr",) if items == 1 else ()
    if op in ("scale", "mean"):
        absent = (*absent, "y_ptr", "index2_ptr")
    if op != "vecsca":
        constants["stride_yc"] = 1
    return build(kernels.rows_kernel, dtype, tile, constants, absent, wide_loads=channels > 16)


def batch(dtype: str, precision: str, target: str) -> Build:
    tile = tiles.batch_tile(100_000, 128, 128, SIZES[dtype], target == "sm_90")
    constants = {"WIDE": False, "PRECISION": precision, "stride_yc": 1}
    kernel = kernels.vecmat_batch_kernel
    if precision == "bf16x6":
        constants = {"WIDE": False, "stride_yk": 1}
        kernel = kernels.vecmat_parts_kernel
    dots = precision != "ieee" or dtype != "fp32"
    made = build(
        kernel,
        dtype,
        tile,
        constants,
        ("scale_ptr", "term_ptr"),
        wide_loads=True,
        tensor_cores=dots,
    )
    if precision == "bf16x6":
        made.types["y_ptr"] = "*bf16"
    return made


def group(dtype: str, precision: str, target: str, entries: int) -> Build:
    tile = tiles.group_tile(entries, 64, 64, SIZES[dtype])
    constants = {"WIDE": False, "PRECISION": precision, "stride_yc": 1}
    dots = precision != "ieee" or dtype != "fp32"
    return build(
        kernels.vecmat_group_kernel, dtype, tile, constants, wide_loads=True, tensor_cores=dots
    )


def outer(dtype: str, precision: str, target: str, items: int) -> Build:
    tile = tiles.outer_tile(128, 128, items, SIZES[dtype], target == "sm_90")
    constants = {"ACCUMULATE": items > 16, "WIDE": False, "PRECISION": precision}
    dots = items > 16 and (precision != "ieee" or dtype != "fp32")
    absent = ("scale_ptr", "term_ptr")
    return build(kernels.outer_kernel, dtype, tile, constants, absent, tensor_cores=dots)


def split() -> Build:
    types = {"y_ptr": "*fp32", "z_ptr": "*bf16"}
    types |= dict.fromkeys(("R", "K", "C", "stride_yr", "stride_yk"), "i32")
    constants = {"BLOCK": 1024, "stride_yc": 1}
    return Build(kernels.split_kernel, types, constants, {"num_warps": 4}, ("K", "C"))


def extreme(element: str, wide: bool = False, places: bool = True) -> Build:
    """The maximum of each segment, 64 channels."""
    size = {"fp32": 4, "bf16": 2, "i64": 8}[element]
    fill = -(2**63) if element == "i64" else None
    blocks = {"BLOCK_R": 2048 // size // 64, "BLOCK_C": 64}
    constants = {"LARGEST": True, "WIDE": wide, "FILL": fill, "STEPS": 4, "stride_xc": 1}
    pointers = {"x_ptr": element, "value_ptr": element, "indptr_ptr": "i32", "order_ptr": "i32"}
    if places:
        pointers["place_ptr"] = "i64"
    else:
        constants["place_ptr"] = None
    types = {name: f"*{kind}" for name, kind in pointers.items()}
    types |= dict.fromkeys(("M", "T", "C", "stride_xr"), "i32")
    options = {"num_warps": 4, "num_stages": 3}
    made = (segments.extreme_kernel, types, constants | blocks, options, ("C", "stride_xr"))
    return Build(*made, wide_loads=True)


ROWS = {
    "max fp32": extreme("fp32"),
    "max fp32, without places": extreme("fp32", places=False),
    "max bf16, many rows": extreme("bf16", wide=True),
    "max of integers": extreme("i64"),
    "mean bf16, segments": rows("mean", "bf16", 32),
    "mean fp32, one entry": rows("mean", "fp32", 1),
    "mul fp32, one entry": rows("mul", "fp32", 1),
    "mul bf16, segments": rows("mul", "bf16", 8),
    "vecsca fp32, segments": rows("vecsca", "fp32", 32),
    "scale fp64, summed over n": rows("scale", "fp64", 1000, accumulate=True),
    "inner fp32, summed over n": rows("inner", "fp32", 1000, accumulate=True),
    "outer fp32, few channels": rows("outer", "fp32", 1, channels=9),
    "vecmat fp32, few channels": rows("vecmat", "fp32", 4, channels=3),
    "vecmat fp32, small matrices": rows("vecmat", "fp32", 1, channels=16),
    "outer fp32, small matrices": rows("outer", "fp32", 1, channels=16),
}
"""The rows kernel, the same on every target."""

DOTS: dict[str, partial[Build]] = {
    "outer, few items": partial(outer, items=1),
    "outer, many items": partial(outer, items=100_000),
    "vecmat, shared matrices": partial(batch),
    "vecmat, own matrices": partial(group, entries=1),
    "vecmat, grouped entries": partial(group, entries=1000),
}
"""Kernels with dots: tile and precision depend on the target."""


def cases() -> dict[str, tuple[Build, str]]:
    found = {f"{name}, {target}": (b, target) for name, b in ROWS.items() for target in TARGETS}
    for name, make in DOTS.items():
        fp32 = "tf32x3" if make.func is group else "bf16x6"
        for target in TARGETS:
            exact = "ieee" if target == "gfx942" else fp32
            kinds = {("fp32", exact), ("bf16", "ieee")}
            if target == "sm_90":
                kinds |= {("fp32", "tf32"), ("fp64", "ieee")}
            for dtype, precision in kinds:
                made = make(dtype, precision, target)
                found[f"{name}, {dtype} {precision}, {target}"] = (made, target)
    found["split, sm_90"] = (split(), "sm_90")
    return dict(sorted(found.items()))


CASES = cases()


def test_means_are_rounded_once() -> None:
    """`/` of fp32 in Triton may err by two units."""
    compiled = compile_for(ROWS["mean bf16, segments"], "sm_90")
    assert "div.full" not in compiled.asm["ptx"]


@pytest.mark.parametrize("name", CASES)
def test_kernel_compiles_within_its_gates(name: str, check: Check) -> None:
    made, target = CASES[name]
    check(made, name, target)
