"""A UNet in spconv's layers trained to label voxels, through spconv and through our stand-in.

    python -m benchmarks.train_segmentation [--device cuda] [--epochs 5] [--out FILE.json]

spconv's wheel cannot train on a CPU: there the stand-in is trained alone.  Both networks have the
same weights at first, and see the same batches of generated rooms in the same order, an epoch in
turn, in float32 without TF32.  A third, the stand-in in float64, takes the first steps too: it
tells which difference of the losses float32's rounding explains.  Activations are SiLU: where a
rounding turns a ReLU on, the gradient jumps, and its relative error is 5e-3 at once, not 3e-5.

A line of JSON each epoch has the losses, and the seconds that each has taken so far, first calls
included.  At the end go to the file: losses of the first steps and their differences, accuracy and
mean IoU on held-out rooms beside those of the most frequent class, times (*lead* is spconv's over
ours), and what the other library computes from the weights that were trained through one.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness.record import machine
from benchmarks.harness.suites import FOLDER
from benchmarks.peers.spconv_unet import converted
from benchmarks.workloads import segmentation
from benchmarks.workloads.segmentation import CLASSES, FEATURES, SHAPE, Rooms
from examples.voxels.plot_minkunet import MinkUNet

__all__ = ["EXACT", "PACKAGES", "Run", "differences", "main", "network", "run_of", "scored"]

PACKAGES = {"spconv": "spconv", "torchweft": "torchweft.compat.spconv"}
"""The package whose layers each network has."""

EXACT = "torchweft float64"
LAYERS, WIDTH = 42, 0.25
BATCH, RATE, DECAY = 2, 0.002, 0.01
TRACED = 100
"""Steps whose losses are compared one by one."""
HELD_OUT = 1000  # seed of rooms that nothing is trained on


class Run(NamedTuple):
    """A network in training, and what was measured."""

    package: str
    model: nn.Module
    adam: torch.optim.AdamW
    slower: torch.optim.lr_scheduler.LRScheduler
    losses: list[float]  # of each step
    seconds: list[float]  # of each epoch


def network(package: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The UNet in a package's layers, with SiLU; its weights are the same at each call."""
    torch.manual_seed(0)
    plain = MinkUNet(FEATURES, len(CLASSES), LAYERS, WIDTH)  # type: ignore[no-untyped-call]
    return _smooth(converted(package, plain.to(dtype)))


def run_of(package: str, model: nn.Module, steps: int) -> Run:
    """Before its first step; the rate falls to nothing in a line."""
    fused = next(model.parameters()).is_cuda
    adam = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=fused)
    slower = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, total_iters=steps)
    return Run(package, model, adam, slower, [], [])


def scores(package: str, model: nn.Module, given: Rooms) -> Tensor:
    """(N, classes) of a batch; index pairs and maps are found again at each call."""
    layers = importlib.import_module(f"{package}.pytorch")
    tensor = layers.SparseConvTensor(given.features, given.indices, list(SHAPE), given.batch_size)
    found: Tensor = model(tensor).features
    return found


