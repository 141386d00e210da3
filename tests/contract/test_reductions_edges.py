"""What a row with nothing gives, ties, missing candidates: values exact, gradients exactly 0.

Seen red with: a logarithm of 0 left in the graph, the last index of a tie, a score of −inf that
made the shift −inf, candidates that wrap to index 0, values read as if they were contiguous, one
derivative's launches in the place of another's, and NaN that a minimum passes over.
"""

import itertools
import math

import pytest
import torch

from tests.cases.reductions import _arrays as arrays
from tests.cases.reductions import pairs_of
from tests.conftest import BACKENDS
from torchweft.core.explain import explain
from torchweft.errors import ShapeError
from torchweft.reductions.cluster.sparsity import BlockSparsity
from torchweft.reductions.engine import torch_path as blocked
from torchweft.reductions.engine.reduction import reduce
from torchweft.reductions.formula.derivatives import laplacian
from torchweft.reductions.formula.node import const, node, var
from torchweft.testing.contract import assert_same_bits

pytestmark = pytest.mark.kernels

DTYPES = (torch.float64, torch.float32, torch.float16)
X, Y, W = var(0, 1, 0), var(1, 1, 1), var(2, 2, 1)
NOTHING = {
    "Sum": 0.0,
    "LogSumExp": -math.inf,
    "SumSoftMaxWeight": 0.0,
    "Min": math.inf,
    "Max": -math.inf,
    "KMin": math.inf,
    "ArgMin": -1,
    "ArgMax": -1,
    "ArgKMin": -1,
}
both = pytest.mark.parametrize("backend", BACKENDS)
kinds = pytest.mark.parametrize("kind", NOTHING)


def call(kind, inputs, axis=1, **options):
    weight = W if kind == "SumSoftMaxWeight" else None
    return reduce(kind, X - Y + const(0.5), inputs, axis, weight=weight, k=2, **options)


