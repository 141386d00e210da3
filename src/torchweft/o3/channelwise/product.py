"""The channelwise tensor product, row by row or along the edges of a graph.

z[d, m, u] = Σ_{e: dst[e] = d} Σ_p c_p Σ_ab C[a,b,m] x[src[e],a,u] y[e,b,u] w[e,u]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchweft.core.operators.operands import same_kind
from torchweft.core.operators.operator import compiling
from torchweft.errors import DeviceError, DTypeError, ShapeError
from torchweft.o3.channelwise.calls import forward
from torchweft.o3.channelwise.operator import contraction
from torchweft.o3.channelwise.structure import Structure
from torchweft.o3.graph import Graph

__all__ = ["FORWARD", "channelwise_product"]

FORWARD = {weighted: str(forward(weighted)) for weighted in (False, True)}


def channelwise_product(
    structure: Structure,
    x: Tensor,
    y: Tensor,
    weight: Tensor | None = None,
    graph: Graph | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """z[d] = Σ_{e: dst[e] = d} Q(x[src[e]], y[e], weight[e]), the paths of a structure.

    Args:
        structure: blocks and paths.
        x: (N, Wx), rows of the graph's sources; without a graph (…, Wx).
        y: (E, Wy), a row for each edge; without a graph (…, Wy).
        weight: (E, Ww) or, shared by all edges, (Ww,); None where the structure has none.
        graph: the edges; None: row by row, with leading dimensions that broadcast.
        backend: "triton", "numba", "torch", or None for the fastest that serves the call.

    Returns:
        (num_nodes, Wz), or (…, Wz) without a graph, in the inputs' dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: an argument does not fit the others.
        BackendError: the backend cannot compute the call.

    Error: |z − z*| ≤ u|z*| + 4√K·u_acc·Σ|c x y w|, K terms per row.  Differentiable to any order;
    bitwise repeatable.  Moves at least x, y, weight and z once.
    """
    if weight is None:
        x, y = same_kind(x=x, y=y)
    else:
        x, y, weight = same_kind(x=x, y=y, weight=weight)
    if graph is None:
        if not compiling():
            _check_widths(structure, x, y, weight)
        return _row_by_row(structure, x, y, weight, backend)
    if not compiling() and not _fit(structure, x, y, weight, graph):
        _check_widths(structure, x, y, weight)
        _check_rows(graph, x, y, weight)
    return _contracted(
        structure, x, y, weight, graph.packed, graph.present, graph.tables[:3], backend
    )


def _row_by_row(
    structure: Structure, x: Tensor, y: Tensor, weight: Tensor | None, backend: str | None
) -> Tensor:
    shared = weight is not None and weight.dim() == 1
    given = [x, y] if weight is None or shared else [x, y, weight]
    lead = x.shape[:-1]
    if any(t.shape[:-1] != lead for t in given):
        lead = _common(given)
        given = [t.expand(*lead, t.shape[-1]) for t in given]
    rows = math.prod(lead)
    if len(lead) != 1:
        given = [t.reshape(rows, t.shape[-1]) for t in given]
    x, y, *rest = given
    weight = rest[0] if rest else weight
    z = _contracted(structure, x, y, weight, (), "", (rows, rows, rows), backend)
    return z if len(lead) == 1 else z.view(*lead, z.shape[-1])


def _contracted(
    structure: Structure,
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    packed: Sequence[Tensor],
    present: str,
    sizes: tuple[int, int, int],
    backend: str | None,
) -> Tensor:
    shared = weight is not None and weight.dim() == 1
    tensors = [x, y] if weight is None else [x, y, weight.unsqueeze(0) if shared else weight]
    call = FORWARD[weight is not None]
    rest = (structure.text, call, present, *sizes, shared, backend or "")
    return contraction([*tensors, *packed], rest)[0]


def _common(tensors: Sequence[Tensor]) -> torch.Size:
    leads = [t.shape[:-1] for t in tensors]
    try:
        found: torch.Size = torch.broadcast_shapes(*leads)  # type: ignore[no-untyped-call]
        return found
    except RuntimeError:
        names = ("x", "y", "weight")
        shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in zip(names, tensors, strict=False))
        raise ShapeError(
            f"leading dimensions of {shapes} do not broadcast: without a graph each row of one "
            "meets a row of the others. Pass equal leading dimensions, or a graph."
        ) from None


def _fit(structure: Structure, x: Tensor, y: Tensor, weight: Tensor | None, graph: Graph) -> bool:
    """Whether the arguments are valid, checked at every call."""
    wx, wy, _, ww = structure.widths
    if not isinstance(graph, Graph) or graph.src.device != x.device:
        return False
    num_x, _, edges = graph.tables[:3]
    if x.shape != (num_x, wx) or y.shape != (edges, wy):
        return False
    if weight is None or not ww:
        return weight is None and not ww
    return weight.shape == (edges, ww) or weight.shape == (ww,)


def _check_widths(structure: Structure, x: Tensor, y: Tensor, weight: Tensor | None) -> None:
    wx, wy, _, ww = structure.widths
    if (weight is None) == structure.weighted:
        if weight is None:
            raise ShapeError(
                f"weight is None but the paths of this product have weights: it must be (E, {ww}), "
                f"or ({ww},) shared by all edges. Pass weight."
            )
        raise ShapeError(
            f"weight is {tuple(weight.shape)} but no path of this product has a weight: it must "
            "be None. Leave weight out, or build the product with weighted paths."
        )
    for name, tensor, width in (("x", x, wx), ("y", y, wy), ("weight", weight, ww)):
        if tensor is not None and (not tensor.dim() or tensor.shape[-1] != width):
            raise ShapeError(
                f"{name} is {tuple(tensor.shape)}: its rows must have {width} numbers, which is "
                f"the width of the blocks that {structure!r} reads there. "
                f"Pass {name} of shape (…, {width})."
            )


def _check_rows(graph: Graph, x: Tensor, y: Tensor, weight: Tensor | None) -> None:
    if not isinstance(graph, Graph):
        raise DTypeError(
            f"graph is a {type(graph).__name__}: it must be a Graph, or None. "
            "Pass torchweft.o3.Graph(src, dst, num_nodes)."
        )
    num_x, _, edges = graph.tables[:3]
    if x.dim() != 2 or x.shape[0] != num_x:
        raise ShapeError(
            f"x is {tuple(x.shape)} but the graph reads {num_x} rows: it must be "
            f"({num_x}, {x.shape[-1]}). Pass such an x, or Graph(…, num_sources=len(x))."
        )
    for name, tensor in (("y", y), ("weight", weight)):
        if tensor is None or (name == "weight" and tensor.dim() == 1):
            continue
        if tensor.dim() != 2 or tensor.shape[0] != edges:
            raise ShapeError(
                f"{name} is {tuple(tensor.shape)} but the graph has {edges} edges: it must be "
                f"({edges}, {tensor.shape[-1]}), a row for each edge. Pass {name} in their order."
            )
    if graph.src.device != x.device:
        raise DeviceError(
            f"the graph is on {graph.src.device} and x on {x.device}: they must be on one device. "
            f"Pass graph.to({str(x.device)!r})."
        )
