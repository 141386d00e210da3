"""Networks on fresh clouds, on a GPU: `TORCHWEFT_LIDAR=FILE python -m benchmarks.fresh_clouds`.

For each network and program the median wall time in milliseconds of a call

    fresh       on a cloud that the network has not seen, whose maps it builds
    padded      with the maps built before a CUDA graph that has room for other clouds
    kept        on a cloud whose maps are kept
    captured    on that cloud, as a CUDA graph

and of the same network in the layers of spconv and of spconv-triton, where they are installed, with
the same weights on fresh clouds.  Of one fresh inference also the kernels on the GPU, and how often
the host waits for what kernels write into its memory, or where torch waits; of each peer the
largest difference of its scores, over the largest score.

SpUNet is written in spconv's layers, which `torchweft.compat` stands in for.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Mapping
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
from torchweft.voxels import SparseTensor, padded_sizes, prepare
from torchweft.voxels.maps.gpu.tiles import Flags

WARM, REPEATS = 5, 30
ROOM = 1.25
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


class Subject(NamedTuple):
    """A network in the layers of one library, and a fresh cloud of it."""

    network: nn.Module
    cloud: Callable[[], Any]


class Network(NamedTuple):
    """A network in our layers, in those of a package with spconv's names, and its programs."""

    ours: Callable[[Given], Subject]
    theirs: Callable[[Given, nn.Module, str], Subject]
    programs: Mapping[str, Callable[[nn.Module], Call]]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cloud", default="lidar05", choices=CLOUDS)
    parser.add_argument("--network", default="", help="only networks with this in their name")
    parser.add_argument("--out", type=Path, help="a file for what is found")
    options = parser.parse_args()
    voxels, shape = CLOUDS[options.cloud]()
    coords = torch.cat([torch.zeros_like(voxels[:, :1]), voxels], 1).int().cuda()
    feats = torch.randn(len(coords), FEATURES).cuda()
    labels = torch.randint(0, CLASSES, (len(coords),)).cuda()
    given = Given(feats, coords, tuple(shape), labels)
    peers = [name for name, package in PEERS.items() if importlib.util.find_spec(package)]
    networks = {
        name: measured(network, given, peers)
        for name, network in NETWORKS.items()
        if options.network in name
    }
    versions = {name: importlib.import_module(PEERS[name]).__version__ for name in peers}
    found = {"cloud": options.cloud, "voxels": len(coords), "peers": versions}
    found |= {"networks": networks} | asdict(machine(torch.device("cuda")))
    text = json.dumps(found, indent=1) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text)


def measured(network: Network, given: Given, peers: list[str]) -> dict[str, Any]:
    """What a network's entry says."""
    torch.manual_seed(0)
    ours = network.ours(given)
    ours.network.eval()
    kept, call = ours.cloud(), inference(ours.network)
    prepare(ours.network, kept)
    maps = milliseconds(lambda: prepare(ours.network, ours.cloud()))
    theirs = {name: network.theirs(given, ours.network, PEERS[name]) for name in peers}
    for subject in theirs.values():
        subject.network.eval()
    found: dict[str, Any] = {
        "kernels": {
            "fresh": kernels(lambda: call(ours.cloud(), given.labels)),
            "kept": kernels(lambda: call(kept, given.labels)),
        },
        "waits": waits(lambda: call(ours.cloud(), given.labels)),
        "difference": {name: difference(ours, peer, given) for name, peer in theirs.items()},
        "ms": {"maps": {"fresh": maps}},
    }
    for name, program in network.programs.items():
        for subject in (ours, *theirs.values()):
            subject.network.train(name != "forward")
        found["ms"][name] = by_ways(ours, kept, program, given.labels) | {
            peer: milliseconds(on_fresh(subject, program, given.labels))
            for peer, subject in theirs.items()
        }
    return found


