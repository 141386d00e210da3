"""Programs on all ranks of a run: `torchrun --nproc-per-node 2 -m benchmarks.several_gpus`.

Run it with 1, 2, 4 processes on one machine; each appends its rows to one file, and
`python -m benchmarks.several_gpus --table` prints the efficiencies of that file:

    strong   one problem over W ranks: t(1) / (W t(W))
    weak     W times the problem:      t(1) / t(W)

A row has of a call

    ms         median wall time, on the slowest rank
    nccl_ms    kernels of NCCL, on the rank that has least of them: others wait for that one
    busy_ms    time in which other kernels and copies run, of the rank that has most
    peak_mb    memory, of the fullest rank
    sm_mhz     the least clock of the SMs while it is repeated, the median of the ranks; left out
               where nvidia-smi does not tell

so that ms − busy_ms − nccl_ms is waiting, or time of the host.  `seconds` is that of the whole
program, with what it builds.

The first call compiles.  Long programs have a smaller problem for it, which compiles the same
kernels: calls of more than LONG seconds are then made once, with the profiler on.  Others are made
twice, for all that compiles late, and timed FEW times if they take more than SLOW seconds, else
REPEATS times; then the profiler watches one.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import torchweft
from benchmarks.harness.clock import sm_clock
from benchmarks.harness.programs import ranks_table
from benchmarks.harness.record import machine
from benchmarks.harness.timer import busy_us, events_on_gpu
from benchmarks.workloads.clouds import sphere
from benchmarks.workloads.potential import (
    TABLE,
    Structures,
    as_given,
    mace_model,
    structures_of,
)
from benchmarks.workloads.voxels_unet import CLASSES, FEATURES, lowered
from examples.voxels.plot_minkunet import MinkUNet
from torchweft import o3
from torchweft.core.collectives import largest, total, world
from torchweft.distributed import all_pairs, potential, shard, shard_voxels
from torchweft.distributed.agreement import numbers_of_ranks
from torchweft.errors import BackendError
from torchweft.progress import say
from torchweft.reductions import SamplesLoss, Vi, Vj, nearest
from torchweft.voxels import SparseTensor, padded_sizes, prepare

FILE = Path(__file__).parent / "results"
NAME = "several_gpus.jsonl"
REPEATS, FEW = 5, 3
RECORDED = 3  # calls of a captured function until it is replayed
SLOW, LONG = 1.0, 2.0  # seconds of a call
SAMPLED = 1.0  # seconds of calls for samples of the clock
BLUR, NEIGHBOURS = 0.05, 10
ELEMENTS = (8, 14)
ROOM, NO_LABEL = 1.1, -100

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
    first: Callable[[Part], Call] | None = None  # a smaller problem with the same kernels


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


def crystal(side: int, kind: str, training: bool, recorded: bool, part: Part) -> Call:
    """MACE's forces of a shaken crystal of 8 · side³ atoms (a rank), or a training step.

    recorded: the call is replayed as a CUDA graph, with its exchanges.  The edges stay the same.
    """
    given = _given((side * part.size if kind == "weak" else side, side, side))
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
    data["edge_index"] = torchweft.constant(data["edge_index"])
    halo = own._replace(
        global_ids=own.global_ids.to(part.device), needed=own.needed.to(part.device)
    ).halo()
    model = _potential(part.device).requires_grad_(training)

    def call(positions: Tensor) -> Tensor:
        leaf = positions.detach().requires_grad_()
        found = potential(model, data | {"positions": leaf}, halo, training=training)
        if not training:
            return found["forces"]
        model.zero_grad()
        squares = total(found["forces"].square().sum())
        (found["energy"].square().sum() + squares).backward()
        return _summed_gradients(model)

    run = torchweft.capture(call, data["positions"]) if recorded else call
    of_given = functools.partial(run, data["positions"])
    return _recorded(of_given) if recorded else of_given


def _summed_gradients(model: nn.Module) -> Tensor:
    """One vector of all weights' gradients, summed over the ranks."""
    weights = [p.grad for p in model.parameters() if p.grad is not None]
    joined = torch.cat([w.flatten() for w in weights])
    if world()[1] > 1:
        distributed.all_reduce(joined)
    return joined


@functools.cache
def _potential(device: torch.device) -> nn.Module:
    return o3.from_mace(copy.deepcopy(mace_model(TABLE, ELEMENTS)).float().to(device))


