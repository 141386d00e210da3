"""Programs on all ranks of a run: `torchrun --nproc-per-node 2 -m benchmarks.several_gpus`.

Run it with 1, 2, 4 processes on one machine; each appends its rows to one file, and
`python -m benchmarks.several_gpus --table` prints the efficiencies of that file:

    strong   one problem over W ranks: t(1) / (W t(W))
    weak     W times the problem:      t(1) / t(W)

A row has the median wall time of a call on the slowest rank, the largest peak of memory, and of one
call the time in kernels of NCCL, on the rank that has least of it: others wait for that one.  Calls
of more than LONG seconds are measured once, after one, with the profiler on.  The first compiles,
so the second tells which these are.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.programs import ranks_table
from benchmarks.harness.record import machine
from benchmarks.workloads.clouds import sphere
from benchmarks.workloads.potential import (
    TABLE,
    Structures,
    as_given,
    mace_model,
    structures_of,
)
from benchmarks.workloads.voxels_unet import CLASSES, FEATURES, lowered
from examples.minkunet import MinkUNet
from torchweft import o3
from torchweft.core.collectives import largest, total, world
from torchweft.distributed import all_pairs, potential, shard, shard_voxels
from torchweft.errors import BackendError
from torchweft.progress import say
from torchweft.reductions import SamplesLoss, Vi, Vj, nearest
from torchweft.voxels import SparseTensor

FILE = Path(__file__).parent / "results"
NAME = "several_gpus.jsonl"
REPEATS = 5
LONG = 5.0
BLUR, NEIGHBOURS = 0.05, 10
ELEMENTS = (8, 14)

Call = Callable[[], object]


class Part(NamedTuple):
    """A rank's part of a problem."""

    rank: int
    size: int
    device: torch.device

    def rows(self, x: Tensor) -> Tensor:
        """This rank's rows of what is the same on every rank."""
        return x.tensor_split(self.size)[self.rank].to(self.device)

    def points(self, count: int, seed: int = 0) -> Tensor:
        """This rank's share of uniform points in the unit cube."""
        generator = torch.Generator().manual_seed(seed)
        return self.rows(torch.rand(count, 3, generator=generator))


class Case(NamedTuple):
    """A program that every rank runs."""

    name: str
    kind: str  # strong or weak
    build: Callable[[Part], Call]


def gaussian(count: int, gradients: bool, part: Part) -> Call:
    """Σ_j exp(−|x_i − y_j|² / (2 blur²)) b_j, and its gradients by x, y and b."""
    x, y, b = (part.points(count, seed) / BLUR for seed in range(3))
    leaves = [t.requires_grad_(gradients) for t in (x, y, b[:, :1].contiguous())]

    def call() -> None:
        with all_pairs():
            z = (-Vi(leaves[0]).sqdist(Vj(leaves[1])) / 2).exp() @ leaves[2]
        if gradients:
            torch.autograd.grad(z.square().sum(), leaves)

    return call


def neighbours(count: int, part: Part) -> Call:
    """The nearest of as many points for each."""
    x, y = (part.points(count, seed) for seed in range(2))

    def call() -> None:
        with all_pairs():
            nearest(x, y, NEIGHBOURS)

    return call


def transport(count: int, part: Part) -> Call:
    """Sinkhorn's divergence, and its gradient by x."""
    x, y = (part.points(count, seed) for seed in range(2))
    loss, leaf = SamplesLoss("sinkhorn", blur=BLUR, backend="online"), x.requires_grad_()

    def call() -> None:
        with all_pairs():
            torch.autograd.grad(loss(leaf, y), leaf)

    return call


def crystal(side: int, training: bool, weak: bool, part: Part) -> Call:
    """MACE's forces of a shaken crystal of 8 · side³ atoms (a rank), or a training step."""
    given = _given((side * part.size if weak else side, side, side))
    src, dst = given["edge_index"]
    own = shard(src, dst, len(given["batch"]), part.rank, part.size, given["positions"])
    rows = {n: given[n][own.global_ids] for n in ("positions", "node_attrs", "batch")}
    edges = {n: given[n][own.edges] for n in ("shifts", "unit_shifts")}
    tables = {"edge_index": torch.stack([own.src, own.dst])}
    data = {
        name: value.to(part.device, torch.float32 if value.is_floating_point() else None)
        for name, value in (given | rows | edges | tables).items()
    }
    data["ptr"] = torch.tensor([0, len(own.global_ids)], device=part.device)
    halo = own._replace(
        global_ids=own.global_ids.to(part.device), needed=own.needed.to(part.device)
    ).halo()
    model = o3.from_mace(copy.deepcopy(mace_model(TABLE, ELEMENTS)).float().to(part.device))
    model.requires_grad_(training)

    def call() -> None:
        leaf = data["positions"].detach().requires_grad_()
        found = potential(model, data | {"positions": leaf}, halo, training=training)
        if training:
            model.zero_grad()
            squares = total(found["forces"].square().sum())
            (found["energy"].square().sum() + squares).backward()
            weights = [p.grad for p in model.parameters() if p.grad is not None]
            joined = torch.cat([w.flatten() for w in weights])
            if part.size > 1:
                distributed.all_reduce(joined)

    return call


