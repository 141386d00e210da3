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


SCALARS = {
    "mul": (X[0, :, 1], Y[0, :, 1]),
    "inner": (X[0, :, 1], Y[0, :, 1]),
    "vecsca": (X[0, :, 1], Y[0, :, 1]),
    "scavec": (X[0, :, 1], Y[0, :, 1]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", SCALARS)
def test_rows_that_are_numbers(op, backend):
    """Seen red with: the channel of a number kept; an N taken from its rows."""
    x, y = (t.clone().requires_grad_() for t in SCALARS[op])
    found = run(backend, op, x, y, SCALE, index1=INDEX1, index2=INDEX2, seg=SEG)
    same(found, [120, 80, 0, 80])
    found.sum().backward()
    same(x.grad, [80, -20 + 0.5 * 40, 20])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_several_dimensions(backend):
    """As rows of one dimension, whose result has the shape of theirs."""
    x = torch.arange(36.0).reshape(2, 3, 2, 3)
    y = torch.arange(24.0).reshape(2, 2, 2, 3)
    tables = {"index1": INDEX1, "index2": INDEX2, "seg": SEG}
    for op, second, shape in (
        ("mul", y, (2, 4, 2, 3)),
        ("inner", y, (2, 4)),
        ("vecsca", y[:, :, 0, 0], (2, 4, 2, 3)),
    ):
        flat = second if second.dim() == 2 else second.flatten(2)
        expected = run(backend, op, x.flatten(2), flat, SCALE, **tables)
        found = run(backend, op, x, second, SCALE, **tables)
        torch.testing.assert_close(found, expected.reshape(shape), rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sparse_matrix_times_a_vector(backend):
    forward, back = products.sparse_scale_infos([0, 1, 1], [1, 0, 1], [1.0, 2.0, 3.0], in_size=2)
    same(products.sparse_scale(torch.tensor([1.0, 10.0]), forward, back, backend=backend), [20, 31])


THIN = {
    "indexed_mul": {"index1": INDEX1, "index2": INDEX2},
    "indexed_mul_scale_segment": {"scale": SCALE, "index1": INDEX1, "index2": INDEX2, "seg": SEG},
    "indexed_mul_segment": {"index1": INDEX1, "index2": INDEX2, "seg": SEG, "accumulated": True},
    "mul_segment": {"seg": torch.tensor([0, 1, 2]), "accumulated": True},
    "accumulated_indexed_mul_segment": {"index1": INDEX1, "index2": INDEX2, "seg": SEG},
}


@pytest.mark.parametrize("name", THIN)
def test_thin_forms_write_into_out(name):
    x, y, options = X[:, :2].expand(3, 2, 2), Y.expand(3, 2, 2), dict(THIN[name])
    options = {k: v % 2 if k == "index1" else v for k, v in options.items()}
    function = getattr(products, name)
    out = torch.full_like(function(x, y, **options), float("nan"))
    assert function(x, y, **options, out=out) is out
    accumulated = options.pop("accumulated", name.startswith("accumulated"))
    expected = products.indexed_mul_scale_gather(x, y, **options, out_accumulated=accumulated)
    same(out, expected.tolist())
    with pytest.raises(ValueError, match="out is"):
        function(x, y, **THIN[name] | options, out=out[:1])
