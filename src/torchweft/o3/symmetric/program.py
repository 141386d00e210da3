"""MACE's symmetric contraction as polynomials of independent products, and their programs.

    g(x) = (x_h ⊗ b(x))_L,  b a basis function of the degree below, x_h an item of x
    z[L] = Σ_p w[p] g_p(x)_L
    w[element, p, c] = Σ_k T[p, k] parameter[element, k, c]

Coupling in every order counts each function many times: of the 74 cubic products of 0e+1o+2e+3o
into 0e and 1o that MACE has weights for, 20 are independent.  A `Basis` holds these; T expresses
MACE's products by them, Σ_k parameter_k f_k(x) = Σ_p w_p g_p(x).

A program computes one channel of one row: x are the components of the channel, w the weights of the
row's element.  Products of one irrep with others of one irrep are summed first, Σ_p w_p (x_h ⊗ b_p)
= x_h ⊗ Σ_p w_p b_p, so that a gradient forms (x_h ⊗ dz) once for all of them.  A program reads a
weight as one number a row and channel; kernels read it by element, and sum its gradient over the
element's rows.  T follows from the basis, or from given couplings, and its text is the key of the
program that makes weights of parameters; the couplings k of several parameters follow each other.
"""

from __future__ import annotations

import functools
import itertools
import json
import string
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchweft.core.expressions.expr import Expr, add, const, multiply
from torchweft.core.expressions.program import Operand, Output, Program, derive, mask
from torchweft.core.printing.dialect import most_live
from torchweft.core.printing.schedule import schedule
from torchweft.errors import ShapeError
from torchweft.o3.irreps.irreps import Irrep, Irreps
from torchweft.o3.irreps.wigner import entries_3j, wigner_3j

__all__ = [
    "ELEMENT_TABLES",
    "Basis",
    "Coupled",
    "DegreeOutput",
    "expressed",
    "fits_one_program",
    "program_parts",
    "program_reads",
    "slots",
    "symmetric_basis",
    "symmetric_key",
    "symmetric_program",
    "weight_program",
    "weight_text",
]

Array = np.ndarray[Any, Any]

COMPARED_POINTS = 256
"""Random points at which functions are compared: more points than functions of a degree."""

DEPENDENT = 1e-9
"""Fraction of a function's size that is rounding error; functions are of the size of 1 or more."""

ROUNDED = 2.0**-12
"""Fraction of the summed magnitudes, and of T, by which couplings in float32 may be off."""

MEASURED_POINTS = 16
"""Points at which magnitudes are summed."""

SYMMETRIC_AXES = ("row", "feature")

ELEMENT_TABLES = 3
"""Tensors behind those of a program: each row's element, and the order and starts of rows by it."""

MOST_STEPS = 1200
"""Sums and products of a contraction that is run as one program: its second order is up to five
times as long, and code of more than 100 KB leaves the caches of instructions."""

MOST_LIVE = 256
"""Numbers that a thread keeps at once; a thread has 255 registers."""

WHOLE = 1e-12
"""Distance within which coefficients, √(2l+1) times roots of fractions, are whole numbers."""

# the basis


class Coupled(NamedTuple):
    """(x_item ⊗ b)_ir √(2l+1): `left` is the number of b in the degree below."""

    left: int
    item: int
    ir: Irrep


class DegreeOutput(NamedTuple):
    """Terms of one degree in one irrep of the output.

    Args:
        products: the independent ones.
        weights: T (independent products, MACE's products).
    """

    products: tuple[Coupled, ...]
    weights: Array


class Basis(NamedTuple):
    """Functions by degree.

    Args:
        levels: functions of the degrees 2 to correlation − 1 that a higher degree reads.
        outputs: for each degree from 1 on and each irrep of the output; its products read the
            degree below, which is the number 1 for degree 1, and x for degree 2.
    """

    levels: tuple[tuple[Coupled, ...], ...]
    outputs: tuple[tuple[DegreeOutput, ...], ...]

    def level(self, degree: int) -> tuple[Coupled, ...]:
        """Functions of a degree above 1; none where nothing reads them."""
        return self.levels[degree - 2] if degree <= len(self.levels) + 1 else ()


class _Function(NamedTuple):
    """A function by its values (points, 2l+1)."""

    ir: Irrep
    values: Array


