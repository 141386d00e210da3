"""The worked examples of docs/families/products.md, by hand, on every backend and the oracle."""

import functools

import pytest
import torch

from tests.conftest import BACKENDS
from torchweft import products
from torchweft.products.reference import indexed_product

pytestmark = pytest.mark.kernels

X = torch.tensor([[[1.0, 2], [3, 4], [5, 6]]])
Y = torch.tensor([[[10.0, 20], [30, 40]]])
INDEX1, INDEX2 = torch.tensor([2, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
SCALE = torch.tensor([1, 2, -1, 0.5])
SEG, SEG_GATHERED = torch.tensor([0, 1, 3, 3, 4]), torch.tensor([0, 2, 4])
GATHER = torch.tensor([3, 3, 0, 1])
WHOLE = {"seg": SEG_GATHERED, "gather_index": GATHER}


def run(backend, op, x, y, scale=None, **tables):
    if backend == "oracle":
        return indexed_product(op, x, y, scale, **tables)
    function = getattr(products, f"indexed_{op}_scale_gather")
    return function(x, y, scale, backend=backend, **tables)


def same(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected).to(found), rtol=0, atol=0)


@pytest.fixture(params=[*BACKENDS, "oracle"])
def product(request):
    return functools.partial(run, request.param)


@pytest.fixture
def mul(product):
    return functools.partial(product, "mul", X, Y, SCALE, index1=INDEX1, index2=INDEX2)


def test_terms_are_rows(mul):
    same(mul(), [[[50, 120], [60, 160], [-30, -80], [45, 80]]])


def test_segments(mul):
    same(mul(seg=SEG), [[[50, 120], [30, 80], [0, 0], [45, 80]]])


def test_inner(product):
    found = product("inner", X, Y, SCALE, index1=INDEX1, index2=INDEX2, seg=SEG)
    same(found, [[170, 110, 0, 125]])


def test_gathered_terms_repeat(mul):
    same(mul(**WHOLE), [[[90, 160], [110, 280]]])


def test_output_rows(mul):
    found = mul(**WHOLE, index_out=torch.tensor([2, 0]), out_size=3)
    same(found, [[[110, 280], [0, 0], [90, 160]]])


def test_outer(product):
    found = product("outer", X, Y, index1=INDEX1[:1], index2=INDEX2[:1])
    same(found, [[[[50, 100], [60, 120]]]])


def test_expanded_batch_is_summed_as_often(product):
    found = product(
        "mul", X.expand(3, 3, 2), Y.expand(3, 2, 2), SCALE, index1=INDEX1, index2=INDEX2,
        out_accumulated=True,
    )  # fmt: skip
    same(found, [[150, 360], [180, 480], [-90, -240], [135, 240]])


def test_vecmat_with_a_shared_matrix(product):
    matrix = torch.tensor([[[1.0, 0, 2], [0, 1, 1]]])
    found = product("vecmat", X, matrix, index2=torch.tensor([0, 0, 0]))
    same(found, [[[1, 2, 4], [3, 4, 10], [5, 6, 16]]])


def test_vecsca(product):
    found = product(
        "vecsca", X, torch.tensor([[10.0, 100]]), index1=torch.tensor([0, 1, 2]),
        index2=torch.tensor([1, 0, 1]), seg=torch.tensor([0, 2, 3]),
    )  # fmt: skip
    same(found, [[[130, 240], [500, 600]]])


def test_both_shared_have_no_batch(product):
    found = product("mul", X[0], Y[0], SCALE, index1=INDEX1, index2=INDEX2, out_accumulated=True)
    same(found, [[50, 120], [60, 160], [-30, -80], [45, 80]])
