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

Instructions are computed in one of three ways:

    direct   the output's copies are channels (uvu, uvv, uuu, uvuv): a channelwise product
    mixed    weights mix copies (uvw, uuw): a product without weights into rows t, then t @ weight
    dense    pairs of copies, and sums over more copies than a kernel unrolls: one einsum each

A sum or an outer product over the copies of one factor is written out, a block for each copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from torchweft.errors import DTypeError, IndexRangeError, ShapeError
from torchweft.o3.channelwise.structure import Block, Path, Product, Structure
from torchweft.o3.irreps.irreps import Irreps, MulIr, steps
from torchweft.o3.mixing.blocks import CopyBlock, MatrixPath, Mixing

__all__ = [
    "IRREP_NORMALIZATIONS",
    "MODES",
    "UNROLLED_COPIES",
    "Instruction",
    "InstructionParts",
    "MixedColumns",
    "MixedProduct",
    "Mode",
    "Operands",
    "WeightedInstruction",
    "check_item",
    "checked_choice",
    "instructions_of",
    "structures_of",
    "weight_sizes",
]

IRREP_NORMALIZATIONS = ("component", "norm", "none")

UNROLLED_COPIES = 8
"""The most copies of a factor that are written out: each is a block in the printed code."""


class Mode(NamedTuple):
    """The letters of the copies of x, y and z; with `pairs`, u counts the pairs of copies."""

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
        """Whether weights mix copies: the output has a letter that neither factor has."""
        return self.out == "w"

    @property
    def product(self) -> str:
        """The letters of the channelwise product: the output's, or all that weights mix."""
        return self.weight.replace("w", "") if self.mixes else self.out

    def sizes(self, first: int, second: int, out: int) -> dict[str, int]:
        """The number of values of each letter, for multiplicities of x, y and z."""
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
    """One coupling of a TensorProduct: of an item of x with an item of y into an item of z.

    Args:
        i_in1: number of the item of irreps_in1.
        i_in2: number of the item of irreps_in2.
        i_out: number of the item of irreps_out.
        connection_mode: how copies are paired: "uvw", "uvu", "uvv", "uuw", "uuu", "uvuv", "uvu<v"
            or "u<vw"; docs/families/o3.md has the formulas.
        has_weight: whether the coupling has weights.
        path_weight: the factor of the coupling, with all normalisations.
        path_shape: the shape of its weight, such as (m1, m2, m3) for "uvw".

    Example:
        >>> from torchweft import o3
        >>> product = o3.TensorProduct("2x0e", "1x1o", "2x1o", [(0, 0, 0, "uvu", True)])
        >>> product.instructions[0].path_shape
        (2, 1)
    """

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
    def sizes(self) -> dict[str, int]:
        """The number of values of each letter of the weight."""
        return dict(zip(self.mode.weight, self.path_shape, strict=True))

    @property
    def terms(self) -> int:
        """Number of terms in one number of the output, irreps counted as one."""
        return math.prod(n for letter, n in self.sizes.items() if letter not in self.mode.out)

    @property
    def mixed_copies(self) -> int:
        """Number of copies that the weight of a mode that mixes takes to its output."""
        return math.prod(self.path_shape[:-1])

    @property
    def channel(self) -> str:
        """The letter of the channelwise product with the most values: its channels."""
        return max(self.mode.product, key=self.sizes.__getitem__)

    @property
    def loop(self) -> str:
        """The other letter of the factors, whose values are written out; or none."""
        return (self.mode.first + self.mode.second).replace(self.channel, "")

    @property
    def dense(self) -> bool:
        """Whether no channelwise product computes it."""
        return self.mode.pairs or self.sizes.get(self.loop, 1) > UNROLLED_COPIES


class WeightedInstruction(Protocol):
    """An instruction into an item of the output, with a weight or without."""

    @property
    def i_out(self) -> int:
        """Item of the output."""

    @property
    def path_weight(self) -> float:
        """The factor."""

    @property
    def path_shape(self) -> tuple[int, ...]:
        """Shape of the weight."""

    @property
    def has_weight(self) -> bool:
        """Whether the instruction has a weight."""


def weight_sizes(instructions: Iterable[WeightedInstruction]) -> list[int]:
    """Number of weights of each instruction; 0 for one without a weight."""
    return [math.prod(i.path_shape) if i.has_weight else 0 for i in instructions]


