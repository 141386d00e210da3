"""Channelwise products whose weights are a radial network's last matrix: never stored.

z[d] = Σ_{e: dst[e] = d} Q(x[src[e]], y[e], h[e] A)

    torchweft::o3_radial(Tensor[] tensors, str structure, str call, …) -> Tensor[]

The form is linear in x, y, h and A, so its derivatives of every order are calls of the same
operator.  In a call h stands in slot w, and A in slot a.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.core.backend import choose
from torchweft.core.operators.operands import same_kind
from torchweft.core.operators.tensor_list import Call as Door
from torchweft.core.operators.tensor_list import ListOperator, Rest, Results, Tensors
from torchweft.o3.backends import executor
from torchweft.o3.channelwise.calls import Call, Result, read_call
from torchweft.o3.channelwise.operator import Contraction, one_by_one
from torchweft.o3.channelwise.structure import Structure, read
from torchweft.o3.edges.graph import Graph, unpack
from torchweft.o3.radial_linear import edge_blocks as blocks

__all__ = ["RADIAL_PRECISIONS", "radial_product"]

RADIAL_PRECISIONS = ("tf32x3", "tf32")
"""Precisions of products with A in float32 on tensor cores: as float32, or mantissas of 10 bits.

They come in parts of 16 bits, which take half the time of TF32's and have as many digits.
"""

_FORWARD = str(Call("xywa", (Result("z", ((0, 1, 2, 3),)),)))


def radial_product(
    structure: Structure,
    x: Tensor,
    y: Tensor,
    radial: Tensor,
    radial_weight: Tensor,
    graph: Graph,
    *,
    precision: str = "tf32x3",
    backend: str | None = None,
) -> Tensor:
    """z[d] = Σ_{e: dst[e] = d} Q(x[src[e]], y[e], radial[e] @ radial_weight).

    Args:
        structure: blocks and paths, with weights.
        x: (N, Wx), rows of the graph's sources.
        y: (E, Wy), a row for each edge.
        radial: (E, H).
        radial_weight: (H, Ww).
        graph: the edges.
        precision: of products with radial_weight in float32, where tensor cores compute them.
        backend: "triton", "numba", "torch", or None for the fastest that can serve.

    Returns:
        (num_nodes, Wz) in the inputs' dtype.

    Error: |z − z*| ≤ u|z*| + 4√K·u_acc·Σ|c x y h A|, K terms a row; with "tf32" besides 2^-10 of
    this sum.  By tensor cores h counts as no smaller than 2^-16 of its edge's largest, A as no
    smaller than that part of its column's, or of those that add to the same channel of z.
    Differentiable to any order; bitwise repeatable.

    Memory beside the results: forward by kernels a copy of h and y.  Else, and in derivatives,
    h A of a block of edges (see edge_blocks.BLOCK_BYTES), and gradients of it as large.
    """
    x, y, radial, radial_weight = same_kind(x=x, y=y, radial=radial, radial_weight=radial_weight)
    tensors = [x, y, radial, radial_weight, *graph.packed]
    sizes = (*graph.tables[:3], radial.shape[1])
    rest = (structure.text, _FORWARD, graph.present, *sizes, backend or "", precision)
    return _radial(tensors, rest)[0]


class _Radial(Contraction):
    """Derivatives of Q(x, y, h A, z)."""

    def body(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        structure, call, present, num_x, num_z, num_edges, hidden, backend, precision = rest
        what, dtype = read_call(call), tensors[0].dtype
        count = len(what.slots)
        wide = torch.promote_types(dtype, torch.float32)
        values = [t.to(wide).contiguous() for t in tensors[:count]]
        tables = unpack(tensors[count:], present, num_x, num_z, num_edges)
        like = values[0]
        fused = _fused(backend or None, like.device.type)
        with torch.autocast(like.device.type, enabled=False):
            if fused and fused.serves(read(structure), what, like, tables, hidden, precision):
                ((_, (term,)),) = what.results  # of x, y, h and A
                operands = [values[t] for t in term]
                found = fused.run(read(structure), operands, tables, hidden, precision)
            else:
                found = blocks.run(read(structure), what, values, tables, hidden, backend or None)
        return [result.to(dtype) for result in found]

    def fake(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        structure, call, _, num_x, num_z, num_edges, hidden, *_ = rest
        width = read(structure).width
        shapes = {
            "x": (num_x, width("x")),
            "y": (num_edges, width("y")),
            "z": (num_z, width("z")),
            "w": (num_edges, hidden),
            "a": (hidden, width("w")),
        }
        return [tensors[0].new_empty(shapes[slot]) for slot, _ in read_call(call).results]

    def batch(
        self, call: Door, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        self.refuse_mapped_graph(dims, rest)
        return one_by_one(call, size, dims, tensors, rest)


@functools.cache
def _fused(backend: str | None, device: str) -> Any:
    """The module of the fused kernel, where it may serve."""
    if choose(backend, device) != "triton":
        return None
    return executor("radial_linear", "triton")


_radial = ListOperator(
    "o3_radial",
    "str structure, str call, str present, SymInt num_x, SymInt num_z, SymInt num_edges, "
    "SymInt hidden, str backend, str precision",
    _Radial(),
)
