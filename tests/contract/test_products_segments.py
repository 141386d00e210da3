"""The contract of reductions over segments; the cases are in tests.cases.segments.

Seen red with: the last of equal rows taken, NaN lost where it comes first, an all -inf segment
taken for an empty one, a hub's pieces numbered as rows, and a mean's sum formed in float16.
"""

import functools

import numpy as np
import pytest
import torch

import torchweft
from tests.cases import segments
from tests.cases.segments import REDUCTIONS, segment_reference
from tests.conftest import BACKENDS, INTERPRETED
from torchweft import products
from torchweft.errors import DTypeError, IndexRangeError, ShapeError
from torchweft.products.segments.operator import mean
from torchweft.testing.contract import (
    Setting,
    assert_same_bits,
    check_index_types,
    check_layouts,
    check_repeatable,
    check_values,
)
from torchweft.testing.doors import DOOR_CHECKS, check_autocast

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SUITE = segments.suite()
DOORS = segments.door_cases()
CASES = SUITE.full[2:5] if INTERPRETED else SUITE.full

kernels = pytest.mark.kernels


def reduce(name, *args, **kwargs):
    return getattr(products, f"segment_{name}")(*args, **kwargs)


def named(case):
    return case.name


@kernels
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SUITE.cases, ids=named)
def test_values_and_derivatives(case, dtype, backend):
    order = 1 if INTERPRETED or dtype != torch.float32 else 2
    check_values(case, Setting(dtype=dtype, backend=backend, order=order))


@kernels
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize("check", [check_layouts, check_repeatable, check_index_types])
def test_promises(check, case, backend):
    check(case, Setting(backend=backend, order=1))


@pytest.mark.skipif(INTERPRETED, reason="the doors are checked without TRITON_INTERPRET")
@pytest.mark.parametrize("case", DOORS, ids=named)
@pytest.mark.parametrize("check", [c for c in DOOR_CHECKS if c is not check_autocast])
@pytest.mark.singly
def test_door(check, case):
    check(case)


def test_autocast_leaves_rows_as_torch_does():
    x, index = torch.ones(3, 2, dtype=torch.bfloat16), torch.tensor([0, 0, 1])
    with torch.autocast("cpu", torch.bfloat16):
        assert reduce("sum", x.float(), index).dtype == reduce("softmax", x, index).dtype
        assert reduce("softmax", x, index).dtype == torch.float32


@kernels
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_segments_without_rows(name, backend):
    """In the middle, at the end, everywhere, and no segments at all."""
    for count, tables in [
        (3, {"index": torch.tensor([3, 0, 3]), "num_segments": 5}),
        (3, {"indptr": torch.tensor([0, 0, 2, 2, 3, 3])}),
        (0, {"index": torch.zeros(0, dtype=torch.int64), "num_segments": 2}),
        (0, {"indptr": torch.tensor([0])}),
    ]:
        x = torch.arange(1.0, 2 * count + 1).reshape(count, 2).requires_grad_()
        z = reduce(name, x, **tables, backend=backend)
        if name != "softmax" and tables.get("indptr", torch.zeros(2)).numel() > 1:
            expected = segment_reference(name, x, **tables).detach()
            assert_same_bits(z.detach(), expected, f"{name} of {tables}")
        (gradient,) = torch.autograd.grad(z.sum(), x)
        assert gradient.shape == x.shape
        assert not gradient.isnan().any()


NAN, INF = float("nan"), float("inf")


@kernels
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_numbers_that_are_not_finite(name, backend):
    """As torch's own reduction of each segment has them."""
    rows = [[NAN, 1], [1, NAN], [2, NAN], [-INF, INF], [-INF, 3], [INF, -INF], [0, -INF]]
    x, indptr = torch.tensor(rows), torch.tensor([0, 3, 5, 7])
    for columns in (x, *x.split(1, 1), x.repeat(1, 20)):  # loops of one, of few and of many
        exact = segment_reference(name, columns, indptr=indptr)
        for places in (False, True):
            given = columns.clone().requires_grad_(places)
            found = reduce(name, given, indptr=indptr, backend=backend)
            assert_same_bits(found.detach(), exact, name)


