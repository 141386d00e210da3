"""Reductions over the rows of all ranks: values and gradients are those of one process.

Seen red with: blocks taken for the next rank's, ties given to the ring's first block, cotangents
that stay where they are, masks cut at the bounds of another rank, columns fetched without gradient.
"""

import itertools

import pytest
import torch

from tests.ranks import run
from torchweft.distributed import all_pairs
from torchweft.reductions import Pm, Vi, Vj
from torchweft.reductions.cluster import from_matrix

SIZES = [2, 3, 4]
ROWS, COLUMNS = [5, 3, 0, 4], [0, 4, 6, 1]
"""Rows i and j of each rank: one rank has none of them, another none of those."""


def part(rank, counts):
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def data(size, batch=(), dtype=torch.float64):
    """x, y, b and the parameter p of the whole; two points of y are one, so that values tie."""
    generator = torch.Generator().manual_seed(size)
    shapes = (*batch, sum(ROWS[:size]), 2), (*batch, sum(COLUMNS[:size]), 2)
    x, y = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes)
    y[..., -1, :] = y[..., 1, :]
    b = torch.randn(*y.shape[:-1], 3, generator=generator, dtype=torch.float64)
    p = torch.tensor([0.7, 1.3], dtype=torch.float64)
    return [t.to(dtype) for t in (x, y, b, p)]


def own(rank, size, tensors):
    """This rank's rows of x, y and b, and the parameter."""
    x, y, b, p = tensors
    i, j = part(rank, ROWS[:size]), part(rank, COLUMNS[:size])
    return [x[..., i, :].clone(), y[..., j, :].clone(), b[..., j, :].clone(), p.clone()]


def distances(x, y, p):
    return (Vi(x) * Pm(p)).sqdist(Vj(y))


REDUCTIONS = {
    "sum": lambda x, y, b, p, **o: ((-distances(x, y, p)).exp() * Vj(b)).sum(x.dim() - 1, **o),
    "sum over i": lambda x, y, b, p, **o: ((-distances(x, y, p)).exp() * Vj(b)).sum(
        x.dim() - 2, **o
    ),
    "logsumexp": lambda x, y, b, p, **o: (-distances(x, y, p)).logsumexp(x.dim() - 1, **o),
    "logsumexp over i": lambda x, y, b, p, **o: (-distances(x, y, p)).logsumexp(x.dim() - 2, **o),
    "softmax": lambda x, y, b, p, **o: (-distances(x, y, p)).sumsoftmaxweight(
        Vj(b), x.dim() - 1, **o
    ),
    "min": lambda x, y, b, p, **o: (Vi(x) * Pm(p) * Vj(y)).min(x.dim() - 1, **o),
    "max": lambda x, y, b, p, **o: (Vi(x) * Pm(p) * Vj(y)).max(x.dim() - 1, **o),
    "Kmin": lambda x, y, b, p, **o: distances(x, y, p).Kmin(3, x.dim() - 1, **o),
    "Kmin over i": lambda x, y, b, p, **o: distances(x, y, p).Kmin(3, x.dim() - 2, **o),
    "Kmin of two": lambda x, y, b, p, **o: (Vi(x) * Pm(p) * Vj(y)).Kmin(2, x.dim() - 1, **o),
}
INDICES = {
    "argmin": lambda x, y, b, p, **o: (Vi(x) * Pm(p) * Vj(y)).argmin(x.dim() - 1, **o),
    "argmax": lambda x, y, b, p, **o: (Vi(x) * Vj(y)).argmax(x.dim() - 1, **o),
    "argKmin": lambda x, y, b, p, **o: distances(x, y, p).argKmin(40, x.dim() - 1, **o),
    "argKmin over i": lambda x, y, b, p, **o: distances(x, y, p).argKmin(3, x.dim() - 2, **o),
    "min_argmin": lambda x, y, b, p, **o: distances(x, y, p).min_argmin(x.dim() - 1, **o)[1],
}


