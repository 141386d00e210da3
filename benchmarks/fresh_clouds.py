"""Networks on fresh clouds, on a GPU: `TORCHWEFT_LIDAR=FILE python -m benchmarks.fresh_clouds`.

For each network and program the median wall time in milliseconds of a call

    fresh       on a cloud that the network has not seen, whose maps it builds
    padded      with the maps built before a CUDA graph that has room for other clouds
    kept        on a cloud whose maps are kept
    captured    on that cloud, as a CUDA graph

and of the same network in the layers of spconv and of spconv-triton, where they are installed, with
the same weights on fresh clouds.  Fresh clouds differ in their first few voxels.  The four take
turns, so that other load on the host is on all of them.  Of one fresh inference also the kernels on
the GPU, and how often the host waits for what kernels write into its memory, or where torch waits;
of each peer the largest difference of its scores, over the largest score.

Ours are measured before a peer is imported.  spconv-triton tunes its kernels at the first calls,
four minutes and more a network: `--peers spconv` is without it.  SpUNet is written in spconv's
layers, for which `torchweft.compat` stands.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchweft
from benchmarks.harness.record import machine
from benchmarks.harness.timer import events_on_gpu
from benchmarks.peers.spconv_unet import converted
from benchmarks.workloads.clouds import CLOUDS
from benchmarks.workloads.spunet import spunet
from benchmarks.workloads.voxels_unet import CLASSES, FEATURES, lowered
from examples.voxels.plot_minkunet import MinkUNet
from torchweft.capturing.graphs import waiting_raises
from torchweft.voxels import SparseTensor, padded_sizes, prepare
from torchweft.voxels.maps.gpu.tiles import Flags

WARM, REPEATS = 5, 30
ROOM = 1.25
LEFT_OUT = (0, 64, 128, 32)
"""Voxels that fresh clouds lack, in turn."""

STAND_IN = "torchweft.compat.spconv"
PEERS = {"spconv": "spconv", "spconv-triton": "spconv_triton"}

Call = Callable[[Any, Tensor], Tensor]
"""Of a cloud and its labels."""


class Given(NamedTuple):
    """What networks read.

    Args:
        feats: (N, FEATURES) float32.
        coords: (N, 4) int32.
        shape: of the box.
        labels: (N,).
    """

    feats: Tensor
    coords: Tensor
    shape: tuple[int, ...]
    labels: Tensor

    def without(self, count: int) -> Given:
        """The same without the first voxels."""
        rows = (t[count:] for t in (self.feats, self.coords))
        return Given(*rows, self.shape, self.labels[count:])


class Subject(NamedTuple):
    """A network in the layers of one library, and a fresh cloud of it."""

    network: nn.Module
    cloud: Callable[[Given], Any]


class Network(NamedTuple):
    """A network in our layers, in those of a package with spconv's names, and its programs."""

    half: bool
    ours: Callable[[], Subject]
    theirs: Callable[[nn.Module, str], Subject]
    programs: Mapping[str, Callable[[nn.Module], Call]]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cloud", default="lidar05", choices=CLOUDS)
    parser.add_argument("--network", default="", help="only networks with this in their name")
    parser.add_argument("--peers", nargs="*", default=[*PEERS], choices=PEERS)
    parser.add_argument("--out", type=Path, help="a file for what is found")
    options = parser.parse_args()
    voxels, shape = CLOUDS[options.cloud]()
    coords = torch.cat([torch.zeros_like(voxels[:, :1]), voxels], 1).int().cuda()
    feats = torch.randn(len(coords), FEATURES).cuda()
    labels = torch.randint(0, CLASSES, (len(coords),)).cuda()
    given = Given(feats, coords, tuple(shape), labels)
    chosen = {name: network for name, network in NETWORKS.items() if options.network in name}
    networks: dict[str, Any] = {}
    found = {"cloud": options.cloud, "voxels": len(coords), "peers": {}, "networks": networks}
    found |= asdict(machine(torch.device("cuda")))
    for name, network in chosen.items():
        print(name, flush=True)
        networks[name] = of_ours(network, given)
        _write(options.out, found)
    peers = [name for name in options.peers if importlib.util.find_spec(PEERS[name])]
    found["peers"] = {name: importlib.import_module(PEERS[name]).__version__ for name in peers}
    for peer in peers:
        for name, network in chosen.items():
            print(name, peer, flush=True)
            add_peer(networks[name], network, given, peer)
            _write(options.out, found)


