"""Contract cases of the products: every op in every mode, with every sharing and channel count.

Not the full cross product: each op meets each mode, each way to share inputs (with and without
the sum over n) and each channel count at least once.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.cases.suite import Suite
from torchweft import products
from torchweft.products.functions import (
    indexed_inner,
    indexed_mul,
    indexed_vecsca,
    indexed_vecsca_scale_gather,
)
from torchweft.products.reference import indexed_product
from torchweft.testing.bounds import assert_within_bound
from torchweft.testing.contract import Case, assert_same_bits

__all__ = ["OPS", "door_cases", "make_case", "op_cases", "small_cases", "suite"]

CHANNELS = ((1, 128), (3, 64), (8, 65), (16, 31), (31, 8), (64, 16), (65, 3), (128, 1))
"""(C, D): every count of interest for both, and no pair that is slow to interpret."""

SHARED = {"batched": "nn", "left shared": "sn", "right shared": "ns", "both shared": "ss"}
BATCH = 3
TERMS = 9

OPS = {
    "mul": ("C", "C"),
    "outer": ("C", "D"),
    "inner": ("C", "C"),
    "vecmat": ("C", "CD"),
    "vecsca": ("C", ""),
    "scavec": ("", "C"),
    "mat_t_vec": ("CD", "C"),
}
"""The dimensions behind the rows of each input."""

Tables = dict[str, Any]


def _index(size: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, size, (length,), generator=generator)


def _indices(generator: torch.Generator) -> Tables:
    return {"index1": _index(5, TERMS, generator), "index2": _index(4, TERMS, generator)}


SEG = torch.tensor([0, 3, 3, 4, TERMS])  # an empty segment in the middle
SEG_PART = torch.tensor([2, 5, 5, 7])  # terms before the first and after the last
SEG_GATHER = torch.tensor([0, 4, 4, 5, 12])
ROW_OF_SEGMENT = torch.tensor([4, 0, 4, 2])  # rows 1, 3 and 5 are reached by nothing, 4 twice


def _gather(generator: torch.Generator) -> Tables:
    return {"seg": SEG_GATHER, "gather_index": _index(TERMS, 12, generator)}


def _rows_of_terms(generator: torch.Generator) -> Tensor:
    return torch.tensor([3, 0, 3, 5, 1, 3, 0, 5, 5])


MODES: dict[str, Callable[[torch.Generator], Tables]] = {
    "plain": lambda g: {},
    "indexed": _indices,
    "indexed left": lambda g: {"index1": _index(5, TERMS, g)},
    "scaled": lambda g: {"index2": _index(4, TERMS, g), "scaled": True},
    "scaled rows": lambda g: {"scaled": True},
    "segmented": lambda g: {**_indices(g), "seg": SEG},
    "segments of rows": lambda g: {"seg": SEG},
    "gathered": lambda g: {**_indices(g), **_gather(g)},
    "index_out": lambda g: {**_indices(g), "index_out": _rows_of_terms(g), "out_size": 7},
    "largest index_out": lambda g: {**_indices(g), "index_out": _rows_of_terms(g), "scaled": True},
    "part": lambda g: {**_indices(g), "seg": SEG_PART, "out_size": 5, "scaled": True},
    "lone terms": lambda g: {"seg": torch.tensor([1, 2, 2, 3]), "out_size": TERMS},
    "part to rows": lambda g: {
        **_indices(g), "seg": SEG_PART, "index_out": ROW_OF_SEGMENT[:3], "out_size": 5,
    },
    "everything": lambda g: {
        **_indices(g), **_gather(g), "index_out": ROW_OF_SEGMENT, "out_size": 6, "scaled": True,
    },
}  # fmt: skip
"""Tables of each mode; T = 9 terms, 5 rows of input1 and 4 of input2 where they are indexed."""


def make_case(
    op: str,
    name: str,
    tables: Tables,
    *,
    shared: str = "nn",
    batch: int = BATCH,
    channels: tuple[int, int] = (8, 3),
    rows: tuple[int, int] | None = None,
    terms: int = TERMS,
    function: str = "",
) -> Case:
    """A case of an op with random inputs that fit its tables.

    Args:
        op: one of the seven.
        name: of the mode.
        tables: keywords of the public function, and "scaled" for a scale of random numbers.
        shared: for each input "n" (has N) or "s" (shared over N).
        batch: N.
        channels: (C, D).
        rows: of the two inputs; by default what the tables ask for, or one row more than terms.
        terms: T.
        function: the public function, `indexed_{op}_scale_gather` by default.
    """
    name = f"{op}: {name}, {shared}, N={batch}, C={channels[0]}"
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    randn = functools.partial(torch.randn, dtype=torch.float64, generator=generator)
    tables = dict(tables)
    scale = randn(terms) if tables.pop("scaled", False) else None
    # an input without index may have more rows than there are terms, if a table tells their number
    spare = int(scale is not None or "index1" in tables or "index2" in tables)
    default = tuple(
        size if index in tables else terms + spare for index, size in (("index1", 5), ("index2", 4))
    )
    sizes = dict(zip("CD", channels, strict=True))
    x, y = (
        randn(*([batch] if has_n == "n" else []), num_rows, *(sizes[c] for c in dims))
        for has_n, num_rows, dims in zip(shared, rows or default, OPS[op], strict=True)
    )
    call = getattr(products, function or f"indexed_{op}_scale_gather")
    if scale is None and function:  # the thin forms take no scale, or have it as a third argument
        return Case(name, call, functools.partial(_thin_oracle, op), (x, y), tables)
    # summed over n against a shared input, the gradient of the other is the same for every n:
    # it is computed once and expanded, so what it is multiplied with next is summed over n first
    stored = int(tables.get("out_accumulated", False) and shared in ("ns", "sn"))
    return Case(name, call, functools.partial(indexed_product, op), (x, y, scale), tables, stored)


def _thin_oracle(op: str, x: Tensor, y: Tensor, accumulated: bool = False, **tables: Any) -> Tensor:
    return indexed_product(op, x, y, None, out_accumulated=accumulated, **tables)


def op_cases(op: str) -> list[Case]:
    """All cases of one of the seven ops but for the thin and the sparse forms."""
    shift = list(OPS).index(op)
    result: list[Case] = []

    def channels() -> tuple[int, int]:
        return CHANNELS[(len(result) + shift) % len(CHANNELS)]

    for i, (mode, make) in enumerate(MODES.items()):
        generator = torch.Generator().manual_seed(i + shift)
        shared = list(SHARED.values())[i % 4]
        accumulate = {"out_accumulated": True} if i % 3 == 2 else {}
        tables = make(generator) | accumulate
        name = mode + (" accumulated" if accumulate else "")
        result.append(make_case(op, name, tables, shared=shared, channels=channels()))
    for shared in SHARED.values():
        for accumulated in (False, True):
            generator = torch.Generator().manual_seed(shift)
            tables = MODES["everything"](generator) | {"out_accumulated": accumulated}
            name = "everything accumulated" if accumulated else "everything"
            result.append(make_case(op, name, tables, shared=shared, channels=channels(), batch=5))
    return result + _edge_cases(op)


def _edge_cases(op: str) -> list[Case]:
    """Sizes of 0 and 1, and an odd N that is summed over."""
    none = torch.zeros(0, dtype=torch.int64)
    everything = MODES["everything"](torch.Generator().manual_seed(0))
    accumulated = everything | {"out_accumulated": True}
    no_terms = {"index1": none, "index2": none}
    one = {"index1": torch.zeros(1, dtype=torch.int64), "seg": torch.tensor([0, 1])}
    make = functools.partial(make_case, op)
    return [
        make("no batch", everything, batch=0),
        make("no batch accumulated", accumulated, batch=0, shared="ns"),
        make("no terms", no_terms | {"seg": torch.zeros(4, dtype=torch.int64)}, terms=0),
        make("no terms, no rows", no_terms | {"scaled": True}, terms=0, rows=(0, 0), shared="ns"),
        make("no segments", everything | {"seg": SEG[:1], "index_out": none}),
        make("no channels", everything, channels=(0, 3)),
        make("one", one, batch=1, channels=(1, 1), terms=1),
        make("one channel accumulated", accumulated, channels=(1, 1), shared="sn"),
        make("one channel accumulated", accumulated, channels=(1, 1), shared="ns"),
        make("long batch accumulated", accumulated, batch=37, channels=(3, 2), shared="ns"),
        make("long batch accumulated", accumulated, batch=37, channels=(1, 3)),
    ]


def wide_cases(op: str) -> list[Case]:
    """Matrices of many channels and rows, as matrix products tile them; too slow to interpret."""
    if op not in ("outer", "vecmat", "mat_t_vec"):
        return []
    found = []
    for shared, channels in (("ns", (128, 64)), ("sn", (64, 65)), ("nn", (65, 128))):
        tables = MODES["everything"](torch.Generator().manual_seed(5))
        for accumulated in (False, True):
            options = tables | {"out_accumulated": accumulated}
            name = "wide accumulated" if accumulated else "wide"
            found.append(make_case(op, name, options, shared=shared, channels=channels, batch=33))
    return found


def skewed_case(op: str, terms: int = 10_000) -> Case:
    """One segment holds nearly all terms; the others hold one, or none."""
    generator = torch.Generator().manual_seed(1)
    seg = torch.tensor([0, 1, 2, 2, terms - 3, terms - 3, terms - 2, terms])
    tables = {
        "index1": _index(5, terms, generator),
        "index2": _index(4, terms, generator),
        "seg": seg,
        "gather_index": torch.randperm(terms, generator=generator),
        "scaled": True,
    }
    return make_case(op, "skewed", tables, batch=2, channels=(3, 2), terms=terms)


def thin_cases(op: str) -> list[Case]:
    """The five forms with fewer arguments."""
    indices = _indices(torch.Generator().manual_seed(2))
    segmented = indices | {"seg": SEG}
    make = functools.partial(make_case, op)
    accumulated = make(
        "thin accumulated", segmented, function=f"accumulated_indexed_{op}_segment", shared="ns"
    )
    oracle = functools.partial(_thin_oracle, op, accumulated=True)
    return [
        make("thin indexed", indices, function=f"indexed_{op}"),
        make("thin segment", {"seg": SEG}, function=f"{op}_segment"),
        make("thin indexed segment", segmented, function=f"indexed_{op}_segment"),
        make("thin scale", segmented | {"scaled": True}, function=f"indexed_{op}_scale_segment"),
        replace(accumulated, oracle=oracle, stored=1),
    ]


def _sparse_call(op: str, with_backward: bool) -> Callable[..., Tensor]:
    """`sparse_{op}` with the arguments of `indexed_{op}_scale_gather`."""

    def call(
        x: Tensor,
        y: Tensor,
        scale: Tensor | None,
        out_accumulated: bool = False,
        backend: str | None = None,
        **tables: Any,
    ) -> Tensor:
        if "seg" in tables:
            tables["seg_out"] = tables.pop("seg")
        info = products.SparseProductInfo(scale=scale, **tables)
        function: Callable[..., Tensor] = getattr(products, f"sparse_{op}")
        if not with_backward:
            return function(x, y, info, out_accumulated=out_accumulated, backend=backend)
        rows = (a.shape[a.dim() - 1 - len(d)] for a, d in zip((x, y), OPS[op], strict=True))
        backward = (products.SparseProductInfo(out_size=size) for size in rows)
        return function(x, y, info, *backward, out_accumulated, backend=backend)

    return call


def sparse_cases(op: str) -> list[Case]:
    """`sparse_{op}` over infos made by hand, in the fullest modes."""
    result = []
    for i, mode in enumerate(("indexed left", "segments of rows", "part", "everything")):
        tables = MODES[mode](torch.Generator().manual_seed(i)) | {"out_accumulated": i % 2 == 1}
        shared = list(SHARED.values())[i]
        like = make_case(op, f"sparse {mode}", tables, shared=shared)
        call = _sparse_call(op, with_backward=i == 2)
        result.append(replace(like, call=call))
    return result


def _sparse_scale(
    x: Tensor, scale: Tensor | None, backend: str | None = None, **tables: Any
) -> Tensor:
    info = products.SparseScaleInfo(scale=scale, **tables)
    return products.sparse_scale(x, info, backend=backend)


def _sparse_scale_oracle(
    x: Tensor, scale: Tensor | None, index: Tensor | None = None, seg_out: Tensor | None = None,
    **tables: Any,
) -> Tensor:  # fmt: skip
    return indexed_product("scale", x, None, scale, index1=index, seg=seg_out, **tables)


def scale_cases() -> list[Case]:
    """`sparse_scale`: square or not, with and without N, scale and index."""
    generator = torch.Generator().manual_seed(3)
    randn = functools.partial(torch.randn, dtype=torch.float64, generator=generator)
    index = {"index": _index(5, TERMS, generator)}
    out = {"index_out": ROW_OF_SEGMENT, "out_size": 6}
    return [
        Case(f"scale: {name}", _sparse_scale, _sparse_scale_oracle, inputs, tables)
        for name, inputs, tables in (
            ("segments", (randn(3, 5, 8), randn(TERMS)), index | {"seg_out": SEG}),
            ("segments to rows", (randn(5, 31), randn(TERMS)), index | out | {"seg_out": SEG}),
            ("part", (randn(3, 5, 3), None), index | {"seg_out": SEG_PART}),
            ("rows", (randn(2, TERMS + 2, 65), randn(TERMS)), {}),
            ("no batch", (randn(0, 5, 8), randn(TERMS)), index | {"seg_out": SEG}),
        )
    ]


def small_cases(op: str) -> list[Case]:
    """Every mode and every way to share, at sizes small enough for numerical gradients."""
    make = functools.partial(make_case, op, batch=2, channels=(2, 3))
    found = [
        make(f"small {mode}", tables(torch.Generator().manual_seed(i)), shared=shared)
        for i, (mode, tables) in enumerate(MODES.items())
        for shared in [list(SHARED.values())[i % 4]]
    ]
    everything = MODES["everything"](torch.Generator().manual_seed(0))
    for shared in SHARED.values():
        found.append(
            make("small accumulated", everything | {"out_accumulated": True}, shared=shared)
        )
        found.append(make("small all", everything, shared=shared))
    return found


def door_cases() -> list[Case]:
    """One small case of each op, for the promises that do not depend on the backend."""
    shared = [*SHARED.values(), "nn", "ns", "sn"]
    return [
        make_case(
            op,
            "door",
            MODES["everything"](torch.Generator().manual_seed(i)) | {"out_accumulated": i % 3 == 2},
            shared=shared[i],
            channels=(4, 3),
        )
        for i, op in enumerate(OPS)
    ]


def check_large_offsets(device: str) -> None:
    """Offsets past 2^31 elements, written and read: the last rows equal those of a small call."""
    batch, rows, channels = 2**16 + 8, 256, 129
    generator = torch.Generator(device).manual_seed(0)
    randn = functools.partial(torch.randn, dtype=torch.float16, device=device, generator=generator)
    x, y = randn(batch, 1, channels), randn(rows, channels)
    index = torch.zeros(rows, dtype=torch.int64, device=device)

    def oracle(x: Tensor, at: Callable[[Tensor], Tensor]) -> Tensor:
        return at(x.double()) * at(y.double())

    z = indexed_mul(x, y, index)
    if z.numel() <= 2**31:
        raise AssertionError(f"{z.numel()} elements do not reach past 2^31")
    last = x[-3:]
    assert_within_bound(z[-3:], oracle(last, torch.clone), oracle(last, torch.abs), 1)
    inner = indexed_inner(z, y, None, None)
    exact, magnitude = (
        (at(z[-3:].double()) * at(y.double())).sum(-1) for at in (torch.clone, torch.abs)
    )
    assert_within_bound(inner[-3:], exact, magnitude, channels)


def check_large_shared_rows(device: str) -> None:
    """A shared input of more than 2^31 elements, its last rows gathered; then summed into."""
    rows, channels = 2**24 + 8, 129
    x = torch.zeros(rows, channels, dtype=torch.float16, device=device)
    x[-4:] = torch.randn(4, channels, generator=torch.Generator().manual_seed(0)).to(x)
    weight = torch.ones(4, dtype=torch.float16, device=device)
    last = torch.arange(rows - 4, rows, device=device)
    found = indexed_vecsca(x, weight, last, None)
    assert_same_bits(found, x[-4:], "the last rows")
    back = indexed_vecsca_scale_gather(found, weight, index_out=last, out_size=rows)
    assert_same_bits(back, x, "the rows scattered back")


@functools.cache
def suite() -> Suite:
    """The products' part of `make check`."""
    per_op: Iterable[Callable[[str], list[Case]]] = (op_cases, thin_cases, sparse_cases)
    found = [case for op in OPS for make in per_op for case in make(op)]
    found += [skewed_case(op) for op in OPS] + scale_cases()
    wide = [case for op in OPS for case in wide_cases(op)]
    full = [case for case in found if "everything" in case.name or case.name.startswith("scale")]
    small = [case for op in OPS for case in small_cases(op)]
    return Suite(
        found + wide, full, small, door_cases(), (check_large_offsets, check_large_shared_rows)
    )