@functools.lru_cache(maxsize=64)
def symmetric_basis(items: tuple[Irrep, ...], outs: tuple[Irrep, ...], correlation: int) -> Basis:
    """The basis of polynomials of x up to a degree.

    Args:
        items: irreps of x.
        outs: irreps of the output.
        correlation: the highest degree.
    """
    x, below = _points(items), [_ONE]
    levels: list[list[Coupled]] = []
    outputs = []
    for degree in range(1, correlation + 1):
        candidates = list(_candidates(below, items))
        added = []
        for ir in outs:
            products, functions = _independent([c for c in candidates if c.ir == ir], below, x)
            wanted = [f.values for f in _mace_products(x, degree) if f.ir == ir]
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
    """The basis with T for other couplings than MACE's.

    Args:
        basis: basis of x.
        items: irreps of x.
        couplings: U (2l+1, D, …, D, K) for each degree and irrep of the output: K functions
            Σ U x … x.

    Where these are MACE's own, also rounded to float32, T is the basis' exact one.

    Raises:
        ShapeError: the couplings are no equivariant polynomials of x.
    """
    x, below, monomials = _points(items), [_ONE], _ONE.values
    row = np.concatenate([function.values for function in x], 1)
    outputs = []
    for degree, (adds, given) in enumerate(zip(basis.outputs, couplings, strict=True), 1):
        monomials = np.einsum("si,sj->sij", monomials, row).reshape(COMPARED_POINTS, -1)
        fitted = []
        for output, table in zip(adds, given, strict=True):
            functions = _values(output.products, x, below)
            flat = table.reshape(len(table), monomials.shape[1], -1)
            values = np.einsum("sn,mnk->ksm", monomials, flat, optimize=True)
            size = np.abs(monomials[:MEASURED_POINTS]) @ np.abs(flat)
            found = _fitted(values, functions, size.max(initial=0))
            fitted.append(output._replace(weights=_exact(found, output.weights)))
        outputs.append(tuple(fitted))
        below = x if degree == 1 else _values(basis.level(degree), x, below)
    return basis._replace(outputs=tuple(outputs))


def _fitted(values: Array, functions: Sequence[_Function], size: float) -> Array:
    """T of functions (K, points, 2l+1), whose terms have magnitudes of a summed size.

    Terms may cancel: couplings that exchange two factors with a minus sign give 0.
    """
    found = _expanded(values, functions)
    made = np.tensordot(found.T, [f.values for f in functions], 1) if functions else 0
    if np.abs(values - made).max(initial=0) > ROUNDED * size:
        raise ShapeError(
            "the couplings of a symmetric contraction are no equivariant polynomials in e3nn's "
            "basis: weights would mean something else here. Pass a model whose couplings are "
            "e3nn's, in float32 or float64; it may be cast to 16 bits when it is converted."
        )
    return found


def _exact(found: Array, meant: Array) -> Array:
    """T of MACE's own couplings, where T is that but for rounding and the signs of couplings."""
    if found.shape != meant.shape:
        return found
    signed = meant * np.where((found * meant).sum(0) < 0, -1.0, 1.0)
    near = np.abs(found - signed).max(initial=0) <= ROUNDED * np.abs(meant).max(initial=0)
    return signed if near else found


def _points(items: Iterable[Irrep]) -> list[_Function]:
    generator = np.random.default_rng(0)
    return [_Function(ir, generator.standard_normal((COMPARED_POINTS, ir.dim))) for ir in items]


_ONE = _Function(Irrep(0, 1), np.ones((COMPARED_POINTS, 1)))


def _values(
    products: Iterable[Coupled], x: Sequence[_Function], below: Sequence[_Function]
) -> list[_Function]:
    return [_coupled(x[c.item], below[c.left], c.ir) for c in products]


def _coupled(first: _Function, second: _Function, ir: Irrep) -> _Function:
    table = wigner_3j(first.ir.l, second.ir.l, ir.l, torch.float64, "cpu").numpy()
    pairs = first.values[:, :, None] * second.values[:, None]
    values = pairs.reshape(len(pairs), -1) @ table.reshape(-1, ir.dim)
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
    """Candidates that are independent of earlier ones, by Gram-Schmidt, and their values."""
    products: list[Coupled] = []
    functions: list[_Function] = []
    axes = np.zeros((0, 0))
    for candidate in candidates:
        (function,) = _values([candidate], x, below)
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
    """All couplings from the left, in the order of MACE's weights."""
    found = list(x)
    for _ in range(degree - 1):
        found = [
            _coupled(left, right, ir)
            for left in found
            for right in x
            for ir in left.ir * right.ir
            if degree != 4 or (ir.p == (-1) ** ir.l and ir.l < 12)  # as in MACE
        ]
        found.sort(key=lambda function: function.ir)
    return found


