"""A symmetric contraction as straight-line programs of one channel of one row.

    z[L] = Σ_p w[p] g_p(x)_L,    g_p(x) = (x_h ⊗ b_p(x))_L, b_p of the degree below
    w[element, p, c] = Σ_k T[p, k] parameter[element, k, c]

x are the components of a channel, w the weights of its row's element.  Products of one irrep with
others of one irrep are summed first, Σ_p w_p (x_h ⊗ b_p) = x_h ⊗ Σ_p w_p b_p, so that a gradient
forms (x_h ⊗ dz) once for all of them.

A program reads a weight as one number a row and channel.  Rows of an element share it: kernels read
it by element, and sum its gradient over the element's rows.  T follows from the basis, or from
couplings that were given, and its text is the key of the program that makes weights of parameters;
the couplings k of several parameters follow each other.
"""

from __future__ import annotations

import functools
import itertools
import json
import string
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from torchweft.core.expressions.expr import Expr, add, const, multiply
from torchweft.core.expressions.program import Operand, Output, Program, derive, mask
from torchweft.core.printing.dialect import most_live
from torchweft.core.printing.schedule import schedule
from torchweft.o3.irreps.irreps import Irrep, Irreps
from torchweft.o3.irreps.wigner import entries_3j
from torchweft.o3.symmetric.basis import Basis, Coupled, symmetric_basis

__all__ = [
    "ELEMENT_TABLES",
    "MOST_STEPS",
    "Slots",
    "fits_one_program",
    "program_parts",
    "program_reads",
    "program_steps",
    "slots",
    "symmetric_key",
    "symmetric_program",
    "weight_counts",
    "weight_gradients",
    "weight_program",
    "weight_text",
]


SYMMETRIC_AXES = ("row", "feature")

ELEMENT_TABLES = 3
"""Tensors behind those of a program: each row's element, and the order and starts of rows by it."""

MOST_STEPS = 1200
"""Sums and products of a program that is run as one: its second order is up to five times as long,
and code of more than 100 KB leaves the caches of instructions."""

MOST_LIVE = 256
"""Numbers that a thread keeps at once; a thread has 255 registers."""

WHOLE = 1e-12
"""Coefficients are √(2l+1) times roots of fractions: so close to a whole number they are it."""

_Components = Sequence[tuple[Expr, ...]]


class Slots(NamedTuple):
    """What the operands of a program are: "x", "w" or "z", one letter each."""

    inputs: str
    outputs: str


def symmetric_key(irreps: Irreps, out: Irreps, correlation: int) -> str:
    """The key of the contraction's program."""
    items, outs = ("+".join(str(item.ir) for item in given) for given in (irreps, out))
    return f"{items} {outs} {correlation}"


@functools.lru_cache(maxsize=1024)
def symmetric_program(name: str) -> Program:
    """The program with a key, of inputs x and w, or derived from it."""
    return derive(name, _root)


@functools.lru_cache(maxsize=1024)
def slots(name: str) -> Slots:
    """What its operands are."""
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


@functools.lru_cache(maxsize=1024)
def program_steps(name: str) -> int:
    """Sums and products of a program."""
    return symmetric_program(name).steps()


def fits_one_program(name: str) -> bool:
    """Whether a contraction is short enough for one program, see MOST_STEPS."""
    return program_steps(name) <= MOST_STEPS