def by_ways(
    ours: Subject, kept: Any, program: Callable[[nn.Module], Call], labels: Tensor
) -> dict[str, float]:
    """Milliseconds of a call of ours."""
    call = program(ours.network)
    recorded = torchweft.capture(call, kept, labels)
    sizes = padded_sizes(prepare(ours.network, ours.cloud()), ROOM, labels=-100)
    padded = torchweft.capture(call, kept, labels, sizes=sizes)

    def replayed() -> Tensor:
        return padded(prepare(ours.network, ours.cloud(), tables_only=True), labels)

    return {
        "fresh": milliseconds(on_fresh(ours, program, labels)),
        "padded": milliseconds(replayed),
        "kept": milliseconds(lambda: call(kept, labels)),
        "captured": milliseconds(lambda: recorded(kept, labels)),
    }


def on_fresh(
    subject: Subject, program: Callable[[nn.Module], Call], labels: Tensor
) -> Callable[[], Tensor]:
    """A call on a cloud that the network has not seen."""
    call = program(subject.network)
    return lambda: call(subject.cloud(), labels)


def difference(ours: Subject, other: Subject, given: Given) -> float:
    """The largest of two networks' scores, over the largest of ours."""
    a, b = (on_fresh(each, inference, given.labels)().float() for each in (ours, other))
    return ((a - b).abs().max() / a.abs().max()).item()


def inference(network: nn.Module, autocast: bool = False) -> Call:
    """The scores of a cloud's voxels."""

    def call(tensor: Any, labels: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cuda", torch.float16, autocast):
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


def minkunet(half: bool, given: Given) -> Subject:
    """MinkUNet42, in half precision but for its norms, or in float32."""
    network = MinkUNet(FEATURES, CLASSES, 42)  # type: ignore[no-untyped-call]
    feats = given.feats.half() if half else given.feats
    network = lowered(network, feats.dtype).cuda()
    return Subject(network, lambda: SparseTensor(feats, given.coords, given.shape, 1))


def converted_minkunet(half: bool, given: Given, ours: nn.Module, package: str) -> Subject:
    """The same in a package's layers."""
    return Subject(converted(package, ours), clouds_of(package, given, half))


def own_spunet(given: Given) -> Subject:
    """SpUNet in float32, in our stand-in for spconv."""
    network = spunet(STAND_IN, FEATURES, CLASSES).cuda()
    return Subject(network, clouds_of(STAND_IN, given, half=False))


def foreign_spunet(given: Given, ours: nn.Module, package: str) -> Subject:
    """The same in a package's layers."""
    network = spunet(package, FEATURES, CLASSES).cuda()
    network.load_state_dict(ours.state_dict())
    return Subject(network, clouds_of(package, given, half=False))


def clouds_of(package: str, given: Given, half: bool) -> Callable[[], Any]:
    """Fresh tensors of a package; our stand-in knows the voxels of an old tensor of indices."""
    made = importlib.import_module(f"{package}.pytorch").SparseConvTensor
    feats = given.feats.half() if half else given.feats
    return lambda: made(feats, given.coords.clone(), list(given.shape), 1)


AUTOCAST = {
    "forward": functools.partial(inference, autocast=True),
    "training step": training,
}
NETWORKS = {
    "MinkUNet42 in half precision": Network(
        functools.partial(minkunet, True),
        functools.partial(converted_minkunet, True),
        {"forward": inference, "forward+backward": gradients},
    ),
    "MinkUNet42 under autocast": Network(
        functools.partial(minkunet, False), functools.partial(converted_minkunet, False), AUTOCAST
    ),
    "SpUNet under autocast": Network(own_spunet, foreign_spunet, AUTOCAST),
}


def milliseconds(call: Callable[[], object]) -> float:
    """The median wall time of a call and of all that it launched."""
    times = []
    for n in range(WARM + REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times += [time.perf_counter() - begin] if n >= WARM else []
    return 1000 * statistics.median(times)


def waits(call: Callable[[], object]) -> int | str:
    """How often the host waits for kernels; what torch says where it waits."""
    counted, plain = [], Flags.read

    def read(flags: Flags) -> list[int]:
        counted.append(flags)
        return plain(flags)

    Flags.read = read  # type: ignore[method-assign]
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        Flags.read = plain  # type: ignore[method-assign]
    return len(counted)


def kernels(call: Callable[[], object]) -> int:
    """Kernels that a call launches, torch's included."""
    copies = ("Memcpy", "Memset")
    return sum(not event.name.startswith(copies) for event in events_on_gpu(call))


if __name__ == "__main__":
    main()
