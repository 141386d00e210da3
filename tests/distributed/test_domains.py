"""Atoms in space over ranks: who owns them, how they move, and which are neighbours.

Seen red with: the images of own atoms left out, candidates without the skin, atoms that may move by
all of it, the wrapping of dst left out of shifts, cuts below the middle however many atoms lie
there, migrated rows in the order in which they arrive.
"""

import math
from unittest import mock

import pytest
import torch

from tests.neighbours import rows as as_rows
from tests.ranks import run
from torchweft import o3
from torchweft.distributed import DistributedNeighbourList, Domains
from torchweft.distributed.atoms import neighbours
from torchweft.errors import DTypeError, IndexRangeError, ShapeError

F64 = torch.float64
TRICLINIC = torch.tensor([[6.0, 0.0, 0.5], [2.5, 7.0, 0.0], [-1.5, 1.0, 8.0]], dtype=F64)


def cloud(count, cell, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    places = (torch.rand(count, 3, generator=generator, dtype=F64) - 0.5) * spread
    return places @ cell


def crystal():
    """Face-centred cubic, whose shells lie at the cutoff to the bit."""
    corners = torch.cartesian_prod(*[torch.arange(3.0, dtype=F64)] * 3)
    basis = torch.tensor([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]], dtype=F64)
    return 4.0 * (corners[:, None] + basis).reshape(-1, 3)


ALL, NONE = [True] * 3, [False] * 3
STRUCTURES = {
    "triclinic": (cloud(60, TRICLINIC), TRICLINIC, ALL, 2.0),
    "beyond the cell": (cloud(40, TRICLINIC, spread=5.0), TRICLINIC, ALL, 2.0),
    "small": (cloud(3, TRICLINIC / 4), TRICLINIC / 4, ALL, 4.0),
    "one atom": (cloud(1, TRICLINIC / 4), TRICLINIC / 4, ALL, 3.0),
    "slab": (cloud(50, TRICLINIC), TRICLINIC, [True, False, True], 2.5),
    "wire": (cloud(30, TRICLINIC), TRICLINIC * torch.eye(3)[1], [False, True, False], 2.5),
    "molecule": (cloud(40, TRICLINIC), None, NONE, 2.0),
    "crystal": (crystal(), 12.0 * torch.eye(3, dtype=F64), ALL, math.sqrt(8)),
}


def owners(name, size):
    """Any owners will do: those of boxes, at random, or all atoms on the last rank but one."""
    positions, cell, pbc, _ = STRUCTURES[name]
    generator = torch.Generator().manual_seed(size)
    return {
        "boxes": Domains(positions, cell, pbc, parts=size).owner(positions),
        "random": torch.randint(0, size, (len(positions),), generator=generator),
        "one": torch.full((len(positions),), max(size - 2, 0)),
    }


def lists(rank, size, group, owned):
    """(dst, src, *shift) in global numbers of each structure and way to own it."""
    found = {}
    for name, ways in owned.items():
        positions, cell, pbc, cutoff = STRUCTURES[name]
        for how, owner in ways.items():
            ids = (owner == rank).nonzero().flatten().flip(0)
            near = DistributedNeighbourList(cutoff, 0.5, group)
            halo, src, dst, shift = near(ids, positions[ids], cell, pbc)
            both = halo(ids)
            assert dst.numel() == 0 or int(dst.max()) < len(ids)
            used = torch.isin(torch.arange(len(ids), len(both)), src)
            found[name, how] = as_rows((both[src], ids[dst], shift)), int((~used).sum())
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_lists_are_those_of_one_process(size):
    found = run(lists, size, {name: owners(name, size) for name in STRUCTURES})
    for name, (positions, cell, pbc, cutoff) in STRUCTURES.items():
        expected = as_rows(o3.neighbour_list(positions, cutoff, cell, pbc))
        assert expected
        for how in ("boxes", "random", "one"):
            parts = [part[name, how] for part in found]
            assert sorted(edge for edges, _ in parts for edge in edges) == expected


def test_edges_of_a_row_keep_the_order_of_one_process():
    positions, cell, pbc, cutoff = STRUCTURES["triclinic"]
    expected = as_rows(o3.neighbour_list(positions, cutoff, cell, pbc))
    for part in run(lists, 3, {"triclinic": owners("triclinic", 3)}):
        edges, _ = part["triclinic", "random"]
        for row in {row for row, *_ in edges}:
            assert [e for e in edges if e[0] == row] == [e for e in expected if e[0] == row]


