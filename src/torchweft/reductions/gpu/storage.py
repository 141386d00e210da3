"""What kernels read: variables as they are, by component, or computed beforehand.

rows and columns   (B or 1, length, dim)
by component       (B or 1, dim, pitch), pitch ≥ length: neighbours are of one component
in blocks          dim filled up with zeros to whole blocks
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from torchweft.reductions.call import Sizes
from torchweft.reductions.formula.evaluate import evaluate
from torchweft.reductions.formula.kernel_forms import Looped
from torchweft.reductions.formula.node import Node, variables

__all__ = ["Stored", "in_blocks", "put_together", "stored"]

LINE = 32
"""Numbers that memory brings at once: components begin with one."""


class Stored(NamedTuple):
    """How a variable lies in memory.

    Args:
        formula: its value.
        size: components, with those that fill up.
        pitch: from one component to the next; 0 where those of a row are neighbours.
        stride: from one batch entry to the next.
    """

    formula: Node
    size: int
    pitch: int
    stride: int

    @property
    def as_given(self) -> bool:
        """Whether it is a variable as it is."""
        f = self.formula
        return f.op == "var" and not self.pitch and self.size == f.dim

    def tensor(self, values: Mapping[int, Tensor]) -> Tensor:
        """Its value, so stored."""
        f = self.formula
        value = values[f.data[0]] if f.op == "var" else evaluate(f, values)
        if not self.pitch:
            return pad(value, (0, self.size - f.dim)) if self.size > f.dim else value.contiguous()
        made = value.new_zeros(value.shape[0], self.size, self.pitch)
        made[:, : f.dim, : value.shape[1]] = value.transpose(1, 2)
        return made


def stored(
    v: Node, what: Looped, batched: Mapping[int, bool], sizes: Sizes, beyond: int, *, apart: bool
) -> Stored:
    """How a kernel reads a variable.

    Args:
        v: the variable.
        what: the formulas.
        batched: which of the variables that are given differ between entries.
        sizes: of the data.
        beyond: how many rows or columns the last tile may reach beyond the data.
        apart: whether it is stored by component.
    """
    made = next((m for m in what.made if m.number == v.data[0]), None)
    f = v if made is None else made.formula
    size = what.blocks * v.dim if made is not None and made.blocked else v.dim
    length = (sizes.rows, sizes.columns, 1)[v.data[2]]
    pitch = -(-(length + beyond) // LINE) * LINE if apart else 0
    entry = size * (pitch or length)
    differs = any(batched[u.data[0]] for u in variables(f))
    return Stored(f, size, pitch, entry * differs)


def in_blocks(result: Tensor, blocks: int, size: int) -> Tensor:
    """(B, blocks, ..., size): the same for each block of the components."""
    made = result.new_empty(len(result), blocks, *result.shape[1:-1], size)
    return made.copy_(result[:, None, ..., :1].expand_as(made))


def put_together(found: Tensor, result: Tensor) -> None:
    """The blocks of components one after the other; of what has one component the first."""
    joined = found.movedim(1, -2).flatten(-2)
    result.copy_(joined[..., : result.shape[-1]])
