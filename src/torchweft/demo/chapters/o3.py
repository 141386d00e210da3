"""o3: an equivariant potential learns the energies and forces of molecules."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from torchweft import explain
from torchweft.demo import Options, page
from torchweft.demo.data.molecules import Molecules, best_labels, cut, names
from torchweft.demo.measure import interleaved
from torchweft.demo.models import potential
from torchweft.demo.models.peers import E3nnPotential, installed
from torchweft.demo.models.potential import (
    Data,
    Errors,
    Layer,
    PlainPotential,
    Potential,
    Settings,
    energies_and_forces,
    errors,
    fit,
    like,
    molecules,
    new_potential,
    step_of,
    turned,
)
from torchweft.demo.pictures import WINDOW, curve, parity
from torchweft.demo.snippets import shown

__all__ = ["chapter"]

OURS, GUESS = "trained network", "constant guess"
ROUNDS = 5
FEW = 40  # molecules: in float64

_FORMULA = (
    "<span><i>A<sub>i</sub></i> = Σ<sub><i>j</i></sub> tp(<i>L h<sub>j</sub></i>, "
    "<i>Y</i>(<i>r<sub>ij</sub></i>), <i>R</i>(|<i>r<sub>ij</sub></i>|) <i>W</i>)</span> "
    "<span><i>h<sub>i</sub></i> ← Gate(<i>L<sub>z</sub></i> (<i>A<sub>i</sub></i>, "
    "<i>h<sub>i</sub></i>))</span> <span><i>E</i> = Σ<sub><i>i</i></sub> ⟨<i>v</i>, "
    "<i>h<sub>i</sub></i>⟩</span> <span><i>F</i> = −∂<i>E</i>/∂<i>x</i></span>"
)


def chapter(options: Options) -> page.Chapter:
    """Learn from some shaken molecules, predict others, and rotate these to see what changes."""
    device = options.device
    data = molecules(options.seed, best_labels(), potential.LEARNED_FROM)
    torch.manual_seed(options.seed)
    model = new_potential(data.train, Settings(), torch.float32).to(device)
    train, test = (some.to(device, torch.float32) for some in (data.train, data.test))
    losses = fit(model, train, options.seed, potential.STEPS)
    energy, force = energies_and_forces(model, test)
    atoms = torch.zeros_like(energy).index_add(0, test.owner, model.shifts[test.element])
    found = {
        GUESS: errors(atoms, torch.zeros_like(force), test),
        OURS: errors(energy, force, test),
    }
    times = _times(model, train, test)
    few = test.of(torch.arange(FEW, device=device))
    views = {
        "energy of an atom [eV]": (
            (test.energy - atoms) / test.size,
            (energy - atoms) / test.size,
        ),
        "components of forces [eV/Å]": (test.force.flatten(), force.flatten()),
    }
    forces = "RMS error of forces [eV/Å]"
    calls = str(explain(energies_and_forces, model, test))
    blocks = (
        *_story(data, found, times, _asymmetry(model, few)),
        page.figure(partial(parity, views), _PARITY.format(data.labels)),
        _errors_table(found),
        _times_table(times, test, model),
        page.figure(partial(curve, losses, {GUESS: found[GUESS].force}, forces), _CURVE),
        page.details("How exact: against float64, and rotated", _exactness_table(model, few)),
        page.details("What runs: torchweft.explain of the energies and forces", page.code(calls)),
        page.documentation(_PAGES),
    )
    return page.Chapter("torchweft.o3", "Energies and forces of molecules", blocks)


_PAGES = {
    "o3": "families/o3",
    "training a potential": "how-to/train_a_potential",
    "MACE": "migrate/mace",
}
_PARITY = (
    "Held-out geometries: what {} computes (across) and what the network predicts (up), a dot for "
    "each. On the dashed line they agree. Energies are relative to the mean of each element."
)
_CURVE = (
    f"Training, on a logarithmic axis. Thin: the error of the forces in each step, over its "
    f"{potential.BATCH} molecules; one molecule with a stretched bond makes a peak. Thick: the "
    f"median of {WINDOW} steps, which such peaks do not move. Dashed: the constant guess, that all "
    "forces are zero, on the held-out geometries."
)


def _asymmetry(model: torch.nn.Module, some: Molecules) -> float:
    """‖F(turned) − F turned‖ / ‖F‖."""
    moved, turn = turned(some, seed=0)
    _, plain = energies_and_forces(model, some)
    _, there = energies_and_forces(model, moved)
    return float((there - plain @ turn.T).norm() / plain.norm())


def _times(model: Potential, train: Molecules, test: Molecules) -> dict[str, dict[str, float]]:
    """Milliseconds of torchweft, e3nn and plain torch, in turns."""
    device = test.ptr.device
    models = {"torchweft": model}
    if installed("e3nn"):
        models["e3nn"] = like(model, E3nnPotential, torch.float32)
    models["plain torch"] = like(model, PlainPotential, torch.float32)
    apart = len(train.energy) // potential.BATCH
    batch = train.of(apart * torch.arange(potential.BATCH, device=device))
    steps = {name: step_of(m, batch) for name, m in models.items()}
    passes = {name: partial(energies_and_forces, m, test) for name, m in models.items()}
    return {
        "training step": interleaved(steps, device, ROUNDS),
        "energies and forces": interleaved(passes, device, ROUNDS),
    }


def _story(
    data: Data,
    found: Mapping[str, Errors],
    times: Mapping[str, Mapping[str, float]],
    asymmetry: float,
) -> list[str]:
    """What was done, with the numbers that matter."""
    text = (
        f"{len(names())} organic molecules of ASE's G2 set (H, C, N, O), each in "
        f"{potential.LEARNED_FROM} geometries with randomly displaced atoms. {data.labels} has "
        "computed their energies and forces for this page. A network in the manner of NequIP "
        f"learns both, and is tested on {len(data.test.energy)} other geometries."
    )
    numbers = [
        (f"{found[GUESS].force:.2f} eV/Å", "error of forces, constant guess: zero"),
        *page.leads(times),
        (f"{asymmetry:.0e}", "relative error under rotation: equivariance"),
        (f"{found[OURS].force:.2f} eV/Å", "error of forces, trained network"),
    ]
    meaning = (
        "Features h of an atom are scalars, vectors and tensors of rank 2. An atom takes from each "
        "neighbour the tensor product of its features with the spherical harmonics of its "
        "direction, weighted by a learned function of its distance. Whatever the weights, "
        "rotating the molecule rotates the forces. `TensorProductConv` forms the product and the "
        "sum over neighbours in one pass. Forces are a gradient of the energy, and training on "
        "forces takes a second gradient: both run in the same kernels."
    )
    return [
        page.paragraph(text),
        page.cards(numbers),
        page.formula(_FORMULA),
        page.paragraph(meaning),
        shown(Layer),
    ]


def _errors_table(found: Mapping[str, Errors]) -> str:
    rows = [(name, f"{1e3 * e.energy:.0f}", f"{1e3 * e.force:.0f}") for name, e in found.items()]
    caption = (
        "Root mean square errors on the held-out geometries. The constant guess: each element has "
        "the energy that fits the training set best, and no atom feels a force."
    )
    head = ["", "energy [meV/atom]", "forces [meV/Å]"]
    return page.table(caption, head, rows, len(rows) - 1)


def _exactness_table(model: Potential, some: Molecules) -> str:
    """Errors against float64, and under a change of the frame of reference."""
    wide = some.to(some.ptr.device, torch.float64)
    exact = energies_and_forces(like(model, PlainPotential, torch.float64), wide)

    def row(name: str, kind: type[Potential], of: Molecules) -> tuple[str, ...]:
        network = like(model, kind, of.position.dtype)
        energy, force = energies_and_forces(network, of)
        wrong = ((energy - exact[0]) / of.size).abs().max()
        relative = (force - exact[1]).norm() / exact[1].norm()
        return name, f"{relative:.1e}", f"{1e6 * wrong:.2g}", f"{_asymmetry(network, of):.1e}"

    rows = [
        row("torchweft", Potential, some),
        row("plain torch", PlainPotential, some),
        row("torchweft, float64", Potential, wide),
    ]
    caption = (
        f"The trained network on {FEW} geometries. Forces and energies: the difference to plain "
        "torch in float64. When rotated: the difference between the forces of rotated, mirrored "
        "and shifted molecules and the rotated and mirrored forces. Forces are relative to their "
        "size."
    )
    head = ["", "forces", "energy [µeV/atom]", "when rotated"]
    return page.table(caption, head, rows)


def _times_table(
    times: Mapping[str, Mapping[str, float]], test: Molecules, model: Potential
) -> str:
    edges = len(cut(test, model.settings.cutoff)[0])
    e3nn = (
        "e3nn: its TensorProduct and index_add. "
        if installed("e3nn")
        else "e3nn is not installed here: pip install e3nn adds it. "
    )
    caption = (
        f"The same network with other convolutions; linear maps, harmonics and gates are the same. "
        f"{e3nn}Plain torch: index_select, einsum with the 3j symbols, index_add. Medians; the "
        "calls alternate. Training step: energies, forces and the gradient of their errors, for "
        f"{potential.BATCH} molecules. Energies and forces: of {len(test.energy)} molecules with "
        f"{len(test.element):,} atoms and {edges:,} edges."
    )
    return page.times(caption, times)
