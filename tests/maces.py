"""MACE's couplings of powers of x to an irrep, as dense tensors U, and their contraction."""

import functools

import torch

from torchweft import o3
from torchweft.o3.irreps.irreps import join, split

__all__ = ["contraction", "couplings", "dense"]


@functools.cache
def couplings(irreps, degree, natural, symbol=o3.wigner_3j):
    """(irrep, U (2l+1, D, …, D)) of every coupling from the left, sorted as MACE sorts them."""
    eye = torch.eye(irreps.dim, dtype=torch.float64)
    items = [(item.ir, eye[s]) for item, s in zip(irreps, irreps.slices(), strict=True)]
    if degree == 1:
        return items
    found = []
    for left, u in couplings(irreps, degree - 1, natural, symbol):
        for right, e in items:
            for ir in left * right:
                if natural and ir.p != (-1) ** ir.l:
                    continue
                c = symbol(ir.l, left.l, right.l, torch.float64) * ir.dim**0.5
                found.append((ir, torch.einsum("ijk,j...,kd->i...d", c, u, e)))
    return sorted(found, key=lambda pair: pair[0])


def dense(irreps, out, degree, symbol=o3.wigner_3j):
    """U (2l+1, D, …, D, K) of all that couple to one irrep."""
    found = [u for ir, u in couplings(irreps, degree, degree == 4, symbol) if ir == out]
    shape = (out.dim, *degree * (irreps.dim,), 0)
    return torch.stack(found, -1) if found else torch.zeros(shape, dtype=torch.float64)


def contraction(x, *weights, module, element, symbol=o3.wigner_3j):
    """Σ over degrees of U x … x w, one product of x after the other; weights as parameters."""
    irreps = o3.Irreps([item.ir for item in module.irreps_in])
    features = torch.cat(split(x, module.irreps_in, module.layout), -1)  # (N, C, D)
    rest, blocks = iter(weights), []
    for item in module.irreps_out:
        total = x.new_zeros(x.shape[0], module.channels, item.ir.dim)
        for degree in range(module.correlation, 0, -1):
            w = next(rest)[element]
            table = dense(irreps, item.ir, degree, symbol).to(x.dtype)
            if not table.shape[-1]:
                continue
            value = torch.einsum("nkc,md...k->ncmd...", w, table)
            for _ in range(degree):
                value = torch.einsum("nc...d,ncd->nc...", value, features)
            total = total + value
        blocks.append(total)
    return join(blocks, module.layout)