def epoch(run: Run, given: Sequence[Rooms]) -> None:
    """Steps on all batches; their losses and the time they took are kept."""
    run.model.train()
    begin = time.perf_counter()
    losses = []
    for batch in given:
        run.adam.zero_grad()
        loss = functional.cross_entropy(scores(run.package, run.model, batch), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        run.adam.step()
        run.slower.step()
        losses.append(loss.detach())
    run.losses.extend(torch.stack(losses).tolist())  # waits for the device
    run.seconds.append(time.perf_counter() - begin)


@torch.no_grad()
def predicted(package: str, model: nn.Module, given: Sequence[Rooms]) -> Tensor:
    """The class of every voxel."""
    model.eval()
    return torch.cat([scores(package, model, batch).argmax(1) for batch in given])


def scored(found: Tensor, labels: Tensor) -> dict[str, float]:
    """Share of right voxels, and the mean over classes of intersection over union."""
    pairs = torch.bincount(labels * len(CLASSES) + found, minlength=len(CLASSES) ** 2)
    table = pairs.view(len(CLASSES), -1).double()
    both = table.diagonal()
    union = table.sum(0) + table.sum(1) - both
    return {"accuracy": float(both.sum() / table.sum()), "mean_iou": float((both / union).mean())}


def differences(losses: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Largest relative difference of two runs' losses, over the first 1, 10, … steps."""
    found = {}
    for (name, some), (other, others) in itertools.combinations(losses.items(), 2):
        steps = [abs(a - b) / abs(b) for a, b in zip(some, others, strict=False)]
        ends = [n for n in (1, 10, TRACED) if n <= len(steps)]
        found[f"{name}, {other}"] = {str(n): max(steps[:n]) for n in ends}
    return found


def exact(epochs: Sequence[Sequence[Rooms]], device: torch.device) -> list[float]:
    """Losses of the first steps in float64."""
    given = [batch for batches in epochs for batch in batches]
    package = PACKAGES["torchweft"]
    run = run_of(package, network(package, torch.float64).to(device), len(given))
    epoch(run, [batch.to(device, torch.float64) for batch in given[:TRACED]])
    return run.losses


def main() -> None:
    """Both networks, an epoch in turn, then float64."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rooms", type=int, default=160, help="a third as many are held out")
    parser.add_argument("--out", type=Path, help="default: results/<gpu>/train_segmentation.json")
    options = parser.parse_args()
    device = torch.device(options.device)
    path = options.out or FOLDER / "results" / machine(device).folder / "train_segmentation.json"
    found = measured(device, options.epochs, options.rooms) | asdict(machine(device))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measured(device: torch.device, epochs: int, rooms: int) -> dict[str, Any]:
    """What goes to the file, but the machine."""
    torch.set_float32_matmul_precision("highest")
    drawn = segmentation.rooms(rooms, seed=0)
    held_out = [
        room.to(device, torch.float32) for room in segmentation.rooms(rooms // 3, seed=HELD_OUT)
    ]
    orders = _orders(drawn, epochs, device)
    runs = _trained(orders, device)
    losses = {name: run.losses[:TRACED] for name, run in runs.items()}
    losses[EXACT] = exact(orders, device)
    labels = torch.cat([room.labels for room in held_out])
    often = torch.cat([room.labels for room in drawn]).bincount().argmax().to(labels)
    results = {name: predicted(run.package, run.model, held_out) for name, run in runs.items()}
    held = {name: scored(result, labels) for name, result in results.items()}
    held["most frequent class"] = scored(often.expand_as(labels), labels)
    print(json.dumps({"held_out": held}), flush=True)
    steps = len(orders[0])
    later = {name: run.seconds[1:] or run.seconds for name, run in runs.items()}
    times = {
        "ms_a_step": {n: 1e3 * statistics.median(s) / steps for n, s in later.items()},
        "training_s": {name: sum(run.seconds) for name, run in runs.items()},
    }
    return times | {
        "suite": "segmentation", "network": f"MinkUNet{LAYERS}", "width": WIDTH,
        "parameters": sum(p.numel() for p in runs["torchweft"].model.parameters()),
        "rooms": rooms, "held_out_rooms": len(held_out), "held_out_voxels": len(labels),
        "voxels_a_room": statistics.mean(len(room.labels) for room in drawn),
        "threads": torch.get_num_threads(),
        "batch": BATCH, "rate": RATE, "weight_decay": DECAY, "steps": epochs * steps,
        "losses": losses, "differences": differences(losses),
        "last_loss": {n: statistics.mean(run.losses[-steps:]) for n, run in runs.items()},
        "held_out": held, "exchanged": exchanged(runs, results, held_out, labels),
        "seconds": {name: run.seconds for name, run in runs.items()},
        "lead": {
            name: found["spconv"] / found["torchweft"]
            for name, found in times.items() if "spconv" in found
        },
    }  # fmt: skip


def exchanged(
    runs: dict[str, Run], results: dict[str, Tensor], held_out: Sequence[Rooms], labels: Tensor
) -> dict[str, dict[str, float]]:
    """Trained weights loaded into the other library: scores, and share of equal predictions."""
    found = {}
    for (name, run), (other, to) in itertools.permutations(runs.items(), 2):
        model = copy.deepcopy(to.model)
        model.load_state_dict(run.model.state_dict())
        result = predicted(to.package, model, held_out)
        same = float((result == results[name]).double().mean())
        found[f"{name} in {other}"] = scored(result, labels) | {"same": same}
    return found


def _smooth(model: nn.Module) -> nn.Module:
    for name, child in model.named_children():
        setattr(model, name, nn.SiLU() if isinstance(child, nn.ReLU) else _smooth(child))
    return model


def _trained(orders: Sequence[Sequence[Rooms]], device: torch.device) -> dict[str, Run]:
    """The networks that this device can train, from the weights of the first."""
    runs: dict[str, Run] = {}
    for name, package in PACKAGES.items():
        if name == "spconv" and (device.type == "cpu" or not importlib.util.find_spec(name)):
            print(f"{name} is left out: it trains on a GPU, where it is installed", flush=True)
            continue
        model = network(package).to(device)
        for first in runs.values():
            model.load_state_dict(first.model.state_dict())
        runs[name] = run_of(package, model, sum(map(len, orders)))
    for number, given in enumerate(orders):
        for run in runs.values():
            epoch(run, given)
        shown = {
            "epoch": number,
            "loss": {n: statistics.mean(run.losses[-len(given) :]) for n, run in runs.items()},
            "seconds": {name: sum(run.seconds) for name, run in runs.items()},
        }
        print(json.dumps(shown), flush=True)
    return runs


def _orders(drawn: Sequence[Rooms], epochs: int, device: torch.device) -> list[list[Rooms]]:
    """Batches of each epoch, of rooms in another order."""
    order = random.Random(0)
    drawn = [room.to(device, torch.float32) for room in drawn]
    found = []
    for _ in range(epochs):
        shuffled = order.sample(drawn, len(drawn))
        pieces = [shuffled[n : n + BATCH] for n in range(0, len(shuffled), BATCH)]
        found.append([segmentation.join(piece) for piece in pieces])
    return found


if __name__ == "__main__":
    main()
