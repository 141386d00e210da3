"""o3.calculator of functions: ASE's own Lennard-Jones, dynamics, errors (models: tests/clients).

Seen red with: forces of the wrong sign at dst, a stress of half the volume.
"""

import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.build import bulk, molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.lj import LennardJones
from ase.md.verlet import VelocityVerlet

from torchweft import o3
from torchweft.errors import BackendError, DTypeError, ShapeError
from torchweft.testing import assert_within_bound

RC = 6.0


def lennard_jones(numbers, vectors, graph):
    """As ASE's: ε = 0.01, σ = 2.3, shifted to zero at the cutoff."""
    assert isinstance(graph, o3.Graph)
    assert len(numbers) == graph.num_nodes
    power = (2.3 / vectors.norm(dim=1)) ** 6
    return 0.02 * (power * (power - 1)).sum() - 0.02 * shift(len(vectors))


def shift(edges):
    power = (2.3 / RC) ** 6
    return edges * power * (power - 1)


def pair():
    """ASE's calculator and ours."""
    ours = o3.calculator(lennard_jones, cutoff=RC, dtype=torch.float64)
    return LennardJones(epsilon=0.01, sigma=2.3, rc=RC), ours


def structures():
    copper = bulk("Cu", cubic=True)
    copper.rattle(0.1, seed=1)
    tiny = bulk("Cu")  # one atom, whose neighbours are its images
    tiny.set_cell(tiny.cell.array @ [[1, 0.05, 0], [0, 1, 0.02], [0, 0, 1.03]], True)
    slab = copper.copy()
    slab.pbc = (True, True, False)
    cluster = Atoms("Cu4", copper.positions)
    return {"solid": copper, "tiny": tiny, "slab": slab, "cluster": cluster}


@pytest.mark.parametrize("name", ["solid", "tiny", "slab", "cluster"])
def test_energies_forces_and_stress_are_those_of_ase(name):
    """To the rounding of a sum over all edges of two terms of twelve factors."""
    found = []
    for calculator in pair():
        atoms = structures()[name]
        atoms.calc = calculator
        found.append([np.array(atoms.get_potential_energy()), atoms.get_forces()])
        if name in ("solid", "tiny"):
            found[-1].append(atoms.get_stress())
    for pair_of_values in zip(*found, strict=True):
        theirs, ours = map(torch.as_tensor, pair_of_values)
        scale = max(float(theirs.abs().max()), 0.01)  # ε, where forces cancel
        edges = 4000
        assert_within_bound(ours, theirs, torch.full_like(theirs, scale), 12 * edges)


def test_a_molecule_has_no_stress():
    atoms = structures()["cluster"]
    atoms.calc = pair()[1]
    assert atoms.get_potential_energy() == atoms.get_potential_energy(force_consistent=True)
    with pytest.raises(PropertyNotImplementedError, match="stress"):
        atoms.get_stress()


def test_dynamics_search_neighbours_rarely_and_conserve_the_energy():
    atoms = structures()["solid"] * (2, 2, 2)
    atoms.calc = pair()[1]
    dynamics = VelocityVerlet(atoms, timestep=2 * units.fs)
    first = atoms.get_total_energy()
    dynamics.run(50)
    moved = abs(atoms.get_kinetic_energy())
    assert abs(atoms.get_total_energy() - first) < moved / 100
    assert 1 <= atoms.calc.neighbours.builds < 10


def test_atoms_that_change_in_number_and_cell():
    ours = pair()[1]
    for atoms in structures().values():
        again = atoms.copy()
        atoms.calc, again.calc = ours, pair()[1]
        assert atoms.get_potential_energy() == again.get_potential_energy()
        assert (atoms.get_forces() == again.get_forces()).all()