def moving(rank, size, group, owner):
    """Atoms that drift: edges of each step, and how often they were searched."""
    positions, cell, pbc, cutoff = STRUCTURES["triclinic"]
    ids = (owner == rank).nonzero().flatten()
    near, found = DistributedNeighbourList(cutoff, 0.4, group), []
    for step in range(6):
        moved = drifted(positions, step)[ids]
        kept = near.serves(ids, moved, cell, pbc)
        builds = near.builds
        halo, src, dst, shift = near(ids, moved, cell, pbc)
        assert near.builds == builds + (not kept)
        found.append(as_rows((halo(ids)[src], ids[dst], shift)))
    return found, near.builds


def drifted(positions, step):
    """Atoms move anyhow, and one alone moves fast: all ranks must follow."""
    velocities = cloud(len(positions), 0.1 * torch.eye(3, dtype=F64), seed=5)
    velocities[7] = torch.tensor([0.1, 0.02, 0.0])
    return positions + step * velocities


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_search_anew_where_an_atom_of_one_has_moved(size):
    found = run(moving, size, owners("triclinic", size)["boxes"])
    positions, cell, pbc, cutoff = STRUCTURES["triclinic"]
    assert {builds for _, builds in found} == {3}
    for step in range(6):
        expected = as_rows(o3.neighbour_list(drifted(positions, step), cutoff, cell, pbc))
        assert sorted(edge for part, _ in found for edge in part[step]) == expected


def searched(rank, size, group):
    """How many atoms and images a rank searches among."""
    side, positions = 20.0, cloud(8000, 20 * torch.eye(3, dtype=F64), seed=4)
    cell = side * torch.eye(3, dtype=F64)
    part = torch.arange(len(positions))[rank::size]
    domains = Domains(positions[part], cell, True, group=group)
    ids, own = domains.migrate(part, positions[part])
    with mock.patch.object(neighbours, "neighbour_list", wraps=neighbours.neighbour_list) as search:
        DistributedNeighbourList(1.5, 0.5, group)(ids, own, cell, True)
    return len(ids), len(search.call_args.args[0])


def test_a_rank_searches_among_its_own_atoms_and_those_near_them():
    for own, count in run(searched, 4):
        assert own == 2000
        assert count < 14 * 14 * 24 * 1.1  # a box of 10 · 10 · 20 and two units around, of all 24³


def migration(rank, size, group):
    positions, cell, pbc, _ = STRUCTURES["triclinic"]
    ids = torch.arange(len(positions))[rank::size].flip(0)
    if rank == size - 1:
        ids = ids[:0]
    x = positions[ids]
    domains = Domains(x, cell, pbc, group=group)
    mask, wide = ids % 3 == 0, x.float()[:, None] * torch.arange(2)[:, None]
    moved = domains.migrate(ids, x, mask, wide)
    assert all(t.equal(again) for t, again in zip(moved, domains.migrate(*moved), strict=True))
    return domains.owner(positions), moved


@pytest.mark.parametrize("size", [2, 3, 4])
def test_atoms_move_to_the_rank_of_their_box(size):
    positions, cell, pbc, _ = STRUCTURES["triclinic"]
    held = torch.cat([torch.arange(len(positions))[rank::size] for rank in range(size - 1)])
    whole = Domains(positions[held], cell, pbc, parts=size).owner(positions)
    for rank, (owner, (ids, x, mask, wide)) in enumerate(run(migration, size)):
        assert owner.equal(whole)  # the cuts are those of one process that has all atoms
        assert ids.equal(held[whole[held] == rank].sort()[0])
        assert x.equal(positions[ids])
        assert mask.equal(ids % 3 == 0)
        assert wide.equal(x.float()[:, None] * torch.arange(2)[:, None])


def test_a_single_atom_moves_whatever_its_strides():
    ids, positions = torch.arange(4)[1::3], torch.ones(3, 2).T[::2]
    moved = Domains(positions).migrate(ids, positions, ids.double())
    assert [t.tolist() for t in moved] == [[1], [[1.0] * 3], [1.0]]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 64])
def test_boxes_have_their_share(parts):
    positions = cloud(1000, TRICLINIC, seed=2)
    for cell, pbc in ((TRICLINIC, True), (None, False), (TRICLINIC, [True, True, False])):
        counts = Domains(positions, cell, pbc, parts=parts).owner(positions).bincount()
        assert counts.max() - counts.min() <= math.ceil(math.log2(parts)), counts


