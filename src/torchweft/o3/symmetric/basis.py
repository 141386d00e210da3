"""Independent symmetric products of one vector x of irreps with itself, degree by degree.

    g(x) = (x_h ⊗ b(x))_L,  b a basis function of the degree below, x_h an item of x

Coupling in every order counts each function many times: of the 74 cubic products of 0e+1o+2e+3o
into 0e and 1o that MACE has weights for, 20 are independent.  MACE's weights w are kept, and
w' = T w weights the independent ones: Σ_k w_k f_k(x) = Σ_p w'_p g_p(x).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchweft.errors import ShapeError
from torchweft.o3.irreps.irreps import Irrep
from torchweft.o3.irreps.wigner import entries_3j, wigner_3j

__all__ = ["Basis", "Coupled", "DegreeOutput", "expressed", "symmetric_basis"]

Array = np.ndarray[Any, Any]

COMPARED_POINTS = 256
"""Random points at which functions are compared: more points than functions of a degree."""

DEPENDENT = 1e-9
"""A part of a function's size that is rounding error; functions are of the size of 1 or more."""

ROUNDED = 2.0**-12
"""A part of a function's size by which couplings that are kept in float32 may be off."""


class Coupled(NamedTuple):
    """(x_item ⊗ b)_ir √(2l+1): `left` is the number of b in the degree below."""

    left: int
    item: int
    ir: Irrep


class DegreeOutput(NamedTuple):
    """What one degree adds to one irrep of the output.

    Args:
        products: the independent ones.
        weights: T (independent products, MACE's products).
    """

    products: tuple[Coupled, ...]
    weights: Array


class Basis(NamedTuple):
    """Functions by degree.

    Args:
        levels: of the degrees 2 to correlation − 1, those that something above needs.
        outputs: for each degree from 1 on and each irrep of the output; its products read the
            degree below, which is the number 1 for degree 1, and x for degree 2.
    """

    levels: tuple[tuple[Coupled, ...], ...]
    outputs: tuple[tuple[DegreeOutput, ...], ...]


class _Function(NamedTuple):
    """A function by its values (points, 2l+1)."""

    ir: Irrep
    values: Array


@functools.lru_cache(maxsize=64)
def symmetric_basis(items: tuple[Irrep, ...], outs: tuple[Irrep, ...], correlation: int) -> Basis:
    """The basis of polynomials of x up to a degree.

    Args:
        items: the irreps of x.
        outs: those of the output.
        correlation: the highest degree.
    """
    x = _points(items)
    below: list[_Function] = [_Function(Irrep(0, 1), np.ones((COMPARED_POINTS, 1)))]
    levels: list[list[Coupled]] = []
    outputs = []
    for degree in range(1, correlation + 1):
        candidates = list(_candidates(below, items))
        added = []
        for ir in outs:
            products, functions = _independent([c for c in candidates if c.ir == ir], below, x)
            wanted = [f for f in _mace_products(x, degree) if f.ir == ir]
            added.append(DegreeOutput(tuple(products), _expanded(wanted, functions)))
        outputs.append(tuple(added))
        if degree == 1:
            below = x
        elif degree < correlation:
            every = dict.fromkeys(c.ir for c in candidates)
            parts = [_independent([c for c in candidates if c.ir == ir], below, x) for ir in every]
            levels.append([product for products, _ in parts for product in products])
            below = [function for _, functions in parts for function in functions]
    return _pruned(levels, outputs)


def expressed(basis: Basis, items: Sequence[Irrep], couplings: Sequence[Sequence[Array]]) -> Basis:
    """The same functions, weighted by the weights of other couplings than MACE's first.

    Args:
        basis: of x.
        items: the irreps of x.
        couplings: U (2l+1, D, …, D, K) for each degree and irrep of the output: K functions
            Σ U x … x.

    Raises:
        ShapeError: they are none of x's polynomials.
    """
    x = _points(items)
    row = np.concatenate([function.values for function in x], 1)
    below, monomials = (
        [_Function(Irrep(0, 1), np.ones((COMPARED_POINTS, 1)))],
        np.ones((COMPARED_POINTS, 1)),
    )
    outputs = []
    for degree, (adds, given) in enumerate(zip(basis.outputs, couplings, strict=True), 1):
        monomials = np.einsum("si,sj->sij", monomials, row).reshape(COMPARED_POINTS, -1)
        fitted = []
        for output, table in zip(adds, given, strict=True):
            functions = [_coupled(x[c.item], below[c.left], c.ir) for c in output.products]
            values = np.einsum(
                "sn,mnk->ksm", monomials, table.reshape(len(table), monomials.shape[1], -1),
                optimize=True,
            )  # fmt: skip
            fitted.append(output._replace(weights=_fitted(values, functions)))
        outputs.append(tuple(fitted))
        level = basis.levels[degree - 2] if 1 < degree <= len(basis.levels) + 1 else ()
        below = x if degree == 1 else [_coupled(x[c.item], below[c.left], c.ir) for c in level]
    return basis._replace(outputs=tuple(outputs))


