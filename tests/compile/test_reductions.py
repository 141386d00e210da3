"""Generated kernels of reductions in their default tiles, compiled for GPUs that are not here.

The statistics stand in reductions.json: growth over 10 % fails.  To accept a change, run with
TORCHWEFT_WRITE_SNAPSHOT=1 and commit the file.
"""

import dataclasses
from typing import Any

import pytest

from torchweft.core.backend import interpreted

if interpreted():
    pytest.skip("needs a process without TRITON_INTERPRET=1", allow_module_level=True)

from tests.compile.conftest import Check
from torchweft.core.gpu.launcher import Tile
from torchweft.core.printing.modules import printed
from torchweft.reductions.call import KernelSpec
from torchweft.reductions.engine import nearest as knn
from torchweft.reductions.formula import kernel_forms as exponents
from torchweft.reductions.formula.derivatives import gradient
from torchweft.reductions.formula.node import Node, const, node, swap, var
from torchweft.reductions.gpu import (
    gaussian_kernels,
    gaussians,
    kernels,
    neighbours,
    neighbours_kernels,
    recipe,
)
from torchweft.reductions.gpu import source as generator
from torchweft.testing.compiler import Build

X, Y, B, G = var(0, 3, 0), var(1, 3, 1), var(2, 1, 1), var(3, 1, 0)
DISTANCE = node("sqdist", X, Y)
GAUSSIAN = node("exp", -DISTANCE) * B
SCORE = const(-50) * DISTANCE + B
GRADIENT = gradient(GAUSSIAN, X, G)
OTHER = swap(gradient(GAUSSIAN, Y, G))


def gaussian_of(dim: int) -> Node:
    return node("exp", -node("sqdist", var(0, dim, 0), var(1, dim, 1))) * B


FORMULAS: dict[str, tuple[str, Node, Node | None, int]] = {
    "gaussian": ("sums", GAUSSIAN, None, 0),
    "gradient in x": ("sums", GRADIENT, None, 0),
    "gradient in y": ("sums", OTHER, None, 0),
    "logsumexp": ("shifted", SCORE, const(1), 0),
    "softmax": ("shifted", SCORE, var(4, 3, 1), 0),
    "minimum": ("smallest", DISTANCE, None, 0),
    "nearest": ("smallest", DISTANCE, None, 1),
    "ten nearest": ("smallest", DISTANCE, None, 10),
    "sixteen dimensions": ("sums", gaussian_of(16), None, 0),
    "64 dimensions": ("sums", gaussian_of(64), None, 0),
    "1000 dimensions": ("sums", gaussian_of(1000), None, 0),
    "gradient of 8 dimensions": ("sums", gradient(gaussian_of(8), var(0, 8, 0), G), None, 0),
    "gradient of 64 dimensions": ("sums", gradient(gaussian_of(64), var(0, 64, 0), G), None, 0),
    "logsumexp of 64 dimensions": (
        "shifted",
        node("sqdist", var(0, 64, 0), var(1, 64, 1)) * 0.5,
        const(1),
        0,
    ),
    "softmax of 64 components": ("shifted", SCORE, var(4, 64, 1), 0),
}

NEAR_ALONE = "gradient of 8 dimensions"
CASES = {
    f"{name}, {dtype}, {'blocks' if ranged else 'dense'}, {target}": (name, dtype, ranged, target)
    for name in FORMULAS
    for dtype, ranged, targets in (
        ("fp32", False, ("sm_90", "sm_80", "gfx942")),
        ("fp32", True, ("sm_90",)),
        ("fp64", False, ("sm_90",)),
    )
    for target in targets
    if target == "sm_90" or name in ("gaussian", "logsumexp", "ten nearest")
    if name != NEAR_ALONE
}


def build(name: str, dtype: str, ranged: bool, near: bool = False) -> Build:
    kind, f, w, k = FORMULAS[name]
    spec = KernelSpec(kind, f, w, 0, 0, wide=dtype == "fp64", kept=max(k, 1), nan_first=not k)
    job = recipe.kernel_jobs(spec)[1][0]
    job = job._replace(ranged=ranged, partial=ranged, near=near)
    kernel = printed(f"reductions_{kind}", generator.source(job), f"{kind}_kernel").function()
    return made(kernel, dtype, generator.tile(job), {})


def made(kernel: Any, dtype: str, tile: Tile, constants: dict[str, Any]) -> Build:
    names = [name for name in kernel.arg_names if name.isupper() and name not in constants]
    constants = constants | dict(zip(names, tile.blocks, strict=True))
    types = {name: "i32" for name in kernel.arg_names if name not in constants}
    integers = ("tasks_ptr", "intervals_ptr", "indices_ptr")
    for name in types:
        if name.endswith("_ptr"):
            lists = name == "out_ptr" and kernel.__name__.startswith("smallest")
            types[name] = "*i64" if lists or name in integers else f"*{dtype}"
    if "guard_ptr" in types:
        types["guard_ptr"] = "*i32"
    return Build(kernel, types, constants, tile.options, tensor_cores="WIDTH" in constants)


@pytest.mark.parametrize("name", CASES)
def test_generated_kernels(name: str, check: Check) -> None:
    formula, dtype, ranged, target = CASES[name]
    check(build(formula, dtype, ranged), name, target)


@pytest.mark.parametrize("ranged", [False, True])
@pytest.mark.parametrize("name", ["gaussian", "gradient in x", "gradient in y", NEAR_ALONE])
def test_near(name: str, ranged: bool, check: Check) -> None:
    what = "blocks" if ranged else "dense"
    check(build(name, "fp32", ranged, near=True), f"near, {name}, {what}", "sm_90")