def _write(out: Path | None, found: Mapping[str, Any]) -> None:
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


def of_ours(network: Network, given: Given) -> dict[str, Any]:
    """What a network's entry says of ours; times are printed too."""
    ours, given = made(network.ours, network, given)
    clouds = [given.without(count) for count in LEFT_OUT]
    kept, call = ours.cloud(given), inference(ours.network)
    prepare(ours.network, kept)
    fresh = on_fresh(ours, call, clouds)
    found: dict[str, Any] = {
        "kernels": {
            "fresh": kernels(fresh),
            "kept": kernels(lambda: call(kept, given.labels)),
        },
        "waits": waits(fresh),
        "difference": {},
        "ms": {"maps": milliseconds({"fresh": on_fresh(ours, prepared(ours), clouds)})},
    }
    for name, program in network.programs.items():
        ours.network.train(name != "forward")
        found["ms"][name] = by_ways(ours, kept, program(ours.network), clouds)
        print(name, found["ms"][name], flush=True)
    return found


def add_peer(found: dict[str, Any], network: Network, given: Given, peer: str) -> None:
    """Add a peer's times, which are printed too, and its difference from ours."""
    ours, given = made(network.ours, network, given)
    theirs, _ = made(lambda: network.theirs(ours.network, PEERS[peer]), network, given)
    found["difference"][peer] = difference(ours, theirs, given)
    clouds = [given.without(count) for count in LEFT_OUT]
    for name, program in network.programs.items():
        theirs.network.train(name != "forward")
        ms = milliseconds({peer: on_fresh(theirs, program(theirs.network), clouds)})
        found["ms"][name] |= ms
        print(name, ms, flush=True)


def made(make: Callable[[], Subject], network: Network, given: Given) -> tuple[Subject, Given]:
    """A subject in evaluation, always of the same weights, and what it reads."""
    torch.manual_seed(0)
    subject = make()
    subject.network.eval()
    return subject, given._replace(feats=given.feats.half()) if network.half else given


def by_ways(ours: Subject, kept: Any, call: Call, clouds: Sequence[Given]) -> dict[str, float]:
    """Milliseconds of a call of ours."""
    labels = clouds[0].labels
    recorded = torchweft.capture(call, kept, labels)
    sizes = padded_sizes(prepare(ours.network, ours.cloud(clouds[0])), ROOM, labels=-100)
    padded = torchweft.capture(call, kept, labels, sizes=sizes)
    ready = prepared(ours, tables_only=True)

    def replayed(tensor: Any, labels: Tensor) -> Tensor:
        return padded(ready(tensor, labels), labels)

    return milliseconds(
        {
            "fresh": on_fresh(ours, call, clouds),
            "padded": on_fresh(ours, replayed, clouds),
            "kept": lambda: call(kept, labels),
            "captured": lambda: recorded(kept, labels),
        }
    )


def on_fresh(
    subject: Subject, call: Callable[[Any, Tensor], Any], clouds: Sequence[Given]
) -> Callable[[], Any]:
    """A call on one cloud after the other, none of which the network has seen."""
    turns = itertools.cycle(clouds)

    def fresh() -> Any:
        given = next(turns)
        return call(subject.cloud(given), given.labels)

    return fresh


def prepared(subject: Subject, tables_only: bool = False) -> Callable[[Any, Tensor], Any]:
    """A cloud with its maps."""
    return lambda tensor, _: prepare(subject.network, tensor, tables_only=tables_only)


def difference(ours: Subject, other: Subject, given: Given) -> float:
    """The largest of two networks' scores, over the largest of ours."""
    a, b = (on_fresh(each, inference(each.network), [given])().float() for each in (ours, other))
    return ((a - b).abs().max() / a.abs().max()).item()


def inference(network: nn.Module) -> Call:
    """The scores of a cloud's voxels."""

    def call(tensor: Any, labels: Tensor) -> Tensor:
        with torch.no_grad():
            return features(network(tensor))

    return call


