"""Random formulas, sizes, batches and blocks by each reduction, against all pairs in float64.

Seen red with: a derivative that is a number, columns of overlapping intervals out of order or
counted once, the gradient of a broadcast batch not summed.
"""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.conftest import INTERPRETED
from torchweft.reductions.engine.reduction import EXPONENTIAL, KINDS, reduce
from torchweft.reductions.formula.named import operations
from torchweft.reductions.formula.node import Node, const, node, reachable, var
from torchweft.reductions.formula.primitives import PRIMITIVES
from torchweft.testing.bounds import assert_as_accurate, plain_error

COMPOSED = operations()

DRAWS = {"torch": 500, "numba": 3, "triton": 15}
ROUNDINGS = 2**10
"""Of the largest number there is: what reordering may change in a formula of a dozen operations."""

WIDEST = 6
EXACT = [kind for kind in KINDS if kind not in EXPONENTIAL]


class Names(NamedTuple):
    """Operations by their number of arguments, and formulas of two that stay in their domain."""

    unary: str
    binary: str
    made: list


SMOOTH = Names(
    "Sin Cos Atan Square Minus SinXDivX SqNorm2 Sum",
    "+ - * SqDist | Atan2",
    [
        lambda f, g: COMPOSED["Exp"](-COMPOSED["SqDist"](f, g)),
        lambda f, g: f / (2 + g * g),
        lambda f, g: COMPOSED["Sqrt"](1 + COMPOSED["SqDist"](f, g)) * f,
        lambda f, g: COMPOSED["Log"](1 + f * f) - COMPOSED["Rsqrt"](2 + g * g),
        lambda f, g: COMPOSED["Powf"](1 + f * f, COMPOSED["Sin"](g)),
    ],
)
STEPS = Names(
    "Abs Sign Step Floor Round ReLU Minus Square Sum Min Max ArgMin ArgMax SqNorm2",
    "+ - * SqDist | < <= == >= !=",
    [
        lambda f, g: COMPOSED["Mod"](f, const(0.5), g),
        lambda f, g: COMPOSED["IfElse"](f, g, const(0.5)),
        lambda f, g: COMPOSED["IfElse"](f, const(1.25), const(2**60)) + g,
        lambda f, g: COMPOSED["Clamp"](f, const(-1), g),
        lambda f, g: COMPOSED["OneHot"](COMPOSED["Elem"](f, 0), 3),
    ],
)
"""Of quarters they are exact, so ties are too."""


class Problem(NamedTuple):
    """A call; `count` (M, N) says how often each pair is listed."""

    kind: str
    f: Node
    weight: Node | None
    tensors: list[torch.Tensor]
    axis: int
    k: int
    ranges: tuple[torch.Tensor, ...] | None
    count: torch.Tensor


def formula(draw, leaves, names, steps):
    pool = list(leaves)
    for _ in range(draw(st.integers(1, steps))):
        f, g, way = (
            draw(st.sampled_from(pool)),
            draw(st.sampled_from(pool)),
            draw(st.integers(0, 5)),
        )
        if way == 0:
            pool.append(COMPOSED[draw(st.sampled_from(names.unary.split()))](f))
        elif way == 1 and f.dim + g.dim <= WIDEST:
            pool.append(COMPOSED["Concat"](f, g))
        elif way == 2:
            start = draw(st.integers(0, f.dim - 1))
            pool.append(COMPOSED["Extract"](f, start, draw(st.integers(1, f.dim - start))))
        elif way == 3 and f.dim * g.dim <= WIDEST:
            pool.append(COMPOSED["TensorProd"](f, g))
        elif f.dim == g.dim or 1 in (f.dim, g.dim):
            binary = [COMPOSED[name] for name in names.binary.split()]
            pool.append(draw(st.sampled_from(names.made if way == 4 else binary))(f, g))
    return pool[-1]


