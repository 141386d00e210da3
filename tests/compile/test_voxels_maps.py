"""The kernels of kernel maps, compiled for GPUs that are not here.

The statistics stand in voxels_maps.json: growth over 10 % fails.  To accept a change, run with
TORCHWEFT_WRITE_SNAPSHOT=1 and commit the file.
"""

from typing import Any

import pytest

from torchweft.core.backend import interpreted

if interpreted():
    pytest.skip("needs a process without TRITON_INTERPRET=1", allow_module_level=True)

from tests.compile.conftest import Check
from torchweft.testing.compiler import Build
from torchweft.voxels.maps.gpu import job_kernels, jobs, resample_kernels, tiles
from torchweft.voxels.maps.gpu import kernels as map_kernels
from torchweft.voxels.maps.gpu import launch as map_launch

CONSTANTS = {
    "survey_kernel": {"COLUMNS": 4, "BLOCK": map_launch.SURVEY.blocks[0]},
    "pack_kernel": {"COLUMNS": 4, "BLOCK": map_launch.PACK.blocks[0]},
    "settle_kernel": {"BLOCK": map_launch.PACK.blocks[0]},
    "search_kernel": {"COLUMNS": 4, "LAST": 3, "GAP": 1, "HALF": False}
    | {"PIVOTS": 64, "LINES": 2, "BLOCK": 256},
    "mark_kernel": {"BLOCK": map_launch.MARK.blocks[0]},
    "take_kernel": {"BLOCK": map_launch.PACK.blocks[0]},
    "count_kernel": {"BLOCK": map_launch.WORDS.blocks[0]},
    "number_kernel": {"BLOCK": map_launch.WORDS.blocks[0]},
    "arrange_kernel": {"BLOCK": map_launch.PACK.blocks[0]},
    "look_kernel": {"COLUMNS": 4, "LAST": 3, "GAP": 1, "BLOCK": map_launch.LOOK.blocks[0]},
    "candidates_kernel": {"COLUMNS": 4, "BLOCK": map_launch.PLACE.blocks[0]},
    "fresh_kernel": {"BLOCK": map_launch.PLACE.blocks[0]},
    "level_kernel": {"COLUMNS": 4, "BLOCK": map_launch.PLACE.blocks[0]},
    "outputs_kernel": {"BLOCK": map_launch.PLACE.blocks[0]},
    "onto_kernel": {"COLUMNS": 4, "PIVOTS": 64, "BLOCK": map_launch.LOOKED_UP.blocks[-1]},
    "mask_kernel": {"K": 27, "NEAR": jobs.BLOCK, "BLOCK": tiles.MASKED.blocks[0]},
    "key_kernel": {"K": 27, "OFFSETS": 32, "SAMPLES": 256, "BLOCK": jobs.BLOCK},
    "scan_kernel": {"K": 27, "BLOCK": tiles.SCANNED.blocks[0]},
    "list_kernel": {"K": 27, "NEAR": jobs.BLOCK},
    "turn_kernel": {"K": 27, "BLOCK": tiles.SCANNED.blocks[0]},
    "pair_kernel": {"OFFSETS": 32, "BLOCK": tiles.PANEL},
}
ROWS = ("pack_kernel", "settle_kernel", "take_kernel", "arrange_kernel")
WARPS = dict.fromkeys(ROWS, map_launch.PACK.num_warps)
WARPS |= dict.fromkeys(("count_kernel", "number_kernel"), map_launch.WORDS.num_warps)
WARPS |= {"search_kernel": map_launch.SEARCH.num_warps, "mark_kernel": map_launch.MARK.num_warps}
WARPS |= {"scan_kernel": 8, "turn_kernel": 8, "list_kernel": 1}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "mask_kernel": {"half": {"HALVED": True}, "whole": {"HALVED": False}},
    "key_kernel": {"masks": {"PARTS": 1}, "parts": {"PARTS": 4}},
    "list_kernel": {
        "half in any order": {"HALVED": True, "ORDERED": True},
        "whole in order": {"HALVED": False, "ORDERED": False},
    },
    "pair_kernel": {
        "mirrored in order": {"K": 14, "ORDERED": False, "SHORT": True},
        "in any order": {"K": 27, "ORDERED": True, "SHORT": False},
    },
    "onto_kernel": {"any order": {}, "in order": {"order_ptr": None, "coarse_order_ptr": None}},
    "pack_kernel": {"checked": {}, "unchecked": {"flags_ptr": None}},
    "search_kernel": {
        "symmetric": {"SYMMETRIC": True, "MIRRORED": False},
        "symmetric in order": {"SYMMETRIC": True, "MIRRORED": False, "order_ptr": None},
        "uneven": {"SYMMETRIC": False, "MIRRORED": False, "rest_ptr": None},
        "uneven mirrored": {"SYMMETRIC": False, "MIRRORED": True, "rest_ptr": None},
        "many offsets": {"SYMMETRIC": True, "MIRRORED": False, "parts_ptr": None},
        "half": {"SYMMETRIC": True, "MIRRORED": False, "parts_ptr": None, "HALF": True},
    },
    "look_kernel": {
        "any order": {"MIRRORED": False},
        "in order": {"MIRRORED": False, "order_ptr": None},
        "many offsets": {"MIRRORED": True, "parts_ptr": None, "rest_ptr": None},
    },
    "candidates_kernel": {
        "strided": {"TRANSPOSED": False},
        "transposed": {"TRANSPOSED": True},
    },
}


def build(name: str, keys: str, variant: str) -> Build:
    """A kernel for keys of a type."""
    modules = map_kernels, resample_kernels, job_kernels
    kernel = next(getattr(module, name) for module in modules if name in vars(module))
    variants = VARIANTS.get(name, {"": {}}) | {"few offsets": {"K": 8, "PARTS": 1}}
    constants = CONSTANTS[name] | variants[variant]
    if "MOST" in kernel.arg_names:
        constants |= {"MOST": 2**31 - 1 if keys == "i32" else 2**63 - 1}
    of = {"found_ptr": "i64", "source_ptr": "i64", "places_ptr": "i64", "words_ptr": "i64"}
    of |= dict.fromkeys(("keys_ptr", "out_keys_ptr", "sorted_ptr"), keys)
    of |= {"jobs_ptr": "i64"} | ({"sorted_ptr": "i64"} if name == "list_kernel" else {})
    types = {
        p.name: f"*{of.get(p.name, 'i32')}" if p.name.endswith("_ptr") else p.annotation_type
        for p in kernel.params
        if p.name not in constants
    }
    return Build(kernel, types, constants, {"num_warps": WARPS.get(name, 4)})


CASES = {
    f"{name} {variant}, {keys} keys, {target}": (name, keys, variant, target)
    for name in CONSTANTS
    for variant in VARIANTS.get(name, {"": {}})
    for keys, target in (("i32", "sm_90"), ("i64", "sm_90"), ("i64", "sm_80"), ("i64", "gfx942"))
}
CASES["key_kernel few offsets, i16 keys, sm_90"] = "key_kernel", "i16", "few offsets", "sm_90"


@pytest.mark.parametrize("name", CASES)
def test_kernel_compiles_within_its_gates(name: str, check: Check) -> None:
    *case, target = CASES[name]
    made = build(*case)
    check(made, name, target)
