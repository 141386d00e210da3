"""The stand-in for torch_scatter: its names, its conventions of shapes and `out=`, its results.

Expected numbers are loops over the entries.  The original's own tests (1,388 of them) were run
beside it by hand.  Seen red with: places numbered in the joined table, bounds of one list read into
the next, and a mean of integers rounded to zero.
"""

import itertools

import pytest
import torch

from torchweft.compat import torch_scatter
from torchweft.errors import DTypeError, ShapeError
from torchweft.testing.contract import assert_same_bits

NAMES = """
scatter_sum scatter_add scatter_mul scatter_mean scatter_min scatter_max scatter
segment_sum_csr segment_add_csr segment_mean_csr segment_min_csr segment_max_csr segment_csr
gather_csr
segment_sum_coo segment_add_coo segment_mean_coo segment_min_coo segment_max_coo segment_coo
gather_coo
scatter_std scatter_logsumexp scatter_softmax scatter_log_softmax
__version__ utils composite
"""
"""Public names of torch_scatter 2.1.2 and of its modules."""


def test_every_public_name_is_there_or_told():
    for name in NAMES.split():
        assert getattr(torch_scatter, name)
    for name in ("testing", "placeholder", "cuda_version"):
        with pytest.raises(NotImplementedError, match=rf"torch_scatter\.{name} is asked for"):
            getattr(torch_scatter, name)
    with pytest.raises(AttributeError, match="has no attribute 'scatter_median'"):
        _ = torch_scatter.scatter_median


SHAPES = [
    ((6,), (6,), 0),
    ((6, 3), (6,), 0),
    ((2, 6, 3), (6,), 1),
    ((2, 6), (6,), -1),
    ((2, 6), (2, 6), -1),
    ((2, 6, 3), (2, 6), 1),
    ((2, 6, 3), (2, 1, 6), -1),
    ((2, 6, 3), (2, 6, 3), 1),
]
"""Of src and of the index, and dim; an index of other shapes is broadcast."""


def loop(src, index, dim, size, kind):
    """(result, place), one number after the other, with 0 where there is none."""
    src, index = src.movedim(dim, 0), index.movedim(dim, 0)
    shape = (size, *src.shape[1:])
    result, place = torch.zeros(shape, dtype=src.dtype), torch.full(shape, src.shape[0])
    columns = itertools.product(*map(range, src.shape[1:]))
    for column, m in itertools.product(columns, range(size)):
        rows = [t for t in range(src.shape[0]) if index[(t, *column)] == m]
        values = torch.stack([src[(t, *column)] for t in rows]) if rows else src.new_zeros(1)
        if kind in ("min", "max"):
            found, at = getattr(values, kind)(0)
            place[(m, *column)] = rows[int(at)] if rows else src.shape[0]
        else:
            found = getattr(values, {"mul": "prod"}.get(kind, kind))(0)
        result[(m, *column)] = 1 if kind == "mul" and not rows else found
    return result.movedim(0, dim), place.movedim(0, dim)


@pytest.mark.parametrize("kind", ["sum", "mul", "mean", "min", "max"])
@pytest.mark.parametrize(("shape", "of_index", "dim"), SHAPES)
def test_scatter_in_every_shape(kind, shape, of_index, dim):
    generator = torch.Generator().manual_seed(len(kind) + sum(shape))
    src = torch.randint(-8, 8, shape, generator=generator).double()
    if of_index == (2, 1, 6):
        src = src.transpose(1, 2)
    index = torch.randint(0, 4, of_index, generator=generator)
    full = torch_scatter.utils.broadcast(index, src, dim)
    expected, place = loop(src, full, dim, 5, kind)
    found = getattr(torch_scatter, f"scatter_{kind}")(src, index, dim, dim_size=5)
    if kind in ("min", "max"):
        found, at = found
        assert_same_bits(at, place, "the first extreme")
    error = (found - expected).abs().max()
    assert error <= 4 * torch.finfo(torch.float64).eps * expected.abs().max()
    assert_same_bits(torch_scatter.scatter(src, index, dim, dim_size=5, reduce=kind), found, kind)


