"""o3.calculator with models of the real MACE: MACECalculator's numbers, and its dynamics.

Errors are measured by those that MACE's own float32 has against its float64.
"""

import copy
import functools

import numpy as np
import pytest
import torch

pytest.importorskip("mace")
pytest.importorskip("vesin")

from ase import Atoms, units
from ase.build import molecule
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet
from mace.calculators import MACECalculator

from tests.clients.agreement import assert_agree, properties
from tests.clients.maces import mace, rattled
from tests.recorders import structures_recorded
from torchweft import o3
from torchweft.capturing.graphs import CudaGraphs
from torchweft.errors import DTypeError, ShapeError


def structures():
    solid = rattled()
    sheared = solid.copy()
    sheared.set_cell(sheared.cell.array @ [[1, 0.1, 0], [0, 1, 0.05], [0, 0, 0.95]], True)
    film = rattled((1, 1, 2))
    film.pbc = (True, True, False)
    return {"solid": solid, "sheared": sheared, "film": film, "molecule": molecule("SiO")}


@functools.cache
def model(convert=False):
    """Callers copy it: building takes seconds."""
    return o3.from_mace(model_copy()) if convert else mace()


def model_copy(convert=False):
    return copy.deepcopy(model(convert))


@functools.cache
def theirs(dtype="float64"):
    return MACECalculator(models=[model_copy()], default_dtype=dtype)


@functools.cache
def ours(dtype=torch.float64, convert=True):
    return o3.calculator(model_copy(convert), dtype=dtype)


def agree(found, exact, atoms, dtype=torch.float64):
    rounded = properties(atoms, theirs("float32"))
    names = ("energy", "forces", "stress")[: len(found)]
    named = (dict(zip(names, t, strict=True)) for t in (found, exact, rounded))
    assert_agree(*named, dtype)


CASES = [(name, True) for name in ("solid", "sheared", "film", "molecule")] + [("film", False)]


@pytest.mark.parametrize(("name", "convert"), CASES)
def test_numbers_are_those_of_maces_calculator(name, convert):
    atoms = structures()[name]
    exact, noises = properties(atoms, theirs()), noise(atoms)
    for dtype, precision in ((torch.float32, 1.0), (torch.float64, 2.0**-29)):
        found = properties(atoms, ours(dtype, convert))
        for value, of_float32, best in zip(found, noises, exact, strict=True):
            assert float((value - best).abs().max()) <= 4 * precision * of_float32, dtype


def noise(atoms):
    """The largest error of MACE's float32 results, at the positions and at some beside them.

    Of a molecule of two atoms, the error at one place is that of one number: a matter of luck.
    """
    errors = []
    for seed in range(4):
        exact, plain = (properties(atoms, theirs(dtype)) for dtype in ("float64", "float32"))
        rounding = torch.finfo(torch.float32).eps  # of the last sums
        errors.append(
            [
                max(float((noisy - best).abs().max()), rounding * float(best.abs().max()))
                for noisy, best in zip(plain, exact, strict=True)
            ]
        )
        atoms = atoms.copy()
        atoms.rattle(1e-3, seed=seed)
    return [max(of_property) for of_property in zip(*errors, strict=True)]


def test_dtype_turns_the_model_in_place():
    turned = model_copy()
    o3.calculator(turned, dtype=torch.float32)
    assert {t.dtype for t in turned.parameters()} == {torch.float32}


def test_heads():
    both = mace(
        heads=["a", "b"], atomic_energies=np.array([[-1.0, -2.0], [-3.0, -5.0]]),
        atomic_inter_scale=[1.0, 1.0], atomic_inter_shift=[0.0, 0.0],
    )  # fmt: skip
    atoms = structures()["solid"]
    for head in ("a", "b"):
        known = MACECalculator(models=[copy.deepcopy(both)], head=head, default_dtype="float64")
        exact = properties(atoms, known)[0]
        found = properties(atoms, o3.calculator(copy.deepcopy(both), head=head))[0]
        assert abs(float(found - exact)) <= abs(float(exact)) * 2.0**-50 * len(atoms)
    with pytest.raises(ShapeError, match=r"has the heads \['a', 'b'\]: one must be .*head='a'"):
        o3.calculator(both)
    with pytest.raises(ShapeError, match=r"head is 'c' and the model has \['a', 'b'\]"):
        o3.calculator(both, head="c")


