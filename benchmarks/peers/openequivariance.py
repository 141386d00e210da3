"""OpenEquivariance's kernels, printed and compiled for a layer; `pip install openequivariance`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.case import Candidate, Workload
from benchmarks.peers import e3nn
from benchmarks.peers.layouts import to_mul_ir_rows
from benchmarks.workloads import potential, training
from benchmarks.workloads.equivariant import Layer, tensor_product
from benchmarks.workloads.training import Convolution

NAME = "OpenEquivariance"


def missing() -> str | None:
    if importlib.util.find_spec("openequivariance") is None:
        return "not installed: pip install openequivariance"
    return None if torch.cuda.is_available() else "its kernels are for GPUs"


def adapt(workload: Workload) -> Candidate | list[Candidate] | str:
    model = workload.op in (*potential.OPS, training.OP)
    if not model and not workload.op.startswith("tensor product"):
        return f"{workload.op} is no layer of OpenEquivariance"
    layer: Layer | None = None if model else workload.tables["layer"]
    if reason := (layer and _refused(layer)) or _unloadable():
        return reason
    if workload.op in potential.OPS:
        return potential.by_model(NAME, workload, _potential)
    if layer is None:
        if reason := e3nn.missing():
            return f"a model takes all layers but the convolution from e3nn, which is {reason}"
        conv = functools.partial(convolution, layout="mul_ir")
        return training.by_library(NAME, "cuda", workload, e3nn.library(conv))
    if "src" not in workload.tables:
        return _rows(workload, layer)
    if layer.instructions[0][3] != "uvu":
        return "in the layout ir_mul its kernels take uvu alone"
    conv = convolution(layer, workload.inputs[0])
    src, dst = workload.tables["src"], workload.tables["dst"]
    return Candidate(
        NAME, "cuda", lambda x, y, w: conv(x, y, w, src, dst), workload.inputs, workload.oracle
    )


def _unloadable() -> str | None:
    """Why it cannot be used.  Its first import in a fresh folder compiles for a minute."""
    try:
        openequivariance = importlib.import_module("openequivariance")
    except (ImportError, OSError) as error:
        return f"it does not load ({error})"
    if not openequivariance.BUILT_EXTENSION:
        return f"its extension does not load ({openequivariance.BUILT_EXTENSION_ERROR})"
    return None


def _potential(model: torch.nn.Module) -> torch.nn.Module:
    """As MACE turns it: convolutions, with atomic sums."""
    from mace.cli.convert_e3nn_oeq import run

    turned: torch.nn.Module = run(model, device=next(model.parameters()).device.type)
    return turned


def convolution(layer: Layer, like: Tensor, layout: str = "ir_mul") -> Convolution:
    """Of a layer of weighted uvu."""
    import openequivariance as oeq

    problem = _problem(layer, like.dtype, layout)
    module = functools.cache(lambda fixed: oeq.TensorProductConv(problem, deterministic=fixed))

    def function(x: Tensor, y: Tensor, w: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        order = None if layer.shared else transposing(src, dst)
        found: Tensor = module(order is not None)(x, y, w, dst, src, order)
        return found

    return function


@functools.lru_cache(maxsize=1)  # tensors are known by their identity
def transposing(src: Tensor, dst: Tensor) -> Tensor | None:
    """The edges by (src, dst): it then sums in a fixed order, without atomics.

    None, for its atomic sums, unless the edges are those of a symmetric graph by (dst, src).
    """
    nodes = int(torch.maximum(src.max(), dst.max())) + 1
    rows = dst * nodes + src
    columns, order = (src * nodes + dst).sort()
    return order if bool((columns == rows).all()) else None


def _rows(workload: Workload, layer: Layer) -> Candidate:
    """Row by row, in the layout mul_ir; weights in the order of its code."""
    import openequivariance as oeq

    x, y, w = workload.inputs
    product = oeq.TensorProduct(_problem(layer, x.dtype, "mul_ir"))
    numbers = torch.arange(layer.weight_numel).view(*(() if layer.shared else (1,)), -1)
    order = product.reorder_weights_from_e3nn(numbers).flatten().to(x.device)
    back = order.argsort()

    def oracle(x: Tensor, y: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return tensor_product(layer, x, y, w[..., back], scale, ir_mul=False)

    inputs = (to_mul_ir_rows(layer.x, x), to_mul_ir_rows(layer.y, y), w[..., order])
    return Candidate(NAME, "cuda", product, inputs, oracle)


def _refused(layer: Layer) -> str | None:
    modes = {mode for *_, mode, _ in layer.instructions}
    if modes not in ({"uvu"}, {"uvw"}) or not all(weighted for *_, weighted in layer.instructions):
        return "its kernels take uvu or uvw, one of both, and a weight in every path"
    if layer.shared and modes == {"uvw"}:
        return "its code for shared weights that mix channels compiles for more than a minute"
    return None


def _problem(layer: Layer, dtype: torch.dtype, layout: str) -> Any:
    import openequivariance as oeq

    number = oeq.torch_to_oeq_dtype(dtype)
    return oeq.TPProblem(
        *(str(irreps) for irreps in (layer.x, layer.y, layer.out)),
        list(layer.instructions),
        shared_weights=layer.shared,
        internal_weights=False,
        irrep_dtype=number,
        weight_dtype=number,
        layout=layout,
    )
