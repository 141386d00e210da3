"""o3.calculator as on a GPU, where a potential is recorded: room for edges, weights, warnings.

Replays are those of tests/recorders.py; tests/integration/test_o3_dynamics_gpu.py has CUDA graphs.
"""

import copy
import warnings

import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.calculator import Calculator
from ase.md.verlet import VelocityVerlet

from tests import recorders
from torchweft import o3
from torchweft.testing import assert_within_bound

RC = 4.0
EDGES = 4000  # that no structure here has


class Smooth(torch.nn.Module):
    """A pair potential that is zero beyond the cutoff, with a weight and a table of elements."""

    def __init__(self):
        super().__init__()
        self.strength = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.register_buffer("charge", torch.linspace(1, 2, 80, dtype=torch.float64))

    def forward(self, numbers, vectors, graph):
        assert vectors.dtype == self.strength.dtype
        length = vectors.norm(dim=1)
        charge = self.charge[numbers]
        pair = charge[graph.src] * charge[graph.dst] * self.strength
        return torch.where(length < RC, pair * (1 - length / RC) ** 3, 0).sum()


@pytest.fixture
def recorders_made():
    with recorders.structures_recorded() as made:
        yield made


def solid(seed=0, scale=1.0, repeat=1):
    atoms = bulk("Cu", cubic=True) * (repeat, 1, 1)
    atoms.symbols[::2] = "O"
    atoms.set_cell(atoms.cell.array * scale, scale_atoms=True)
    atoms.rattle(0.12, seed=seed)
    return atoms


def values(atoms, calculator: Calculator):
    """Energy, forces and, of a solid, stress."""
    atoms = atoms.copy()
    atoms.calc = calculator
    found = [np.array(atoms.get_potential_energy()), atoms.get_forces()]
    return found + ([atoms.get_stress()] if atoms.cell.rank == 3 else [])


def check(atoms, calculator, model):
    """Results are those of the model as it is now, launch by launch."""
    plain = o3.calculator(copy.deepcopy(model), cutoff=RC)
    with recorders.structures_recorded(False):
        expected = values(atoms, plain)
    for found, exact in zip(values(atoms, calculator), expected, strict=True):
        found, exact = torch.as_tensor(found), torch.as_tensor(exact)
        eps = torch.finfo(next(model.parameters()).dtype).eps
        rounding = eps / torch.finfo(torch.float64).eps
        largest = max([1.0, *exact.abs().flatten().tolist()])
        scale = torch.full_like(exact, largest * rounding)
        assert_within_bound(found, exact, scale, 12 * EDGES)


def counts(made):
    return [(r.rehearsals, r.records) for r in made]


def test_structures_of_one_number_of_atoms_share_a_record(recorders_made):
    """Seen red with: padding at the place of the first edges, and away from them by one cell."""
    model = Smooth()
    calculator = o3.calculator(model, cutoff=RC)
    edges = set()
    for seed in range(7):
        check(solid(seed), calculator, model)
        edges.add(len(o3.neighbour_list(*_system(solid(seed)))[0]))
    assert len(edges) > 3
    assert counts(recorders_made) == [(1, 1)]
    assert recorders_made[0].replays == 5


def _system(atoms):
    return torch.tensor(atoms.positions), RC, torch.tensor(atoms.cell.array), atoms.pbc