def test_boxes_of_a_crystal_are_cut_between_planes():
    counts = Domains(crystal(), 12.0 * torch.eye(3, dtype=F64), True, parts=6).owner(crystal())
    assert counts.bincount().tolist() == [18] * 6


def test_boxes_have_their_share_of_weight():
    positions = cloud(1000, TRICLINIC, seed=3)
    weights = 1 + 9 * (positions[:, 0] > 0).long()
    owner = Domains(positions, weights=weights, parts=4).owner(positions)
    shares = torch.zeros(4, dtype=torch.int64).index_add(0, owner, weights)
    assert shares.max() - shares.min() <= 2 * weights.max()


def test_more_parts_than_atoms_and_none():
    three = cloud(3, TRICLINIC)
    assert len(Domains(three, parts=8).owner(three).unique()) == 3
    alike = torch.zeros(5, 3)
    assert len(Domains(alike, parts=4).owner(alike).unique()) == 1
    assert int(Domains(three[:0], parts=4).owner(three).max()) < 4


def x(*shape):
    return torch.zeros(*shape, dtype=F64)


LINE = torch.arange(12.0, dtype=F64).reshape(4, 3)
FAULTS = {
    "cells differ": (
        lambda r, g: Domains(LINE, (1 + r) * torch.eye(3, dtype=F64), True, group=g),
        "the ranks differ in cell",
    ),
    "parts differ": (
        lambda r, g: Domains(LINE, parts=1 + r, group=g),
        "the ranks differ in parts, rank 0 has 1 and rank 1 has 2",
    ),
    "no parts": (lambda r, g: Domains(LINE, parts=0, group=g), "parts is 0: it must be 1 or more"),
    "not a number": (
        lambda r, g: Domains(LINE / r, group=g),
        r"rank 0: positions\[0\] is \[nan, inf, inf\]",
    ),
    "weights": (
        lambda r, g: Domains(LINE, weights=torch.ones(3 + r), group=g),
        r"rank 0: weights is \(3,\) and there are 4 positions",
    ),
    "floats": (
        lambda r, g: Domains(LINE, weights=torch.ones(4), group=g),
        "weights is torch.float32: it must be int32 or int64",
    ),
    "negative": (
        lambda r, g: Domains(LINE, weights=torch.arange(4) - r, group=g),
        "rank 1: weights holds -1",
    ),
    "flat": (lambda r, g: Domains(LINE, x(3, 3), True, group=g), "has no volume"),
    "planned": (
        lambda r, g: Domains(LINE, parts=3, group=g).migrate(torch.arange(4), LINE),
        "there are 3 parts and 2 ranks",
    ),
    "short": (
        lambda r, g: Domains(LINE, group=g).migrate(torch.arange(4), LINE, x(3 + r)),
        r"rank 0: tensor 2 of migrate is \(3,\) and there are 4 ids",
    ),
    "kinds": (
        lambda r, g: Domains(LINE, group=g).migrate(torch.arange(4), LINE, x(4, 1 + r)),
        "the ranks differ in shapes of rows",
    ),
    "int32": (
        lambda r, g: Domains(LINE, group=g).migrate(torch.arange(4).int(), LINE),
        r"ids is torch.int32, \(4,\): it must be int64",
    ),
    "ids": (
        lambda r, g: DistributedNeighbourList(1.0, group=g)(torch.arange(3 + r), LINE),
        r"rank 0: ids is \(3,\) and there are 4 positions",
    ),
    "ids' dtype": (
        lambda r, g: DistributedNeighbourList(1.0, group=g)(torch.arange(4).int(), LINE),
        "ids is torch.int32: it must be int64",
    ),
    "cutoffs": (
        lambda r, g: DistributedNeighbourList(1.0 + r, group=g)(torch.arange(4), LINE),
        "the ranks differ in cutoff, rank 0 has 1.0 and rank 1 has 2.0",
    ),
    "owned twice": (
        lambda r, g: DistributedNeighbourList(1.0, group=g)(torch.arange(4), LINE),
        "row 0 is owned more than once",
    ),
    "far": (
        lambda r, g: DistributedNeighbourList(1e-3, group=g)(torch.arange(4), LINE * 1e9 * r),
        "rank 1: structure 0 extends over",
    ),
}


def errors(rank, size, group):
    found = {}
    for name, (call, text) in FAULTS.items():
        with pytest.raises((ShapeError, DTypeError, IndexRangeError), match=text) as raised:
            call(rank, group)
        found[name] = str(raised.value)
    return found


def test_faults_of_one_rank_are_told_on_all():
    first, second = run(errors, 2)
    assert first == second
