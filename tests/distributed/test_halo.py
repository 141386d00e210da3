"""Rows of other ranks: values, sums and gradients of every order are those of one process.

Seen red with: received rows left in the order of their owners, the sum at the owner of the last
rank alone, the agreement left out (a hang), a name of torch that warns, second gradients that ranks
without rows do not come to (a hang).
"""

import functools
import warnings

import pytest
import torch

from tests.ranks import in_one_thread, run
from torchweft.core.collectives import gathered, total
from torchweft.distributed import Halo
from torchweft.distributed.agreement import agree
from torchweft.errors import DTypeError, IndexRangeError, ShapeError
from torchweft.testing import assert_as_accurate, plain_error

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
        # copies of one number: a sum in a wider dtype, and two roundings
        assert (
            (found[rank].double() - exact).abs() <= 2 * torch.finfo(dtype).eps * exact.abs()
        ).all()


def scores(x, weight):
    """A function of all rows with derivatives of every order."""
    return (x.sin() * weight).sum(tuple(range(1, x.dim())))


@in_one_thread
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


def whole(size, dtype=torch.float64):
    """The same in one process: every rank's loss, of the rows that it reads."""
    x, weight = rows(dtype).requires_grad_(), rows(width=(3, 2)).cos().to(dtype)
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
    owned = torch.cat([own for own, _ in parts(size)])
    for ours, exact, plain in zip(
        zip(*found, strict=True), expected, whole(size, torch.float32), strict=True
    ):
        noise = plain_error(plain, exact, torch.float64)
        assert_as_accurate(torch.cat(ours), exact[owned], noise)


@in_one_thread
def second_gradient(rank, size, group):
    """Of numbers, one for each row; rank 0 owns none, and no rank but the last reads others."""
    own = torch.arange(max(rank - 1, 0), rank)
    halo = Halo(own, torch.arange(rank - 1 if rank == size - 1 else 0), group)
    x = (1.0 + own.double()).requires_grad_()
    loss = halo.finish(halo.begin(x)).pow(3).sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)[0]


def test_numbers_on_ranks_without_rows():
    none, *found = run(second_gradient, 3)
    assert none.tolist() == []
    assert [rows.tolist() for rows in found] == [[12.0], [12.0]]


@in_one_thread
def totals(rank, size, group):
    """(Σ_r a_r)² of parts that are powers of a parameter, differentiated three times."""
    a = torch.tensor(rank + 1.0, dtype=torch.float64, requires_grad=True)
    value = total(a.pow(3), group).square()
    found = [value]
    for _ in range(3):
        (gradient,) = torch.autograd.grad(found[-1], a, create_graph=True)
        found.append(total(gradient, group))
    return torch.stack(found).detach()


def test_totals_have_the_gradients_of_the_whole():
    """Each order is summed over all parts again, so that every rank's part is in every term."""
    a = torch.arange(1.0, 4, dtype=torch.float64, requires_grad=True)
    expected = [a.pow(3).sum().square()]
    for _ in range(3):
        (gradient,) = torch.autograd.grad(expected[-1], a, create_graph=True)
        expected.append(gradient.sum())
    for found in run(totals, 3):
        assert found.equal(torch.stack(expected).detach())  # integers: exact in any order


def of_every_rank(rank, size, group):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of names that torch gives up
        return gathered(torch.tensor([rank, rank + 0.5]), group)


def test_gathered_by_rank():
    for found in run(of_every_rank, 3):
        assert found.equal(torch.arange(6).view(3, 2) / 2)


def compiled(rank, size, group):
    own, needed = parts(size)[rank]
    halo = Halo(own, needed, group)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(x):
        return halo(x).sin().square().sum()

    x = rows()[own].requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x), x)
    (expected,) = torch.autograd.grad(halo(x).sin().square().sum(), x)
    return gradient, expected


def test_compiled_in_one_graph():
    for gradient, expected in run(compiled, 2):
        assert gradient.equal(expected)


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
        ([(0, 3), (0, 4)], [F32, F32], "the ranks differ in shape of a row, rank 0 has (3,)"),
        ([(0, 3), (0, 3)], [F32, F64], "the ranks differ in dtype, rank 0 has torch.float32"),
        ([(0, 3), (1, 3)], [F32, F32], "rank 1: halo(x): the rows are (1, 3): this rank has 0"),
    ],
)
def test_calls_that_differ_are_told_before_anything_is_sent(shapes, dtypes, text):
    first, second = run(call, 2, shapes, dtypes)
    assert first == second
    assert text in first


def no_rows(rank, size, group):
    own, needed = parts(size)[rank]
    with pytest.raises(DTypeError, match=r"rank 1: halo\(x\): the rows are a NoneType"):
        Halo(own, needed, group)(None if rank else rows()[own])


def test_what_is_no_tensor_is_told_on_all():
    run(no_rows, 2)


def test_one_rank_needs_no_group():
    halo, x = Halo(torch.arange(3), torch.arange(0)), torch.randn(3, 2, requires_grad=True)
    assert halo(x) is x
    assert halo.add(x) is x
    with pytest.raises(ShapeError, match=r"this rank has 3"):
        halo(x[:2])