@functools.lru_cache(maxsize=2)  # forces and training: a rank's share of one, and all of another
def _given(cells: tuple[int, int, int]) -> dict[str, Tensor]:
    """What MACE takes of a shaken crystal, on the host."""
    (atoms,) = structures_of(Structures(side=1))
    atoms = atoms.repeat(cells)
    atoms.rattle(0.1, seed=0)
    return as_given([atoms], ELEMENTS, torch.device("cpu"))


def scene(resolution: int, sharded: bool, recorded: bool, part: Part) -> Call:
    """A training step of MinkUNet42: of one scene over all ranks, or of a scene on each.

    Its batch norms are SparseBatchNorm, which takes statistics over the voxels of all ranks.
    recorded: the call is replayed as a CUDA graph, with its exchanges.  The voxels and maps of one
    scene stay; those of a scene on each rank are copied to where there is room for others.
    """
    torch.manual_seed(0)
    dtype = torch.float16 if part.device.type == "cuda" else torch.float32
    model: nn.Module = lowered(MinkUNet(FEATURES, CLASSES, 42), dtype).to(part.device).train()
    generator = torch.Generator().manual_seed(0 if sharded else part.rank)
    coords, shape = sphere(resolution)
    coords = torch.cat([torch.zeros_like(coords[:, :1]), coords], 1).to(part.device)
    feats = torch.randn(len(coords), FEATURES, generator=generator).to(part.device, dtype)
    if not (sharded or recorded) and part.size > 1:
        ids = [part.device.index] if part.device.type == "cuda" else None
        options = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
        model = DistributedDataParallel(model, device_ids=ids, **options)

    def cloud() -> SparseTensor:
        made = SparseTensor(feats, coords, shape, 1)
        return shard_voxels(made, part.rank, part.size) if sharded else made

    def step(tensor: SparseTensor, labels: Tensor) -> Tensor | None:
        model.zero_grad(set_to_none=True)
        scores = model(tensor).feats.float()
        cross_entropy(scores, labels, ignore_index=NO_LABEL).backward()
        return _summed_gradients(model) if sharded or recorded else None

    kept = cloud()
    labels = torch.arange(len(kept), device=part.device) % CLASSES
    if recorded and sharded:
        run = torchweft.capture(lambda feats: step(kept.replace(feats), labels), kept.feats)
        return _recorded(functools.partial(run, kept.feats))
    if recorded:
        sizes = padded_sizes(prepare(model, kept), ROOM, labels=NO_LABEL)
        step = torchweft.capture(step, kept, labels, sizes=sizes)
        return _recorded(lambda: step(prepare(model, cloud(), tables_only=True), labels))
    return lambda: step(cloud(), labels)


def _recorded(call: Call) -> Call:
    """A captured call after those that are not replayed."""
    for _ in range(RECORDED):
        call()
    return call


