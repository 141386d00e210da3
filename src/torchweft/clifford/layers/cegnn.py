"""CEGNN's blocks: grade-wise maps, the steerable geometric product, message passing.

    h_i ← h_i + ψ(h_i, mean_{j → i} φ(h_i − h_j, a_ij))

φ and ψ are of class `CEMLP`.  Names, parameters and defaults are those of Ruhe, Brandstetter and
Forré, "Clifford group equivariant neural networks" (2023); multivectors are (B, rows, F), blades
first.
Every block is equivariant under the versors of its algebra, for any parameter values; differences
h_i − h_j make message passing blind to translations of what does not enter as a node's feature.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweft.clifford.algebra import Algebra
from torchweft.clifford.calls import RowFunction, program_rows
from torchweft.clifford.functions import fully_connected_geometric_product, geometric_product
from torchweft.clifford.layers.basic import (
    MultivectorLinear,
    MultivectorModule,
    MVLayerNorm,
    MVSiLU,
)
from torchweft.core.operators.operands import widened
from torchweft.errors import ShapeError
from torchweft.products import SparseScaleInfo, sparse_scale, sparse_scale_infos

__all__ = [
    "CEMLP",
    "EGCL",
    "FullyConnectedSteerableGeometricProduct",
    "GradeNormalization",
    "MessagePlan",
    "SteerableGeometricProduct",
    "message_plan",
]


class MessagePlan(NamedTuple):
    """The index tables of message passing on a graph, from `message_plan`.

    Args:
        src: (E,), the node that the message of edge e comes from.
        dst: (E,), the node that it goes to.
        difference: row e is h[dst[e]] − h[src[e]].
        mean: row i is the mean over the edges into node i, 0 where there is none.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> src, dst = torch.tensor([0, 1]), torch.tensor([1, 0])
        >>> plan = clifford.message_plan(src, dst, num_nodes=2)
        >>> plan.src
        tensor([0, 1])
    """

    src: Tensor  # (E,)
    dst: Tensor  # (E,)
    difference: SparseScaleInfo  # row e is h[dst[e]] − h[src[e]]
    mean: SparseScaleInfo  # row i is the mean over the edges into i, 0 where there is none

    def to(self, device: torch.device | str) -> MessagePlan:
        """The same on another device."""
        src, dst, difference, mean = self
        return MessagePlan(src.to(device), dst.to(device), difference.to(device), mean.to(device))


def message_plan(src: Tensor, dst: Tensor, num_nodes: int) -> MessagePlan:
    """Index tables of a graph, built once and used by every layer and every step.

    Args:
        src: (E,) int64, the node that the message of each edge comes from.
        dst: (E,) int64, the node that it goes to, in any order.
        num_nodes: number of nodes.

    Returns:
        A `MessagePlan` on the device of dst.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> src, dst = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])
        >>> plan = clifford.message_plan(src, dst, num_nodes=3)
        >>> layer = clifford.EGCL(4, clifford.Algebra((1, 1, 1)))
        >>> layer(torch.randn(8, 3, 4), plan).shape
        torch.Size([8, 3, 4])
    """
    edges = torch.arange(len(dst), device=dst.device)
    ends = torch.stack([dst, src], 1).flatten()
    signs = torch.tensor([1.0, -1.0], device=dst.device).repeat(len(dst))
    difference, _ = sparse_scale_infos(ends, edges.repeat_interleave(2), signs, len(dst), num_nodes)
    arrivals = torch.bincount(dst, minlength=num_nodes)
    mean, _ = sparse_scale_infos(edges, dst, 1 / arrivals[dst], num_nodes, len(dst))
    return MessagePlan(src, dst, difference, mean)


class GradeNormalization(MultivectorModule):
    """x_j / (σ(a[g]) (‖x_g‖ − 1) + 1 + 1e-6): each grade divided by between 1 and its own norm.

    ‖x_g‖ = |⟨x̃_g x_g⟩₀|^½, smooth at 0.

    Args:
        features: number of features F.
        algebra: the algebra of the multivectors.
        init: of the parameter a.
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Attributes:
        a: the parameter (n+1, F).

    Source: Ruhe, Brandstetter, Forré: Clifford group equivariant neural networks, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> norm = clifford.GradeNormalization(4, clifford.Algebra((1, 1, 1)))
        >>> norm(torch.randn(8, 100, 4)).shape
        torch.Size([8, 100, 4])
    """

    def __init__(
        self, features: int, algebra: Algebra, init: float = 0.0, *, backend: str | None = None
    ) -> None:
        super().__init__(algebra, backend=backend)
        self.features = features
        self.a = nn.Parameter(torch.full((algebra.n + 1, features), float(init)))

    def forward(self, x: Tensor) -> Tensor:
        """Maps multivectors x (B, rows, F) to multivectors of the same shape."""
        self.check(x, self.features)
        return _grade_normalization((x, self.a), self.algebra, 0, self.backend)


class _Steerable(MultivectorModule):
    """z = (L x + x · ν(R x)) / √2, or x · ν(R x) alone."""

    normalization: Any  # GradeNormalization, or None
    linear_left: Any  # MultivectorLinear, or None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        algebra: Algebra,
        include_first_order: bool,
        normalization_init: float | None,
        backend: str | None,
    ) -> None:
        super().__init__(algebra, backend=backend)
        self.in_features = in_features
        options: dict[str, Any] = {"backend": backend}
        self.normalization = self.linear_left = None
        if normalization_init is not None:
            init = normalization_init
            self.normalization = GradeNormalization(in_features, algebra, init, **options)
        self.linear_right = MultivectorLinear(
            in_features, in_features, algebra, bias=False, **options
        )
        if include_first_order:
            self.linear_left = MultivectorLinear(in_features, out_features, algebra, **options)

    def _right(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear_right(x)
        if self.normalization is not None:
            y = self.normalization(y)
        return y

    def _with_first_order(self, x: Tensor, product: Tensor) -> Tensor:
        if self.linear_left is None:
            return product
        first: Tensor = self.linear_left(x)
        return (first + product) * math.sqrt(0.5)


class SteerableGeometricProduct(_Steerable):
    """z = (L x + x · ν(R x)) / √2: a linear map, and the weighted product with another.

    ν is a `GradeNormalization`.  Parameters: weight (F, P), and those of L, R and ν.

    Args:
        features: F, of input and output.
        algebra: the algebra of the multivectors.
        include_first_order: False: z = x · ν(R x), without L.
        normalization_init: of ν; None: without ν.
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Source: Ruhe, Brandstetter, Forré: Clifford group equivariant neural networks, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> layer = clifford.SteerableGeometricProduct(4, clifford.Algebra((1, 1, 1)))
        >>> layer(torch.randn(8, 100, 4)).shape
        torch.Size([8, 100, 4])
    """

    def __init__(
        self,
        features: int,
        algebra: Algebra,
        include_first_order: bool = True,
        normalization_init: float | None = 0.0,
        *,
        backend: str | None = None,
    ) -> None:
        shape = (features, features, algebra)
        super().__init__(*shape, include_first_order, normalization_init, backend)
        self.weight = nn.Parameter(torch.empty(features, len(algebra.paths)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 1/√(n+1)): products keep the scale of the features."""
        nn.init.normal_(self.weight, std=(self.algebra.n + 1) ** -0.5)

    def forward(self, x: Tensor, norm: MVLayerNorm | None = None) -> Tensor:
        """The product, with the norm in the same pass if there is one.

        Args:
            x: multivectors (B, rows, F).
            norm: an MVLayerNorm that is applied to z; None for none.

        Returns:
            (B, rows, F).
        """
        if self.normalization is None or self.linear_left is None:
            product = geometric_product(
                x, self._right(x), self.algebra, self.weight, backend=self.backend
            )
            z = self._with_first_order(x, product)
            return z if norm is None else norm(z)
        scale, a = self.normalization.a, None if norm is None else norm.a.unsqueeze(0)
        tensors = x, self.linear_left(x), self.linear_right(x), self.weight.T, scale, a
        words = () if norm is None else ("norm",)
        return _steerable(tensors, self.algebra, 0, self.backend, *words)


