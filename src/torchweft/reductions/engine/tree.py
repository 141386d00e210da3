"""Exact nearest neighbours on a CPU: a k-d tree in up to 3 dimensions, whatever the points' density

    d_mn = Σ_c (x_mc − y_nc)², in this order of c

The k smallest in the order of (d, n).  Boxes that are left out are farther than the last of them:
rounding makes of a box's distance at most what it makes of the distance of a point in it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchweft.core.backend import choose
from torchweft.core.cpu.loops import share
from torchweft.core.explain import Launch, record, recording
from torchweft.reductions.call import ReductionData
from torchweft.reductions.formula.node import Node

__all__ = ["may_serve", "nearest_by_tree", "neighbours", "worth_a_tree"]

POINTS_PER_LEAF = 8
"""At most twice as many points are in a leaf."""

LEAST_ROWS, LEAST_COLUMNS, LEAST_PAIRS = 512, 1024, 2**22
"""Queries, points, and pairs, from which a tree is worth its making and its loops' compilation."""

WORK_OF_A_QUERY = 2**10
"""Multiplications that a query of one neighbour takes as long as."""


def worth_a_tree(rows: int, columns: int, dim: int, k: int) -> bool:
    """Whether a tree finds k of so many points faster than what looks at all pairs."""
    enough = rows >= LEAST_ROWS and columns >= max(LEAST_COLUMNS, k)
    enough = enough and rows * columns >= LEAST_PAIRS
    return enough and dim <= 3 and choose(None, "cpu") == "numba"


def neighbours(f: Node, k: int, data: ReductionData) -> Tensor | None:
    """(B, M, k) int64: the k smallest of f = |x_i − y_j|², or None where a tree does not find them.

    That is another formula, a mask of pairs, more than 3 dimensions, few points, or infinite ones.
    """
    points = _points(f)
    if points is None or not may_serve(f, k, data):
        return None
    x, y = (data.values[v.data[0]].detach() for v in points)
    x, y = (t if t.dtype == torch.float64 else t.float() for t in (x, y))
    if not (bool(x.isfinite().all()) and bool(y.isfinite().all())):
        return None
    batch = data.sizes.batch
    found = [
        nearest_by_tree(*of, k)
        for of in zip(x.expand(batch, -1, -1), y.expand(batch, -1, -1), strict=True)
    ]
    return torch.stack(found)


def may_serve(f: Node, k: int, data: ReductionData) -> bool:
    """Whether a tree finds the k smallest of f, if the points are finite."""
    points = _points(f)
    if points is None or data.blocks is not None:
        return False
    return worth_a_tree(*data.sizes[1:], points[0].dim, k)


def _points(f: Node) -> tuple[Node, Node] | None:
    """The variables x_i and y_j of |x_i − y_j|², as sqdist, (x − y | x − y) or ((x − y)²).sum()."""
    pair: tuple[Node, ...] = ()
    inner = f.args[0] if f.op == "sum" else f
    if f.op == "sqdist":
        pair = f.args
    elif inner.op == "pow" and inner.data == 2 and (f.op == "sum" or f.dim == 1):
        pair = inner.args[0].args if inner.args[0].op == "sub" else ()
    elif f.op == "einsum" and f.args[0] is f.args[-1] and f.args[0].op == "sub":
        dim = (f.args[0].dim,)
        pair = f.args[0].args if f.data == (dim, "a", dim, "a", "") else ()
    x, y = sorted(pair, key=lambda v: v.data[2] if v.op == "var" else 3) if pair else (f, f)
    plain = x.op == y.op == "var" and x.data[1:] == (y.dim, 0) and y.data[2] == 1
    return (x, y) if plain else None


def nearest_by_tree(x: Tensor, y: Tensor, k: int) -> Tensor:
    """(M, k) int64: the nearest of y to each of x, the smaller index first where they are equal.

    Args:
        x: (M, D) on the CPU, D ≤ 3, finite, float32 or float64.
        y: (N, D), at least k.
        k: how many.

    Cost: about N log N exchanges, and log N + k boxes a query.
    """
    from torchweft.reductions.engine import tree_loops  # numba need not be installed

    queries, points = (torch.nn.functional.pad(t, (0, 3 - t.shape[1])).numpy() for t in (x, y))
    depth = max(len(y) // POINTS_PER_LEAF, 1).bit_length() - 1
    order = np.arange(len(y))
    boxes = np.empty((2 ** (depth + 1) - 1, 6), points.dtype)
    points = points.copy()
    tree_loops.build(points, order, boxes, depth)
    leaf = np.empty(len(x), np.int64)
    tree_loops.leaves(queries, boxes, depth, leaf)
    if recording():
        record(Launch("numba", "nearest_by_tree", {"leaves": 2**depth}, 1, boxes.nbytes))
    rows, found = leaf.argsort(kind="stable"), x.new_empty(len(x), k, dtype=torch.int64)
    columns = np.ascontiguousarray(points.T)
    given = rows, queries, columns, order, boxes, depth, found.numpy()
    share(
        lambda first, last: tree_loops.search(first, last, *given),
        len(x),
        len(x) * k * WORK_OF_A_QUERY,
        2**24,
    )
    return found
