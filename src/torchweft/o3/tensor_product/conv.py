"""Convolution of features on a graph by a tensor product on its edges.

out[d] = Σ_{e: dst[e] = d} tp(x[src[e]], y[e], weight[e])
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.core.operators.operands import same_kind
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.channelwise.product import channelwise_product
from torchweft.o3.edges.graph import Graph, graph_of
from torchweft.o3.irreps.layout import check_rows
from torchweft.o3.radial_linear.operator import RADIAL_PRECISIONS, radial_product
from torchweft.o3.tensor_product.module import InstructedModule

__all__ = ["TensorProductConv"]


class TensorProductConv(InstructedModule):
    """out[d] = Σ_{e: dst[e] = d} tp(x[src[e]], y[e], weight[e]), tp the TensorProduct of the same.

    Args:
        irreps_in1: of x, the features of the nodes.
        irreps_in2: of y, those of the edges, usually spherical harmonics of their directions.
        irreps_out: of the result; items that no instruction reaches are zero.
        instructions: (i_in1, i_in2, i_out, mode, has_weight) or with a path_weight, 1 by default.
        in1_var: see TensorProduct, as the next four.
        in2_var: variance of each item of y.
        out_var: variance that each item of the result shall have.
        irrep_normalization: "component" (None), "norm" or "none".
        path_normalization: "element" (None), "path" or "none".
        internal_weights: whether the module owns its weight, which then is shared; None: no.
        shared_weights: one weight for all edges, or one an edge; None: one an edge, unless
            internal.
        layout: "mul_ir", e3nn's, or "ir_mul", of x, y and the result.
        backend: "triton", "numba", "torch", or None for the fastest that can serve.  numba holds
            channelwise modes; where triton or numba lacks a part, a call raises BackendError.
        precision: of float32 products with radial_weight, on tensor cores: "tf32x3", as exact as
            float32, or "tf32" (mantissas of 10 bits).

    Channelwise modes (uvu, uvv, uuu, uvuv) are one kernel: no message is stored.  uvw and uuw
    store what they mix: for each node if weights are shared, else for each edge.
    """

    shares = False

    def __init__(self, *given: Any, precision: str = "tf32x3", **options: Any) -> None:
        if precision not in RADIAL_PRECISIONS:
            raise DTypeError(
                f"precision is {precision!r}: it must be one of {', '.join(RADIAL_PRECISIONS)}. "
                'Leave it out for "tf32x3", which is as exact as float32.'
            )
        super().__init__(*given, **options)
        self.precision = precision

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        weight: Tensor | Sequence[Tensor] | None = None,
        src: Tensor | Graph | None = None,
        dst: Tensor | None = None,
        num_nodes: int | None = None,
        *,
        radial: Tensor | None = None,
        radial_weight: Tensor | None = None,
    ) -> Tensor:
        """The convolution; `conv(x, y, weight, src, dst)` or `conv(x, y, weight, graph)`.

        Args:
            x: (rows, D1), row src[e] for edge e.
            y: (E, D2).
            weight: (E, weight_numel), or (weight_numel,) with shared_weights; None: the module's,
                or radial @ radial_weight.
            src: (E,) rows of x, or a Graph in place of src, dst and num_nodes.
            dst: (E,) rows of the result; unsorted, repeated and missing ones are welcome.
            num_nodes: rows of the result; None: as many as x has.
            radial: (E, H), in place of weight: weight = radial @ radial_weight.
            radial_weight: (H, weight_numel).

        Returns:
            (num_nodes, D_out) in the inputs' dtype, the same bits at every call.

        Note:
            radial @ radial_weight is not stored where all modes are channelwise: of at most a block
            of edges are the weights in memory, in gradients too.  With other modes it is formed.
        """
        if not isinstance(src, Graph):
            check_rows("x", x, self.irreps_in1, self)
        graph = self._graph(x, src, dst, num_nodes)
        if radial is None and radial_weight is None:
            z = self._cached(x, y, weight, graph)
            if z is not None:
                return z
        else:
            check_rows("x", x, self.irreps_in1, self)
            check_rows("y", y, self.irreps_in2, self)
            radial, radial_weight = self._radial(weight, radial, radial_weight)
            direct, mixed, dense, *_ = self.recipe.parts
            if mixed is None and not dense and any(s.weighted for s in direct):
                self._check_edges(x, y, radial, graph, "radial")
                return self._fused(x, y, radial, radial_weight, graph)
            weight = radial @ radial_weight
        x, y, flat = self._checked(x, y, weight)
        self._check_edges(x, y, flat, graph)
        return self._evaluated(x, y, flat, graph)

    def _fused(
        self, x: Tensor, y: Tensor, radial: Tensor, radial_weight: Tensor, graph: Graph
    ) -> Tensor:
        """The convolution with weights radial @ radial_weight, which are not stored."""
        found = []
        for structure in self.recipe.parts.direct:
            if structure.weighted:
                given = structure, x, y, radial, radial_weight, graph
                z = radial_product(*given, precision=self.precision, backend=self.backend)
            else:
                z = channelwise_product(structure, x, y, None, graph, backend=self.backend)
            found.append(z)
        return functools.reduce(torch.add, found)

    def _graph(
        self, x: Tensor, src: Tensor | Graph | None, dst: Tensor | None, num_nodes: int | None
    ) -> Graph:
        if isinstance(src, Graph):
            if dst is not None or num_nodes is not None:
                raise ShapeError(
                    "a Graph was given with dst or num_nodes: it holds both. Pass "
                    "conv(x, y, weight, graph), or src and dst as tensors."
                )
            return src
        if src is None or dst is None:
            missing = "src" if src is None else "dst"
            raise DTypeError(
                f"{missing} is missing: each edge reads row src[e] and adds to row dst[e]. "
                "Pass both, or a Graph in place of src."
            )
        return graph_of(src, dst, x.shape[0] if num_nodes is None else num_nodes, x.shape[0])

    def _radial(
        self,
        weight: Tensor | Sequence[Tensor] | None,
        radial: Tensor | None,
        radial_weight: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """radial and radial_weight, checked."""
        if weight is not None or radial is None or radial_weight is None or self.shared_weights:
            given = {"weight": weight, "radial": radial, "radial_weight": radial_weight}
            names = ", ".join(name for name, value in given.items() if value is not None)
            raise ShapeError(
                f"{names} were given with shared_weights={self.shared_weights}: radial @ "
                "radial_weight is the weight of the edges, in place of weight. Pass both and "
                "no weight, to a module without shared_weights."
            )
        radial, radial_weight = same_kind(radial=radial, radial_weight=radial_weight)
        wanted = (radial.shape[-1], self.weight_numel)
        if radial.dim() != 2 or radial_weight.shape != wanted:
            raise ShapeError(
                f"radial is {tuple(radial.shape)} and radial_weight {tuple(radial_weight.shape)}: "
                f"they must be (E, H) and (H, {self.weight_numel}). Pass such tensors."
            )
        return radial, radial_weight

    def _check_edges(
        self,
        x: Tensor,
        y: Tensor,
        weight: Tensor | None,
        graph: Graph,
        name_of_weight: str = "weight",
    ) -> None:
        """Rows of x for sources, of y and own weights for edges."""
        for name, tensor, rows, what in (
            ("x", x, graph.num_sources, "sources"),
            ("y", y, graph.num_edges, "edges"),
            (name_of_weight, None if self.shared_weights else weight, graph.num_edges, "edges"),
        ):
            if tensor is not None and (tensor.dim() != 2 or tensor.shape[0] != rows):
                raise ShapeError(
                    f"{name} is {tuple(tensor.shape)} but the graph has {rows} {what}: it must be "
                    f"({rows}, {tensor.shape[-1]}). Pass a row for each."
                )