def _expanded(wanted: Sequence[Array] | Array, functions: Sequence[_Function]) -> Array:
    """T, which expresses the values of each wanted function by independent ones."""
    if not len(wanted) or not functions:
        return np.zeros((len(functions), len(wanted)))
    basis = np.stack([f.values.ravel() for f in functions], 1)
    columns = np.stack([values.ravel() for values in wanted], 1)
    solution: Array = np.linalg.lstsq(basis, columns, rcond=None)[0]
    return np.where(np.abs(solution) < DEPENDENT, 0.0, solution)


def _pruned(levels: Sequence[list[Coupled]], outputs: Sequence[tuple[DegreeOutput, ...]]) -> Basis:
    """The basis without functions that nothing reads, from the highest degree down."""
    kept: list[tuple[Coupled, ...]] = []
    adds = list(outputs)
    above: list[Coupled] = []
    for n in reversed(range(len(levels))):
        degree = n + 2  # of this level, which the outputs and the next level read
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


# programs


class Slots(NamedTuple):
    """Slots of a program's operands: "x", "w" or "z", one letter each."""

    inputs: str
    outputs: str


def symmetric_key(irreps: Irreps, out: Irreps, correlation: int) -> str:
    """The key of a contraction's program."""
    items, outs = ("+".join(str(item.ir) for item in given) for given in (irreps, out))
    return f"{items} {outs} {correlation}"


@functools.lru_cache(maxsize=1024)
def symmetric_program(name: str) -> Program:
    """The program with a key, of inputs x and w, or derived from it."""
    return derive(name, _root)


@functools.lru_cache(maxsize=1024)
def slots(name: str) -> Slots:
    """The slots of a program's operands."""
    source, bar, step = name.rpartition(" | ")
    if not bar:
        return Slots("xw", "z")
    of, (rule, *flags) = slots(source), step.split(" ")
    if rule == "jvp":
        return Slots(of.inputs + _marked(of.inputs, flags[0]), of.outputs)
    return Slots(of.inputs + _marked(of.outputs, flags[1]), _marked(of.inputs, flags[0]))


@functools.lru_cache(maxsize=1024)
def program_reads(name: str) -> tuple[bool, ...]:
    """Which inputs of a program its results depend on."""
    return symmetric_program(name).reads()


def fits_one_program(name: str) -> bool:
    """Whether a contraction is short enough for one program, see MOST_STEPS."""
    return symmetric_program(name).steps() <= MOST_STEPS


