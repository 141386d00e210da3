"""Any atoms in any cell: the list is that of brute force, where ties are exact too.

All coordinates are multiples of 1/8, so float64 and float32 have no rounding.
"""

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.neighbours import brute_force, rows
from torchweft import o3


def eighths(bound):
    return st.integers(-8 * bound, 8 * bound).map(lambda n: n / 8)


@st.composite
def structures(draw):
    """Positions, a cell and pbc: triclinic, left-handed, flat, or smaller than the cutoff."""
    cell = torch.tensor(draw(st.lists(eighths(4), min_size=9, max_size=9))).reshape(3, 3).double()
    pbc = draw(st.tuples(*[st.booleans()] * 3))
    periodic = cell[torch.tensor(pbc)]
    volume = (periodic @ periodic.T).det().sqrt() if len(periodic) else torch.tensor(1.0)
    assume(volume >= 0.25 * periodic.norm(dim=1).prod())  # no more images than a test may have
    assume(all(v.norm() >= 1 for v in periodic))
    count = draw(st.integers(0, 6))
    numbers = draw(st.lists(eighths(3), min_size=3 * count, max_size=3 * count))
    return torch.tensor(numbers).reshape(count, 3).double(), cell, pbc


@settings(max_examples=60)
@given(structure=structures(), cutoff=st.integers(1, 12).map(lambda n: n / 8))
def test_lists_are_those_of_brute_force(structure, cutoff):
    positions, cell, pbc = structure
    expected = brute_force(positions, cutoff, cell, pbc)
    assert rows(o3.neighbour_list(positions, cutoff, cell, pbc)) == expected
    assert rows(o3.neighbour_list(positions.float(), cutoff, cell.float(), pbc)) == expected


@settings(max_examples=20)
@given(structure=structures(), seed=st.integers(0, 2**31), skin=st.integers(0, 8))
def test_lists_with_a_skin_are_those_built_anew(structure, seed, skin):
    positions, cell, pbc = structure
    near = o3.NeighbourList(1.5, skin / 8)
    for steps in torch.randint(-1, 2, (6, *positions.shape), generator=torch.manual_seed(seed)):
        positions = positions + steps / 8
        assert rows(near(positions, cell, pbc)) == brute_force(positions, 1.5, cell, pbc)