def blocks(draw, rows, columns):
    """Both halves of a mask, and its counts: holes, empty lists, overlaps, blocks in any order."""
    cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=3)))
    own = [[a, b] for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
    own = [block for block in draw(st.permutations(own)) if draw(st.integers(0, 4))]
    interval = st.tuples(st.integers(0, columns), st.integers(0, columns)).map(sorted)
    lists = [draw(st.lists(interval, max_size=3)) for _ in own]
    ends = sorted({0, columns, *(end for listed in lists for pair in listed for end in pair)})
    other = draw(st.permutations(list(itertools.pairwise(ends))))
    turned = [
        [own[c] for c, listed in enumerate(lists) for a, b in listed if a <= first and last <= b]
        for first, last in other
    ]
    count = torch.zeros(rows, columns)
    for (begin, end), listed in zip(own, lists, strict=True):
        for first, last in listed:
            count[begin:end, first:last] += 1
    return (*half(own, lists), *half(other, turned)), count


def half(own, lists):
    rows, intervals = (
        torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
        for pairs in (own, [pair for listed in lists for pair in listed])
    )
    return rows, torch.tensor([len(some) for some in lists], dtype=torch.int64).cumsum(0), intervals


def tensor(draw, batch, shape, *, quarters):
    """Of some of the batch dimensions; contiguous, transposed or expanded."""
    own = tuple(size if draw(st.booleans()) else 1 for size in batch)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    found = torch.randn(*own, *shape, generator=generator, dtype=torch.float64)
    found = (found * 4).round() / 4 if quarters else found
    way = draw(st.integers(0, 3)) if len(shape) > 1 and shape[0] else 0
    if way == 1:
        return found.mT.contiguous().mT
    return found[..., :1, :].expand_as(found) if way == 2 else found


@st.composite
def problems(draw, names, kinds=KINDS, most=40):
    dims = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), min_size=2, max_size=5))
    leaves = [var(n, *dim) for n, dim in enumerate(dims)]
    kind, weight = draw(st.sampled_from(kinds)), None
    f = formula(draw, leaves, names, 6)
    if kind in EXPONENTIAL:
        f = 3 * COMPOSED["Atan"](COMPOSED["Sum"](f))
        if kind == "SumSoftMaxWeight" or draw(st.booleans()):
            weight = formula(draw, leaves, names, 3)
            weight = 1 + weight * weight if kind == "LogSumExp" else weight
    sizes = [draw(st.one_of(st.just(1), st.integers(0, most))) for _ in range(2)]
    batch = draw(st.sampled_from([(), (), (2,), (2, 3), (1,)]))
    shapes = [(*sizes[cat : cat + 1], dim) if cat < 2 else (dim,) for dim, cat in dims]
    tensors = [tensor(draw, batch, shape, quarters=names is STEPS) for shape in shapes]
    used = frozenset().union(*(g.cats for g in (f, weight) if g is not None))
    for cat in {0, 1} - used:  # a variable that says how many there are
        f = node("add", f, var(len(tensors), 1, cat))
        tensors.append(torch.zeros(sizes[cat], 1, dtype=torch.float64))
    ranges, count = blocks(draw, *sizes) if draw(st.booleans()) else (None, torch.ones(sizes))
    k = draw(st.sampled_from([1, 2, 3, 7, most + 5]))
    return Problem(kind, f, weight, tensors, draw(st.integers(0, 1)), k, ranges, count)


def dense(f, tensors, count):
    """f of all pairs, (*batch, M, N, dim), each operation on its own."""
    found = {}
    for n in reachable(f):
        if n.op == "var":
            t, cat = tensors[n.data[0]], n.data[2]
            found[n] = t[..., None, None, :] if cat == 2 else t.unsqueeze(-2 - cat)
        elif n.op == "const":
            found[n] = tensors[0].new_full((1, 1, 1), n.data)
        else:
            data = () if n.data is None else (n.data,)
            found[n] = PRIMITIVES[n.op].value(*(found[a] for a in n.args), *data)
    f = found[f]
    return f.expand(torch.broadcast_shapes(f.shape, (*count.shape, 1)))


def oracle(problem, tensors):
    """The reduction of all pairs, each as often as it is listed."""
    kind, f = problem.kind, dense(problem.f, tensors, problem.count)
    w = (
        torch.ones_like(f)
        if problem.weight is None
        else dense(problem.weight, tensors, problem.count)
    )
    count = problem.count[..., None].to(f.dtype)
    if problem.axis == 0:
        f, w, count = f.transpose(-2, -3), w.transpose(-2, -3), count.transpose(-2, -3)
    if kind == "Sum":
        return [(f * count).sum(-2)]
    return exponential(kind, f, w, count) if kind in EXPONENTIAL else ranked(problem, f, count)


def exponential(kind, f, w, count):
    nothing = f.new_full((*f.shape[:-2], 1, 1), -math.inf)
    top = torch.cat([torch.where(count > 0, f, -math.inf), nothing], -2).amax(-2).detach()
    finite = torch.where(top.isfinite(), top, 0)
    e = (f - finite[..., None, :]).exp() * count
    s, below = (e * w).sum(-2), e.sum(-2)
    some = below > 0
    if kind == "Max_SumShiftExp":
        leading = torch.broadcast_shapes(top.shape[:-1], s.shape[:-1])
        return [torch.cat([top.expand(*leading, 1), s.expand(*leading, -1)], -1)]
    if kind == "SumSoftMaxWeight":
        return [s / torch.where(some, below, 1)]
    return [torch.where(some, torch.where(some, s, 1).log() + finite, -math.inf)]


