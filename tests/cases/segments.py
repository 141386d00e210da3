"""Contract cases of reductions over segments, and their oracles: a loop over the segments."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.cases.suite import Suite
from torchweft import products
from torchweft.testing.contract import Case

__all__ = ["REDUCTIONS", "door_cases", "rows_of_each", "segment_reference", "suite"]

REDUCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "sum": (lambda rows: rows.sum(0), 0.0),
    "mean": (lambda rows: rows.mean(0), 0.0),
    "max": (lambda rows: rows.amax(0), float("-inf")),
    "min": (lambda rows: rows.amin(0), float("inf")),
    "softmax": (lambda rows: rows.softmax(0), 0.0),
    "logsumexp": (lambda rows: rows.logsumexp(0), float("-inf")),
}
"""What is done with the rows of a segment, and what there is for none."""


def rows_of_each(
    count: int, index: Tensor | None, indptr: Tensor | None, num_segments: int | None
) -> list[Tensor]:
    """The numbers of the rows of each segment, in order."""
    if indptr is not None:
        bounds = indptr.tolist()
        return [torch.arange(a, b) for a, b in itertools.pairwise(bounds)]
    assert index is not None
    most = int(index.max()) + 1 if num_segments is None else num_segments
    return [(index == m).nonzero()[:, 0] for m in range(most)]


def segment_reference(
    name: str,
    x: Tensor,
    index: Tensor | None = None,
    indptr: Tensor | None = None,
    num_segments: int | None = None,
) -> Tensor:
    """Each segment by itself, by torch's reduction of its rows."""
    reduce, nothing = REDUCTIONS[name]
    members = rows_of_each(x.shape[0], index, indptr, num_segments)
    if name == "softmax":
        parts = [reduce(x[rows]) for rows in members]
        order = torch.cat(members).argsort()
        return torch.cat(parts)[order]
    found = [reduce(x[rows]) if len(rows) else x[:0].sum(0) + nothing for rows in members]
    return torch.stack(found)


def _case(name: str, what: str, shape: tuple[int, ...], tables: dict[str, Any]) -> Case:
    generator = torch.Generator().manual_seed(len(name) + sum(shape))
    return Case(
        f"{name} {what}",
        getattr(products, f"segment_{name}"),
        functools.partial(segment_reference, name),
        (torch.randn(shape, dtype=torch.float64, generator=generator),),
        tables,
        polynomial=name == "sum",
        neighbours=64,
    )


def _tables(generator: torch.Generator) -> dict[str, tuple[int, dict[str, Any]]]:
    """By what they show: T, and index or indptr.  Extremes of nothing have tests of their own."""
    few = torch.randint(0, 5, (23,), generator=generator)
    few[:5] = torch.arange(5)
    hub = torch.where(torch.rand(600, generator=generator) < 0.9, 1, 0)
    return {
        "index": (23, {"index": few, "num_segments": 5}),
        "indptr": (23, {"indptr": torch.tensor([0, 4, 5, 17, 23])}),
        "hub": (600, {"index": hub, "num_segments": 2}),
        "one each": (7, {"index": torch.arange(7)}),
    }


SHAPES = {"index": (3,), "indptr": (2, 33), "hub": (), "one each": (65,)}
"""The dimensions behind the rows."""


def _cases(*whats: str) -> list[Case]:
    tables = _tables(torch.Generator().manual_seed(0))
    return [
        _case(name, what, (tables[what][0], *SHAPES[what]), tables[what][1])
        for name in REDUCTIONS
        for what in whats
    ]


def _of_products(function: Callable[..., Tensor], x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return function(x * y, **options)


def door_cases() -> list[Case]:
    """An op of torch's, a product and both, of x·y: the doors turn two inputs."""
    wanted = ("mean indptr", "max index", "softmax index")
    return [
        replace(
            case,
            call=functools.partial(_of_products, case.call),
            oracle=functools.partial(_of_products, case.oracle),
            inputs=(case.inputs[0], case.inputs[0].flip(0) + 2),
        )
        for case in _cases("index", "indptr")
        if case.name in wanted
    ]


def suite() -> Suite:
    """What `make check` runs on a GPU."""
    return Suite(_cases(*SHAPES), _cases("index"), [], [], ())
