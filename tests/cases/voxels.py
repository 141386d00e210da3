"""Contract cases of voxels: every geometry in one to four dimensions, every width of channels.

Voxels are random and stand in random order; a box holds about three voxels in ten places.  The
oracle's maps are dictionaries, built once for a cloud and a layer.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.cases.suite import Suite
from torchweft.testing.bounds import assert_within_bound
from torchweft.testing.contract import Case, assert_same_bits
from torchweft.voxels import reference
from torchweft.voxels.convolution.functions import sparse_conv
from torchweft.voxels.convolution.launch import LEAST_IN_THIRDS
from torchweft.voxels.maps.tensor import SparseTensor

__all__ = ["CHANNELS", "Cloud", "Layer", "door_cases", "make_case", "suite"]

CHANNELS = ((1, 128), (3, 64), (8, 65), (16, 31), (31, 8), (64, 16), (65, 3), (128, 1))
"""(C_in, C_out): every count of interest for both."""


class Cloud:
    """Voxels, and the tensors that stand on them by device: their maps are built once.

    Args:
        coords: (N, 1 + d) int64 on the CPU.
        shape: the box.
        batch: samples.
    """

    def __init__(self, coords: Tensor, shape: Sequence[int], batch: int) -> None:
        self.coords, self.shape, self.batch = coords, tuple(shape), batch
        self.tensors: dict[str, SparseTensor] = {}

    def on(self, device: str) -> SparseTensor:
        """A tensor without features; one that has no storage needs no voxels of its own."""
        device = "cpu" if device == "meta" else device
        if device not in self.tensors:
            coords = self.coords.to(device)
            feats = torch.empty(len(coords), 0, device=device)
            self.tensors[device] = SparseTensor(feats, coords, self.shape, self.batch)
        return self.tensors[device]

    def permuted(self, order: Tensor) -> Cloud:
        """The same voxels in another order."""
        return Cloud(self.coords[order], self.shape, self.batch)


def random_cloud(
    shape: Sequence[int], batch: int, generator: torch.Generator, share: float = 0.3
) -> Cloud:
    """A share of all places of a box, in random order."""
    places = batch * math.prod(shape)
    chosen = torch.randperm(places, generator=generator)[: math.ceil(share * places)]
    columns = (
        torch.unravel_index(chosen, (batch, *shape)) if places else [chosen] * (1 + len(shape))
    )
    return Cloud(torch.stack(list(columns), 1), shape, batch)


class Layer(NamedTuple):
    """The geometry of a layer; a number is one for all axes."""

    kernel_size: tuple[int, ...]
    mode: str = "submanifold"
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def keywords(self) -> dict[str, Any]:
        """What the oracle takes, one number an axis."""
        names = ("stride", "padding", "dilation")
        axes = {name: (getattr(self, name),) * len(self.kernel_size) for name in names}
        return {"kernel_size": self.kernel_size, "mode": self.mode, **axes}


@functools.cache
def _sources(cloud: Cloud, layer: Layer) -> Tensor:
    found = reference.pairs_of(cloud.coords.tolist(), **layer.keywords, spatial_shape=cloud.shape)
    return found.sources()


def _call(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cloud: Cloud,
    layer: Layer,
    groups: int = 1,
    backend: str | None = None,
) -> Tensor:
    tensor = cloud.on(x.device.type).replace(x)
    return sparse_conv(
        tensor,
        weight,
        layer.kernel_size,
        bias,
        layer.stride,
        layer.dilation,
        layer.padding,
        layer.mode == "transposed",
        layer.mode == "submanifold",
        outputs="floor" if layer.mode == "floor" else "torch",
        groups=groups,
        backend=backend,
    ).feats


def _oracle(
    x: Tensor, weight: Tensor, bias: Tensor | None, cloud: Cloud, layer: Layer, groups: int = 1
) -> Tensor:
    return reference.conv(x, weight, _sources(cloud, layer).to(x.device), bias, groups)


def make_case(
    name: str,
    layer: Layer,
    shape: Sequence[int],
    *,
    channels: tuple[int, int] = (8, 5),
    groups: int = 1,
    bias: bool = True,
    batch: int = 2,
    share: float = 0.3,
) -> Case:
    """A case of a layer on random voxels with random inputs.

    Args:
        name: of the case; it seeds everything.
        layer: the geometry.
        shape: of the box.
        channels: (C_in, C_out).
        groups: into so many the channels fall.
        bias: whether there is one.
        batch: samples.
        share: of the box's places that are voxels.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    cloud = random_cloud(shape, batch, generator, share)
    randn = functools.partial(torch.randn, dtype=torch.float64, generator=generator)
    inner, outer = channels
    inputs = (
        randn(len(cloud.coords), inner),
        randn(math.prod(layer.kernel_size), inner // groups, outer),
        randn(outer) if bias else None,
    )
    tables: Mapping[str, Any] = {"cloud": cloud, "layer": layer, "groups": groups}
    name = f"sparse_conv: {name}, C={inner} to {outer}"
    return Case(name, _call, _oracle, inputs, tables)


CUBE, WIDE = (3, 3, 3), (5, 5, 5)
BOX = (6, 5, 6)


def channel_cases() -> list[Case]:
    """Every number of channels; alternately with and without a bias, submanifold and strided."""
    layers = (Layer(CUBE), Layer(CUBE, "strided", 2, 1))
    return [
        make_case(layer.mode, layer, BOX, channels=channels, bias=bool(i % 2))
        for i, (channels, layer) in enumerate(zip(CHANNELS, itertools.cycle(layers), strict=False))
    ]


def layer_cases() -> list[Case]:
    """Every mode, even and uneven kernels, strides, paddings and dilations, in 1 to 4 axes."""
    return [
        make_case("kernel of one", Layer((1, 1, 1)), BOX),
        make_case("kernel of 125", Layer(WIDE), BOX, channels=(16, 16)),
        make_case("kernel of 125 strided", Layer(WIDE, "strided", 2, 2), BOX, bias=False),
        make_case("even", Layer((2, 2, 2)), BOX),
        make_case("uneven", Layer((3, 1, 4)), BOX),
        make_case("dilated", Layer(CUBE, dilation=2), BOX),
        make_case("downsampling", Layer((2, 2, 2), "strided", 2), BOX, channels=(16, 32)),
        make_case("skipping", Layer((1, 2, 1), "strided", 3), BOX),
        make_case("padded and dilated", Layer((3, 2, 3), "strided", 1, 2, 2), BOX),
        make_case("transposed", Layer(CUBE, "transposed", 2, 1), (4, 3, 4), channels=(16, 8)),
        make_case("transposed even", Layer((2, 3, 1), "transposed", 1, 0, 2), (4, 3, 4)),
        make_case("floors", Layer((3, 2, 1), "floor", 2), BOX, channels=(16, 8)),
        make_case("floors dilated", Layer((3, 3), "floor", 3, 0, 2), (9, 8)),
        make_case("one axis", Layer((5,), dilation=3), (60,)),
        make_case("one axis transposed", Layer((4,), "transposed", 3, 1), (30,)),
        make_case("two axes", Layer((3, 3), "strided", 2, 1), (12, 11)),
        make_case("four axes", Layer((3, 2, 3, 1)), (4, 4, 3, 3)),
        make_case("four axes strided", Layer((2, 3, 2, 2), "strided", 2, 1), (4, 4, 3, 3)),
        make_case("in thirds", Layer(CUBE), BOX, channels=(16, LEAST_IN_THIRDS)),
        make_case("past a tile", Layer(CUBE), (11, 11, 11), channels=(16, 16), batch=1),
    ]


def group_cases() -> list[Case]:
    """Groups narrow and wide, depthwise, more outputs than inputs."""
    return [
        make_case("two groups", Layer(CUBE), BOX, channels=(64, 96), groups=2),
        make_case("groups of odd width", Layer(CUBE), BOX, channels=(93, 15), groups=3, bias=False),
        make_case("narrow groups", Layer(CUBE, "strided", 2, 1), BOX, channels=(32, 64), groups=8),
        make_case("depthwise", Layer(CUBE), BOX, channels=(31, 31), groups=31),
        make_case(
            "depthwise wide", Layer(CUBE, "strided", 1, 1), BOX, channels=(64, 64), groups=64
        ),
        make_case("multiplied", Layer(CUBE), BOX, channels=(16, 48), groups=16),
    ]


def edge_cases() -> list[Case]:
    """No voxels, one voxel, voxels without a neighbour, no output, empty samples."""
    return [
        make_case("no voxels", Layer(CUBE), BOX, share=0),
        make_case("no voxels strided", Layer(CUBE, "strided", 2, 1), BOX, share=0),
        make_case("no voxels transposed", Layer(CUBE, "transposed", 2, 1), BOX, share=0),
        make_case("no voxels floor", Layer(CUBE, "floor", 2), BOX, share=0),
        make_case("one voxel", Layer(CUBE), (1, 1, 1), batch=1, share=1),
        make_case("lone voxels", Layer((3, 3, 3), dilation=7), BOX),
        make_case("no pair", Layer((2, 2, 2)), (1, 1, 1), share=1),
        make_case("no output", Layer(WIDE, "strided"), (4, 4, 4)),
        make_case("empty samples", Layer(CUBE), (2, 2, 2), batch=9, share=0.06),
        make_case("full box", Layer(CUBE, "strided", 1, 1), (4, 4, 4), share=1, bias=False),
    ]


def door_cases() -> list[Case]:
    """A small case of each mode, and of groups, for the promises that do not need a backend."""
    make = functools.partial(make_case, shape=(3, 3), channels=(4, 2))
    return [
        make("door submanifold", Layer((3, 3))),
        make("door even", Layer((2, 2)), bias=False),
        make("door strided", Layer((3, 3), "strided", 2, 1), groups=2),
        make("door transposed", Layer((2, 2), "transposed", 2)),
        make("door floor", Layer((3, 2), "floor", 2)),
    ]


def small_cases() -> list[Case]:
    """Every mode, small enough for numerical gradients."""
    make = functools.partial(make_case, shape=(3, 4), channels=(2, 4), batch=1)
    return [
        make("small submanifold", Layer((3, 3))),
        make("small even", Layer((2, 2)), bias=False),
        make("small strided", Layer((3, 2), "strided", 2, 1), groups=2),
        make("small transposed", Layer((3, 3), "transposed", 2, 1)),
        make("small floor", Layer((3, 2), "floor", 2)),
        make("small depthwise", Layer((3, 3)), channels=(3, 3), groups=3),
        make("small without outputs", Layer((5, 5), "strided")),
    ]


def check_large_offsets(device: str) -> None:
    """Offsets past 2^31 elements: the last rows of a line of voxels equal those of a short line."""
    channels, rows, last = 128, 2**24 + 64, 9
    generator = torch.Generator(device).manual_seed(0)
    randn = functools.partial(torch.randn, dtype=torch.float16, device=device, generator=generator)
    weight, tail, cotangent = randn(3, channels, channels), *(randn(last, channels) for _ in "xg")

    def run(count: int) -> list[Tensor]:
        place = torch.arange(count, device=device)
        x, g = (torch.zeros(count, channels, dtype=torch.float16, device=device) for _ in "xg")
        x[-last:], g[-last:] = tail, cotangent
        tensor = SparseTensor(x.requires_grad_(), torch.stack([place * 0, place], 1), (count,), 1)
        w = weight.clone().requires_grad_()
        y = sparse_conv(tensor, w, 3).feats
        dx, dw = torch.autograd.grad(y, (x, w), g)
        return [y[-last:].detach().clone(), dx[-last:].clone(), dw]

    (y, dx, dw), (small_y, small_dx, _) = run(rows), run(2 * last)
    assert_same_bits(y, small_y, "the last rows")
    assert_same_bits(dx, small_dx, "the last rows of the gradient")
    zeros = tail.new_zeros(1, channels)
    padded = torch.cat([zeros, tail, zeros]).double()
    at = [padded[k : k + last] for k in range(3)]
    exact, magnitude = (
        torch.stack([f(a).T @ f(cotangent.double()) for a in at]) for f in (torch.clone, torch.abs)
    )
    assert_within_bound(dw, exact, magnitude, last)


@functools.cache
def suite() -> Suite:
    """The voxels' part of `make check`."""
    layers, groups = layer_cases(), group_cases()
    cases = channel_cases() + layers + groups + edge_cases()
    full = [layers[1], layers[6], layers[9], layers[-1], groups[0], groups[2], groups[3]]
    large = (check_large_offsets,)
    return Suite(cases, full, small_cases(), door_cases(), large, backends=("torch",))
