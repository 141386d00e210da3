"""Dropout of whole irreps."""

from __future__ import annotations

from torch import Tensor, nn

from torchweft.errors import ShapeError
from torchweft.o3.irreps.irreps import Irreps, IrrepsLike
from torchweft.o3.irreps.layout import check_layout, check_rows, join

__all__ = ["Dropout"]


class Dropout(nn.Module):
    """z[b, u] = x[b, u] · k/(1−p), k = 1 with probability 1−p, else 0: one for each copy and b.

    Args:
        irreps: of x.
        p: the probability that a copy is dropped.
        layout: "mul_ir" or "ir_mul".

    While training; else the identity.  The random numbers are drawn as e3nn draws them.
    """

    def __init__(self, irreps: IrrepsLike, p: float, *, layout: str = "mul_ir") -> None:
        super().__init__()
        check_layout(layout)
        if not 0 <= p <= 1:
            raise ShapeError(f"p is {p}: a probability must be from 0 to 1. Pass such a p.")
        self.irreps, self.p, self.layout = Irreps(irreps), p, layout

    def __repr__(self) -> str:
        return f"{type(self).__name__} ({self.irreps}, p={self.p})"

    def forward(self, x: Tensor) -> Tensor:
        """(b, …, D) of x (b, …, D); all inner dimensions have the same copies dropped."""
        check_rows("x", x, self.irreps, self)
        if not self.training or not self.irreps:
            return x
        if x.dim() < 2:
            raise ShapeError(
                f"x is {tuple(x.shape)}: it must be (batch, …, {self.irreps.dim}), each row of the "
                "batch drops copies of its own. Pass x[None]."
            )
        kept = [self._kept(x, mul).unsqueeze(2).expand(-1, -1, ir.dim) for mul, ir in self.irreps]
        inner = (1,) * (x.dim() - 2)
        return x * join(kept, self.layout).view(x.shape[0], *inner, -1)

    def _kept(self, x: Tensor, mul: int) -> Tensor:
        """(batch, mul): 0, or 1/(1−p)."""
        kept = x.new_empty(x.shape[0], mul)
        if self.p == 1:
            return kept.zero_()
        return kept.bernoulli_(1 - self.p).div_(1 - self.p) if self.p else kept.fill_(1)
