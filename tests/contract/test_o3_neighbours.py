"""Neighbour lists: every image of every pair, in one order; lists with a skin are the same lists.

Seen red with: movement compared with the whole skin, another cell not noticed, edges as long as the
cutoff, images within reach along what does not repeat, numbers of a structure in place of a batch.
"""

import pytest
import torch

from tests.neighbours import brute_force, rows
from torchweft import o3
from torchweft.core.table_copies import is_constant
from torchweft.errors import BackendError, DeviceError, DTypeError, IndexRangeError, ShapeError

TRICLINIC = torch.tensor([[5.0, 0.0, 0.0], [1.5, 4.5, 0.0], [-1.0, 0.5, 4.0]], dtype=torch.float64)
TINY = TRICLINIC / 4
PBC = [(False, False, False), (True, False, True), (False, True, False), (True, True, True)]


def atoms(count, seed=0, dtype=torch.float64):
    """Atoms within and outside the cells of this file."""
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 3


def assert_same_edges(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("pbc", PBC)
@pytest.mark.parametrize("cell", [TRICLINIC, TINY], ids=["triclinic", "smaller than the cutoff"])
@pytest.mark.parametrize("count", [0, 1, 2, 9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_brute_force_over_images(count, cell, pbc, dtype):
    positions, cell = atoms(count, dtype=dtype), cell.to(dtype)
    edges = o3.neighbour_list(positions, 2.5, cell, pbc)
    assert rows(edges) == brute_force(positions, 2.5, cell, pbc)
    assert [t.dtype for t in edges] == [torch.int64, torch.int64, dtype]


@pytest.mark.parametrize("pbc", PBC)
def test_ase_finds_the_same(pbc):
    from ase.neighborlist import primitive_neighbor_list

    positions = atoms(12)
    i, j, shift = map(
        torch.as_tensor,
        primitive_neighbor_list("ijS", pbc, TRICLINIC.numpy(), positions.numpy(), 4.0),
    )
    order = sorted(range(len(i)), key=lambda e: (j[e], i[e], *shift[e]))
    expected = i[order], j[order], shift[order].double()
    assert_same_edges(o3.neighbour_list(positions, 4.0, TRICLINIC, pbc), expected)


def test_vectors_are_shorter_than_the_cutoff_and_come_in_both_directions():
    positions = atoms(9)
    src, dst, shift = o3.neighbour_list(positions, 2.5, TINY, True)
    across = positions[dst] - positions[src] + shift @ TINY
    assert (across.norm(dim=1) < 2.5).all()
    edges = rows((src, dst, shift))
    assert {(j, i, *(-s for s in shift)) for i, j, *shift in edges} == set(edges)
    assert any(i == j for i, j, *_ in edges)


def test_an_edge_as_long_as_the_cutoff_is_none():
    """A cubic lattice of distance 1, whose numbers are exact: shells at 1 and at the root of 2."""
    positions = torch.cartesian_prod(*[torch.arange(4.0, dtype=torch.float64)] * 3)
    cell = 4 * torch.eye(3, dtype=torch.float64)
    for cutoff, number in [(1.0, 0), (1.125, 6), (1.5, 18)]:
        _, dst, _ = o3.neighbour_list(positions, cutoff, cell, True)
        assert dst.bincount(minlength=64).tolist() == [number] * 64


def test_cells_without_vectors_where_nothing_repeats():
    flat = TRICLINIC.clone()
    flat[2] = 0
    positions, pbc = atoms(9), (True, True, False)
    found = o3.neighbour_list(positions, 2.5, flat, pbc)
    assert_same_edges(found, o3.neighbour_list(positions, 2.5, TRICLINIC, pbc))
    assert_same_edges(
        o3.neighbour_list(positions, 2.5), o3.neighbour_list(positions, 2.5, TRICLINIC, False)
    )


@pytest.mark.parametrize("given", ["cells and pbc", "one cell", "cells", "no cell"])
def test_a_batch_is_its_structures_one_after_the_other(given):
    sizes, cells = [4, 0, 1, 6], torch.stack([TRICLINIC, TINY, 2 * TINY, 3 * TINY])
    pbc = torch.tensor([[True] * 3, [False] * 3, [True, False, True], [False] * 3])
    if given == "one cell":
        cells = TRICLINIC
    if given in ("one cell", "cells"):
        pbc = torch.tensor(True)
    if given == "no cell":
        cells, pbc = None, torch.tensor(False)
    positions = atoms(sum(sizes))
    batch = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    expected, start = [], 0
    for b, points in enumerate(positions.split(sizes)):
        one = (TINY if cells is None else cells.expand(4, 3, 3)[b]), pbc.expand(4, 3)[b]
        found = o3.neighbour_list(points, 3.0, *one)
        expected += [(i + start, j + start, *shift) for i, j, *shift in rows(found)]
        start += len(points)
    assert rows(o3.neighbour_list(positions, 3.0, cells, pbc, batch)) == expected
    assert rows(o3.neighbour_list(positions, 3.0, cells, pbc, batch.int())) == expected


def test_tables_are_constants_of_their_own():
    near = o3.NeighbourList(2.5)
    first, second = (near(atoms(9), TRICLINIC, True) for _ in range(2))
    assert is_constant(first[0])
    assert is_constant(first[1])
    assert not {t.data_ptr() for t in first} & {t.data_ptr() for t in second}


def test_gradients_do_not_reach_the_list():
    positions, cell = atoms(5).requires_grad_(), TRICLINIC.clone().requires_grad_()
    assert not any(t.requires_grad for t in o3.neighbour_list(positions, 2.5, cell, True))


# with a skin


def test_a_list_with_a_skin_is_the_list_built_anew_at_every_step():
    positions = atoms(20)
    velocities = atoms(20, seed=1) / 100
    near = o3.NeighbourList(2.5, skin=1.0)
    for step in range(60):
        moved = positions + step * velocities
        assert_same_edges(
            near(moved, TRICLINIC, True), o3.neighbour_list(moved, 2.5, TRICLINIC, True)
        )
    most = float(velocities.norm(dim=1).max())
    assert near.builds == 1 + 59 // (1 + int(0.5 / most))


def test_what_makes_a_list_search_anew():
    positions, near = atoms(6), o3.NeighbourList(2.5)
    batch = torch.tensor([0, 0, 0, 0, 1, 1])
    pair = torch.stack([TRICLINIC, TRICLINIC])
    calls = [
        (positions, TRICLINIC, True),
        (positions, TRICLINIC * (1 + 1e-15), True),
        (positions, TRICLINIC, (True, True, False)),
        (positions[:5], TRICLINIC, True),
        (positions, pair, True, batch),
        (positions, pair, True, torch.tensor([0, 0, 0, 1, 1, 1])),
    ]
    for builds, call in enumerate(calls, 1):
        expected = o3.neighbour_list(call[0], 2.5, *call[1:])
        for _ in range(2):
            assert_same_edges(near(*call), expected)
        assert near.builds == builds
    assert repr(near) == "NeighbourList(cutoff=2.5, skin=0.5, builds=6)"


def test_positions_that_become_nan_raise_at_that_step():
    near = o3.NeighbourList(2.5)
    positions = atoms(6)
    near(positions, TRICLINIC, True)
    positions[4, 1] = float("nan")
    with pytest.raises(
        ShapeError, match=r"positions\[4\] is \[.*nan.*\]: positions must be finite"
    ):
        near(positions, TRICLINIC, True)


# errors

CALL = {"positions": atoms(4), "cutoff": 2.5, "cell": TRICLINIC, "pbc": True}
NAN, INF = float("nan"), float("inf")
FLAT = TRICLINIC.clone()
FLAT[2] = FLAT[0] - FLAT[1]
ERRORS = {
    "a cutoff below zero": ({"cutoff": -1.0}, ShapeError, "cutoff is -1.0: .* positive length"),
    "no cutoff": ({"cutoff": 0}, ShapeError, "cutoff is 0: .* positive length"),
    "NaN": ({"cutoff": NAN}, ShapeError, "cutoff is nan: .* positive length"),
    "without end": ({"cutoff": INF}, ShapeError, "cutoff is inf: .* positive length"),
    "a text": ({"cutoff": "far"}, DTypeError, "cutoff is 'far': it must be a number"),
    "positions": ({"positions": [[0.0] * 3]}, DTypeError, "positions is a list"),
    "half": ({"positions": atoms(4).half()}, DTypeError, "float16: it must be float64 or float32"),
    "flat": ({"positions": atoms(4).flatten()}, ShapeError, r"positions is \(12,\): .*\(N, 3\)"),
    "positions of NaN": (
        {"positions": atoms(4) * torch.tensor([NAN, 1, 1])},
        ShapeError,
        r"positions\[0\] is .*nan.*: positions must be finite. Look for",
    ),
    "infinite": (
        {"positions": atoms(4) / torch.tensor([0.0, 1, 1])},
        ShapeError,
        r"positions\[0\] is .*inf.*: positions must be finite. Look for",
    ),
    "far away": (
        {"positions": atoms(4) * 1e9},
        ShapeError,
        "lies to .* from the origin: too far for a search within 2.5.* larger skin",
    ),
    "three lengths": ({"cell": TRICLINIC.diag()}, ShapeError, r"cell is \(3,\): .* torch.diag"),
    "another dtype": ({"cell": TRICLINIC.float()}, DTypeError, "cell is torch.float32 and pos"),
    "no cell": ({"cell": None}, ShapeError, "pbc is True and there is no cell"),
    "no volume": ({"cell": FLAT}, ShapeError, r"structure 0 has no volume along .* independent"),
    "zeros": ({"cell": 0 * FLAT}, ShapeError, "structure 0 has no volume"),
    "a vector of zeros": (
        {"cell": TRICLINIC * torch.tensor([[1.0], [0.0], [1.0]]), "pbc": (False, True, False)},
        ShapeError,
        r"structure 0 has no volume .*pbc=\[False, True, False\]",
    ),
    "a cell of NaN": (
        {"cell": NAN * FLAT, "pbc": False},
        ShapeError,
        "cell is .*nan.*must be finite",
    ),
    "four bools": ({"pbc": [True] * 4}, ShapeError, r"pbc is \[True, True, True, True\]: "),
    "numbers": ({"pbc": [1, 1, 0]}, ShapeError, r"pbc is \[1, 1, 0\]: it must be a bool, three"),
    "cells without a batch": (
        {"cell": torch.stack([TRICLINIC] * 2)},
        ShapeError,
        r"cell is \(2, 3, 3\) and pbc is \(\), of \[1, 2\] structures",
    ),
    "more pbc than cells": (
        {
            "cell": torch.stack([TRICLINIC] * 2),
            "pbc": [[True] * 3] * 3,
            "batch": torch.tensor([0, 0, 1, 1]),
        },
        ShapeError,
        r"of \[2, 3\] structures: there must be one number",
    ),
    "a batch of floats": ({"batch": torch.zeros(4)}, DTypeError, "batch is torch.float32: .*int64"),
    "a short batch": (
        {"batch": torch.tensor([0, 0])},
        ShapeError,
        r"batch is \(2,\) and there are 4 positions",
    ),
    "not sorted": ({"batch": torch.tensor([0, 1, 0, 1])}, ShapeError, "batch is not sorted"),
    "below zero": (
        {"batch": torch.tensor([-1, 0, 0, 0])},
        IndexRangeError,
        r"batch has structures -1 to 0 and there are 1 cells",
    ),
    "more structures than cells": (
        {"cell": torch.stack([TRICLINIC] * 2), "batch": torch.tensor([0, 0, 1, 2])},
        IndexRangeError,
        r"batch has structures 0 to 2 and there are 2 cells .* lie in 0\.\.1",
    ),
    "another device": (
        {"cell": TRICLINIC.to("meta")},
        DeviceError,
        "cell is on meta and positions are on cpu",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_was_given_and_what_to_do(name):
    changed, error, text = ERRORS[name]
    with pytest.raises(error, match=text):
        o3.neighbour_list(**{**CALL, **changed})


def test_a_skin_below_zero():
    with pytest.raises(ShapeError, match=r"skin is -0.1: it must be 0 or more. Pass skin=0.5"):
        o3.NeighbourList(2.5, skin=-0.1)


@pytest.mark.parametrize("far", [1e6, 1e9])
def test_molecules_that_have_parted_do_not_end_the_process(far):
    """vesin 0.6.2 divides by zero where its grid has more than 1e5 cells along one axis."""
    positions = torch.tensor([[0.0, 0, 0], [1, 0, 0], [far, 0, 0], [far, 1, 0]]).double()
    with pytest.raises(
        ShapeError, match=r"extends over \[1.*\] and lies to .*have left the others"
    ):
        o3.neighbour_list(positions, 2.0)
    if far < 1e7:
        assert rows(o3.NeighbourList(2.0, skin=100.0)(positions)) == brute_force(
            positions, 2.0, TRICLINIC, [False] * 3
        )


def test_without_vesin(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"vesin is not installed: .*'torchweft\[md\]'"):
        o3.neighbour_list(atoms(4), 2.5)