def ranked(problem, f, count):
    """A column listed r times is r candidates."""
    kind, k = problem.kind, problem.k if "K" in problem.kind else 1
    sign = -1 if "Max" in kind else 1
    listed = torch.arange(1 + int(count.sum().clamp(max=9))) < count  # (M, N, times)
    value = torch.where(listed[..., None], sign * f.unsqueeze(-2), math.inf).flatten(-3, -2)
    index = torch.where(listed, torch.arange(listed.shape[1])[:, None], -1).flatten(-2)
    value = torch.cat(
        [value, value.new_full((*value.shape[:-2], k, value.shape[-1]), math.inf)], -2
    )
    index = torch.cat([index, index.new_full((len(index), k), -1)], -1)
    value, order = value.sort(dim=-2, stable=True)
    index = index[..., None].expand_as(order).gather(-2, order)
    found = [sign * value[..., :k, :], index[..., :k, :]]
    found = [t.squeeze(-1) if f.shape[-1] == 1 else t for t in found]
    if "K" not in kind:
        found = [sign * value[..., 0, :], index[..., 0, :]]
    return found if "_" in kind else found[1:] if kind.startswith("Arg") else found[:1]


def gradients(results, tensors):
    """Of a random sum of the finite results."""
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros((), dtype=tensors[0].dtype) + 0 * sum(t.sum() for t in tensors)
    for r in (r for r in results if r.is_floating_point()):
        weights = torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype)
        total = total + (torch.where(r.isfinite(), r, 0) * weights).sum()
    wanted = [t for t in tensors if t.requires_grad]
    return torch.autograd.grad(total, wanted) if wanted else ()


def given_as(problem, dtype, needed):
    return [t.to(dtype).detach().requires_grad_(n in needed) for n, t in enumerate(problem.tensors)]


def check(problem, backend, needed=()):
    given_, exact_of, plain_of = (
        given_as(problem, dtype, needed) for dtype in (torch.float64, torch.float64, torch.float32)
    )
    found = reduce(
        problem.kind,
        problem.f,
        given_,
        problem.axis,
        weight=problem.weight,
        k=problem.k,
        ranges=problem.ranges,
        backend=backend,
    )
    found = list(found) if isinstance(found, tuple) else [found]
    exact, plain = oracle(problem, exact_of), oracle(problem, plain_of)
    assume(
        all(float(t.detach().abs().nan_to_num(0, 0, 0).amax()) < 1e6 for t in exact if t.numel())
    )
    compare(found, exact, plain)
    compare(*(gradients(r, t) for r, t in ((found, given_), (exact, exact_of), (plain, plain_of))))


def compare(found, exact, plain):
    for a, b, c in zip(found, exact, plain, strict=True):
        assert a.shape == b.shape
        if not a.is_floating_point() or not a.numel():
            assert (a == b).all()
            continue
        finite = b.isfinite()
        assert (a == b)[~finite].all()
        a, b, c = (torch.where(finite, t.detach(), 0) for t in (a, b, c))
        least = ROUNDINGS * torch.finfo(a.dtype).eps * (1 + b.abs().amax())
        assert_as_accurate(a, b, plain_error(c, b, a.dtype).maximum(least))


def drawn(backend):
    return settings(max_examples=DRAWS[backend], suppress_health_check=list(HealthCheck))


NEEDED = st.sets(st.integers(0, 6))
natively = pytest.mark.skipif(INTERPRETED, reason="kernels alone run in the interpreter")


@natively
@drawn("torch")
@given(problems(SMOOTH), NEEDED)
def test_smooth_formulas(problem, needed):
    check(problem, "torch", needed)


@natively
@drawn("torch")
@given(problems(STEPS, EXACT))
def test_steps_and_ties(problem):
    check(problem, "torch")


@natively
@drawn("numba")
@given(problems(SMOOTH))
def test_loops(problem):
    check(problem, "numba")


@natively
@drawn("numba")
@given(problems(STEPS, EXACT))
def test_steps_and_ties_of_loops(problem):
    check(problem, "numba")


@pytest.mark.skipif(not INTERPRETED, reason="kernels run here in the interpreter alone")
@drawn("triton")
@given(problems(SMOOTH, most=14), NEEDED)
def test_kernels(problem, needed):
    check(problem, "triton", needed)


@pytest.mark.skipif(not INTERPRETED, reason="kernels run here in the interpreter alone")
@drawn("triton")
@given(problems(STEPS, EXACT, most=14))
def test_steps_and_ties_of_kernels(problem):
    check(problem, "triton")
