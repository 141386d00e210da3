"""z = x, with the irreps that it has: a place for a layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchweft.errors import ShapeError
from torchweft.o3.irreps.irreps import Irreps, IrrepsLike
from torchweft.o3.irreps.layout import check_rows
from torchweft.o3.tensor_product.module import forget_e3nn_tables

__all__ = ["Identity"]


class Identity(nn.Module):
    """z = x.

    Args:
        irreps_in: of x, simplified.
        irreps_out: of z, the same.

    Raises:
        ShapeError: they differ.
    """

    def __init__(self, irreps_in: IrrepsLike, irreps_out: IrrepsLike) -> None:
        super().__init__()
        self.irreps_in, self.irreps_out = (
            Irreps(irreps_in).simplify(),
            Irreps(irreps_out).simplify(),
        )
        if self.irreps_in != self.irreps_out:
            raise ShapeError(
                f"irreps_in is {self.irreps_in} and irreps_out {self.irreps_out}: what is not "
                "changed has the same irreps. Pass the same, or a Linear between them."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.irreps_in} -> {self.irreps_out})"

    def forward(self, x: Tensor) -> Tensor:
        """X itself, (…, D)."""
        check_rows("x", x, self.irreps_in, self)
        return x

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        forget_e3nn_tables(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
