"""Instructions sorted by how they are computed: the structures of channelwise products, and more.

    direct   the output's copies are channels (uvu, uvv, uuu, uvuv): a channelwise product
    mixed    weights mix copies (uvw, uuw): a product without weights into rows t, then t @ weight
    dense    pairs of copies, and sums over more copies than a kernel unrolls: one einsum each

A sum or an outer product over the copies of one factor is written out, a block for each copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from torchweft.o3.channelwise.structure import Block, Path, Product, Structure
from torchweft.o3.irreps.instructions import Instruction, Operands
from torchweft.o3.irreps.irreps import Irreps
from torchweft.o3.irreps.layout import parts_of, steps
from torchweft.o3.mixing.blocks import CopyBlock as Copies
from torchweft.o3.mixing.blocks import MatrixPath as Matrix
from torchweft.o3.mixing.blocks import Mixing

__all__ = [
    "COPIES",
    "Columns",
    "InstructionParts",
    "Mixed",
    "split_weight",
    "structures_of",
    "weight_offsets",
]

COPIES = 8
"""Copies of a factor that are written out: each is a block of its own in the emitted code."""


class Columns(NamedTuple):
    """Where t holds what an output mixes: (2l+1, width) numbers from `offset` of a row on.

    `parts` are (instruction, first column), each as many columns as copies that it mixes.
    """

    i_out: int
    offset: int
    width: int
    parts: tuple[tuple[int, int], ...]


class Mixed(NamedTuple):
    """A product without weights, and the outputs that are its result times weights.

    `mixing` is the same as `outputs` for one operator; None where some have no weights.
    """

    structure: Structure
    outputs: tuple[Columns, ...]
    mixing: Mixing | None


class InstructionParts(NamedTuple):
    """All instructions, by kind; what is empty is left out.

    The outputs of the direct structures and the dense ones add.

    Args:
        direct: products of channels.
        mixed: what is mixed after a product.
        dense: numbers of instructions.
        every: numbers of all instructions.
        channels: the most channels of a direct product.
    """

    direct: tuple[Structure, ...]
    mixed: Mixed | None
    dense: tuple[int, ...]
    every: tuple[int, ...]
    channels: int


def weight_offsets(instructions: Sequence[Instruction]) -> list[int]:
    """Where each instruction's weight begins in the flat one, and the length of that."""
    return list(accumulate((i.num_weights for i in instructions), initial=0))