def through(function, tensors, orders=2, **options):
    """The result, and the gradients of functions of it, order by order."""
    tensors = [t.requires_grad_() for t in tensors]
    out = function(*tensors, **options)
    finite = out.where(out.isfinite(), 0)  # a row that sees nothing has no gradient, not NaN
    found, score = [[out.detach()]], (finite.sin() * finite).sum()
    for _ in range(orders):
        grads = torch.autograd.grad(score, tensors, create_graph=True, materialize_grads=True)
        found.append([t.detach() for t in grads])
        score = sum((g * g.sin()).sum() for g in grads[:3])  # of rows: parts of p are no rows
    return found


def orders_of(name):
    return 3 if name in ("sum", "softmax", "Kmin") else 2


def mask_of(keep):
    """The mask of rows and columns that are blocks of their own."""
    blocks = [torch.arange(n)[:, None] + torch.tensor([0, 1]) for n in keep.shape]
    return from_matrix(*blocks, keep)


def kept(size):
    """Pairs of the whole: no rank sees all others, and one row sees nothing."""
    generator = torch.Generator().manual_seed(7)
    rows, columns = sum(ROWS[:size]), sum(COLUMNS[:size])
    keep = torch.rand(rows, columns, generator=generator) < 0.5
    keep[1] = False
    keep[part(0, ROWS), part(1, COLUMNS)] = False
    return keep


def reduced(rank, size, group, batch, masked):
    """Every reduction; those of first order again, with the same bits."""
    options = {"ranges": mask_of(kept(size)[part(rank, ROWS)])} if masked else {}
    found = []
    with all_pairs(group):
        for name, function in REDUCTIONS.items():
            mine = own(rank, size, data(size, batch))
            found.append(through(function, mine, orders_of(name), **options))
            again = through(function, mine, 1, **options)
            for ours, other in zip(
                itertools.chain(*found[-1]), itertools.chain(*again), strict=False
            ):
                assert ours.equal(other)
        mine = own(rank, size, data(size, batch))
        indices = [function(*mine, **options) for function in INDICES.values()]
    return found, indices


def rows_of(result, name, rank, size):
    """This rank's rows of a result of the whole."""
    rows = part(rank, COLUMNS if "over i" in name else ROWS)
    dim = 1 if result.dim() > 2 and result.shape[0] == 2 and len(result) == 2 else 0
    return result.narrow(dim, rows.start, rows.stop - rows.start)


@pytest.mark.parametrize(
    ("size", "batch", "masked"),
    [(2, (2,), False), (3, (), False), (4, (), False), (2, (2,), True), (4, (), True)],
)
def test_values_and_gradients_of_three_orders(size, batch, masked):
    found = run(reduced, size, batch, masked)
    options = {"ranges": mask_of(kept(size))} if masked else {}
    for n, (name, function) in enumerate(REDUCTIONS.items()):
        (out,), *orders = through(function, data(size, batch), orders_of(name), **options)
        for rank, (ours, _) in enumerate(found):
            (mine,), *gradients = ours[n]
            # hundreds of roundings of float64, of sums in another order
            torch.testing.assert_close(mine, rows_of(out, name, rank, size), msg=name)
            for order, whole in zip(gradients, orders, strict=True):
                expected = own(rank, size, whole)
                for a, e in zip(order[:3], expected[:3], strict=True):
                    torch.testing.assert_close(a, e, msg=f"{name} {rank}")
        for order, whole in enumerate(orders, 1):
            parts = sum(ours[n][order][3] for ours, _ in found)
            torch.testing.assert_close(parts, whole[3], msg=name)
    for n, (name, function) in enumerate(INDICES.items()):
        out = function(*data(size, batch), **options)
        for rank, (_, indices) in enumerate(found):
            assert indices[n].equal(rows_of(out, name, rank, size)), name
