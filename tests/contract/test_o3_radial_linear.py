"""The contract of products whose weights are h A: values, derivatives, doors, memory, errors.

The cases are in weft.testing.cases.radial_linear.
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.conftest import BACKENDS, INTERPRETED
from weft import o3
from weft.errors import DTypeError, ShapeError
from weft.o3 import radial_linear_blocks as blocks
from weft.testing.cases.channelwise import GRAPHS, STRUCTURES
from weft.testing.cases.radial_linear import make_case, suite
from weft.testing.contract import BODY_CHECKS, Setting, assert_same_bits, check_values, judge
from weft.testing.doors import DOOR_CHECKS, check_numerical

SUITE = suite()
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
UVU = STRUCTURES["uvu"]
native = pytest.mark.skipif(INTERPRETED, reason="kernels run in the interpreter, doors without it")
SETTINGS = [
    pytest.param(
        case, Setting(dtype=dtype, backend=backend, order=order), id=f"{case.name}-{dtype}"
    )
    for backend in BACKENDS
    for i, case in enumerate(SUITE.cases)
    for j, dtype in enumerate(DTYPES)
    if i % len(DTYPES) == j and ("hub" not in case.name or not INTERPRETED)
    for order in [2 if backend == "torch" else 1]
]


@pytest.fixture(params=[2**25, 2**10], ids=["whole", "in blocks"])
def room(request, monkeypatch):
    """Of the weights of a block: of all edges, or of a few."""
    monkeypatch.setitem(blocks.ROOM, "cpu", request.param)


@pytest.mark.parametrize(("case", "setting"), SETTINGS)
@pytest.mark.usefixtures("room")
def test_values_and_derivatives(case, setting):
    check_values(case, setting)


@pytest.mark.parametrize("case", SUITE.full, ids=lambda case: case.name)
@pytest.mark.parametrize("check", BODY_CHECKS[1:])
@pytest.mark.usefixtures("room")
def test_promises(check, case):
    backend = BACKENDS[-1]
    check(case, Setting(backend=backend, order=2 if backend == "torch" else 1))


@native
@pytest.mark.parametrize("case", SUITE.doors, ids=lambda case: case.name)
@pytest.mark.parametrize("check", DOOR_CHECKS)
def test_doors(check, case):
    check(case)


@native
@pytest.mark.parametrize("case", SUITE.small, ids=lambda case: case.name)
def test_numerical_gradients(case):
    check_numerical(case)


@native
@pytest.mark.usefixtures("room")
def test_third_derivatives():
    """Sums of several terms, with weights that are sums of products, are differentiated too."""
    case = make_case("third", STRUCTURES["uuu"], GRAPHS["two sets"])
    setting = Setting(backend="torch")
    problem = setting.pose(case)

    def third(function, problem):
        leaves = [t.clone().requires_grad_() for t in problem.inputs]
        total = (function(*leaves, **problem.tables) * problem.cotangent).sum()
        for _ in range(3):
            gradients = torch.autograd.grad(total, leaves, create_graph=True)
            total = sum((g * t).sum() for g, t in zip(gradients, problem.tangents, strict=True))
        return {f"input {i}": g.detach() for i, g in enumerate(gradients)}

    judge(case, problem, third, third(case.call, problem), "third derivatives")


@native
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_all_edges_are_never_in_memory(backend, monkeypatch):
    """Nothing that torch allocates, in bodies too, is as large; forward and both derivatives."""
    monkeypatch.setitem(blocks.ROOM, "cpu", 2**20)
    conv = o3.TensorProductConv(
        "64x0e", "0e+1o", "64x0e+64x1o", [(0, 0, 0, "uvu", True), (0, 1, 1, "uvu", True)] * 5,
        backend=backend,
    )  # fmt: skip
    edges, generator = 4000, torch.Generator().manual_seed(0)
    src, dst = torch.randint(40, (2, edges), generator=generator)
    sizes = ((40, 64), (edges, 4), (edges, 8), (8, conv.weight_numel))
    leaves = [torch.randn(s, generator=generator).requires_grad_() for s in sizes]
    x, y, h, a = leaves
    graph = o3.Graph(src, dst, 40)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        z = conv(x, y, None, graph, radial=h, radial_weight=a)
        first = torch.autograd.grad(z.square().sum(), leaves, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    events = profiled.profiler.kineto_results.events()
    largest = max(event.nbytes() for event in events if event.name() == "[memory]")
    assert 2**19 < largest < edges * conv.weight_numel  # a quarter of their bytes


@native
class TestConvolution:
    @staticmethod
    def layer(modes="uvu", **options):
        paths = [(0, 0, 0, modes, True), (0, 1, 1, "uvu", True), (1, 1, 0, "uvu", False)]
        return o3.TensorProductConv("4x0e+4x1o", "0e+1o", "4x0e+4x1o", paths, **options).double()

    @staticmethod
    def data(conv):
        generator = torch.Generator().manual_seed(0)
        src, dst = torch.randint(6, (2, 20), generator=generator)
        sizes = ((6, 16), (20, 4), (20, 3), (3, conv.weight_numel))
        tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes]
        return *tensors, o3.Graph(src, dst, 6)

    @pytest.mark.parametrize("modes", ["uvu", "uvw"])
    def test_paths_without_weights_and_modes_that_mix(self, modes):
        conv = self.layer(modes)
        x, y, h, a, graph = self.data(conv)
        found = conv(x, y, None, graph, radial=h, radial_weight=a)
        assert_same_bits(found, conv(x, y, h @ a, graph), modes)

    def test_errors(self):
        conv = self.layer()
        x, y, h, a, graph = self.data(conv)
        with pytest.raises(ShapeError, match=r"radial is \(5, 3\) but the graph has 20 edges"):
            conv(x, y, None, graph, radial=h[:5], radial_weight=a)
        with pytest.raises(DTypeError, match=r"radial_weight is torch.float32"):
            conv(x, y, None, graph, radial=h, radial_weight=a.float())
        with pytest.raises(DTypeError, match="precision is 'bf16': it must be one of tf32x3, tf32"):
            self.layer(precision="bf16")

    def test_graphs_cannot_be_mapped(self):
        conv = self.layer()
        x, y, h, a, graph = self.data(conv)

        def run(src):
            return conv(x, y, None, src, graph.dst.long(), 6, radial=h, radial_weight=a)

        with pytest.raises(ShapeError, match=r"mapped by torch.vmap|given to torch.vmap"):
            torch.vmap(run)(graph.src.long().expand(2, -1))