def test_atoms_of_another_element():
    atoms = molecule("H2O")
    atoms.calc = ours()
    with pytest.raises(
        ShapeError, match=r"the atoms have H: the model has only .*numbers \[8, 14\]\."
    ):
        atoms.get_potential_energy()


def test_positions_that_are_nan_and_cells_without_volume():
    atoms = structures()["solid"]
    atoms.calc = ours()
    atoms.get_potential_energy()
    atoms.positions[3] = np.nan
    with pytest.raises(ShapeError, match=r"positions\[3\] is .*nan"):
        atoms.get_forces()
    flat = Atoms("Si", [[0.0, 0, 0]], cell=[3.0, 3.0, 0.0], pbc=True)
    flat.calc = atoms.calc
    with pytest.raises(ShapeError, match="has no volume along its periodic vectors"):
        flat.get_forces()


def test_a_model_without_an_energy():
    with pytest.raises(DTypeError, match=r"model is a LinearNodeEmbeddingBlock"):
        o3.calculator(model().node_embedding)


def trajectory(calculator, steps):
    """Positions and total energies of NVE at 600 K, from the same velocities."""
    atoms = rattled()
    atoms.calc = calculator
    MaxwellBoltzmannDistribution(atoms, temperature_K=600, rng=np.random.default_rng(0))
    energies, positions = [], []

    def record():
        energies.append(atoms.get_total_energy())
        positions.append(atoms.positions.copy())

    dynamics = VelocityVerlet(atoms, timestep=1 * units.fs)
    dynamics.attach(record)
    dynamics.run(steps)
    return torch.tensor(np.array(energies)), torch.tensor(np.array(positions))


def test_dynamics_drift_as_maces_own():
    """30 steps: positions part by rounding, and the energy departs as far as e3nn's does."""
    exact, found = trajectory(theirs(), 30), trajectory(ours(), 30)
    plain = trajectory(theirs("float32"), 30)
    drift, allowed = (float((e - e[0]).abs().max()) for e in (found[0], exact[0]))
    noise = float((plain[1] - exact[1]).abs().max()) * 2.0**-29
    rounding = 30 * torch.finfo(torch.float64).eps * float(exact[1].abs().max())  # of each step
    assert float((found[1] - exact[1]).abs().max()) <= 4 * noise + rounding
    assert drift <= allowed * (1 + 2.0**-20)


def test_dynamics_search_neighbours_rarely():
    calculator = o3.calculator(model_copy(True), skin=1.0)
    trajectory(calculator, 10)
    assert calculator.neighbours.builds == 1


@pytest.mark.parametrize("convert", [False, True])
def test_steps_of_a_recorded_model(convert):
    """As on a GPU, with room for edges: the numbers of the model without, and one record."""
    calculator, plain = (o3.calculator(model_copy(convert)) for _ in range(2))
    for name in ("sheared", "molecule"):
        with structures_recorded() as made:
            for seed in range(4):
                atoms = structures()[name]
                atoms.rattle(0.02, seed=seed)
                found = properties(atoms, calculator)
                with structures_recorded(False):
                    agree(found, properties(atoms, plain), atoms)
        assert [(r.rehearsals, r.records, r.replays) for r in made] == [(1, 1, 2)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("error:the model runs without a CUDA graph")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("convert", [False, True])
def test_steps_on_a_gpu(convert, dtype, monkeypatch):
    records, record = [], CudaGraphs.record
    monkeypatch.setattr(CudaGraphs, "record", lambda *a: records.append(1) or record(*a))
    calculator = o3.calculator(model_copy(convert), dtype=dtype, device="cuda")
    for name in ("sheared", "molecule"):
        for seed in range(5):
            atoms = structures()[name]
            atoms.rattle(0.02, seed=seed)
            agree(properties(atoms, calculator), properties(atoms, theirs()), atoms, dtype)
    assert len(records) == 2
