"""Contract cases of tensor products by instructions and of linear maps: modes, weights, layouts.

Oracles sum each instruction densely, by its letters: z_out = Σ C x_first y_second weight.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.cases.channelwise import GRAPHS, Edges
from tests.cases.suite import Suite
from torchweft import o3
from torchweft.o3.irreps.irreps import join, split
from torchweft.o3.irreps.wigner import wigner_3j
from torchweft.testing.contract import Case

__all__ = ["MODULES", "conv_case", "linear_case", "product", "product_case", "suite"]

Instructions = Sequence[tuple[Any, ...]]
Sign = Callable[[Tensor], Tensor]

MODULES: dict[str, tuple[str, str, str, Instructions]] = {
    "uvu": (
        "3x0e+3x1o",
        "0e+1o+2e",
        "6x0e+3x0e+3x1o+3x1e",
        [
            (0, 0, 1, "uvu", True),
            (1, 1, 1, "uvu", True),
            (0, 1, 2, "uvu", True),
            (1, 2, 2, "uvu", True),
            (1, 1, 3, "uvu", True),
        ],
    ),
    "every channelwise mode": (
        "2x0e+4x1o",
        "2x0e+4x1o+2x1e",
        "4x1o+2x0e+8x1o+4x1e+2x1o",
        [
            (1, 0, 0, "uvu", True),
            (1, 0, 2, "uvuv", True),
            (0, 1, 2, "uvuv", False),
            (0, 1, 0, "uvv", True),
            (0, 0, 1, "uuu", False, 0.3),
            (0, 0, 1, "uvv", False),
            (1, 1, 3, "uuu", True),
            (0, 0, 1, "uuu", True),
        ],
    ),
    "uvw": (
        "2x0e+3x1o",
        "2x0e+1o",
        "4x0e+2x1o+1x1e+2x2e",
        [
            (0, 0, 0, "uvw", True),
            (1, 1, 0, "uvw", True),
            (0, 1, 1, "uvw", True),
            (1, 0, 1, "uvw", True),
            (1, 1, 2, "uvw", True),
        ],
    ),
    "uvw of one y": (
        "2x0e+3x1o",
        "0e+1o",
        "4x0e+2x1o+1x1e+2x2e",
        [(0, 0, 0, "uvw", True), (1, 1, 0, "uvw", True), (1, 1, 2, "uvw", True)],
    ),
    "uuw": (
        "3x0e+3x1o",
        "3x0e+3x1o",
        "1x0e+2x1o+3x1e",
        [(0, 0, 0, "uuw", False), (0, 1, 1, "uuw", True), (1, 1, 2, "uuu", True)],
    ),
    "pairs": (
        "3x0e+3x1o",
        "3x0e+3x1o",
        "3x1e+2x0e+3x0e",
        [(1, 1, 0, "uvu<v", True), (1, 1, 1, "u<vw", True), (0, 0, 2, "uvu<v", False)],
    ),
    "many copies": (
        "9x0e+10x1o",
        "10x0e+9x1o",
        "10x1o+9x1o+2x0e+10x1o",
        [
            (1, 0, 0, "uvu", True),
            (1, 0, 0, "uvu", False),
            (0, 1, 1, "uvu", True),
            (1, 0, 3, "uvv", False),
            (1, 1, 2, "uvw", True),
            (1, 0, 0, "uuu", True),
        ],
    ),
}
"""Irreps and instructions; some outputs have several cuts, some no instruction."""

MIXING = ("uvw", "uvw of one y", "uuw", "pairs", "many copies")
"""Those that store results on the way."""


def product(
    x: Tensor, y: Tensor, weight: Tensor | None, module: Any, sign: Sign = torch.positive
) -> Tensor:
    """The dense sum over the instructions of a module."""
    firsts = split(x, module.irreps_in1, module.layout)
    seconds = split(y, module.irreps_in2, module.layout)
    blocks = [x.new_zeros(y.shape[0], *(mul, ir.dim)) for mul, ir in module.irreps_out]
    start = 0
    for instruction in module.instructions:
        a, b = firsts[instruction.i_in1], seconds[instruction.i_in2]
        mode = instruction.mode
        if mode.pairs:
            u, v = torch.triu_indices(a.shape[1], a.shape[1], 1, device=a.device)
            a, b = a[:, u], b[:, v]
        l1, l2, l3 = (t.shape[-1] // 2 for t in (a, b, blocks[instruction.i_out]))
        table = wigner_3j(l1, l2, l3, torch.float64, x.device)
        operands = [a, b, sign(table * instruction.path_weight).to(x.dtype)]
        letters = f"z{mode.first}i,z{mode.second}j,ijm"
        if instruction.has_weight and weight is not None:
            size = math.prod(instruction.path_shape)
            part = weight.narrow(-1, start, size)
            start += size
            operands.append(part.reshape(*part.shape[:-1], *instruction.path_shape))
            letters += f",{'z' * (weight.dim() - 1)}{mode.weight}"
        out = mode.out if not mode.mixes or instruction.has_weight else ""
        value = torch.einsum(f"{letters}->z{out}m", *operands)
        k = instruction.i_out
        blocks[k] = blocks[k] + value.reshape(blocks[k].shape)
    return join(blocks, module.layout)


def _convolution(
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    src: Tensor,
    dst: Tensor,
    num_nodes: int,
    module: Any,
    sign: Sign = torch.positive,
) -> Tensor:
    messages = product(x[src.long()], y, weight, module, sign)
    return messages.new_zeros(num_nodes, messages.shape[1]).index_add(0, dst.long(), messages)


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, module: o3.Linear, sign: Sign = torch.positive
) -> Tensor:
    blocks = split(x, module.irreps_in, module.layout)
    out = [x.new_zeros(x.shape[0], item.mul, item.ir.dim) for item in module.irreps_out]
    start = shift = 0
    for i, k, shape, factor in module.instructions:
        if i >= 0:
            size = shape[0] * shape[1]
            matrix = weight.narrow(-1, start, size)
            matrix = matrix.reshape(*weight.shape[:-1], *shape) * factor
            start += size
            letters = f"zui,{'z' * (weight.dim() - 1)}uw->zwi"
            out[k] = out[k] + torch.einsum(letters, blocks[i], matrix)
        elif bias is not None:
            out[k] = out[k] + bias[shift : shift + shape[0], None]
            shift += shape[0]
    return join(out, module.layout)


def _call(*inputs: Tensor | None, module: nn.Module, backend: str | None = None) -> Tensor:
    found: Tensor = module(*inputs)
    return found


def _call_conv(
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    src: Tensor,
    dst: Tensor,
    num_nodes: int,
    module: nn.Module,
    backend: str | None = None,
) -> Tensor:
    found: Tensor = module(x, y, weight, src, dst, num_nodes)
    return found


def product_case(
    name: str, shared: bool, layout: str, rows: int = 7, backend: str | None = None
) -> Case:
    """A TensorProduct of MODULES."""
    irreps1, irreps2, out, instructions = MODULES[name]
    module = o3.TensorProduct(
        irreps1,
        irreps2,
        out,
        instructions,
        internal_weights=False,
        shared_weights=shared,
        layout=layout,
        backend=backend,
    )
    label = f"TensorProduct {name}, {layout}{', shared' if shared else ''}, N={rows}"
    return _case(label, _call, product, module, (rows, rows), {}, name in MIXING)


def conv_case(name: str, graph: str, shared: bool, layout: str) -> Case:
    """A TensorProductConv of MODULES on one of GRAPHS."""
    irreps1, irreps2, out, instructions = MODULES[name]
    module = o3.TensorProductConv(
        irreps1, irreps2, out, instructions, shared_weights=shared, layout=layout
    )
    edges = GRAPHS[graph]
    assert isinstance(edges, Edges)
    tables = {"src": edges.src, "dst": edges.dst, "num_nodes": edges.num_nodes}
    label = f"TensorProductConv {name}, {layout}{', shared' if shared else ''}, {graph}"
    rows = (edges.num_sources, edges.src.numel())
    return _case(label, _call_conv, _convolution, module, rows, tables, name in MIXING)


def linear_case(shared: bool, layout: str, rows: int = 7) -> Case:
    """A Linear with several items into one, one without any, and biases if weights are shared."""
    module = o3.Linear(
        "2x0e+3x1o+4x0e",
        "3x0e+2x1o+2x1e",
        internal_weights=False,
        shared_weights=shared,
        biases=shared,
        layout=layout,
    )
    name = f"Linear, {layout}{', shared' if shared else ''}, N={rows}"
    randn = _randn(name)
    lead = () if shared else (rows,)
    weight = randn(*lead, module.weight_numel)
    bias = randn(module.bias_numel) if shared else None
    inputs = randn(rows, module.irreps_in.dim), weight, bias
    magnitude = functools.partial(_linear, sign=torch.abs)
    return Case(
        name,
        _call,
        _linear,
        inputs,
        {"module": module},
        factors=2,
        stored=2,
        magnitude=magnitude,
        together=True,
    )


def _case(
    name: str,
    call: Callable[..., Tensor],
    oracle: Callable[..., Tensor],
    module: Any,
    rows: tuple[int, int],
    tables: dict[str, Any],
    mixes: bool,
) -> Case:
    randn = _randn(name)
    lead = () if module.shared_weights else (rows[1],)
    inputs = (
        randn(rows[0], module.irreps_in1.dim),
        randn(rows[1], module.irreps_in2.dim),
        randn(*lead, module.weight_numel),
    )
    return Case(
        name,
        call,
        oracle,
        inputs,
        {"module": module, **tables},
        stored=4,
        factors=4 if mixes else 1,
        magnitude=functools.partial(oracle, sign=torch.abs),
        together=True,
    )


def _randn(name: str) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return functools.partial(torch.randn, dtype=torch.float64, generator=generator)


@functools.cache
def suite() -> Suite:
    """The instructed products' part of `make check`."""
    settings = [(True, "mul_ir"), (False, "ir_mul"), (False, "mul_ir"), (True, "ir_mul")]
    cases = [product_case(name, *how) for name in MODULES for how in settings[:2]]
    cases += [product_case("uvw", *how, rows=0) for how in settings[:2]]
    cases += [conv_case(name, "unsorted", *how) for name in MODULES for how in settings[2:]]
    cases += [conv_case("uvu", graph, False, "mul_ir") for graph in ("two sets", "no edges", "hub")]
    cases += [conv_case("uvw", graph, True, "mul_ir") for graph in ("two sets", "no edges")]
    cases += [linear_case(*how) for how in settings] + [linear_case(True, "mul_ir", rows=0)]
    full = [
        product_case("every channelwise mode", False, "mul_ir", rows=3),
        product_case("pairs", True, "mul_ir", rows=3),
        conv_case("uvw", "two sets", False, "mul_ir"),
        product_case("uvw of one y", False, "mul_ir", rows=3),
        linear_case(True, "mul_ir", rows=3),
    ]
    doors = [
        product_case("uvw", False, "mul_ir", rows=2, backend="torch"),  # by operators
        conv_case("uvu", "one edge", False, "mul_ir"),
    ]
    return Suite(cases, full, [product_case("uuw", True, "mul_ir", rows=2)], doors, ())
