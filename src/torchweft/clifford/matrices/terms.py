"""Terms of the equivariant linear maps of GATr and L-GATr: which blade goes where, by which map."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.clifford.algebra import Algebra
from torchweft.core.operators.operator import below_transforms

__all__ = ["Map", "dense", "moves", "terms"]

Map = tuple[tuple[int, int, int], ...]
"""Blades (source, target, sign) of an equivariant map."""


class Terms(NamedTuple):
    """Tables (terms, 3) of int32 with signs, and where the terms of each blade, or map, begin.

    Args:
        by_target: (source, map, sign) of each target.
        targets: (B+1,).
        by_source: (target, map, sign) of each source.
        sources: (B+1,).
        by_map: (source, target, sign) of each map.
        maps: (M+1,).
    """

    by_target: Tensor
    targets: Tensor
    by_source: Tensor
    sources: Tensor
    by_map: Tensor
    maps: Tensor


def moves(algebra: Algebra, pseudoscalar: bool) -> list[tuple[Map, ...]]:
    """The maps that take grades elsewhere: by each null vector, then by the pseudoscalar."""
    found = [_times_vector(algebra, i) for i, m in enumerate(algebra.metric) if m == 0]
    return [*found, _times_pseudoscalar(algebra)] if pseudoscalar else found


def _times_vector(algebra: Algebra, i: int) -> tuple[Map, ...]:
    """e_i⟨x⟩_g for g < n: blades without e_i, grade by grade."""
    vector = 1 << i
    return tuple(
        tuple(
            (j, algebra.positions[blade | vector], algebra.sign(vector, blade))
            for j in blades
            if not (blade := algebra.blades[j]) & vector
        )
        for blades in algebra.of_grade[:-1]
    )


def _times_pseudoscalar(algebra: Algebra) -> tuple[Map, ...]:
    """⟨x⟩_g e_1…n for all grades g."""
    whole = algebra.blades[-1]
    return tuple(
        tuple(
            (j, algebra.positions[blade ^ whole], sign)
            for j in blades
            if (sign := algebra.sign(blade := algebra.blades[j], whole))
        )
        for blades in algebra.of_grade
    )


def _all(signature: str, pseudoscalar: bool) -> tuple[int, list[tuple[int, int, int, int]]]:
    """The number of maps, and (source, target, map, sign) of all terms, map by map."""
    algebra = Algebra.from_signature(signature)
    maps: list[Map] = [tuple((j, j, 1) for j in blades) for blades in algebra.of_grade]
    for move in moves(algebra, pseudoscalar):
        maps += move
    return len(maps), [(i, j, m, sign) for m, of in enumerate(maps) for i, j, sign in of]


@functools.cache
@below_transforms
def terms(signature: str, pseudoscalar: bool, device: torch.device) -> Terms:
    """The tables of all maps of an algebra, on a device."""
    count, found = _all(signature, pseudoscalar)
    blades = Algebra.from_signature(signature).num_blades
    by_target = sorted((j, i, m, sign) for i, j, m, sign in found)
    by_source = sorted((i, j, m, sign) for i, j, m, sign in found)
    by_map = sorted((m, i, j, sign) for i, j, m, sign in found)
    tables = []
    for rows, size in ((by_target, blades), (by_source, blades), (by_map, count)):
        starts = [sum(row[0] < at for row in rows) for at in range(size + 1)]
        for table in ([row[1:] for row in rows], starts):
            tables.append(torch.tensor(table, dtype=torch.int32, device=device))  # noqa: PERF401
    return Terms(*tables)


@functools.cache
@below_transforms
def dense(signature: str, pseudoscalar: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(M, B, B): the sign with which map m takes blade i to blade j, at [m, j, i]."""
    count, found = _all(signature, pseudoscalar)
    blades = Algebra.from_signature(signature).num_blades
    table = torch.zeros(count, blades, blades, dtype=dtype, device="cpu")
    for i, j, m, sign in found:
        table[m, j, i] = sign
    return table.to(device)
