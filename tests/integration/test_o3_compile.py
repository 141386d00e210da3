"""A potential with forces through torch's own machinery: compiled, exported, ahead of time.

torch.export by itself takes gradients inside a module where no operation saves its own result:
sigmoid or a norm become constants there (torch 2.13).  `make_fx` before it writes all of them down.

Seen red with: a gradient of the registered operator that is 1.0001 times as large, sizes read as
Python numbers, a mask in the state.
"""

import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

from tests.conftest import INTERPRETED
from torchweft import o3
from torchweft.testing import assert_as_accurate, plain_error
from torchweft.testing.contract import assert_same_bits

if INTERPRETED:
    pytest.skip("torch.compile is checked without TRITON_INTERPRET", allow_module_level=True)

pytestmark = pytest.mark.slow

CHANNELS, ELEMENTS, CUTOFF, BASIS = 2, 3, 2.0, 4


class Potential(torch.nn.Module):
    """Two convolutions, a gate between: energies of atoms, and forces as gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        scalars, vectors = o3.Irreps([(CHANNELS, "0e")]), o3.Irreps([(CHANNELS, "1o")])
        self.harmonics = o3.SphericalHarmonics("0e+1o", True, "component")
        self.bessel = o3.BesselBasis(CUTOFF, BASIS)
        self.envelope = o3.PolynomialCutoff(CUTOFF)
        self.embedding = torch.nn.Embedding(ELEMENTS, CHANNELS)
        self.gate = o3.Gate(scalars, [torch.tanh], scalars, [torch.sigmoid], vectors)
        self.first = self.conv(scalars, [(0, 0, 0), (0, 1, 1)], scalars + vectors)
        self.mix = o3.Linear(self.first.irreps_out, self.gate.irreps_in, num_elements=ELEMENTS)
        self.second = self.conv(self.gate.irreps_out, [(0, 0, 0), (1, 1, 1)], scalars + scalars)
        self.last = o3.Linear(self.second.irreps_out, "0e")
        sizes = (self.first.weight_numel, self.second.weight_numel)
        self.radial = torch.nn.ParameterList(torch.randn(BASIS, size) for size in sizes)

    def conv(self, irreps, paths, out):
        instructions = [(*path, "uvu", True) for path in paths]
        return o3.TensorProductConv(irreps, self.harmonics.irreps_out, out, instructions)

    def energies(self, position, element, src, dst):
        graph = o3.Graph(src, dst, position.shape[0])  # sorted once for both layers
        across = position[src] - position[dst]
        lengths = across.norm(dim=1, keepdim=True)
        y, radial = self.harmonics(across), self.bessel(lengths) * self.envelope(lengths)

        h, (first, second) = self.embedding(element), self.radial
        h = self.gate(self.mix(self.first(h, y, radial @ first, graph), element=element))
        h = self.second(h, y, None, graph, radial=radial, radial_weight=second)
        return self.last(h).squeeze(1)

    def forward(self, position, element, src, dst):
        """(N,) and (N, 3)."""
        if not position.requires_grad:
            position = position.detach().requires_grad_()
        energies = self.energies(position, element, src, dst)
        (slope,) = torch.autograd.grad(energies.sum(), position, create_graph=True)
        return energies, -slope


def atoms(number, edges, seed=0):
    generator = torch.Generator().manual_seed(seed)
    position = torch.rand(number, 3, generator=generator)
    element = torch.randint(ELEMENTS, (number,), generator=generator)
    src, dst = torch.randint(number, (2, edges), generator=generator)
    return position, element, src, dst


def evaluated(model, position, *rest):
    """Energies and forces in the model's precision."""
    return model(position.to(model.embedding.weight.dtype), *rest)


def trained(model, position, *rest):
    """Energies, forces, and the gradients of a loss of both by the parameters."""
    position = position.to(model.embedding.weight.dtype).requires_grad_()
    energies, forces = model(position, *rest)
    loss = energies.square().sum() + forces.square().sum()
    return [energies, forces, *torch.autograd.grad(loss, list(model.parameters()))]


def flat(results, exact):
    """All numbers, each result in units of its largest: few numbers alone are a matter of luck."""
    pairs = zip(results, exact, strict=True)
    return torch.cat([(r.detach() / float(e.detach().abs().max())).flatten() for r, e in pairs])