STRUCTURES = {
    "one atom": Atoms("Cu"),
    "two atoms": Atoms("Cu2", [[0.0, 0, 0], [2, 0, 0]]),
    "as many edges as atoms": Atoms("Cu4", [[0.0, 0, 0], [2, 0, 0], [90, 0, 0], [90, 2, 0]]),
    "a wire": Atoms("Cu2", [[0.0, 0, 0], [0, 0, 2]], cell=[0, 0, 4.5], pbc=(False, False, True)),
    "a cluster": Atoms("Cu4", solid().positions),
    "small cell": bulk("Cu"),
    "no atoms": Atoms(),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_with_few_edges_and_cells_of_all_kinds(recorders_made, name):
    model = Smooth()
    calculator = o3.calculator(model, cutoff=RC)
    for seed in range(4):
        atoms = STRUCTURES[name].copy()
        if len(atoms):
            atoms.rattle(0.05, seed=seed)
        check(atoms, calculator, model)
    assert counts(recorders_made) == ([(1, 1)] if len(STRUCTURES[name]) else [])


def test_weights_that_change_in_place_are_read_by_the_record(recorders_made):
    model = Smooth()
    calculator = o3.calculator(model, cutoff=RC)
    for step in range(5):
        with torch.no_grad():
            model.strength.add_(1)
            model.charge.mul_(1.5)
        check(solid(step), calculator, model)
    assert counts(recorders_made) == [(1, 1)]


def test_models_that_are_turned_or_given_other_weights_are_recorded_anew(recorders_made):
    """Seen red with: positions in the dtype of before, and a record of the memory of before."""
    model = Smooth()
    calculator = o3.calculator(model, cutoff=RC)

    def replaced():
        model.strength = torch.nn.Parameter(torch.tensor(2.5, dtype=torch.float64))

    changes = (lambda: None, model.float, model.double, replaced, model.train)
    for number, change in enumerate(changes, 1):
        change()
        for seed in range(4):
            check(solid(seed), calculator, model)
        assert counts(recorders_made) == number * [(1, 1)]


def test_more_edges_than_there_is_room_for(recorders_made):
    """Said once, and recorded anew each time; fewer edges have room."""
    model = Smooth()
    calculator = o3.calculator(model, cutoff=RC)
    scales = (1.0, 0.9, 0.95, 0.8)
    message = r"has \d+ edges and its record has room for \d+: it is recorded anew.*densest"
    for number, scale in enumerate(scales):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for seed in range(4):
                check(solid(seed, scale), calculator, model)
        assert len(said) == (number == 1)
        if said:
            with pytest.warns(UserWarning, match=message):
                warnings.warn(said[0].message, stacklevel=1)
    assert counts(recorders_made) == [(1, 1)] * 3


def test_other_atoms(recorders_made):
    """Another number of them, or of other elements."""
    model = Smooth()
    calculator = o3.calculator(model, cutoff=RC)
    for repeat, element in ((1, "O"), (2, "O"), (1, "O"), (1, "N")):
        for seed in range(3):
            atoms = solid(seed, repeat=repeat)
            atoms.symbols[0] = element
            check(atoms, calculator, model)
    assert counts(recorders_made) == [(1, 1)] * 4


class Cut(Smooth):
    """Not zero beyond the cutoff: by a number for each edge, or by a tail."""

    def __init__(self, number, tail):
        super().__init__()
        self.number, self.tail = number, tail

    def forward(self, numbers, vectors, graph):
        tail = self.tail * (-vectors.square().sum(1)).exp()
        return super().forward(numbers, vectors, graph) + (self.number + tail).sum()


@pytest.mark.parametrize(("number", "tail"), [(0.1, 0.0), (0.0, 1.0)])
def test_a_function_that_is_not_zero_beyond_the_cutoff(recorders_made, number, tail):
    """Seen red with: no look at the slopes of padding, where a tail is within the rounding."""
    model = Cut(number, tail)
    calculator = o3.calculator(model, cutoff=RC)
    check(solid(0), calculator, model)
    message = r"the model runs without a CUDA graph, launch by launch: result \d differs with padd"
    with pytest.warns(UserWarning, match=message):
        check(solid(1), calculator, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            check(solid(seed), calculator, model)
    assert counts(recorders_made) == [(1, 0)]


def test_dynamics_conserve_the_energy(recorders_made):
    atoms = solid(repeat=2)
    atoms.calc = o3.calculator(Smooth(), cutoff=RC)
    first, potential = atoms.get_total_energy(), atoms.get_potential_energy()
    VelocityVerlet(atoms, timestep=2 * units.fs).run(50)
    assert (
        abs(atoms.get_total_energy() - first) < abs(atoms.get_potential_energy() - potential) / 20
    )
    assert recorders_made[-1].replays > 40
