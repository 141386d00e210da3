"""Parts that interactions of MACE, NequIP and SevenNet share.

RadialWeight     weights of edges as radial @ matrix, for a convolution that does not store them
MapByElement     z[n, w] = Σ_u x[n, u] W[u, element n, w]: linear maps by the element of a node
SelfConnection   the same by types, whose matrices an embedding makes
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweft.core import recorded
from torchweft.core.operators.operands import same_kind
from torchweft.o3.adapters.e3nn import tensor_product
from torchweft.o3.adapters.replacing import holding, is_of
from torchweft.o3.graph import Graph
from torchweft.o3.irreps.irreps import Irreps, check_rows, split_weight
from torchweft.o3.layers.linear import Linear, LinearInstruction, linear_mixing
from torchweft.o3.mixing.operator import mix, rows_of_elements, serves_mix
from torchweft.o3.tensor_product.products import TensorProduct, TensorProductConv

__all__ = [
    "MapByElement",
    "RadialWeight",
    "SelfConnection",
    "by_elements",
    "by_types",
    "convolved",
    "layout_in",
    "leaves_factors",
    "linear_of_items",
    "radial_weight",
    "self_connection",
]


class RadialWeight(NamedTuple):
    """Weights of edges that are not formed: radial @ matrix."""

    radial: Tensor  # (E, H)
    matrix: Tensor  # (H, weight_numel)


def radial_weight(network: Any, x: Tensor) -> Tensor | RadialWeight:
    """The weights (E, weight_numel) of edges, or their two factors where these are faster.

    Args:
        network: with `hidden` and `last_matrix`, as FullyConnectedNet.
        x: (E, basis), radial functions of the edges.
    """
    radial, matrix = network.hidden(x), network.last_matrix()
    return RadialWeight(radial, matrix) if leaves_factors(radial) else radial @ matrix


def leaves_factors(radial: Tensor) -> bool:
    """Whether a convolution takes radial and matrix, for tensors like these.

    On a GPU one kernel then forms the weights in registers, and the array of all of them, the
    largest of a layer, is never stored.  On the CPU forces take longer with factors.
    """
    return radial.is_cuda


def convolved(
    conv: TensorProductConv, x: Tensor, y: Tensor, weight: Tensor | RadialWeight, graph: Graph
) -> Tensor:
    """(N, D_out): the convolution by either form of weights."""
    if isinstance(weight, RadialWeight):
        return conv.forward(x, y, src=graph, radial=weight.radial, radial_weight=weight.matrix)
    return conv.forward(x, y, weight, graph)


def layout_in(model: nn.Module, package: str, features: Iterable[Any]) -> str:
    """The layout of features inside a model: "ir_mul" if nothing but replaced layers reads them.

    It saves a copy before and after each linear map.  Layers of other packages than the model's own
    may read components, and items of one irrep may be joined: then rows stay as e3nn has them.

    Args:
        model: with layers of e3nn.
        package: the model's own.
        features: irreps of the rows between layers.
    """
    known = {package, "e3nn", "torch", "torchweft"}
    found = {type(module).__module__.partition(".")[0] for module in model.modules()}
    items = [[item.ir for item in Irreps(irreps)] for irreps in features]
    distinct = all(len(set(irreps)) == len(irreps) for irreps in items)
    return "ir_mul" if found <= known and distinct else "mul_ir"


def linear_of_items(linear: Any, irreps: Irreps, layout: str) -> Linear:
    """e3nn's Linear of joined items, for rows that have these items apart; its output has no two.

    The weight is the same: the rows of a matrix are those of the items one after the other.
    """
    biased = {i.i_out for i in linear.instructions if i.i_in < 0}
    out = Irreps(linear.irreps_out)
    made = Linear(irreps, out, biases=[k in biased for k in range(len(out))], layout=layout)
    holding(made, linear)
    return made


class MapByElement:
    """z[n, w] = Σ_u x[n, u] W[u, element n, w], a product with one-hot rows of elements.

    W is read as e3nn keeps it.

    Args:
        product: one of `by_elements`, of e3nn or torchweft.
        layout: of the rows.
    """

    def __init__(self, product: Any, layout: str) -> None:
        irreps, out = Irreps(product.irreps_in1), Irreps(product.irreps_out)
        instructions = [
            LinearInstruction(
                i.i_in1,
                i.i_out,
                (irreps[i.i_in1].mul, out[i.i_out].mul),
                i.path_weight / math.sqrt(out[i.i_out].ir.dim),
            )
            for i in product.instructions
        ]
        sizes = [math.prod(i.path_shape) for i in instructions]
        offsets = list(itertools.accumulate(sizes, initial=0))
        self._mixing = linear_mixing(instructions, offsets, irreps, out, layout)
        self._irreps = irreps

    def serves(self, x: Tensor) -> bool:
        """Whether a record may hold it: without a kernel, the host counts the rows of elements."""
        return recorded.Current.run is None or serves_mix(self._mixing, x, True)

    def __call__(self, x: Tensor, weight: Tensor, element: Tensor, count: int) -> Tensor:
        """(N, D_out) of x (N, D), all W in one row, and element (N,), integers below count."""
        check_rows("x", x, self._irreps, self)
        x, weight = same_kind(x=x, weight=weight)
        kernels = serves_mix(self._mixing, x, True)
        return mix(self._mixing, x, weight, rows_of_elements(element, count), kernels=kernels)


class SelfConnection(TensorProduct):
    """z = Σ_uv W[u, v, w] x[n, u] a[type n, v]: an e3nn product with attributes of types.

    The matrices M[u, t, w] = Σ_v a[t, v] W[u, v, w] of all types are formed once a call, and one
    linear map by type replaces a product of (copies × attributes) pairs for each node.  A record
    without a kernel for such maps multiplies by the attributes.

    Made by `self_connection`.
    """

    embedding: tuple[nn.Module | None]  # in a tuple: the parameter is the other module's

    def forward(self, x: Tensor, types: Tensor) -> Tensor:  # type: ignore[override]
        """(N, D_out) of x (N, D) and types (N,), integers; (N, any) of equal columns."""
        types = types if types.dim() == 1 else types.select(1, 0)
        (embedding,), width = self.embedding, self.irreps_in2.dim
        if not self._map.serves(x):
            table = (
                torch.eye(width, dtype=x.dtype, device=x.device)
                if embedding is None
                else _table(embedding)
            )
            return super().forward(x, table.index_select(0, types))
        if embedding is None:
            return self._map(x, self.weight, types, width)
        table, shapes = _table(embedding), [i.path_shape for i in self.instructions]
        views = [view for view in split_weight(self.weight, shapes) if view is not None]
        matrices = torch.cat([(table @ view).flatten() for view in views])
        return self._map(x, matrices, types, table.shape[0])

    @functools.cached_property
    def _map(self) -> MapByElement:
        return MapByElement(self, self.layout)


def self_connection(
    product: Any, embedding: nn.Module | None = None, layout: str = "mul_ir"
) -> nn.Module:
    """The SelfConnection that replaces a product.

    Args:
        product: e3nn's, one of `by_types`; its weight is kept.
        embedding: the module whose weight (types, attributes) is a; None: a is the unit matrix, the
            attributes are one-hot rows.
        layout: of the rows.
    """
    made: Any = tensor_product(product, SelfConnection, layout)
    made.embedding = (embedding,)
    return holding(made, product)


def by_types(product: Any) -> bool:
    """Whether a product is one of e3nn that SelfConnection computes."""
    return is_of("e3nn", "FullyConnectedTensorProduct", product) and by_elements(product)


def by_elements(product: Any) -> bool:
    """Whether a product is one of weights for all copies with one item of scalars."""
    items = Irreps(product.irreps_in2)
    mixed = all(i.connection_mode == "uvw" and i.has_weight for i in product.instructions)
    return len(items) == 1 and items[0].ir.is_scalar() and mixed


def _table(embedding: Any) -> Tensor:
    table: Tensor = embedding.weight
    return table