def inputs(rows, columns, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    draw = [
        torch.randn(n, d, generator=generator) for n, d in ((rows, 1), (columns, 1), (columns, 2))
    ]
    return [a.to(dtype).requires_grad_() for a in draw]


def assert_nothing(out, kind, given):
    assert (out == NOTHING[kind]).all()
    if out.is_floating_point():
        grads = torch.autograd.grad(out, given, torch.ones_like(out), allow_unused=True)
        assert all(g is None or (g == 0).all() for g in grads)


@both
@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_columns(kind, dtype, backend):
    given = inputs(5, 0, dtype)
    out = call(kind, given, backend=backend)
    assert out.shape[0] == 5
    assert_nothing(out, kind, given)


@both
@kinds
def test_no_rows(kind, backend):
    given = inputs(0, 4)
    out = call(kind, given, backend=backend)
    assert out.shape[0] == 0
    if out.is_floating_point():
        grads = torch.autograd.grad(out.sum(), given, allow_unused=True)
        assert all(g is None or (g == 0).all() for g in grads)


@both
@kinds
@pytest.mark.singly  # each item compiles for seconds
def test_uncovered_rows_and_empty_lists(kind, backend):
    """Rows 0, 1, 5, 6 and 12 stand in no block; in the last mask no block has a list."""
    given = inputs(13, 11)
    out = call(kind, given, ranges=arrays("holes"), backend=backend)
    empty = torch.tensor([0, 1, 5, 6, 12])
    assert (out[empty] == NOTHING[kind]).all()
    assert out[2].isfinite().all()
    if out.is_floating_point():
        (gx,) = torch.autograd.grad(
            out[2:5].sum() + out[empty].nan_to_num(0, 0, 0).sum(), given[:1]
        )
        assert gx.isfinite().all()
        assert (gx[empty] == 0).all()
    out = call(kind, given, ranges=arrays("nothing"), backend=backend)
    assert_nothing(out, kind, given)


@both
@kinds
def test_a_smaller_list_than_k(kind, backend):
    given = inputs(3, 1)
    out = call(kind, given, backend=backend)
    if "KMin" in kind:
        assert (out[:, 0] != NOTHING[kind]).all()
        assert (out[:, 1] == NOTHING[kind]).all()


@both
def test_scores_of_minus_infinity_are_nothing(backend):
    scores = torch.tensor([[-math.inf], [2.0], [-math.inf]], requires_grad=True)
    x = torch.zeros(2, 1, requires_grad=True)
    w = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
    nothing = torch.full_like(scores, -math.inf, requires_grad=True)
    assert (reduce("LogSumExp", X + Y, [x, scores], 1, backend=backend) == 2).all()
    for kind in ("LogSumExp", "SumSoftMaxWeight"):
        weight = W if kind == "SumSoftMaxWeight" else None
        for y in (scores, nothing):
            out = reduce(kind, X + Y, [x, y, w], 1, weight=weight, backend=backend)
            grads = torch.autograd.grad(out.sum(), [x, y, w], allow_unused=True)
            assert all(g is None or g.isfinite().all() for g in grads)
        assert (out == NOTHING[kind]).all()


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.singly  # each item compiles for seconds
def test_ties_go_to_the_smallest_index(dtype, backend, monkeypatch):
    """Also of two tiles."""
    monkeypatch.setattr(blocked, "NUMBERS_PER_TILE", 1)
    x = torch.zeros(3, 1, dtype=dtype)
    y = torch.tensor([3, 1, 2, 1, 1, 3, 2, 1], dtype=dtype)[:, None].repeat(20, 1)
    found = reduce("ArgKMin", node("abs", X - Y), [x, y], 1, k=5, backend=backend)
    assert found.tolist() == [[1, 3, 4, 7, 9]] * 3
    assert reduce("ArgMin", Y - X, [x, y], 1, backend=backend).flatten().tolist() == [1] * 3
    assert reduce("ArgMax", Y - X, [x, y], 1, backend=backend).flatten().tolist() == [0] * 3


@both
def test_indices_are_exact_under_ranges(backend):
    """Positions in all of [0, N), whatever the blocks."""
    given = inputs(13, 11)
    found = call("ArgMin", given, ranges=arrays("holes"), backend=backend)
    f = given[0] - given[1].T
    assert found[7:12, 0].tolist() == (f[7:12, 5:9].argmin(1) + 5).tolist()


@both
def test_an_infinite_candidate_is_a_candidate(backend):
    x = torch.full((2, 1), math.inf)
    found = reduce("ArgKMin", X + Y, [x, torch.zeros(3, 1)], 1, k=2, backend=backend)
    assert found.tolist() == [[0, 1]] * 2


@pytest.mark.parametrize("kind", ["Sum", "LogSumExp", "KMin_ArgKMin"])
def test_a_mask_for_each_entry(kind):
    """Each entry equals the call with its own mask; indices are counted in the entry."""
    first, second = (BlockSparsity(arrays(name)) for name in ("whole", "holes"))
    stacked = BlockSparsity.stack([first, second], 13, 11)
    pairs = [inputs(13, 11), [a.flip(0) for a in inputs(13, 11)]]
    both_inputs = [torch.stack(two) for two in zip(*pairs, strict=True)]
    found = call(kind, both_inputs, ranges=stacked, backend=BACKENDS[0])
    each = [
        call(kind, own, ranges=mask, backend=BACKENDS[0])
        for own, mask in zip(pairs, (first, second), strict=True)
    ]
    found, each = ([found], [[a] for a in each]) if kind[0] != "K" else (found, each)
    for out, *own in zip(found, *each, strict=True):
        assert_same_bits(out, torch.stack(own), kind)


def test_parameters_are_the_same_for_entries_with_a_mask_each():
    mask = BlockSparsity(arrays("whole"))
    stacked = BlockSparsity.stack([mask, mask], 13, 11)
    x, y, _ = inputs(13, 11)
    with pytest.raises(ShapeError, match="parameter 2 differs between 2 entries"):
        reduce("Sum", (X - Y) * var(2, 1, 2), [x, y, torch.ones(2, 1).double()], 1, ranges=stacked)


def test_explain_counts_bytes_and_pairs():
    x, y, _ = inputs(13, 11)
    whole = explain(reduce, "Sum", X - Y, [x, y], 1)
    assert whole.bytes_min == 8 * (13 + 11 + 13)
    assert whole.flops == 13 * 11 * 2  # a difference and an addition for each pair
    some = explain(reduce, "Sum", X - Y, [x, y], 1, ranges=arrays("holes"))
    assert some.flops == 2 * int(pairs_of(arrays("holes"), 13, 11).sum())


@both
@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, in the interpreter
@pytest.mark.parametrize("score", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 3])
def test_scores_that_are_no_number_say_so(score, at, backend):
    """Seen red: NaN gave −inf, +inf gave NaN."""
    y = torch.ones(5, 1)
    y[at] = score
    found = reduce("LogSumExp", X + Y, [torch.zeros(2, 1), y], 1, backend=backend)
    assert (found.isnan() if math.isnan(score) else found == score).all()


