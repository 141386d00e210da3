"""MACE trained to the same loss, with e3nn's layers and with ours: wall time and errors of both.

    python -m benchmarks.train_mace LABELS.npz [--device cuda] [--epochs 20] [--out FILE.json]

LABELS is made by `python -m benchmarks.g2_labels`; every tenth molecule is held out.  All models
have the same weights at first and see the same batches in the same order, an epoch in turn.  On a
GPU each is trained a second time with its step recorded by `torchweft.capture`, in which batches
are padded to one size; one that cannot be recorded is left out.  A line of JSON each epoch has the
losses, and the seconds that each has taken so far, first calls included.  At the end, the errors on
held-out molecules, and those of the trained weights of ours in e3nn's own class against float64, go
to the file with all the rest.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torchweft
from benchmarks import g2_labels
from benchmarks.harness.record import machine
from benchmarks.harness.suites import FOLDER
from benchmarks.workloads.potential import Settings, as_given, mace_model
from torchweft import o3
from torchweft.demo.data.molecules import NUMBERS
from torchweft.errors import CaptureError

__all__ = ["Trained", "batches", "main"]

SETTINGS = Settings("32x0e+32x1o", lmax=2, correlation=3)
BATCH, RATE = 32, 0.005
HELD_OUT = 10  # every tenth molecule

ROOM = 1.1  # over the batch with most edges
SIZES = {
    "positions": (ROOM, {"batch": "energy", "force_weight": 0.0}),
    "shifts": (ROOM, {"edge_index": "positions"}),
    "energy": (1.0, {"energy_weight": 0.0}),
}

Batch = dict[str, Tensor]


class Trained(NamedTuple):
    """A model in training, and what was measured."""

    model: nn.Module
    step: Callable[[Batch], Tensor]
    losses: list[float]  # of each epoch
    seconds: list[float]


def batches(labels: g2_labels.Labelled, rows: list[int], device: torch.device) -> list[Batch]:
    """Of some molecules, in their order; labels and weights of the loss belong to them."""
    from ase import Atoms

    pieces = [slice(*labels.ptr[row : row + 2]) for row in rows]
    found = []
    for begin in range(0, len(rows), BATCH):
        some = pieces[begin : begin + BATCH]
        atoms = [Atoms(labels.numbers[p], labels.positions[p]) for p in some]
        given = as_given(atoms, NUMBERS, device)
        kept = ("positions", "node_attrs", "edge_index", "shifts", "unit_shifts", "batch")
        batch = {name: given[name] for name in kept}
        like, size = batch["positions"], given["ptr"].diff()
        batch["energy"] = torch.as_tensor(labels.energy[rows[begin : begin + BATCH]]).to(like)
        batch["forces"] = torch.cat([torch.as_tensor(labels.forces[p]) for p in some]).to(like)
        batch["energy_weight"] = 1 / (len(some) * size.to(like).square())
        batch["force_weight"] = torch.full_like(like, 1 / like.numel())
        found.append(batch)
    return found


def predicted(model: nn.Module, batch: Batch, training: bool) -> tuple[Tensor, Tensor]:
    """Energies and forces; what depends on the number of molecules is made here."""
    count = len(batch["energy"])
    zeros = batch["batch"].new_zeros(count + 1)
    given = {"ptr": zeros, "head": zeros[:-1], "cell": batch["positions"].new_zeros(3 * count, 3)}
    found = model({**batch, **given, "positions": batch["positions"].detach()}, training=training)
    return found["energy"], found["forces"]


def trained(model: nn.Module, given: list[Batch], captured: bool) -> Trained:
    """Before its first epoch; the loss is per atom, (ΔE / atoms)² + |ΔF|² / 3, averaged."""
    fused = captured or given[0]["energy"].is_cuda
    adam = torch.optim.Adam(model.parameters(), lr=RATE, fused=fused, capturable=fused)

    def step(batch: Batch) -> Tensor:
        adam.zero_grad()
        energy, forces = predicted(model, batch, training=True)
        loss = (batch["energy_weight"] * (energy - batch["energy"]).square()).sum()
        loss = loss + (batch["force_weight"] * (forces - batch["forces"]).square()).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        return loss.detach()

    if captured:
        largest = max(given, key=lambda batch: batch["shifts"].numel())
        step = torchweft.capture(step, largest, sizes=SIZES)
    return Trained(model, step, [], [])


def epoch(run: Trained, given: list[Batch]) -> None:
    """Steps of all batches; the mean of their losses and the time they took are kept."""
    begin = time.perf_counter()
    losses = [run.step(batch) for batch in given]
    run.losses.append(float(torch.stack(losses).mean()))  # waits for the device
    run.seconds.append(time.perf_counter() - begin)


def results(model: nn.Module, given: list[Batch]) -> tuple[Tensor, Tensor]:
    """Energies an atom (M,), and forces (N, 3)."""
    pairs = [predicted(model, batch, training=False) for batch in given]
    sizes = torch.cat([batch["batch"].bincount() for batch in given])
    energies, forces = (torch.cat(part).detach().double() for part in zip(*pairs, strict=True))
    return energies / sizes, forces


def held_out_errors(model: nn.Module, given: list[Batch]) -> dict[str, float]:
    """Mean absolute errors, of an energy in meV an atom, of forces in meV/Å."""
    energy, forces = results(model, given)
    sizes = torch.cat([batch["batch"].bincount() for batch in given])
    wanted = torch.cat([batch["energy"] for batch in given]) / sizes
    other = torch.cat([batch["forces"] for batch in given])
    return {
        "energy": 1e3 * float((energy - wanted).abs().mean()),
        "forces": 1e3 * float((forces - other).abs().mean()),
    }


def loaded_back(ours: nn.Module, original: nn.Module, given: list[Batch]) -> dict[str, float]:
    """Weights of ours in e3nn's class: largest errors of both against it in float64."""
    original.load_state_dict(o3.to_e3nn(ours))
    wide = [{n: t.double() if t.is_floating_point() else t for n, t in b.items()} for b in given]
    exact = results(copy.deepcopy(original).double(), wide)
    return {
        f"{name}, {what}": float((value - best).abs().max())
        for name, model in (("e3nn", original), ("torchweft", ours))
        for what, value, best in zip(
            ("energy", "forces"), results(model, given), exact, strict=True
        )
    }