def test_a_module_is_moved_to_dtype_and_asks_for_no_gradients():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stiffness = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, numbers, vectors, graph):
            assert vectors.dtype == self.stiffness.dtype
            return self.stiffness * vectors.square().sum()

    model = Model()
    atoms = molecule("H2O")
    for dtype in (torch.float32, torch.float64):
        atoms.calc = o3.calculator(model, cutoff=2.0, dtype=dtype)
        assert atoms.get_forces().dtype == np.float64
        assert model.stiffness.dtype == dtype
        assert not model.stiffness.requires_grad
        assert not model.training


def test_an_energy_that_does_not_depend_on_edges_has_no_forces():
    atoms = molecule("H2O")
    for energy in (lambda *_: torch.ones(()), lambda n, v, g: n.sum() + 0 * v.sum()):
        atoms.calc = o3.calculator(energy, cutoff=0.5)
        assert not atoms.get_forces().any()


# errors


def test_positions_that_are_nan():
    atoms = structures()["solid"]
    atoms.calc = pair()[1]
    atoms.get_potential_energy()
    atoms.positions[2] = np.nan
    with pytest.raises(ShapeError, match=r"positions\[2\] is \[nan, nan, nan\]"):
        atoms.get_forces()
    assert not atoms.calc.results


def test_a_periodic_cell_without_volume():
    atoms = Atoms("Cu", [[0.0, 0, 0]], pbc=True)
    atoms.calc = pair()[1]
    with pytest.raises(ShapeError, match="structure 0 has no volume along its periodic vectors"):
        atoms.get_potential_energy()


@pytest.mark.parametrize("name", ["atoms alone", "detached", "without grad", "other weights"])
def test_an_energy_without_a_gradient_is_refused(name):
    """Red before: forces of zero, without a word."""
    weight = torch.ones(1, requires_grad=True)
    energies = {
        "atoms alone": lambda numbers, vectors, graph: numbers.sum().double(),
        "detached": lambda numbers, vectors, graph: vectors.detach().square().sum(),
        "without grad": torch.no_grad()(lambda numbers, vectors, graph: vectors.square().sum()),
        "other weights": lambda numbers, vectors, graph: weight * numbers.sum(),
    }
    atoms = molecule("H2O")
    atoms.calc = o3.calculator(energies[name], cutoff=2.0)
    with pytest.raises(ShapeError, match=r"no gradient by the vectors .*or add 0 \* vectors\.sum"):
        atoms.get_forces()
    atoms.calc = o3.calculator(lambda n, v, g: n.sum() + 0 * v.sum(), cutoff=2.0)
    assert not atoms.get_forces().any()
    alone = Atoms("Cu", [[0.0, 0, 0]])  # without edges nothing can depend on them
    alone.calc = o3.calculator(energies[name], cutoff=2.0)
    assert not alone.get_forces().any()


def test_errors_say_what_was_given_and_what_to_do(monkeypatch):
    with pytest.raises(DTypeError, match=r"cutoff is None: .* Pass cutoff=5\.0"):
        o3.calculator(lennard_jones)
    with pytest.raises(DTypeError, match=r"head='a' was given with a function: .*MACE's"):
        o3.calculator(lennard_jones, cutoff=2.0, head="a")
    with pytest.raises(DTypeError, match=r"model is a str: it must be a model of MACE, .*load"):
        o3.calculator("my.model")
    stranger = type("Dipoles", (torch.nn.Module,), {"__module__": "mace.models"})()
    with pytest.raises(DTypeError, match=r"model is a Dipoles, .*sevenn's AtomGraphSequential"):
        o3.calculator(stranger)
    mine = type("MACE", (torch.nn.Module,), {"__module__": "mace.models"})()
    with pytest.raises(DTypeError, match=r"cutoff=2\.0 was given with a MACE, which has its own"):
        o3.calculator(mine, cutoff=2.0)
    atoms = molecule("H2O")
    atoms.calc = o3.calculator(lambda n, v, g: v, cutoff=2.0)
    with pytest.raises(ShapeError, match=r"the model's energy is \(6, 3\): it must be a tensor of"):
        atoms.get_potential_energy()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"ase is not installed: .*'torchweft\[md\]'"):
        o3.calculator(lennard_jones, cutoff=2.0)
