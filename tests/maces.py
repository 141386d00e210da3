"""MACE's couplings of powers of x to an irrep, as dense tensors U."""

import functools

import torch

from weft import o3

__all__ = ["couplings", "dense"]


@functools.cache
def couplings(irreps, degree, natural):
    """(irrep, U (2l+1, D, …, D)) of every coupling from the left, sorted as MACE sorts them."""
    eye = torch.eye(irreps.dim, dtype=torch.float64)
    items = [(item.ir, eye[s]) for item, s in zip(irreps, irreps.slices(), strict=True)]
    if degree == 1:
        return items
    found = []
    for left, u in couplings(irreps, degree - 1, natural):
        for right, e in items:
            for ir in left * right:
                if natural and ir.p != (-1) ** ir.l:
                    continue
                c = o3.wigner_3j(ir.l, left.l, right.l, torch.float64) * ir.dim**0.5
                found.append((ir, torch.einsum("ijk,j...,kd->i...d", c, u, e)))
    return sorted(found, key=lambda pair: pair[0])


def dense(irreps, out, degree):
    """U (2l+1, D, …, D, K) of all that couple to one irrep."""
    found = [u for ir, u in couplings(irreps, degree, degree == 4) if ir == out]
    shape = (out.dim, *degree * (irreps.dim,), 0)
    return torch.stack(found, -1) if found else torch.zeros(shape, dtype=torch.float64)