@pytest.mark.parametrize("target", ["sm_90", "sm_80"])
@pytest.mark.parametrize("way", gaussians.PRODUCT_TILES)
@pytest.mark.parametrize("kind", ["sums", "shifted"])
def test_products(kind: str, way: str, target: str, check: Check) -> None:
    kernel = getattr(gaussian_kernels, f"split_{kind}_kernel")
    if (way == "three, no wgmma") == (target == "sm_90") and way.startswith("three"):
        pytest.skip("the tile of another GPU")
    width = {"split": gaussians.PRODUCT_WIDTH, "three": 64, "one": 64}.get(way, exponents.WIDEST)
    apart = way != "split" and kind == "shifted"
    constants: dict[str, Any] = {"WEIGHTED": False} if kind == "shifted" else {}
    constants |= {"WIDTH": width, "APART": apart, "PARTS": 1 + way.startswith("three")}
    constants |= {"MIXES": way == "split"}
    constants |= {} if apart else {"a_ptr": None, "b_ptr": None}
    found = made(kernel, "fp32", gaussians.PRODUCT_TILES[way], constants)
    found.types.update(x_ptr="*fp16", y_ptr="*fp16")
    check(found, f"products, {kind}, {way}, {target}", target)


@pytest.mark.parametrize("way", ["three", "one"])
def test_products_of_wide_sums(way: str, check: Check) -> None:
    constants = {"WIDTH": 64, "APART": True, "PARTS": 1 + (way == "three"), "MIXES": False}
    found = made(
        gaussian_kernels.split_sums_kernel, "fp32", gaussians.PRODUCT_TILES[way], constants
    )
    found.types.update(x_ptr="*fp16", y_ptr="*fp16")
    check(found, f"products, wide sums, {way}", "sm_90")


@pytest.mark.parametrize("kind", ["sums", "shifted", "smallest"])
def test_merges(kind: str, check: Check) -> None:
    kernel = getattr(kernels, f"merge_{kind}_kernel")
    constants = dict.fromkeys(n for n in kernel.arg_names if n.isupper() and n != "BLOCK_M")
    constants |= {"FIRST": 0, "RANGED": True, "TOTAL": 1}
    constants |= {n: {"E": 4, "K": 10, "KEPT": 16}[n] for n in constants if n in ("E", "K", "KEPT")}
    found = made(kernel, "fp32", Tile((64,), 4, 1), constants)
    found.types["tiles_ptr"] = "*i64"
    if kind == "smallest":
        found.types["out_ptr"] = "*i64"
    check(found, f"merge of {kind}", "sm_90")


def test_the_bound_of_products(check: Check) -> None:
    found = made(gaussian_kernels.within_kernel, "fp64", Tile((1024,), 4, 1), {"MOST": 8.0})
    check(found, "bound of products", "sm_90")


SPILLS = {"few": 400, "many": 0}
"""Of total sums, at the end of a block of tiles: with fewer registers more programs run (H200, 10¹²
pairs: 368 ms with 128, 422 with 168 and few spills)."""


@pytest.mark.parametrize("count", ["few", "many"])
@pytest.mark.parametrize("dim", [3, 64, 128])
def test_products_with_vectors(dim: int, count: str, check: Check) -> None:
    kernel = getattr(gaussian_kernels, f"{count}_moments_kernel")
    split = dim == 3
    constants = {"WIDTH": max(dim, 16), "PARTS": 2 - split, "E": {"few": 4, "many": 64}[count]}
    found = made(kernel, "fp32", gaussians.MOMENT_TILES[count, split], constants)
    found.types.update(x_ptr="*fp16", y_ptr="*fp16")
    found.types["w_ptr"] = {"few": "*fp32", "many": "*bf16"}[count]
    found = dataclasses.replace(found, spills=SPILLS[count])
    check(found, f"products with {count} columns, {dim}", "sm_90")


@pytest.mark.parametrize("dim", [3, 10, 64, 128])
def test_products_of_neighbours(dim: int, check: Check) -> None:
    split = dim <= neighbours.SPLIT_DIMENSIONS
    constants: dict[str, Any] = {"WIDTH": neighbours._width(dim, split)}
    constants |= {"b_ptr": None} if split else {}
    found = made(neighbours_kernels.lows_kernel, "fp32", neighbours.GROUP_TILES[split], constants)
    found.types.update(x_ptr="*fp16", y_ptr="*fp16")
    check(dataclasses.replace(found, tensor_cores=True), f"bounds of groups, {dim}", "sm_90")


@pytest.mark.parametrize("dim", [3, 64])
def test_nearest(dim: int, check: Check) -> None:
    size = neighbours.GROUP_TILES[dim <= neighbours.SPLIT_DIMENSIONS].blocks
    constants = {"DIM": dim, "STEP": min(dim + dim % 2, 64), "K": 10, "KEPT": 16}
    constants |= {"BLOCK_N": size[1], "TILES": size[2]}
    one = Tile((), 1, 1)
    found = made(neighbours_kernels.nearest_kernel, "fp32", one, constants)
    found.types["out_ptr"] = "*i64"
    check(found, f"nearest of bounds, {dim}", "sm_90")
    found = made(neighbours_kernels.bounds_kernel, "fp32", one, {})
    found.types["counts_ptr"] = "*i32"
    check(found, "bounds of rows", "sm_90")


def test_points_in_cells(check: Check) -> None:
    constants = {"DIM": 3, "K": 10, "KEPT": 16}
    tile = Tile((knn.POINTS_PER_LOOK,), 1, 1)
    found = made(neighbours_kernels.look_kernel, "fp32", tile, constants)
    integers = ("order_ptr", "starts_ptr", "cells_ptr", "runs_ptr", "near_ptr")
    found.types.update(dict.fromkeys(integers, "*i64"))
    check(found, "points in cells", "sm_90")
