"""Bugs of earlier libraries that must not exist here: docs/families/products.md, last section."""

import pytest
import torch

from tests.conftest import BACKENDS, INTERPRETED
from torchweft import products

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

X = torch.arange(1.0, 11).reshape(5, 2)
Y = torch.arange(1.0, 9).reshape(4, 2)


def same(found, expected):
    torch.testing.assert_close(found, expected.to(found), rtol=0, atol=0)


def test_smallest_output_row_is_not_zero(backend):
    info = products.sparse_product_info([0, 1, 2], [0, 1, 2], [4, 2, 4])
    assert info.out_size == 5  # the largest row + 1, not the number of distinct rows
    expected = torch.zeros(5, 2)
    expected[2] = X[1] * Y[1]
    expected[4] = X[0] * Y[0] + X[2] * Y[2]
    same(products.sparse_mul(X, Y, info, backend=backend), expected)


def test_identity_indices_do_not_take_terms_from_longer_inputs(backend):
    info = products.sparse_product_info(range(3), range(3), [1, 0, 1])
    expected = torch.stack([X[1] * Y[1], X[0] * Y[0] + X[2] * Y[2]])
    same(products.sparse_mul(X, Y, info, backend=backend), expected)


@pytest.mark.parametrize("wanted", ["x", "y", "s"])
def test_only_one_input_needs_a_gradient(backend, wanted):
    leaves = {"x": X[:3].clone(), "y": Y[:3].clone(), "s": torch.tensor([2.0, 3, 4])}
    leaves[wanted].requires_grad_()
    info = products.SparseProductInfo(scale=leaves["s"])
    products.sparse_mul(leaves["x"], leaves["y"], info, backend=backend).sum().backward()
    factors = [leaf.detach() for name, leaf in leaves.items() if name != wanted]
    factors = [f[:, None] if f.dim() == 1 else f for f in factors]
    expected = (factors[0] * factors[1]).expand(3, 2)
    same(leaves[wanted].grad, expected.sum(-1) if wanted == "s" else expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("terms", [3000, 9000])
def test_half_sums_do_not_stall(backend, dtype, terms):
    ones = torch.ones(terms, 1, dtype=dtype)
    found = products.mul_segment(ones, ones, torch.tensor([0, terms]), backend=backend)
    same(found, torch.tensor([[terms]]))
    batch = torch.ones(terms, 1, 1, dtype=dtype)
    found = products.indexed_mul_scale_gather(batch, batch, out_accumulated=True, backend=backend)
    same(found, torch.tensor([[terms]]))


def test_a_product_past_the_half_range_comes_back_by_its_scale(backend):
    x = torch.full((1, 1), 1000.0, dtype=torch.float16)
    scale = torch.tensor([2.0**-10], dtype=torch.float16)
    found = products.indexed_mul_scale_gather(x, x, scale, backend=backend)
    same(found, torch.tensor([[1e6 / 1024]]).half())


def test_shared_weights_get_the_same_gradient_every_run(backend):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, 8, generator=generator)
    weight = torch.randn(3, 8, 8, generator=generator).requires_grad_()
    gradients = []
    for _ in range(3):
        z = products.indexed_vecmat(x, weight, backend=backend)
        gradients += torch.autograd.grad(z.square().sum(), weight)
    same(gradients[1], gradients[0])
    same(gradients[2], gradients[0])


@pytest.mark.skipif(INTERPRETED, reason="70,000 programs need a GPU, or the CPU backends")
def test_more_segments_than_a_grid_axis_has_blocks(backend):
    count = 70_000
    x = torch.arange(float(count))[:, None]
    seg = torch.arange(count + 1)
    same(products.mul_segment(x, torch.ones_like(x), seg, backend=backend), x)


@pytest.mark.parametrize("accumulated", [False, True])
def test_two_shared_inputs_have_no_batch(backend, accumulated):
    found = products.indexed_mul_scale_gather(
        X[:3], Y[:3], seg=torch.tensor([0, 1, 3]), out_accumulated=accumulated, backend=backend
    )
    same(found, torch.stack([X[0] * Y[0], X[1] * Y[1] + X[2] * Y[2]]))


def test_gather_index_with_repeats_counts_each_in_the_gradient(backend):
    x = X.clone().requires_grad_()
    z = products.indexed_mul_scale_gather(
        x, Y[:1].expand(5, 2), seg=torch.tensor([0, 3]), gather_index=torch.tensor([1, 1, 4]),
        backend=backend,
    )  # fmt: skip
    z.sum().backward()
    expected = torch.zeros(5, 2)
    expected[1], expected[4] = 2 * Y[0], Y[0]
    same(x.grad, expected)


def test_a_table_at_the_address_of_a_dead_one_is_another_table(backend):
    for row in (0, 3, 1, 2):  # each tensor dies before the next is made, often at its address
        index = torch.full((1,), row)
        same(products.indexed_mul(X, Y, index, index, backend=backend), X[[row]] * Y[[row]])
        del index


def test_out_may_be_an_input(backend):
    x = X.clone()
    index = torch.tensor([1, 0, 4, 3, 2])
    found = products.indexed_mul_scale_gather(
        x, Y[:1].expand(5, 2), index1=index, out=x, backend=backend
    )
    assert found is x
    same(x, X[index] * Y[0])


def test_every_element_of_out_is_written(backend):
    out = torch.full((4, 2), float("nan"))
    found = products.indexed_mul_scale_gather(
        X[:2], Y[:2], seg=torch.tensor([0, 0, 2]), out=out, out_size=4, backend=backend
    )
    assert found is out
    expected = torch.zeros(4, 2)
    expected[1] = X[0] * Y[0] + X[1] * Y[1]
    same(out, expected)