class FullyConnectedSteerableGeometricProduct(_Steerable):
    """z = (L x + x · ν(R x)) / √2 with the fully connected product, which mixes features too.

    ν is a `GradeNormalization`.  Parameters: weight (P, F_in, F_out), and those of L, R and ν.

    Args:
        in_features: number of input features F_in.
        out_features: number of output features F_out.
        algebra: the algebra of the multivectors.
        include_first_order: False: z = x · ν(R x), without L.
        normalization_init: of ν; None: without ν.
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Source: Ruhe, Brandstetter, Forré: Clifford group equivariant neural networks, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> space = clifford.Algebra((1, 1, 1))
        >>> layer = clifford.FullyConnectedSteerableGeometricProduct(4, 8, space)
        >>> layer(torch.randn(8, 100, 4)).shape
        torch.Size([8, 100, 8])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        algebra: Algebra,
        include_first_order: bool = True,
        normalization_init: float | None = 0.0,
        *,
        backend: str | None = None,
    ) -> None:
        shape = (in_features, out_features, algebra)
        super().__init__(*shape, include_first_order, normalization_init, backend)
        self.weight = nn.Parameter(torch.empty(len(algebra.paths), in_features, out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 1/√(F_in·(n+1))): products keep the scale of the features."""
        nn.init.normal_(self.weight, std=(self.in_features * (self.algebra.n + 1)) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Maps multivectors x (B, rows, F_in) to (B, rows, F_out)."""
        product = fully_connected_geometric_product(
            x, self._right(x), self.weight, self.algebra, backend=self.backend
        )
        return self._with_first_order(x, product)


_grade_normalization = RowFunction(program_rows("grade_normalization"), "x", widened, a="n+1 F")
_steerable = RowFunction(
    program_rows("steerable"), ("x", "left", "right"), weight="P F", scale="n+1 F", a="1 F"
)


class CEMLP(nn.Module):
    """An equivariant MLP, twice: linear map, gate, steerable product, norm.

    Args:
        in_features: number of input features.
        features: number of hidden and of output features F.
        algebra: the algebra of the multivectors.
        normalization_init: see `SteerableGeometricProduct`.
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Source: Ruhe, Brandstetter, Forré: Clifford group equivariant neural networks, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> clifford.CEMLP(4, 8, clifford.Algebra((1, 1, 1)))(torch.randn(8, 100, 4)).shape
        torch.Size([8, 100, 8])
    """

    def __init__(
        self,
        in_features: int,
        features: int,
        algebra: Algebra,
        normalization_init: float | None = 0.0,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    MultivectorLinear(width, features, algebra, backend=backend),
                    MVSiLU(features, algebra, backend=backend),
                    SteerableGeometricProduct(
                        features, algebra, True, normalization_init, backend=backend
                    ),
                    MVLayerNorm(features, algebra, backend=backend),
                )
                for width in (in_features, features)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps multivectors x (B, rows, in_features) to (B, rows, features)."""
        for layer in self.layers:
            linear, gate, product, norm = layer.children()
            x = product(gate(linear(x)), norm)
        return x


class EGCL(nn.Module):
    """h_i ← h_i + ψ(h_i, mean_{j → i} φ(h_i − h_j, a_ij)), an equivariant graph layer.

    Args:
        features: number of features F of a node.
        algebra: the algebra of the multivectors.
        edge_features: number of multivectors a_ij of an edge; 0 for none.
        normalization_init: see `SteerableGeometricProduct`.
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Raises:
        ShapeError: from a call, another number of features of the edges.

    Source: Ruhe, Brandstetter, Forré: Clifford group equivariant neural networks, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> src, dst = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])
        >>> plan = clifford.message_plan(src, dst, num_nodes=3)
        >>> layer = clifford.EGCL(4, clifford.Algebra((1, 1, 1)))
        >>> layer(torch.randn(8, 3, 4), plan).shape
        torch.Size([8, 3, 4])
    """

    def __init__(
        self,
        features: int,
        algebra: Algebra,
        edge_features: int = 0,
        normalization_init: float | None = 0.0,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.edge_features, self.backend = edge_features, backend
        shape = (features, algebra, normalization_init)
        self.edge_model = CEMLP(features + edge_features, *shape, backend=backend)
        self.node_model = CEMLP(2 * features, *shape, backend=backend)

    def forward(self, h: Tensor, plan: MessagePlan, edge_attr: Tensor | None = None) -> Tensor:
        """The updated features of the nodes.

        Args:
            h: multivectors of the nodes, (B, nodes, F).
            plan: from `message_plan`.
            edge_attr: multivectors of the edges, (B, edges, edge_features); None where there are
                none.

        Returns:
            (B, nodes, F).
        """
        given = 0 if edge_attr is None else edge_attr.shape[-1]
        if given != self.edge_features:
            raise ShapeError(
                f"edge_attr has {given} features: EGCL was built for {self.edge_features}. "
                f"Pass that many, or build EGCL(..., edge_features={given})."
            )
        difference = sparse_scale(h, plan.difference, backend=self.backend)
        if edge_attr is not None:
            difference = torch.cat([difference, edge_attr], -1)
        mean = sparse_scale(self.edge_model(difference), plan.mean, backend=self.backend)
        change: Tensor = self.node_model(torch.cat([h, mean], -1))
        return h + change
