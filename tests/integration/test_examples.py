"""Examples without other libraries: no import of the demo, the same data, energies that are kept.

Seen red with: `torchweft.demo` imported by an example, a picture that is not there, charges of the
other sign in the n-body systems, velocities that grow, forces that are no slopes of the energy, in
training and in dynamics.
"""

import ast
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from torchweft.demo.models import forecaster

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*/*.py"))


def names_of(path):
    """The names of an example, which is not run."""
    return runpy.run_path(str(EXAMPLES / path))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_can_be_copied(path):
    """It imports no code of ours that is private or belongs to the demo."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            modules.append(node.module)
    ours = {name for name in modules if name.partition(".")[0] == "torchweft"}
    assert ours
    assert not {name for name in ours if name.split(".")[1:2] in (["demo"], ["core"])}
    assert not {name for name in modules if name.split(".")[0] in ("tests", "benchmarks")}


def test_every_example_has_a_picture():
    """Programs that are not run for the pages name a picture that is there."""
    docs = EXAMPLES.parent / "docs"
    for path in FILES:
        text = path.read_text("utf-8")
        if path.name.startswith("plot_"):
            assert "plt.show()" in text, path
            continue
        _, found, picture = text.partition("# sphinx_gallery_thumbnail_path = '")
        assert found, path
        assert (docs / picture.partition("'")[0]).is_file(), path


def test_nbody_has_the_demos_data_and_network():
    """Both are those of the comparison and of the recorded result."""
    names = names_of("clifford/nbody.py")
    drawn = names["starts"](4)
    exact = forecaster.systems_of(
        forecaster.simulate(forecaster.starts(4, names["DATA_SEED"]), frames=41)
    )
    systems = names["simulated"](*drawn)
    for found, expected in zip(systems, exact, strict=True):
        assert found.tolist() == expected.tolist()
    torch.manual_seed(0)
    network = names["Network"](features=4)
    torch.manual_seed(0)
    demos = forecaster.Forecaster(features=4)
    systems = names["Systems"](*(t.float() for t in systems))
    plan = names["complete_graphs"](4, 5)
    assert network(systems, plan).tolist() == demos(systems, plan).tolist()


def test_nbody_learns():
    names = names_of("clifford/nbody.py")
    torch.manual_seed(0)
    data = names["load"](50, torch.device("cpu"))
    network = names["Network"](features=8)
    before = names["error"](network, data["test"])
    curve, _ = names["learn"](network, data, 40, torch.device("cpu"))
    assert curve[-1][2] < before / 2


@pytest.mark.slow
def test_the_potential_learns_forces_and_conserves_energy():
    """Half a step, a quarter of the swing: so it is where forces are the slopes of an energy."""
    names = names_of("o3/potential.py")
    torch.manual_seed(0)
    names["displaced"].__globals__["labels"] = names["EMT"]  # which is always there
    structures = names["displaced"](["H2CO", "CH4"], 8, np.random.default_rng(0))
    model = names["new_potential"](names["batch_of"](structures))
    names["fit"](model, structures, 60, "cpu")
    batch = names["batch_of"](structures)
    _, forces = names["energies_and_forces"](model, batch)
    assert (forces - batch.forces).norm() < batch.forces.norm() / 2
    swings = []
    for femtoseconds, steps in ((0.4, 100), (0.2, 200)):
        rows = names["dynamics"](model, "H2CO", 50, femtoseconds, steps)
        swings.append(np.ptp(rows[:: steps // 100, 1]))  # at the same times
    assert 3 < swings[0] / swings[1] < 5
    assert swings[1] < 0.1 * np.ptp(rows[:, 0])
