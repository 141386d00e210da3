"""e3nn's layers, in its own layout; `pip install e3nn`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness.case import Candidate, Workload
from benchmarks.peers.layouts import from_mul_ir, to_mul_ir, to_mul_ir_rows
from benchmarks.workloads import potential, training
from benchmarks.workloads.equivariant import Layer, tensor_product
from benchmarks.workloads.training import Convolution, Library
from benchmarks.workloads.uuu import DEGREES, paths
from torchweft.o3 import Gate, Irreps, Linear
from torchweft.o3.tensor_product.instructions import weight_sizes

NAME = "e3nn"


def missing() -> str | None:
    return None if importlib.util.find_spec("e3nn") else "not installed: pip install e3nn"


def adapt(workload: Workload) -> Candidate | list[Candidate] | str:
    if workload.op.startswith("tensor product"):
        return _of_layer(workload)
    if workload.op in potential.OPS:
        found = potential.by_model(NAME, workload, lambda model: model)
        if workload.inputs[0].is_cuda:
            found += potential.by_model(f"{NAME} compiled", workload, potential.compiled())
        return found
    if workload.op == training.OP:
        return training.by_library(NAME, "torch", workload, library(convolution))
    if workload.op == "linear of irreps":
        return _linear(workload)
    if workload.op == "spherical harmonics":
        layer = _harmonics(workload.tables["irreps"], workload.inputs[0])
        return Candidate(NAME, "torch", layer, workload.inputs, workload.oracle)
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
    """Messages by its tensor product, added where they belong."""
    product = _product(layer, like)

    def function(x: Tensor, y: Tensor, w: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        return _summed(lambda rows: product(rows, y, w), x, src, dst)

    return function


def library(convolution: Callable[[Layer, Tensor], Convolution]) -> Library:
    """Its layers around a convolution; elements are one-hot scalars, as in its tutorials."""
    return Library(convolution, _harmonics, _linear_map, _by_element, _gate, _turned, _turned_back)


def _harmonics(irreps: Irreps, like: Tensor) -> Callable[[Tensor], Tensor]:
    from e3nn import o3

    return o3.SphericalHarmonics(str(irreps), True, "component").to(like)


def _linear_map(linear: Linear, like: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    from e3nn import o3

    irreps = (str(linear.irreps_in), str(linear.irreps_out))
    return o3.Linear(*irreps, internal_weights=False, shared_weights=True).to(like)


def _by_element(linear: Linear, like: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from e3nn import o3

    count = linear.num_elements
    product = o3.FullyConnectedTensorProduct(
        str(linear.irreps_in), f"{count}x0e", str(linear.irreps_out), in2_var=[1 / count],
        internal_weights=False, shared_weights=True,
    ).to(like)  # fmt: skip

    def function(x: Tensor, w: Tensor, element: Tensor) -> Tensor:
        return product(x, torch.nn.functional.one_hot(element, count).to(x), w)

    return function


def _gate(gate: Gate, like: Tensor) -> Callable[[Tensor], Tensor]:
    from e3nn.nn import Gate as Theirs

    acts = ([act.f for act in part.acts] for part in (gate.act_scalars, gate.act_gates))
    scalars, gates = acts
    irreps = (gate.act_scalars.irreps_in, gate.act_gates.irreps_in, gate.irreps_gated)
    first, second, third = map(str, irreps)
    return Theirs(first, scalars, second, gates, third).to(like)


def _turned(linear: Linear, weight: Tensor) -> Tensor:
    """(K, Σ u · w) to (Σ u · K · w,): a product with a one-hot mixes u, K and w."""
    parts = [view.transpose(0, 1).flatten() for view in linear.weight_views(weight)]
    return torch.cat(parts)


def _turned_back(linear: Linear, weight: Tensor) -> Tensor:
    count, parts = linear.num_elements, []
    flat = weight.split([count * size for size in weight_sizes(linear.instructions)])
    for instruction, part in zip(linear.instructions, flat, strict=True):
        u, w = instruction.path_shape
        parts.append(part.view(u, count, w).transpose(0, 1).flatten(1))
    return torch.cat(parts, 1)


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
