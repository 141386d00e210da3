"""MACE trained to the same loss, with e3nn's layers and with ours: wall time of both.

    python -m benchmarks.train_mace [--device cuda] [--epochs 20] [--molecules 400]

Shaken molecules of the G2 set with energies and forces of GFN2-xTB (EMT where tblite is not
installed), less the energies of single atoms by least squares; energies and forces have one weight
each an atom.  Both models have the same weights at first and see the same batches, an epoch in
turn; a line of JSON each epoch has both losses, and the seconds that both have taken so far, first
calls included.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.workloads.potential import Settings, as_given, mace_model
from torchweft import o3
from torchweft.demo.data.molecules import NUMBERS, best_labels, labelled, names, shaken

__all__ = ["main"]

SETTINGS = Settings("32x0e+32x1o", lmax=3, correlation=3)
BATCH, RATE = 16, 0.005

Batch = dict[str, Tensor]


def batches(count: int, labels: str, device: torch.device) -> list[Batch]:
    """Of `count` molecules."""
    random = np.random.default_rng(0)
    every = names()
    atoms: list[Any] = [
        shaken(every[place % len(every)], 1, random)[0]
        for place in random.permutation(max(count, len(every)))[:count]
    ]
    molecules = labelled(atoms, labels)
    numbers = np.array([[(some.numbers == number).sum() for number in NUMBERS] for some in atoms])
    energy = molecules.energy.numpy()
    energy = energy - numbers @ np.linalg.lstsq(numbers, energy, rcond=None)[0]
    found = []
    for begin in range(0, count, BATCH):
        end = min(begin + BATCH, count)
        batch = as_given(atoms[begin:end], NUMBERS, device)
        rows = slice(int(molecules.ptr[begin]), int(molecules.ptr[end]))
        batch["energy"] = torch.as_tensor(energy[begin:end]).to(batch["positions"])
        batch["forces"] = molecules.force[rows].to(batch["positions"])
        found.append(batch)
    return found


def epoch(model: nn.Module, adam: torch.optim.Optimizer, given: list[Batch]) -> float:
    """Steps of all batches; the mean of their losses."""
    losses = []
    for batch in given:
        adam.zero_grad()
        found = model(dict(batch), training=True)
        energy = (found["energy"] - batch["energy"]) / batch["ptr"].diff()
        force = found["forces"] - batch["forces"]
        loss = energy.square().mean() + force.square().mean()
        loss.backward()
        adam.step()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())


def main() -> None:
    """Both, an epoch in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--molecules", type=int, default=400)
    options = parser.parse_args()
    labels = best_labels()
    device = torch.device(options.device)
    given = batches(options.molecules, labels, device)
    plain = copy.deepcopy(mace_model(SETTINGS, NUMBERS)).float().to(device)
    models = {"e3nn": plain, "torchweft": o3.from_mace(copy.deepcopy(plain))}
    adams = {name: torch.optim.Adam(m.parameters(), lr=RATE) for name, m in models.items()}
    seconds = dict.fromkeys(models, 0.0)
    print(json.dumps({"labels": labels, "molecules": options.molecules, "batch": BATCH}))
    for number in range(options.epochs):
        losses = {}
        for name, model in models.items():
            begin = time.perf_counter()
            losses[name] = epoch(model, adams[name], given)
            seconds[name] += time.perf_counter() - begin
        print(json.dumps({"epoch": number, "loss": losses, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
