"""Batch norms of rows of which only the first n are real, where the host does not know n.

Seen red with: padding that counts in a mean, in a sum of gradients, in the number of rows that
divides; results and gradients of padding that are not 0, or masked by a product; squares of parts
that are read behind the parts of real rows alone; a number that the host reads.
"""

import copy

import pytest
import torch
from torch import nn

from tests.clouds import DEVICE, same
from tests.contract import test_voxels_batch_norm as whole
from tests.contract.test_voxels_batch_norm import (
    BACKEND,
    BY_KERNELS,
    norm_of,
    rows_of,
    second,
    step,
)
from tests.host_waits import steps
from torchweft.testing import assert_as_accurate, plain_error
from torchweft.voxels.norms.functions import batch_norm

pytestmark = pytest.mark.kernels

small_blocks = whole.small_blocks
C = 16
N = 48
SAME_PARTS = [N, 45, 36, 34]
"""Numbers of rows that are summed by parts of 12 rows, as N are; the last part of N has padding in
none, some and all of its rows."""

REAL = [*SAME_PARTS, 24, 10, 2]
AFTER = [(False, None), (True, None), (False, "relu"), (True, "relu"), (True, "silu")]
SPOILS = [float("nan"), float("inf"), float("-inf"), 1e30]


def padded(rows):
    """A batch norm whose first rows are real."""
    valid = torch.tensor(rows, device=DEVICE)
    return lambda *args: batch_norm(*args, BACKEND, valid)


def spoiled(given, rows):
    """The same, and in other rows what gets into every sum."""
    found = [t.clone() for t in given]
    for tensor in found:
        tensor[rows:] = torch.tensor(SPOILS).repeat(C // len(SPOILS)).to(tensor)
    return found


def padded_step(norm, given, after, rows):
    """`step` without the rows of padding, which are 0."""
    found = step(padded(rows), norm, spoiled(given, rows), after)
    for i, tensor in enumerate(found):
        if tensor.shape == given[0].shape:
            assert not tensor[rows:].any()
            found[i] = tensor[:rows]
    return found


def check_step(norm, given, after, rows):
    """As accurate as torch's in float32 of the real rows alone."""
    real = [t[:rows] for t in given]
    exact_norm, plain_norm = copy.deepcopy(norm).double(), copy.deepcopy(norm)
    exact = step(whole.plain, exact_norm, [t.double() for t in real], after)
    rough = step(whole.plain, plain_norm, [t.float() for t in real], after)
    found = padded_step(norm, given, after, rows)
    for one, other, third in zip(found, exact, rough, strict=True):
        noise = plain_error(third, other, one.dtype)
        assert_as_accurate(one, other, noise + noise.max())


@pytest.mark.parametrize("rows", REAL)
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_accurate_as_torch(dtype, training, after, rows):
    check_step(norm_of(C).train(training), rows_of(dtype, C, N), after, rows)


@pytest.mark.skipif(not BY_KERNELS, reason="torch's own norm adds in another order")
@pytest.mark.parametrize("rows", SAME_PARTS)
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_the_real_rows_alone(dtype, training, after, rows):
    norm, given = norm_of(C).train(training), rows_of(dtype, C, N)
    other = copy.deepcopy(norm)
    found = padded_step(norm, given, after, rows)
    same(found, step(whole.ours, other, [t[:rows] for t in given], after))
    same(norm.state_dict(), other.state_dict())


@pytest.mark.parametrize("name", whole.OPTIONS)
@pytest.mark.parametrize(("rows", "size"), [(0, N), (1, N), (0, 0)])
def test_levels_that_are_empty(name, rows, size):
    """Without a real row running statistics stay, as torch's do; of one all are finite.

    Seen red with: sums that are divided by 0.
    """
    norm, given = norm_of(C, **dict(whole.OPTIONS[name])), rows_of(torch.float32, C, size)
    before = {n: t.clone() for n, t in norm.named_buffers() if n != "num_batches_tracked"}
    found = step(padded(rows), norm, spoiled(given, rows), (True, "relu"))
    assert all(bool(t.isfinite().all()) for t in (*found, *norm.buffers()))
    if not rows:
        gradients = found[: 3 + len(list(norm.parameters()))]
        assert not any(bool(t.any()) for t in gradients)
        same({n: t for n, t in norm.named_buffers() if n in before}, before)


@pytest.mark.parametrize("name", whole.OPTIONS)
def test_options(name):
    """Steps of training with other rows each, then one of evaluation."""
    norm, given = norm_of(C, **dict(whole.OPTIONS[name])), rows_of(torch.float32, C, N)
    for rows, training in ((40, True), (30, True), (10, False)):
        count = norm.num_batches_tracked
        expected = None if count is None else count + training
        check_step(norm.train(training), given, (True, "relu"), rows)
        same(norm.num_batches_tracked, expected)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "residual"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_gradient_alone(activation, training, wanted):
    """The same as beside the others."""
    norm = norm_of(C).train(training)
    x, residual, grad = spoiled(rows_of(torch.float32, C, N), 30)
    named = {"x": x, "weight": norm.weight, "bias": norm.bias, "residual": residual}

    def gradients(names):
        for name, tensor in named.items():
            tensor.requires_grad_(name in names)
        y = padded(30)(norm, x, residual, activation)
        found = torch.autograd.grad(y, [named[name] for name in names], grad)
        return dict(zip(names, found, strict=True))

    same(gradients([wanted])[wanted], gradients(list(named))[wanted])


@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_gradients(training):
    """As accurate as torch's of the real rows; those of padding are 0."""
    given = rows_of(torch.float32, C, N)
    real = [t[:30] for t in given]
    exact = second(whole.plain, training, real, torch.float64)
    rough = second(whole.plain, training, real, torch.float32)
    found = second(padded(30), training, spoiled(given, 30), torch.float32)
    for one, other, third in zip(found, exact, rough, strict=True):
        assert not one[30:].any()
        noise = plain_error(third, other, torch.float32)
        assert_as_accurate(one[:30], other, noise + noise.max())


@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_derivatives(training):
    """Of all rows, padding too."""
    norm = nn.BatchNorm1d(3, momentum=0.0).double().to(DEVICE).train(training)
    x, residual, _ = (t.requires_grad_() for t in rows_of(torch.float64, 3, 7))

    def function(x, residual):
        return padded(4)(norm, x, residual, "silu")

    assert torch.autograd.gradcheck(function, (x, residual))
    assert torch.autograd.gradgradcheck(function, (x, residual))


@pytest.mark.parametrize("training", [True, False])
def test_the_host_does_not_read_the_number(training):
    norm, given = norm_of(C).train(training), rows_of(torch.float32, C, N)
    step(padded(30), norm, given, (True, "relu"))  # kernels are compiled
    function = padded(30)
    assert not steps(lambda: step(function, norm, given, (True, "relu")))
