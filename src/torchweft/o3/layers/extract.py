"""Items of a row as rows of their own.

z_k = (x[i] for i in instructions[k]), side by side
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from torchweft.errors import ShapeError
from torchweft.o3.irreps.irreps import (
    Irrep,
    Irreps,
    IrrepsLike,
    check_rows,
    parts_of,
    side_by_side,
)
from torchweft.o3.tensor_product.instructions import check_item
from torchweft.o3.tensor_product.module import RowLayer

__all__ = ["Extract", "ExtractIr"]


class Extract(RowLayer):
    """z_k = (x[i] for i in instructions[k]): several rows, each made of items of x.

    Args:
        irreps_in: irreps of x (…, D).
        irreps_outs: irreps of each z.
        instructions: for each z, the numbers of the items of x that it is made of, in order.
        squeeze_out: return the only z itself, not a tuple.
        backend: see `torchweft.o3`.

    Raises:
        ShapeError: another number of instructions than of results, or items with other irreps than
            irreps_outs.
        IndexRangeError: the number of an item that x does not have.

    Results may be views of x.  Items are taken whole, so the layout does not matter.

    Source: e3nn's layer of this name, https://github.com/e3nn/e3nn.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> extract = o3.Extract("1e+0e+0e", ["0e", "0e"], [(1,), (2,)])
        >>> extract(torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0]))
        (tensor([1.]), tensor([2.]))
    """

    def __init__(
        self,
        irreps_in: IrrepsLike,
        irreps_outs: Iterable[IrrepsLike],
        instructions: Sequence[Sequence[int]],
        squeeze_out: bool = False,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__(backend=backend)
        self.irreps_in = Irreps(irreps_in)
        self.irreps_outs = tuple(map(Irreps, irreps_outs))
        self.instructions, self.squeeze_out = instructions, squeeze_out
        if len(self.irreps_outs) != len(instructions):
            raise ShapeError(
                f"there are {len(instructions)} instructions and {len(self.irreps_outs)} "
                "irreps_outs: each result has its own. Pass as many of both."
            )
        for out, items in zip(self.irreps_outs, instructions, strict=True):
            for i in items:
                check_item(tuple(items), i, "irreps_in", self.irreps_in)
            found = Irreps([self.irreps_in[i] for i in items])
            if found != out:
                raise ShapeError(
                    f"instruction {tuple(items)} extracts {found or 'nothing'} of "
                    f"{self.irreps_in}, but irreps_outs has {out or 'empty'}: items are "
                    "copied as they are. Pass the irreps of these items."
                )

    def forward(self, x: Tensor) -> tuple[Tensor, ...] | Tensor:
        """The items of x, as tensors of their own.

        Args:
            x: (…, D).

        Returns:
            A tuple with a tensor (…, dim) for each of irreps_outs, or with squeeze_out the only
            one.
        """
        check_rows("x", x, self.irreps_in, self)
        parts = parts_of(x, [item.dim for item in self.irreps_in])
        found = tuple(
            side_by_side([parts[i] for i in items], -1) if len(items) else x[..., :0]
            for items in self.instructions
        )
        return found[0] if self.squeeze_out and len(found) == 1 else found


class ExtractIr(Extract):
    """z = the items of x that are one irrep.

    Args:
        irreps_in: irreps of x (…, D).
        ir: the irrep, such as "1o".
        backend: see `torchweft.o3`.

    Attributes:
        irreps_out: of z: the items of that irrep, in order.

    Source: e3nn's layer of this name, https://github.com/e3nn/e3nn.

    Example:
        >>> from torchweft import o3
        >>> o3.ExtractIr("2x0e+1o+3x0e", "0e").irreps_out
        2x0e+3x0e
    """

    def __init__(
        self, irreps_in: IrrepsLike, ir: Irrep | str, *, backend: str | None = None
    ) -> None:
        irreps, kept = Irreps(irreps_in), Irrep(ir)
        items = tuple(i for i, item in enumerate(irreps) if item.ir == kept)
        out = Irreps([irreps[i] for i in items])
        super().__init__(irreps, [out], [items], squeeze_out=True, backend=backend)
        self.irreps_out = out