def gradients(network: nn.Module) -> Call:
    """The loss, whose gradients are those of the weights."""

    def call(tensor: Any, labels: Tensor) -> Tensor:
        network.zero_grad(set_to_none=True)
        loss = loss_of(network(tensor), labels)
        loss.backward()
        return loss

    return call


def training(network: nn.Module) -> Call:
    """A step of AdamW under autocast; its rate is 0, so that calls can be compared."""
    adam = torch.optim.AdamW(network.parameters(), lr=0.0, fused=True, capturable=True)

    def call(tensor: Any, labels: Tensor) -> Tensor:
        adam.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(network(tensor), labels)
        loss.backward()
        adam.step()
        return loss

    return call


def loss_of(tensor: Any, labels: Tensor) -> Tensor:
    """Cross entropy of the scores."""
    return cross_entropy(features(tensor).float(), labels, ignore_index=-100)


def features(tensor: Any) -> Tensor:
    """Of our tensors, or of spconv's."""
    found: Tensor = tensor.feats if isinstance(tensor, SparseTensor) else tensor.features
    return found


def minkunet(half: bool) -> Subject:
    """MinkUNet42, in half precision but for its norms, or in float32."""
    network = MinkUNet(FEATURES, CLASSES, 42)  # type: ignore[no-untyped-call]
    network = lowered(network, torch.float16 if half else torch.float32).cuda()
    return Subject(network, lambda given: SparseTensor(*given[:3], 1))


def converted_minkunet(ours: nn.Module, package: str) -> Subject:
    """The same in a package's layers."""
    return Subject(converted(package, ours), clouds_of(package))


def own_spunet(half: bool) -> Subject:
    """SpUNet in our stand-in for spconv."""
    return Subject(made_spunet(STAND_IN, half), clouds_of(STAND_IN))


def foreign_spunet(ours: nn.Module, package: str) -> Subject:
    """The same in a package's layers."""
    network = made_spunet(package, half=next(ours.parameters()).dtype == torch.float16)
    network.load_state_dict(ours.state_dict())
    return Subject(network, clouds_of(package))


def made_spunet(package: str, half: bool) -> nn.Module:
    """SpUNet in a package's layers, in half precision but for its norms, or in float32."""
    network = spunet(package, FEATURES, CLASSES)
    return lowered(network, torch.float16 if half else torch.float32).cuda()


def clouds_of(package: str) -> Callable[[Given], Any]:
    """Fresh tensors of a package; our stand-in knows the voxels of an old tensor of indices."""
    made = importlib.import_module(f"{package}.pytorch").SparseConvTensor
    return lambda given: made(given.feats, given.coords.clone(), list(given.shape), 1)


# spconv's layers follow autocast in training alone
NETWORKS = {
    "MinkUNet42 in half precision": Network(
        True,
        functools.partial(minkunet, True),
        converted_minkunet,
        {"forward": inference, "forward+backward": gradients},
    ),
    "MinkUNet42 under autocast": Network(
        False, functools.partial(minkunet, False), converted_minkunet, {"training step": training}
    ),
    "SpUNet in half precision": Network(
        True, functools.partial(own_spunet, True), foreign_spunet, {"forward": inference}
    ),
    "SpUNet under autocast": Network(
        False, functools.partial(own_spunet, False), foreign_spunet, {"training step": training}
    ),
}


def milliseconds(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The median wall time of each call and of all that it launched; calls take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(WARM + REPEATS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times[name] += [time.perf_counter() - begin] if n >= WARM else []
    return {name: 1000 * statistics.median(of) for name, of in times.items()}


def waits(call: Callable[[], object]) -> int | str:
    """How often the host waits for kernels; what torch says where it waits."""
    counted, plain = [], Flags.read

    def read(flags: Flags) -> list[int]:
        counted.append(flags)
        return plain(flags)

    Flags.read = read  # type: ignore[method-assign]
    try:
        with waiting_raises():
            call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        Flags.read = plain  # type: ignore[method-assign]
    return len(counted)


def kernels(call: Callable[[], object]) -> int:
    """Kernels that a call launches, torch's included."""
    copies = ("Memcpy", "Memset")
    return sum(not event.name.startswith(copies) for event in events_on_gpu(call))


if __name__ == "__main__":
    main()
