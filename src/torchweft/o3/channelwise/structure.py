"""The structure of a channelwise tensor product: blocks of rows, and paths.

    Q(x, y, w, z) = Σ_p c_p Σ_{abm} C[a,b,m] Σ_u x[p.x,a,u] · y[p.y,b,u] · w[p.w,u] · z[p.z,m,u]

C is the Wigner 3j symbol of the path's degrees, u the channel.  Q is linear in each of its four
slots; ∂Q/∂z is the tensor product, the other derivatives are its gradients.  Each block says where
its channels lie in memory, so that mul_ir and ir_mul, ragged multiplicities and the modes uvu, uvv,
uuu and uvuv are all this one form.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from torchweft.o3.irreps.wigner import entries_3j

__all__ = [
    "SLOTS",
    "Block",
    "Path",
    "Product",
    "Structure",
    "block_view",
    "entry_counts",
    "read",
    "stores",
]

SLOTS = "xyzw"
"""The roles of the operands: two factors, the result, the weight."""


class Block(NamedTuple):
    """One irrep in a row: component a of channel u is at offset + a · step + u · channel_step.

    A channel_step of 0 means that all channels share the block.
    """

    offset: int
    degree: int
    step: int
    channel_step: int

    @property
    def components(self) -> int:
        """2l + 1."""
        return 2 * self.degree + 1


class Path(NamedTuple):
    """Numbers of the blocks of x, y, z and w that a path couples, and its factor.

    w is -1 in every path of a product without weights.
    """

    x: int
    y: int
    z: int
    w: int
    factor: float


class Product(NamedTuple):
    """Paths with one number of channels.  No block of z is shared by channels."""

    channels: int
    x: tuple[Block, ...]
    y: tuple[Block, ...]
    z: tuple[Block, ...]
    w: tuple[Block, ...]
    paths: tuple[Path, ...]

    def blocks(self, slot: str) -> tuple[Block, ...]:
        """Blocks of a slot."""
        found: tuple[Block, ...] = getattr(self, slot)
        return found

    def degrees(self, path: Path) -> tuple[int, int, int]:
        """Degrees of x, y and z on a path."""
        return self.x[path.x].degree, self.y[path.y].degree, self.z[path.z].degree


@dataclass(frozen=True, eq=False, repr=False)
class Structure:
    """Products on the same rows, one for each number of channels.

    Args:
        widths: numbers in a row of x, y, z and w; 0 for w: no weights.
        products: products whose blocks of z do not overlap.

    `text` identifies the structure; `read` turns it into the same structure.
    """

    widths: tuple[int, int, int, int]
    products: tuple[Product, ...]
    text: str = field(init=False)

    def __post_init__(self) -> None:
        # computed once: every call passes it to the registered operator
        text = json.dumps((self.widths, self.products), separators=(",", ":"))
        object.__setattr__(self, "text", text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        paths = sum(len(product.paths) for product in self.products)
        return f"Structure({paths} paths, widths {self.widths})"

    def width(self, slot: str) -> int:
        """Numbers in a row of a slot."""
        return self.widths[SLOTS.index(slot)]

    @property
    def weighted(self) -> bool:
        """Whether paths have weights."""
        return self.width("w") > 0


@functools.lru_cache(maxsize=1024)
def read(text: str) -> Structure:
    """The structure with a text."""
    widths, products = json.loads(text)
    return Structure(tuple(widths), tuple(map(_product, products)))


def _product(fields: list[Any]) -> Product:
    channels, *slots, paths = fields
    x, y, z, w = (tuple(Block(*block) for block in slot) for slot in slots)
    return Product(channels, x, y, z, w, tuple(Path(*path) for path in paths))


@functools.lru_cache(maxsize=4096)
def entry_counts(structure: Structure) -> tuple[tuple[int, int, int], ...]:
    """For each path: channels, entries of its 3j symbol, products by its weight per channel."""
    return tuple(
        (
            product.channels,
            len(entries_3j(*product.degrees(path))),
            0 if path.w < 0 else product.z[path.z].components,
        )
        for product in structure.products
        for path in product.paths
    )


@functools.lru_cache(maxsize=4096)
def stores(structure: Structure, slot: str) -> tuple[int, int]:
    """Largest and smallest count of products that write one number of a row."""
    counts = [0] * structure.width(slot)
    for product in structure.products:
        blocks = product.blocks(slot)
        for b in {getattr(path, slot) for path in product.paths}:
            offset, degree, step, channel_step = blocks[b]
            for a in range(2 * degree + 1):
                for u in range(product.channels if channel_step else 1):
                    counts[offset + a * step + u * channel_step] += 1
    return max(counts, default=1), min(counts, default=1)


def block_view(rows: Tensor, block: Block, channels: int) -> Tensor:
    """A block of every row, (rows, components, channels or 1)."""
    width = channels if block.channel_step else 1
    return rows.as_strided(
        (rows.shape[0], block.components, width),
        (rows.stride(0), block.step, block.channel_step),
        rows.storage_offset() + block.offset,
    )