@functools.lru_cache(maxsize=1024)
def program_parts(name: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Programs that together compute the results of one, and the numbers of these.

    One where registers suffice; else those of x, which need most, have one each.
    """
    letters = slots(name).outputs
    source, _, step = name.rpartition(" | ")
    every = tuple(range(len(letters)))
    alone = [(n,) for n in every if letters[n] == "x"]
    if not step.startswith("vjp") or most_live(schedule(symmetric_program(name))) <= MOST_LIVE:
        return ((name, every),)
    _, needed, given = step.split(" ")
    places = [place for place, flag in enumerate(needed) if flag == "1"]
    groups = [*alone, tuple(n for n in every if letters[n] != "x")]
    return tuple(
        (f"{source} | vjp {_mask(len(needed), [places[n] for n in group])} {given}", group)
        for group in groups
        if group
    )


def _mask(length: int, places: Sequence[int]) -> str:
    return mask([place in places for place in range(length)])


def _marked(letters: str, flags: str) -> str:
    return "".join(itertools.compress(letters, map(int, flags)))


def _root(name: str) -> Program:
    items, outs, correlation = name.split(" ")
    irreps, out = (tuple(item.ir for item in Irreps(text)) for text in (items, outs))
    basis = symmetric_basis(irreps, out, int(correlation))
    x = Operand("x", sum(ir.dim for ir in irreps), SYMMETRIC_AXES)
    w = Operand("w", sum(len(o.products) for of in basis.outputs for o in of), SYMMETRIC_AXES)
    leaves = iter(x.leaves())
    blocks = [tuple(itertools.islice(leaves, ir.dim)) for ir in irreps]
    components = tuple(_contracted(basis, irreps, out, blocks, iter(w.leaves())))
    z = Operand("z", len(components), SYMMETRIC_AXES)
    return Program(name, (x, w), (Output(z, components),))


def _contracted(
    basis: Basis,
    irreps: Sequence[Irrep],
    out: Sequence[Irrep],
    x: _Components,
    weights: Iterator[Expr],
) -> Iterator[Expr]:
    """The components of z, irrep by irrep."""
    adds: list[list[tuple[Expr, ...]]] = [[] for _ in out]
    below: list[tuple[Expr, ...]] = [(const(1),)]
    kinds = [Irrep(0, 1)]
    for degree, outputs in enumerate(basis.outputs, 1):
        for found, output in zip(adds, outputs, strict=True):
            found += _weighted(output.products, weights, (irreps, x), (kinds, below))
        if degree == 1:
            below, kinds = list(x), list(irreps)
        elif degree <= len(basis.levels) + 1:
            level = basis.levels[degree - 2]
            below = [
                _coupled(irreps[c.item], x[c.item], kinds[c.left], below[c.left], c.ir)
                for c in level
            ]
            kinds = [c.ir for c in level]
    for found, ir in zip(adds, out, strict=True):
        for m in range(ir.dim):
            yield add(*(components[m] for components in found))


def _weighted(
    products: Iterable[Coupled],
    weights: Iterator[Expr],
    first: tuple[Sequence[Irrep], _Components],
    second: tuple[Sequence[Irrep], _Components],
) -> Iterator[tuple[Expr, ...]]:
    """Σ_p w_p g_p of one degree and irrep, in parts; b_p of one irrep that meet one x_h are one."""
    (irreps, x), (kinds, below) = first, second
    met: dict[tuple[int, Irrep, Irrep], list[tuple[Expr, tuple[Expr, ...]]]] = {}
    for product in products:
        pair = product.item, kinds[product.left], product.ir
        met.setdefault(pair, []).append((next(weights), below[product.left]))
    for (item, kind, ir), terms in met.items():
        if len(terms) == 1:
            ((w, b),) = terms  # the product of x_h and b may be a function of another degree too
            yield tuple(w * e for e in _coupled(irreps[item], x[item], kind, b, ir))
        else:
            y = tuple(add(*(w * b[k] for w, b in terms)) for k in range(kind.dim))
            yield _coupled(irreps[item], x[item], kind, y, ir)


def _coupled(
    first: Irrep, x: Sequence[Expr], second: Irrep, y: Sequence[Expr], ir: Irrep
) -> tuple[Expr, ...]:
    """(x ⊗ y)_ir √(2l+1)."""
    sums: list[list[Expr]] = [[] for _ in range(ir.dim)]
    for i, k, m, value in entries_3j(first.l, second.l, ir.l):
        coefficient = value * ir.dim**0.5
        if abs(coefficient - round(coefficient)) < WHOLE:
            coefficient = float(round(coefficient))
        sums[m].append(const(coefficient) * _product(x[i], y[k]))
    return tuple(add(*terms) for terms in sums)


def _product(a: Expr, b: Expr) -> Expr:
    """a b, in one order for components of x: equal products are computed once."""
    if a.kind == b.kind == "leaf" and b.data < a.data:
        a, b = b, a
    return multiply(a, b)


def weight_text(table: Tensor, counts: Sequence[int]) -> str:
    """T (products, couplings) of parameters with so many couplings each."""
    places = table.nonzero().tolist()
    entries = [(p, k, float(table[p, k])) for p, k in places]
    return json.dumps((list(counts), table.shape[0], entries), separators=(",", ":"))


@functools.lru_cache(maxsize=256)
def weight_counts(name: str) -> tuple[int, ...]:
    """Couplings of each parameter."""
    return tuple(json.loads(name)[0])


def weight_gradients(name: str) -> str:
    """The key of the gradients of all parameters."""
    return f"{name} | vjp {'1' * len(weight_counts(name))} 1"


@functools.lru_cache(maxsize=256)
def weight_program(name: str) -> Program:
    """The program with a text, of the parameters, or derived from it."""
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
