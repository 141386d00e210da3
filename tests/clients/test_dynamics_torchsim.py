"""TorchSim's model of MACE with a converted potential: a batch of structures, and a step of NVE."""

import copy

import pytest
import torch

pytest.importorskip("mace")
pytest.importorskip("torch_sim")

import torch_sim as ts
from torch_sim.integrators import nve
from torch_sim.models.mace import MaceModel

from tests.clients.maces import mace, rattled
from torchweft import o3


def sim_model(model):
    return MaceModel(copy.deepcopy(model), device=torch.device("cpu"), dtype=torch.float64)


def test_a_converted_model_gives_the_numbers_and_steps_of_the_original():
    structures = [rattled(), rattled((1, 1, 2), seed=1)]
    state = ts.initialize_state(structures, device=torch.device("cpu"), dtype=torch.float64)
    model = mace()
    theirs, ours = sim_model(model), sim_model(o3.from_mace(copy.deepcopy(model)))
    exact, found = theirs(state), ours(state)
    for name in ("energy", "forces", "stress"):
        scale = float(exact[name].abs().max())
        error = float((found[name] - exact[name]).abs().max())
        assert error <= scale * 2.0**-52 * 28 * len(state.positions), name
    paths = []
    for m in (theirs, ours):
        torch.manual_seed(0)  # of the velocities
        steps = {"n_steps": 3, "temperature": 300, "timestep": 0.001}
        final = ts.integrate(system=structures, model=m, integrator=nve, **steps)
        paths.append(final.positions)
    moved = float((paths[0] - state.positions).abs().max())
    assert moved > 0
    assert float((paths[1] - paths[0]).abs().max()) <= moved * 2.0**-52 * 28 * len(state.positions)
