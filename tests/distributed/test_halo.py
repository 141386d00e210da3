"""Rows of other ranks: values, sums and gradients of every order are those of one process.

Seen red with: received rows left in the order of their owners, the sum at the owner of the last
rank alone, the agreement left out (a hang).
"""

import functools

import pytest
import torch

from tests.ranks import run
from torchweft.distributed import Halo
from torchweft.distributed.agreement import agree
from torchweft.errors import DTypeError, IndexRangeError, ShapeError

N = 23
SIZES = [2, 3, 4]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@functools.cache
def parts(size, seed=0):
    """(own, needed) of each rank: random owners; the last rank owns nothing, and all read."""
    generator = torch.Generator().manual_seed(seed)
    owner = torch.randint(0, max(size - 1, 1), (N,), generator=generator)
    found = []
    for rank in range(size):
        own = (owner == rank).nonzero()[:, 0]
        own = own[torch.randperm(len(own), generator=generator)]
        others = (owner != rank).nonzero()[:, 0]
        others = others[torch.randperm(len(others), generator=generator)]
        found.append((own, others[: len(others) * 2 // 3]))
    return found


def rows(dtype=torch.float64, width=(3, 2)):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, *width, generator=generator, dtype=torch.float64).to(dtype)


def of_both(own, needed):
    return torch.cat([own, needed])


def values(rank, size, group, dtype):
    own, needed = parts(size)[rank]
    halo, x = Halo(own, needed, group), rows(dtype)
    first = halo(x[own])
    assert first.equal(x[of_both(own, needed)])
    assert halo(x[own]).equal(first)
    overlapped = halo.finish(halo.begin(x[own]))
    assert overlapped.equal(first)
    return halo.add(first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_values_and_the_transpose(size, dtype):
    found, x = run(values, size, dtype), rows(dtype)
    for rank, (own, _) in enumerate(parts(size)):
        readers = sum((needed == own[:, None]).any(1).long() for _, needed in parts(size))
        exact = x[own].double() * (1 + readers)[:, None, None]
        if dtype is torch.float64:
            torch.testing.assert_close(found[rank], exact, rtol=0, atol=0)
        bound = 2 * torch.finfo(dtype).eps * exact.abs()
        assert ((found[rank].double() - exact).abs() <= bound).all()


def scores(x, weight):
    """A function of all rows with derivatives of every order."""
    return (x.sin() * weight).sum(tuple(range(1, x.dim())))


def gradients(rank, size, group, overlapped):
    own, needed = parts(size)[rank]
    halo = Halo(own, needed, group)
    weight = rows(width=(3, 2)).cos()
    x = rows()[own].requires_grad_()
    both = halo.finish(halo.begin(x)) if overlapped else halo(x)
    loss = scores(both, weight[of_both(own, needed)]).square().sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(3).sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.square().sum(), x)
    return [t.detach() for t in (first, second, third)]


def whole(size):
    """The same in one process: every rank's loss, of the rows that it reads."""
    x, weight = rows().requires_grad_(), rows(width=(3, 2)).cos()
    losses = [
        scores(x[of_both(*part)], weight[of_both(*part)]).square().sum() for part in parts(size)
    ]
    (first,) = torch.autograd.grad(sum(losses), x, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(3).sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.square().sum(), x)
    return [t.detach() for t in (first, second, third)]


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_three_orders(size, overlapped):
    found, expected = run(gradients, size, overlapped), whole(size)
    for rank, (own, _) in enumerate(parts(size)):
        for ours, exact in zip(found[rank], expected, strict=True):
            # a few hundred roundings of float64 in each order
            torch.testing.assert_close(ours, exact[own])


def other_kinds(rank, size, group):
    own, needed = parts(size)[rank]
    halo, both = Halo(own, needed, group), of_both(own, needed)
    for x in (torch.arange(N), torch.arange(N) % 2 == 0, rows() + 1j * rows(), rows()[..., :0]):
        assert halo(x[own]).equal(x[both])
    mapped = torch.vmap(halo, in_dims=1, out_dims=1)(rows()[own])
    assert mapped.equal(rows()[both])


def test_other_dtypes_and_vmap():
    run(other_kinds, 3)


def build(rank, size, group, own, needed):
    try:
        Halo(own[rank], needed[rank], group)
    except (IndexRangeError, ShapeError, DTypeError) as error:
        return type(error), str(error), agree("after", dict, group)
    return None


long = functools.partial(torch.tensor, dtype=torch.int64)
FAULTS = {
    "twice needed": (
        [long([0]), long([1])],
        [long([1, 1]), long([])],
        "rank 0: needed holds row 1",
    ),
    "own": (
        [long([0]), long([1])],
        [long([0]), long([])],
        "rank 0: needed holds row 0, which this",
    ),
    "nobody's": (
        [long([0]), long([1])],
        [long([]), long([5])],
        "rank 1: needed holds row 5, which no",
    ),
    "two owners": (
        [long([0, 4]), long([4])],
        [long([]), long([])],
        "row 4 is owned more than once",
    ),
    "floats": (
        [torch.ones(1), long([1])],
        [long([]), long([])],
        "rank 0: global_ids holds torch.float",
    ),
    "a matrix": ([long([0]), long([[1]])], [long([]), long([])], "rank 1: global_ids is (1, 1)"),
    "negative": ([long([0]), long([-1])], [long([]), long([])], "rank 1: global_ids holds -1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_one_rank_are_told_on_all(fault):
    own, needed, text = FAULTS[fault]
    first, second = run(build, 2, own, needed)
    assert first == second
    assert text in first[1]


def call(rank, size, group, shapes, dtypes):
    halo = Halo(*parts(size)[rank], group)
    with pytest.raises(ShapeError) as raised:
        halo(
            torch.zeros(
                len(parts(size)[rank][0]) + shapes[rank][0], *shapes[rank][1:], dtype=dtypes[rank]
            )
        )
    x = rows()[parts(size)[rank][0]]
    assert halo(x).equal(rows()[of_both(*parts(size)[rank])])  # the group stays usable
    return str(raised.value)


F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize(
    ("shapes", "dtypes", "text"),
    [
        ([(0, 3), (0, 4)], [F32, F32], "shape of a row differs between the ranks, rank 0 has (3,)"),
        ([(0, 3), (0, 3)], [F32, F64], "dtype differs between the ranks, rank 0 has torch.float32"),
        ([(0, 3), (1, 3)], [F32, F32], "rank 1: halo(x): the rows are (1, 3): this rank has 0"),
    ],
)
def test_calls_that_differ_are_told_before_anything_is_sent(shapes, dtypes, text):
    first, second = run(call, 2, shapes, dtypes)
    assert first == second
    assert text in first


def test_one_rank_needs_no_group():
    halo, x = Halo(torch.arange(3), torch.arange(0)), torch.randn(3, 2, requires_grad=True)
    assert halo(x) is x
    assert halo.add(x) is x
    with pytest.raises(ShapeError, match=r"this rank has 3"):
        halo(x[:2])