@functools.lru_cache(maxsize=1024)
def program_parts(name: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Programs that together compute a program, and the numbers of its results that each computes.

    One program where registers suffice; else results of x, which need most, have one each.
    """
    letters = slots(name).outputs
    source, _, step = name.rpartition(" | ")
    every = tuple(range(len(letters)))
    if not step.startswith("vjp") or most_live(schedule(symmetric_program(name))) <= MOST_LIVE:
        return ((name, every),)
    _, needed, given = step.split(" ")
    places = [place for place, flag in enumerate(needed) if flag == "1"]
    found = []
    alone = [(n,) for n in every if letters[n] == "x"]
    together = tuple(n for n in every if letters[n] != "x")
    for group in [*alone, *([together] if together else [])]:
        own = {places[n] for n in group}
        flags = mask([place in own for place in range(len(needed))])
        found.append((f"{source} | vjp {flags} {given}", group))
    return tuple(found)


def _marked(letters: str, flags: str) -> str:
    return "".join(itertools.compress(letters, map(int, flags)))


class _Item(NamedTuple):
    """Components of one irrep."""

    ir: Irrep
    components: tuple[Expr, ...]


def _root(name: str) -> Program:
    items, outs, correlation = name.split(" ")
    irreps, out = (tuple(item.ir for item in Irreps(text)) for text in (items, outs))
    basis = symmetric_basis(irreps, out, int(correlation))
    x = Operand("x", sum(ir.dim for ir in irreps), SYMMETRIC_AXES)
    w = Operand("w", sum(len(o.products) for of in basis.outputs for o in of), SYMMETRIC_AXES)
    leaves = iter(x.leaves())
    features = [_Item(ir, tuple(itertools.islice(leaves, ir.dim))) for ir in irreps]
    components = tuple(_contracted(basis, features, out, iter(w.leaves())))
    z = Operand("z", len(components), SYMMETRIC_AXES)
    return Program(name, (x, w), (Output(z, components),))


def _contracted(
    basis: Basis, x: Sequence[_Item], out: Sequence[Irrep], weights: Iterator[Expr]
) -> Iterator[Expr]:
    """The components of z, irrep by irrep."""
    adds: list[list[tuple[Expr, ...]]] = [[] for _ in out]
    below: Sequence[_Item] = [_Item(Irrep(0, 1), (const(1),))]
    for degree, outputs in enumerate(basis.outputs, 1):
        for found, output in zip(adds, outputs, strict=True):
            found += _weighted(output.products, weights, x, below)
        level = basis.level(degree) if degree > 1 else ()
        below = [_product(x[c.item], below[c.left], c.ir) for c in level] if level else x
    for found, ir in zip(adds, out, strict=True):
        for m in range(ir.dim):
            yield add(*(components[m] for components in found))


def _weighted(
    products: Iterable[Coupled], weights: Iterator[Expr], x: Sequence[_Item], below: Sequence[_Item]
) -> Iterator[tuple[Expr, ...]]:
    """Σ_p w_p g_p of one degree and irrep, in parts; b_p of one irrep that meet one x_h are one."""
    met: dict[tuple[int, Irrep, Irrep], list[tuple[Expr, _Item]]] = {}
    for product in products:
        b = below[product.left]
        met.setdefault((product.item, b.ir, product.ir), []).append((next(weights), b))
    for (item, kind, ir), terms in met.items():
        if len(terms) == 1:
            ((w, b),) = terms  # the product of x_h and b may be a function of another degree too
            yield tuple(w * e for e in _product(x[item], b, ir).components)
        else:
            y = tuple(add(*(w * b.components[k] for w, b in terms)) for k in range(kind.dim))
            yield _product(x[item], _Item(kind, y), ir).components


def _product(x: _Item, y: _Item, ir: Irrep) -> _Item:
    """(x ⊗ y)_ir √(2l+1)."""
    sums: list[list[Expr]] = [[] for _ in range(ir.dim)]
    for i, k, m, value in entries_3j(x.ir.l, y.ir.l, ir.l):
        coefficient = value * ir.dim**0.5
        if abs(coefficient - round(coefficient)) < WHOLE:
            coefficient = float(round(coefficient))
        a, b = x.components[i], y.components[k]
        if a.kind == b.kind == "leaf" and b.data < a.data:
            a, b = b, a  # equal products of components of x are computed once
        sums[m].append(const(coefficient) * multiply(a, b))
    return _Item(ir, tuple(add(*terms) for terms in sums))


def weight_text(table: Tensor, counts: Sequence[int]) -> str:
    """The text of T (products, couplings), for parameters with `counts` couplings."""
    entries = [(p, k, float(table[p, k])) for p, k in table.nonzero().tolist()]
    return json.dumps((list(counts), table.shape[0], entries), separators=(",", ":"))


@functools.lru_cache(maxsize=256)
def weight_program(name: str) -> Program:
    """The program that makes weights of parameters by a text, or derived from it."""
    return derive(name, _weight_root)


def _weight_root(name: str) -> Program:
    sizes, products, entries = json.loads(name)
    letters = itertools.product(string.ascii_lowercase, repeat=2)
    inputs = tuple(
        Operand(f"w{''.join(pair)}", size, SYMMETRIC_AXES)
        for size, pair in zip(sizes, letters, strict=False)
    )
    leaves = [leaf for operand in inputs for leaf in operand.leaves()]
    made = tuple(
        add(*(const(value) * leaves[k] for p, k, value in entries if p == product))
        for product in range(products)
    )
    return Program(name, inputs, (Output(Operand("made", products, SYMMETRIC_AXES), made),))
