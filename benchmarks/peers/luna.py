"""LunaEquivariance's fused products and layers; `pip install LunaEquivariance`, and nvcc.

It compiles a product where it is first called.  Its layout is e3nn's, its graphs are sorted by
target and kept.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.case import Candidate, Workload
from benchmarks.peers import e3nn
from benchmarks.peers.layouts import to_mul_ir_rows
from benchmarks.workloads import potential, training
from benchmarks.workloads.equivariant import Layer, tensor_product
from benchmarks.workloads.training import Convolution, Library
from torchweft.o3 import Gate, Irreps, Linear

NAME = "LunaEquivariance"


def missing() -> str | None:
    if importlib.util.find_spec("LunaEquivariance") is None:
        return "not installed: pip install LunaEquivariance"
    if not torch.cuda.is_available():
        return "its kernels are for GPUs"
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None or shutil.which("ninja") is None:
        return "it compiles kernels: nvcc (CUDA_HOME) and ninja are needed"
    return e3nn.missing()


def adapt(workload: Workload) -> Candidate | list[Candidate] | str:
    if workload.op in potential.OPS:
        return potential.by_model(NAME, workload, _potential)
    if workload.op == training.OP:
        return training.by_library(NAME, "cuda", workload, library())
    if not workload.op.startswith("tensor product"):
        return f"{workload.op} is no product of LunaEquivariance"
    layer: Layer = workload.tables["layer"]
    if len({instruction[3] for instruction in layer.instructions}) > 1:
        return "its kernels take one mode"
    x, y, w = workload.inputs
    src, dst = workload.tables.get("src"), workload.tables.get("dst")
    if src is None or dst is None:
        function: Callable[..., Tensor] = _product(layer, x)
    else:
        conv = convolution(layer, x)
        function = lambda x, y, w: conv(x, y, w, src, dst)  # noqa: E731

    def oracle(x: Tensor, y: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        rows = x if src is None else x.index_select(0, src)
        found = tensor_product(layer, rows, y, w, scale, ir_mul=False)
        return (
            found
            if dst is None
            else found.new_zeros(len(x), layer.out.dim).index_add(0, dst, found)
        )

    inputs = (to_mul_ir_rows(layer.x, x), to_mul_ir_rows(layer.y, y), w)
    return Candidate(NAME, "cuda", function, inputs, oracle)


def _potential(model: Any) -> torch.nn.Module:
    """Its convolutions in MACE's model; it has no other layers that MACE's take the place of."""
    like = next(model.parameters())
    for block in model.interactions:
        tp = block.conv_tp
        irreps = (Irreps(str(i)) for i in (tp.irreps_in1, tp.irreps_in2, tp.irreps_out))
        block.conv_tp = _Fused(Layer(*irreps, tuple(i[:5] for i in tp.instructions)), like)
        block.conv_fusion = True
    return model


class _Fused(torch.nn.Module):
    """A convolution as MACE calls it where it is fused."""

    def __init__(self, layer: Layer, like: Tensor) -> None:
        super().__init__()
        self._conv = convolution(layer, like)

    def forward(self, x: Tensor, y: Tensor, w: Tensor, edge_index: Tensor) -> Tensor:
        """Of nodes, edges and their weights."""
        return self._conv(x, y, w, *_ends(edge_index))


@functools.lru_cache(maxsize=1)
def _ends(edge_index: Tensor) -> tuple[Tensor, Tensor]:
    """The same two tensors at every call: its graph is kept by their identity."""
    src, dst = edge_index.unbind(0)
    return src, dst


def convolution(layer: Layer, like: Tensor) -> Convolution:
    """Messages and their sums in one kernel; edges must be sorted by target."""
    module = _product(layer, like, "TensorProductConv")

    def function(x: Tensor, y: Tensor, w: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        found: Tensor = module(x, y, w, graph=_graph(src, dst, len(x)))
        return found

    return function


@functools.lru_cache(maxsize=1)  # tensors are known by their identity
def _graph(src: Tensor, dst: Tensor, num_nodes: int) -> Any:
    from LunaEquivariance import make_graph

    return make_graph(src, dst, num_nodes)


def library() -> Library:
    """Its layers; linear maps by element, which it has not, are e3nn's."""
    return e3nn.library(convolution)._replace(
        harmonics=_harmonics, linear=_linear, gate=_gate, by_rows_of_elements=True
    )


def _product(layer: Layer, like: Tensor, kind: str = "TensorProduct") -> torch.nn.Module:
    import LunaEquivariance

    module: torch.nn.Module = getattr(LunaEquivariance, kind)(
        *map(str, (layer.x, layer.y, layer.out)),
        list(layer.instructions),
        internal_weights=False,
        shared_weights=layer.shared,
        dtype=like.dtype,
    )
    return module.to(like.device)


def _harmonics(irreps: Irreps, like: Tensor) -> Callable[[Tensor], Tensor]:
    from LunaEquivariance import SphericalHarmonics

    module: torch.nn.Module = SphericalHarmonics(str(irreps), True, "component", dtype=like.dtype)
    return module.to(like.device)


def _linear(linear: Linear, like: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    from LunaEquivariance import Linear as Theirs

    irreps = map(str, (linear.irreps_in, linear.irreps_out))
    module: torch.nn.Module = Theirs(
        *irreps, internal_weights=False, shared_weights=True, dtype=like.dtype
    )
    return module.to(like.device)


def _gate(gate: Gate, like: Tensor) -> Callable[[Tensor], Tensor]:
    from LunaEquivariance import Gate as Theirs

    scalars, gates = ([act.f for act in part.acts] for part in (gate.act_scalars, gate.act_gates))
    irreps = (gate.act_scalars.irreps_in, gate.act_gates.irreps_in, gate.irreps_gated)
    first, second, third = map(str, irreps)
    module: torch.nn.Module = Theirs(first, scalars, second, gates, third, dtype=like.dtype)
    return module.to(like.device)
