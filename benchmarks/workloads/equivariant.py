"""Builds the workloads of tensor products of irreps: layers as instructions, graphs as edges.

    z[d] = Σ_{e: dst[e]=d} tp(x[src[e]], y[e], w[e]),   or row by row without a graph

Factors are e3nn's by default: √((2l+1) / Σ fan) of the paths into one block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness.case import Case, Workload
from benchmarks.workloads.recipes import Random
from tests.cases.o3_workloads import ring_graph
from torchweft.o3 import Graph, Irreps, Linear, TensorProduct, TensorProductConv, wigner_3j

__all__ = [
    "Layer",
    "blocks",
    "coefficients_of",
    "conv_case",
    "every_path",
    "flops_of",
    "linear_case",
    "own_blocks",
    "product_case",
    "radial_case",
    "tensor_product",
]

Instruction = tuple[int, int, int, str, bool]

CHECKED_NODES, CHECKED_DEGREE = 40, 8

EINSUM = {
    "uvu": "eau,ebv,{}uv,abm->emu",
    "uuu": "eau,ebu,{}u,abm->emu",
    "uvw": "eau,ebv,{}uvw,abm->emw",
}


class Layer(NamedTuple):
    """A weighted tensor product; `shared`: its weights are the same in every row."""

    x: Irreps
    y: Irreps
    out: Irreps
    instructions: tuple[Instruction, ...]
    shared: bool = False

    def multiplicities(self, instruction: Instruction) -> dict[str, int]:
        """Of its blocks, by the letters of the mode."""
        i, j, k, mode, _ = instruction
        muls = (self.x[i].mul, self.y[j].mul, self.out[k].mul)
        return dict(zip(mode, muls, strict=True))

    def weight_shapes(self) -> list[tuple[int, ...]]:
        """In the order of the instructions."""
        letters = {"uvu": "uv", "uuu": "u", "uvw": "uvw"}
        return [
            tuple(self.multiplicities(i)[letter] for letter in letters[i[3]])
            for i in self.instructions
        ]

    @property
    def weight_numel(self) -> int:
        """Weights of a row."""
        return sum(map(math.prod, self.weight_shapes()))


def own_blocks(x: Irreps, y: Irreps, keep: Sequence[str]) -> Layer:
    """Every product of channels of x with y whose irrep is kept, each in a block of its own."""
    kept = {ir for _, ir in Irreps("+".join(keep))}
    found = [
        (mul, ir, i, j)
        for i, (mul, a) in enumerate(x)
        for j, (_, b) in enumerate(y)
        for ir in a * b
        if ir in kept
    ]
    found.sort(key=lambda path: path[1])  # stable: the order of e3nn's sort
    out = Irreps([(mul, ir) for mul, ir, _, _ in found])
    return Layer(x, y, out, tuple((i, j, k, "uvu", True) for k, (*_, i, j) in enumerate(found)))


def every_path(x: Irreps, y: Irreps, out: Irreps, mode: str, shared: bool = False) -> Layer:
    """Every product of x and y into the blocks of out."""
    instructions = tuple(
        (i, j, k, mode, True)
        for i, (_, a) in enumerate(x)
        for j, (_, b) in enumerate(y)
        for k, (_, c) in enumerate(out)
        if c in a * b
    )
    return Layer(x, y, out, instructions, shared)


def conv_case(
    name: str,
    layer: Callable[[], Layer],
    nodes: int,
    degree: int,
    backends: tuple[str | None, ...] = (None,),
) -> Case:
    """A convolution of a layer with weights of each edge."""
    build = functools.partial(_conv, layer, nodes, degree)
    return Case(name, "convolution", build, check_batch=CHECKED_NODES, backends=backends)


def radial_case(
    name: str,
    layer: Callable[[], Layer],
    nodes: int,
    degree: int,
    hidden: int,
    tf32: bool = False,
) -> Case:
    """The same with weights h @ A of each edge, which are not stored; perhaps of TF32 factors."""
    build = functools.partial(_radial, layer, nodes, degree, hidden, tf32)
    return Case(name, "convolution", build, check_batch=CHECKED_NODES, tf32=tf32)


def product_case(name: str, layer: Callable[[], Layer], rows: int, phases: tuple[str, ...]) -> Case:
    """A tensor product row by row."""
    return Case(
        name, "batch", functools.partial(_product, layer, rows), phases, check_batch=CHECKED_NODES
    )


def linear_case(name: str, irreps: str, rows: int) -> Case:
    """Each irrep's copies mixed by one matrix."""
    build = functools.partial(_linear, Irreps(irreps), rows)
    return Case(name, "batch", build, check_batch=CHECKED_NODES)


