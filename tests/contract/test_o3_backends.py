"""The backend of a module: the one that is asked for serves every part, or BackendError.

Seen red with: a backend not handed to products, nor to sums over edges, nor to rows of elements;
matrices never refused; tables of pairs that ask torch's dispatcher while torch.compile traces.
"""

import pytest
import torch

from tests.conftest import BACKENDS, INTERPRETED
from torchweft import explain, o3
from torchweft.errors import BackendError
from torchweft.o3.backends import EXECUTORS, executor
from torchweft.testing import assert_within_bound

pytestmark = pytest.mark.kernels

SRC, DST = torch.tensor([0, 1, 2, 2, 0]), torch.tensor([1, 0, 1, 2, 1])
IRREPS = "3x0e+3x1o", "0e+1o", "3x0e+3x1o"
UVU, UVW = (
    [(0, 0, 0, mode, True), (1, 1, 0, mode, True), (0, 1, 1, mode, True)] for mode in ("uvu", "uvw")
)
PAIRS = [(0, 0, 0, "u<vw", True)]


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def product(instructions=UVU, shared=False, irreps=IRREPS, **options):
    """A module without weights of its own, and inputs."""
    tp = o3.TensorProduct(
        *irreps, instructions, internal_weights=False, shared_weights=shared, **options
    )
    inputs = normal(5, tp.irreps_in1.dim), normal(5, tp.irreps_in2.dim)
    return tp, (*inputs, normal(*(() if shared else (5,)), tp.weight_numel))


def conv(instructions=UVU, shared=False, **options):
    tp = o3.TensorProductConv(*IRREPS, instructions, shared_weights=shared, **options)
    weight = normal(*(() if shared else (5,)), tp.weight_numel)
    return tp, (normal(3, 12), normal(5, 4), weight, SRC, DST)


def linear(shared=True, **options):
    tp = o3.Linear(
        "3x0e+3x1o", "3x0e+3x1o", internal_weights=False, shared_weights=shared, **options
    )
    return tp, (normal(5, 12), normal(*(() if shared else (5,)), tp.weight_numel))


def contraction(**options):
    torch.manual_seed(0)
    module = o3.SymmetricContraction("3x0e+3x1o", "3x0e+3x1o", 2, 2, **options)
    return module, (normal(5, 12), torch.tensor([0, 1, 1, 0, 1]))


CHANNELWISE = {
    "product": product,
    "product, shared": lambda **options: product(shared=True, **options),
    "conv": conv,
    "conv, shared": lambda **options: conv(shared=True, **options),
    "contraction": contraction,
}
MIXING = {
    "uvw": lambda **options: product(UVW, **options),
    "uvw, shared": lambda **options: product(UVW, shared=True, **options),
    "conv uvw": lambda **options: conv(UVW, **options),
    "conv uvw, shared": lambda **options: conv(UVW, shared=True, **options),
    "linear": linear,
    "linear, own": lambda **options: linear(shared=False, **options),
}


def served(make, backend):
    """The backends of forward and backward, once the numbers are right."""
    module, inputs = make(backend=backend)
    exact_module = make(backend="torch")[0].double()
    wide = [a.double() if a.is_floating_point() else a for a in inputs]
    exact = exact_module(*wide)
    leaves = [a.requires_grad_() if a.is_floating_point() else a for a in inputs]

    def call():
        z = module(*leaves)
        z.square().sum().backward()
        return z

    assert_within_bound(module(*inputs), exact, exact.abs() + exact.abs().max(), 64)
    return {launch.backend for launch in explain(call).launches}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CHANNELWISE)
@pytest.mark.singly  # each item compiles for seconds
def test_channelwise(name, backend):
    assert served(CHANNELWISE[name], backend) == {backend}


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "numba"])
@pytest.mark.parametrize("name", MIXING)
def test_mixing(name, backend):
    found = served(MIXING[name], backend)
    assert found <= {backend}
    assert found or backend == "torch"  # matrix products of torch are no launches of ours


@pytest.mark.skipif(INTERPRETED, reason="there triton serves the CPU")
@pytest.mark.parametrize("name", [*CHANNELWISE, *MIXING])
def test_triton_serves_no_tensors_of_the_cpu(name):
    module, inputs = (CHANNELWISE | MIXING)[name](backend="triton")
    with pytest.raises(BackendError, match="triton serves GPU tensors, these are on cpu"):
        module(*inputs)


@pytest.mark.parametrize("name", MIXING)
def test_numba_mixes_no_copies(name):
    module, inputs = MIXING[name](backend="numba")
    with pytest.raises(BackendError, match="'numba' was asked for weights that mix copies, in"):
        module(*inputs)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "torch"])
def test_pairs_of_copies_are_torchs(backend):
    module, inputs = product(PAIRS, irreps=("3x0e", "3x0e", "2x0e"), backend=backend)
    with pytest.raises(BackendError, match=f"backend='{backend}' was asked for pairs of copies"):
        module(*inputs)
    own, inputs = linear(backend=backend, f_in=1, f_out=1)
    with pytest.raises(BackendError, match=f"'{backend}' was asked for weights that mix copies"):
        own(inputs[0].unsqueeze(1), normal(1, 1, own.weight_numel))