@kernels
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_of_equal_rows_has_the_gradient(backend):
    x = torch.tensor([[1.0], [2.0], [-INF], [2.0], [-INF], [NAN], [NAN]], requires_grad=True)
    index = torch.tensor([0, 0, 2, 0, 2, 1, 1])
    for name, first in (("max", [1, 5, 2]), ("min", [0, 5, 2])):
        z = reduce(name, x, index, backend=backend)
        (gradient,) = torch.autograd.grad(z, x, torch.tensor([[1.0], [2.0], [3.0]]))
        expected = torch.zeros(7, 1)
        expected[first, 0] = torch.tensor([1.0, 2.0, 3.0])
        assert_same_bits(gradient, expected, name)
    hub = torch.zeros(600, 1)
    hub[[417, 500]] = 1.0
    z = products.segment_max(hub.requires_grad_(), torch.zeros(600).long(), backend=backend)
    (gradient,) = torch.autograd.grad(z.sum(), hub)
    assert gradient.nonzero().tolist() == [[417, 0]]


@kernels
@pytest.mark.skipif(not INTERPRETED, reason="a property of the kernel")
@pytest.mark.parametrize("rows", [9, 600])
def test_places_of_extremes_are_stored_for_gradients_alone(rows):
    """Without gradients the values have the same bits, and z is all that is written."""
    x, index = torch.randn(rows, 3, requires_grad=True), torch.arange(rows) // 300
    call = functools.partial(products.segment_max, num_segments=2, backend="triton")
    z = call(x, index)
    with torch.no_grad():
        assert_same_bits(call(x, index), z.detach(), "without gradients")
        moved = torchweft.explain(call, x, index).bytes_min
    more = torchweft.explain(call, x, index).bytes_min - moved
    assert more == 8 * z.numel()


@kernels
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_integers(dtype, backend):
    x = torch.tensor([[100, 3], [100, 1], [7, 5]]).to(dtype)
    indptr, index = torch.tensor([0, 2, 2, 3]), torch.tensor([0, 0, 2])
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    total = torch.tensor(200).to(dtype).item()
    for tables in ({"indptr": indptr}, {"index": index}):
        call = functools.partial(reduce, x=x, **tables, backend=backend)
        assert call("sum").dtype == dtype
        assert call("sum").tolist() == [[total, 4], [0, 0], [7, 5]]
        assert call("max").tolist() == [[100, 3], [least, least], [7, 5]]
        assert call("min").tolist() == [[100, 1], [most, most], [7, 5]]
    for name in ("sum", "max", "min"):
        assert reduce(name, x[:0], index[:0], num_segments=2, backend=backend).dtype == dtype


@kernels
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mean_stays_in_the_range_of_its_rows(backend):
    x = torch.full((4, 1), 60_000.0, dtype=torch.float16)
    found = products.segment_mean(x, torch.zeros(4, dtype=torch.int64), backend=backend)
    assert_same_bits(found, x[:1], "the mean of equal rows")


def test_a_table_that_changes_is_seen():
    """NumPy writes to its memory: no version of the tensor tells."""
    buffer = np.array([0, 0, 1])
    index, x = torch.from_numpy(buffer), torch.tensor([1.0, 2.0, 4.0])
    for name in REDUCTIONS:
        buffer[:] = [0, 0, 1]
        reduce(name, x, index, num_segments=2)
        buffer[:] = [1, 1, 0]
        expected = segment_reference(name, x, index, num_segments=2)
        assert_same_bits(reduce(name, x, index, num_segments=2), expected, name)