def main() -> None:
    """All models, an epoch in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("labels", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path, help="default: results/<gpu>/training.json")
    options = parser.parse_args()
    device = torch.device(options.device)
    labels = g2_labels.load(options.labels)
    rows = range(len(labels.energy))
    held_out = batches(labels, [row for row in rows if row % HELD_OUT == 0], device)
    given = batches(labels, [row for row in rows if row % HELD_OUT], device)
    plain = copy.deepcopy(mace_model(SETTINGS, NUMBERS)).float().to(device)
    runs = {}
    for captured in (False, True) if device.type == "cuda" else (False,):
        for name, convert in (("e3nn", copy.deepcopy), ("torchweft", _converted)):
            model = convert(plain)
            runs[name + " captured" * captured] = trained(model, given, captured)
    order = random.Random(0)
    for number in range(options.epochs):
        order.shuffle(given)
        for name, run in [*runs.items()]:
            try:
                epoch(run, given)
            except CaptureError as error:
                print(f"{name} is left out: {error}", flush=True)
                del runs[name]
        shown = {
            "epoch": number,
            "loss": {name: run.losses[-1] for name, run in runs.items()},
            "seconds": {name: sum(run.seconds) for name, run in runs.items()},
        }
        print(json.dumps(shown), flush=True)
    *_, last = (name for name in runs if name.startswith("torchweft"))
    found = _summary(runs, labels, len(given), held_out)
    found["loaded_back"] = loaded_back(runs[last].model, plain, held_out)
    found |= asdict(machine(device))
    print(json.dumps({name: found[name] for name in ("ms_a_step", "held_out", "loaded_back")}))
    path = options.out or FOLDER / "results" / machine(device).folder / "training.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _converted(plain: nn.Module) -> nn.Module:
    return o3.from_mace(copy.deepcopy(plain))


def _summary(
    runs: dict[str, Trained], labels: g2_labels.Labelled, steps: int, held_out: list[Batch]
) -> dict[str, Any]:
    later = {name: run.seconds[1:] or run.seconds for name, run in runs.items()}
    return {
        "suite": "training", "model": SETTINGS._asdict(), "labels": str(labels.labels),
        "molecules": len(labels.energy),
        "held_out_molecules": sum(len(batch["energy"]) for batch in held_out),
        "batch": BATCH, "rate": RATE, "steps_an_epoch": steps,
        "loss": {name: run.losses for name, run in runs.items()},
        "seconds": {name: run.seconds for name, run in runs.items()},
        "ms_a_step": {n: 1e3 * statistics.median(s) / steps for n, s in later.items()},
        "held_out": {name: held_out_errors(run.model, held_out) for name, run in runs.items()},
    }  # fmt: skip


if __name__ == "__main__":
    main()