def rows_of_scores(columns):
    """(rows, columns): pairs of NaN, infinities and numbers, repeated."""
    scores = [math.nan, -math.inf, math.inf, 0.0]
    rows = torch.tensor(list(itertools.product(scores, repeat=2)))
    return rows.repeat_interleave(columns // 2, 1)


MASK = tuple(torch.tensor(t) for t in ([[0, 1]], [2], [[1, 2], [0, 1]], [[0, 2]], [1], [[0, 1]]))


@both
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize(
    ("columns", "step", "ranges"), [(2, 1, None), (2, 2, MASK), (1400, 2, None)]
)
def test_nan_is_where_torch_has_it(columns, step, ranges, backend):
    """First in Min and Max, at its own index; among the K smallest it counts as +∞.

    Red before: the minimum of NaN alone was +inf, beside its index, and NaN beside a number was
    passed over, which torch.min does not do.
    """
    y = rows_of_scores(columns)[::step]
    given = torch.zeros(len(y), 1, 1), y[..., None]

    def found(kind, **options):
        out = reduce(kind, X + Y, given, 1, backend=backend, ranges=ranges, **options)
        return [o[:, 0] for o in (out if isinstance(out, tuple) else (out,))]

    for kind, sign in (("Min", 1), ("Max", -1)):
        best = (-sign * y).sort(dim=1, stable=True, descending=True)
        value, index = (best.values[:, :1] * -sign, best.indices[:, :1])
        assert_equal(found(kind), [value])
        assert_equal([value], [y.amin(1, True) if sign == 1 else y.amax(1, True)])
        assert_equal(found(f"Arg{kind}"), [index])
        assert_equal(found(f"{kind}_Arg{kind}"), [value, index])
    several = y.nan_to_num(math.inf, math.inf, -math.inf).sort(dim=1, stable=True)
    assert_equal(found("KMin_ArgKMin", k=2), [several.values[:, :2], several.indices[:, :2]])
    assert_equal(found("KMin", k=2), [several.values[:, :2]])
    assert_equal(found("ArgKMin", k=2), [several.indices[:, :2]])
    (both_parts,), (logarithm,) = found("Max_SumShiftExp"), found("LogSumExp")
    with_nan = y.isnan().any(1)
    assert (both_parts.isnan() == with_nan[:, None]).all()
    assert (logarithm[:, 0].isnan() == with_nan).all()


def assert_equal(found, expected):
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


@both
def test_one_nan_hides_no_candidate(backend):
    """It stands with +inf, behind every number.  Seen red: a whole tile was lost."""
    y = torch.arange(40.0)[:, None]
    y[7] = math.nan
    found = reduce("ArgKMin", X + Y, [torch.zeros(2, 1), y], 1, k=40, backend=backend)
    assert found.tolist() == [[n for n in range(40) if n != 7] + [7]] * 2


@both
def test_choices_of_numbers_are_exact(backend):
    """Seen red: 5 − 1e10 + 1e10 was 0 in float32, and one_hot of 2.5 went to the even side."""
    y = torch.tensor([[0.5], [2.5]])
    chosen = node("ifelse", X, const(5), const(1e10)) + node("sub", Y, Y)
    assert (reduce("Sum", chosen, [torch.ones(2, 1), y], 1, backend=backend) == 10).all()
    found = reduce(
        "Sum", node("one_hot", Y + X, data=4), [torch.zeros(1, 1), y], 1, backend=backend
    )
    assert found.tolist() == [[0, 1, 0, 1]]


@both
@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy in the interpreter
def test_derivatives_are_those_of_the_branch_that_is_taken(backend):
    """√t where t ≥ 0, else t³: the slope of the other branch is NaN."""
    x = torch.tensor([[-1.0], [4.0]], dtype=torch.float64, requires_grad=True)
    given, t = [x, torch.zeros(1, 1, dtype=torch.float64)], X - Y
    f = node("ifelse", t, node("sqrt", t), t * t * t)
    z = reduce("Sum", f, given, 1, backend=backend)
    (first,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    assert first.tolist() == [[3.0], [0.25]]
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [[-6.0], [-1 / 32]]
    curved = reduce("Sum", laplacian(f, X), given, 1, backend=backend)
    assert curved.tolist() == second.tolist()


LAYOUTS = {
    "contiguous": lambda t: t.clone(),
    "transposed": lambda t: t.T.contiguous().T,
    "not aligned": lambda t: torch.cat([t[:1], t])[1:],
}


@pytest.mark.parametrize("kind", ["Sum", "LogSumExp"])
def test_calls_of_one_kind_in_other_layouts(kind):
    """What is kept of a call holds for all strides and addresses, and for each derivative alone."""
    squares = node("sqdist", var(0, 3, 0), var(1, 3, 1))
    f = node("exp", -squares) * W if kind == "Sum" else -squares + node("sum", W)
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(shape, generator=generator) for shape in ((5, 3), (7, 3), (7, 2))]
    cotangent = torch.randn(5, f.dim, generator=generator)
    expected = {}
    for name, lay in LAYOUTS.items():
        for wanted in ((0,), (1,), (2,), (0, 1, 2)):
            given = [lay(t).requires_grad_(n in wanted) for n, t in enumerate(data)]
            out = reduce(kind, f, given, 1, backend=BACKENDS[-1])
            leaves = [given[n] for n in wanted]
            found = [out, *torch.autograd.grad(out, leaves, lay(cotangent))]
            for one, other in zip(found, expected.setdefault(wanted, found), strict=True):
                assert_same_bits(one, other, f"{name}, gradients of {wanted}")