def assert_as_eager(run, found, sizes, seed):
    """As accurate as the eager potential in float32, whose error is known from 16 inputs."""
    model, double, noise = Potential(), Potential().double(), []
    for other in range(16):
        given = atoms(*sizes, seed + other)
        exact = run(double, *given)
        plain, wide = flat(run(model, *given), exact), flat(exact, exact)
        noise.append(plain_error(plain, wide, torch.float32))
        if not other:
            results, accurate = flat(found, exact), wide
    assert_as_accurate(results, accurate, torch.stack(noise))


@torch._dynamo.config.patch(trace_autograd_ops=True)
def test_force_training_is_one_graph_for_all_sizes():
    torch.compiler.reset()
    model, counter = Potential(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for sizes in ((7, 20), (9, 31), (5, 44)):
        given = atoms(*sizes)
        for a, b in zip(trained(compiled, *given), trained(model, *given), strict=True):
            assert_same_bits(a, b, "compiled")
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1]


@torch._dynamo.config.patch(trace_autograd_ops=True)
def test_force_training_by_inductor(tmp_path, monkeypatch):
    # its cache does not look at torchweft's derivatives
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    compiled = torch.compile(Potential(), fullgraph=True, dynamic=True)
    for seed, sizes in enumerate(((7, 20), (9, 31))):
        found = trained(compiled, *atoms(*sizes, seed))
        assert_as_eager(trained, found, sizes, seed)


@pytest.mark.parametrize("strict", [False, True])
@torch._dynamo.config.patch(trace_autograd_ops=True)
def test_export_takes_gradients_inside(strict):
    class Slope(torch.nn.Module):
        conv = Potential().first

        def forward(self, x, y, weight, src, dst):
            y = y.detach().requires_grad_()
            z = self.conv(x, y, weight, o3.Graph(src, dst, x.shape[0]))
            return torch.autograd.grad(z.square().sum(), y)[0]

    def data(number, edges):
        sizes = (number, CHANNELS), (edges, 4), (edges, Slope.conv.weight_numel)
        return (*(torch.randn(size) for size in sizes), *atoms(number, edges)[2:])

    number, edges = torch.export.Dim("atoms", min=2), torch.export.Dim("edges", min=2)
    shapes = ({0: number}, *[{0: edges}] * 4)
    program = torch.export.export(Slope(), data(7, 20), dynamic_shapes=shapes, strict=strict)
    for sizes in ((9, 31), (5, 44)):
        given = data(*sizes)
        assert_same_bits(program.module()(*given), Slope()(*given), "exported")


class TestExported:
    """make_fx writes the gradients down, torch.export the rest."""

    @staticmethod
    def program():
        model, given = Potential(), atoms(7, 20)
        graph = make_fx(model, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*given)
        number, edges = torch.export.Dim("atoms", min=2), torch.export.Dim("edges", min=2)
        shapes = ({0: number}, {0: number}, {0: edges}, {0: edges})
        return torch.export.export(graph, given, dynamic_shapes=shapes)

    def test_of_any_size(self, tmp_path):
        program = self.program()
        torch.export.save(program, tmp_path / "potential.pt2")
        for module in (program.module(), torch.export.load(tmp_path / "potential.pt2").module()):
            for sizes in ((9, 31), (5, 44)):
                given = atoms(*sizes)
                for a, b in zip(module(*given), Potential()(*given), strict=True):
                    assert_same_bits(a, b, "exported")

    @pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch about itself
    def test_compiled_ahead_of_time(self, tmp_path):
        """AOTInductor; the process that runs it has loaded torchweft.o3, which registers ops."""
        package, sizes = tmp_path / "potential.pt2", (9, 31)
        torch._inductor.aoti_compile_and_package(
            self.program(),
            package_path=str(package),
            inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
        )
        torch.save(atoms(*sizes), tmp_path / "given.pt")
        code = (
            "import sys, torch, torchweft.o3\n"
            "package, given, results = sys.argv[1:]\n"
            "run = torch._inductor.aoti_load_package(package)\n"
            "torch.save(run(*torch.load(given)), results)\n"
        )
        paths = [str(tmp_path / name) for name in ("potential.pt2", "given.pt", "results.pt")]
        subprocess.run([sys.executable, "-c", code, *paths], check=True)
        found = torch.load(tmp_path / "results.pt")
        assert_as_eager(evaluated, found, sizes, 0)


def test_state_holds_what_is_learned_alone():
    """No tables: these are made anew, in float64, whatever the dtype of the module."""
    model = Potential()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
