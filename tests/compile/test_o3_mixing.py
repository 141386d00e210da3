"""Kernels of weights that mix copies, compiled for absent GPUs.

The statistics stand in o3_mixing.json: growth over 10 % fails.  To accept a change, run with
TORCHWEFT_WRITE_SNAPSHOT=1 and commit the file.
"""

import pytest

from torchweft.core.backend import interpreted

if interpreted():
    pytest.skip("needs a process without TRITON_INTERPRET=1", allow_module_level=True)

from tests.compile.conftest import Check
from torchweft import o3
from torchweft.core.gpu.launcher import Tile
from torchweft.core.printing.modules import printed
from torchweft.o3.mixing import launch
from torchweft.o3.mixing import rows_source as mixing_rows_generator
from torchweft.o3.mixing import source as generator
from torchweft.o3.mixing.blocks import Mixing
from torchweft.testing.compiler import Build

UNIFORM = "128x0e+128x1o+128x2e"
RAGGED = "10x1o+10x1e+48x0e+48x0o"


def linear(layout: str) -> Mixing:
    found = o3.Linear(UNIFORM, UNIFORM, layout=layout).mixing
    assert found is not None
    return found


def fully_connected(irreps: str) -> Mixing:
    product = o3.FullyConnectedTensorProduct(irreps, "1x0e+1x1o+1x2e", irreps)
    mixed = product.recipe.parts.mixed
    assert mixed is not None
    assert mixed.mixing is not None
    return mixed.mixing


TABLES = ("order_ptr", "starts_ptr")


def build(
    name: str, source: str, tile: Tile, dtype: str, cores: bool = False, wide: bool = True
) -> Build:
    kernel = printed("o3_mixing", source, f"mixing_{name}").function()
    constants = dict(zip(kernel.arg_names[-len(tile.blocks) :], tile.blocks, strict=True))
    types = {
        arg: "*i32" if arg in TABLES else f"*{dtype}" if arg.endswith("_ptr") else "i32"
        for arg in kernel.arg_names
        if arg not in constants
    }
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return Build(kernel, types, constants, options, tensor_cores=cores, wide_loads=wide)


MIXINGS = {
    "linear, mul_ir": lambda: linear("mul_ir"),
    "linear, ir_mul": lambda: linear("ir_mul"),
    "fully connected": lambda: fully_connected(UNIFORM),
}


@pytest.mark.parametrize("result", ["z", "t", "w"])
@pytest.mark.parametrize("name", MIXINGS)
def test_shared_weights(name: str, result: str, check: Check) -> None:
    mixing = MIXINGS[name]()
    if result == "w":
        of = ("outer", generator.outer_source(mixing, 2), launch.EXACT_OUTER_TILE)
        beside, other = f"{name}, fold", ("fold", generator.fold_source(mixing), launch.FOLD_TILE)
    else:
        of = ("product", generator.product_source(mixing, result, 2), launch.EXACT_TILE)
        prepare = generator.prepare_source(mixing, result, 2)
        beside, other = f"{name}, {result}, prepare", ("prepare", prepare, launch.PREPARE_TILE)
    check(build(*other, "fp32"), beside, "sm_90")
    check(build(*of, "fp32", cores=True), f"{name}, {result}", "sm_90")


@pytest.mark.parametrize("tile", launch.DIRECT_TILES)
@pytest.mark.parametrize("result", ["z", "t"])
@pytest.mark.parametrize("name", MIXINGS)
def test_shared_weights_as_they_are(name: str, result: str, tile: Tile, check: Check) -> None:
    source = generator.direct_source(MIXINGS[name](), result, 2)
    case = f"{name}, {result}, as they are, {tile.blocks[0]} rows"
    check(build("direct", source, tile, "fp32", cores=True), case, "sm_90")


@pytest.mark.parametrize("name", MIXINGS)
@pytest.mark.parametrize("elements", [None, 5])
def test_gradients_of_few_rows(name: str, elements: int | None, check: Check) -> None:
    source = generator.whole_outer_source(MIXINGS[name](), 2, elements)
    kinds = f", {elements} kinds" if elements else ""
    built = build("whole_outer", source, launch.WHOLE_OUTER_TILE, "fp32", cores=True)
    check(built, f"{name}, w, few rows{kinds}", "sm_90")


@pytest.mark.parametrize("result", ["z", "t"])
def test_weights_inside_as_they_are(result: str, check: Check) -> None:
    source = generator.direct_source(linear("ir_mul"), result, 2, 5, True)
    built = build("direct", source, launch.DIRECT_TILES[0], "fp32", cores=True)
    check(built, f"kinds inside, {result}, as they are", "sm_90")


@pytest.mark.parametrize("result", ["z", "t", "w"])
def test_weights_by_kind(result: str, check: Check) -> None:
    mixing = linear("ir_mul")
    if result == "w":
        of = ("outer", generator.outer_source(mixing, 2, 5), launch.EXACT_OUTER_TILE)
        fold = ("fold", generator.fold_source(mixing, 5), launch.FOLD_TILE)
        check(build(*fold, "fp32"), "kinds, fold", "sm_90")
    else:
        of = ("product", generator.product_source(mixing, result, 2, 5), launch.EXACT_TILE)
        prepare = ("prepare", generator.prepare_source(mixing, result, 2, 5), launch.PREPARE_TILE)
        check(build(*prepare, "fp32"), f"kinds, {result}, prepare", "sm_90")
    check(build(*of, "fp32", cores=True), f"kinds, {result}", "sm_90")


@pytest.mark.parametrize("result", ["z", "w"])
def test_shared_weights_of_16_bits(result: str, check: Check) -> None:
    mixing = linear("ir_mul")
    if result == "w":
        of = ("outer", generator.outer_source(mixing, 0), launch.OUTER_TILE)
    else:
        of = ("product", generator.product_source(mixing, result, 0), launch.PRODUCT_TILE)
    check(build(*of, "bf16", cores=True), f"16 bits, {result}", "sm_90")


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("result", ["z", "t", "w"])
def test_own_weights(result: str, dtype: str, check: Check) -> None:
    source = generator.own_source(fully_connected(RAGGED), result, launch.OWN_WARPS)
    tile = Tile((launch.OWN_WARPS,), launch.OWN_WARPS, 1)
    wide = result != "w"  # what writes weights reads rows that are short
    check(build("own", source, tile, dtype, wide=wide), f"own, {result}, {dtype}", "sm_90")


@pytest.mark.parametrize(("result", "pairs"), [("z", 1), ("z", 2), ("w", 1), ("w", 2), ("xy", 1)])
def test_products_with_own_weights(result: str, pairs: int, check: Check) -> None:
    mixed = o3.FullyConnectedTensorProduct(RAGGED, "1x0e+1x1o+1x2e", RAGGED).recipe.parts.mixed
    assert mixed is not None
    assert mixed.mixing is not None
    layout = launch.ROW_LAYOUTS[result[0]]
    source = mixing_rows_generator.source(
        mixed.structure, mixed.mixing, result, pairs, layout.height
    )
    kernel = printed("o3_mixed", source, mixing_rows_generator.MIXED_PRODUCT).function()
    constants = {"WARPS": layout.warps}
    types = {arg: "*fp32" for arg in kernel.arg_names if arg.endswith("_ptr")}
    options = {"num_warps": layout.warps, "num_stages": 1}
    case = f"rows, {result}, {pairs}"
    check(Build(kernel, types, constants, options, wide_loads=True), case, "sm_90")