def split_weight(weight: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views (…, *shape) of a flat weight, whose gradients are one tensor."""
    flats = parts_of(weight, [math.prod(shape) for shape in shapes])
    return [f.reshape(*f.shape[:-1], *s) for f, s in zip(flats, shapes, strict=True)]


def structures_of(
    instructions: Sequence[Instruction], operands: Operands, layout: str = "mul_ir"
) -> InstructionParts:
    """Instructions sorted by how they are computed, on rows in a layout."""
    chosen = [n for n, instruction in enumerate(instructions) if not instruction.empty]
    dense = tuple(n for n in chosen if _is_dense(instructions[n]))
    mixed = [n for n in chosen if n not in dense and instructions[n].mode.mixes]
    direct = [n for n in chosen if n not in dense and n not in mixed]
    structures = tuple(_direct(instructions, direct, operands, layout))
    mixes = _mixed(instructions, mixed, operands, layout) if mixed else None
    products = (product for structure in structures for product in structure.products)
    channels = max((product.channels for product in products), default=0)
    return InstructionParts(structures, mixes, dense, tuple(chosen), channels)


class _CopyPlace(NamedTuple):
    """A block of copies in a row: the copies have the letters of a mode."""

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


class _Instructed(NamedTuple):
    """The places that an instruction reads and writes; no weight: None."""

    first: _CopyPlace
    second: _CopyPlace
    out: _CopyPlace
    weight: _CopyPlace | None
    sizes: dict[str, int]
    factor: float

    @property
    def channel(self) -> str:
        """The letter of the output with most copies."""
        return max(self.out.letters, key=self.sizes.__getitem__)

    @property
    def loop(self) -> str:
        """The other letter, or none."""
        return (self.first.letters + self.second.letters).replace(self.channel, "")

    def paths(self) -> Iterator[list[Block | None]]:
        """The blocks of every copy of the loop."""
        places = (self.first, self.second, self.out, self.weight)
        for copy in range(self.sizes.get(self.loop, 1)):
            yield [
                None if place is None else place.block(self.sizes, self.channel, self.loop, copy)
                for place in places
            ]


Cut = tuple[int, frozenset[Block | None]]
"""The channels and the blocks that an output is written as."""


class _Builder:
    """Products under construction, by number of channels: blocks are kept once."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[dict[Block, int]]] = {}
        self.paths: dict[int, list[Path]] = {}
        self.outputs: dict[int, Cut] = {}

    def takes(self, i_out: int, instructed: _Instructed) -> bool:
        """Whether the output is new here, or cut into the same blocks."""
        cut = self.outputs.get(i_out)
        return cut is None or cut == _cut(instructed)

    def add(self, i_out: int, instructed: _Instructed) -> None:
        """Write the instruction's paths."""
        channels = instructed.sizes[instructed.channel]
        self.outputs[i_out] = _cut(instructed)
        slots = self.blocks.setdefault(channels, [{}, {}, {}, {}])
        paths = self.paths.setdefault(channels, [])
        for blocks in instructed.paths():
            x, y, z, w = (
                -1 if block is None else slot.setdefault(block, len(slot))
                for slot, block in zip(slots, blocks, strict=True)
            )
            paths.append(Path(x, y, z, w, instructed.factor))

    def structure(self, widths: tuple[int, int, int, int]) -> Structure:
        """What was added."""
        products = []
        for channels, paths in self.paths.items():
            x, y, z, w = map(tuple, self.blocks[channels])
            products.append(Product(channels, x, y, z, w, tuple(paths)))
        return Structure(widths, tuple(products))


def _cut(instructed: _Instructed) -> Cut:
    channels = instructed.sizes[instructed.channel]
    return channels, frozenset(out for _, _, out, _ in instructed.paths())


def _is_dense(instruction: Instruction) -> bool:
    mode = instruction.mode
    if mode.pairs:
        return True
    sizes = dict(zip(mode.weight, instruction.path_shape, strict=True))
    # the letter of the channels must be one of the output's: the other one is written out
    letters = _inner_letters(instruction)
    channel = max(letters, key=sizes.__getitem__)
    loop = (mode.first + mode.second).replace(channel, "")
    return sizes.get(loop, 1) > COPIES


def _inner_letters(instruction: Instruction) -> str:
    """The letters of what a channelwise product gives: the output's, or all that are mixed."""
    mode = instruction.mode
    return mode.weight.replace("w", "") if mode.mixes else mode.out


def _direct(
    instructions: Sequence[Instruction], chosen: list[int], operands: Operands, layout: str
) -> Iterator[Structure]:
    """Structures with weights and without; as few as their blocks of outputs allow."""
    offsets = weight_offsets(instructions)
    for weighted in (True, False):
        builders: list[_Builder] = []
        for n in chosen:
            instruction = instructions[n]
            if instruction.has_weight != weighted:
                continue
            out = _place(instruction.mode.out, operands.out, instruction.i_out, layout)
            instructed = _instructed(instruction, operands, layout, out, offsets[n])
            found = (b for b in builders if b.takes(instruction.i_out, instructed))
            builder = next(found, None)
            if builder is None:
                builder = _Builder()
                builders.append(builder)
            builder.add(instruction.i_out, instructed)
        x, y, z = (irreps.dim for irreps in operands)
        widths = (x, y, z, offsets[-1] if weighted else 0)
        yield from (builder.structure(widths) for builder in builders)


def _mixed(
    instructions: Sequence[Instruction], chosen: list[int], operands: Operands, layout: str
) -> Mixed:
    outputs, end = [], 0
    builder = _Builder()
    for i_out in dict.fromkeys(instructions[n].i_out for n in chosen):
        members = [n for n in chosen if instructions[n].i_out == i_out]
        counts = [math.prod(instructions[n].path_shape[:-1]) for n in members]
        ir, width, start = operands.out[i_out].ir, sum(counts), end
        column, parts = 0, []
        for n, count in zip(members, counts, strict=True):
            letters = _inner_letters(instructions[n])
            out = _CopyPlace(letters, start + column, ir.l, width, 1)
            builder.add(n, _instructed(instructions[n], operands, layout, out, None))
            parts.append((n, column))
            column += count
        outputs.append(Columns(i_out, start, width, tuple(parts)))
        end += ir.dim * width
    structure = builder.structure((operands.in1.dim, operands.in2.dim, end, 0))
    weighted = all(instructions[n].has_weight for n in chosen)
    mixing = _mixing(instructions, outputs, operands, end, layout) if weighted else None
    return Mixed(structure, tuple(outputs), mixing)


def _mixing(
    instructions: Sequence[Instruction],
    outputs: Sequence[Columns],
    operands: Operands,
    width: int,
    layout: str,
) -> Mixing:
    offsets = weight_offsets(instructions)
    t, z, paths = list[Copies](), list[Copies](), list[Matrix]()
    for columns in outputs:
        item = operands.out[columns.i_out]
        for n, first in columns.parts:
            count = math.prod(instructions[n].path_shape[:-1])
            paths.append(Matrix(len(t), len(z), offsets[n], 1.0))
            t.append(Copies(columns.offset + first, item.ir.dim, columns.width, 1, count))
        start = operands.out[: columns.i_out].dim
        z.append(Copies(start, item.ir.dim, *steps(item, layout), item.mul))
    return Mixing((width, operands.out.dim, offsets[-1]), tuple(t), tuple(z), tuple(paths))


def _instructed(
    instruction: Instruction,
    operands: Operands,
    layout: str,
    out: _CopyPlace,
    weight_offset: int | None,
) -> _Instructed:
    mode = instruction.mode
    weighted = instruction.has_weight and weight_offset is not None
    return _Instructed(
        _place(mode.first, operands.in1, instruction.i_in1, layout),
        _place(mode.second, operands.in2, instruction.i_in2, layout),
        out,
        _CopyPlace(mode.weight, weight_offset or 0, 0, 1, 1) if weighted else None,
        dict(zip(mode.weight, instruction.path_shape, strict=True)),
        instruction.path_weight,
    )


def _place(letters: str, irreps: Irreps, item: int, layout: str) -> _CopyPlace:
    step, copy_step = steps(irreps[item], layout)
    return _CopyPlace(letters, irreps[:item].dim, irreps[item].ir.l, step, copy_step)