class Operands(NamedTuple):
    """The irreps of x, y and z."""

    in1: Irreps
    in2: Irreps
    out: Irreps

    def of(self, instruction: Instruction) -> tuple[MulIr, MulIr, MulIr]:
        """The items that an instruction names."""
        i, j, k, *_ = instruction
        return self.in1[i], self.in2[j], self.out[k]


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
        given: (i_in1, i_in2, i_out, mode, has_weight), optionally with a path_weight, 1 by default.
        operands: the irreps.
        in1_var: variance of each item of the first irreps; None is 1.
        in2_var: variance of each item of the second irreps; None is 1.
        out_var: wanted variance of each item of the output; None is 1.
        irrep_normalization: "component" (None), "norm" or "none".
        path_normalization: "element" (None), "path" or "none".

    Raises:
        ShapeError: irreps that do not couple, multiplicities that do not pair, a negative
            path_weight, an unknown mode or normalisation, a wrong number of variances.
        IndexRangeError: an instruction names an item that the irreps lack.
        DTypeError: an element of `given` is not an instruction.
    """
    if not isinstance(given, Iterable):
        raise DTypeError(
            f"instructions is a {type(given).__name__}: it must be a list of them. "
            "Write, for example, [(0, 0, 0, 'uvu', True)]."
        )
    raw = tuple(_read(n, item, operands) for n, item in enumerate(given))
    in1 = _variances("in1_var", in1_var, operands.in1)
    in2 = _variances("in2_var", in2_var, operands.in2)
    out = _variances("out_var", out_var, operands.out)
    irrep = checked_choice("irrep_normalization", irrep_normalization, IRREP_NORMALIZATIONS)
    path = checked_choice("path_normalization", path_normalization, ("element", "path", "none"))
    variances = [in1[i.i_in1] * in2[i.i_in2] * i.terms for i in raw]
    found = []
    for instruction, own in zip(raw, variances, strict=True):
        k = instruction.i_out
        same_output = [v for i, v in zip(raw, variances, strict=True) if i.i_out == k]
        sums = {"element": sum(same_output), "path": own * len(same_output), "none": 1.0}
        total = sums[path] if sums[path] > 0 else 1.0
        first, second, third = (item.ir.dim for item in operands.of(instruction))
        numerator = {"component": third, "norm": first * second, "none": 1}[irrep]
        factor = math.sqrt(numerator / total * out[k] * instruction.path_weight)
        found.append(instruction._replace(path_weight=factor))
    return tuple(found)


def _read(n: int, item: Sequence[Any], operands: Operands) -> Instruction:
    """The instruction as it was given, checked."""
    match tuple(item) if isinstance(item, Iterable) else item:
        case (int(i), int(j), int(k), str(mode), bool(weighted), *rest) if len(rest) < 2:
            path_weight = float(rest[0]) if rest else 1.0
        case other:
            raise DTypeError(
                f"instruction {n} is {other!r}: it must be (i_in1, i_in2, i_out, mode, has_weight) "
                "or with a path_weight. Write, for example, (0, 0, 0, 'uvu', True)."
            )
    names = ("irreps_in1", "irreps_in2", "irreps_out")
    for index, name, irreps in zip((i, j, k), names, operands, strict=True):
        check_item(n, index, name, irreps)
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
    sizes = MODES[mode].sizes(*(item.mul for item in met))
    _check_couples(n, mode, weighted, met, sizes)
    shape = tuple(sizes[letter] for letter in MODES[mode].weight)
    return Instruction(i, j, k, mode, weighted, path_weight, shape)


def check_item(instruction: object, index: int, name: str, irreps: Irreps) -> None:
    """Raise IndexRangeError unless an instruction names an item that the irreps have."""
    if not 0 <= index < len(irreps):
        raise IndexRangeError(
            f"instruction {instruction} names item {index} of {name}, which has {len(irreps)}: "
            f"{irreps or 'none'}. Pass an index from 0 to {len(irreps) - 1}."
        )


def _check_couples(
    n: int, mode: str, weighted: bool, met: tuple[MulIr, MulIr, MulIr], sizes: dict[str, int]
) -> None:
    """Raise ShapeError unless the irreps couple and their copies pair."""
    first, second, out = met
    letters = MODES[mode]
    where = f"instruction {n} puts {first} ⊗ {second} into {out}"
    if out.ir not in (coupled := list(first.ir * second.ir)):
        raise ShapeError(
            f"{where}: the product holds {', '.join(map(str, coupled))}. "
            "Choose one of these as the output, or drop the instruction."
        )
    if letters.first == letters.second and first.mul != second.mul:
        raise ShapeError(
            f"{where} by {mode}: it pairs the copies of both factors, {first.mul} and "
            f"{second.mul}, which must be as many. Use uvw, uvu, uvv or uvuv for different numbers."
        )
    needed = math.prod(sizes[letter] for letter in letters.out)
    if out.mul != needed:
        raise ShapeError(
            f"{where} by {mode}: the output must have {needed} copies, not {out.mul}. "
            f"Write {needed}x{out.ir} in irreps_out."
        )
    if letters.mixes and not weighted and (mode != "uuw" or out.mul != 1):
        raise ShapeError(
            f"{where} by {mode} without weights: they say how copies mix. Set has_weight, or use "
            "uvuv, uuu or, for the sum over the copies, uuw into one."
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


def checked_choice(name: str, given: str | None, names: tuple[str, ...]) -> str:
    """`given` if it is one of the names; the first name if it is None."""
    if given is None:
        return names[0]
    if given not in names:
        raise ShapeError(
            f"{name} is {given!r}: it must be one of {', '.join(names)}. Choose one, or leave it "
            f"out for {names[0]!r}."
        )
    return given


class MixedColumns(NamedTuple):
    """The columns of t that an output mixes: (2l+1, width) numbers from `offset` on.

    `parts` are (instruction, first column) of each instruction into the output.
    """

    i_out: int
    offset: int
    width: int
    parts: tuple[tuple[int, int], ...]


class MixedProduct(NamedTuple):
    """A product without weights, and the outputs that are its result times weights.

    `mixing` is `outputs` as the structure of one operator; None where some have no weights.
    """

    structure: Structure
    outputs: tuple[MixedColumns, ...]
    mixing: Mixing | None


class InstructionParts(NamedTuple):
    """Instructions sorted by how they are computed; empty instructions are left out.

    The outputs of the direct structures, the mixed and the dense ones add.

    Args:
        direct: channelwise products.
        mixed: the product whose result weights mix, or None.
        dense: numbers of dense instructions.
        every: numbers of all instructions.
        channels: the most channels of a direct product.
    """

    direct: tuple[Structure, ...]
    mixed: MixedProduct | None
    dense: tuple[int, ...]
    every: tuple[int, ...]
    channels: int


def structures_of(
    instructions: Sequence[Instruction], operands: Operands, layout: str = "mul_ir"
) -> InstructionParts:
    """Instructions sorted by how they are computed, on rows in a layout."""
    offsets = [0, *accumulate(weight_sizes(instructions))]
    assembly = _Assembly(tuple(instructions), operands, layout, offsets)
    every = tuple(n for n, i in enumerate(instructions) if 0 not in i.path_shape)
    dense = tuple(n for n in every if instructions[n].dense)
    mixed = [n for n in every if n not in dense and instructions[n].mode.mixes]
    direct = [n for n in every if n not in dense and n not in mixed]
    structures = tuple(assembly.direct(direct))
    products = (product for structure in structures for product in structure.products)
    channels = max((product.channels for product in products), default=0)
    mixes = assembly.mixed(mixed) if mixed else None
    return InstructionParts(structures, mixes, dense, every, channels)


class _CopyPlace(NamedTuple):
    """Copies in a row; `letters` are their letters in a mode."""

    letters: str
    offset: int
    degree: int
    step: int
    copy_step: int

    def block(self, sizes: dict[str, int], channel: str, loop: str, copy: int) -> Block:
        """The channels of one letter, at one value of the other."""
        strides, stride = {}, self.copy_step
        for letter in reversed(self.letters):
            strides[letter] = stride
            stride *= sizes[letter]
        offset = self.offset + copy * strides.get(loop, 0)
        return Block(offset, self.degree, self.step, strides.get(channel, 0))


_Blocks = tuple[Block, Block, Block, Block | None]
"""The blocks of x, y, z and, if there are weights, w that meet."""


class _StructureBuilder:
    """Products under construction, by number of channels; equal blocks are one."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[dict[Block, int]]] = {}
        self.paths: dict[int, list[Path]] = {}
        self.cuts: dict[int, tuple[int, frozenset[Block]]] = {}

    def add(self, i_out: int, channels: int, met: list[_Blocks], factor: float) -> bool:
        """Add the paths of an instruction; False if its output is cut into other blocks here."""
        cut = channels, frozenset(z for _, _, z, _ in met)
        if self.cuts.setdefault(i_out, cut) != cut:
            return False
        slots = self.blocks.setdefault(channels, [{}, {}, {}, {}])
        for blocks in met:
            x, y, z, w = (
                -1 if block is None else slot.setdefault(block, len(slot))
                for slot, block in zip(slots, blocks, strict=True)
            )
            self.paths.setdefault(channels, []).append(Path(x, y, z, w, factor))
        return True

    def structure(self, widths: tuple[int, int, int, int]) -> Structure:
        """The structure of everything that was added."""
        products = []
        for channels, paths in self.paths.items():
            x, y, z, w = map(tuple, self.blocks[channels])
            products.append(Product(channels, x, y, z, w, tuple(paths)))
        return Structure(widths, tuple(products))


