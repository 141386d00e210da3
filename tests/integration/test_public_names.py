"""The public names of the design; in weft.products their signatures, and nothing else.

Seen red with: a keyword renamed, a name left out of __all__, `source` imported with reductions.
"""

import inspect
import subprocess
import sys

import pytest
import torch

import weft
from weft import products, reductions

OPS = ("mul", "outer", "inner", "vecmat", "vecsca", "scavec", "mat_t_vec")
SCALE_GATHER = (
    "input1 input2 scale index1 index2 seg gather_index index_out out out_accumulated out_size "
    "backend"
)
SIGNATURES = {
    "indexed_{op}_scale_gather": SCALE_GATHER,
    "sparse_{op}": "input1 input2 info_fwd info_bwd1 info_bwd2 out_accumulated backend",
    "indexed_{op}": "input1 input2 index1 index2 backend",
    "{op}_segment": "input1 input2 seg backend",
    "indexed_{op}_segment": "input1 input2 index1 index2 seg backend",
    "indexed_{op}_scale_segment": "input1 input2 scale index1 index2 seg backend",
    "accumulated_indexed_{op}_segment": "input1 input2 index1 index2 seg backend",
}
OTHERS = {
    "sparse_scale": "input info_fwd info_bwd backend",
    "sparse_product_info": "index1 index2 index scale out_size",
    "sparse_product_infos": "index1 index2 index scale out_size in1_size in2_size",
    "sparse_scale_infos": "index index_out scale out_size in_size",
}
INFOS = {
    "SparseProductInfo": "scale index1 index2 seg_out gather_index index_out out_size",
    "SparseScaleInfo": "scale index seg_out index_out out_size",
}
EXPECTED = OTHERS | {form.format(op=op): names for op in OPS for form, names in SIGNATURES.items()}


@pytest.mark.parametrize("name", EXPECTED)
def test_signature(name):
    function = getattr(products, name)
    assert " ".join(inspect.signature(function).parameters) == EXPECTED[name]
    assert function.__name__ == name
    assert function.__doc__


@pytest.mark.parametrize("name", INFOS)
def test_info_is_a_named_tuple_that_moves(name):
    cls = getattr(products, name)
    assert " ".join(cls._fields) == INFOS[name]
    info = cls(scale=torch.ones(2), index_out=torch.tensor([0, 1]), out_size=2)
    moved = info.to(torch.float64).to("meta")
    assert isinstance(moved, cls)
    assert (moved.scale.dtype, moved.index_out.dtype) == (torch.float64, torch.int64)
    assert moved.scale.is_meta
    assert moved.index_out.is_meta
    assert info.cpu().scale.device.type == "cpu"


def test_products_lists_these_names_and_no_others():
    assert sorted(products.__all__) == sorted([*EXPECTED, *INFOS])


def test_reductions_has_the_names_it_lists():
    for name in reductions.__all__:
        assert getattr(reductions, name).__doc__
    for name in ("SamplesLoss", "cluster", "nearest", "source"):
        assert name in reductions.__all__


def test_reductions_imports_no_triton_until_a_kernel_is_asked_for():
    program = (
        "import sys, weft.reductions as r; print('triton' in sys.modules); "
        "r.source; print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_every_module_lists_its_names():
    for name in weft.__all__:
        assert getattr(weft, name) is not None
    for error in ("ShapeError", "DTypeError", "DeviceError", "IndexRangeError", "BackendError"):
        assert issubclass(getattr(weft, error), weft.WeftError)
