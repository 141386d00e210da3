"""The best simple way to compute each workload in eager torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.harness.case import Candidate, Workload
from benchmarks.peers import clifford
from benchmarks.workloads.uuu import START, coefficients, paths

NAME = "torch eager"

FEW = 32  # segments that are worth a slice each
MOST_PAIRS = 2**31  # of a dense matrix that is stored

_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda x, y: x * y,
    "outer": lambda x, y: x.unsqueeze(-1) * y.unsqueeze(-2),
    "inner": lambda x, y: (x * y).sum(-1),
    "vecmat": lambda x, y: torch.matmul(x.unsqueeze(-2), y).squeeze(-2),
    "vecsca": lambda x, y: x * y.unsqueeze(-1),
}
_RANKS = {"mul": (2, 2), "outer": (2, 2), "inner": (2, 2), "vecmat": (2, 3), "vecsca": (2, 1)}


def missing() -> str | None:
    return None


def adapt(workload: Workload) -> Candidate | str:
    if (function := best_way(workload)) is None:
        return f"no way written down for {workload.op} with {sorted(workload.tables)}"
    return Candidate(NAME, "torch", function, workload.inputs, workload.oracle)


def best_way(workload: Workload) -> Callable[..., Tensor] | None:
    """Slices and matrix products where the tables allow, else gather, multiply, add."""
    tables = workload.tables
    if workload.op.startswith("clifford"):
        return clifford.dense(workload)
    if workload.op == "sparse convolution":
        return _offset_by_offset(workload)
    if workload.op == "uuu":
        return _dense_paths(workload)
    if workload.op == "reduction":
        pairs = workload.inputs[0].shape[0] * workload.inputs[1].shape[0]
        return None if pairs > MOST_PAIRS else workload.oracle
    if workload.op == "vecmat" and set(tables) == {"index2"}:
        return _matrix_runs(workload)
    if workload.op == "outer" and tables.get("out_accumulated"):
        return _outer_of_slices(tables["seg"].tolist())
    if workload.op in _PRODUCTS and set(tables) <= {"index1", "index2", "scale", "seg"}:
        return _gather_and_add(workload)
    return None


def _gather_and_add(workload: Workload) -> Callable[..., Tensor]:
    tables, product = workload.tables, _PRODUCTS[workload.op]
    axes = [a.dim() - r for a, r in zip(workload.inputs, _RANKS[workload.op], strict=True)]
    indices = [tables.get("index1"), tables.get("index2")]
    scale, add = tables.get("scale"), _sum_of_segments(tables.get("seg"))
    batched = max(axes)

    def function(*inputs: Tensor) -> Tensor:
        rows = [
            a if index is None else a.index_select(axis, index)
            for a, index, axis in zip(inputs, indices, axes, strict=True)
        ]
        terms = product(*rows)
        if scale is not None:
            terms = terms * scale.view(-1, *[1] * (terms.dim() - batched - 1))
        return add(terms, batched)

    return function


def _sum_of_segments(seg: Tensor | None) -> Callable[[Tensor, int], Tensor]:
    """Sums rows of an axis: by a reshape where lengths agree, by slices where few, else by adds."""
    if seg is None:
        return lambda terms, axis: terms
    lengths, num_segments = seg.diff(), len(seg) - 1
    shortest, longest = (int(v) for v in lengths.aminmax())
    if shortest == longest:
        return lambda terms, axis: terms.unflatten(axis, (num_segments, longest)).sum(axis + 1)
    if num_segments <= FEW:
        bounds = seg.tolist()
        return lambda terms, axis: torch.stack(
            [terms.narrow(axis, a, b - a).sum(axis) for a, b in pairwise(bounds)], axis
        )
    owner = torch.repeat_interleave(lengths)

    def add(terms: Tensor, axis: int) -> Tensor:
        shape = (*terms.shape[:axis], num_segments, *terms.shape[axis + 1 :])
        return terms.new_zeros(shape).index_add(axis, owner, terms)

    return add


def _matrix_runs(workload: Workload) -> Callable[..., Tensor]:
    """One matrix product for each run of equal index2."""
    owners = workload.tables["index2"].tolist()
    starts = [t for t in range(len(owners)) if t == 0 or owners[t] != owners[t - 1]]
    runs = [(a, b, owners[a]) for a, b in pairwise([*starts, len(owners)])]
    shared = workload.inputs[1].dim() == 3

    def function(x: Tensor, y: Tensor) -> Tensor:
        parts = [x[:, a:b] @ (y[j] if shared else y[:, j]) for a, b, j in runs]
        return torch.cat(parts, 1)

    return function


def _outer_of_slices(bounds: list[int]) -> Callable[..., Tensor]:
    """One long matrix product for each segment."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.stack(
            [x[:, a:b].flatten(0, 1).T @ y[:, a:b].flatten(0, 1) for a, b in pairwise(bounds)]
        )

    return function


def _offset_by_offset(workload: Workload) -> Callable[..., Tensor]:
    """For each kernel offset gather, matrix product, add; offsets without a pair are left out."""
    found = workload.tables["map"]
    pairs = {k: found.pairs(k) for k, count in enumerate(found.counts.tolist()) if count}
    rows = len(found.outputs)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        matrices = weight.unbind(0)  # one node of the graph: backward fills one gradient
        result = x.new_zeros(rows, weight.shape[2])
        for k, (in_rows, out_rows) in pairs.items():
            result.index_add_(0, out_rows, x.index_select(0, in_rows) @ matrices[k])
        return result

    return function


def _dense_paths(workload: Workload) -> Callable[..., Tensor]:
    """Each path by itself: outer product of components, then a small dense contraction."""
    like = workload.inputs[0]
    tables = [torch.as_tensor(coefficients(*p)).to(like) for p in paths()]

    def function(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        out: dict[int, Tensor] = {}
        for p, (l1, l2, l3) in enumerate(paths()):
            a, b = (
                t[:, START[degree] : START[degree + 1] if degree < 3 else 16]
                for t, degree in ((x, l1), (y, l2))
            )
            pairs = (a.unsqueeze(2) * b.unsqueeze(1)).flatten(1, 2)
            part = w[p] * (tables[p].flatten(0, 1).T @ pairs)
            out[l3] = out[l3] + part if l3 in out else part
        return torch.cat([out[degree] for degree in sorted(out)], 1)

    return function