def test_classes_hand_it_down():
    for layer in (
        o3.FullyConnectedTensorProduct("0e", "0e", "0e", backend="torch"),
        o3.ElementwiseTensorProduct("0e", "0e", backend="torch"),
        o3.FullTensorProduct("0e", "0e", backend="torch"),
        o3.TensorSquare("0e", backend="torch"),
    ):
        assert layer.recipe.backend == layer.backend == "torch"
    module, inputs = product(backend="cuda")
    with pytest.raises(BackendError, match="there is no such backend"):
        module(*inputs)


@pytest.mark.skipif(INTERPRETED, reason="the doors are checked without TRITON_INTERPRET")
@pytest.mark.parametrize("name", ["conv", "linear"])
def test_compiled(name):
    module, inputs = (CHANNELWISE | MIXING)[name](backend="torch")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    exact = module(*inputs).double()
    assert_within_bound(compiled(*inputs), exact, exact.abs() + exact.abs().max(), 64)


@pytest.mark.skipif(INTERPRETED, reason="the doors are checked without TRITON_INTERPRET")
@pytest.mark.parametrize("mode", ["uvw", "uvu", "uvv", "uuw", "uuu", "uvuv", "u<vw", "uvu<v"])
def test_every_mode_is_one_graph(mode):
    torch.compiler.reset()
    copies = {"uvuv": 9, "uvu<v": 3}.get(mode, 3)
    irreps = "3x0e+3x1o", "3x0e+3x1o", f"{copies}x0e+{copies}x1e"
    paths = [(0, 0, 0, mode, False), (1, 1, 1, mode, False)]
    if mode not in ("uvuv", "uvu<v"):
        paths = [(*path[:4], True) for path in paths]
    module, inputs = product(paths, irreps=irreps)
    inputs = inputs if module.weight_numel else inputs[:2]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    exact = module(*inputs).double()
    assert_within_bound(compiled(*inputs), exact, exact.abs() + exact.abs().max(), 64)


@pytest.mark.parametrize(
    ("topic", "backend"), [(t, b) for t, table in EXECUTORS.items() for b in table]
)
def test_every_executor_can_be_imported(topic, backend):
    """The one table of modules that are imported by name."""
    package = {"triton": "triton", "numba": "numba", "few": "numba"}.get(backend, "torch")
    pytest.importorskip(package)
    assert executor(topic, backend).__name__.startswith(f"torchweft.o3.{topic}.")


TORCH_ONLY = {
    "Activation": lambda **o: o3.Activation("0e", [torch.tanh], **o),
    "BatchNorm": lambda **o: o3.BatchNorm("0e", **o),
    "Dropout": lambda **o: o3.Dropout("0e", 0.5, **o),
    "Gate": lambda **o: o3.Gate("0e", [torch.tanh], "0e", [torch.tanh], "1o", **o),
    "Identity": lambda **o: o3.Identity("0e", "0e", **o),
    "LayerNorm": lambda **o: o3.LayerNorm("0e", **o),
    "Norm": lambda **o: o3.Norm("0e", **o),
    "NormActivation": lambda **o: o3.NormActivation("0e", torch.tanh, **o),
    "SO2Linear": lambda **o: o3.SO2Linear("0e", "0e", **o),
}


@pytest.mark.parametrize("name", TORCH_ONLY)
def test_layers_of_torchs_operations(name):
    make = TORCH_ONLY[name]
    assert make().backend is None
    assert make(backend="torch").backend == "torch"
    for backend, reason in (("triton", "has no kernels"), ("numba", "has no"), ("cuda", "is none")):
        with pytest.raises(
            BackendError, match=f"'{backend}' was asked for {name}, for which it {reason}"
        ):
            make(backend=backend)


ROWS = {
    "SphericalHarmonics": (lambda **o: o3.SphericalHarmonics([0, 1, 2], True, **o), 3),
    "spherical_harmonics": (
        lambda **o: lambda x: o3.spherical_harmonics([0, 1, 2], x, True, **o),
        3,
    ),
    "BesselBasis": (lambda **o: o3.BesselBasis(5.0, **o), 1),
    "PolynomialCutoff": (lambda **o: o3.PolynomialCutoff(5.0, **o), 1),
    "RadialBasis": (lambda **o: o3.RadialBasis(5.0, **o), 1),
}


@pytest.mark.parametrize("name", ROWS)
def test_functions_of_rows(name):
    """The requested backend serves few rows too, or raises."""
    make, width = ROWS[name]
    x = normal(7, width).abs()
    exact = make(backend="torch")(x.double())
    for backend in ("torch", "triton", "numba"):
        call = make(backend=backend)
        served = {"torch": True, "triton": INTERPRETED, "numba": not INTERPRETED}
        if served[backend]:
            assert_within_bound(call(x), exact, exact.abs() + exact.abs().max(), 64)
            found = {launch.backend for launch in explain(call, x).launches}
            assert found == ({backend} - {"torch"})
        else:
            with pytest.raises(BackendError, match=f"'{backend}'"):
                call(x)


def test_harmonics_beyond_the_kernels():
    x = normal(7, 3)
    for degree in (0, 7):
        o3.SphericalHarmonics([degree], True, backend="torch")(x)
        backend = "triton" if INTERPRETED else "numba"
        with pytest.raises(BackendError, match="harmonics of the degrees"):
            o3.SphericalHarmonics([degree], True, backend=backend)(x)
