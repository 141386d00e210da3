"""Molecular dynamics without a thermostat: drift of the energy with e3nn's layers and with ours.

    python -m benchmarks.nve [--atoms 216] [--steps 10000] [--device cuda] [--out FILE.json]

Shaken diamond of Si and O, 8 atoms a cell, by ASE's velocity Verlet, from the same positions and
velocities.  MACE's model has random weights, in float32: nothing keeps the crystal, so it becomes a
liquid.  The model's repulsion of pairs (ZBL) keeps atoms apart, and its energies are scaled so that
the root mean square of forces is FORCE at the start: steps of STEP fs are stable then, at about
600 K.  The runs are

    MACECalculator   MACE's own calculator of the model as it is, --e3nn-steps of it
    e3nn             `o3.calculator` of the model as it is, which a GPU records as a CUDA graph
    torchweft        `o3.calculator` of `o3.from_mace(model)`

The drift is the slope of the total energy by least squares, and its largest deviation from the
start; both also over the steps that all have done, where trajectories can be compared.  A step's
wall time is the median; the first steps compile and record.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks.harness.record import machine
from benchmarks.harness.suites import FOLDER
from benchmarks.workloads.potential import TABLE, Structures, mace_model, structures_of
from torchweft import o3

__all__ = ["main"]

SETTINGS = TABLE._replace(pair_repulsion=True)
STEP, KELVIN, FORCE = 1.0, 300.0, 0.1  # fs, K, eV/Å
CELL = 8  # atoms


class Run(NamedTuple):
    """Of each step."""

    energies: list[float]  # total, eV; one more than steps
    seconds: list[float]


def dynamics(calculator: Any, atoms: Any, steps: int) -> Run:
    """Velocity Verlet of a copy of the atoms."""
    from ase import units
    from ase.md.verlet import VelocityVerlet

    atoms = atoms.copy()
    atoms.calc = calculator
    run = Run([atoms.get_total_energy()], [])
    verlet = VelocityVerlet(atoms, timestep=STEP * units.fs)
    for _ in range(steps):
        begin = time.perf_counter()
        verlet.run(1)
        run.energies.append(atoms.get_total_energy())
        run.seconds.append(time.perf_counter() - begin)
    return run


def drift(energies: Sequence[float], atoms: int) -> dict[str, float]:
    """Of the total energy: meV an atom and ps, and meV an atom."""
    steps = np.arange(len(energies))
    off = 1e3 * (np.array(energies) - energies[0]) / atoms
    slope = np.polynomial.Polynomial.fit(steps, off, 1).convert().coef
    return {
        "slope_mev_ps": float(slope[-1]) * 1e3 / STEP,
        "largest_mev": float(np.abs(off).max()),
    }


def start(count: int, seed: int = 0) -> Any:
    """The suite's crystal, with velocities of a temperature and no drift."""
    from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary

    side = round((count / CELL) ** (1 / 3))
    if CELL * side**3 != count:
        raise SystemExit(f"--atoms {count}: it must be 8 n³. Pass 64, 216 or 512.")
    (atoms,) = structures_of(Structures(side=side))
    random = np.random.default_rng(seed)
    MaxwellBoltzmannDistribution(atoms, temperature_K=KELVIN, rng=random)
    Stationary(atoms)
    return atoms


def scaled(model: nn.Module, atoms: Any) -> nn.Module:
    """Energies times what makes the root mean square of forces FORCE."""
    atoms = atoms.copy()
    atoms.calc = o3.calculator(copy.deepcopy(model))
    forces = atoms.get_forces()
    with torch.no_grad():
        model.scale_shift.scale *= FORCE / float(np.sqrt((forces**2).mean()))
    return model


def main() -> None:
    """One after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--atoms", type=int, default=216)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--e3nn-steps", type=int, default=500, help="of MACECalculator")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="default: results/<gpu>/nve.json")
    options = parser.parse_args()
    device = torch.device(options.device)
    atoms = start(options.atoms)
    elements = Structures(side=1).elements
    model = copy.deepcopy(mace_model(SETTINGS, elements)).float().to(device)
    model = scaled(model, atoms)
    ways: dict[str, tuple[Callable[[nn.Module], Any], int]] = {
        "MACECalculator": (lambda m: _maces_own(m, device), options.e3nn_steps),
        "e3nn": (o3.calculator, options.steps),
        "torchweft": (lambda m: o3.calculator(o3.from_mace(m)), options.steps),
    }
    found: dict[str, Any] = {
        "suite": "nve", "atoms": len(atoms), "model": SETTINGS._asdict(), "step_fs": STEP,
        "kelvin": KELVIN, "force_rms": FORCE, "runs": {},
    }  # fmt: skip
    common = min(steps for _, steps in ways.values())
    for name, (calculator, steps) in ways.items():
        run = dynamics(calculator(copy.deepcopy(model)), atoms, steps)
        ms = 1e3 * statistics.median(run.seconds)
        row = {
            "steps": steps,
            "seconds": sum(run.seconds),
            "ms_a_step": ms,
            "ns_a_day": 86.4 * STEP / ms,
            "drift": drift(run.energies, len(atoms)),
            f"drift_of_{common}_steps": drift(run.energies[: common + 1], len(atoms)),
        }
        found["runs"][name] = row
        print(json.dumps({name: row}), flush=True)
    found |= asdict(machine(device))
    path = options.out or FOLDER / "results" / machine(device).folder / "nve.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _maces_own(model: nn.Module, device: torch.device) -> Any:
    from mace.calculators import MACECalculator

    return MACECalculator(models=[model], device=str(device), default_dtype="float32")


if __name__ == "__main__":
    main()
