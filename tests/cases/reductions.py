"""Contract cases of reductions: each one, over i and over j, dense and block-sparse, batched.

The oracle is the dense matrix of the pairs, each counted as often as the ranges list it.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.cases.suite import Suite
from torchweft.reductions.engine.reduction import reduce
from torchweft.reductions.formula.node import Node, const, node, var
from torchweft.testing.bounds import assert_as_accurate, plain_error
from torchweft.testing.contract import Case

__all__ = ["FORMULAS", "door_cases", "looped_cases", "make_case", "pairs_of", "suite"]

Shape = tuple[int, ...]
Dense = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Formula(NamedTuple):
    """A formula of x (i), y (j), b (j) and p, as nodes and on tensors that broadcast."""

    nodes: Callable[[Node, Node, Node, Node], Node]
    dense: Dense


def _sqdist(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().sum(-1, keepdim=True)


def _of(op: str, *args: Node, data: Any = None) -> Node:
    return node(op, *args, data=data)


FORMULAS: dict[str, Formula] = {
    "gaussian": Formula(
        lambda x, y, b, p: _of("exp", -(_of("sqdist", x, y) * p)) * b,
        lambda x, y, b, p: (-_sqdist(x, y) * p).exp() * b,
    ),
    "written out": Formula(
        lambda x, y, b, p: _of("exp", -(_of("sum", (x - y) * (x - y)) * p)) * b,
        lambda x, y, b, p: (-_sqdist(x, y) * p).exp() * b,
    ),
    "laplacian": Formula(
        lambda x, y, b, p: _of("exp", -(_of("sqrt", _of("sqdist", x, y) * p) * const(0.5))) * b,
        lambda x, y, b, p: (-0.5 * (_sqdist(x, y) * p).sqrt()).exp() * b,
    ),
    "cauchy": Formula(
        lambda x, y, b, p: b / (_of("sqdist", x, y) * p + 1),
        lambda x, y, b, p: b / (1 + _sqdist(x, y) * p),
    ),
    "distances": Formula(
        lambda x, y, b, p: _of("sqdist", x, y) * p + _of("sum", b) * const(0.5),
        lambda x, y, b, p: _sqdist(x, y) * p + 0.5 * b.sum(-1, keepdim=True),
    ),
    "products": Formula(
        lambda x, y, b, p: _of("cos", x * y * p) + _of("sum", b),
        lambda x, y, b, p: (x * y * p).cos() + b.sum(-1, keepdim=True),
    ),
    "no pair": Formula(
        lambda x, y, b, p: x * p + y + _of("sum", b),
        lambda x, y, b, p: x * p + y + b.sum(-1, keepdim=True),
    ),
}

WEIGHT = Formula(lambda x, y, b, p: _of("pow", b, data=2) + 1, lambda x, y, b, p: b.square() + 1)
"""Positive: the logarithm of a sum with signs has no bound."""

REDUCTIONS = (
    ("Sum", "gaussian"),
    ("LogSumExp", "distances"),
    ("SumSoftMaxWeight", "distances"),
    ("Min", "distances"),
    ("Max", "distances"),
    ("KMin", "distances"),
)

RANGES = {
    "whole": ([[0, 3], [3, 9], [9, 13]], [[0, 6], [6, 11]], [[1, 0], [1, 1], [0, 1]]),
    "holes": ([[2, 5], [7, 12]], [[1, 4], [5, 9]], [[1, 1], [0, 1]]),
    "nothing": ([[0, 4], [4, 13]], [[0, 11]], [[0], [0]]),
}
"""Blocks of 13 rows, of 11 columns, and which of them meet."""


@functools.cache
def _arrays(ranges: str) -> tuple[Tensor, ...]:
    """The 6-tuple, spelled out."""
    rows, columns, keep = RANGES[ranges]
    halves = []
    for own, other, mask in ((rows, columns, keep), (columns, rows, list(zip(*keep, strict=True)))):
        lists = [[o for o, k in zip(other, line, strict=True) if k] for line in mask]
        ends = torch.tensor([len(line) for line in lists]).cumsum(0)
        flat = torch.tensor([pair for line in lists for pair in line]).reshape(-1, 2)
        halves.append((torch.tensor(own), ends, flat.long()))
    return *halves[0], *halves[1]


def pairs_of(arrays: tuple[Tensor, ...], rows: int, columns: int) -> Tensor:
    """(M, N): how often each pair is listed."""
    found = torch.zeros(rows, columns, dtype=torch.float64)
    starts = [0, *arrays[1].tolist()]
    for c, (begin, end) in enumerate(arrays[0].tolist()):
        for first, last in arrays[2][starts[c] : starts[c + 1]].tolist():
            found[begin:end, first:last] += 1
    return found


@functools.cache
def _text(formula: str, dims: tuple[int, ...]) -> str:
    """A formula for variables of so many components, or the weight."""
    of = WEIGHT if formula == "weight" else FORMULAS[formula]
    variables = [var(n, d, c) for n, (d, c) in enumerate(zip(dims, (0, 1, 1, 2), strict=True))]
    return str(of.nodes(*variables))


def _call(
    *inputs: Tensor,
    kind: str,
    text: str,
    axis: int,
    weight: str | None = None,
    backend: str | None = None,
    formula: str = "",
    **arrays: Tensor,
) -> Tensor:
    found = reduce(
        kind,
        text,
        inputs,
        axis,
        weight=weight,
        k=3,
        ranges=tuple(arrays[f"r{n}"] for n in range(6)) if arrays else None,  # type: ignore[arg-type]
        backend=backend,
    )
    assert isinstance(found, Tensor)
    return found


def _oracle(
    *inputs: Tensor,
    kind: str,
    formula: str,
    axis: int,
    text: str = "",
    weight: str | None = None,
    **arrays: Tensor,
) -> Tensor:
    x, y, b, p = inputs
    at = x.unsqueeze(-2), y.unsqueeze(-3), b.unsqueeze(-3), p[..., None, None, :]
    rows, columns, along = x.shape[-2], y.shape[-2], -2 if axis == 1 else -3
    f = FORMULAS[formula].dense(*at)
    whole = (*f.shape[:-3], rows, columns, -1)
    f = f.expand(whole)
    count = x.new_ones(rows, columns, 1)
    if arrays:
        listed = pairs_of(tuple(arrays[f"r{n}"].cpu() for n in range(6)), rows, columns)
        count = listed[..., None].to(x)
    if kind == "Sum":
        return (f * count).sum(along)
    if kind in ("LogSumExp", "SumSoftMaxWeight"):
        w = WEIGHT.dense(*at).expand(whole) * count
        top = torch.where(count > 0, f, -torch.inf).amax(along, keepdim=True).detach()
        e = (f - torch.where(top.isfinite(), top, 0)).exp()
        if kind == "SumSoftMaxWeight":
            below = (e * count).sum(along)
            return (e * w).sum(along) / torch.where(below > 0, below, 1)
        return (e * w).sum(along).log() + top.squeeze(along)
    sign = -1 if kind == "Max" else 1
    found = torch.where(count > 0, sign * f, torch.inf).sort(dim=along).values
    if kind != "KMin":
        return sign * found.select(along, 0)
    nearest = found.narrow(along, 0, 3)
    nearest = nearest if along == -2 else nearest.movedim(-3, -2)
    return nearest.squeeze(-1) if nearest.shape[-1] == 1 else nearest


def make_case(
    kind: str,
    formula: str = "gaussian",
    *,
    axis: int = 1,
    sizes: tuple[int, int] = (13, 11),
    dims: tuple[int, int] = (3, 2),
    batch: tuple[Shape, Shape, Shape, Shape] = ((), (), (), ()),
    ranges: str = "",
) -> Case:
    """A case of a reduction with random inputs.

    Args:
        kind: its name.
        formula: a key of FORMULAS.
        axis: 1 reduces over j, 0 over i.
        sizes: M and N.
        dims: of the points, and of b.
        batch: the batch dimensions of x, y, b and p.
        ranges: a key of RANGES; those need 13 rows and 11 columns.
    """
    (rows, columns), (d, e) = sizes, dims
    words = f"{formula}, over {'ij'[axis]}, {rows} × {columns}, dims {d} and {e}"
    words += f", batch {batch}" * any(batch) + f", ranges: {ranges}" * bool(ranges)
    name = f"{kind}: {words}"
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    draw = functools.partial(torch.randn, dtype=torch.float64, generator=generator)
    x, y = draw(*batch[0], rows, d), draw(*batch[1], columns, d)
    # scores of order 1: the backward pass computes them again, to |score| · u
    scale = 0.2 if kind in ("LogSumExp", "SumSoftMaxWeight") else 1
    p = scale * (draw(*batch[3], 1).abs() + 0.5) / max(1, d / 8)
    inputs = (x, y, draw(*batch[2], columns, e), p)
    tables: dict[str, Any] = {"kind": kind, "formula": formula, "axis": axis}
    tables["text"] = _text(formula, (d, d, e, 1))
    weighted = kind in ("LogSumExp", "SumSoftMaxWeight")
    tables["weight"] = _text("weight", (d, d, e, 1)) if weighted else None
    if ranges:
        tables |= {f"r{n}": array for n, array in enumerate(_arrays(ranges))}
    return Case(
        name, _call, _oracle, inputs, tables, polynomial=False, together=True, neighbours=16
    )


def reduction_cases() -> list[Case]:
    """Every reduction over each axis, whole and block-sparse."""
    cases = []
    for kind, formula in REDUCTIONS:
        for axis in (0, 1):
            cases += [make_case(kind, formula, axis=axis)]
        # without a pair, a minimum is infinite: no derivative to hold it against
        masks = ("whole", "holes", "nothing") if kind in ("Sum", "SumSoftMaxWeight") else ("whole",)
        cases += [make_case(kind, formula, axis=n % 2, ranges=m) for n, m in enumerate(masks)]
    return cases


def formula_cases() -> list[Case]:
    """Formulas of other kinds, dimensions from 1 to 64."""
    return [
        *(make_case("Sum", formula) for formula in FORMULAS if formula != "gaussian"),
        make_case("Max", "products"),
        make_case("KMin", "products", axis=0),
        *(make_case("Sum", dims=dims) for dims in ((1, 1), (8, 3), (16, 1), (31, 8), (48, 5))),
        *(make_case("LogSumExp", "distances", dims=dims) for dims in ((1, 1), (16, 1), (64, 2))),
    ]


def size_cases() -> list[Case]:
    """One row, one column, past a tile, and batches that broadcast."""
    return [
        make_case("Sum", sizes=(1, 7)),
        make_case("Sum", sizes=(7, 1)),
        make_case("Sum", sizes=(200, 70)),
        make_case("LogSumExp", "distances", sizes=(40, 300)),
        make_case("KMin", "distances", sizes=(70, 200)),
        make_case("Sum", batch=((2,), (2,), (2,), (2,))),
        make_case("Sum", batch=((3, 1), (2,), (), (3, 1)), axis=0),
        make_case("LogSumExp", "distances", batch=((2,), (1,), (1,), ())),
        make_case("Min", "distances", batch=((2,), (2,), (1,), ())),
        make_case("Sum", batch=((2,), (), (2,), ()), ranges="holes"),
    ]


def looped_cases() -> list[Case]:
    """Those that loops of the CPU are compiled for: of few components, since each takes seconds.

    Each reduction has one axis, that of its case in `suite().full`, so that loops are shared.
    """

    def small(kind: str, formula: str = "gaussian", **options: Any) -> Case:
        axis = 0 if kind in ("SumSoftMaxWeight", "Max") or formula == "laplacian" else 1
        return make_case(kind, formula, axis=axis, dims=(2, 1), **options)

    kinds = [*REDUCTIONS[:4], ("Max", "products"), REDUCTIONS[5]]
    return [
        *(small(kind, formula) for kind, formula in kinds),
        *(small(kind, formula, ranges="whole") for kind, formula in kinds),
        *(small(*REDUCTIONS[n], ranges=m) for n in (0, 2) for m in ("holes", "nothing")),
        small("Sum", sizes=(200, 70)),
        small("LogSumExp", "distances", sizes=(40, 300)),
        small("KMin", "distances", sizes=(70, 200)),
        small("Sum", batch=((2,), (2,), (2,), (2,))),
        small("Sum", batch=((3, 1), (2,), (), (3, 1))),
        small("Sum", "laplacian"),
    ]


def door_cases() -> list[Case]:
    """A small case of each operator, for the promises that do not need a backend."""
    small = functools.partial(make_case, sizes=(4, 3), dims=(2, 2))
    return [
        small("Sum", "cauchy"),
        small("LogSumExp", "distances", axis=0),
        small("KMin", "distances"),
        make_case("Sum", "cauchy", ranges="whole"),
    ]


def check_far_clouds(device: str) -> None:
    """Gaussian sums of clouds 1,000 widths across, 10,000 away from the origin, are of float32."""
    generator = torch.Generator(device).manual_seed(0)
    draw = functools.partial(torch.rand, generator=generator, device=device)
    for dim in (3, 64):
        side = 1000 / dim**0.5
        near = draw(256, dim) * side
        x = near + 1e4
        y = (near + torch.randn(256, dim, generator=generator, device=device) / dim**0.5) + 1e4
        b = torch.randn(256, 1, generator=generator, device=device)
        p = torch.ones(1, device=device)
        inputs = (x, y, b, p)
        out = _call(*inputs, kind="Sum", text=_text("gaussian", (dim, dim, 1, 1)), axis=1)
        oracle = functools.partial(_oracle, kind="Sum", formula="gaussian", axis=1)
        exact = oracle(*(a.double() for a in inputs))
        noise = plain_error(oracle(*inputs), exact, torch.float32)
        assert_as_accurate(out, exact, noise)


@functools.cache
def suite() -> Suite:
    """The reductions' part of `make check`."""
    cases = reduction_cases() + formula_cases() + size_cases()
    small = functools.partial(make_case, dims=(2, 1))
    full = [small("Sum"), small("LogSumExp", "distances"), small("KMin", "distances")]
    full.append(small("Sum", ranges="holes"))
    large = (check_far_clouds,)
    return Suite(
        cases, full, door_cases(), door_cases(), large, backends=("torch",), autocast=False
    )