class _Assembly(NamedTuple):
    """Instructions on rows in a layout; `offsets` is where each weight begins in the flat one."""

    instructions: tuple[Instruction, ...]
    operands: Operands
    layout: str
    offsets: list[int]

    def direct(self, chosen: list[int]) -> Iterator[Structure]:
        """Structures with weights and without; as few as their blocks of outputs allow."""
        for weighted in (True, False):
            builders: list[_StructureBuilder] = []
            for n in chosen:
                instruction = self.instructions[n]
                if instruction.has_weight != weighted:
                    continue
                out = self._place(instruction.mode.out, self.operands.out, instruction.i_out)
                weight = _CopyPlace(instruction.mode.weight, self.offsets[n], 0, 1, 1)
                given = self._paths(instruction, out, weight if weighted else None)
                if not any(builder.add(instruction.i_out, *given) for builder in builders):
                    builders.append(_StructureBuilder())
                    builders[-1].add(instruction.i_out, *given)
            x, y, z = (irreps.dim for irreps in self.operands)
            widths = (x, y, z, self.offsets[-1] if weighted else 0)
            yield from (builder.structure(widths) for builder in builders)

    def mixed(self, chosen: list[int]) -> MixedProduct:
        """The product into rows t, and the matrices between t and the output."""
        outputs: list[MixedColumns] = []
        end, builder = 0, _StructureBuilder()
        for i_out in dict.fromkeys(self.instructions[n].i_out for n in chosen):
            members = [n for n in chosen if self.instructions[n].i_out == i_out]
            counts = [self.instructions[n].mixed_copies for n in members]
            firsts = [0, *accumulate(counts)]
            ir, width = self.operands.out[i_out].ir, firsts[-1]
            for n, first in zip(members, firsts, strict=False):
                instruction = self.instructions[n]
                out = _CopyPlace(instruction.mode.product, end + first, ir.l, width, 1)
                builder.add(n, *self._paths(instruction, out, None))
            parts = tuple(zip(members, firsts, strict=False))
            outputs.append(MixedColumns(i_out, end, width, parts))
            end += ir.dim * width
        structure = builder.structure((self.operands.in1.dim, self.operands.in2.dim, end, 0))
        weighted = all(self.instructions[n].has_weight for n in chosen)
        mixing = self._mixing(outputs, end) if weighted else None
        return MixedProduct(structure, tuple(outputs), mixing)

    def _mixing(self, outputs: Sequence[MixedColumns], width: int) -> Mixing:
        t, z, paths = list[CopyBlock](), list[CopyBlock](), list[MatrixPath]()
        for i_out, offset, columns, parts in outputs:
            place = self._place("w", self.operands.out, i_out)
            mul, ir = self.operands.out[i_out]
            for n, first in parts:
                paths.append(MatrixPath(len(t), len(z), self.offsets[n], 1.0))
                count = self.instructions[n].mixed_copies
                t.append(CopyBlock(offset + first, ir.dim, columns, 1, count))
            z.append(CopyBlock(place.offset, ir.dim, place.step, place.copy_step, mul))
        widths = (width, self.operands.out.dim, self.offsets[-1])
        return Mixing(widths, tuple(t), tuple(z), tuple(paths))

    def _paths(
        self, instruction: Instruction, out: _CopyPlace, weight: _CopyPlace | None
    ) -> tuple[int, list[_Blocks], float]:
        """The channels, the blocks that meet and the factor."""
        first = self._place(instruction.mode.first, self.operands.in1, instruction.i_in1)
        second = self._place(instruction.mode.second, self.operands.in2, instruction.i_in2)
        sizes, channel, loop = instruction.sizes, instruction.channel, instruction.loop
        met: list[_Blocks] = []
        for copy in range(sizes.get(loop, 1)):
            x, y, z = (p.block(sizes, channel, loop, copy) for p in (first, second, out))
            w = weight and weight.block(sizes, channel, loop, copy)
            met.append((x, y, z, w))
        return sizes[channel], met, instruction.path_weight

    def _place(self, letters: str, irreps: Irreps, item: int) -> _CopyPlace:
        step, copy_step = steps(irreps[item], self.layout)
        return _CopyPlace(letters, irreps[:item].dim, irreps[item].ir.l, step, copy_step)