def test_graph_attention_has_no_array_of_edges_times_channels():
    """alpha = softmax of the scores of a node's edges; z = Σ alpha · x[src], for several heads."""
    generator = torch.Generator().manual_seed(0)
    heads, nodes, edges, channels = 2, 40, 1200, 64
    src, dst = torch.randint(0, nodes, (2, edges), generator=generator)
    x = torch.randn(heads, nodes, channels, generator=generator, dtype=torch.float64)
    scores = torch.randn(edges, heads, generator=generator, dtype=torch.float64)
    leaves = [x.requires_grad_(), scores.requires_grad_()]

    def attention(x, scores):
        alpha = products.segment_softmax(scores, dst, num_segments=nodes)
        return products.indexed_vecsca_scale_gather(
            x, alpha.T, index1=src, index_out=dst, out_size=nodes
        )

    def loop(x, scores):
        rows = torch.stack(
            [
                scores[dst == m].softmax(0).T.unsqueeze(1) @ x[:, src[dst == m]]
                for m in range(nodes)
            ],
            dim=1,
        )
        return rows.squeeze(2)

    results = []
    for function in (attention, loop):
        z = function(*leaves)
        first = torch.autograd.grad(z.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        results.append([z, *first, *second])
    for ours, theirs in zip(*results, strict=True):
        error = (ours - theirs).abs().max() / theirs.abs().max()
        assert error < edges * torch.finfo(torch.float64).eps
    with torch.no_grad():
        report = torchweft.explain(attention, x.float(), scores.float())
    room = max(launch.workspace_bytes for launch in report.launches)
    assert room < edges * channels * 4


def test_errors():
    x, index = torch.ones(3, 2), torch.tensor([0, 2, 1])
    indptr = torch.tensor([0, 3])
    for error, text, arguments in [
        (ShapeError, "x is a number: it must be", (torch.tensor(1.0), index)),
        (DTypeError, r"x is torch.complex64: it must be float64, .* Convert", (x + 0j, index)),
        (ShapeError, "index and indptr are both None: one of them", (x,)),
        (ShapeError, "index and indptr were given: one of them", (x, index, indptr)),
        (DTypeError, r"index is torch.float32: it must be int64 or int32. Conv", (x, index * 1.0)),
        (
            ShapeError,
            r"index is \(3, 1\): it must have one dimension.*scatter",
            (x, index[:, None]),
        ),
        (ShapeError, "index has 2 entries and x 3 rows: there must be one", (x, index[:2])),
        (ShapeError, "indptr is empty: it must have M.1 bounds", (x, None, indptr[:0])),
        (ShapeError, "num_segments is 2 but indptr has bounds of 1 seg", (x, None, indptr, 2)),
        (ShapeError, "num_segments is -1: it must be 0 or more", (x, index, None, -1)),
        (IndexRangeError, r"index\[1\] is 2 but there are 2 segments.*0\.\.1", (x, index, None, 2)),
        (IndexRangeError, r"index\[0\] is -1 but there are 2 segments", (x, index - 1)),
        (
            IndexRangeError,
            r"indptr decreases at indptr\[2\].*not decr",
            (x, None, indptr.repeat(2)),
        ),
        (IndexRangeError, r"indptr runs from 0 to 6 and x has 3 rows", (x, None, 2 * indptr)),
    ]:
        with pytest.raises(error, match=text):
            products.segment_sum(*arguments)
    with pytest.raises(DTypeError, match=r"x is torch.int64: it must be float64"):
        products.segment_mean(index, index)
    with pytest.raises(IndexRangeError, match=r"runs from 0 to 2 and x has 3 rows.*from 0 to 3"):
        products.segment_softmax(x, indptr=torch.tensor([0, 2]))
    products.segment_sum(x, indptr=torch.tensor([0, 2]))
    with pytest.raises(Exception, match=r"num_segments is None inside torch.compile"):
        torch.compile(products.segment_sum, backend="eager", fullgraph=True)(x, index)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_ten_million_edges(backend):
    """A hub of a million edges, nodes without any; sums of small integers are exact."""
    if INTERPRETED:
        pytest.skip("an interpreted program takes a millisecond")
    edges, nodes = 10_000_000, 300_000
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, nodes - 1000, (edges,), generator=generator)
    index[::10] = 7
    x = torch.randint(-8, 8, (edges, 1), generator=generator)
    z = reduce("sum", x.float(), index, num_segments=nodes, backend=backend)
    exact = torch.zeros(nodes, 1, dtype=torch.int64).index_add(0, index, x)
    assert_same_bits(z, exact.float(), "sums")
    rows = x.float().requires_grad_()
    greatest = reduce("max", rows, index, num_segments=nodes, backend=backend)
    expected = torch.full((nodes, 1), -INF).scatter_reduce(0, index[:, None], x.float(), "amax")
    assert_same_bits(greatest.detach(), expected, "maxima")
    (gradient,) = torch.autograd.grad(greatest[index.unique()].sum(), rows)
    assert_same_bits(gradient.sum(), torch.tensor(float(len(index.unique()))), "one for each")
    shares = reduce("softmax", x.double(), index, num_segments=nodes, backend=backend)
    whole = reduce("sum", shares, index, num_segments=nodes, backend=backend)
    error = (whole[index.unique()] - 1).abs().max()
    assert error < edges * torch.finfo(torch.float64).eps


def test_the_operator_of_means_has_the_gradient_of_its_counts():
    """torch.library.opcheck asks for it; seen red with: none."""
    index = torch.tensor([1, 0, 1, 3, 1])
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([[1.0], [3.0], [1.0], [1.0]], dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, counts: mean(x, counts, None, index, 4, None), (x, counts))
    torch.autograd.gradcheck(lambda c: mean(x.detach(), c, None, index, 4, None), counts)