def cases(small: bool) -> list[Case]:
    """All programs; small: at sizes for a test."""
    million = 200 if small else 1_000_000
    resolution, cells = (32, 1) if small else (512, 16)

    def pairs(name: str, program: Callable[..., Call], first: int, count: int, *more: bool) -> Case:
        """A program of points, and its first call of fewer."""
        of = {n: functools.partial(program, n, *more) for n in (first, count)}
        return Case(name, "strong", of[count], of[first] if first < count else None)

    made = [
        pairs(f"gaussian sum {n}m{name}", gaussian, million, n * million, wanted)
        for n in (1, 4)
        for name, wanted in (("", False), (" with gradients", True))
    ]
    made += [
        pairs("nearest 1m", neighbours, million, million),
        pairs("sinkhorn 1m", transport, million // 4, million),
        pairs("gaussian sum 10m", gaussian, million, 10 * million, False),
    ]
    for name, *how in (
        ("forces", False, False), ("forces captured", False, True),
        ("training", True, False), ("training captured", True, True),
    ):  # fmt: skip
        for kind, side in (("weak", cells), ("strong", 2 * cells)):
            made.append(Case(f"mace {name}", kind, functools.partial(crystal, side, kind, *how)))
    one_scene = functools.partial(scene, 2 * resolution, True)
    return [
        *made,
        Case("minkunet scenes", "weak", functools.partial(scene, resolution, False, False)),
        Case("minkunet scenes captured", "weak", functools.partial(scene, resolution, False, True)),
        Case("minkunet one scene", "strong", functools.partial(one_scene, False)),
        Case("minkunet one scene captured", "strong", functools.partial(one_scene, True)),
    ]


class Profile(NamedTuple):
    """A call that the profiler watched."""

    seconds: float
    nccl_ms: float = 0.0
    busy_ms: float = 0.0


def measured(case: Case, call: Call, part: Part, least: Callable[[float], int]) -> dict[str, float]:
    """What a row says of a case's call; `least` is of `sm_clock`."""
    on_gpu = part.device.type == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None

    def seconds() -> float:
        wait()
        largest(torch.zeros(1))  # the hosts meet, without a kernel of NCCL
        begin = time.perf_counter()
        call()
        wait()
        return time.perf_counter() - begin

    def profiled() -> Profile:
        return _profiled(seconds) if on_gpu else Profile(seconds())

    (call if case.first is None else case.first(part))()
    begin, seen = time.perf_counter(), profiled()
    times = [seen.seconds]
    if case.first is None or _largest(seen.seconds) < LONG:
        begin, times = time.perf_counter(), [seconds()]
        count = FEW if _largest(times[0]) > SLOW else REPEATS
        times += [seconds() for _ in range(count - 1)]
        seen = profiled()
    ms = _largest(1000 * statistics.median(times))
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else 0.0
    for _ in range(math.ceil(1000 * SAMPLED / ms) if on_gpu and ms < 1000 * SAMPLED else 0):
        call()
    wait()
    clocks = [mhz for (mhz,) in numbers_of_ranks([least(begin)])]
    return {
        "ms": ms,
        "peak_mb": _largest(peak),
        "nccl_ms": -_largest(-seen.nccl_ms),
        "busy_ms": _largest(seen.busy_ms),
    } | ({"sm_mhz": statistics.median(clocks)} if all(clocks) else {})


def _largest(number: float) -> float:
    """Of all ranks."""
    return largest(torch.tensor([number], dtype=torch.float64)).item()


def _profiled(seconds: Callable[[], float]) -> Profile:
    found: list[float] = []
    events = events_on_gpu(lambda: found.append(seconds()))
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in events:
        span = event.time_range.start, event.time_range.end
        spans["nccl" in event.name.lower()].append(span)
    return Profile(found[0], *(busy_us(spans[of_nccl]) / 1000 for of_nccl in (True, False)))


def run(options: argparse.Namespace) -> None:
    """Measure on this rank; the first one writes."""
    gpus = torch.cuda.is_available()
    distributed.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    rank, size = world()
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))  # crystals are built on hosts
    here, part = asdict(machine(device)), Part(rank, size, device)
    with sm_clock(device) as least:
        for case in cases(options.small):
            if not re.search(options.case, case.name):
                continue
            begin = time.perf_counter()
            found = _found(case, part, least)
            if found is None or rank:
                continue
            found["seconds"] = time.perf_counter() - begin
            row = {"case": case.name, "kind": case.kind, "ranks": size} | found | here
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            say(json.dumps(row))
    distributed.destroy_process_group()


def _found(case: Case, part: Part, least: Callable[[float], int]) -> dict[str, float] | None:
    """What is measured; None where a library is absent or memory is short."""
    if part.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        return measured(case, case.build(part), part, least)
    except BackendError as error:  # a model of a library that no rank has
        say(f"{case.name}: left out, {error}")
        return None
    except torch.OutOfMemoryError as error:  # one of several ranks cannot go on alone
        if part.size > 1:
            raise
        say(f"{case.name} ({case.kind}): left out, {error}")
        return None


def main() -> None:
    """Measure, or print a table of what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", default="", help="only programs with this in their name, a regex")
    parser.add_argument("--small", action="store_true", help="at sizes for a test")
    parser.add_argument("--table", action="store_true", help="print what the file has")
    parser.add_argument("--out", type=Path, default=FILE / NAME, help="file of rows")
    options = parser.parse_args()
    if options.table:
        rows = [json.loads(line) for line in options.out.read_text().splitlines()]
        for gpu in dict.fromkeys(row["gpu"] for row in rows):
            print(f"{gpu}\n\n{ranks_table([row for row in rows if row['gpu'] == gpu])}")
    else:
        run(options)


if __name__ == "__main__":
    main()
