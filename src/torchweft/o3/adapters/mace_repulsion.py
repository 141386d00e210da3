"""MACE's pair repulsion of Ziegler, Biersack and Littmark, with sums in a fixed order.

    E[n] = Σ_{dst[e] = n} ½ k Z Z' / r φ(s) f(r / (R + R')),   s = r (Z^b + Z'^b) / (a r₀)
    φ(s) = Σ_i c_i exp(−d_i s)

Z and Z' are the numbers of the elements at both ends of an edge, R and R' their covalent radii, f
the polynomial cutoff, and k = 14.3996 eV Å, r₀ = 0.529 Å and d the constants that MACE has.

Source: Ziegler, Biersack, Littmark: The stopping and range of ions in matter, 1985.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchweft.o3.adapters.model_call import Call
from torchweft.o3.adapters.replacing import holding
from torchweft.o3.edge_vectors.operator import rows_of_edges, totals
from torchweft.o3.layers.harmonics_and_radial import PolynomialCutoff

__all__ = ["repulsion"]

COULOMB, BOHR = 14.3996, 0.529
"""In eV Å, and in Å."""

RATES = (3.2, 0.9423, 0.4028, 0.2016)
"""d."""


def repulsion(module: Any, call: Call) -> nn.Module:
    """The layer that replaces MACE's ZBLBasis."""
    return holding(_Repulsion(module, call), module)


class _Repulsion(nn.Module):
    """MACE's ZBLBasis.

    Args:
        of: the original; its constants are kept.
        call: of the model.
    """

    c: Tensor
    covalent_radii: Tensor
    a_exp: Tensor
    a_prefactor: Tensor

    def __init__(self, of: Any, call: Call) -> None:
        super().__init__()
        self.call, self.envelope = call, PolynomialCutoff(1.0, int(of.p))
        for name in ("c", "covalent_radii", "a_exp", "a_prefactor"):
            if not isinstance(getattr(of, name), nn.Parameter):
                self.register_buffer(name, getattr(of, name))

    def forward(
        self, x: Tensor, node_attrs: Tensor, edge_index: Tensor, atomic_numbers: Tensor
    ) -> Tensor:
        """(N,) energies of lengths x (E, 1), attributes (N, num_elements) and edges (2, E)."""
        numbers = atomic_numbers.index_select(0, node_attrs.argmax(1)).unsqueeze(1)
        radii = self.covalent_radii[numbers]
        z, other = (numbers.index_select(0, index) for index in edge_index)
        reach = radii.index_select(0, edge_index[0]) + radii.index_select(0, edge_index[1])
        s = x * (z.pow(self.a_exp) + other.pow(self.a_exp)) / (BOHR * self.a_prefactor)
        parts = [c * torch.exp(-d * s) for c, d in zip(self.c.unbind(), RATES, strict=True)]
        energies = (0.5 * COULOMB) * (z * other) / x * sum(parts) * self.envelope(x / reach)
        nodes = node_attrs.shape[0]
        graph = self.call.graph(edge_index, nodes, nodes)
        return totals(energies, rows_of_edges(graph)).squeeze(1)
