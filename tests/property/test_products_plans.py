"""Products over arbitrary tables: every backend equals the oracle, the oracle equals plain loops.

Seen red with: terms of an info left unsorted, the last entry of a segment dropped, entries outside
of all segments counted, a repeated entry of gather_index counted once.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings

from tests.cases.products import OPS
from tests.conftest import BACKENDS, INTERPRETED
from tests.strategies import indices, product_cases, segments
from torchweft import products
from torchweft.testing.contract import Setting, check_values

EXAMPLES = 25 if INTERPRETED else 150
COMBINE = {
    "mul": lambda x, y: x * y,
    "outer": lambda x, y: x[:, None] * y[None, :],
    "inner": lambda x, y: (x * y).sum(),
    "vecmat": lambda x, y: x @ y,
    "vecsca": lambda x, y: x * y,
    "scavec": lambda x, y: x * y,
    "mat_t_vec": lambda x, y: x.T @ y,
}


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=EXAMPLES)
@given(case=product_cases())
def test_any_tables(case, backend):
    check_values(case, Setting(dtype=torch.float64, backend=backend))


def loops(op, x, y, scale, tables, num_rows):
    """The sum as it is defined, entry by entry, for one n."""
    index1, index2, seg, gather, index_out = (
        None if tables.get(name) is None else tables[name].tolist()
        for name in ("index1", "index2", "seg", "gather_index", "index_out")
    )
    given_tables = [t for t in (index1, index2, scale) if t is not None]
    terms = len(given_tables[0]) if given_tables else len(x)
    bounds = list(range(terms + 1)) if seg is None else seg
    rows = {}
    for m, (begin, end) in enumerate(itertools.pairwise(bounds)):
        row = m if index_out is None else index_out[m]
        for k in range(begin, end):
            t = k if gather is None else gather[k]
            term = COMBINE[op](x[t if index1 is None else index1[t]],
                               y[t if index2 is None else index2[t]])  # fmt: skip
            term = term if scale is None else scale[t] * term
            rows[row] = rows.get(row, 0) + term
    return [rows.get(m, 0) for m in range(num_rows)]


@settings(max_examples=100)
@given(case=product_cases())
def test_oracle_equals_loops(case):
    # integers are summed without rounding, so the order does not matter
    x, y, scale = (None if a is None else (4 * a).round() for a in case.inputs)
    found = case.oracle(x, y, scale, **case.tables)
    op = case.name.split(":")[0]
    batched = [a.dim() == len(dims) + 2 for a, dims in zip((x, y), OPS[op], strict=True)]
    sizes = [len(a) for a, has_n in zip((x, y), batched, strict=True) if has_n]
    total = not any(batched) or case.tables["out_accumulated"]
    num_rows = found.shape[0 if total else 1]
    by_n = [
        loops(op, *(a[n] if has_n else a for a, has_n in zip((x, y), batched, strict=True)),
              scale, case.tables, num_rows)
        for n in range(sizes[0] if sizes else 1)
    ]  # fmt: skip
    for m in range(num_rows):
        values = [rows[m] for rows in by_n]
        expected = [sum(values)] if total else values
        for n, value in enumerate(expected):
            out = found[m] if total else found[n, m]
            torch.testing.assert_close(out, torch.zeros_like(out) + value, rtol=0, atol=0)


@settings(max_examples=100)
@given(index=indices(5, 9), index1=indices(4, 9), index2=indices(3, 9))
def test_info_sums_unsorted_terms(index, index1, index2):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(-4, 5, (n, 2), generator=generator).double() for n in (4, 3))
    scale = torch.arange(1.0, 10.0, dtype=torch.float64)
    info = products.sparse_product_info(index1, index2, index, scale, out_size=6)
    expected = torch.zeros(6, 2, dtype=torch.float64)
    expected.index_add_(0, index.long(), scale[:, None] * x[index1.long()] * y[index2.long()])
    torch.testing.assert_close(products.sparse_mul(x, y, info), expected, rtol=0, atol=0)
    assert (index.long()[torch.argsort(index, stable=True)].diff() >= 0).all()
    assert info.seg_out.numel() == 7


@given(seg=segments(9))
def test_segments_are_bounds(seg):
    assert seg.numel()
    assert int(seg[0]) >= 0
    assert int(seg[-1]) <= 9
    assert (seg.diff() >= 0).all()
