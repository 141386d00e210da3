"""The oracle: products of multivectors from the dense Cayley table, in any dtype.

Blades first: x, y are (B, batch…, F).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchweft.clifford.algebra import Algebra

__all__ = ["fully_connected", "gate", "product", "rms_norm", "tables"]


def tables(algebra: Algebra, dtype: torch.dtype, kind: str = "geometric") -> Tensor:
    """(P, B, B, B) [path, left, out, right]: the Cayley table of a product, path by path."""
    cayley = algebra.cayley(dtype)
    grades = torch.tensor(algebra.grades)
    left, out, right = grades[:, None, None], grades[:, None], grades
    kept = {
        "geometric": torch.ones((), dtype=torch.bool),
        "wedge": out == left + right,
        "inner": out == (left - right).abs(),
        "left_contraction": out == right - left,
        "right_contraction": out == left - right,
    }[kind]
    return torch.stack(
        [cayley * kept * (left == a) * (out == b) * (right == c) for a, b, c in algebra.paths]
    )


def product(
    x: Tensor, y: Tensor, algebra: Algebra, weight: Tensor | None = None, kind: str = "geometric"
) -> Tensor:
    """out_j = Σ_(i,k) sign · w[path] · x_i · y_k; weight (F, P) or None."""
    table = tables(algebra, x.dtype, kind).to(x.device)
    if weight is None:
        return torch.einsum("pijk,i...f,k...f->j...f", table, x, y)
    return torch.einsum("pijk,fp,i...f,k...f->j...f", table, weight, x, y)


def fully_connected(x: Tensor, y: Tensor, weight: Tensor, algebra: Algebra) -> Tensor:
    """out_j[m] = Σ_(p,n) W[p,n,m] Σ_(i,k) sign · x_i[n] · y_k[n]; weight (P, F_in, F_out)."""
    table = tables(algebra, x.dtype).to(x.device)
    pairs = torch.einsum("pijk,i...n,k...n->pj...n", table, x, y)
    return torch.einsum("pj...n,pnm->j...m", pairs, weight)


def gate(x: Tensor) -> Tensor:
    """x · Φ(x₀), Φ(t) = ½ (1 + erf(t/√2)): the whole multivector gated by its own scalar."""
    return x * (0.5 * (1 + torch.erf(x[:1] * math.sqrt(0.5))))


def rms_norm(o: Tensor, algebra: Algebra, norm: str = "euclidean", eps: float = 1e-6) -> Tensor:
    """o_j / √(s_g + eps), s_g = mean over features of Σ_(j∈g) o_j² or of |Σ_(j∈g) q_j o_j²|."""
    blocks = []
    for blades in algebra.of_grade:
        part = o[blades.start : blades.stop]
        squares = torch.tensor(algebra.squares, dtype=o.dtype, device=o.device)
        of_grade = squares[blades.start : blades.stop].view(-1, *[1] * (o.dim() - 1))
        if norm == "euclidean":
            of_grade = of_grade * 0 + 1
        elif not of_grade.any():
            blocks.append(part)
            continue
        size = (of_grade * part * part).sum(0, keepdim=True).abs().mean(-1, keepdim=True)
        blocks.append(part / (size + eps).sqrt())
    return torch.cat(blocks)
