"""The same network in plain torch, on the dense Cayley table: the formulation CEGNN published.

    z[n,f,j] = Σ_ik x[n,f,i] · (cayley[i,j,k] w[f, path of i,j,k]) · y[n,f,k]

Multivectors are (rows, F, B), blades last.  It computes with the parameters of a `Forecaster`, so
one is the other's oracle.
"""

from __future__ import annotations

import itertools
from typing import cast

import torch
from torch import Tensor, nn

from torchweft.clifford.layers.basic import MultivectorLinear, MVLayerNorm, MVSiLU
from torchweft.clifford.layers.cegnn import CEMLP, EGCL, MessagePlan, SteerableGeometricProduct
from torchweft.demo.models.forecaster import ALGEBRA, Forecaster, Systems, embedded

__all__ = ["DenseForecaster"]

EPS = 1e-6

Stage = tuple[MultivectorLinear, MVSiLU, SteerableGeometricProduct, MVLayerNorm]


class DenseForecaster(nn.Module):
    """What `model` computes, from its own parameters."""

    path: Tensor
    cayley: Tensor
    squares: Tensor
    grades: Tensor

    def __init__(self, model: Forecaster) -> None:
        super().__init__()
        self.model = model
        grades, paths = ALGEBRA.grades, ALGEBRA.path_of
        triples = itertools.product(grades, grades, grades)
        path = torch.tensor([paths.get(triple, len(paths)) for triple in triples])
        like = model.projection.weight
        self.register_buffer("path", path.view(3 * (len(grades),)))
        self.register_buffer("cayley", ALGEBRA.cayley(like.dtype))
        self.register_buffer("squares", torch.tensor(ALGEBRA.squares, dtype=like.dtype))
        self.register_buffer("grades", torch.tensor(grades))
        self.to(like.device)

    def forward(self, systems: Systems, plan: MessagePlan) -> Tensor:
        """(S, n, 3), as `Forecaster` has it."""
        bodies, messages = (a.permute(1, 2, 0) for a in embedded(systems, plan))
        h = self._linear(bodies, self.model.embedding)
        for layer in self.model.layers:
            h = self._pass(h, cast(EGCL, layer), plan, messages)
        change = self._linear(h, self.model.projection)[:, 0, 1:4]
        return systems.position + change.reshape(systems.position.shape)

    def _pass(self, h: Tensor, layer: EGCL, plan: MessagePlan, messages: Tensor) -> Tensor:
        difference = h.index_select(0, plan.dst) - h.index_select(0, plan.src)
        message = self._mlp(torch.cat([difference, messages], 1), layer.edge_model)
        count = h.new_zeros(len(h)).index_add(0, plan.dst, h.new_ones(len(plan.dst)))
        total = torch.zeros_like(h).index_add(0, plan.dst, message)
        mean = total / count.clamp(min=1)[:, None, None]
        return h + self._mlp(torch.cat([h, mean], 1), layer.node_model)

    def _mlp(self, x: Tensor, mlp: CEMLP) -> Tensor:
        for layer in mlp.layers:
            linear, gate, product, norm = cast(Stage, layer.children())
            x = self._gate(self._linear(x, linear), gate)
            x = self._norm(self._steerable(x, product), norm)
        return x

    def _linear(self, x: Tensor, module: MultivectorLinear) -> Tensor:
        out = torch.einsum("nfi,ifg->ngi", x, module.weight[self.grades])
        if module.bias is not None:
            out = out + nn.functional.pad(module.bias.unsqueeze(1), (0, len(self.grades) - 1))
        return out

    def _gate(self, x: Tensor, module: MVSiLU) -> Tensor:
        invariants = torch.cat([x[..., :1], self._squares(x)[..., 1:]], -1)
        gates = (module.a.T * invariants + module.b.T).sigmoid()
        return gates[..., self.grades] * x

    def _steerable(self, x: Tensor, module: SteerableGeometricProduct) -> Tensor:
        right = self._linear(x, module.linear_right)
        norms = _root(self._squares(right))
        divisors = module.normalization.a.sigmoid().T * (norms - 1) + 1 + EPS
        right = right / divisors[..., self.grades]
        weight = nn.functional.pad(module.weight, (0, 1))[:, self.path] * self.cayley
        product = torch.einsum("nfi,fijk,nfk->nfj", x, weight, right)
        return (self._linear(x, module.linear_left) + product) / 2**0.5

    def _norm(self, x: Tensor, module: MVLayerNorm) -> Tensor:
        norms = _root(self._squares(x).sum(-1, keepdim=True))
        return module.a.unsqueeze(1) * x / (norms.mean(1, keepdim=True) + EPS)

    def _squares(self, x: Tensor) -> Tensor:
        """⟨x̃_g x_g⟩₀ of each grade: (rows, F, n + 1)."""
        squares = self.squares * x * x
        return torch.stack([squares[..., b.start : b.stop].sum(-1) for b in ALGEBRA.of_grade], -1)


def _root(square: Tensor) -> Tensor:
    """|square|^½, smooth at 0."""
    return (square.square() + 1e-16) ** 0.25
