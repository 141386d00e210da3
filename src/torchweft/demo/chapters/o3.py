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
from torchweft.demo.models.potential import (
    Data,
    Errors,
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
from torchweft.demo.pictures import curve, parity

__all__ = ["chapter"]

OURS, ATOMS = "learned", "a sum over atoms, no forces"
ROUNDS = 5
FEW = 40  # molecules: in float64

_FORMULA = (
    "<i>A<sub>i</sub></i> = Σ<sub><i>j</i></sub> tp(<i>L h<sub>j</sub></i>, "
    "<i>Y</i>(<i>r<sub>ij</sub></i>), <i>R</i>(|<i>r<sub>ij</sub></i>|) <i>W</i>) &emsp; "
    "<i>h<sub>i</sub></i> ← Gate(<i>L<sub>z</sub></i> (<i>A<sub>i</sub></i>, "
    "<i>h<sub>i</sub></i>)) &emsp; <i>E</i> = Σ<sub><i>i</i></sub> ⟨<i>v</i>, "
    "<i>h<sub>i</sub></i>⟩ &emsp; <i>F</i> = −∂<i>E</i>/∂<i>x</i>"
)


def chapter(options: Options) -> page.Chapter:
    """Learn from some shaken molecules, predict others, and turn these to see what changes."""
    device = options.device
    data = molecules(options.seed, best_labels(), potential.LEARNED_FROM)
    torch.manual_seed(options.seed)
    model = new_potential(data.train, Settings(), torch.float32).to(device)
    train, test = (some.to(device, torch.float32) for some in (data.train, data.test))
    losses = fit(model, train, options.seed, potential.STEPS)
    energy, force = energies_and_forces(model, test)
    atoms = torch.zeros_like(energy).index_add(0, test.owner, model.shifts[test.element])
    found = {
        ATOMS: errors(atoms, torch.zeros_like(force), test),
        OURS: errors(energy, force, test),
    }
    times = _times(model, train, test)
    few = test.of(torch.arange(FEW, device=device))
    picture = parity(
        {
            "energy of an atom, beyond its element's [eV]": (
                (test.energy - atoms) / test.size,
                (energy - atoms) / test.size,
            ),
            "components of forces [eV/Å]": (test.force.flatten(), force.flatten()),
        }
    )
    blocks = (
        *_story(data, found, times, _asymmetry(model, few)),
        page.figure(
            picture,
            f"The held-out geometries: {data.labels} (across) and what was learned (up). "
            "On the line they agree.",
        ),
        _errors_table(found),
        page.figure(
            curve(losses, {"no forces": found[ATOMS].force}, "RMSE of forces [eV/Å]"),
            f"Learning: RMSE of the forces at each of {len(losses)} steps, {potential.BATCH} "
            "molecules a step, and over 21 steps together. Dashed: without learning, on the "
            "held-out geometries.",
        ),
        _exactness_table(model, few),
        _times_table(times, test, model),
        page.paragraph(
            "What torchweft launches for the energies and forces of the held-out geometries, from "
            "`torchweft.explain`:"
        ),
        page.code(str(explain(energies_and_forces, model, test))),
    )
    return page.Chapter("torchweft.o3", "Forces between atoms, the same from every side", blocks)


def _asymmetry(model: torch.nn.Module, some: Molecules) -> float:
    """‖F(turned) − F turned‖ / ‖F‖."""
    moved, turn = turned(some, seed=0)
    _, plain = energies_and_forces(model, some)
    _, there = energies_and_forces(model, moved)
    return float((there - plain @ turn.T).norm() / plain.norm())


def _times(model: Potential, train: Molecules, test: Molecules) -> dict[str, dict[str, float]]:
    """Milliseconds of torchweft and of plain torch, turn by turn."""
    device = test.ptr.device
    models = {"torchweft": model, "torch": like(model, PlainPotential, torch.float32)}
    apart = len(train.energy) // potential.BATCH
    batch = train.of(apart * torch.arange(potential.BATCH, device=device))
    steps = {name: step_of(m, batch) for name, m in models.items()}
    passes = {name: partial(energies_and_forces, m, test) for name, m in models.items()}
    return {
        f"one step of learning, {len(batch.energy)} molecules": interleaved(steps, device, ROUNDS),
        f"energies and forces of {len(test.energy)}": interleaved(passes, device, ROUNDS),
    }


def _story(
    data: Data,
    found: Mapping[str, Errors],
    times: Mapping[str, Mapping[str, float]],
    asymmetry: float,
) -> list[str]:
    """What was done, with the numbers that matter."""
    text = (
        f"The {len(names())} organic molecules of ASE's G2 set that are made of H, C, N and O, "
        f"each shaken in {potential.LEARNED_FROM} ways, with energies and forces "
        f"computed just now by {data.labels}. A network learns both, and is judged on "
        f"{len(data.test.energy)} other geometries of them."
    )
    *_, predicted = times.values()
    numbers = [
        (f"{found[ATOMS].force:.2f} eV/Å", "forces, root mean square"),
        (
            f"{predicted['torch'] / predicted['torchweft']:.1f} ×",
            "the speed of plain torch, predicting",
        ),
        (f"{asymmetry:.0e}", "error when all is turned, mirrored, moved"),
        (f"{found[OURS].force:.2f} eV/Å", "RMSE of the learned forces"),
    ]
    meaning = (
        "Atoms have scalars, vectors and quadrupoles as features, h. From each neighbour they take "
        "the tensor product of its features with the spherical harmonics of its direction, "
        "weighted by a learned function of its distance. Whatever the weights, turning the atoms "
        "turns the forces. Product and sum over neighbours are one operation, whose gradients are "
        "derivatives of the same form: forces are one gradient, learning them a second."
    )
    return [
        page.paragraph(text),
        page.cards(numbers),
        page.formula(_FORMULA),
        page.paragraph(meaning),
    ]


def _errors_table(found: Mapping[str, Errors]) -> str:
    rows = [(name, f"{1e3 * e.energy:.0f}", f"{1e3 * e.force:.0f}") for name, e in found.items()]
    caption = "Root mean square errors on the held-out geometries."
    head = ["", "energy [meV an atom]", "forces [meV/Å]"]
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
        f"Errors of the trained network on {FEW} geometries: of forces and of energies against "
        "plain torch in float64, and between the forces of what was turned, mirrored and moved "
        "and forces that were turned and mirrored. Forces as parts of their size."
    )
    head = ["", "forces", "energy [µeV an atom]", "forces when turned"]
    return page.table(caption, head, rows)


def _times_table(
    times: Mapping[str, Mapping[str, float]], test: Molecules, model: Potential
) -> str:
    edges = len(cut(test, model.settings.cutoff)[0])
    caption = (
        "The same network in torchweft and in plain torch (index_select, einsum by the 3j "
        "symbols for "
        "each product, index_add; harmonics, linear maps and gates are the same code), taking "
        "turns; medians. A step: energies, forces, and the gradient of their errors. "
        f"{len(test.energy)} molecules: {len(test.element):,} atoms, {edges:,} edges."
    )
    return page.times(caption, times)