def _conv(
    of: Callable[[], Layer], nodes: int, degree: int, device: torch.device, batch: int | None
) -> Workload:
    if batch is not None:
        nodes, degree = batch, min(degree, CHECKED_DEGREE)
    layer, random = of(), Random(device)
    src, dst = (index.to(device) for index in ring_graph(nodes, degree))
    edges, graph = len(src), Graph(src, dst, nodes, reused=True)
    convs = _each_backend(
        TensorProductConv, layer.x, layer.y, layer.out, layer.instructions, shared_weights=False,
        internal_weights=False, layout="ir_mul",
    )  # fmt: skip
    inputs = (
        random.normal(nodes, layer.x.dim),
        random.normal(edges, layer.y.dim),
        random.normal(edges, layer.weight_numel),
    )

    def function(x: Tensor, y: Tensor, w: Tensor, backend: str | None = None) -> Tensor:
        return convs(backend)(x, y, w, graph)

    def oracle(x: Tensor, y: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        messages = tensor_product(layer, x.index_select(0, src), y, w, scale)
        return messages.new_zeros(nodes, layer.out.dim).index_add(0, dst, messages)

    tables = {"layer": layer, "src": src, "dst": dst, "scale": _scale(layer, device)}
    shape = f"N={nodes} E={edges} paths={len(layer.instructions)} W={layer.weight_numel}"
    return Workload(
        "tensor product convolution", inputs, tables, function, oracle, flops_of(layer) * edges,
        nodes * layer.out.dim * inputs[0].element_size(), shape,
    )  # fmt: skip


def _radial(
    of: Callable[[], Layer],
    nodes: int,
    degree: int,
    hidden: int,
    tf32: bool,
    device: torch.device,
    batch: int | None,
) -> Workload:
    plain, layer = _conv(of, nodes, degree, device, batch), of()
    src, dst = plain.tables["src"], plain.tables["dst"]
    x, y, w = plain.inputs
    graph, random = Graph(src, dst, len(x)), Random(device)
    convs = _each_backend(
        TensorProductConv, layer.x, layer.y, layer.out, layer.instructions, shared_weights=False,
        internal_weights=False, layout="ir_mul", precision="tf32" if tf32 else "tf32x3",
    )  # fmt: skip
    last = random.normal(hidden, layer.weight_numel) / math.sqrt(hidden)

    def function(x: Tensor, y: Tensor, h: Tensor, a: Tensor, backend: str | None = None) -> Tensor:
        return convs(backend)(x, y, src=graph, radial=h, radial_weight=a)

    def oracle(x: Tensor, y: Tensor, h: Tensor, a: Tensor, scale: Tensor) -> Tensor:
        return plain.oracle(x, y, h @ a, scale)

    return plain._replace(
        op="radial convolution",
        inputs=(x, y, random.normal(len(y), hidden), last),
        function=function,
        oracle=oracle,
        flops=plain.flops + 2 * w.numel() * hidden,
        shape=f"{plain.shape} H={hidden}",
    )


def _product(
    of: Callable[[], Layer], rows: int, device: torch.device, batch: int | None
) -> Workload:
    layer, random = of(), Random(device)
    rows = batch or rows
    products = _each_backend(
        TensorProduct, layer.x, layer.y, layer.out, layer.instructions, shared_weights=layer.shared,
        internal_weights=False, layout="ir_mul",
    )  # fmt: skip
    own = () if layer.shared else (rows,)
    inputs = (
        random.normal(rows, layer.x.dim),
        random.normal(rows, layer.y.dim),
        random.normal(*own, layer.weight_numel),
    )

    def function(x: Tensor, y: Tensor, w: Tensor, backend: str | None = None) -> Tensor:
        return products(backend)(x, y, w)

    def oracle(x: Tensor, y: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return tensor_product(layer, x, y, w, scale)

    tables = {"layer": layer, "scale": _scale(layer, device)}
    shape = f"N={rows} paths={len(layer.instructions)} W={layer.weight_numel}"
    return Workload(
        "tensor product", inputs, tables, function, oracle, flops_of(layer) * rows,
        rows * layer.out.dim * inputs[0].element_size(), shape,
    )  # fmt: skip


def _linear(irreps: Irreps, rows: int, device: torch.device, batch: int | None) -> Workload:
    random, rows = Random(device), batch or rows
    muls = [mul for mul, _ in irreps]
    layers = _each_backend(
        Linear, irreps, irreps, internal_weights=False, shared_weights=True, layout="ir_mul"
    )
    inputs = random.normal(rows, irreps.dim), random.normal(sum(mul**2 for mul in muls))

    def function(x: Tensor, w: Tensor, backend: str | None = None) -> Tensor:
        return layers(backend)(x, w)

    def oracle(x: Tensor, w: Tensor, scale: None = None, ir_mul: bool = True) -> Tensor:
        weights = w.split([mul**2 for mul in muls])
        mixed = [
            block @ weight.view(mul, mul) / math.sqrt(mul)
            for block, weight, mul in zip(blocks(irreps, x, ir_mul), weights, muls, strict=True)
        ]
        return torch.cat([(f if ir_mul else f.mT).flatten(1) for f in mixed], 1)

    flops = 2 * rows * sum(mul**2 * ir.dim for mul, ir in irreps)
    return Workload(
        "linear of irreps", inputs, {"irreps": irreps}, function, oracle, flops,
        inputs[0].nbytes, f"N={rows} {irreps}",
    )  # fmt: skip


def _each_backend(
    kind: Callable[..., nn.Module], *args: Any, **options: Any
) -> Callable[[str | None], nn.Module]:
    """The layer on a backend, built when it is first called."""
    return functools.cache(lambda backend: kind(*args, **options, backend=backend))


def tensor_product(
    layer: Layer, x: Tensor, y: Tensor, w: Tensor, scale: Tensor, ir_mul: bool = True
) -> Tensor:
    """The rows of a layer, path by path; `scale` holds the coefficients of all paths, in a row."""
    left, right = blocks(layer.x, x, ir_mul), blocks(layer.y, y, ir_mul)
    found = [x.new_zeros(len(x), ir.dim, mul) for mul, ir in layer.out]
    shapes = layer.weight_shapes()
    weights = w.split([math.prod(shape) for shape in shapes], -1)
    for instruction, weight, shape, c in zip(
        layer.instructions, weights, shapes, _cut(layer, scale), strict=True
    ):
        i, j, k, mode, _ = instruction
        text = EINSUM[mode].format("" if w.dim() == 1 else "e")
        weight = weight.unflatten(-1, shape)
        found[k] = found[k] + torch.einsum(text, left[i], right[j], weight, c)
    return torch.cat([(f if ir_mul else f.mT).flatten(1) for f in found], 1)


def blocks(irreps: Irreps, x: Tensor, ir_mul: bool = True) -> list[Tensor]:
    """(rows, 2l + 1, mul) of each block."""
    parts = x.split([item.dim for item in irreps], -1)
    if ir_mul:
        return [p.unflatten(-1, (ir.dim, mul)) for p, (mul, ir) in zip(parts, irreps, strict=True)]
    return [p.unflatten(-1, (mul, ir.dim)).mT for p, (mul, ir) in zip(parts, irreps, strict=True)]


def coefficients_of(layer: Layer) -> list[Tensor]:
    """The coefficients of each path."""
    fans = [0] * len(layer.out)
    for instruction in layer.instructions:
        fans[instruction[2]] += _fan(layer, instruction)
    return [
        wigner_3j(layer.x[i].ir.l, layer.y[j].ir.l, layer.out[k].ir.l)
        * math.sqrt(layer.out[k].ir.dim / fans[k])
        for i, j, k, *_ in layer.instructions
    ]


def _fan(layer: Layer, instruction: Instruction) -> int:
    """How many products are added into a number of the output."""
    muls, mode = layer.multiplicities(instruction), instruction[3]
    return {"uvu": muls.get("v", 1), "uuu": 1, "uvw": muls["u"] * muls.get("v", 1)}[mode]


def _scale(layer: Layer, device: torch.device) -> Tensor:
    flat = torch.cat([table.flatten() for table in coefficients_of(layer)])
    return flat.to(device, torch.float64)


def _cut(layer: Layer, scale: Tensor) -> list[Tensor]:
    tables = coefficients_of(layer)
    parts = scale.split([table.numel() for table in tables])
    return [part.view(table.shape) for part, table in zip(parts, tables, strict=True)]


def flops_of(layer: Layer) -> int:
    """Of one row: two products and a sum for each nonzero coefficient, channels times."""
    return sum(
        3 * int((table != 0).sum()) * math.prod(layer.multiplicities(instruction).values())
        for table, instruction in zip(coefficients_of(layer), layer.instructions, strict=True)
    )
