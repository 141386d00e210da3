"""Instructions of tensor products: which irreps meet, how their copies pair, and the factors.

    z[i_out] = Σ factor · weight · x[i_in1] ⊗ y[i_in2]      over the instructions into i_out

A mode names the copies of x, of y and of z by letters; letters that z lacks are summed, and the
weight has one number for each value of all letters:

    uvw   z_w  = Σ_uv weight_uvw x_u ⊗ y_v        uuw   z_w  = Σ_u weight_uw x_u ⊗ y_u
    uvu   z_u  = Σ_v weight_uv x_u ⊗ y_v          uuu   z_u  = weight_u x_u ⊗ y_u
    uvv   z_v  = Σ_u weight_uv x_u ⊗ y_v          uvuv  z_uv = weight_uv x_u ⊗ y_v
    uvu<v and u<vw are uuu and uuw on the pairs (x_u, y_v) with u < v

The factor of an instruction is √(a · out_var · path_weight / S), a = 2l_out+1 ("component"),
(2l1+1)(2l2+1) ("norm") or 1 ("none"); S = Σ in1_var · in2_var · terms over the instructions into
its output ("element"), the instruction's own times their number ("path"), or 1 ("none").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torchweft.errors import DTypeError, IndexRangeError, ShapeError
from torchweft.o3.irreps.irreps import Irreps, MulIr

__all__ = [
    "IRREP_NORMALIZATIONS",
    "MODES",
    "Instruction",
    "Mode",
    "Operands",
    "Variances",
    "chosen",
    "couples",
    "instructions_of",
]


IRREP_NORMALIZATIONS = ("component", "norm", "none")


class Mode(NamedTuple):
    """How copies pair: the letters of x, y and z; in `pairs` u counts the pairs of copies."""

    first: str
    second: str
    out: str
    pairs: bool = False

    @property
    def weight(self) -> str:
        """The letters of the weight, in the order of its dimensions."""
        return "".join(dict.fromkeys(self.first + self.second + self.out))

    @property
    def mixes(self) -> bool:
        """Whether weights mix copies: the output has a letter of its own."""
        return self.out == "w"

    def sizes(self, first: int, second: int, out: int) -> dict[str, int]:
        """How many values each letter has, for these multiplicities."""
        if self.pairs:
            return {"u": first * (first - 1) // 2, "w": out}
        return {self.first: first, self.second: second, "w": out}


MODES = {
    "uvw": Mode("u", "v", "w"),
    "uvu": Mode("u", "v", "u"),
    "uvv": Mode("u", "v", "v"),
    "uuw": Mode("u", "u", "w"),
    "uuu": Mode("u", "u", "u"),
    "uvuv": Mode("u", "v", "uv"),
    "uvu<v": Mode("u", "u", "u", pairs=True),
    "u<vw": Mode("u", "u", "w", pairs=True),
}


class Instruction(NamedTuple):
    """One instruction; `path_weight` is its factor, `path_shape` that of its weight."""

    i_in1: int
    i_in2: int
    i_out: int
    connection_mode: str
    has_weight: bool
    path_weight: float
    path_shape: tuple[int, ...]

    @property
    def mode(self) -> Mode:
        """The letters of its mode."""
        return MODES[self.connection_mode]

    @property
    def num_weights(self) -> int:
        """Numbers in its weight; 0 without one."""
        return math.prod(self.path_shape) if self.has_weight else 0

    @property
    def empty(self) -> bool:
        """Whether there is nothing to sum."""
        return 0 in self.path_shape

    @property
    def terms(self) -> int:
        """Numbers that one number of the output sums, irreps counted as one."""
        letters = zip(self.mode.weight, self.path_shape, strict=True)
        return math.prod(size for letter, size in letters if letter not in self.mode.out)


class Operands(NamedTuple):
    """The irreps of x, y and z."""

    in1: Irreps
    in2: Irreps
    out: Irreps

    def of(self, instruction: Instruction) -> tuple[MulIr, MulIr, MulIr]:
        """Those that meet."""
        return (
            self.in1[instruction.i_in1],
            self.in2[instruction.i_in2],
            self.out[instruction.i_out],
        )


class Variances(NamedTuple):
    """Of each item of the irreps of x, y and z."""

    in1: tuple[float, ...]
    in2: tuple[float, ...]
    out: tuple[float, ...]


def couples(first: MulIr, second: MulIr, out: MulIr) -> bool:
    """Whether the product of two irreps holds a third: the triangle of degrees, and parity."""
    (l1, p1), (l2, p2), (l3, p3) = first.ir, second.ir, out.ir
    return abs(l1 - l2) <= l3 <= l1 + l2 and p1 * p2 == p3


def instructions_of(
    given: Iterable[Sequence[Any]],
    operands: Operands,
    in1_var: Iterable[float] | None = None,
    in2_var: Iterable[float] | None = None,
    out_var: Iterable[float] | None = None,
    irrep_normalization: str | None = None,
    path_normalization: str | None = None,
) -> tuple[Instruction, ...]:
    """The instructions with their factors.

    Args:
        given: (i_in1, i_in2, i_out, mode, has_weight) or with a path_weight, 1 by default.
        operands: the irreps.
        in1_var: variance of each item of the first irreps; None is 1.
        in2_var: likewise of the second.
        out_var: likewise wanted of the output.
        irrep_normalization: "component" (None), "norm" or "none".
        path_normalization: "element" (None), "path" or "none".

    Raises:
        ShapeError: irreps that do not couple, multiplicities that do not pair, a negative
            path_weight, another name of a mode or a normalisation, variances of another number.
        IndexRangeError: an instruction points outside of the irreps.
        DTypeError: what is given is no instruction.
    """
    raw = tuple(_read(n, item, operands) for n, item in enumerate(given))
    variances = Variances(
        _variances("in1_var", in1_var, operands.in1),
        _variances("in2_var", in2_var, operands.in2),
        _variances("out_var", out_var, operands.out),
    )
    numerator = chosen("irrep_normalization", irrep_normalization, IRREP_NORMALIZATIONS)
    denominator = chosen("path_normalization", path_normalization, ("element", "path", "none"))
    return tuple(
        instruction._replace(
            path_weight=math.sqrt(
                _numerator(numerator, operands.of(instruction))
                / _denominator(denominator, instruction, raw, variances)
                * variances.out[instruction.i_out]
                * instruction.path_weight
            )
        )
        for instruction in raw
    )


def _numerator(normalization: str, met: tuple[MulIr, MulIr, MulIr]) -> int:
    first, second, out = met
    by_name = {"component": out.ir.dim, "norm": first.ir.dim * second.ir.dim, "none": 1}
    return by_name[normalization]


def _denominator(
    normalization: str, own: Instruction, every: Sequence[Instruction], variances: Variances
) -> float:
    """S, or 1 where it is 0."""

    def variance(instruction: Instruction) -> float:
        ends = variances.in1[instruction.i_in1] * variances.in2[instruction.i_in2]
        return ends * instruction.terms

    beside = [other for other in every if other.i_out == own.i_out]
    if normalization == "element":
        total = sum(map(variance, beside))
    else:
        total = variance(own) * len(beside) if normalization == "path" else 1.0
    return total if total > 0 else 1.0


def _read(n: int, item: Sequence[Any], operands: Operands) -> Instruction:
    """The instruction as it was given, checked."""
    match tuple(item):
        case (int(i), int(j), int(k), str(mode), bool(weighted), *rest) if len(rest) < 2:
            path_weight = float(rest[0]) if rest else 1.0
        case other:
            raise DTypeError(
                f"instruction {n} is {other!r}: it must be (i_in1, i_in2, i_out, mode, has_weight) "
                "or with a path_weight. Write, for example, (0, 0, 0, 'uvu', True)."
            )
    for index, (name, irreps) in zip(
        (i, j, k),
        zip(("irreps_in1", "irreps_in2", "irreps_out"), operands, strict=True),
        strict=True,
    ):
        if not 0 <= index < len(irreps):
            raise IndexRangeError(
                f"instruction {n} names item {index} of {name}, which has {len(irreps)}: "
                f"{irreps or 'none'}. Pass an index from 0 to {len(irreps) - 1}."
            )
    if mode not in MODES:
        raise ShapeError(
            f"instruction {n} has the mode {mode!r}: it must be one of {', '.join(MODES)}. "
            "Choose how copies pair."
        )
    if path_weight < 0:
        raise ShapeError(
            f"instruction {n} has path_weight {path_weight}: its root is taken, so that it must be "
            "0 or more. Put the sign into the weight."
        )
    met = (operands.in1[i], operands.in2[j], operands.out[k])
    _check_irreps(n, met)
    sizes = MODES[mode].sizes(*(item.mul for item in met))
    shape = tuple(sizes[letter] for letter in MODES[mode].weight)
    _check_copies(n, mode, weighted, met, sizes)
    return Instruction(i, j, k, mode, weighted, path_weight, shape)


def _check_irreps(n: int, met: tuple[MulIr, MulIr, MulIr]) -> None:
    if couples(*met):
        return
    first, second, out = met
    low, high = abs(first.ir.l - second.ir.l), first.ir.l + second.ir.l
    parity = "eo"[first.ir.p != second.ir.p]
    raise ShapeError(
        f"instruction {n} puts {first} ⊗ {second} into {out}: the product holds "
        f"{', '.join(f'{degree}{parity}' for degree in range(low, high + 1))}. "
        "Choose one of these as the output, or drop the instruction."
    )


def _check_copies(
    n: int, mode: str, weighted: bool, met: tuple[MulIr, MulIr, MulIr], sizes: dict[str, int]
) -> None:
    first, second, out = met
    letters = MODES[mode]
    where = f"instruction {n} puts {first} ⊗ {second} into {out} by {mode}"
    if letters.first == letters.second and first.mul != second.mul:
        raise ShapeError(
            f"{where}: it pairs the copies of both factors, {first.mul} and {second.mul}, which "
            "must be as many. Use uvw, uvu, uvv or uvuv for different numbers."
        )
    needed = math.prod(sizes[letter] for letter in letters.out)
    if out.mul != needed:
        raise ShapeError(
            f"{where}: the output must have {needed} copies, not {out.mul}. "
            f"Write {needed}x{out.ir} in irreps_out."
        )
    if letters.mixes and not weighted and (mode != "uuw" or out.mul != 1):
        raise ShapeError(
            f"{where} without weights: they say how copies mix. Set has_weight, or use uvuv, uuu "
            "or, for the sum over the copies, uuw into one."
        )


def _variances(name: str, given: Iterable[float] | None, irreps: Irreps) -> tuple[float, ...]:
    if given is None:
        return (1.0,) * len(irreps)
    values = tuple(map(float, given))
    if len(values) != len(irreps):
        raise ShapeError(
            f"{name} has {len(values)} numbers but the irreps {irreps} have {len(irreps)} items: "
            "each needs its variance. Pass one number an item."
        )
    return values


def chosen(name: str, given: str | None, names: tuple[str, ...]) -> str:
    """One of the names; the first where none is given."""
    if given is None:
        return names[0]
    if given not in names:
        raise ShapeError(
            f"{name} is {given!r}: it must be one of {', '.join(names)}. Choose one, or leave it "
            f"out for {names[0]!r}."
        )
    return given