@pytest.mark.parametrize("kind", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize(("shape", "dim"), [((0, 6), -1), ((2, 0), -1), ((2, 6, 0), 1)])
def test_an_index_without_numbers(kind, shape, dim):
    index = torch.zeros(shape, dtype=torch.int64)
    found = torch_scatter.scatter(torch.ones(shape), index, dim, dim_size=5, reduce=kind)
    size = [*shape]
    size[dim] = 5
    assert_same_bits(found, torch.zeros(size), kind)


@pytest.mark.parametrize("kind", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_segments_are_scatters_of_sorted_rows(kind, lead):
    src = torch.randint(-8, 8, (2, 6, 3)) if lead else torch.randint(-8, 8, (6, 3))
    dim = len(lead)
    index = torch.tensor([0, 0, 1, 1, 1, 3])
    indptr = torch.tensor([0, 2, 5, 5, 6])
    if lead:
        index = torch.stack([index, torch.tensor([0, 1, 1, 2, 3, 3])])
        indptr = torch.stack([indptr, torch.tensor([0, 1, 3, 4, 6])])
    full = torch_scatter.utils.broadcast(index, src, dim)
    for given in (src, src.double()):
        expected, coo, csr = (
            getattr(torch_scatter, name.format(kind))(given, *arguments)
            for name, arguments in (
                ("scatter_{}", (full, dim)),
                ("segment_{}_coo", (index,)),
                ("segment_{}_csr", (indptr,)),
            )
        )
        for found in (coo, csr):
            pairs = (
                [(found, expected)] if torch.is_tensor(found) else zip(found, expected, strict=True)
            )
            for ours, theirs in pairs:
                assert_same_bits(ours, theirs, kind)


def test_what_out_holds():
    src, index = torch.tensor([5.0, 1.0, 7.0, 3.0]), torch.tensor([0, 0, 2, 2])
    indptr = torch.tensor([0, 2, 2, 4])
    t = torch_scatter
    for function, arguments, expected, places in [
        (t.scatter_sum, (index, 0), [16, 10, 20], None),
        (t.scatter_mul, (index, 0), [50, 10, 210], None),
        (t.scatter_mean, (index, 0), [8, 10, 10], None),
        (t.scatter_max, (index, 0), [10, 10, 10], [4, 4, 4]),
        (t.scatter_min, (index, 0), [1, 10, 3], [1, 4, 3]),
        (t.segment_sum_coo, (index,), [16, 10, 20], None),
        (t.segment_mean_coo, (index,), [8, 10, 10], None),
        (t.segment_min_coo, (index,), [1, 10, 3], [1, 4, 3]),
        (t.segment_sum_csr, (indptr,), [6, 0, 10], None),
        (t.segment_max_csr, (indptr,), [5, 0, 7], [0, 4, 2]),
    ]:
        out = torch.full((3,), 10.0)
        found = function(src, *arguments, out=out)
        if places is not None:
            found, place = found
            assert place.tolist() == places, function.__name__
        assert found is out
        assert out.tolist() == expected, function.__name__
    assert t.scatter_mean(torch.tensor([-1, -2]), torch.tensor([0, 0])).tolist() == [-2]


def test_gathers_and_their_gradients():
    src = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[0, 0, 2, 2], [0, 1, 1, 2]])
    indptr = torch.tensor([[0, 2, 2, 4], [0, 1, 3, 4]])
    expected = torch.stack([row[at] for row, at in zip(src, index, strict=True)])
    for found in (torch_scatter.gather_coo(src, index), torch_scatter.gather_csr(src, indptr)):
        assert_same_bits(found.detach(), expected.detach(), "gathered")
    for function, table in ((torch_scatter.gather_coo, index), (torch_scatter.gather_csr, indptr)):
        torch.autograd.gradgradcheck(lambda x, f=function, t=table: f(x, t).square(), (src,))
    assert torch_scatter.gather_csr(torch.tensor([5, 6]), torch.tensor([0, 2, 3])).tolist() == [
        5, 5, 6,
    ]  # fmt: skip


@pytest.mark.parametrize("of_index", [(6,), (2, 6)])
def test_composites(of_index):
    generator = torch.Generator().manual_seed(0)
    src = torch.randn(2, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    index = torch.randint(0, 3, of_index, generator=generator)
    full = index.expand(2, 6)
    eps = torch.finfo(torch.float64).eps
    t = torch_scatter
    for row, at, softmax, logarithm, total, spread in zip(
        src, full,
        t.scatter_softmax(src, index), t.scatter_log_softmax(src, index),
        t.scatter_logsumexp(src, index, dim_size=4), t.scatter_std(src, index, dim_size=4),
        strict=True,
    ):  # fmt: skip
        assert total[3] == spread[3] == 0
        for m in set(at.tolist()):
            here = row[at == m]
            for ours, theirs in (
                (softmax[at == m], here.softmax(0)),
                (logarithm[at == m], here.log_softmax(0)),
                (total[m], here.logsumexp(0)),
            ):
                assert (ours - theirs).abs().max() <= 16 * eps * theirs.abs().max()
            n = max(len(here) - 1, 1)
            squares = (here - here.mean()).square().sum()
            assert (spread[m] - (squares / (n + 1e-6)).sqrt()).abs() <= 16 * eps * here.abs().max()
    torch.autograd.gradgradcheck(lambda x: t.scatter_log_softmax(x, index), (src,))
    out = torch.tensor([[-10.0, -10.0]])
    assert t.scatter_logsumexp(torch.tensor([[-1.0, -50.0]]), torch.tensor([0, 0]), out=out) is out
    assert out[0, 1] == -10
    assert out[0, 0] == torch.tensor([-10.0, -1.0]).logsumexp(0)


def test_errors():
    src, index = torch.ones(4, 3), torch.tensor([0, 1, 0])
    with pytest.raises(ShapeError, match=r"index is \(3,\) and src \(4, 3\): the index must"):
        torch_scatter.scatter_sum(src, index, dim=0)
    with pytest.raises(ShapeError, match=r"indptr is \(3, 2\) and src \(4, 3\): its dim"):
        torch_scatter.segment_sum_csr(src, torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(
        ShapeError, match=r"indptr is \(1, 1, 2\) and src \(4, 3\): it must have no"
    ):
        torch_scatter.segment_sum_csr(src, torch.zeros(1, 1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="reduce is 'median': it must be one of sum, add, mul"):
        torch_scatter.scatter(src, index, reduce="median")
    with pytest.raises(
        DTypeError, match=r"src of scatter_softmax is torch.int64: it must have a fl"
    ):
        torch_scatter.scatter_softmax(index, index)
