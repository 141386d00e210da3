"""Weights that mix copies: blocks of two rows, matrices between them, and sums into each block."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "Block",
    "Group",
    "Mixing",
    "Path",
    "Run",
    "groups",
    "merged",
    "prepared",
    "read",
    "uncovered",
    "weights",
]


class Block(NamedTuple):
    """Copies of one irrep in a row: component m of copy u is at offset + m · step + u · copy_step.

    `components` is 2l + 1.
    """

    offset: int
    components: int
    step: int
    copy_step: int
    copies: int


class Path(NamedTuple):
    """A matrix: from block t of one row to block z of the other, (copies of t, copies of z).

    It begins at number `weight` of a row of weights.
    """

    t: int
    z: int
    weight: int
    factor: float


@dataclass(frozen=True, eq=False)
class Mixing:
    """Blocks of both rows, and the matrices between them.

    Args:
        widths: numbers in a row of t, of z and of weights.
        t: blocks, none overlaps another.
        z: blocks, none overlaps another.
        paths: between blocks of as many components.

    `text` is what `read` turns into the same mixing; `single`: no block of t has two paths.
    """

    widths: tuple[int, int, int]
    t: tuple[Block, ...]
    z: tuple[Block, ...]
    paths: tuple[Path, ...]
    text: str = field(init=False)
    single: bool = field(init=False)

    def __post_init__(self) -> None:
        # written once: the registered operator takes it at every call
        text = json.dumps((self.widths, self.t, self.z, self.paths), separators=(",", ":"))
        object.__setattr__(self, "text", text)
        single = len({path.t for path in self.paths}) == len(self.paths)
        object.__setattr__(self, "single", single)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mixing) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def width(self, slot: str) -> int:
        """Numbers in a row of t, z or w."""
        return self.widths["tzw".index(slot)]

    def blocks(self, slot: str) -> tuple[Block, ...]:
        """Blocks of t or of z."""
        return self.t if slot == "t" else self.z


@functools.lru_cache(maxsize=1024)
def read(text: str) -> Mixing:
    """The mixing with a text."""
    widths, t, z, paths = json.loads(text)
    t, z = (tuple(Block(*block) for block in side) for side in (t, z))
    return Mixing(tuple(widths), t, z, tuple(Path(*path) for path in paths))


class Run(NamedTuple):
    """Copies that follow each other in a row: a block, and the first column they stand for."""

    block: Block
    first: int


class Group(NamedTuple):
    """A block of the result z: z[n] = Σ_k a[k] w[k, n], k the copies of all blocks into it.

    Args:
        block: of the result.
        columns: how many copies are summed.
        runs: where they are.
        paths: with the first of the columns, and of the block's copies, of each.
    """

    block: Block
    columns: int
    runs: tuple[Run, ...]
    paths: tuple[tuple[Path, int, int], ...]

    @property
    def length(self) -> int:
        """Numbers in a row of prepared weights: whole words of 16 bytes."""
        return -(-self.columns // 4) * 4


@functools.lru_cache(maxsize=1024)
def groups(mixing: Mixing, result: str) -> tuple[Group, ...]:
    """The blocks of t or z that matrices lead to."""
    found = []
    of = "z" if result == "t" else "t"
    blocks = mixing.blocks(of)
    for number, block in enumerate(mixing.blocks(result)):
        members = [path for path in mixing.paths if getattr(path, result) == number]
        columns, runs, paths = 0, list[Run](), []
        for path in members:
            source = blocks[getattr(path, of)]
            paths.append((path, columns, 0))
            if runs and _follows(runs[-1].block, source):
                before = runs.pop()
                runs.append(Run(_joined(before.block, source), before.first))
            else:
                runs.append(Run(source, columns))
            columns += source.copies
        if columns and block.copies:
            found.append(Group(block, columns, tuple(runs), tuple(paths)))
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def merged(mixing: Mixing, result: str) -> tuple[Group, ...]:
    """Groups, those joined that sum the same copies into blocks that follow each other.

    Those with most to do come first.
    """
    found = list[Group]()
    for group in groups(mixing, result):
        last = found[-1] if found else None
        if last and last.runs == group.runs and _follows(last.block, group.block):
            more = ((path, first, last.block.copies) for path, first, _ in group.paths)
            block = _joined(last.block, group.block)
            found[-1] = last._replace(block=block, paths=(*last.paths, *more))
        else:
            found.append(group)
    return tuple(sorted(found, key=lambda group: -group.columns))


@functools.lru_cache(maxsize=1024)
def prepared(mixing: Mixing, result: str) -> int:
    """Number of all prepared weights, of one part."""
    return sum(group.block.copies * group.length for group in merged(mixing, result))


def weights(mixing: Mixing) -> int:
    """Number of weights in all matrices."""
    return sum(mixing.t[path.t].copies * mixing.z[path.z].copies for path in mixing.paths)


@functools.lru_cache(maxsize=1024)
def uncovered(mixing: Mixing, result: str) -> bool:
    """Whether some numbers of a row of the result belong to no path."""
    if result == "w":
        return weights(mixing) < mixing.width("w")
    blocks = (group.block for group in groups(mixing, result))
    return sum(block.components * block.copies for block in blocks) < mixing.width(result)


def _joined(block: Block, after: Block) -> Block:
    return block._replace(copies=block.copies + after.copies)


def _follows(block: Block, after: Block) -> bool:
    """Whether the copies of a block go on in another one."""
    end = block.offset + block.copies * block.copy_step
    return (end, *block[1:4]) == (after.offset, *after[1:4])
