"""The oracle: the sum as it is written, in plain torch, for any dtype.  Never used by a fast path.

    z[n,M] = Σ_{k ∈ segment M} s[t] · x[n,index1[t]] ∘ y[n,index2[t]],   t = gather_index[k]

It holds all N·T terms in memory, and it is differentiable to any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["indexed_product"]

EINSUM = {
    "mul": "ntc,ntc->ntc",
    "outer": "ntc,ntd->ntcd",
    "inner": "ntc,ntc->nt",
    "vecmat": "ntc,ntcd->ntd",
    "vecsca": "ntc,nt->ntc",
    "scavec": "nt,ntc->ntc",
    "mat_t_vec": "ntcd,ntc->ntd",
    "scale": "ntc->ntc",
}
"""The small product; its letters also tell the rank of each input (n may be missing)."""


def indexed_product(
    op: str,
    input1: Tensor,
    input2: Tensor | None = None,
    scale: Tensor | None = None,
    index1: Tensor | None = None,
    index2: Tensor | None = None,
    seg: Tensor | None = None,
    gather_index: Tensor | None = None,
    index_out: Tensor | None = None,
    out_accumulated: bool = False,
    out_size: int | None = None,
) -> Tensor:
    """The product of one of the seven public names, or "scale", with the public arguments."""
    letters = EINSUM[op].split("->")[0].split(",")
    inputs = [a for a in (input1, input2) if a is not None]
    batched = [a.dim() == len(word) for a, word in zip(inputs, letters, strict=True)]
    inputs = [a if has_n else a.unsqueeze(0) for a, has_n in zip(inputs, batched, strict=True)]
    size = max(1, *(a.shape[0] for a in inputs)) if all(a.shape[0] for a in inputs) else 0
    inputs = [a.expand(size, *a.shape[1:]) for a in inputs]

    tables = [i for i in (index1, index2, scale) if i is not None]
    terms = tables[0].numel() if tables else inputs[0].shape[1]
    rows = [
        a[:, :terms] if i is None else a[:, i.long()]
        for a, i in zip(inputs, (index1, index2), strict=False)
    ]
    z = torch.einsum(EINSUM[op], *rows)
    if scale is not None:
        z = z * scale.to(z.dtype).reshape(-1, *(1,) * (z.dim() - 2))
    if gather_index is not None:
        z = z[:, gather_index.long()]
    if seg is not None:
        segment = torch.repeat_interleave(seg.long().diff())
        z = _add_rows(z[:, int(seg[0]) : int(seg[-1])], segment, seg.numel() - 1)
    if index_out is not None:
        most = int(index_out.max()) + 1 if index_out.numel() else 0
        z = _add_rows(z, index_out.long(), most if out_size is None else out_size)
    elif out_size is not None and out_size > z.shape[1]:
        z = _add_rows(z, torch.arange(z.shape[1], device=z.device), out_size)
    if not any(batched) or out_accumulated:
        return z.sum(0)
    return z


def _add_rows(terms: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    zeros = terms.new_zeros(terms.shape[0], num_rows, *terms.shape[2:])
    return zeros.index_add(1, rows, terms)
