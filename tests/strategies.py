"""Hypothesis strategies: products over arbitrary tables.  Needs hypothesis (extra `[dev]`)."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.cases.products import OPS, make_case
from torchweft.testing.contract import Case

__all__ = ["indices", "product_cases", "segments"]


def indices(size: int, length: int) -> st.SearchStrategy[Tensor]:
    """(length,) numbers below size, int32 or int64; constant and sorted ones are likely."""
    numbers = st.lists(st.integers(0, max(size - 1, 0)), min_size=length, max_size=length)
    return st.builds(
        lambda values, dtype, order: torch.tensor(order(values), dtype=dtype),
        numbers,
        st.sampled_from([torch.int32, torch.int64]),
        st.sampled_from([list, sorted]),
    )


@st.composite
def segments(draw: st.DrawFn, length: int, max_segments: int = 6) -> Tensor:
    """Bounds of segments within 0..length: empty ones, long ones, entries of no segment."""
    bounds = draw(st.lists(st.integers(0, length), min_size=1, max_size=max_segments + 1))
    if draw(st.booleans()):
        bounds += [0, length]
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return torch.tensor(sorted(bounds), dtype=dtype)


@st.composite
def product_cases(draw: st.DrawFn, ops: tuple[str, ...] = tuple(OPS)) -> Case:
    """A small call of one of the ops over any tables that it admits."""
    terms = draw(st.integers(0, 12))
    tables: dict[str, Any] = {}
    rows = []
    for name in ("index1", "index2"):
        size = draw(st.integers(1, 6))
        if draw(st.booleans()):
            tables[name] = draw(indices(size, terms))
        rows.append(size if name in tables else terms)
    if draw(st.booleans()):
        tables["scaled"] = True
    results = entries = terms
    if draw(st.booleans()):
        if terms and draw(st.booleans()):
            entries = draw(st.integers(0, 15))
            tables["gather_index"] = draw(indices(terms, entries))
        tables["seg"] = draw(segments(entries))
        results = tables["seg"].numel() - 1
    if draw(st.booleans()):
        size = draw(st.integers(1, 6))
        tables["index_out"] = draw(indices(size, results))
        tables["out_size"] = draw(st.sampled_from([None, size, size + 2]))
    else:
        spare = max(results, entries)  # as many rows as entries, of which some have none
        tables["out_size"] = draw(st.sampled_from([None, results, results + 3, spare]))
    tables["out_accumulated"] = draw(st.booleans())
    return make_case(
        draw(st.sampled_from(ops)),
        "any",
        tables,
        shared=draw(st.sampled_from(["nn", "sn", "ns", "ss"])),
        batch=draw(st.integers(0, 3)),
        channels=(draw(st.integers(1, 5)), draw(st.integers(1, 5))),
        rows=(rows[0], rows[1]),
        terms=terms,
    )
