"""Foretell charged bodies: the field's n-body comparison, with CEGNN's network and recipe
=======================================================================================

``python examples/nbody.py --out nbody.json``

Five charged bodies attract and repel each other; from frame 30 of a simulation the network
foretells frame 40.  Data: the comparison's own 3000 + 2000 + 2000 systems (Satorras et al. 2021),
simulated here.  Network and training: Ruhe et al. 2023, 131072 steps of 100 systems; published: a
mean squared error of 0.0039.

On a GPU a step is one CUDA graph, which finds its batch and its learning rate by itself.  The same
network on the dense Cayley table, in plain torch, is timed in the same run.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch

import torchweft
from torchweft.demo.measure import machine, versions
from torchweft.demo.models.forecaster import (
    DenseForecaster,
    Forecaster,
    Starts,
    complete_graphs,
    simulate,
    starts,
    systems_of,
)
from torchweft.progress import track

BATCH = 100
RATE, LAST_RATE, DECAY = 4e-3, 1e-7, 1e-4
DATA_SEED = 43
SPLITS = {"train": (0, 3000), "valid": (10000, 12000), "test": (12000, 14000)}
CHECKS = 32  # looks at the validation systems
TIMED = {"cuda": 200, "cpu": 3}  # steps


def load(most, device):
    """The systems of each split, at most `most`: simulated in float64, learned from in float32."""
    drawn = starts(max(end for _, end in SPLITS.values()), DATA_SEED)
    found = {}
    for name, (begin, end) in SPLITS.items():
        rows = slice(begin, min(end, begin + most))
        start = Starts(*(t[..., rows].contiguous().to(device) for t in drawn))
        found[name] = systems_of(simulate(start, frames=41)).to(device, torch.float32)
    return found


def rates(steps):
    """The learning rate of each step: a cosine up for a 64th, and one down in the last quarter."""
    up, down = steps // 64, steps // 4
    part = torch.arange(steps, dtype=torch.float64)
    rise = (part / max(up, 1)).clamp(max=1)
    fall = ((part - (steps - down)) / max(down, 1)).clamp(min=0)
    height = (1 - torch.cos(math.pi * rise)) / 2 * (1 + torch.cos(math.pi * fall)) / 2
    return (LAST_RATE + (RATE - LAST_RATE) * height).float()


def batches(steps, systems, size):
    """(steps, size) rows: every epoch a new order, the incomplete last batch left out."""
    generator = torch.Generator().manual_seed(0)
    an_epoch = systems // size
    epochs = [
        torch.randperm(systems, generator=generator)[: an_epoch * size]
        for _ in range(-(-steps // an_epoch))
    ]
    return torch.cat(epochs).view(-1, size)[:steps]


class Training:
    """Adam on the squared error.  All that a step reads is on the device, also which step it is."""

    def __init__(self, network, systems, steps):
        device = systems.charge.device
        size = min(BATCH, len(systems.charge))
        self.network, self.systems, self.steps = network, systems, steps
        self.rows = batches(steps, len(systems.charge), size).to(device)
        self.rates = rates(steps).to(device)
        self.plan = complete_graphs(size, systems.charge.shape[1]).to(device)
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        self.rate = torch.zeros((), device=device)
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.Adam(
            network.parameters(), lr=self.rate, weight_decay=DECAY, capturable=on_gpu, fused=on_gpu
        )

    def step(self):
        """One step, forward, backward and update."""
        self.rate.copy_(self.rates.index_select(0, self.number).squeeze(0))
        batch = self.systems.of(self.rows.index_select(0, self.number).squeeze(0))
        self.optimizer.zero_grad()
        loss = (self.network(batch, self.plan) - batch.target).square().mean()
        loss.backward()
        self.optimizer.step()
        self.number += 1

    def start(self):
        """How to take a step: itself, or on a GPU a graph of it.  Three steps are taken for it."""
        if self.number.device.type != "cuda":
            return self.step
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles kernels, builds plans
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay


def error(network, systems):
    """Mean squared error of all coordinates."""
    plan = complete_graphs(*systems.charge.shape).to(systems.charge.device)
    with torch.no_grad():
        return float((network(systems, plan) - systems.target).square().mean())


def synchronize(device):
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(step, count, device):
    """The mean time of some steps, after one."""
    step()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return 1e3 * (time.perf_counter() - begin) / count


def compare(data, device):
    """Milliseconds a step of the same network in torchweft and on the dense table, in this run."""
    count = TIMED[device.type]
    found = {}
    for name in ("torchweft", "einsum"):
        torch.manual_seed(0)
        model = Forecaster().to(device)
        network = model if name == "torchweft" else DenseForecaster(model)
        training = Training(network, data["train"], steps=2 * count + 16)
        found[f"{name}, eager"] = milliseconds(training.step, count // 2 + 1, device)
        if device.type == "cuda":
            found[f"{name}, CUDA graph"] = milliseconds(training.start(), count, device)
    return found


def learn(model, data, steps, device):
    """Train; the curve of (step, validation error, test error), and the seconds it took."""
    training = Training(model, data["train"], steps)
    step = training.start()
    done = int(training.number)
    ends = [round(done + (steps - done) * (i + 1) / CHECKS) for i in range(CHECKS)]
    curve, seconds = [], 0.0
    for end in track(sorted(set(ends)), "learning"):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(end - done):
            step()
        synchronize(device)
        seconds += time.perf_counter() - begin
        done = end
        curve.append((end, error(model, data["valid"]), error(model, data["test"])))
        print("step {:6d}  valid {:.5f}  test {:.5f}".format(*curve[-1]), flush=True)
    return curve, seconds


def main():
    """Read the arguments, train, write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=131072)
    parser.add_argument("--systems", type=int, default=3000, help="to learn from, at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("nbody.json"))
    options = parser.parse_args()
    device = torch.device(options.device)

    begin = time.perf_counter()
    data = load(options.systems, device)
    simulated = time.perf_counter() - begin
    times = compare(data, device)
    torch.manual_seed(0)
    model = Forecaster().to(device)
    curve, seconds = learn(model, data, options.steps, device)
    _, _, best = min(curve, key=lambda point: point[1])
    found = {
        "test_mse": best,  # where the validation error is least, as published
        "test_mse_last": curve[-1][2],
        "steps": options.steps,
        "training_seconds": seconds,
        "simulation_seconds": simulated,
        "seconds": time.perf_counter() - begin,
        "ms_a_step": times,
        "parameters": sum(p.numel() for p in model.parameters()),
        "machine": machine(device),
        "versions": f"torchweft {torchweft.__version__}, {versions()}",
        "curve": curve,
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in found.items() if k != "curve"}, indent=1))


if __name__ == "__main__":
    main()
