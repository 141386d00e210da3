"""The published networks of CEGNN: signed volumes, O(5) regression, convex hulls, top tagging.

Sources: Ruhe, Brandstetter and Forré, "Clifford group equivariant neural networks" (2023), whose
names, parameters and defaults these have; `from_cegnn` converts checkpoints.  Inputs are vectors,
(rows, F, n) as in the original; inside, multivectors are (B, rows, F).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchweft.clifford.algebra import SPACETIME, Algebra
from torchweft.clifford.calls import check_algebra
from torchweft.clifford.layers.basic import MultivectorLinear, MVLayerNorm, MVSiLU
from torchweft.clifford.layers.cegnn import (
    FullyConnectedSteerableGeometricProduct,
    MessagePlan,
    SteerableGeometricProduct,
)
from torchweft.errors import ShapeError
from torchweft.products import sparse_scale

__all__ = ["O3CGMLP", "O5CGMLP", "CGLayer", "ConvexHullCGMLP", "LorentzCGGNN"]


def _of_vectors(points: Tensor, algebra: Algebra) -> Tensor:
    """(…, F, n) as vectors of an algebra, (B, …, F)."""
    if points.dim() < 3 or points.shape[-1] != algebra.n:
        raise ShapeError(
            f"points is {tuple(points.shape)}: it must be (rows, F, {algebra.n}), vectors of "
            f"{algebra}. Put their components last."
        )
    x = points.new_zeros(*points.shape[:-1], algebra.num_blades)
    x = torch.cat([x[..., :1], points, x[..., algebra.n + 1 :]], -1)
    return x.movedim(-1, 0)


class O3CGMLP(nn.Module):
    """CEGNN's network for the signed volume of a tetrahedron: fully connected products with gates.

    Args:
        in_features: number of input vectors.
        hidden_features: number of hidden features.
        out_features: features of the last layer, whose first pseudoscalar is the result.
        num_layers: number of products, with gates between them.
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Source: Ruhe, Brandstetter, Forré: Clifford group equivariant neural networks, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> clifford.O3CGMLP(hidden_features=4, num_layers=2)(torch.randn(10, 3, 3)).shape
        torch.Size([10])
    """

    def __init__(
        self,
        in_features: int = 3,
        hidden_features: int = 32,
        out_features: int = 1,
        num_layers: int = 6,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.algebra = algebra = Algebra.cl(3)
        product = FullyConnectedSteerableGeometricProduct
        self.net = nn.Sequential(
            product(in_features, hidden_features, algebra, backend=backend),
            *(MVSiLU(hidden_features, algebra, backend=backend) for _ in range(num_layers - 1)),
            product(hidden_features, out_features, algebra, backend=backend),
        )

    def forward(self, points: Tensor) -> Tensor:
        """The signed volumes.

        Args:
            points: (rows, in_features, 3).

        Returns:
            (rows,).
        """
        y: Tensor = self.net(_of_vectors(points, self.algebra))
        return y[-1, :, 0]


class O5CGMLP(nn.Module):
    """CEGNN's network for an O(5)-invariant function of two vectors.

    Args:
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Source: Ruhe, Brandstetter, Forré: Clifford group equivariant neural networks, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> clifford.O5CGMLP()(torch.randn(10, 2, 5)).shape
        torch.Size([10, 1])
    """

    def __init__(self, *, backend: str | None = None) -> None:
        super().__init__()
        self.algebra = algebra = Algebra.cl(5)
        self.gp = nn.Sequential(
            MultivectorLinear(2, 8, algebra, backend=backend),
            SteerableGeometricProduct(8, algebra, backend=backend),
        )
        layers = (nn.Linear(8, 580), nn.ReLU(), nn.Linear(580, 580), nn.ReLU(), nn.Linear(580, 1))
        self.mlp = nn.Sequential(*layers)

    def forward(self, points: Tensor) -> Tensor:
        """The values of the function.

        Args:
            points: (rows, 2, 5).

        Returns:
            (rows, 1).
        """
        out: Tensor = self.mlp(self.gp(_of_vectors(points, self.algebra))[0])
        return out


class ConvexHullCGMLP(nn.Module):
    """CEGNN's network for the volume of a convex hull of points in five dimensions.

    Args:
        in_features: number of input points.
        hidden_features: number of hidden features.
        out_features: number of results; 1, as in the original, gives (rows,).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Source: Ruhe, Brandstetter, Forré: Clifford group equivariant neural networks, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> clifford.ConvexHullCGMLP(hidden_features=4)(torch.randn(10, 16, 5)).shape
        torch.Size([10])
    """

    def __init__(
        self,
        in_features: int = 16,
        hidden_features: int = 32,
        out_features: int = 1,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.algebra = algebra = Algebra.cl(5)
        self.net = nn.Sequential(
            MultivectorLinear(in_features, hidden_features, algebra, backend=backend),
            *(
                SteerableGeometricProduct(hidden_features, algebra, backend=backend)
                for _ in range(4)
            ),
        )
        last = nn.Linear(hidden_features, out_features)
        self.mlp = nn.Sequential(nn.Linear(hidden_features, hidden_features), nn.SiLU(), last)

    def forward(self, points: Tensor) -> Tensor:
        """The volumes.

        Args:
            points: (rows, in_features, 5).

        Returns:
            (rows,), or (rows, out_features).
        """
        y: Tensor = self.net(_of_vectors(points, self.algebra))
        out: Tensor = self.mlp(y.norm(dim=0)).squeeze(-1)
        return out


class CGLayer(nn.Module):
    """A graph layer of multivectors x and scalars h, each updated with invariants of the other.

    Args:
        features: number of features F of x.
        hidden: number of features H of h.
        algebra: the algebra of the multivectors.
        edge_features: number of multivectors of an edge.
        node_features: number of multivectors of a node, beside x.
        node_scalars: number of scalars of a node, beside h.
        normalization_init: see `SteerableGeometricProduct`.
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Source: Ruhe, Brandstetter, Forré: Clifford group equivariant neural networks, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> layer = clifford.CGLayer(4, 8, clifford.SPACETIME)
        >>> src, dst = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])
        >>> plan = clifford.message_plan(src, dst, num_nodes=3)
        >>> h, x = torch.randn(3, 8), torch.randn(16, 3, 4)
        >>> edges, nodes, scalars = torch.randn(16, 3, 3), torch.randn(16, 3, 1), torch.randn(3, 2)
        >>> h, x = layer(h, x, plan, edges, nodes, scalars)
        >>> h.shape, x.shape
        (torch.Size([3, 8]), torch.Size([16, 3, 4]))
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        algebra: Algebra,
        edge_features: int = 3,
        node_features: int = 1,
        node_scalars: int = 2,
        normalization_init: float | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        check_algebra(algebra)
        self.algebra, self.backend = algebra, backend
        invariants = features * (algebra.n + 1)

        def product(in_features: int) -> nn.Sequential:
            shape = (in_features, features, algebra)
            return nn.Sequential(
                FullyConnectedSteerableGeometricProduct(
                    *shape, normalization_init=normalization_init, backend=backend
                ),
                MVLayerNorm(features, algebra, backend=backend),
            )

        self.phi_x = product(edge_features + 3 * features)
        self.theta_x = product(node_features + 2 * features)
        self.phi_h = nn.Sequential(
            nn.Linear(3 * hidden + invariants, hidden, bias=False),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
        )
        self.theta_h = nn.Sequential(
            nn.Linear(node_scalars + invariants + 2 * hidden, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
        )
        self.psi_x, self.chi_x = (
            nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, invariants))
            for _ in range(2)
        )

    def forward(
        self,
        h: Tensor,
        x: Tensor,
        plan: MessagePlan,
        edge_attr: Tensor,
        node_attr: Tensor,
        node_scalars: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The updated scalars and multivectors of the nodes.

        Args:
            h: scalars (nodes, H).
            x: multivectors (B, nodes, F).
            plan: from `message_plan`.
            edge_attr: multivectors of the edges, (B, edges, edge_features).
            node_attr: multivectors of the nodes beside x, (B, nodes, node_features).
            node_scalars: scalars of the nodes beside h, (nodes, node_scalars).

        Returns:
            (nodes, H) and (B, nodes, F).
        """
        to, source = plan.dst, plan.src
        ends = x[:, to], x[:, source]
        of_x = self.phi_x(torch.cat([*ends, ends[0] - ends[1], edge_attr], -1))
        ends_h = h[to], h[source]
        of_h = self.phi_h(torch.cat([self.invariants(of_x), *ends_h, ends_h[0] - ends_h[1]], -1))
        of_x = of_x * self._gates(self.psi_x(of_h))
        mean_x = sparse_scale(of_x, plan.mean, backend=self.backend)
        mean_h = sparse_scale(of_h[None], plan.mean, backend=self.backend)[0]
        new_x = self.theta_x(torch.cat([x, mean_x, node_attr], -1))
        new_h = self.theta_h(torch.cat([h, mean_h, self.invariants(x), node_scalars], -1))
        return new_h, new_x * self._gates(self.chi_x(new_h))

    def invariants(self, x: Tensor) -> Tensor:
        """The scalar, and ⟨x̃_g x_g⟩₀ of each grade g > 0: (rows, F · (n+1)), grades last."""
        squares = self.theta_x[1].grade_squares(x).to(x.dtype)  # type: ignore[operator]
        return torch.stack([x[0], *squares[1:]], -1).flatten(-2)

    def _gates(self, numbers: Tensor) -> Tensor:
        """Gates of grades (rows, F · (n+1)), for each blade."""
        of_grades = torch.unflatten(numbers, -1, (-1, self.algebra.n + 1)).movedim(-1, 0)
        return torch.sigmoid(of_grades)[list(self.algebra.grades)]


class LorentzCGGNN(nn.Module):
    """CEGNN's network for top tagging: Lorentz-equivariant graph layers and a classifier.

    Args:
        in_features_h: number of scalars of a particle.
        hidden_features_h: number of hidden scalars.
        in_features_x: number of multivectors of a particle; its momentum.
        hidden_features_x: number of hidden multivectors.
        decoder_features: number of features of the classifier.
        n_class: number of classes.
        n_layers: number of graph layers.
        dropout: probability, in the classifier.
        normalization_init: see `SteerableGeometricProduct`.
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Source: Ruhe, Brandstetter, Forré: Clifford group equivariant neural networks, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> network = clifford.LorentzCGGNN(hidden_features_h=8, hidden_features_x=2, n_layers=1)
        >>> src, dst = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])
        >>> plan = clifford.message_plan(src, dst, num_nodes=3)
        >>> momenta, scalars = torch.randn(1, 3, 4), torch.randn(1, 3, 2)
        >>> network(momenta, scalars, plan, torch.ones(1, 3)).shape
        torch.Size([1, 2])
    """

    def __init__(
        self,
        in_features_h: int = 2,
        hidden_features_h: int = 72,
        in_features_x: int = 1,
        hidden_features_x: int = 8,
        decoder_features: int = 64,
        n_class: int = 2,
        n_layers: int = 4,
        dropout: float = 0.2,
        normalization_init: float | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.algebra = SPACETIME
        features, hidden = hidden_features_x, hidden_features_h
        self.embedding_h = nn.Linear(in_features_h, hidden)
        self.embedding_x = MultivectorLinear(in_features_x, features, SPACETIME, backend=backend)
        self.CGLs = nn.ModuleList(
            CGLayer(
                features,
                hidden,
                SPACETIME,
                node_scalars=in_features_h,
                normalization_init=normalization_init,
                backend=backend,
            )
            for _ in range(n_layers)
        )
        self.graph_dec = nn.Sequential(
            nn.Linear(hidden + features * (SPACETIME.n + 1), decoder_features),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(decoder_features, n_class),
        )

    def forward(self, momenta: Tensor, scalars: Tensor, plan: MessagePlan, mask: Tensor) -> Tensor:
        """Logits (graphs, n_class).

        Args:
            momenta: (graphs, nodes, 4), zero where there is no particle.
            scalars: (graphs, nodes, in_features_h).
            plan: see `message_plan`; node j of graph i is number i · nodes + j.
            mask: (graphs, nodes), 1 where there is a particle, else 0.
        """
        scalars = scalars.flatten(0, 1)
        scalars = scalars.sign() * scalars.abs().log1p()
        p = momenta.flatten(0, 1)
        ends = p[plan.dst], p[plan.src]
        edges = _of_vectors(torch.stack([ends[0] - ends[1], *ends], 1), self.algebra)
        momentum = _of_vectors(p[:, None], self.algebra)
        h, x = self.embedding_h(scalars), self.embedding_x(momentum)
        for layer in self.CGLs:
            h, x = layer(h, x, plan, edges, momentum, scalars)
        found = torch.cat([h, self.CGLs[0].invariants(x)], -1)  # type: ignore[operator]
        found = torch.unflatten(found, 0, mask.shape) * mask[..., None]
        out: Tensor = self.graph_dec(found.mean(1))
        return out
