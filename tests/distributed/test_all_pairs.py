"""Solvers, losses, neighbours and faults over the rows of all ranks, against one process.

Seen red with: dot products of one rank, weights 1 / M of a rank's rows, the box of a rank's points,
neighbours merged by block, points gathered in the order of the ring, errors of one rank raised
there alone (a hang), boxes of fewer coordinates on ranks without points (a hang), a backward pass
outside of `all_pairs` over this rank's rows alone, nodes of gradients that were numbered in another
thread than those of results.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.distributed.test_faults import torchrun
from tests.distributed.test_pairs import COLUMNS, ROWS, data, kept, mask_of, own, part
from tests.ranks import run
from torchweft.distributed import all_pairs
from torchweft.distributed.pairs import functions, ring
from torchweft.errors import BackendError, DTypeError, IndexRangeError, ShapeError, WeftError
from torchweft.reductions import (
    BlockSparsity,
    Genred,
    KernelSolve,
    LazyTensor,
    Pm,
    SamplesLoss,
    Vi,
    Vj,
    conjugate_gradient,
    generic_argkmin,
    generic_logsumexp,
    nearest,
    numpy,
)

POINTS = [4, 0, 5, 3]
"""Points of each rank, of clouds that see themselves."""


def cloud(size, batch=()):
    generator = torch.Generator().manual_seed(size)
    count = sum(POINTS[:size])
    x = torch.rand(*batch, count, 2, generator=generator, dtype=torch.float64)
    b = torch.randn(*batch, count, 3, generator=generator, dtype=torch.float64)
    return x, b, torch.tensor([1.5], dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)


def solve(x, b, width, ridge):
    """Solutions, their gradients, and gradients of these; the systems of a batch converge apart."""
    tensors = [t.requires_grad_() for t in (x, b, width, ridge)]
    kernel = KernelSolve("Exp(-g * SqDist(x, y)) * b", ALIASES, "b", axis=1)
    a = kernel(x, x, b, width, alpha=ridge, eps=1e-15)
    first = torch.autograd.grad(a.sin().sum(), tensors, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first[:2]), tensors)
    return [a.detach(), *(g.detach() for g in (*first, *second))]


ALIASES = ["x = Vi(2)", "y = Vj(2)", "b = Vj(3)", "g = Pm(1)"]


def solved(rank, size, group, batch):
    x, b, width, ridge = cloud(size, batch)
    rows = part(rank, POINTS[:size])
    with all_pairs(group):
        return solve(x[..., rows, :].clone(), b[..., rows, :].clone(), width, ridge)


@pytest.mark.parametrize(("size", "batch"), [(2, ()), (3, (2,)), (4, ())])
def test_solutions_and_their_gradients(size, batch):
    found, whole = run(solved, size, batch), solve(*cloud(size, batch))
    for n, expected in enumerate(whole):
        ours = [f[n] for f in found]
        ours = torch.cat(ours, -2) if expected.dim() > 1 else sum(ours)  # of parameters: parts
        torch.testing.assert_close(ours, expected)


LOSSES = {
    "sinkhorn": {"blur": 0.2},
    "sinkhorn, p = 1": {"p": 1, "blur": 0.2, "debias": False},
    "unbalanced": {"blur": 0.2, "reach": 0.5, "cost": "SqDist(X, Y) / 2"},
    "a cost": {"blur": 0.2, "cost": lambda x, y: x.sqdist(y), "backend": "online"},
    "energy": {"loss": "energy"},
    "gaussian": {"loss": "gaussian", "blur": 0.5},
}


def weights(size):
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.rand(n, generator=generator, dtype=torch.float64) for n in counts(size))
    return a / a.sum(), b / b.sum()


def counts(size):
    return sum(ROWS[:size]), sum(COLUMNS[:size])


def scored(options, tensors, again, grad=torch.autograd.grad):
    tensors = [t.requires_grad_() for t in tensors]
    loss = SamplesLoss(**options)(*tensors)
    first = grad(loss, tensors, create_graph=again)
    second = grad(sum(g.square().sum() for g in first), tensors) if again else ()
    return [loss.detach(), *(t.detach() for t in (*first, *second))]


def losses(rank, size, group):
    i, j = part(rank, ROWS[:size]), part(rank, COLUMNS[:size])
    (x, y, _, _), (a, b) = data(size), weights(size)
    found = []
    with all_pairs(group):
        for options in LOSSES.values():
            mine = [a[i].clone(), x[i].clone(), b[j].clone(), y[j].clone()]
            found.append(scored(options, mine, "loss" in options))
            found.append([SamplesLoss(**options)(x[i], y[j])])
        with pytest.raises(BackendError, match="multiscale transport is asked for in all_pairs"):
            SamplesLoss(backend="multiscale")(x[i], y[j])
        with pytest.raises(BackendError, match=r"<lambda> is given to a loss in all_pairs.*online"):
            SamplesLoss(cost=lambda x, y: x @ y.mT)(x[i], y[j])
        f, g = SamplesLoss(potentials=True, blur=0.2)(x[i], y[j])
        assert (f.shape, g.shape) == (x[i].shape[:1], y[j].shape[:1])
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_losses_of_clouds(size):
    found = iter(zip(*run(losses, size), strict=True))
    (x, y, _, _), (a, b) = data(size), weights(size)
    for name, options in LOSSES.items():
        whole = scored(options, [a.clone(), x.clone(), b.clone(), y.clone()], "loss" in options)
        of_ranks = next(found)
        for n, expected in enumerate(whole):
            ours = [f[n] for f in of_ranks]
            if expected.dim():
                torch.testing.assert_close(torch.cat(ours), expected, msg=name)
            else:
                torch.testing.assert_close(ours, [expected] * size, msg=name)
        uniform = SamplesLoss(**options)(x, y)
        torch.testing.assert_close([f[0] for f in next(found)], [uniform] * size, msg=name)


def losses_of_one_rank(rank, size, group):
    x, y = (t if rank == 0 else t[:0] for t in data(size)[:2])
    with all_pairs(group):
        return [SamplesLoss(**options)(x, y) for options in LOSSES.values()]


def test_losses_of_clouds_that_stand_on_one_rank():
    x, y, *_ = data(2)
    exact = [SamplesLoss(**options)(x, y) for options in LOSSES.values()]
    for found in run(losses_of_one_rank, 2):
        torch.testing.assert_close(found, exact)


class Engine:
    """torch's engine as it is for GPUs: backward passes have a thread, unless that is disabled."""

    def __init__(self):
        self.thread = ThreadPoolExecutor(1)

    def grad(self, *args, **options):
        if not torch._C._is_multithreading_enabled():
            return torch.autograd.grad(*args, **options)
        return self.thread.submit(torch.autograd.grad, *args, **options).result()

    def make_nodes(self, count):
        """Nodes of a graph, in the thread of backward passes: torch numbers those of a thread."""

        class Makes(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                one = torch.ones(1, requires_grad=True)
                with torch.enable_grad():
                    for _ in range(count):
                        one.view(1)
                return grad

        x = torch.ones(1, requires_grad=True)
        self.grad(Makes.apply(x), x)


def of_unlike_histories(rank, size, group):
    """Every second rank has made more nodes in its backward passes than outside of them."""
    engine = Engine()
    if rank % 2:
        engine.make_nodes(torch._C._autograd._get_sequence_nr() + 1000)
    i, j = part(rank, ROWS[:size]), part(rank, COLUMNS[:size])
    (x, y, _, _), (a, b) = data(size), weights(size)
    mine = [a[i].clone(), x[i].clone(), b[j].clone(), y[j].clone()]
    with all_pairs(group):
        return scored(LOSSES["energy"], mine, True, engine.grad)


def test_ranks_send_in_one_order_whatever_they_did_before():
    """Red before on GPUs: ranks that other tests had used came to other calls in second order."""
    size = 4
    found = run(of_unlike_histories, size)
    (x, y, _, _), (a, b) = data(size), weights(size)
    whole = scored(LOSSES["energy"], [t.clone() for t in (a, x, b, y)], True)
    for n, expected in enumerate(whole):
        ours = [f[n] for f in found]
        torch.testing.assert_close(torch.cat(ours) if n else ours[0], expected)


def in_another_order(rank, size, group):
    """The gradients of two calls of one formula, begun with another one on each rank."""
    x, y, *_ = own(rank, size, data(size))
    x.requires_grad_()
    with all_pairs(group):
        losses = [(-Vi(times * x).sqdist(Vj(y))).exp().sum(1).sum() for times in (1, 2)]
        with pytest.raises(ShapeError) as raised:
            torch.autograd.grad(losses[rank], x)
    return str(raised.value)


def test_gradients_in_another_order_are_told():
    """Red before: each rank had the gradient of one call in another's columns."""
    text = (
        r"sums of call (\d+) in all_pairs and rank 1 has sums of call (\d+) in all_pairs: all ranks"
    )
    for told in run(in_another_order, 2):
        first, second = map(int, re.search(text, told).groups())
        assert second == first + 1


def others(x, y, b, p):
    """What has no gradient to look at, or one row that all ranks share."""
    one = LazyTensor(torch.ones(1, 1, 1, dtype=y.dtype))
    yield "rows", nearest(x, y, 3)
    yield "rows", nearest(x.repeat(1, 2), y.repeat(1, 2), 30)
    aliases = ["x = Vi(2)", "y = Vj(2)"]
    yield "rows", generic_argkmin("SqDist(x, y)", "k = Vi(2)", *aliases)(x, y)
    yield "columns", generic_logsumexp("x | y", "a = Vj(1)", *aliases)(x, y)
    yield "rows", Genred("x | y", aliases, "Max_SumShiftExp", axis=1)(x, y)
    host = x.cpu(), y.cpu()
    u, v = (t.numpy() for t in host)
    yield "rows", torch.from_numpy(numpy.Vi(u).sqdist(numpy.Vj(v)).sum(1))
    yield "rows", (Vi(host[0]) | Vj(host[1])).sum(1, backend="numba")
    yield "rows", LazyTensor(x[:, None]).sqdist(LazyTensor(y[None])) @ b
    yield "rows", (Vi(x) * 0 + one).sum(1)  # lost j: 1
    yield "rows", ((Vi(x) * 1 - Vi(x)) + Vj(y) * 0).sum(1)
    yield "rows", (-Vi(x).sqdist(Vj(x))).exp().solve(x, alpha=1.0, eps=1e-15)
    for name in ("nystrom", "pivoted_cholesky"):
        options = {"alpha": 1.0, "eps": 1e-15, "preconditioner": name, "rank": 20}
        yield "rows", (-Vi(x).sqdist(Vj(x))).exp().solve(x, **options)
    shared = Vj(y) * Pm(p)
    for kind in ("sum", "logsumexp", "min", "argmin"):
        yield "one", getattr(shared if kind != "logsumexp" else (shared | Pm(p)), kind)(1)
    z = torch.complex(b[:, :1], b[:, 1:2])
    yield "rows", torch.view_as_real((-Vi(x).sqdist(Vj(y))).exp() @ z)


def listed(rank, size, group):
    x, y, b, p = own(rank, size, data(size))
    with all_pairs(group):
        return [found for _, found in others(x, y, b, p)]


def test_neighbours_generic_functions_numpy_and_shared_rows():
    found = run(listed, 3)
    for n, (kind, expected) in enumerate(others(*data(3))):
        for rank in range(3):
            rows = {"rows": ROWS, "columns": COLUMNS}.get(kind)
            mine = expected if rows is None else expected[part(rank, rows)]
            torch.testing.assert_close(found[rank][n], mine, msg=str(n))


def clouds(size, times):
    """x and y of the whole, on a lattice: many distances tie, and all are exact; and k."""
    generator = torch.Generator().manual_seed(size)
    for dim, dtype, k in (
        (1, torch.float64, 5),
        (2, torch.bfloat16, 3),
        (2, torch.float32, 60),
        (3, torch.float32, 10),
        (3, torch.float64, 1),
        (5, torch.float32, 4),
    ):
        x, y = (torch.randint(9, (times * n, dim), generator=generator) for n in counts(size))
        yield x.to(dtype), y.to(dtype), k


def near(rank, size, group, times, most):
    """The nearest of each cloud, by points of up to `most` bytes gathered."""
    i, j = (part(rank, [times * n for n in of]) for of in (ROWS, COLUMNS))
    before, functions.GATHERED_BYTES = functions.GATHERED_BYTES, most
    try:
        with all_pairs(group):
            return [nearest(x[i], y[j], k) for x, y, k in clouds(size, times)]
    finally:
        functions.GATHERED_BYTES = before


@pytest.mark.parametrize("most", [0, functions.GATHERED_BYTES], ids=["ring", "gathered"])
@pytest.mark.parametrize(("size", "times"), [(2, 1), (3, 50), (4, 200)])
def test_neighbours_are_those_of_one_process(size, times, most):
    found = run(near, size, times, most)
    for n, (x, y, k) in enumerate(clouds(size, times)):
        assert torch.cat([of[n] for of in found]).equal(nearest(x, y, k)), n


def shared(y, p):
    y, p = y.requires_grad_(), p.requires_grad_()
    lazy = Vj(y) * Pm(p)
    loss = lazy.sum(1).sin().sum() + lazy.min(1).sin().sum() + (lazy | lazy).logsumexp(1).sum()
    first = torch.autograd.grad(loss, (y, p), create_graph=True)
    second = torch.autograd.grad(loss.square(), (y, p))
    return [loss.detach(), *(t.detach() for t in (*first, *second))]


def of_shared_rows(rank, size, group):
    _, y, _, p = own(rank, size, data(size))
    with all_pairs(group):
        return shared(y, p)


def test_one_row_that_all_ranks_share_has_its_gradient_once():
    found, (_, y, _, p) = run(of_shared_rows, 3), data(3)
    loss, *grads = shared(y, p)
    torch.testing.assert_close([f[0] for f in found], [loss] * 3)
    for n, expected in enumerate(grads, 1):
        ours = [f[n] for f in found]
        ours = torch.cat(ours) if expected.shape == y.shape else sum(ours)
        torch.testing.assert_close(ours, expected)


def narrow(rank, size, group, dtype):
    """In the dtype, and where its gradient is taken outside of `all_pairs`."""
    x, y, b, _ = own(rank, size, data(size, dtype=dtype))
    leaves = [t.requires_grad_() for t in (x, y, b)]
    with all_pairs(group):
        out = ((-Vi(x).sqdist(Vj(y))).exp() * Vj(b)).sum(1)
        for transform in (torch.func.vjp, torch.func.jvp) if dtype is torch.float64 else ():
            _transformed(transform, y.detach(), b.detach(), x.detach(), out.detach())
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    return [out.detach(), *grads]


def _transformed(transform, y, b, x, out):
    def function(x):
        return ((-Vi(x).sqdist(Vj(y))).exp() * Vj(b)).sum(1)

    if transform is torch.func.vjp:
        value, pull = torch.func.vjp(function, x)
        pull(torch.ones_like(value))
    else:
        value, _ = torch.func.jvp(function, (x,), (torch.ones_like(x),))
    assert value.equal(out)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes_and_backward_outside(dtype):
    size = 3
    found = run(narrow, size, dtype)
    x, y, b, _ = data(size, dtype=dtype)
    x, y, b = (t.double().requires_grad_() for t in (x, y, b))
    kernel = (-(x[:, None] - y[None]).square().sum(-1)).exp()
    exact = kernel @ b
    grads = torch.autograd.grad(exact, (x, y, b), torch.ones_like(exact))
    for n, expected in enumerate((exact.detach(), *grads)):
        ours = torch.cat([f[n] for f in found])
        assert ours.dtype == dtype
        scale = max(kernel.abs().sum(1).max().item(), 1) * b.abs().max().item() * len(y)
        bound = 4 * torch.finfo(dtype).eps * scale
        assert (ours.double() - expected).abs().max() <= bound


def bad(rank, size, group, fault):
    """The error of a call in which ranks differ; the next call works."""
    x, y, b, _ = own(rank, size, data(size))
    with all_pairs(group):
        try:
            FAULTS[fault][0](rank, x, y, b)
        except WeftError as error:
            told = error
        else:
            raise AssertionError(f"{fault}: nothing was told on rank {rank}")
        assert isinstance(told, FAULTS[fault][1]), fault
        again = Vi(x).sqdist(Vj(y)).sum(1)
    rows = part(rank, ROWS)
    x, y, *_ = data(size)
    torch.testing.assert_close(again, Vi(x).sqdist(Vj(y)).sum(1)[rows])
    return str(told)


def _mixed(rank, x, y, b):
    return Vi(x[:, : 2 - rank]).sqdist(Vj(y[:, : 2 - rank])).sum(1)


def _wrong_argument(rank, x, y, b):
    return Genred("x | y", ["x = Vi(2)", "y = Vj(2)"], axis=1)(x, y[:, : 2 - rank])


def _solved_apart(rank, x, y, b):
    kernel = KernelSolve("Exp(-SqDist(x, y)) * b", ALIASES[:3], "b", axis=1)
    return kernel(x, x, torch.ones(len(x), 3).double(), eps=1e-3 * (1 + rank))


def _ranges(rank, x, y, b):
    columns = sum(COLUMNS[:2]) + rank
    return (Vi(x) | Vj(y)).sum(1, ranges=mask_of(torch.ones(len(x), columns, dtype=torch.bool)))


def _entries(rank, x, y, b):
    mask = BlockSparsity(mask_of(torch.ones(len(x), 4, dtype=torch.bool)))
    mask = BlockSparsity.stack([mask], len(x), 4)
    return (Vi(x[None]) | Vj(y[None])).sum(2, ranges=mask)


def _empty_cloud(rank, x, y, b):
    return SamplesLoss("energy")(x, y[:0])


FAULTS = {
    "formula": (
        lambda rank, x, y, b: (Vi(x) | Vj(y)).sum(1) if rank else Vi(x).sqdist(Vj(y)).sum(1),
        ShapeError,
        "the ranks differ in formula",
    ),
    "reduction": (
        lambda rank, x, y, b: (Vi(x) | Vj(y)).reduction(["Sum", "LogSumExp"][rank], axis=1),
        ShapeError,
        "rank 0 has Sum over axis 1 in all_pairs and rank 1 has LogSumExp over axis 1",
    ),
    "dimensions": (_mixed, ShapeError, "the ranks differ in dimensions"),
    "dtype": (
        lambda rank, x, y, b: (
            Vi(x.float() if rank else x).sqdist(Vj(y.float() if rank else y)).sum(1)
        ),
        ShapeError,
        "the ranks differ in dtype, rank 0 has torch.float64 and rank 1 has torch.float32",
    ),
    "k": (
        lambda rank, x, y, b: Vi(x).sqdist(Vj(y)).argKmin(2 + rank, 1),
        ShapeError,
        "the ranks differ in k, rank 0 has 2 and rank 1 has 3",
    ),
    "gradients": (
        lambda rank, x, y, b: Vi(x.clone().requires_grad_(rank == 0)).sqdist(Vj(y)).sum(1),
        ShapeError,
        "the ranks differ in requires_grad",
    ),
    "masked": (
        lambda rank, x, y, b: (Vi(x) | Vj(y)).sum(
            1, ranges=mask_of(torch.ones(len(x), 4, dtype=torch.bool)) if rank else None
        ),
        ShapeError,
        "the ranks differ in ranges",
    ),
    "an argument": (_wrong_argument, ShapeError, "rank 1: y is (4, 1) but declared Vj(2)"),
    "settings": (
        lambda rank, x, y, b: SamplesLoss(blur=0.1 + rank)(x, y),
        ShapeError,
        "the ranks differ in settings",
    ),
    "weights": (
        lambda rank, x, y, b: SamplesLoss()(
            torch.full_like(x[:, 0], 0.2) * (2 * rank - 1), x, torch.full_like(y[:, 0], 0.25), y
        ),
        ShapeError,
        "a holds a weight of -0.2",
    ),
    "a point that is not finite": (
        lambda rank, x, y, b: SamplesLoss()(x + (torch.nan if rank else 0), y),
        ShapeError,
        "points and their distances must be finite",
    ),
    "a cloud of nothing": (_empty_cloud, ShapeError, "a cloud must have at least one point"),
    "neighbours": (
        lambda rank, x, y, b: nearest(x, y.float() if rank else y, 2),
        DTypeError,
        "rank 1: x is torch.float64 but y is torch.float32",
    ),
    "tolerance": (_solved_apart, ShapeError, "the ranks differ in eps"),
    "columns of a mask": (_ranges, IndexRangeError, "rank 1: "),
    "a mask for each entry": (_entries, ShapeError, "all entries of a batch share one"),
    "a mask of one axis": (
        lambda rank, x, y, b: Vj(y).sum(1, ranges=mask_of(torch.ones(1, 4, dtype=torch.bool))),
        ShapeError,
        "varies with i or with j alone",
    ),
    "operator": (
        lambda rank, x, y, b: conjugate_gradient(lambda v: v[:-1], b, eps=1e-3),
        ShapeError,
        "the operator gives",
    ),
}


def all_faults(rank, size, group):
    return [bad(rank, size, group, fault) for fault in FAULTS]


def test_faults_are_told_on_all_ranks_and_the_group_stays_usable():
    first, second = run(all_faults, 2)
    for (name, (_, _, text)), ours, other in zip(FAULTS.items(), first, second, strict=True):
        assert text in ours, name
        assert text in other, name


def outside(rank, size, group):
    """An error between two reductions is told by the end of the block."""
    x, y, *_ = own(rank, size, data(size))
    with pytest.raises(ShapeError) as raised:
        _between(x.repeat(1, 2)[:, : 3 - rank], y, group)
    return str(raised.value)


def _between(x, y, group):
    with all_pairs(group):
        Vi(x).sqdist(Vj(y)).sum(1)


def test_an_error_of_one_rank_between_reductions():
    first, second = run(outside, 2)
    assert first == second
    assert first.startswith("rank 0: SqDist of ")


def travelled(rank, size, group):
    """What happens at the hops of a ring, in its order, and the numbers that are sent."""
    happened, pass_on = [], ring.pass_on

    class Work:
        def __init__(self, work):
            self.work = work

        def wait(self):
            self.work.wait()
            happened.append("wait")

    def recorded(block, following, group):
        happened.append(len(block))
        return Work(pass_on(block, following, group))

    ring.pass_on = recorded
    try:
        columns = torch.full((1, COLUMNS[rank], 3), float(rank))
        for source, (block,) in ring.hops([columns], COLUMNS[:size], group):
            assert block.equal(torch.full((1, COLUMNS[source], 3), float(source)))
            happened.append("work")
    finally:
        ring.pass_on = pass_on
    return happened


def test_the_next_block_is_under_way_while_one_is_worked_on():
    size = 4
    for rank, happened in enumerate(run(travelled, size)):
        sources = [(rank - hop) % size for hop in range(size - 1)]
        sent = [3 * COLUMNS[source] for source in sources]  # no more than a block at once
        expected = [step for numbers in sent for step in (numbers, "work", "wait")]
        assert happened == [*expected, "work"]


def test_one_rank_is_the_whole():
    x, y, *_ = data(2)
    with all_pairs():
        found = Vi(x).sqdist(Vj(y)).sum(1, ranges=mask_of(kept(2)))
    assert found.equal(Vi(x).sqdist(Vj(y)).sum(1, ranges=mask_of(kept(2))))
    assert np.isfinite(found.numpy()).all()


def test_the_example_regresses_below_its_noise(tmp_path):
    script = Path(__file__).parents[2] / "examples/distributed/ridge_over_ranks.py"
    ran, errors, (result, _) = torchrun(script, "300", "60", ranks=2, folder=tmp_path)
    assert ran.returncode == 0, errors
    error, noise = map(float, re.findall(r"[\d.]+", result))
    assert error < noise
