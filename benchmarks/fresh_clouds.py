"""A network on fresh clouds, on a GPU: `TORCHWEFT_LIDAR=FILE python -m benchmarks.fresh_clouds`.

For MinkUNet42 in half precision, whose maps are those of a cloud that it has not seen: the median
wall time in milliseconds of the maps alone, of inference, and of forward and backward; the same
with the maps built before a CUDA graph that has room for other clouds ("padded"); with maps kept,
and with maps kept as a CUDA graph; where spconv is installed, its layers with the same weights on
fresh clouds, and the largest difference of its scores over the largest score.  Of one fresh
inference also the kernels on the GPU, and how often the host waits: for what kernels write into its
memory, and in torch (0, or an error).
"""

import argparse
import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchweft
from benchmarks.harness.record import machine
from benchmarks.harness.timer import events_on_gpu
from benchmarks.peers.spconv_unet import converted
from benchmarks.workloads.clouds import CLOUDS
from benchmarks.workloads.voxels_unet import CLASSES, FEATURES, lowered
from examples.voxels.plot_minkunet import MinkUNet
from torchweft.voxels import SparseTensor, padded_sizes, prepare
from torchweft.voxels.maps.gpu.tiles import Flags

WARM, REPEATS = 5, 30

Call = Callable[[Any, Tensor], Tensor]
"""Of a cloud and its labels."""


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


def waits(call: Callable[[], object]) -> int:
    """How often the host waits for kernels; an error where torch does."""
    counted, plain = [], Flags.read

    def read(flags: Flags) -> list[int]:
        counted.append(flags)
        return plain(flags)

    Flags.read = read  # type: ignore[method-assign]
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        Flags.read = plain  # type: ignore[method-assign]
    return len(counted)


def kernels(call: Callable[[], object]) -> int:
    """Kernels that a call launches, torch's included."""
    copies = ("Memcpy", "Memset")
    return sum(not event.name.startswith(copies) for event in events_on_gpu(call))


def inference(network: nn.Module) -> Call:
    """The scores of a cloud's voxels."""

    def call(tensor: Any, labels: Tensor) -> Tensor:
        with torch.no_grad():
            return rows_of(network(tensor))

    return call


def training(network: nn.Module) -> Call:
    """The loss, whose gradients are those of the weights."""

    def call(tensor: Any, labels: Tensor) -> Tensor:
        network.zero_grad(set_to_none=True)
        scores = rows_of(network(tensor)).float()
        loss = cross_entropy(scores, labels, ignore_index=-100)
        loss.backward()
        return loss

    return call


def rows_of(tensor: Any) -> Tensor:
    """Features of our tensors, or of spconv's."""
    found: Tensor = tensor.feats if isinstance(tensor, SparseTensor) else tensor.features
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cloud", default="lidar05", choices=CLOUDS)
    parser.add_argument("--layers", type=int, default=42)
    parser.add_argument("--out", type=Path, help="a file for what is found")
    options = parser.parse_args()
    voxels, shape = CLOUDS[options.cloud]()
    coords = torch.cat([torch.zeros_like(voxels[:, :1]), voxels], 1).cuda()
    feats = torch.randn(len(coords), FEATURES, device="cuda").half()
    torch.manual_seed(0)
    model = lowered(MinkUNet(FEATURES, CLASSES, options.layers), torch.float16).cuda()
    kept = SparseTensor(feats, coords, shape, 1)
    labels = torch.randint(0, CLASSES, (len(coords),), device="cuda")
    with_peer = importlib.util.find_spec("spconv") is not None

    def fresh() -> SparseTensor:
        return SparseTensor(feats, coords, shape, 1)

    def by_spconv(program: Callable[[nn.Module], Call]) -> Callable[[], Tensor]:
        from spconv.pytorch import SparseConvTensor

        call = program(converted("spconv", model).train(model.training))
        narrow = coords.int()
        return lambda: call(SparseConvTensor(feats, narrow, shape, 1), labels)

    def measured(program: Callable[[nn.Module], Call]) -> dict[str, float]:
        call = program(model)
        recorded = torchweft.capture(call, kept, labels)
        sizes = padded_sizes(prepare(model, kept), 1.25, labels=-100)
        padded = torchweft.capture(call, kept, labels, sizes=sizes)
        found = {
            "fresh": milliseconds(lambda: call(fresh(), labels)),
            "padded": milliseconds(
                lambda: padded(prepare(model, fresh(), tables_only=True), labels)
            ),
            "kept": milliseconds(lambda: call(kept, labels)),
            "captured": milliseconds(lambda: recorded(kept, labels)),
        }
        return found | ({"spconv": milliseconds(by_spconv(program))} if with_peer else {})

    model.eval()
    with torch.no_grad():
        prepare(model, kept)
        maps = milliseconds(lambda: prepare(model, fresh()))
    call = inference(model)
    ms = {"maps": {"fresh": maps}, "forward": measured(inference)}
    counts = {"fresh": kernels(lambda: call(fresh(), labels))}
    counts["kept"] = kernels(lambda: call(kept, labels))
    found = {"cloud": options.cloud, "voxels": len(coords), "kernels": counts, "ms": ms}
    found["waits"] = waits(lambda: call(fresh(), labels))
    if with_peer:
        own, other = call(kept, labels).float(), by_spconv(inference)().float()
        found["difference"] = ((own - other).abs().max() / own.abs().max()).item()
        found["spconv"] = importlib.import_module("spconv").__version__
    model.train()
    ms["forward+backward"] = measured(training)
    text = json.dumps(found | asdict(machine(torch.device("cuda"))), indent=1) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
