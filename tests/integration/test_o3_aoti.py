"""Energy and forces of a model in one package of AOTInductor, for any number of atoms and edges.

The forces' gradient is traced into the graph before it is exported; torchweft's operators stay
operators, so that the process that loads the package imports torchweft.
"""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torchweft import o3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),  # of torch's own code
]


class Model(torch.nn.Module):
    """One convolution over edges, and a readout."""

    def __init__(self):
        super().__init__()
        self.harmonics = o3.SphericalHarmonics([0, 1], True, "component")
        paths = [(0, 0, 0, "uvu", True), (0, 1, 1, "uvu", True)]
        self.conv = o3.TensorProductConv("4x0e", self.harmonics.irreps_out, "4x0e+4x1o", paths)
        self.norm = o3.Norm("4x0e+4x1o", squared=True)
        self.bessel, self.cutoff = o3.BesselBasis(3.0, 8), o3.PolynomialCutoff(3.0)
        self.radial = torch.nn.Linear(8, self.conv.weight_numel, bias=False)

    def forward(self, x, vectors, src, dst):
        length = vectors.norm(dim=1, keepdim=True)
        weight = self.radial(self.bessel(length) * self.cutoff(length))
        return self.norm(self.conv(x, self.harmonics(vectors), weight, src, dst)).sum()


def problem(atoms):
    generator = torch.Generator().manual_seed(atoms)
    positions = torch.randn(atoms, 3, generator=generator, dtype=torch.float64) * 2
    src, dst = (torch.cdist(positions, positions) < 3).fill_diagonal_(False).nonzero().T
    x = torch.randn(atoms, 4, generator=generator, dtype=torch.float64)
    return positions, x, src.contiguous(), dst.contiguous()


def test_a_package_has_energy_and_forces_of_other_sizes(tmp_path):
    model = Model().double().requires_grad_(False)

    def forces(positions, x, src, dst):
        positions = positions.detach().requires_grad_()
        energy = model(x, positions[dst] - positions[src], src, dst)
        (slope,) = torch.autograd.grad(energy, positions)
        return energy.detach(), -slope

    class Traced(torch.nn.Module):
        def __init__(self, traced):
            super().__init__()
            self.traced = traced

        def forward(self, positions, x, src, dst):
            return self.traced(positions, x, src, dst)

    traced = make_fx(forces, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*problem(7))
    atoms, edges = torch.export.Dim("atoms", min=2), torch.export.Dim("edges", min=2)
    sizes = {"positions": {0: atoms}, "x": {0: atoms}, "src": {0: edges}, "dst": {0: edges}}
    exported = torch.export.export(Traced(traced), problem(7), dynamic_shapes=sizes)
    path = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "model.pt2")
    )
    loaded = torch._inductor.aoti_load_package(path)
    for size in (7, 5, 40):
        for found, exact in zip(loaded(*problem(size)), forces(*problem(size)), strict=True):
            scale = float(exact.abs().max())
            assert float((found - exact).abs().max()) <= scale * 2.0**-52 * len(problem(size)[2])