def _fitted(values: Array, functions: Sequence[_Function]) -> Array:
    """T of functions (K, points, 2l+1); nothing for none."""
    wanted = [_Function(Irrep(0, 1), of_one) for of_one in values]
    found = _expanded(wanted, functions) if functions else np.zeros((0, len(wanted)))
    made = np.tensordot(found.T, [f.values for f in functions], 1) if functions else 0
    if np.abs(values - made).max(initial=0) > ROUNDED * np.abs(values).max(initial=0):
        raise ShapeError(
            "the couplings of a symmetric contraction are no equivariant polynomials in e3nn's "
            "basis: weights would mean something else here. Pass a model whose couplings are "
            "e3nn's."
        )
    return found if functions else np.zeros((0, 0))


def _points(items: Iterable[Irrep]) -> list[_Function]:
    generator = np.random.default_rng(0)
    return [_Function(ir, generator.standard_normal((COMPARED_POINTS, ir.dim))) for ir in items]


def _coupled(first: _Function, second: _Function, ir: Irrep) -> _Function:
    table = wigner_3j(first.ir.l, second.ir.l, ir.l, torch.float64, "cpu").numpy()
    values = np.einsum("sa,sb,abm->sm", first.values, second.values, table, optimize=True)
    return _Function(ir, values * ir.dim**0.5)


def _candidates(below: Sequence[_Function], items: Sequence[Irrep]) -> Iterator[Coupled]:
    """All products, the cheap ones first."""
    found = [
        (len(entries_3j(item.l, left.ir.l, ir.l)), Coupled(n, h, ir))
        for n, left in enumerate(below)
        for h, item in enumerate(items)
        for ir in left.ir * item
    ]
    return (product for _, product in sorted(found))


def _independent(
    candidates: Iterable[Coupled], below: Sequence[_Function], x: Sequence[_Function]
) -> tuple[list[Coupled], list[_Function]]:
    """Candidates that are no combination of earlier ones, by Gram-Schmidt, and their values."""
    products: list[Coupled] = []
    functions: list[_Function] = []
    axes = np.zeros((0, 0))
    for candidate in candidates:
        function = _coupled(x[candidate.item], below[candidate.left], candidate.ir)
        flat = function.values.ravel()
        axes = axes.reshape(-1, flat.size)
        rest = flat
        for _ in range(2):  # twice is enough for all digits
            rest = rest - axes.T @ (axes @ rest)
        size = np.linalg.norm(rest)
        if size > DEPENDENT * max(1.0, float(np.linalg.norm(flat))):
            axes = np.vstack([axes, rest / size])
            products.append(candidate)
            functions.append(function)
    return products, functions


def _mace_products(x: Sequence[_Function], degree: int) -> list[_Function]:
    """Every coupling from the left, in MACE's order: its weights are numbered so."""
    found = list(x)
    for _ in range(degree - 1):
        found = [
            _coupled(left, right, ir)
            for left in found
            for right in x
            for ir in left.ir * right.ir
            if degree != 4 or (ir.p == (-1) ** ir.l and ir.l < 12)  # so does MACE for degree 4
        ]
        found.sort(key=lambda function: function.ir)
    return found


def _expanded(wanted: Sequence[_Function], functions: Sequence[_Function]) -> Array:
    """T: each wanted function as a sum of independent ones."""
    if not wanted or not functions:
        return np.zeros((len(functions), len(wanted)))
    basis, columns = (
        np.stack([f.values.ravel() for f in group], 1) for group in (functions, wanted)
    )
    solution: Array = np.linalg.lstsq(basis, columns, rcond=None)[0]
    return np.where(np.abs(solution) < DEPENDENT, 0.0, solution)


def _pruned(levels: Sequence[list[Coupled]], outputs: Sequence[tuple[DegreeOutput, ...]]) -> Basis:
    """Without the functions that nothing reads, from the highest degree down."""
    kept: list[tuple[Coupled, ...]] = []
    adds = list(outputs)
    above: list[Coupled] = []
    for n in reversed(range(len(levels))):
        degree = n + 2  # of this level; its readers are the outputs and the level one higher
        readers = [c for output in adds[degree] for c in output.products] + above
        used = sorted({c.left for c in readers})
        place = {old: new for new, old in enumerate(used)}
        adds[degree] = tuple(
            output._replace(products=_renumbered(output.products, place)) for output in adds[degree]
        )
        if kept:
            kept[-1] = _renumbered(kept[-1], place)
        above = [levels[n][old] for old in used]
        kept.append(tuple(above))
    return Basis(tuple(reversed(kept)), tuple(adds))


def _renumbered(products: Iterable[Coupled], place: dict[int, int]) -> tuple[Coupled, ...]:
    return tuple(product._replace(left=place[product.left]) for product in products)
