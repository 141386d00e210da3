"""Mixings: blocks of two rows, t and z, and the matrices between their copies."""

from __future__ import annotations

import functools
import json
import operator
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["CopyBlock", "MatrixPath", "Mixing", "groups", "merged", "prepared", "read", "uncovered"]


class CopyBlock(NamedTuple):
    """Copies of one irrep in a row: component m of copy u is at offset + m · step + u · copy_step.

    `components` is 2l + 1.
    """

    offset: int
    components: int
    step: int
    copy_step: int
    copies: int

    def precedes(self, after: CopyBlock) -> bool:
        """Whether the copies of another block continue those of this one."""
        end = self.offset + self.copies * self.copy_step
        return (end, *self[1:4]) == (after.offset, *after[1:4])

    def joined(self, after: CopyBlock) -> CopyBlock:
        """This block and the one that it precedes as one."""
        return self._replace(copies=self.copies + after.copies)


class MatrixPath(NamedTuple):
    """A matrix from block t of one row to block z of the other, (copies of t, copies of z).

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
        t: blocks that do not overlap.
        z: blocks that do not overlap.
        paths: matrices between blocks with equal numbers of components.

    Attributes:
        text: what `read` turns into the same mixing.
        single: whether no block of t has two paths.
        shapes: (copies of t, copies of z) of each matrix.
        num_weights: numbers in all matrices.
        products: products of two numbers in a row.
    """

    widths: tuple[int, int, int]
    t: tuple[CopyBlock, ...]
    z: tuple[CopyBlock, ...]
    paths: tuple[MatrixPath, ...]
    text: str = field(init=False)
    single: bool = field(init=False)
    shapes: tuple[tuple[int, int], ...] = field(init=False)
    num_weights: int = field(init=False)
    products: int = field(init=False)

    def __post_init__(self) -> None:
        # computed once: every call of the registered operator takes the text
        shapes = tuple((self.t[path.t].copies, self.z[path.z].copies) for path in self.paths)
        sizes = [u * n for u, n in shapes]
        components = [self.t[path.t].components for path in self.paths]
        derived = {
            "text": json.dumps((self.widths, self.t, self.z, self.paths), separators=(",", ":")),
            "single": len({path.t for path in self.paths}) == len(self.paths),
            "shapes": shapes,
            "num_weights": sum(sizes),
            "products": sum(map(operator.mul, components, sizes)),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mixing) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def width(self, slot: str) -> int:
        """Numbers in a row of t, z or w."""
        return self.widths["tzw".index(slot)]

    def shape(self, result: str, rows: int, shared: bool, elements: int | None) -> tuple[int, ...]:
        """Shape of t, z or w, of weights that all rows share or that elements have.

        With both, elements are inside each matrix, (copies of t, elements, copies of z).
        """
        width = self.width(result)
        if result != "w" or not (shared or elements is not None):
            return rows, width
        count = 1 if elements is None else elements
        return (count * width,) if shared else (count, width)


@functools.lru_cache(maxsize=1024)
def read(text: str) -> Mixing:
    """The mixing with a text."""
    widths, t, z, paths = json.loads(text)
    t, z = (tuple(CopyBlock(*block) for block in side) for side in (t, z))
    return Mixing(tuple(widths), t, z, tuple(MatrixPath(*path) for path in paths))


class CopySum(NamedTuple):
    """A block of the result z: z[n] = Σ_k a[k] w[k, n], k the copies of all blocks into it.

    Without a path it is zero.

    Args:
        block: block of the result.
        columns: number of copies that are summed.
        runs: blocks of copies that follow each other, and the first column of each.
        paths: each path, its first column, and its first copy of the block.
    """

    block: CopyBlock
    columns: int
    runs: tuple[tuple[CopyBlock, int], ...]
    paths: tuple[tuple[MatrixPath, int, int], ...]

    @property
    def length(self) -> int:
        """Numbers in a row of prepared weights: whole words of 16 bytes."""
        return -(-self.columns // 4) * 4


@functools.lru_cache(maxsize=1024)
def groups(mixing: Mixing, result: str) -> tuple[CopySum, ...]:
    """The blocks of the result, t or z, with the matrices that lead to them."""
    found = []
    of, blocks, others = ("z", mixing.t, mixing.z) if result == "t" else ("t", mixing.z, mixing.t)
    for number, block in enumerate(blocks):
        columns, runs, paths = 0, list[tuple[CopyBlock, int]](), []
        for path in mixing.paths:
            if getattr(path, result) != number:
                continue
            source = others[getattr(path, of)]
            paths.append((path, columns, 0))
            if runs and runs[-1][0].precedes(source):
                before, first = runs.pop()
                runs.append((before.joined(source), first))
            else:
                runs.append((source, columns))
            columns += source.copies
        if block.copies:
            found.append(CopySum(block, columns, tuple(runs), tuple(paths)))
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def merged(mixing: Mixing, result: str) -> tuple[CopySum, ...]:
    """Groups, joined where they sum the same copies into blocks that follow each other.

    The longest sums come first.
    """
    found = list[CopySum]()
    for group in groups(mixing, result):
        last = found[-1] if found else None
        if last and last.runs == group.runs and last.block.precedes(group.block):
            more = ((path, first, last.block.copies) for path, first, _ in group.paths)
            block = last.block.joined(group.block)
            found[-1] = last._replace(block=block, paths=(*last.paths, *more))
        else:
            found.append(group)
    return tuple(sorted(found, key=lambda group: -group.columns))


@functools.lru_cache(maxsize=1024)
def prepared(mixing: Mixing, result: str) -> int:
    """Number of prepared weights of one part."""
    return sum(group.block.copies * group.length for group in merged(mixing, result))


@functools.lru_cache(maxsize=1024)
def uncovered(mixing: Mixing, result: str, paths: bool) -> bool:
    """Whether some numbers of a row of the result belong to no block, or to none with a path."""
    if result == "w":
        return mixing.num_weights < mixing.width("w")
    blocks = (group.block for group in groups(mixing, result) if group.paths or not paths)
    return sum(block.components * block.copies for block in blocks) < mixing.width(result)