@functools.lru_cache(maxsize=2)  # forces and training: a rank's share of one, and all of another
def _given(cells: tuple[int, int, int]) -> dict[str, Tensor]:
    """What MACE takes of a shaken crystal, on the host."""
    (atoms,) = structures_of(Structures(side=1))
    atoms = atoms.repeat(cells)
    atoms.rattle(0.1, seed=0)
    return as_given([atoms], ELEMENTS, torch.device("cpu"))


def scene(resolution: int, sharded: bool, part: Part) -> Call:
    """A training step of MinkUNet42: of one scene over all ranks, or of a scene on each."""
    torch.manual_seed(0)
    dtype = torch.float16 if part.device.type == "cuda" else torch.float32
    model: nn.Module = lowered(MinkUNet(FEATURES, CLASSES, 42), dtype).to(part.device).train()
    generator = torch.Generator().manual_seed(0 if sharded else part.rank)
    coords, shape = sphere(resolution)
    coords = torch.cat([torch.zeros_like(coords[:, :1]), coords], 1).to(part.device)
    feats = torch.randn(len(coords), FEATURES, generator=generator).to(part.device, dtype)
    if not sharded and part.size > 1:
        ids = [part.device.index] if part.device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=ids)

    def call() -> None:
        cloud = SparseTensor(feats, coords, shape, 1)
        if sharded:
            cloud = shard_voxels(cloud, part.rank, part.size)
        model.zero_grad(set_to_none=True)
        model(cloud).feats.float().square().mean().backward()
        if sharded and part.size > 1:
            for parameter in model.parameters():
                distributed.all_reduce(parameter.grad)

    return call


def cases(small: bool) -> list[Case]:
    """All programs; small: at sizes for a test."""
    million = 200 if small else 1_000_000
    resolution, cells = (32, 1) if small else (512, 16)
    made = [
        Case(f"gaussian sum {n}m{name}", "strong", functools.partial(gaussian, n * million, wanted))
        for n in (1, 4)
        for name, wanted in (("", False), (" with gradients", True))
    ]
    made += [
        Case("nearest 1m", "strong", functools.partial(neighbours, million)),
        Case("sinkhorn 1m", "strong", functools.partial(transport, million)),
        Case("gaussian sum 10m", "strong", functools.partial(gaussian, 10 * million, False)),
    ]
    for name, training in (("forces", False), ("training", True)):
        made += [
            Case(f"mace {name}", "weak", functools.partial(crystal, cells, training, True)),
            Case(f"mace {name}", "strong", functools.partial(crystal, 2 * cells, training, False)),
        ]
    return [
        *made,
        Case("minkunet scenes", "weak", functools.partial(scene, resolution, False)),
        Case("minkunet one scene", "strong", functools.partial(scene, 2 * resolution, True)),
    ]


def measured(call: Call, part: Part) -> dict[str, float]:
    """Of the slowest rank, in milliseconds; the median of some calls after one."""
    on_gpu = part.device.type == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None

    def seconds() -> float:
        begin = time.perf_counter()
        call()
        wait()
        return time.perf_counter() - begin

    def profiled() -> tuple[float, float]:
        return _in_nccl(seconds) if on_gpu else (seconds(), 0.0)

    first = seconds()
    second, in_nccl = profiled()
    times = [second]
    long = second > max(LONG, first / 2)  # else it compiled too
    if not largest(torch.tensor([float(long)], device=part.device)).item():
        times = []
        for _ in range(REPEATS):
            if part.size > 1:
                distributed.barrier()
            wait()
            times.append(seconds())
        _, in_nccl = profiled()
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else 0.0
    found = torch.tensor([1000 * statistics.median(times), peak, -in_nccl], device=part.device)
    slowest, peak, least = largest(found).tolist()
    return {"ms": slowest, "peak_mb": peak, "nccl_ms": -least}


def _in_nccl(seconds: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a call that waits for its kernels, and its milliseconds in kernels of NCCL."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        whole = seconds()
    events = [event for event in profile.events() if "nccl" in event.name.lower()]
    return whole, sum(event.device_time for event in events) / 1000


def run(options: argparse.Namespace) -> None:
    """Measure on this rank; the first one writes."""
    distributed.init_process_group()
    rank, size = world()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    here, part = asdict(machine(device)), Part(rank, size, device)
    for case in cases(options.small):
        if options.case and options.case not in case.name:
            continue
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            call = case.build(part)
        except BackendError as error:  # a model of a library that no rank has
            say(f"{case.name}: left out, {error}")
            continue
        try:
            found = measured(call, part)
        except torch.OutOfMemoryError as error:  # one of several ranks cannot go on alone
            if size > 1:
                raise
            say(f"{case.name} ({case.kind}): left out, {error}")
            continue
        row = {"case": case.name, "kind": case.kind, "ranks": size} | found | here
        if rank == 0:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            say(json.dumps(row))
    distributed.destroy_process_group()


def main() -> None:
    """Measure, or print a table of what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help="only programs with this in their name")
    parser.add_argument("--small", action="store_true", help="at sizes for a test")
    parser.add_argument("--table", action="store_true", help="print what the file has")
    parser.add_argument("--out", type=Path, default=FILE / NAME, help="file of rows")
    options = parser.parse_args()
    if options.table:
        print(ranks_table([json.loads(line) for line in options.out.read_text().splitlines()]))
    else:
        run(options)


if __name__ == "__main__":
    main()
