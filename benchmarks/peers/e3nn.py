"""e3nn's TensorProduct, in its own layout; `pip install e3nn`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.peers.layouts import from_mul_ir, to_ir_mul_rows, to_mul_ir, to_mul_ir_rows
from benchmarks.suites import training
from benchmarks.suites.equivariant import Layer, tensor_product
from benchmarks.suites.training import Convolution
from benchmarks.suites.uuu import DEGREES, paths
from weft.bench.case import Candidate, Workload

NAME = "e3nn"


def missing() -> str | None:
    return None if importlib.util.find_spec("e3nn") else "not installed: pip install e3nn"


def adapt(workload: Workload) -> Candidate | str:
    if workload.op.startswith("tensor product"):
        return _of_layer(workload)
    if workload.op == training.OP:
        return training.with_convolution(NAME, "torch", workload, convolution)
    if workload.op == "linear of irreps":
        return _linear(workload)
    if workload.op != "uuu":
        return f"{workload.op} is no layer of e3nn"
    from e3nn import o3

    x, y, w = workload.inputs
    channels = x.shape[2]
    irreps = "+".join(f"{channels}x{degree}{'eo'[degree % 2]}" for degree in DEGREES)
    layer = o3.TensorProduct(
        irreps,
        irreps,
        irreps,
        [(*path, "uuu", True) for path in paths()],
        irrep_normalization="none",
        path_normalization="none",
        internal_weights=False,
        shared_weights=True,
    ).to(x)

    def oracle(x: Tensor, y: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        weights = w.unflatten(0, (len(paths()), channels))
        return to_mul_ir(workload.oracle(from_mul_ir(x), from_mul_ir(y), weights, scale=scale))

    inputs = (to_mul_ir(x), to_mul_ir(y), w.flatten())
    return Candidate(NAME, "torch", layer, inputs, oracle)


def _of_layer(workload: Workload) -> Candidate:
    """A tensor product by itself, or of gathered rows and added where it belongs."""
    layer: Layer = workload.tables["layer"]
    x, y, w = workload.inputs
    product = _product(layer, x)
    src, dst = workload.tables.get("src"), workload.tables.get("dst")

    def convolved(message: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return message(x) if src is None or dst is None else _summed(message, x, src, dst)

    def function(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return convolved(lambda rows: product(rows, y, w), x)

    def oracle(x: Tensor, y: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return convolved(lambda rows: tensor_product(layer, rows, y, w, scale, ir_mul=False), x)

    inputs = (to_mul_ir_rows(layer.x, x), to_mul_ir_rows(layer.y, y), w)
    return Candidate(NAME, "torch", function, inputs, oracle)


def convolution(layer: Layer, like: Tensor) -> Convolution:
    """Rows of nodes turned into its layout and back; those of edges, of one copy, lie alike."""
    product = _product(layer, like)

    def function(x: Tensor, y: Tensor, w: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        x = to_mul_ir_rows(layer.x, x)
        found = _summed(lambda rows: product(rows, y, w), x, src, dst)
        return to_ir_mul_rows(layer.out, found)

    return function


def _summed(message: Callable[[Tensor], Tensor], x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    found = message(x.index_select(0, src))
    return found.new_zeros(len(x), found.shape[1]).index_add(0, dst, found)


def _product(layer: Layer, like: Tensor) -> torch.nn.Module:
    from e3nn import o3

    return o3.TensorProduct(
        str(layer.x),
        str(layer.y),
        str(layer.out),
        list(layer.instructions),
        internal_weights=False,
        shared_weights=layer.shared,
    ).to(like)


def _linear(workload: Workload) -> Candidate:
    from e3nn import o3

    irreps = workload.tables["irreps"]
    x, w = workload.inputs
    layer = o3.Linear(str(irreps), str(irreps), internal_weights=False, shared_weights=True).to(x)

    def oracle(x: Tensor, w: Tensor, scale: None = None) -> Tensor:
        return workload.oracle(x, w, ir_mul=False)

    return Candidate(NAME, "torch", layer, (to_mul_ir_rows(irreps, x), w), oracle)
